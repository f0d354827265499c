"""The command: what it prints where, its exit codes, and stopping and going on."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import Capture, Patch, confed, refusal
from confed.cli.app import RENAMED, command_line

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


def test_ctrl_c_then_resume_gives_the_uninterrupted_run(tmp_path: Path, capfd: Capture):
    arguments = [*SINGLE, "run.rounds=4", "run.evaluate_every=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "confed.cli", "run", *arguments, "--out", str(tmp_path / "cut")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1/4" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(30) == 130
    assert f"confed resume {tmp_path / 'cut'}" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "cut/summary.json").exists()
    assert confed("resume", tmp_path / "cut") == 0
    assert confed("run", *arguments, "--out", tmp_path / "whole") == 0
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_importing_is_light():
    heavy = ["torch", "transformers", "matplotlib"]
    for module, absent in (("confed", [*heavy, "typer"]), ("confed.cli", heavy)):
        code = f"import sys, {module}; print([n for n in {absent} if n in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


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
