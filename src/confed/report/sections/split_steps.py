"""Report section on the steps of split learning: timeline, utilisation, and bytes per step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from confed.report.figures.style import HUES, LETTERS, Drawing, Palette, add_legend, without_box
from confed.report.html import page
from confed.report.section import Section
from confed.report.tables.cells import percent_cell
from confed.report.tables.table import Column, Table, pivot, wide_html
from confed.results.folder import RunFolder, read_jsonl
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import average, number
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = 60  # spans in the drawing; utilisation is of all that were written down

WORDS: Mapping[str, str] = {
    "receive": "a client gets its part of the model",
    "step": "one batch: activations up, their gradients down",
    "top": "the same batch: what the server made of it down, gradients of that up",
    "send": "a client gives its part of the model",
}


PARTIES: Mapping[str, str] = {
    "main": "main computes with the activations",
    "aux": "aux averages the clients' parts",
}
"""Servers of split methods -> what they do."""


@dataclass(frozen=True)
class Span:
    """One party at work, as ``timeline.jsonl`` has it; times in seconds since the round began."""

    party: str
    what: str
    start: float
    end: float


def spans_of(run: RunResults) -> list[Span]:
    """Timeline of a run's first round, by start; none without records."""
    spans: list[Span] = []
    try:
        lines = read_jsonl(RunFolder(run.folder).timeline)
    except (OSError, ValueError):
        return []
    for line in lines:
        start, end = number(line.get("start")), number(line.get("end"))
        if start is not None and end is not None and end >= start:
            spans.append(Span(str(line.get("party", "")), str(line.get("what", "")), start, end))
    return sorted(spans, key=lambda span: (span.start, span.end))


def busy(spans: Sequence[Span]) -> dict[str, float]:
    """Party -> share of the time from the first start to the last end in which it worked; overlaps count once."""
    if not spans:
        return {}
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    seconds: dict[str, float] = {}
    for party in dict.fromkeys(span.party for span in spans):
        worked, reached = 0.0, begin
        for span in sorted((s for s in spans if s.party == party), key=lambda s: s.start):
            worked += max(0.0, span.end - max(span.start, reached))
            reached = max(reached, span.end)
        seconds[party] = worked / (end - begin) if end > begin else 0.0
    return seconds


def drawing(study: StudyResults) -> Drawing | None:
    """Bars of work over time: a panel per method, a row per party, on one scale of time."""
    shown = {method: spans[:SHOWN] for method, spans in _by_method(study).items()}
    if not shown:
        return None
    parties = {method: _ordered(spans, study.clients) for method, spans in shown.items()}
    kinds = list(dict.fromkeys(span.what for span in chain.from_iterable(shown.values())))
    colour = {kind: f"m{i % HUES + 1}" for i, kind in enumerate(kinds)}
    rows = [len(parties[method]) for method in shown]

    def draw(figure: "Figure", palette: Palette) -> None:
        from matplotlib.patches import Patch

        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=rows)
        for axes, (method, spans) in zip(panels[:, 0], shown.items(), strict=True):
            begin, order = min(span.start for span in spans), parties[method]
            for span in spans:
                row, hue = len(order) - 1 - order.index(span.party), palette(colour[span.what])
                length, left = 1000 * (span.end - span.start), 1000 * (span.start - begin)
                axes.barh(row, length, left=left, height=0.62, color=hue, linewidth=0.6, edgecolor=hue)
            without_box(axes, palette, study.labels[method])
            axes.set_yticks(range(len(order)), list(reversed(order)))
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.grid(axis="x", color=palette("grid"), linewidth=0.9)
            axes.set_axisbelow(True)
        panels[-1, 0].set_xlabel("milliseconds", color=palette("muted"), fontsize=LETTERS)
        handles = [Patch(color=palette(colour[kind]), label=kind) for kind in kinds]
        add_legend(figure, palette, handles=handles, loc="outside upper right", ncols=len(kinds))

    return Drawing(f"steps {study.recipe}", 10.4, 0.8 + 0.55 * len(shown) + 0.34 * sum(rows), draw)


def busy_table(study: StudyResults) -> Table | None:
    """Utilisation of every party in percent of the recorded time, a row per method; None without timelines."""
    spans_of_method = _by_method(study)
    if not spans_of_method:
        return None
    shares = {method: busy(spans) for method, spans in spans_of_method.items()}

    def length(method: str) -> float:
        spans = spans_of_method[method]
        return max(span.end for span in spans) - min(span.start for span in spans)

    columns = [Column("method", words=True, read=study.labels.__getitem__)]
    for party in _ordered(list(chain.from_iterable(spans_of_method.values())), study.clients):
        columns.append(Column(party, "busy", "%", read=lambda method, of=party: percent_cell(shares[method].get(of))))
    columns += [
        Column("spans", "written down", read=lambda method: len(spans_of_method[method])),
        Column("time", "written down", "s", read=length, form=formats.duration),
    ]
    note = (
        "Busy: share of the time between the first start and the last end in which a party computed. The times are of "
        "this machine, whose processes share its cores; nothing of a network is in them."
    )
    return pivot("How busy every party was in the first steps", columns, spans_of_method, notes=(note,))


class _Traffic(NamedTuple):
    """What an action of a method sends, mean over seeds."""

    label: str
    action: str
    calls: float
    up: float
    down: float
    rounds: float

    def per_call(self, way: str) -> float | None:
        return getattr(self, way) / self.calls if self.calls else None

    def per_round(self, way: str) -> float:
        return getattr(self, way) / self.rounds


def traffic_table(study: StudyResults) -> Table | None:
    """Bytes of each action: per call, which is one client's, and per round, of all clients; None without counts."""
    sections: list[list[_Traffic]] = []
    for method in study.methods:
        counting = [run.summary for run in study.of(method) if run.summary.actions]
        rounds = average([summary.rounds for summary in counting])
        if not rounds:
            continue
        rows: list[_Traffic] = []
        actions = [summary.actions for summary in counting]
        for action in dict.fromkeys(chain.from_iterable(actions)):
            counts = [of_run.get(action, {}) for of_run in actions]
            calls, up, down = (_mean(counts, key) for key in ("calls", "up", "down"))
            rows.append(_Traffic(study.labels[method], str(action), calls, up, down, rounds))
        sections.append(rows)
    if not sections:
        return None
    columns = [
        Column("method", words=True, read=lambda row: row.label),
        Column("action", words=True, read=lambda row: row.action),
        Column("what travels", words=True, read=lambda row: WORDS.get(row.action, "")),
    ]
    for way in ("up", "down"):
        columns.append(Column(way, "per call", "bytes", read=partial(_Traffic.per_call, way=way), form=formats.size))
    columns.append(Column("calls", "per round", read=lambda row: row.per_round("calls"), form="{:.4g}".format))
    for way in ("up", "down"):
        columns.append(Column(way, "per round", "bytes", read=partial(_Traffic.per_round, way=way), form=formats.size))
    note = (
        "A call is one client's; a round is all calls to all clients, mean over rounds (and seeds). Bytes are lengths "
        "of the messages as they were serialised. In a round a client gets one call more than it has batches (two with "
        "staleness = 1): the first step brings no gradients, the last sends no activations, so that its mean per call "
        "is a little below what a full batch takes."
    )
    return pivot("Bytes per step and per round", columns, *sections, notes=(note,))


def _mean(counts: Sequence[Mapping[str, float]], key: str) -> float:
    return average([count.get(key) for count in counts]) or 0.0


def section(study: StudyResults) -> str:
    """The timeline, each party's utilisation, and the bytes of a step."""
    traffic, shares, picture = traffic_table(study), busy_table(study), drawing(study)
    html = ""
    if traffic is not None:
        html += f"<h3>{page.escape(traffic.title)}</h3>{wide_html(traffic)}"
    if picture is not None and shares is not None:
        text = (
            f"The first {SHOWN} pieces of work of the first round, a bar each: fewer batches of a method that takes "
            "more pieces for one. Where a row is empty its party waits. A server's bars are what it computes with the "
            "replies of its clients."
        )
        parties = {column.title for column in shares.columns}
        servers = [words for party, words in PARTIES.items() if party in parties]
        text += f" Servers: {'; '.join(servers)}." if servers else ""
        drawn = _by_method(study)
        alone = [run for run in study.runs if run.method in drawn]
        if any(run.recipe.get("run", {}).get("workers") == 1 for run in alone):
            text += " Clients take turns, because one process computed them all; with several they work side by side."
        drawn_steps = page.figure(picture.inline(), title="Who worked when")
        html += f"<h3>Who worked when</h3>{page.paragraph(text, 'muted')}{drawn_steps}{wide_html(shares)}"
    return html


def _by_method(study: StudyResults) -> dict[str, list[Span]]:
    """Method -> the spans of its first seed that has some."""
    spans_of_method: dict[str, list[Span]] = {}
    for run in study.runs:
        if run.method not in spans_of_method and (spans := spans_of(run)):
            spans_of_method[run.method] = spans
    return spans_of_method


def _ordered(spans: Sequence[Span], clients: Sequence[str]) -> list[str]:
    """The parties: clients in the federation's order, then servers."""
    parties = dict.fromkeys(span.party for span in spans)
    return [*(name for name in clients if name in parties), *(name for name in parties if name not in clients)]


SECTIONS = (
    Section("steps", "Steps of split learning", 130, lambda page: section(page.study), figures={"steps": drawing}),
)
