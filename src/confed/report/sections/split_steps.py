"""Report section on the steps of split learning: timeline, utilisation, and bytes per step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from confed.report.figures.style import HUES, Drawing, Palette
from confed.report.html import page
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.folder import RunFolder, read_jsonl
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import average, number
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = 60
"""Spans in the drawing; utilisation is of all that were written down."""

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
    """Party -> share of the time from the first start to the last end in which it worked.

    Spans of one party that overlap count once.
    """
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
    spans_of_method = {method: spans for method, spans in _by_method(study).items() if spans}
    if not spans_of_method:
        return None
    labels = study.labels
    shown = {method: spans[:SHOWN] for method, spans in spans_of_method.items()}
    parties = {method: _ordered(spans, study.clients) for method, spans in shown.items()}
    kinds = list(dict.fromkeys(span.what for span in chain.from_iterable(shown.values())))
    colour = {kind: f"m{i % HUES + 1}" for i, kind in enumerate(kinds)}
    rows = [len(parties[method]) for method in shown]

    def draw(figure: "Figure", palette: Palette) -> None:
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=rows)
        for axes, (method, spans) in zip(panels[:, 0], shown.items(), strict=True):
            begin, order = min(span.start for span in spans), parties[method]
            for span in spans:
                row = len(order) - 1 - order.index(span.party)
                axes.barh(
                    row, 1000 * (span.end - span.start), left=1000 * (span.start - begin), height=0.62,
                    color=palette(colour[span.what]), linewidth=0.6, edgecolor=palette(colour[span.what]),
                )  # fmt: skip
            axes.set_title(labels[method], fontsize=10, color=palette("ink"), loc="left", fontweight="bold")
            axes.set_yticks(range(len(order)), list(reversed(order)))
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.tick_params(colors=palette("muted"), labelsize=8.5, length=0)
            axes.grid(axis="x", color=palette("grid"), linewidth=0.9)
            axes.set_axisbelow(True)
            for spine in axes.spines.values():
                spine.set_visible(False)
        panels[-1, 0].set_xlabel("milliseconds", color=palette("muted"), fontsize=9)
        from matplotlib.patches import Patch

        handles = [Patch(color=palette(colour[kind]), label=kind) for kind in kinds]
        figure.legend(
            handles=handles, loc="outside upper right", ncols=len(kinds), fontsize=8.5, frameon=False,
            labelcolor=palette("ink"),
        )  # fmt: skip

    return Drawing(f"steps {study.recipe}", 10.4, 0.8 + 0.55 * len(shown) + 0.34 * sum(rows), draw)


def busy_table(study: StudyResults) -> Table | None:
    """Utilisation of every party in percent of the recorded time, a row per method; None without timelines."""
    spans_of_method = {method: spans for method, spans in _by_method(study).items() if spans}
    if not spans_of_method:
        return None
    every = list(chain.from_iterable(spans_of_method.values()))
    parties = _ordered(every, study.clients)
    rows: list[tuple[Cell, ...]] = []
    for method, spans in spans_of_method.items():
        shares = busy(spans)
        length = max(span.end for span in spans) - min(span.start for span in spans)
        cells = [
            Cell(formats.percent(share), None if share is None else 100 * share) for share in map(shares.get, parties)
        ]
        rows.append(
            (
                Cell(study.labels[method]),
                *cells,
                Cell(str(len(spans)), float(len(spans))),
                Cell(formats.duration(length), length),
            )
        )
    columns = (
        Column("method", words=True),
        *(Column(party, "busy", "%") for party in parties),
        Column("spans", "written down"),
        Column("time", "written down", "s"),
    )
    note = (
        "Busy: share of the time between the first start and the last end in which a party computed. The times are of "
        "this machine, whose processes share its cores; nothing of a network is in them."
    )
    return Table("How busy every party was in the first steps", columns, (tuple(rows),), (note,))


def traffic_table(study: StudyResults) -> Table | None:
    """Bytes of each action: per call, which is one client's, and per round, of all clients; None without counts."""
    rows: list[tuple[tuple[Cell, ...], ...]] = []
    for method in study.methods:
        counting = [run for run in study.of(method) if run.summary.actions]
        traffic = [run.summary.actions for run in counting]
        rounds = average([run.summary.rounds for run in counting])
        if traffic and rounds:
            actions = dict.fromkeys(map(str, chain.from_iterable(traffic)))
            of: dict[str, list[dict[str, float]]] = {}
            for action in actions:
                of[action] = [counts.get(action, {}) for counts in traffic]
            rows.append(tuple(_traffic(study.labels[method], a, counts, rounds) for a, counts in of.items()))
    if not rows:
        return None
    columns = (
        Column("method", words=True),
        Column("action", words=True),
        Column("what travels", words=True),
        Column("calls", "per round"),
        Column("up", "per call", "bytes"),
        Column("down", "per call", "bytes"),
        Column("up", "per round", "bytes"),
        Column("down", "per round", "bytes"),
    )
    columns = (*columns[:3], *columns[4:6], columns[3], *columns[6:])
    note = (
        "A call is one client's; a round is all calls to all clients, mean over rounds (and seeds). Bytes are lengths "
        "of the messages as they were serialised. In a round a client gets one call more than it has batches (two with "
        "staleness = 1): the first step brings no gradients, the last sends no activations, so that its mean per call "
        "is a little below what a full batch takes."
    )
    return Table("Bytes per step and per round", columns, tuple(rows), (note,))


def splitting(study: StudyResults) -> list[str]:
    """The labels of the methods that send activations batch by batch."""
    methods = [m for m in study.methods if any(run.summary.actions.get("step") for run in study.of(m))]
    return [study.labels[method] for method in methods]


def section(study: StudyResults) -> str:
    """The timeline, each party's utilisation, and the bytes of a step."""
    traffic, shares, picture = traffic_table(study), busy_table(study), drawing(study)
    html = ""
    if traffic is not None:
        html += f'<h3>{page.escape(traffic.title)}</h3><div class="wide dense">{to_html(traffic)}</div>'
    if picture is not None and shares is not None:
        text = (
            f"The first {SHOWN} pieces of work of the first round, a bar each: fewer batches of a method that takes "
            "more pieces for one. Where a row is empty its party waits. A server's bars are what it computes with the "
            "replies of its clients."
        )
        servers: list[str] = []
        for party, words in PARTIES.items():
            if any(party == c.title for c in shares.columns):
                servers.append(words)
        text += f" Servers: {'; '.join(servers)}." if servers else ""
        drawn: list[RunResults] = []
        for m, spans in _by_method(study).items():
            if spans:
                for run in study.of(m):
                    drawn.append(run)
        if any(run.recipe.get("run", {}).get("workers") == 1 for run in drawn):
            text += " Clients take turns, because one process computed them all; with several they work side by side."
        drawn_steps = page.figure(picture.inline(), title="Who worked when")
        html += f"<h3>Who worked when</h3>{page.paragraph(text, 'muted')}{drawn_steps}"
        html += f'<div class="wide dense">{to_html(shares)}</div>'
    return html


def _traffic(label: str, action: str, found: Sequence[Mapping[str, float]], rounds: float) -> tuple[Cell, ...]:
    calls, up, down = (average([count.get(key) for count in found]) or 0.0 for key in ("calls", "up", "down"))
    per_call = [value / calls if calls else None for value in (up, down)]
    per_round = [value / rounds for value in (up, down)]
    times = calls / rounds
    return (
        Cell(label),
        Cell(action),
        Cell(WORDS.get(action, "")),
        *(Cell(formats.size(value), value) for value in per_call),
        Cell(f"{times:.4g}", times),
        *(Cell(formats.size(value), value) for value in per_round),
    )


def _by_method(study: StudyResults) -> dict[str, list[Span]]:
    """Method -> the spans of its first seed that has some."""
    return {m: next((spans for run in study.of(m) if (spans := spans_of(run))), []) for m in study.methods}


def _ordered(spans: Sequence[Span], clients: Sequence[str]) -> list[str]:
    """The parties: clients in the federation's order, then servers."""
    parties = dict.fromkeys(span.party for span in spans)
    return [*(name for name in clients if name in parties), *(name for name in parties if name not in clients)]
