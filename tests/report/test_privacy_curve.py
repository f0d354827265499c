"""Accuracy against epsilon over rows of a study."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confed.report.figures.save import figures
from confed.report.report import render
from confed.report.sections import privacy_curve
from confed.report.sections.privacy_curve import accuracy_against_epsilon, curves, section
from confed.results.runs import RunResults, StudyResults, load
from confed.results.summary import Summary
from synthetic_study import make_run


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


@pytest.mark.usefixtures("undrawn_figures")
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
    assert figures()["accuracy-by-epsilon"](load(tmp_path)) is not None
    monkeypatch.setattr(privacy_curve, "available", lambda: False)
    assert "pip install '.[privacy]' -c constraints.txt" in render(load(tmp_path)).replace("&#x27;", "'").replace(
        "&#39;", "'"
    )
    assert figures()["accuracy-by-epsilon"](load(tmp_path)) is None


def test_without_noise_there_is_no_drawing() -> None:
    off = study([finished("off", 0, 0.6, {}), finished("b", 0, 0.5, {})])
    assert accuracy_against_epsilon(off) is None
    assert section(off) == ""
