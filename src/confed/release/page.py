"""The dossier as a page that loads nothing; everything on it is read from the content of ``dossier.json``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.tables.table import Cell, Column, Table, pivot, to_html
from confed.system import format as formats

CSS = ".note{overflow-wrap:anywhere}figure svg{max-width:620px}"
SHARES = ("membership_tpr", "site", "properties", "labels", "reconstruction", "cut")
"""How names of figures begin that are shares, and are written in percent."""


def page_of(sealed: Mapping[str, Any], drawings: Mapping[str, Sequence[Drawing]]) -> str:
    """The page of a sealed dossier, with the drawings of each probe."""
    content = sealed["content"]
    run = content["run"]
    title = f"Release dossier: {run['folder']}"
    head = f"<h1>{page.escape(title)}</h1>" + page.paragraph(f"{content['sentence']} {content['details']}", "lead")
    signature = sealed.get("signature")
    signed = "not signed"
    if signature is not None:
        signed = f"signed by {signature['public_key']}"
    head += page.paragraph(f"SHA-256 {sealed['sha256']}, {signed}.", "note")
    sections = [
        ("limits", "Limits", _limits(content)),
        ("run", "What was trained, by whom", _run(content)),
        ("sent", "What left each site", _sent(content)),
        ("gives-away", "What the model can give away", _gives_away(content, drawings)),
        ("gained", "What each site gained", _gained(content)),
        ("standing", "Sites that stand out", _standing(content)),
        ("not-examined", "What was not examined, and why", _not_examined(content)),
    ]
    return page.document(title, head, sections, CSS)


def figure_text(name: str, value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return formats.MISSING
    if isinstance(value, str):
        return "no bound" if value == "infinite" else value
    if name.startswith(SHARES):
        return f"{100 * value:.1f} %"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _cell(read: Callable[[Any], Any]) -> Callable[[Any], Cell]:
    """The reader of a figure's column."""

    def cell(row: Mapping[str, Any]) -> Cell:
        return Cell(figure_text(row["name"], read(row)))

    return cell


def _interval(row: Mapping[str, Any]) -> Cell:
    if row["low"] is None:
        return Cell("")
    return Cell(f"{figure_text(row['name'], row['low'])} to {figure_text(row['name'], row['high'])}")


def _figures(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Figures with their intervals, chance and corrected p-value."""
    columns = (
        Column("figure", words=True, read=lambda row: row["title"]),
        Column("value", read=_cell(lambda row: row["value"])),
        Column("95 % interval", read=_interval),
        Column("by chance", read=_cell(lambda row: row["chance"])),
        Column("p, corrected", read=lambda row: Cell(formats.p_value(row["p_corrected"]))),
        Column("of", read=lambda row: row["count"]),
        Column("limit", read=_cell(lambda row: row["release_limit"])),
        Column("verdict", words=True, read=lambda row: row["verdict"]),
    )
    return to_html(pivot(title, columns, rows).without_empty())


def _limits(content: Mapping[str, Any]) -> str:
    held = [row for row in content["figures"] if row["verdict"]]
    if not held:
        return page.paragraph(
            "No limits were set. A TOML file with [release] sets some: confed dossier RUN --limits FILE."
        )
    words = (
        "Beyond: over the limit, and for attacks chance is excluded after Holm's correction over all attacks here. "
        "Not settled: over the limit, and it may be chance. A limit on something that was not examined is not kept."
    )
    return _figures("", held) + page.paragraph(words, "note")


def _run(content: Mapping[str, Any]) -> str:
    run = content["run"]
    again = {True: "equal bits", False: "other bits: what was trained again is a like run", None: "not done"}
    entries = {
        "Method": run["method"],
        "Model": f"{run['model']}, trained: {run['trainable']}",
        "Data": f"{run['data']}, {formats.counted(len(run['sites']), 'site')}: {formats.names(run['sites'])}",
        "Training": f"{run['rounds']} rounds of {run['local']['epochs']} local epochs, batches of "
        f"{run['local']['batch_size']}, seed {run['seed']}",
        "Released": run["released"],
        "Trained again from the recipe": again[content["same_bits"]],
        "Protections": formats.names(list(run["protections"].values())) or "none",
    }
    return page.definitions(entries)


def _sent(content: Mapping[str, Any]) -> str:
    columns = (
        Column("site", words=True, read=lambda row: row["site"]),
        Column("records", read=lambda row: row["records"]),
        Column("rounds", words=True, read=lambda row: row["rounds"]),
        Column("times", read=lambda row: row["times"]),
        Column("sent", read=lambda row: row["bytes"], form=formats.size),
    )
    kinds = [f"{name}: {count:,} values" for name, count in content["kinds"].items()]
    words = f"Each time: {formats.names(kinds or ['no values of the model'])}."
    return page.paragraph(words) + to_html(pivot("", columns, content["sent"]))


def _gives_away(content: Mapping[str, Any], drawings: Mapping[str, Sequence[Drawing]]) -> str:
    parts: list[str] = []
    for probe in content["probes"]:
        rows = [row for row in content["figures"] if row["probe"] == probe["title"]]
        drawn = "".join(page.figure(drawing.inline()) for drawing in drawings.get(probe["name"], ()))
        notes = "".join(page.paragraph(note, "note") for note in probe["notes"])
        attacker = page.paragraph(f"The attacker: {probe['attacker'][0].lower()}{probe['attacker'][1:]}")
        parts.append(f"<h3>{page.escape(probe['title'])}</h3>{attacker}{_figures('', rows)}{drawn}{notes}")
    titles = [probe["title"] for probe in content["probes"]]
    rest = [row for row in content["figures"] if row["probe"] not in titles]
    parts.append(f"<h3>Guarantees and sizes</h3>{_figures('', rest)}")
    words = "An attack that works proves a leak; one that fails proves nothing: only ε is a bound."
    return "".join(parts) + page.paragraph(words, "note")


def _gained(content: Mapping[str, Any]) -> str:
    if not content["gains"]:
        return ""

    def percent(name: str) -> Callable[[Mapping[str, Any]], Cell]:
        return lambda row: Cell(formats.percent(row[name]))

    def interval(row: Mapping[str, Any]) -> Cell:
        ends = "" if row["low"] is None else f" [{formats.points(row['low'])}, {formats.points(row['high'])}]"
        return Cell(formats.points(row["difference"]) + ends)

    columns = (
        Column("site", words=True, read=lambda row: row["site"]),
        Column("alone, %", read=percent("alone")),
        Column("global, %", read=percent("together")),
        Column("personal, %", read=percent("personal")),
        Column("pooled, %", read=percent("pooled")),
        Column("difference, points", read=interval),
        Column("p, corrected", read=lambda row: Cell(formats.p_value(row["p"]))),
        Column("records", read=lambda row: row["examples"]),
    )
    deployed = content["gains"][0]["deployed"]
    note = (
        f"Difference: {deployed} model of the federation minus the model that the site trains alone, on its own test "
        "records, one seed. Pooled: one model of all sites' records, a bound that no site could have."
    )
    sentences = page.listing([row["sentence"] for row in content["gains"]])
    return sentences + to_html(pivot("", columns, content["gains"], notes=[note]))


def _standing(content: Mapping[str, Any]) -> str:
    rows = content["standing"]
    if not rows:
        return ""

    def number(name: str) -> Callable[[Mapping[str, Any]], Cell]:
        return lambda row: Cell(formats.MISSING if row[name] is None else f"{row[name]:.3g}")

    columns = (
        Column("site", words=True, read=lambda row: row["site"]),
        Column("rounds", read=lambda row: row["rounds"]),
        Column("norm", read=number("norm")),
        Column("cosine to the others", read=number("cosine")),
        Column("loss on all sites, by round", read=lambda row: Cell(", ".join(f"{x:.3g}" for x in row["losses"]))),
        Column("model moves without it", read=lambda row: Cell(formats.percent(row["influence"]) + " %")),
        Column("stands out by", words=True, read=lambda row: formats.names(row["far"])),
    )
    notes = [
        "Norm and cosine: of updates, means over rounds. Model moves without it: distance to the model trained without "
        "the site, as a share of the way from the start of training.",
        "A site stands out 3.5 robust standard deviations from the median; of fewer than five sites none is said to.",
    ]
    return to_html(pivot("", columns, rows, notes=notes).without_empty())


def _not_examined(content: Mapping[str, Any]) -> str:
    columns = (
        Column("what", words=True, read=lambda row: row["what"]),
        Column("why", words=True, read=lambda row: row["why"]),
        Column("would take", read=lambda row: row["seconds"], form=formats.duration),
    )
    return to_html(pivot("", columns, content["not_examined"]).without_empty()) if content["not_examined"] else ""


def figures_table(content: Mapping[str, Any]) -> Table:
    """All figures of a dossier for a terminal."""
    columns = (
        Column("probe", words=True, read=lambda row: row["probe"]),
        Column("figure", words=True, read=lambda row: row["title"]),
        Column("value", read=_cell(lambda row: row["value"])),
        Column("95 %", read=_interval),
        Column("limit", read=_cell(lambda row: row["release_limit"])),
        Column("verdict", words=True, read=lambda row: row["verdict"]),
    )
    return pivot("", columns, content["figures"]).without_empty()
