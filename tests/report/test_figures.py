"""Drawings: names that do not cover one another, files for documents, what the axes show."""

import html
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from confed import registry
from confed.cli.dataset_description import describe
from confed.report.figures import results as plots
from confed.report.figures.answers import ANSWERS, answers_by_place, shared_by
from confed.report.figures.style import COLOURS, Drawing, SeriesStyle, at_points, line_style, series_styles, spread
from confed.report.report import save_figures
from confed.results.history import seconds_until, validation_loss
from confed.results.runs import RunResults, load
from confed.results.stored import records_of
from confed.results.summary import Summary
from confed.results.views import View
from synthetic_study import CLIENTS, METHODS, ROUNDS, make_run

DRAWS = True


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
    drawing = plots.curves(study)
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
    drawing = plots.spending(found)
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


def panels(svg: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r' data-panels="([^"]*)"', svg)
    return json.loads(html.unescape(found))


def markers(svg: str) -> set[tuple[float, float]]:
    """Where the drawing repeats a marker."""
    found = re.findall(r'<use xlink:href="#[^"]+" x="([\d.]+)" y="([\d.]+)"', svg)
    return {(round(float(x), 1), round(float(y), 1)) for x, y in found}


def test_curves_have_the_means_of_the_files_where_they_are_drawn(study: Path) -> None:
    found = load(study)
    drawing = plots.curves(found)
    assert drawing is not None
    svg = drawing.inline()
    by_title = {panel["title"]: panel for panel in panels(svg)}
    own = by_title["personal models"]
    assert (own["x"], own["y"]) == ("round", "accuracy, %")
    assert [series[0] for series in own["series"]] == list(METHODS.values())
    for method, (_, colour, points) in zip(METHODS, own["series"], strict=True):
        assert re.fullmatch(r"var\(--m\d+\)", colour)
        assert [point[0] for point in points] == list(range(ROUNDS + 1))
        last = [
            json.loads((study / method / f"seed-{s}" / "metrics.jsonl").read_text().splitlines()[-1]) for s in (0, 1)
        ]
        values = [line["personal"][client]["accuracy"] for line in last for client in CLIENTS]
        assert points[-1][1] == pytest.approx(100 * sum(values) / len(values), rel=1e-5)
    drawn = markers(svg)
    for panel in by_title.values():
        left, top, width, height = panel["box"]
        for _, _, points in panel["series"]:
            for _, _, x, y in points:
                assert any(abs(x - a) < 0.11 and abs(y - b) < 0.11 for a, b in drawn), (panel["title"], x, y)
                assert left <= x <= left + width
                assert top <= y <= top + height


def test_bars_are_named_by_client(study: Path) -> None:
    drawing = plots.bars(load(study))
    assert drawing is not None
    (panel,) = panels(drawing.inline())
    for method, (label, _, points) in zip(METHODS, panel["series"], strict=True):
        assert label == METHODS[method]
        assert [point[0] for point in points] == CLIENTS
        summaries = [json.loads((study / method / f"seed-{s}" / "summary.json").read_text()) for s in (0, 1)]
        wanted = [50 * sum(summary["personal"][client] for summary in summaries) for client in CLIENTS]
        assert [point[1] for point in points] == pytest.approx(wanted, rel=1e-5)


def test_rows_of_points_have_values_along_and_names_upwards(tmp_path: Path) -> None:
    rows = [f"row{i}" for i in range(8)]
    for i, row in enumerate(rows):
        make_run(tmp_path / row / "seed-0", "fedavg", shift=0.01 * i)
    index = {"methods": rows, "labels": {row: row.upper() for row in rows}}
    index |= {"runs": [{"method": row, "seed": 0} for row in rows]}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    drawing = plots.bars(load(tmp_path))
    assert drawing is not None
    first = panels(drawing.inline())[0]
    summary = json.loads((tmp_path / "row7/seed-0/summary.json").read_text())
    label, _, ((value, name, _, _),) = first["series"][7]
    assert (first["title"], label, name) == (CLIENTS[0], "ROW7", "ROW7")
    assert value == pytest.approx(100 * summary["personal"][CLIENTS[0]], rel=1e-5)


def test_names_of_the_data_stay_within_their_attribute() -> None:
    bad = "\"><script>alert(1)</script>'&"

    def draw(figure: Any, palette: Any) -> None:
        axes = figure.add_subplot()
        axes.plot([1, 2], [3, float("nan")], **line_style(SeriesStyle(bad, "m1"), palette, 3))
        axes.plot([1, 2], [1, 1], color=palette("grid"))  # a line without a label is no series

    svg = Drawing(bad, 3, 2, draw).inline()
    assert "<script" not in svg
    ((series,),) = (panel["series"] for panel in panels(svg))
    assert series[0] == bad
    assert [point[:2] for point in series[2]] == [[1.0, 3.0]]  # what is not finite is not shown


def test_drawing_without_series_has_no_values() -> None:
    svg = Drawing("empty", 3, 2, lambda figure, palette: figure.add_subplot().imshow([[1, 2]])).inline()
    assert panels(svg) == []


COUNTS = {
    "sea": {"yes": 5, "fish": 3, "blue": 2, "crab": 0},
    "wood": {"yes": 1, "tree": 6, "blue": 1},
    "town": {"yes": 2, "bus": 2},
}


def widths(counts):
    """Place -> kind -> answer -> width of its bar, read off the axes."""
    drawing = answers_by_place("made", counts)
    assert drawing is not None
    figure = Figure()
    drawing.draw(figure, lambda name: "#2a66c8")
    found = {}
    for axes in figure.axes:
        names = {
            round(place): label.get_text()
            for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        }
        found[axes.get_title(loc="left")] = {
            bars.get_label(): {names[round(b.get_y() + b.get_height() / 2)]: b.get_width() for b in bars}
            for bars in axes.containers
        }
    return found


def test_answers_are_told_by_how_many_places_have_them():
    found = widths(COUNTS)
    assert found["sea"] == {
        "in this place only": {"fish": 30.0},
        "in some places": {"blue": 20.0},
        "in all places": {"yes": 50.0},
    }
    assert found["wood"]["in this place only"] == {"tree": 75.0}
    assert found["town"] == {"in this place only": {"bus": 50.0}, "in all places": {"yes": 50.0}}


def test_an_answer_that_nobody_gives_is_in_no_place():
    assert shared_by(COUNTS) == {"yes": 3, "fish": 1, "blue": 2, "tree": 1, "bus": 1}


def test_each_panel_has_the_most_frequent_answers():
    many = {"a": {f"answer {i:02}": 100 - i for i in range(40)}, "b": {"answer 00": 1}}
    bars = widths(many)["a"]
    assert sorted(answer for of_kind in bars.values() for answer in of_kind) == sorted(many["a"])[:ANSWERS]


def test_of_one_place_nothing_is_drawn():
    assert answers_by_place("made", {"sea": COUNTS["sea"], "empty": {"yes": 0}}) is None


def test_counts_are_of_answers_and_of_labels():
    scenes = registry.datasets["scenes"](train=20, validation=5, test=5)
    part = scenes.clients["transport"].roles["train"]
    assert part.counted_answers() == Counter(part.answers)
    labels = registry.datasets["scene_labels"](clients=4)
    users = next(iter(labels.clients.values())).roles["train"]
    assert users.counted_answers()[users.labels.names[0]] == int(users.labels.numbers()[0])


def test_a_description_writes_the_figure(tmp_path):
    file = tmp_path / "new" / "answers.svg"
    description = describe("scenes", ["train=20", "validation=5", "test=5"], answers=file)
    assert description["figure"] == str(file)
    assert "in this place only" in file.read_text()


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"answers must be a file with the ending \.svg or \.png"):
        describe("scenes", answers=tmp_path / "answers.pdf")
