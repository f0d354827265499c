"""What a report says of written captions: what was measured, and CIDEr-D and BLEU-4 of every method."""

from collections.abc import Mapping
from typing import Any

from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.deployed import global_note, without_global
from confed.results.runs import Study, average, counted, numbers

__all__ = ["caption_table", "captioned", "measured", "section"]

VIEWS: Mapping[str, str] = {
    "personal": "clients' own models",
    "global_seen": "global, seen places",
    "global_unseen": "global, unseen places",
}
"""View -> how the table calls it."""

MEASURES: Mapping[str, str] = {"cider": "CIDEr-D", "bleu4": "BLEU-4"}

_NOTE = (
    "Means over places, x 100, as they are usually written. CIDEr-D reaches 1,000 and weights words by the captions of "
    "all validation and test pictures of the data; BLEU-4 is that of all captions of a place together. Words are split "
    "by letters, not by the official program, so that published numbers are near these and not equal to them."
)


def captioned(study: Study) -> bool:
    """Whether the models of a study write captions."""
    return any("bleu4" in run.summary for run in study.runs)


def caption_table(study: Study) -> Table:
    """A row per method: both measures of each view, mean and standard deviation over seeds."""
    columns = (
        Column("method", words=True),
        *(Column(title, words, "%") for words in VIEWS.values() for title in MEASURES.values()),
    )
    rows: list[tuple[Cell, ...]] = []
    for method in study.methods:
        summaries = [run.summary for run in study.of(method) if run.complete]
        cells = [
            mean_sd_cell([_mean(summary, view, measure) for summary in summaries])
            for view in VIEWS
            for measure in MEASURES
        ]
        rows.append((Cell(study.labels[method]), *cells))
    return Table("Written captions", columns, (tuple(rows),), (_NOTE,))


def section(study: Study) -> str:
    """The table as HTML; empty where models write no captions."""
    if not captioned(study):
        return ""
    return f'<div class="wide dense">{to_html(caption_table(study))}</div>'


def measured(study: Study) -> str:
    """What is measured, in a sentence."""
    abroad = " and of unseen places" if study.scenes else ""
    firsts = {study.labels[m]: study.of(m)[0].summary for m in study.methods}
    nobodys, note = all(map(without_global, firsts.values())), global_note(firsts)
    who = "." if nobodys else ", and those of the one shared model."
    return (
        f"What is measured after the last round is how near captions of the clients' test pictures"
        f"{'' if nobodys else abroad} are to those of people: captions that each client's own model writes{who}"
        + (f" {note}" if note and not nobodys else "")
    )


def _mean(summary: Mapping[str, Any], view: str, measure: str) -> float | None:
    """A measure's mean over the places of a view."""
    found = counted(summary, view) if measure == "cider" else numbers(summary.get(measure, {}).get(view))
    return average(list(found.values()))
