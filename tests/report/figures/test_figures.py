"""Drawings: names that do not cover one another, files for documents, what the axes show."""

import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from confed.report.figures import bars as plots
from confed.report.figures import curves as lines
from confed.report.figures.annotate import at_points, spread
from confed.report.figures.save import save_figures
from confed.report.figures.style import COLOURS, Drawing, SeriesStyle, series_styles
from confed.results.history import seconds_until, validation_loss
from confed.results.runs import RunResults, load
from confed.results.stored import records_of
from confed.results.summary import Summary
from confed.results.views import View
from synthetic_study import METHODS, make_run


@pytest.fixture(scope="module")
def study(finished_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_study, tmp_path_factory.mktemp("figures") / "study"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen methods with one seed each."""
    folder = tmp_path_factory.mktemp("figures") / "many"
    rows = {f"row{i:02d}": list(METHODS)[i % 4] for i in range(14)} | {"central": "central"}
    for i, (row, method) in enumerate(rows.items()):
        make_run(folder / row / "seed-0", method, shift=0.002 * i)
    runs = [{"method": row, "seed": 0} for row in rows]
    index = {"methods": list(rows), "labels": {row: f"Method {row[-2:]}" for row in rows}, "runs": runs}
    (folder / "summary.json").write_text(json.dumps(index))
    return folder


def shown(drawing: Drawing) -> Figure:
    """The figure with a drawing on it."""
    figure = Figure(figsize=(drawing.width, drawing.height), layout="constrained")
    drawing.draw(figure, COLOURS.__getitem__)
    return figure


def test_spread_labels_stand_where_they_do_by_hand() -> None:
    assert spread([1.0, 5.0, 3.0], 1.0, 0.0, 10.0) == [1.0, 5.0, 3.0]  # nobody in the way
    assert spread([5.0, 5.0], 1.0, 0.0, 10.0) == [4.5, 5.5]  # both give way
    assert spread([9.9, 10.0], 1.0, 0.0, 10.0) == [9.0, 10.0]  # the edge stops them
    assert spread([4.0, 4.0, 4.0], 1.0, 3.5, 4.5) == [3.5, 4.0, 4.5]  # no room: evenly
    assert spread([], 1.0, 0.0, 1.0) == []


@pytest.mark.parametrize("seed", range(5))
def test_spread_keeps_distance_order_and_limits(seed: int) -> None:
    wanted = np.random.default_rng(seed).random(12) ** 3
    placed = np.array(spread(list(wanted), 0.06, 0.0, 1.0))
    assert (np.argsort(placed, kind="stable") == np.argsort(wanted, kind="stable")).all()
    assert np.diff(np.sort(placed)).min() >= 0.06 - 1e-12
    assert placed.min() >= -1e-12
    assert placed.max() <= 1 + 1e-12


def test_names_of_crowded_points_do_not_overlap() -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    rng = np.random.default_rng(0)
    points = {f"p{i}": (SeriesStyle(f"Method {i}", "m1"), *rng.normal(0, 1, 2)) for i in range(15)}
    for _, x, y in points.values():
        axes.plot([x], [y], "o")
    at_points(figure, axes, points, COLOURS.__getitem__)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 15
    # The width of letters is estimated, so neighbours may touch by a little.
    shared = [min(a.x1, b.x1) - max(a.x0, b.x0) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert all(width < 8 for width in shared)


def test_points_at_one_place_share_a_name() -> None:
    points = {"a": (SeriesStyle("A", "m1"), 0.5, 0.5), "b": (SeriesStyle("B", "m2"), 0.5, 0.5)}
    drawing = Drawing("same", 3, 2, lambda figure, palette: at_points(figure, figure.add_subplot(), points, palette))
    assert ">A, B</text>" in drawing.inline()


def test_looks_tell_fifteen_methods_apart(many: Path) -> None:
    found = series_styles(load(many))
    assert len({(series.colour, series.marker, series.dashed) for series in found.values()}) == 15
    assert found["central"].colour == "m0"
    assert found["row10"].dashed
    assert found["row10"].marker != found["row00"].marker


def test_every_method_is_named_beside_its_line(many: Path) -> None:
    study = load(many)
    drawing = lines.curves(study)
    assert drawing is not None
    svg = drawing.inline()
    for label in study.labels.values():
        assert svg.count(f">{label}</text>") >= 2
    assert "var(--m9)" in svg
    assert "#0a0b" not in svg


def test_validation_loss_is_that_of_the_judged_models() -> None:
    def line(round: int, split: str, **views: dict[str, float]) -> dict[str, object]:
        places = {view: {place: {"loss": x} for place, x in losses.items()} for view, losses in views.items()}
        return {"event": "evaluation", "round": round, "split": split, **places}

    lines_of = (
        line(0, "validation", **{"global": {"a": 4.0, "b": 2.0}, "personal": {}}),
        line(1, "validation", **{"global": {"a": 9.0}, "personal": {"a": 1.0, "b": 2.0}}),
        line(2, "test", personal={"a": 0.1}),
    )
    run = RunResults(Path("r"), "r", "R", 0, Summary({}), {}, records_of(lines_of))
    assert validation_loss(run) == {0: 3.0, 1: 1.5}
    deployed = replace(run, summary=Summary({"global_seen": {"a": 0.5}}, View.SEEN))
    assert validation_loss(deployed) == {0: 3.0, 1: 9.0}


def test_traffic_and_time_show_what_was_spent(study: Path) -> None:
    found = load(study)
    assert seconds_until(found.of("fedavg")[0]) == {n: 5.0 * n for n in range(7)}  # evaluation is not counted
    drawing = lines.spending(found)
    assert drawing is not None
    styles = {method: COLOURS[series.colour] for method, series in series_styles(found).items()}
    # Curves have a point per evaluated round, the leaders to their names have two.
    traffic, time = (
        {
            line.get_color(): np.asarray(line.get_xdata())
            for line in axes.lines
            if len(np.asarray(line.get_xdata())) == 7
        }
        for axes in shown(drawing).axes
    )
    assert traffic[styles["fedavg"]][-1] == pytest.approx(57.6)  # 6 rounds, 4 clients, 1.2 MB each way
    assert styles["local"] not in traffic  # sends nothing
    assert time[styles["local"]].tolist() == [0, 5, 10, 15, 20, 25, 30]
    assert styles["central"] not in time


def test_many_methods_are_rows_of_points(many: Path) -> None:
    drawing = plots.bars(load(many))
    assert drawing is not None
    axes = shown(drawing).axes
    assert len(axes) == 4
    values = [json.loads((many / f"row{i:02d}" / "seed-0/summary.json").read_text())["personal"] for i in range(14)]
    points = [np.asarray(line.get_xdata()) for line in axes[0].lines]
    first = [float(x[0]) for x in points if len(x) == 1]
    assert first[:14] == pytest.approx([100 * value["transport"] for value in values])


def test_figures_are_small_sound_and_the_same_twice(many: Path, tmp_path: Path) -> None:
    paths = save_figures(many, tmp_path / "a")
    names = ["personal-against-unseen", "accuracy-by-round", "clients", "accuracy-by-traffic-and-time"]
    assert [path.name for path in paths] == [f"{name}.{ending}" for name in names for ending in ("png", "svg")]
    again = plots.trade_off(load(many))
    assert again is not None
    assert [path.read_bytes() for path in paths[:2]] == [again.png(), again.svg()]
    for path in paths:
        assert path.stat().st_size < 200_000
        if path.suffix == ".png":
            assert Image.open(io.BytesIO(path.read_bytes())).size[0] > 1000
        else:
            text = path.read_text(encoding="utf-8")
            assert ET.fromstring(text).tag.endswith("svg")
            assert "var(--" not in text
            assert not re.search(r"href=\"(?!#)", text)


def test_single_run_has_its_two_models(study: Path) -> None:
    folder = study / "fedp3" / "seed-0"
    assert [path.name for path in save_figures(folder)][::2] == [
        "accuracy-by-round.png",
        "clients.png",
        "accuracy-by-traffic-and-time.png",
    ]
