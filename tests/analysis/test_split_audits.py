"""The audits of the split channel on a finished run, and accuracy against epsilon over rows of a study."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.analysis import audit
from confed.analysis import inversion as inversion_audit
from confed.analysis.audit import answers, defences
from confed.analysis.inversion import fresh, inversion, pictures_of
from confed.analysis.victim import open_victim, write
from confed.cli.attack import KINDS
from confed.data.regions import HeldRegions
from confed.data.table import Table
from confed.recipes.recipe import load_recipe
from confed.report.figures.save import save_figures
from confed.report.report import render
from confed.report.sections import privacy_curve
from confed.report.sections.privacy_curve import accuracy_against_epsilon, curves, section
from confed.results.runs import RunResults, StudyResults, load
from confed.results.summary import Summary
from confed.runs.run import run
from synthetic_study import make_run

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("split")
    (root / "mine.toml").write_text(RECIPE)
    run(load_recipe(root / "mine.toml"), root / "run")
    return root / "run"


def test_the_kinds_lead_to_the_audits() -> None:
    assert KINDS["answers"] == "confed.analysis.audit:answers"
    assert KINDS["inversion"] == "confed.analysis.inversion:inversion"


def test_answers_are_recovered_as_the_rows_say(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "NOISES", (0.3,))
    finding = answers([folder], examples=64, seed=1)
    rows = {(r["defence"], r["when"], r["attack"]): r["recovery"] for r in finding.values["rows"]}
    # The truth from the data: equal answers are equal rows, and APN's weights give every answer away.
    counted = rows["none", "last weights", "equal rows named by frequency"]
    assert counted["agreement"] == 1.0
    assert counted["examples"] == 64
    assert rows["none", "last weights", "rows looked up, knowing APN"]["recovered"] == 1.0
    known = rows["none", "last weights", "equal rows named by 32 known answers"]
    assert known["examples"] == 32
    assert known["recovered"] > counted["recovered"]
    assert rows["none", "first epoch", "rows followed from step to step named by frequency"]["agreement"] > 0.5
    table = open_victim(folder).run_data.clients["client-01"].tables[0]
    assert counted["groups"] <= len(table.columns["label"].unique())
    assert rows["each answer once per batch", "last weights", "equal rows named by frequency"]["examples"] < 64
    page = write(finding, tmp_path)
    assert json.loads((tmp_path / "attack-answers.json").read_text())["kind"] == "answers"
    assert "agreement" in page.read_text().lower()


def test_gradients_of_split_learning_give_answers_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "NOISES", (3.0,))
    recipe = RECIPE.replace('name = "bicsl"', 'name = "split_learning"\nhidden = 16')
    recipe = recipe.replace('name = "contrastive"\nwidth = 16\nhidden = 32\nembedding = 16', 'name = "vqa"')
    (tmp_path / "mine.toml").write_text(recipe)
    run(load_recipe(tmp_path / "mine.toml"), tmp_path / "run")
    finding = answers([tmp_path / "run"], examples=64, seed=1)
    rows = {(r["defence"], r["when"], r["attack"]): r["recovery"] for r in finding.values["rows"]}
    assert {r["sent"] for r in finding.values["rows"]} == {"gradients"}
    compared = "rows compared with every answer's, knowing the last layers"
    # The server has made z itself, so that the right answer's gradient is the row.
    assert rows["none", "last weights", compared]["recovered"] == 1.0
    assert rows["noise 3", "last weights", compared]["recovered"] < 1.0
    grouped = rows["none", "first epoch", "clusters of rows named by 32 known answers"]
    assert grouped["recovered"] > grouped["majority"]
    assert grouped["examples"] == 32


def test_a_run_with_a_defence_of_its_own_is_audited_with_it(tmp_path: Path) -> None:
    recipe = RECIPE.replace('name = "bicsl"', 'name = "split_learning"\nhidden = 16\nprivacy = { clip = 1, noise = 4 }')
    recipe = recipe.replace('name = "contrastive"\nwidth = 16\nhidden = 32\nembedding = 16', 'name = "vqa"')
    (tmp_path / "mine.toml").write_text(recipe)
    run(load_recipe(tmp_path / "mine.toml"), tmp_path / "run")
    rows = answers([tmp_path / "run"], examples=64, seed=1).values["rows"]
    assert {(row["defence"], row["when"]) for row in rows} == {("the run's", "last weights")}


def test_inputs_are_rebuilt_from_activations(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion_audit, "EPOCHS", 2)
    finding = inversion([folder], examples=6, steps=2)
    rows = finding.values["rows"]
    assert [row["defence"] for row in rows] == ["none", "noise 0.1", "noise 1"]
    for row in rows:
        assert 0 <= row["words"]["recovered"] <= 1
        assert row["decoder"]["explained"] == pytest.approx(1 - row["decoder"]["error"] / row["decoder"]["baseline"])
        assert row["search"]["examples"] == 6
    assert rows[0]["words"]["recovered"] > rows[0]["words"]["baseline"]
    write(finding, tmp_path)
    assert (tmp_path / "attack-inversion-1.svg").stat().st_size > 0


def test_what_cannot_be_audited_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="examples must be at least 2, got 1"):
        answers([folder], examples=1)
    with pytest.raises(ValueError, match="no client is called 'nobody'; there are client-01, client-02"):
        answers([folder], client="nobody")
    with pytest.raises(ValueError, match="steps not negative, got 5 and -1"):
        inversion([folder], examples=5, steps=-1)


@pytest.mark.parametrize(
    ("audit", "words"), [(answers, "sends no row per example"), (inversion, "sends no activations")]
)
def test_a_network_that_is_whole_at_a_client_sends_nothing(
    folder: Path, tmp_path: Path, audit: Callable[..., object], words: str
) -> None:
    copied = tmp_path / "central"
    shutil.copytree(folder, copied)
    recipe = copied / "recipe.toml"
    whole = r"\[algorithm\].*?(?=\n\[(?!algorithm))"
    text = re.sub(whole, '[algorithm]\nname = "central"\n', recipe.read_text(), flags=re.DOTALL)
    recipe.write_text(text)
    with pytest.raises(ValueError, match=words):
        audit([copied])


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
    assert list(tried) == ["none", "each answer once per batch", "noise 0.5"]
    assert tried["none"].off
    sent: Tensor = tried["noise 0.5"].activations(torch.zeros(4000, 2), torch.Generator().manual_seed(0))
    assert float(sent.std()) == pytest.approx(1.0, rel=0.05)


# Accuracy against epsilon ---------------------------------------------------------------------------------


def finished(row: str, seed: int, accuracy: float, privacy: dict[str, Any], method: str = "bicsl") -> RunResults:
    recipe = {"algorithm": {"name": method, "privacy": privacy}, "run": {"rounds": 5}, "local": {"epochs": 2}}
    summary = {"algorithm": method, "global_seen_mean": accuracy, "metric": "accuracy"}
    return RunResults(Path(row), row, method, seed, Summary(summary), recipe)


def study(runs: Sequence[RunResults]) -> StudyResults:
    return StudyResults(Path(), "mine", tuple(runs))


def test_points_have_the_epsilon_of_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int, float]] = []

    def stand_in(noise: float, releases: int, delta: float) -> float:
        asked.append((noise, releases, delta))
        return math.inf if noise == 0 else 10 / noise

    monkeypatch.setattr(privacy_curve, "epsilon", stand_in)
    runs = [
        finished("off", 0, 0.6, {}), finished("low", 0, 0.55, {"clip": 1.0, "noise": 2.0}),
        finished("low", 1, 0.45, {"clip": 1.0, "noise": 2.0}), finished("high", 0, 0.3, {"clip": 1.0, "noise": 10.0}),
        finished("half", 0, 0.3, {"clip": 1.0, "noise": 2.0}, "split_learning"),
        finished("other", 0, 0.9, {}, "fedavg"),
    ]  # fmt: skip
    found = curves(study(runs), 1e-6)
    # Five rounds of two epochs with two rows each.
    assert asked[:3] == [(0.0, 20, 1e-6), (2.0, 20, 1e-6), (10.0, 20, 1e-6)]
    assert [(p.epsilon, round(p.mean, 3)) for p in found["bicsl"]] == [(1.0, 0.3), (5.0, 0.5), (math.inf, 0.6)]
    assert found["bicsl"][1].sd == pytest.approx(0.1 / math.sqrt(2))
    assert [p.epsilon for p in found["split_learning"]] == [math.inf]  # its gradients are not noised
    assert "fedavg" not in found
    drawing = accuracy_against_epsilon(study(runs))
    assert drawing is not None
    assert b"no guarantee" in drawing.svg()


def test_a_curve_is_of_rows_that_differ_in_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_curve, "epsilon", lambda noise, releases, delta: math.inf if noise == 0 else 10 / noise)
    noised = {"clip": 1.0, "noise": 2.0}
    other = finished("butd", 0, 0.2, noised)
    other = replace(other, recipe={**other.recipe, "model": {"name": "butd_mini"}})
    found = curves(study([finished("off", 0, 0.6, {}), finished("low", 0, 0.5, noised), other,
                          finished("distinct", 0, 0.4, {**noised, "distinct": True})]))  # fmt: skip
    rows = {name: [point.row for point in points] for name, points in found.items()}
    assert rows == {"bicsl (off)": ["low", "off"], "bicsl (butd)": ["butd"], "bicsl (distinct)": ["distinct"]}


def test_report_and_figures_of_a_noised_study_have_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"fedavg": "", "fedprox": "clip = 1.0\nnoise = 4.0\n", "fedp3": "clip = 1.0\nnoise = 9.0\n"}
    for row, noise in rows.items():
        place = make_run(tmp_path / row / "seed-0", row, 0)
        recipe = place / "recipe.toml"
        split = f'name = "bicsl"\n[algorithm.privacy]\n{noise}'
        recipe.write_text(recipe.read_text().replace(f'name = "{row}"\n', split))
        summary = place / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"algorithm": "bicsl"}))
    monkeypatch.setattr(privacy_curve, "available", lambda: True)
    monkeypatch.setattr(privacy_curve, "epsilon", lambda noise, releases, delta: math.inf if noise == 0 else 10 / noise)
    html = render(load(tmp_path))
    part = html[html.index('id="privacy"') : html.index("</section>", html.index('id="privacy"'))]
    assert "<svg" in part
    assert [part.count(f">{text}</td>") for text in ("2.5", "1.11", "∞")] == [1, 1, 1]
    names = [path.name for path in save_figures(tmp_path, tmp_path / "figures")]
    assert "accuracy-by-epsilon.png" in names
    monkeypatch.setattr(privacy_curve, "available", lambda: False)
    assert "pip install '.[privacy]' -c constraints.txt" in render(load(tmp_path)).replace("&#x27;", "'").replace(
        "&#39;", "'"
    )
    assert "accuracy-by-epsilon.png" not in [path.name for path in save_figures(tmp_path, tmp_path / "without")]


def test_without_noise_there_is_no_drawing() -> None:
    off = study([finished("off", 0, 0.6, {}), finished("b", 0, 0.5, {})])
    assert accuracy_against_epsilon(off) is None
    assert section(off) == ""
