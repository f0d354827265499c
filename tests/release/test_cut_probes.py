"""Probes of split learning's cut on finished runs: what is found, what a defence takes away, and the verb."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from command_line import confed as command
from confed.analysis.case import Case
from confed.data.regions import HeldRegions
from confed.data.table import Table
from confed.recipes.recipe import load_recipe
from confed.release.probe import Estimate, Finding
from confed.release.probes import answers, inversion
from confed.release.probes.answers import NONE, defences
from confed.release.probes.inversion import fresh, pictures_of
from confed.runs.run import run

RECIPE = """
[data]
name = "scenes"
preset = "random"
clients = 2
train = 80
validation = 30
test = 20

[model]
name = "vilt_mini"

[task]
name = "contrastive"
width = 16
hidden = 32
embedding = 16

[algorithm]
name = "bicsl"

[local]
epochs = 1
batch_size = 16
lr = 1e-3

[run]
rounds = 1
"""


SUPERVISED = RECIPE.replace('name = "contrastive"\nwidth = 16\nhidden = 32\nembedding = 16', 'name = "vqa"')


def finished(root: Path, recipe: str) -> Path:
    """Folder of a finished run."""
    (root / "mine.toml").write_text(recipe)
    run(load_recipe(root / "mine.toml"), root / "run")
    return root / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("split"), RECIPE)


def by_title(finding: Finding) -> dict[str, Estimate]:
    """Figures by the part of their titles that names the attack and the defence."""
    return {measured.title.partition(": ")[2] or measured.title: measured for measured in finding.measures}


def look(folder: Path, probe: answers.Probe = answers.PROBE) -> dict[str, Estimate]:
    case = Case(folder)
    assert probe.excluded(case) == ""
    return by_title(probe.look(case, 60.0))


def test_answers_are_recovered_as_the_rows_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "defences", lambda clip: defences(clip, (0.3,)))
    monkeypatch.setattr(answers, "EXAMPLES", 64)
    case = Case(folder)
    finding = answers.PROBE.look(case, 60.0)
    rows = {m.title.partition(": ")[2]: m for m in finding.measures if m.name == "cut_answers"}
    agreements = {m.title.partition(": ")[2]: m for m in finding.measures if m.name == "agreement"}
    # The truth from the data: equal answers are equal rows, and APN's weights give every answer away.
    counted = f"equal rows named by frequency, {NONE}"
    assert agreements[counted].value == 1.0
    assert rows[counted].count == 64
    labels = torch.cat([batch["label"] for batch in answers.batches_of(case, case.sites[0])])
    most = int(answers.public_answers(case).argmax())
    told = rows[f"rows looked up, knowing APN, {NONE}"]
    assert told.value == pytest.approx(1 - float((labels == most).double().mean()))
    assert told.limit == "cut"
    known = rows[f"equal rows named by 32 known answers, {NONE}"]
    assert known.count == 32
    assert known.value > rows[counted].value
    assert agreements["rows followed from step to step named by frequency, first epoch"].value > 0.5
    assert rows["equal rows named by frequency, each answer once per batch"].count < 64
    noised = [row for title, row in rows.items() if "noise 0.3" in title]
    assert noised
    assert not any(row.limit for row in noised)


def test_gradients_of_split_learning_give_answers_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "NOISES", (3.0,))
    monkeypatch.setattr(answers, "EXAMPLES", 64)
    folder = finished(tmp_path, SUPERVISED.replace('name = "bicsl"', 'name = "split_learning"\nhidden = 16'))
    rows = look(folder)
    compared = "rows compared with every answer's, knowing the last layers"
    # The server has made z itself, so that the right answer's gradient is the row.
    case = Case(folder)
    labels = torch.cat([batch["label"] for batch in answers.batches_of(case, case.sites[0])])
    majority = float((labels == int(answers.public_answers(case).argmax())).double().mean())
    assert rows[f"{compared}, {NONE}"].value == pytest.approx(1 - majority)
    (noised,) = (row for title, row in rows.items() if title.startswith(f"{compared}, noise 3"))
    assert noised.value < 1 - majority
    assert rows["clusters of rows named by 32 known answers, first epoch"].value > 0


def test_a_run_with_a_defence_of_its_own_is_audited_with_it(tmp_path: Path) -> None:
    defended = 'name = "split_learning"\nhidden = 16\nprivacy = { clip = 1, noise = 4 }'
    rows = look(finished(tmp_path, SUPERVISED.replace('name = "bicsl"', defended)))
    assert rows
    assert all("the run's defence" in title for title in rows)
    assert {row.limit for row in rows.values() if row.name == "cut_answers"} == {"cut"}


def test_inputs_are_rebuilt_from_activations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "EPOCHS", 2)
    monkeypatch.setattr(inversion, "STEPS", 2)
    monkeypatch.setattr(inversion, "EXAMPLES", 6)
    rows = list(look(folder, inversion.PROBE).values())
    assert [row.name for row in rows] == ["cut_inputs", "cut_inputs", "cut_words"] * 3
    assert [row.limit for row in rows] == ["cut"] * 3 + [""] * 6
    assert all(row.count == 6 for row in rows)
    assert rows[2].value > 0  # words beyond the most frequent ones
    assert rows[2].value > rows[8].value - 0.05  # noise 1 takes them away


def test_the_verb_tries_a_probe_and_names_runs_without_a_cut(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "EXAMPLES", 32)
    assert command("attack", str(folder), "--kind", "answers", "--out", str(tmp_path), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert {row["run"] for row in values["rows"]} == {"run"}
    assert "agreement" in (tmp_path / "attack-answers.html").read_text()
    whole = finished(tmp_path, SUPERVISED.replace('name = "bicsl"', 'name = "fedavg"'))
    assert command("attack", str(whole), "--kind", "inversion") == 2
    assert "left out: run: FedAvg has no cut" in " ".join(capsys.readouterr().err.split())
    assert command("attack", str(folder), "--kind", "answers", "--steps", "3") == 2
    assert "--steps is no option of the attack 'answers'" in " ".join(capsys.readouterr().err.split())


def test_the_attackers_own_examples_are_of_other_pictures() -> None:
    regions = HeldRegions(np.ones((6, 2, 3), np.float32), np.zeros((6, 2, 4), np.float32))
    copies = HeldRegions(regions.features, regions.boxes)
    rows = torch.arange(4)

    def table(pictures: list[int], store: HeldRegions) -> Table:
        return Table(None, torch.tensor(pictures), {"label": rows}, store)

    theirs = table([0, 1, 2, 2], regions)
    seen = pictures_of(theirs, torch.tensor([0, 2]))
    assert fresh(table([2, 3, 0, 1], regions), seen).tolist() == [1, 3]
    assert fresh(table([2, 3, 0, 1], copies), seen).tolist() == [0, 1, 2, 3]  # another table of pictures


def test_the_defences_that_audits_try() -> None:
    tried = defences(2.0, (0.5,))
    assert list(tried) == [NONE, "each answer once per batch", "noise 0.5"]
    assert tried[NONE].off
    sent: Tensor = tried["noise 0.5"].activations(torch.zeros(4000, 2), torch.Generator().manual_seed(0))
    assert float(sent.std()) == pytest.approx(1.0, rel=0.05)
