"""The dossier as a page that loads nothing; everything on it is read from the content of ``dossier.json``."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from confed.analysis.case import Case
from confed.analysis.victim import Finding as Attacked
from confed.analysis.victim import expand, names_of
from confed.release.limits import Release
from confed.release.probe import probes
from confed.release.verdict import judge
from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.tables.table import Column, Table, pivot, to_html
from confed.system import format as formats
from confed.system.events import Note, Progress, ignore

Entry = Mapping[str, Any]
"""An object of ``dossier.json``."""

CSS = (
    ".note{overflow-wrap:anywhere}figure svg{max-width:620px}"
    "#limits td:first-child,#gives-away td:first-child{min-width:9.5em}"
    "@media print{table td,table th{overflow-wrap:normal!important;word-break:normal!important;padding:1px 8px}"
    "figure svg{max-width:400px}h3,h3+p{break-after:avoid}table{break-inside:avoid}}"
)
SHARES = ("membership_tpr", "canaries_tpr", "site", "properties", "labels", "reconstruction", "cut")
"""How names of figures begin that are shares, and are written in percent."""
AGAIN = {True: "equal bits", False: "other bits: what was trained again is a like run", None: "not done"}


def page_of(sealed: Entry, drawings: Mapping[str, Sequence[Drawing]]) -> str:
    """The page of a sealed dossier, with the drawings of each probe."""
    content, signed = sealed["content"], "not signed"
    if "signature" in sealed:
        signed = f"signed by {sealed['signature']['public_key']}"
    title = f"Release dossier: {content['run']['folder']}"
    head = f"<h1>{page.escape(title)}</h1>" + page.paragraph(f"{content['sentence']} {content['details']}", "lead")
    head += page.paragraph(f"SHA-256 {sealed['sha256']}, {signed}.", "note")
    sections = [
        ("limits", "Limits", _limits(content)),
        ("run", "What was trained, by whom", _run(content)),
        ("sent", "What left each site", _sent(content)),
        ("gives-away", "What the model can give away", _gives_away(content, drawings)),
        ("statements", "What the sites have said and signed", _statements(content["statements"])),
        ("gained", "What each site gained", _gained(content["gains"])),
        ("standing", "Sites that stand out", _standing(content["standing"])),
        ("not-examined", "What was not examined, and why", _not_examined(content["not_examined"])),
    ]
    return page.document(title, head, sections, CSS)


def figure_text(name: str, value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return "no bound"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    if name.startswith(SHARES):
        text = f"{100 * value:.1f}\u00a0%"
    elif name.endswith("_auc") or name == "cosine":
        text = f"{value:.3f}"
    return text.replace("-", "−")


def _figure(key: str) -> Callable[[Entry], str]:
    return lambda row: figure_text(row["name"], row[key])


def _words(key: str) -> Callable[[Entry], str]:
    return lambda row: str(row[key])


def _percent(key: str) -> Callable[[Entry], str]:
    return lambda row: formats.percent(row[key])


def _between(low: str, high: str) -> str:
    return f"{low} to {high}" if low else ""


FIGURES = (
    Column("figure", words=True, read=_words("title")),
    Column("value", read=_figure("value")),
    Column("verdict", words=True, read=_words("verdict")),
    Column("limit", read=_figure("release_limit")),
    Column("95 % interval", read=lambda row: _between(_figure("low")(row), _figure("high")(row))),
    Column("by chance", read=_figure("chance")),
    Column("p, corrected", read=lambda row: formats.p_value(row["p_corrected"])),
    Column("of", read=_words("count")),
)


def figures_table(content: Entry) -> Table:
    """All figures of a dossier for a terminal."""
    columns = [column for column in FIGURES if column.title not in ("by chance", "of")]
    return pivot("", columns, content["figures"]).without_empty()


def attacked(kind: str, folders: Sequence[Path], progress: Progress = ignore) -> Attacked:
    """One probe on finished runs, as ``confed attack`` writes it; runs that it does not apply to are noted."""
    probe = next(probe for probe in probes() if probe.name == kind)
    runs, notes = expand(folders)
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    drawings: dict[str, Drawing] = {}
    for folder, name in zip(runs, names_of(runs), strict=True):
        case = Case(folder)
        if reason := probe.excluded(case):
            notes.append(f"left out: {name}: {reason}")
            continue
        progress(Note(f"{probe.title}: {name}"))
        finding = probe.look(case, math.inf)
        judged = judge([(probe.title, measured) for measured in finding.measures], Release())
        rows += [{"run": name, **row} for row in judged]
        words += finding.notes
        for drawing in finding.drawings:
            drawings[f"attack-{kind}-{len(drawings) + 1}"] = drawing
    if not rows:
        raise ValueError("; ".join(notes))
    run_column = Column("run", words=True, read=_words("run"))
    columns = [column for column in FIGURES if column.title not in ("limit", "verdict")]
    table = pivot(probe.title, (run_column, *columns), rows).without_empty()
    texts = [f"The attacker {probe.attacker[0].lower()}{probe.attacker[1:]}", *dict.fromkeys(words), *notes]
    return Attacked(kind, probe.title, texts, (table,), {"kind": kind, "rows": rows, "notes": notes}, drawings)


def _figures(rows: Sequence[Entry]) -> str:
    return to_html(pivot("", FIGURES, rows).without_empty())


def _limits(content: Entry) -> str:
    held = [row for row in content["figures"] if row["verdict"]]
    if not held:
        return page.paragraph("None is set. A TOML file with [release] sets some: confed dossier RUN --limits FILE.")
    words = (
        "Beyond: over the limit, and for attacks chance is excluded after Holm's correction over all attacks here. "
        "Not settled: over the limit, and it may be chance. A limit on something that was not examined is not kept."
    )
    return _figures(held) + page.paragraph(words, "note")


def _run(content: Entry) -> str:
    run = content["run"]
    local = run["local"]
    entries = {
        "Method": run["method"],
        "Model": f"{run['model']}, trained: {run['trainable']}",
        "Data": f"{run['data']}, {formats.counted(len(run['sites']), 'site')}: {formats.names(run['sites'])}",
        "Training": f"{run['rounds']} rounds of {local['epochs']} local epochs, batches of {local['batch_size']}, "
        f"learning rate {local['lr']:g}, seed {run['seed']}",
        "Released": run["released"],
        "Trained again from the recipe": AGAIN[content["same_bits"]],
        "Protections": formats.names(list(run["protections"].values())) or "none",
    }
    return page.definitions(entries)


def _sent(content: Entry) -> str:
    columns = (
        Column("site", words=True, read=_words("site")),
        Column("records", read=lambda row: row["records"]),
        Column("rounds", words=True, read=_words("rounds")),
        Column("times", read=_words("times")),
        Column("sent", read=lambda row: row["bytes"], form=formats.size),
    )
    kinds = [f"{name}: {count:,} values" for name, count in content["kinds"].items()]
    words = f"Each time: {formats.names(kinds or ['no values of the model'])}."
    return page.paragraph(words) + to_html(pivot("", columns, content["sent"]))


def _gives_away(content: Entry, drawings: Mapping[str, Sequence[Drawing]]) -> str:
    html = ""
    rest = list(content["figures"])
    for probe in content["probes"]:
        rows = [row for row in rest if row["probe"] == probe["title"]]
        rest = [row for row in rest if row["probe"] != probe["title"]]
        attacker = f"The attacker {probe['attacker'][0].lower()}{probe['attacker'][1:]}"
        html += f"<h3>{page.escape(probe['title'])}</h3>" + page.paragraph(attacker)
        html += _figures(rows) + "".join(page.figure(drawing.inline()) for drawing in drawings.get(probe["name"], ()))
        html += "".join(page.paragraph(note, "note") for note in probe["notes"])
    for title in dict.fromkeys(row["probe"] for row in rest):
        html += f"<h3>{page.escape(title)}</h3>" + _figures([row for row in rest if row["probe"] == title])
    words = "An attack that works proves a leak; one that fails proves nothing: only ε is a bound."
    return html + page.paragraph(words, "note")


def _statements(rows: Sequence[Entry]) -> str:
    columns = (
        Column("site", words=True, read=_words("site")),
        Column("entries of its journals", words=True, read=_words("journals")),
        Column("its own dossier", words=True, read=_words("dossier")),
        Column("signed by it", words=True, read=lambda row: "yes" if row["signed"] else "no"),
    )
    note = "Journals: as the site told the server, which countersigned it. Figures of signed dossiers stand above."
    return to_html(pivot("", columns, rows, notes=[note])) if rows else ""


def _gained(gains: Sequence[Entry]) -> str:
    if not gains:
        return ""

    def difference(row: Entry) -> str:
        ends = "" if row["low"] is None else f" [{formats.points(row['low'])}, {formats.points(row['high'])}]"
        return formats.points(row["difference"]) + ends

    columns = (
        Column("site", words=True, read=_words("site")),
        Column("alone, %", read=_percent("alone")),
        Column("global, %", read=_percent("together")),
        Column("personal, %", read=_percent("personal")),
        Column("pooled, %", read=_percent("pooled")),
        Column("difference, points", read=difference),
        Column("p, corrected", read=lambda row: formats.p_value(row["p"])),
        Column("records", read=_words("examples")),
    )
    note = (
        f"Difference: {gains[0]['deployed']} model of the federation minus the one that the site trains alone, on its "
        "own test records, one seed. Pooled: one model of all sites' records, a bound that no site could have."
    )
    if gains[0]["noised"]:
        note += " Alone and pooled are without the noise that the federation's model has for privacy."
    return page.listing([row["sentence"] for row in gains]) + to_html(pivot("", columns, gains, notes=[note]))


def _standing(rows: Sequence[Entry]) -> str:
    if not rows:
        return ""
    columns = (
        Column("site", words=True, read=_words("site")),
        Column("rounds", read=_words("rounds")),
        Column("norm", read=lambda row: row["norm"]),
        Column("cosine to the others", read=lambda row: figure_text("cosine", row["cosine"])),
        Column("loss on all, by round", read=lambda row: formats.names([f"{loss:.3g}" for loss in row["losses"]])),
        Column("model moves without it, %", read=_percent("influence")),
        Column("stands out by", words=True, read=lambda row: formats.names(row["far"])),
    )
    notes = [
        "Norm and cosine: of updates, means over rounds. Loss: of the site's update in the first, middle, last round. "
        "Moves: distance to the model trained without the site, as a share of the way from the start of training.",
        "A site stands out 3.5 robust standard deviations from the median; of fewer than five sites none is said to.",
    ]
    return to_html(pivot("", columns, rows, notes=notes).without_empty())


def _not_examined(rows: Sequence[Entry]) -> str:
    columns = (
        Column("what", words=True, read=_words("what")),
        Column("why", words=True, read=_words("why")),
        Column("would take", read=lambda row: row["seconds"], form=formats.duration),
    )
    return to_html(pivot("", columns, rows).without_empty()) if rows else ""
