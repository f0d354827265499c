"""Lists, descriptions and the state of the list."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from command_line import Patch
from confed.cli import list
from confed.cli.catalogue import declared, first_line, listing, required
from confed.cli.dataset_description import describe
from confed.cli.list import diagnose
from confed.data.croissant import METADATA, write_croissant
from confed.registry import Registry, algorithms, datasets, models, tasks
from confed.system.format import size
from refusals import refuses
from toy_federation import squares

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


def test_a_list_needs_no_numerical_library():
    code = (
        "import sys\nfrom confed.cli import main\ntry:\n    main(['list', sys.argv[1]])\nexcept SystemExit:\n"
        "    print([name for name in ('torch', 'numpy', 'pydantic', 'transformers') if name in sys.modules])"
    )
    for kind in ("methods", "models", "tasks", "datasets", "recipes", "runs"):
        done = subprocess.run([sys.executable, "-c", code, kind], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", kind


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
    monkeypatch.setattr(list, "_version", lambda name: None if name == "flwr" else "1.0")
    findings = diagnose()
    hint = "pip install '.[flower]' -c constraints.txt"
    assert findings["extras"]["flower"].endswith(f"missing flwr: {hint}")
    assert findings["libraries"]["torch"] == "1.0"
    assert findings["system"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "questions right" in findings["packaged weights"]["vilt_mini"]
