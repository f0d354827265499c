"""Values that a page shows and saves: those of the files, and where the drawing has them."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from confed.report.figures import bars as plots
from confed.report.figures import curves as lines
from confed.report.figures.style import Drawing, SeriesStyle, line_style
from confed.results.runs import load
from synthetic_study import CLIENTS, METHODS, ROUNDS, make_run


@pytest.fixture(scope="module")
def study(finished_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_study, tmp_path_factory.mktemp("values") / "study"))


def panels(svg: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r' data-panels="([^"]*)"', svg)
    return json.loads(html.unescape(found))


def markers(svg: str) -> set[tuple[float, float]]:
    """Where the drawing repeats a marker."""
    found = re.findall(r'<use xlink:href="#[^"]+" x="([\d.]+)" y="([\d.]+)"', svg)
    return {(round(float(x), 1), round(float(y), 1)) for x, y in found}


def test_curves_have_the_means_of_the_files_where_they_are_drawn(study: Path) -> None:
    found = load(study)
    drawing = lines.curves(found)
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
