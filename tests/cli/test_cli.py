"""The command: verbs and their errors, the cache, what it shows and lists."""

import errno
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_line import Capture, Patch, confed, refusal
from confed import registry
from confed.cli import list as list_command
from confed.cli.app import RENAMED, command_line
from confed.cli.catalogue import declared, first_line, listing, packaged, papers, required
from confed.cli.dataset_description import describe
from confed.cli.description import Description, describe_name, names, settings
from confed.cli.list import diagnose, page
from confed.data.croissant import METADATA, write_croissant
from confed.federation.traits import GROUPS
from confed.recipes.recipe import load_recipe
from confed.recipes.run_section import KeptFeatures, RunSection
from confed.registry import Registry, algorithms, datasets, models, tasks
from confed.runs.build import _features  # pyright: ignore[reportPrivateUsage]
from confed.runs.run import Runner
from confed.system.format import size
from refusals import refuses
from toy_federation import squares

TINY = [
    "fedvqa_scenes", "model.name=vilt_tiny", "data.train=40", "data.validation=20", "data.test=40",
    "data.unseen=[]", "run.workers=1", "run.gallery=1", "run.controls=none", "local.epochs=1",
    "local.eval_batch_size=100",
]  # fmt: skip
SINGLE = [*TINY, "study.methods=[]", "algorithm.name=fedavg", "data.preset=quantity", "data.clients=2"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "study"
    assert confed("run", *TINY, "run.rounds=1", 'study.methods=["local", "fedavg"]', "--out", str(folder)) == 0
    return folder


def test_a_study_prints_rounds_headlines_and_a_table(tmp_path: Path, capfd: Capture):
    folder = tmp_path / "study"
    arguments = [*TINY, "run.rounds=2", "run.evaluate_every=0", 'study.methods=["local", "fedavg"]']
    assert confed("run", *arguments, "--out", str(folder)) == 0
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert [line.partition(", loss")[0] for line in lines if ", loss" in line] == [
        f"[{number}/2] {method}, seed 0: round {round}/2"
        for number, method in ((1, "Local only"), (2, "FedAvg"))
        for round in (1, 2)
    ]
    assert sum("personal" in line and "worst client" in line for line in lines) == 2
    assert "FedAvg" in out
    assert f"report: {folder}/report.html" in out
    assert (folder / "report.html").is_file()
    assert "exists already" in refusal(capfd, "run", *arguments, "--out", str(folder))


MODAL = ["modalities", "data.train=20", "data.validation=4", "data.test=4", "run.rounds=1", "run.evaluate_every=0",
         "run.gallery=0", "run.workers=1", "run.modality_matrix=false", "model.layers=1"]  # fmt: skip


@pytest.mark.filterwarnings("default")
def test_warnings_are_a_line_each_said_once(tmp_path: Path, capfd: Capture):
    methods = 'study.methods=["fedavg_ft", "modality_dropout"]'
    assert confed("run", *MODAL, methods, "model.max_length=5", "--out", str(tmp_path / "study")) == 0
    lines = capfd.readouterr().err.splitlines()
    (told,) = (line for line in lines if "lose their end" in line)
    assert told.startswith("warning: ")
    assert "model.max_length = 5" in told
    assert not any("UserWarning" in line for line in lines)
    # The phase after the last round is no round.
    own = [line.partition(", seed 0: ")[2] for line in lines if "loss" in line and "FedAvg + FT" in line]
    assert [line.partition("loss")[0] for line in own] == ["round 1/1, ", "fine-tuning, "]


def test_json_is_all_there_is_on_stdout(study: Path, tmp_path: Path, capfd: Capture):
    picture = tmp_path / "picture.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture)
    run = study / "fedavg/seed-0"
    ask = ["predict", run, "--image", picture, "--question", "is there a dog?"]
    capfd.readouterr()
    for arguments in (
        ["resume", study], ["report", study, "--figures"], ["list", "recipes"], ["doctor"], ["compare", study],
        [*ask, "--client", "sports"], ["export", run, tmp_path / "out"],
        ["data", "describe", "scenes", "train=40", "validation=20", "test=40"],
    ):  # fmt: skip
        assert confed(*arguments, "--json") == 0, arguments
        assert json.loads(capfd.readouterr().out), arguments
    assert (study / "figures/clients.png").is_file()
    assert confed(*ask) == 0
    assert capfd.readouterr().out.count("%") == 3


def test_rows_of_one_method_are_not_taken_for_seeds(tmp_path: Path, capfd: Capture):
    rows = ['study.methods=["mild", "strong"]', "methods.mild={name='fedprox', mu=0.01}",
            "methods.strong={name='fedprox', mu=10}"]  # fmt: skip
    folder = tmp_path / "study"
    few = ("run.rounds=1", "run.gallery=0", "run.evaluate_every=0", "data.preset=quantity", "data.clients=2")
    for arguments in (["run", *TINY, *few, *rows, "--out", folder], ["resume", folder], ["report", folder]):
        assert confed(*arguments) == 0
        out = capfd.readouterr().out
        assert "FedProx (mild)" in out
        assert "FedProx (strong)" in out
        assert "±" not in out
    # A folder whose index has the same label twice.
    index = json.loads((folder / "summary.json").read_text())
    assert index["labels"] == {"mild": "FedProx (mild)", "strong": "FedProx (strong)"}
    index["labels"] = dict.fromkeys(index["labels"], "FedProx")
    (folder / "summary.json").write_text(json.dumps(index))
    for verb in ("resume", "report"):
        assert confed(verb, folder, "--json") == 0
        runs = json.loads(capfd.readouterr().out)["runs"]
        assert [run["label"] for run in runs] == ["FedProx (mild)", "FedProx (strong)"]


def test_compare_writes_its_tables(study: Path, tmp_path: Path, capfd: Capture):
    assert confed("compare", study, "--out", tmp_path / "tables") == 0
    names = {p.name for p in (tmp_path / "tables").iterdir()}
    assert names == {"compare.md", "compare.csv", "compare.tex", "compare-clients.csv", "compare-seeds.csv"}
    out = capfd.readouterr().out
    assert "Local only" in out
    assert "compare-clients.csv" in out
    assert confed("compare", study, "--reference", "fedp3") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--foo"], "--foo"),
        (["run", "nope"], "no recipe at 'nope': "),
        (["run", "algorithm.lamb=1", "study.methods=[]"], "did you mean 'lam'"),
        (["run", "--seeds", "0"], "seeds must be at least 1"),
        (["run", "--seeds", "many"], "many"),
        (["frobnicate"], "frobnicate"),
        (["data"], "Missing command"),
        (["resume", "nowhere"], "nowhere is neither a run folder"),
        (["list", "foo"], "kind must be one of methods"),
        (["predict", "nowhere", "--image", "a.png", "--question", "b"], "nowhere is not a run folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Patch, capfd: Capture
):
    monkeypatch.chdir(tmp_path)
    assert confed(*arguments, *(["--json"] if arguments[0] not in ("data", "frobnicate") else [])) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_version_and_failures(tmp_path: Path, capfd: Capture, monkeypatch: Patch):
    assert confed("--version") == 0
    assert capfd.readouterr().out.startswith("confed 0.")
    monkeypatch.setattr("sys.argv", ["confed", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("confed", run_name="__main__")
    assert capfd.readouterr().out.startswith("confed 0.")
    assert confed() == 0
    assert confed("run", "--help") == 0
    assert "A file, or a packaged recipe's name" in " ".join(capfd.readouterr().out.split())
    (tmp_path / "file").write_text("")
    assert confed("run", *SINGLE, "run.rounds=1", "--out", tmp_path / "file/run") == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("failed: ")

    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("confed.cli.list.diagnose", interrupted)
    assert confed("doctor") == 130


def test_ctrl_c_then_resume_gives_the_uninterrupted_run(tmp_path: Path, monkeypatch: Patch, capfd: Capture):
    arguments, after = [*SINGLE, "run.rounds=4", "run.evaluate_every=2"], Runner._after

    def interrupted(runner: Runner, *arguments: Any) -> None:
        after(runner, *arguments)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_after", interrupted)
        assert confed("run", *arguments, "--out", tmp_path / "cut") == 130
    rest = capfd.readouterr().err
    assert f"confed resume {tmp_path / 'cut'}" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "cut/summary.json").exists()
    assert confed("resume", tmp_path / "cut") == 0
    assert confed("run", *arguments, "--out", tmp_path / "whole") == 0
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_full_disk_is_named_and_the_run_can_go_on(tmp_path: Path, monkeypatch: Patch, capfd: Capture):
    folder, original, writes = tmp_path / "run", os.replace, []

    def full(source: Path, target: Path) -> None:
        writes.append(target)
        if len(writes) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert confed("run", *SINGLE, "run.rounds=2", "--out", folder) == 1
    errors = capfd.readouterr().err
    assert "no space left" in errors
    assert "confed resume" in errors
    assert confed("resume", folder, "--json") == 0


def test_wrong_data_leaves_no_folder_behind(tmp_path: Path, capfd: Capture):
    folder = tmp_path / "run"
    assert "nowhere" in refusal(capfd, "run", "fedvqa_ucm", f"data.root={tmp_path / 'nowhere'}", "--out", folder)
    assert not folder.exists()


def test_a_row_that_the_study_leaves_out_is_no_error(tmp_path: Path):
    source = tmp_path / "mine.toml"
    source.write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "vilt_tiny"\n[task]\nname = "vqa"\n'
        '[data]\nname = "scenes"\n[study]\nmethods = ["fedavg", "fedprox"]\n[methods.fedprox]\nmu = 1\n'
    )
    from confed.recipes.recipe import load_recipe

    assert load_recipe(source, ['study.methods=["fedavg"]']).methods == ("fedavg",)
    assert load_recipe(source).method("fedprox").construct("algorithm").mu == 1


def test_a_study_is_asked_through_its_main_method(study: Path, tmp_path: Path, capfd: Capture):
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    capfd.readouterr()
    question = "whit colour is the dog?"
    assert confed("predict", study, "--client", "sports", "--image", tmp_path / "x.png", "--question", question) == 0
    output = capfd.readouterr()
    assert "this is a study: taken is" in output.err
    assert len(output.out.splitlines()) == 3


def test_there_are_few_commands_and_their_help_fits_on_a_screen(capfd: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pending: list[list[str]] = [[]]
    leaves: list[list[str]] = []
    top = list(command_line().commands)
    assert len(top) <= 24
    while pending:
        words = pending.pop()
        assert confed(*words, "--help") == 0
        lines = capfd.readouterr().out.splitlines()
        assert lines[0].startswith(f"Usage: {' '.join(['confed', *words])} ")
        assert len(lines) <= 40, words
        assert max(map(len, lines)) <= 80, words
        if "Commands:" in lines:
            below = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line[:3].strip()]
            pending += [[*words, name] for name in top] if not words else [[*words, name] for name in below]
        else:
            leaves.append(words)
    assert len(leaves) > 30


@pytest.mark.parametrize("earlier", RENAMED)
def test_an_earlier_command_names_the_present_one(earlier: str, capfd: Capture) -> None:
    said = refusal(capfd, *earlier.split(), "x")
    assert said == f"error: confed {earlier} is now: {RENAMED[earlier]}"
    assert RENAMED[earlier].split()[1] in command_line().commands


def test_help_texts_keep_what_stands_in_brackets(capfd: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    for verb, text in (
        ("doctor", "key=value for [data], such as"),
        ("client", "key=value for [data], such as"),
        ("server", "Sites and their keys. [default: sites.json there]"),
    ):
        assert confed(verb, "--help") == 0
        assert text in " ".join(capfd.readouterr().out.replace("│", " ").split())


def test_compare_adds_methods_to_a_study_of_run(tmp_path: Path, capfd: Capture):
    folder = tmp_path / "study"
    few = (*TINY, "run.rounds=1", "run.gallery=0", "run.evaluate_every=0", "data.preset=quantity", "data.clients=2")
    assert confed("run", *few, "--methods", "local,fedbn", "--out", folder) == 0
    out, err = capfd.readouterr()
    assert err.startswith("without FedBN: FedBN keeps")  # said before the others begin, and again at the end
    assert "without fedbn/seed-0: FedBN keeps" in out
    before = (folder / "local/seed-0/summary.json").stat().st_mtime_ns
    assert confed("compare", *few, "--methods", "fedavg", "--workers", "1", "--out", folder) == 0
    assert (folder / "local/seed-0/summary.json").stat().st_mtime_ns == before
    assert (folder / "fedavg/seed-0/summary.json").is_file()
    assert (folder / "compare.md").is_file()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "confed" / "features" / "abc").mkdir(parents=True)
    (tmp_path / "confed" / "features" / "abc" / "x.safetensors").write_bytes(b"12345")
    (tmp_path / "other").mkdir()
    return tmp_path


def test_kept_features_are_listed_and_removed(cache: Path, capfd: Capture) -> None:
    assert confed("data", "cache") == 0
    assert f"1 files, 5 bytes in {cache / 'confed' / 'features'}" in capfd.readouterr().out
    assert confed("data", "cache", "--json") == 0
    assert json.loads(capfd.readouterr().out)["features"]["bytes"] == 5
    assert confed("data", "cache", "--clear") == 0
    assert [path.name for path in (cache / "confed").iterdir()] == []
    assert (cache / "other").is_dir()
    assert confed("data", "cache", "--clear") == 0
    assert confed("data", "cache") == 0


@pytest.mark.parametrize(
    ("machine", "recipe", "kept", "files"),
    [
        ("auto", "auto", True, True), ("off", "auto", False, False), ("memory", "auto", True, False),
        ("auto", "off", False, False), ("auto", "memory", True, False), ("off", "memory", False, False),
    ],
)  # fmt: skip
def test_a_machine_may_switch_keeping_off(
    machine: str, recipe: str, kept: bool, files: bool, cache: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CONFED_FEATURES", machine)
    settings = _features(RunSection(features=KeptFeatures(recipe)))  # pyright: ignore[reportArgumentType]
    assert (settings is not None) == kept
    assert (settings is not None and settings.folder == cache / "confed" / "features") == files
    monkeypatch.setenv("CONFED_FEATURES", "none")
    refuses("CONFED_FEATURES must be auto, memory or off", _features, RunSection())


EVERYTHING = [(kind, name) for kind, listed in names().items() for name in listed]


def described(kind: str, name: str) -> Description:
    (found,) = describe_name(name, kind)
    return found


@pytest.mark.filterwarnings("ignore:the model .* writes its answers")
@pytest.mark.parametrize("kind", names())
def test_pages_fit_80_columns_and_commands_are_valid(kind: str) -> None:
    for name in names()[kind]:
        one = described(kind, name)
        text = [re.sub(r"(?<!\\)\[/?(bold)?\]", "", line).replace("\\[", "[") for line in page(one, 80)]
        commands = {f"  {line}" for line in one.examples}
        wide = [line for whole in text for line in whole.splitlines() if len(line) > 80 and line not in commands]
        assert not wide, (name, wide)
        assert one.summary, name
        assert one.examples, name
        for command in one.examples:
            runs(command)


def runs(command: str) -> None:
    """Check of a command without running it: the recipe, its keys and its rows."""
    words = shlex.split(command)
    if words[:2] != ["confed", "run"]:
        assert words[1] in ("compare", "data", "show"), command
        return
    rest = words[2:]
    rows = rest[rest.index("--methods") + 1].split(",") if "--methods" in rest else []
    given = [word for word in rest if "=" in word]
    source = rest[0] if "=" not in rest[0] else "fedvqa_scenes"
    recipe = load_recipe(source, given)
    if rows:
        recipe.with_rows(rows)


@pytest.mark.parametrize("kind", ["method", "task", "section"])
def test_every_setting_says_what_it_means(kind: str) -> None:
    for name in names()[kind]:
        assert not [setting.name for setting in described(kind, name).settings if not setting.meaning], name


def test_settings_are_those_of_the_constructor() -> None:
    lam = {setting.name: setting for setting in settings(registry.algorithms["fedp3"])}["lam"]
    assert (lam.kind, lam.default, lam.required) == ("number, at least 0", "1.0", False)
    root = {setting.name: setting for setting in settings(registry.datasets["chat_records"])}["root"]
    assert (root.kind, root.required) == ("path", True)
    nested = {setting.name: setting for setting in settings(registry.algorithms["fedavg"])}
    assert nested["server"].kind == "table"
    assert nested["server.optimizer"].default == '"none"'
    assert nested["update_privacy.clip"].required


def test_papers_are_those_of_the_page() -> None:
    found = papers()
    assert set(found) == set(registry.algorithms.names())
    assert "ACM MM 2023" in found["fedp3"].source
    assert any("softmax is monotone" in difference.why for difference in found["fedp3"].differences)
    assert [d.text for d in found["fedkd"].differences] != [d.text for d in found["moon"].differences]
    assert any(difference.text.startswith("KgCoOp") for difference in found["promptfl"].differences)
    assert not any(difference.text.startswith("PmcmFL") for difference in found["modality_transformer"].differences)


def test_groups_are_declared_by_methods() -> None:
    groups = {row["name"]: row["group"] for row in listing("methods")}
    assert set(groups.values()) == set(GROUPS)
    assert (groups["bicsl"], groups["fedavg"], groups["ditto"]) == ("split", "averaging", "personalisation")
    places = [GROUPS.index(row["group"]) for row in listing("methods")]
    assert places == sorted(places)


def test_filters_leave_what_fits_them() -> None:
    assert {row["group"] for row in listing("recipes", task="multilabel")} == {"multilabel"}
    assert "fedlgt" in {row["name"] for row in listing("methods", task="multilabel")}
    assert {row["name"] for row in listing("methods", paper="feddat")} == {"feddat", "fedpeft"}
    assert {row["name"] for row in listing("methods", paper="mcmahan")} == {"fedavg"}
    assert "feddat_scenes" in {row["name"] for row in listing("recipes", paper="FedDAT")}
    refuses("did you mean 'vqa'", listing, "methods", task="vqaa")
    refuses("--paper filters methods and recipes, got 'models'", listing, "models", paper="x")


@pytest.mark.parametrize("kind", ["methods", "models", "tasks", "datasets", "recipes"])
def test_lists_fit_80_columns(kind: str, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert confed("list", kind) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    shown = {word for line in lines for word in line.split()[:1]}
    assert {row["name"] for row in listing(kind)} <= shown


def test_show_prints_suggests_and_writes(tmp_path: Path, capfd: Capture) -> None:
    assert confed("show", "ditto") == 0
    out = capfd.readouterr().out
    for text in ("Li et al., ICML 2021", "lam = 0.1   number, at least 0", "confed run chat_captions --methods ditto"):
        assert text in out
    assert "did you mean fedprox" in refusal(capfd, "show", "fedproxx")
    assert confed("show", "local") == 0  # a method, and a section of recipes
    out = capfd.readouterr().out
    assert "local · Local only (method, references)" in out
    assert "batch_size = 32" in out
    assert confed("show", "local", "--kind", "section", "--json") == 0
    assert [one["kind"] for one in json.loads(capfd.readouterr().out)] == ["section"]
    assert confed("show", "fedvqa_scenes", "--toml") == 0
    (tmp_path / "mine.toml").write_text(capfd.readouterr().out, encoding="utf-8")
    assert load_recipe(tmp_path / "mine.toml").methods == load_recipe("fedvqa_scenes").methods


OWN = """
from dataclasses import dataclass
from confed import Algorithm

@dataclass(frozen=True)
class Gentle(Algorithm):
    \"\"\"FedAvg with a penalty on large scores.

    Attributes:
        lam: weight of the penalty.
    \"\"\"

    lam: float = 0.25

def pictures(*, count: int = 3):
    \"\"\"Pictures of our own.

    Args:
        count: how many.
    \"\"\"
"""


def test_show_describes_what_is_the_user_s_own(tmp_path: Path, capfd: Capture, monkeypatch: Patch) -> None:
    (tmp_path / "shown_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(registry.ALLOWED, "")
    allowed = ("--allow-code", "shown_own")
    assert confed("show", "shown_own:Gentle", *allowed) == 0
    out = capfd.readouterr().out
    for text in ("FedAvg with a penalty", "lam = 0.25", "--methods shown_own:Gentle --allow-code shown_own"):
        assert text in out
    assert confed("show", "shown_own:pictures", "--kind", "dataset", *allowed) == 0
    assert "count = 3   whole number" in capfd.readouterr().out
    for arguments, message in [
        (("shown_own:Gentle",), "which you have not allowed"),
        (("shown_own:pictures", *allowed), "say which with --kind"),
    ]:
        assert message in refusal(capfd, "show", *arguments)
    file = tmp_path / "mine.toml"
    recipe = load_recipe("fedvqa_scenes", ['study.methods=["local", "ditto"]'])
    file.write_text("# Two methods.\n#\n# More.\n" + recipe.to_toml(), encoding="utf-8")
    assert confed("show", str(file)) == 0
    out = capfd.readouterr().out
    assert "Two methods." in out
    assert "local, ditto" in out
    assert confed("show", str(file), "--toml") == 0
    assert capfd.readouterr().out == file.read_text()
    file.write_text("[run]\nround = 3\n", encoding="utf-8")
    assert "algorithm.name must be given" in refusal(capfd, "show", str(file))


def test_every_recipe_is_described() -> None:
    assert {one.name for one in packaged()} == set(names()["recipe"])
    assert all(one.summary for one in packaged())


SMALL = ["train=40", "validation=20", "test=40", 'unseen=["home"]']


@pytest.mark.parametrize(
    ("kind", "name"),
    [("algorithms", "fedp3"), ("models", "vilt_mini"), ("tasks", "vqa"), ("datasets", "scenes"),
     ("recipes", "fedvqa_scenes")],
)  # fmt: skip
def test_everything_registered_is_listed(kind: str, name: str):
    rows = listing(kind)
    row = next(row for row in rows if row["name"] == name)
    assert all(r.keys() == row.keys() for r in rows)
    assert row["summary"]
    assert ":class:" not in json.dumps(rows)


@pytest.mark.parametrize(
    ("kind", "entries"),
    [("methods", algorithms), ("models", models), ("tasks", tasks), ("datasets", datasets)],
)
def test_what_sources_say_is_what_importing_them_says(kind: str, entries: Registry):
    by_name = {one.name: one for one in declared(kind)}
    assert [*by_name] == [name for name in entries.names() if not entries.is_own(name)]
    for name, one in by_name.items():
        entry: Any = entries[name]
        assert one.summary == first_line(entry.__doc__)
        assert one.module == first_line(sys.modules[entry.__module__].__doc__)
        if kind == "methods":
            assert (one.label, one.group) == (entry.traits.label or entry.__name__, entry.traits.group)
        if kind == "datasets":
            assert [*one.required] == required(entry), name


def test_recipes_say_how_long_they_take_where_that_was_measured():
    times = {row["name"]: row["time"] for row in listing("recipes")}
    assert times["fedvqa_scenes"] == "26 s on two cores per method and seed (43 s of processor time with fedp3)"
    assert times["fedlgt_flair"].startswith("not measured: it needs")


def test_algorithms_name_their_source():
    row = next(row for row in listing("algorithms") if row["name"] == "fedp3")
    assert row["source"].startswith('Lao et al., "FedVQA')


def test_contract_says_which_checks_apply():
    rows = listing("algorithms", contract=True)
    verdicts = {row["check"]: row["verdict"] for row in rows if row["name"] == "local"}
    assert verdicts["neutral coefficients give FedAvg"] == "nothing is shared, so it never becomes FedAvg"
    assert verdicts["resumes exactly"] == "applies"


def test_runs_and_their_states(tmp_path: Path):
    recipe = '[algorithm]\nname = "fedavg"\n[run]\nrounds = 6\nseed = 3\n'
    for name in ("whole", "cut", "study/fedavg/seed-3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.toml").write_text(recipe)
    sent = {"bytes_up": {"1": {"a": 1500, "b": 2500}, "2": {"a": 2000}}, "bytes_down": {"1": {"a": 5000, "b": 5000}}}
    (tmp_path / "whole/summary.json").write_text(json.dumps({"recipe": "mine", **sent}))
    (tmp_path / "cut/metrics.jsonl").write_text(
        '{"event": "round", "round": 1}\n{"event": "round", "round": 2}\n{"torn'
    )
    runs = [{"folder": "fedavg/seed-3"}, {"folder": "local/seed-3"}]
    index = {"recipe": "mine", "methods": ["fedavg", "local"], "seeds": [3], "runs": runs}
    (tmp_path / "study/summary.json").write_text(json.dumps(index))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/summary.json").write_text("{")
    points = [{"settings": {"a.b": "1"}, "folder": "b-1"}]
    (tmp_path / "sweep/b-1").mkdir(parents=True)
    (tmp_path / "sweep/b-1/summary.json").write_text(json.dumps(index))
    sweep = {"recipe": "mine", "over": "a.b", "points": points, "references": [], "margin": 0.01}
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(sweep))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/models.json").write_text("{")
    rows = {Path(row["name"]).name: row for row in listing("runs", runs=tmp_path)}
    assert (rows["whole"]["up a round"], rows["whole"]["down a round"]) == (size(3000), size(10_000))
    assert (rows["cut"]["up a round"], rows["study"]["down a round"]) == ("", "")
    states = {name: row["state"] for name, row in rows.items()}
    for name in ("broken", "torn"):
        assert states.pop(name).startswith("unreadable")
    assert states == {
        "whole": "finished",
        "cut": "at round 2 of 6",
        "study": "0 of 2 runs finished, then at round 0 of 6",
        "b-1": "0 of 2 runs finished, then not started",
    }
    assert listing("runs", runs=tmp_path / "none") == []


def test_kinds_that_cannot_be_listed_are_refused():
    refuses("methods, models, tasks, datasets, recipes, runs, got 'foo'", listing, "foo")
    refuses("only methods", listing, "models", contract=True)


def test_describe_counts_and_draws(tmp_path: Path):
    description = describe("scenes", SMALL, tmp_path / "sheet.png")
    rows = {(row["place"], row["role"]): row for row in description["rows"]}
    assert rows["sports", "train"]["questions"] == 40
    assert rows["sports", "train"]["pictures"] == 10  # four questions share a picture
    assert rows["home", "unseen"]["questions"] == 1000
    assert len(rows) == 4 * 3 + 1 or len(rows) == 5 * 3 + 1
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[1] == (2 + sum(role in ("train", "unseen") for _, role in rows)) * 214
        assert len(sheet.getcolors(1 << 20) or ()) > 1000


def test_describe_writes_a_page_of_a_recipe_s_data(tmp_path: Path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "vilt_tiny"\n[task]\nname = "vqa"\n'
        '[data]\nname = "scenes"\ntrain = 40\nvalidation = 20\ntest = 40\n',
        encoding="utf-8",
    )
    description = describe(str(recipe), ["train=20"], html=tmp_path / "data.html")
    assert {row["questions"] for row in description["rows"] if row["role"] == "train"} == {20}
    assert any("fewer than 5 training examples" in fault for fault in description["faults"])
    page = (tmp_path / "data.html").read_text(encoding="utf-8")
    assert page.count("background-image:url(data:image/png") > 20
    assert "fewer than 5 training examples" in page
    assert "<th scope=row>sports</th><td>train</td><td>20</td>" in page
    labels = describe("scene_labels", ["clients=3", "train=4", "test=4", "unseen=4"], html=tmp_path / "labels.html")
    assert labels["page"] == str(tmp_path / "labels.html")
    refuses(r"ending \.html", describe, "scenes", SMALL, html=tmp_path / "page.png")


def test_metadata_for_others_name_no_folder_of_this_machine(tmp_path: Path):
    private = tmp_path / "hospital_alice"
    write_croissant(squares(4, 2), private)
    shutil.unpack_archive(private / "pictures.zip", private)
    options = [f"root={private}", "partition=place", f'files=["{private}/examples.csv"]', "image_size=64"]
    describe("chat_records", options, html=tmp_path / "page.html", croissant=tmp_path / "shared")
    told = json.loads((tmp_path / "shared" / METADATA).read_text(encoding="utf-8"))["description"]
    assert "data.name = chat_records partition=place image_size=64." in told
    assert "hospital_alice" not in told + (tmp_path / "page.html").read_text(encoding="utf-8")


def test_describe_names_what_is_wrong(tmp_path: Path):
    for name, options, message in (
        ("scene", [], "did you mean 'scenes'"),
        ("scenes", ["trian=4"], "unknown key data.trian=4; did you mean 'train'"),
        ("scenes", ["train"], "key=value, got 'train'"),
        ("scenes", ["train=many"], r"data\.train.*got 'many'"),
        ("easy_vqa", [], r"data\.root must be given"),
    ):
        refuses(message, describe, name, options)
    refuses(r"ending \.png", describe, "scenes", SMALL, tmp_path / "sheet.txt")


def test_doctor_names_what_is_missing(monkeypatch: Patch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(list_command, "_version", lambda name: None if name == "flwr" else "1.0")
    findings = diagnose()
    hint = "pip install '.[flower]' -c constraints.txt"
    assert findings["extras"]["flower"].endswith(f"missing flwr: {hint}")
    assert findings["libraries"]["torch"] == "1.0"
    assert findings["system"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "questions right" in findings["packaged weights"]["vilt_mini"]
