"""Most frequent answers (or labels) of each place, coloured by how many places have them (FedVQA, figure 8.2)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from confed.data.examples import Examples, FederatedDataset
from confed.report.figures.style import Drawing, Palette, SeriesStyle, add_legend, grid_of, name_positions, style_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PLACES, ANSWERS, COLUMNS = 12, 14, 4  # panels; answers per panel; panels side by side

CLIENTS = 24
"""Clients of a dataset that are looked at; users may be tens of thousands, whose examples are made when asked for."""

ONE = SeriesStyle("in this place only", "m1")
SOME = SeriesStyle("in some places", "m5")
ALL = SeriesStyle("in all places", "m0")


def places_of(dataset: FederatedDataset) -> Iterator[tuple[str, Examples]]:
    """Training examples of the first clients, and those of unseen places."""
    for name, _ in zip(dataset.clients, range(CLIENTS), strict=False):
        yield name, dataset.clients[name].roles["train"]
    yield from dataset.unseen.items()


def answers_of(dataset: FederatedDataset) -> Drawing | None:
    """The figure of a dataset's answers by place; None where fewer than two places have answers."""
    return answers_by_place(dataset.name, {place: examples.counted_answers() for place, examples in places_of(dataset)})


def shared_by(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Number of places in which each answer occurs."""
    places = dict[str, int]()
    for of_place in counts.values():
        for answer, count in of_place.items():
            if count:
                places[answer] = places.get(answer, 0) + 1
    return places


def answers_by_place(name: str, counts: Mapping[str, Mapping[str, int]]) -> Drawing | None:
    """The most frequent answers of each place, in % of its examples: in one place, in some, or in all of them."""
    filled: dict[str, dict[str, int]] = {}
    for place, of_place in counts.items():
        if present := {answer: number for answer, number in of_place.items() if number}:
            filled[place] = present
    if len(filled) < 2:
        return None
    places = shared_by(filled)
    shown = list(filled)[:PLACES]
    longest = max(min(ANSWERS, len(filled[place])) for place in shown)
    lines, columns = grid_of(len(shown), COLUMNS)

    def draw(figure: "Figure", palette: Palette) -> None:
        handles = dict[str, "Artist"]()
        for i, place in enumerate(shown):
            axes = figure.add_subplot(lines, columns, i + 1)
            _panel(axes, place, filled[place], places, len(filled), palette)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        labels = [series.label for series in (ONE, SOME, ALL) if series.label in handles]
        shown_handles = [handles[label] for label in labels]
        add_legend(figure, palette, handles=shown_handles, labels=labels, ncols=3, loc="outside upper left")

    return Drawing(f"answers {name}", 10.4, lines * (1.1 + 0.25 * longest) + 0.5, draw)


def _panel(
    axes: "Axes", place: str, counts: Mapping[str, int], places: Mapping[str, int], total: int, palette: Palette
) -> None:
    examples = sum(counts.values())
    # Alphabetical where equally frequent, so that a drawing does not depend on the order of examples.
    most = sorted(counts, key=lambda answer: (-counts[answer], answer))[:ANSWERS]
    rows = {answer: -float(row) for row, answer in enumerate(most)}
    for series in (ONE, SOME, ALL):
        those = [answer for answer in most if _kind(places[answer], total) is series]
        if those:
            axes.barh(
                [rows[answer] for answer in those], [100 * counts[answer] / examples for answer in those], 0.72,
                color=palette(series.colour), label=series.label,
            )  # fmt: skip
    style_axes(axes, palette, place, "% of its answers", "", across=True)
    name_positions(axes.yaxis, list(rows.values()), list(rows))
    axes.set_ylim(-ANSWERS + 0.4 if len(most) == ANSWERS else -len(most) + 0.4, 0.6)


def _kind(places: int, total: int) -> SeriesStyle:
    if places == total:
        return ALL
    return ONE if places == 1 else SOME
