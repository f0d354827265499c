"""Report section on captioning: CIDEr-D and BLEU-4 of every method."""

from dataclasses import replace

from confed.report.section import Kind, Section
from confed.report.tables.cells import finished
from confed.report.tables.columns import Context, MethodRow, columns_of, method_table
from confed.report.tables.table import Table, wide_html
from confed.results.runs import StudyResults
from confed.results.summary import global_note

_NOTE = (
    "Means over places, x 100, as they are usually written. CIDEr-D reaches 1,000 and weights words by the captions of "
    "all validation and test pictures of the data; BLEU-4 is that of all captions of a place together. Words are split "
    "by letters, not by the official program, so that published numbers are near these and not equal to them."
)


def captioned(study: StudyResults) -> bool:
    """Whether the models of a study write captions."""
    return any(run.summary.captioned for run in study.runs)


def caption_table(study: StudyResults) -> Table:
    """A row per method: both measures of each view, mean and standard deviation over seeds."""
    rows = [MethodRow(study.labels[method], runs) for method, runs in finished(study).items()]
    table = method_table("Written captions", rows, columns_of("captions", Context(rows)), (_NOTE,))
    return replace(table, sections=table.sections[:1])


def section(study: StudyResults) -> str:
    """The table as HTML; empty where models write no captions."""
    return wide_html(caption_table(study)) if captioned(study) else ""


def measured(study: StudyResults) -> str:
    """Description of the measurements in a sentence."""
    abroad = " and of unseen places" if study.scenes else ""
    firsts = {study.labels[m]: study.of(m)[0].summary for m in study.methods}
    how = "What is measured after the last round is how near captions of the clients' test pictures"
    near = "are to those of people: captions that each client's own model writes"
    if all(summary.without_global for summary in firsts.values()):
        return f"{how} {near}."
    note = global_note(firsts)
    return f"{how}{abroad} {near}, and those of the one shared model.{f' {note}' if note else ''}"


SECTIONS = (Section("captions", "Written captions", 180, lambda page: section(page.study), captioned),)

KINDS = (
    Kind(
        captioned,
        lambda study: "texts",
        measured,
        titles={"types": "Kinds of example", "gallery": "Sample captions"},
    ),
)
