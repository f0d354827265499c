"""Report section on similarities within a test batch before and after training, for contrastive models.

BiCSL's figure 3: how similar each question's representation v_NHA is to the u_LTA of its own answer and of the other
questions' answers. The same examples are measured with the initial values and with the trained ones.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from confed.report.figures.style import LETTERS, Drawing, Palette, add_colour_bar, without_box
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.section import Section
from confed.report.tables.table import Cell, Column, pivot, to_html
from confed.results.folder import RunFolder
from confed.results.runs import RunResults, StudyResults
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Similarity:
    """Similarities (B, B) of B questions, in rows, with B answers, in columns; equal answers are neighbours."""

    place: str
    kind: str
    answers: tuple[str, ...]
    before: np.ndarray
    after: np.ndarray
    same: float | None = None

    def means(self, values: np.ndarray) -> dict[str, float]:
        """Means over kinds of pairs; a kind without any pair is left out."""
        names = np.asarray(self.answers)
        equal, diagonal = names[:, None] == names[None, :], np.eye(len(names), dtype=bool)
        parts = {"own": diagonal, "same": equal & ~diagonal, "other": ~equal}
        means = {name: float(values[where].mean()) for name, where in parts.items() if where.any()}
        return {**means, "right": float(equal[np.arange(len(names)), values.argmax(axis=1)].mean())}


def read(run: RunResults) -> Similarity | None:
    """Measurements of a run; None without a valid file."""
    try:
        content = json.loads(RunFolder(run.folder).similarity.read_text(encoding="utf-8"))
        before, after = (np.asarray(content[when], dtype=np.float64) for when in ("before", "after"))
        answers = tuple(map(str, content["answers"]))
        same = None if content.get("same") is None else float(content["same"])
        similarity = Similarity(str(content["place"]), str(content["kind"]), answers, before, after, same)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = all(v.shape == (len(answers),) * 2 and np.isfinite(v).all() for v in (before, after))
    return similarity if sound and answers else None


def section(study: StudyResults, tabs: Tabs) -> str:
    """Both heat maps and the means of each method that answers by similarity, of its first seed."""
    text = (
        "How similar each question's representation (a row) is to the representations of the batch's answers (the "
        "columns), on the same test examples with the initial values and with the trained ones, of the first seed. "
        "Equal answers are neighbours: what should be large lies in the blocks along the diagonal, and all else should "
        "be small."
    )
    panels = [(study.labels[m], _panel(study.labels[m], one)) for m, one in _by_method(study).items()]
    return tabs(panels, about=text)


def figure(study: StudyResults) -> Drawing | None:
    """The drawing for a file: a row of two heat maps per method."""
    similarities = _by_method(study)
    return drawing([(study.labels[method], one) for method, one in similarities.items()]) if similarities else None


def drawing(similarities: Sequence[tuple[str, Similarity]]) -> Drawing:
    """Heat maps before and after training."""

    def draw(target: "Figure", palette: Palette) -> None:
        for number, (label, one) in enumerate(similarities):
            # Both have one scale, so that they can be compared.
            most = 1.0 if one.kind == "cosine" else float(max(np.abs(one.before).max(), np.abs(one.after).max(), 1e-12))
            head = f"{label}: " if len(similarities) > 1 else ""
            both = [target.add_subplot(len(similarities), 2, 2 * number + side) for side in (1, 2)]
            image = None
            for axes, values, when in zip(both, (one.before, one.after), ("before", "after"), strict=True):
                image = axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
                _dress(axes, palette, f"{head}{when} training", one.answers)
            add_colour_bar(target, image, both, palette, f"{one.kind} similarity")

    name = " ".join(label for label, _ in similarities)
    return Drawing(f"similarity {name}", 10.4, 4.9 * len(similarities), draw, shaded=True)


def _by_method(study: StudyResults) -> dict[str, Similarity]:
    """Method -> the similarities of its first seed that has some."""
    similarities: dict[str, Similarity] = {}
    for run in study.runs:
        if run.method not in similarities and (one := read(run)) is not None:
            similarities[run.method] = one
    return similarities


def _panel(label: str, one: Similarity) -> str:
    before, after = one.means(one.before), one.means(one.after)
    words = {
        "own": "positives: a question and its own answer, mean",
        "same": "a question and an equal answer of another example, mean",
        "other": "negatives: a question and a different answer, mean",
        "right": "the most similar answer of the batch is the right one, % of questions",
    }
    columns = [Column("pairs", words=True, read=words.__getitem__)]
    for title, means in (("before training", before), ("after training", after)):
        columns.append(Column(title, read=lambda key, of=means: _cell(key, of[key])))
    caption = f"{label}: {len(one.answers)} test questions of {one.place}; {one.kind} similarity."
    if one.same is not None:
        caption += (
            f" In training batches {formats.percent(one.same)} % of the negatives have the positive's own answer."
        )
    table = pivot("", columns, [key for key in words if key in before])
    return page.figure(drawing([(label, one)]).inline(), caption) + f"<div class=wrap>{to_html(table)}</div>"


def _dress(axes: "Axes", palette: Palette, title: str, answers: Sequence[str]) -> None:
    without_box(axes, palette, title)
    start, middles, edges = 0, list[float](), list[float]()
    names: list[str] = []
    for name, group in groupby(answers):
        size = len(list(group))
        middles.append(start + (size - 1) / 2)
        names.append(name if len(name) <= 14 else f"{name[:13]}…")
        start += size
        edges.append(start - 0.5)
    axes.set_xticks(middles, names, rotation=90)
    axes.set_yticks(middles, names)
    axes.set_xlabel("answer, u_LTA", color=palette("muted"), fontsize=LETTERS)
    axes.set_ylabel("question, v_NHA", color=palette("muted"), fontsize=LETTERS)
    for edge in edges[:-1]:
        axes.axhline(edge, color=palette("card"), linewidth=0.5)
        axes.axvline(edge, color=palette("card"), linewidth=0.5)


def _cell(key: str, value: float) -> Cell:
    if key == "right":
        return Cell(formats.percent(value))
    return Cell((f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}").replace("-", "−"), value)


SECTIONS = (
    Section("similarity", "Similarities before and after training", 160, lambda page: section(page.study, page.tabs),
            figures={"similarity": figure}),
)  # fmt: skip
