"""Results files of the documentation's tables: the script that makes them of CSV files, and the files themselves."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from confed.metrics.statistics import mean
from confed.studies.published import read_published
from refusals import refuses
from repository import ROOT, script_module

SEEDS = """measure,method,row,seed,place,value (%)
personal on own data,FedAvg,fedavg,0,,81.23456789
personal on own data,FedAvg,fedavg,0,sports,75.5
personal on own data,FedAvg,fedavg,1,,83
global on unseen,FedAvg,fedavg,0,,70
global on unseen,FedAvg,fedavg,1,,71
deployed at each client,FedAvg,fedavg,0,sports,75.5
"""
COMPARE = """reference,measure,method,seeds,value (%),value sd (%),difference (points)
Local only,personal on own data,Local only,3,78.5,0.9,
Local only,C-AP,FedAvg,3,61.5,1.25,
Local only,C-AP,FedP³,1,60,,
FedAvg,C-AP,FedAvg,3,61.5,1.25,
"""
TABLE = """method,parameters sent,personal average (%),personal average sd (%),unseen average (%),unseen average sd (%)
FedAvg,12,82,0.7,71.5,1.4
Local only,0,78,0.5,,
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("docs/make_results.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "fedvqa_scenes_seeds.csv": SEEDS,
        "mine_compare.csv": COMPARE,
        "mine_tuning.csv": "method\n",
        "other_table.csv": TABLE,
        "commands.toml": (
            '[mine]\ncommand = "confed compare fedvqa_scenes --seeds 3 local.lr=0.5 --reference fedavg"\n'
            '[mine_tuning]\ncommand = "confed tune"\nwithout = "trials"\n'
            '[other]\ncommand = "confed compare fedvqa_scenes --seeds 2; confed compare again"\n'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_values_of_seeds_give_the_statistics(script: ModuleType, folder: Path) -> None:
    content = script.made(folder)["fedvqa_scenes"]
    assert content["command"] == "confed compare fedvqa_scenes"  # called like a recipe, so nothing is listed
    (row,) = content["rows"]
    assert row["figures"] == {
        "0": {"personal_mean": 0.8123456789, "personal/sports": 0.755, "global_unseen_mean": 0.7},
        "1": {"personal_mean": 0.83, "global_unseen_mean": 0.71},
    }
    expected = mean([0.8123456789, 0.83])
    found = row["metrics"]["personal_mean"]
    assert (found["mean"], found["sd"]) == pytest.approx((expected.mean, expected.sd))
    half = 12.706204736432095 * expected.sd * 1.5**0.5  # Student's t, one degree of freedom, 97.5 %
    assert found["one_run"] == pytest.approx([expected.mean - half, expected.mean + half])
    assert set(row["metrics"]) == {"personal_mean", "global_unseen_mean"}


def test_means_come_from_the_other_files(script: ModuleType, folder: Path) -> None:
    content = script.made(folder)
    rows = {row["label"]: row for row in content["mine"]["rows"]}
    assert {label: (row["method"], row["seeds"]) for label, row in rows.items()} == {
        "Local only": ("local", [0, 1, 2]),
        "FedAvg": ("fedavg", [0, 1, 2]),
        "FedP³": ("fedp3", [0]),
    }
    assert (rows["FedAvg"]["metrics"]["multilabel/global/C-AP"]["sd"], rows["FedAvg"]["figures"]) == (0.0125, {})
    assert rows["FedP³"]["figures"] == {"0": {"multilabel/global/C-AP": 0.6}}  # of a single seed the mean is its value
    assert rows["FedP³"]["metrics"]["multilabel/global/C-AP"]["one_run"] is None
    assert content["mine"]["resolved"]["local"]["lr"] == 0.5
    assert [row["seeds"] for row in content["other"]["rows"]] == [[0, 1], [0, 1]]
    assert "global_unseen_mean" not in content["other"]["rows"][1]["metrics"]
    assert "mine_tuning" not in content


def test_file_is_read_as_a_published_row(script: ModuleType, folder: Path) -> None:
    (folder / "mine.json").write_text(script.text_of(script.made(folder)["mine"]), encoding="utf-8")
    published = read_published(str(folder / "mine.json"), "fedp3")
    recipe = published.recipe(0, ["run.rounds=1"])
    assert (recipe.sections["algorithm"]["name"], recipe.local.lr, recipe.run.rounds) == ("fedp3", 0.5, 1)


def test_faults_of_files_and_commands_are_said(script: ModuleType, folder: Path) -> None:
    (folder / "new_table.csv").write_text(TABLE)
    refuses(r"new_table\.csv: no command in docs/results/commands\.toml", script.made, folder)
    (folder / "new_table.csv").unlink()
    (folder / "other_table.csv").write_text(TABLE.replace("FedAvg", "FedNothing"))
    refuses("is called 'FedNothing'", script.made, folder)


def test_what_a_file_says_otherwise_is_told_but_not_what_is_new(script: ModuleType, folder: Path) -> None:
    content = script.made(folder)["mine"]
    before = json.loads(script.text_of(content))
    assert list(script.differences(before, content)) == []
    before["resolved"]["run"].pop("rounds")  # as if the setting had come since
    assert list(script.differences(before, content)) == []
    before["resolved"]["local"]["lr"] = 0.25
    before["rows"][1]["metrics"]["multilabel/global/C-AP"]["mean"] = 0.9
    assert list(script.differences(before, content)) == [
        "local, fedavg, fedp3: local.lr is 0.25, and 0.5 by the command today",
        "fedavg: metrics are not those of the CSV files",
    ]


def test_every_table_has_its_command_and_its_file(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out + "run python docs/make_results.py"
    tables = script.commands(ROOT / "docs" / "results")
    pages = [*(ROOT / "docs").glob("results*.md"), *(ROOT / "docs" / "results").glob("*.md")]
    named = {
        name for page in pages for name in script.re.findall(r'^csv = "([^"{]+)\.csv"', page.read_text(), script.re.M)
    }
    assert named
    assert {name for name in named if script.command_of(name, tables) is None} == set()
