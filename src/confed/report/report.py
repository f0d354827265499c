"""The report of a run or study in one file, ``report.html``.

It needs no network: drawings, pictures and styles are inside. It holds no date, so that the same results give
the same bytes. Its sections are those that modules of :mod:`confed.report.sections` declare.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import file_name
from confed.report import section
from confed.report.comparison import compare_runs, verdict
from confed.report.figures.results import further_bars
from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.html.page import listed
from confed.report.sections.general import has_modalities, tasks
from confed.report.tables import modalities
from confed.report.tables.cells import missing_sites_note
from confed.report.tables.methods import label_tables, labelled_rows, paper_table
from confed.report.tables.table import in_files, write_files
from confed.results.metric import metric_of
from confed.results.runs import StudyResults, load
from confed.system import format as formats

GLOSSARY: Mapping[str, str] = {
    "client": "One member of the federation, with data of its own that it does not share.",
    "personal": "A client's own model on its own test data. What makes a model a client's own depends on "
    "the method: its last local model before averaging, or the shared model after fine-tuning, or private parts beside "
    "shared ones. Methods without any use the global model.",
    "mean, worst": "Mean over clients, each counted once whatever its size; the client with the lowest value.",
    "global on seen": "The one shared model on the test data of the clients that trained it, mean over clients.",
    "global on unseen": "The one shared model on test data of places that took no part in training, mean over places.",
    "last round": "All test results are those after the last round. No round is chosen by its result.",
    "validation": "Learning curves are on the clients' validation data (a part of them, if the recipe "
    "says so); the clients' test data are looked at once, at the end. Unseen places have test data only, so their "
    "curves are on these, and nothing is chosen by them.",
    "± (sd)": "Standard deviation over seeds (divisor n − 1): other initial values and another order of examples.",
    "seed": "The number that all random choices of a run derive from. Methods with one seed start alike.",
    "bytes": "Length of the tensors' messages as they are serialised, not an estimate.",
    "central": "All data in one place, the same total number of epochs: a bound, not a federated method.",
    "local": "Every client trains alone; nothing is sent.",
    "paired test": "Both methods with the same seed (or on the same test question) are compared with "
    "each other, and only the differences count.",
    "sign flips": "Test over examples: if two methods do not differ, each question's difference is as likely as its "
    "negative. Signs are drawn within clients and clients are averaged, as in the tables; a question has one vote, its "
    "mean over seeds.",
    "margin": "Two one-sided tests (TOST): a small p-value says that a method is no worse than the reference by the "
    "margin, or no different by it.",
    "Holm": "Correction of p-values for the number of pairs of methods: all that could be compared on a measure, so "
    "that a pair has one p-value in the whole report.",
    "ECE": "Expected calibration error over 15 bins of confidence: mean distance between confidence and accuracy.",
    "attention": "How much the model looked at each part of the picture: bright is much, dark is little "
    "(brightness grows with the square root of the weight, which is 1 at the most looked-at part). A yellow frame is "
    "around the region that counted most, where the model reads regions.",
}


def write_tables(folder: Path, references: Sequence[str] | None = None, margin: float = 0.01) -> list[Path]:
    """Export of a study's tables to its folder: ``table`` (the paper's), ``compare`` and what goes with its data."""
    study = load(Path(folder))
    texts = in_files("table", paper_table(study))
    if rows := labelled_rows(study):
        for name, table in label_tables(rows, every=True).items():
            texts |= in_files(name, table)
    if (matrix := modalities.table(study)) is not None:
        texts |= in_files(modalities.FILE, matrix)
    if len(study.methods) > 1:
        texts |= compare_runs(study.runs, references, margin).files()
    return write_files(study.folder, texts)


def write_report(folder: Path) -> Path:
    """Export of ``report.html`` to a run's or study's folder; what is missing is named in it."""
    study = load(Path(folder))
    path = study.folder / "report.html"
    write_atomically(path, render(study).encode())
    return path


def render(study: StudyResults) -> str:
    """The report as HTML."""
    comparison = compare_runs(study.runs) if len(study.methods) > 1 else None
    made, kind = section.Page(study, comparison), section.kind_of(study)
    entries: list[tuple[str, str, str]] = []
    things = kind.things(study)
    for entry in section.sections():
        if entry.wants(study):
            title = kind.titles.get(entry.anchor, entry.title).format(things=things)
            entries.append((entry.anchor, title, entry.html(made)))
    terms = {term: text for term, text in GLOSSARY.items() if term not in kind.not_in_glossary}
    entries.append(("glossary", "What the terms mean", page.definitions({**kind.glossary, **terms})))
    verdict_text = "" if comparison is None else verdict(study, comparison)
    first = page.paragraph(verdict_text, "verdict") if verdict_text else ""
    title, chips = _title(study), page.chips(_chips(study, kind))
    head = f"{chips}<h1>{page.escape(title)}</h1>{first}{lead(study, kind, things)}{page.callout(_gaps(study))}"
    return page.document(title, head, entries, made.store.css)


def _title(study: StudyResults) -> str:
    recipe = study.recipe or "a federated run"
    if study.single:
        return f"{study.runs[0].label} on {recipe}"
    methods = len(study.methods)
    return f"{recipe}: {methods} methods compared" if methods > 1 else f"{recipe}: {study.runs[0].label}"


def _chips(study: StudyResults, kind: section.Kind) -> list[str]:
    rounds = sorted({run.summary.rounds for run in study.runs})
    chips = [
        "run" if study.single else "study",
        *(dict.fromkeys(filter(None, (run.summary.membership for run in study.runs)))),
        formats.counted(clients(study), "client"),
        f"{'–'.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} round{'' if rounds[-1] == 1 else 's'}",
        f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds",
        f"metric: {kind.metric or metric_of(study.runs)}",
    ]
    trainable = dict.fromkeys(run.summary.trainable for run in study.runs if run.summary.trainable)
    return chips + [f"trained: {name}" for name in trainable]


def _gaps(study: StudyResults) -> list[str]:
    """Notes on missing results, in sentences."""
    lines = [*study.remarks, *study.failed, *missing_sites_note([run.summary for run in study.runs])]
    for run in study.runs:
        who = "This run" if study.single else f"{run.label}, seed {run.seed}:"
        if not run.complete and run.place not in study.failures:
            planned = run.summary.planned_rounds
            of = f" of {planned}" if planned else ""
            lines.append(f"{who} was interrupted after round {run.summary.rounds}{of}; it has no test results.")
        absent = [f"{why} ({name})" for name, why in run.missing.items() if run.complete or name != "summary.json"]
        if absent and run.complete:
            lines.append(f"{who} lacks {listed(absent)}.")
    shown = 12
    return lines if len(lines) <= shown else [*lines[:shown], f"… and {len(lines) - shown} more."]


# Introduction: methods, data ----------------------------------------------------------------------------------

_WORDS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six"),
    *("Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
)


def lead(study: StudyResults, kind: section.Kind, things: str) -> str:
    """Introduction of a report: the methods, data and models that were run."""
    first = study.runs[0]
    modal = has_modalities(study)
    model = first.recipe.get("model", {}).get("name")
    text = f"{_counted(clients(study), 'client')} {_of_clients(study, things)}trained "
    text += f"a {'multimodal model' if modal else kind.model}{f' ({model})' if model else ''} "
    text += f"for {_counted(first.summary.rounds, 'round', lower=True)}. "
    if study.single and first.summary.is_bound:
        text += "All data are in one place. "
    else:
        pooled = [study.labels[m] for m in study.methods if study.of(m)[0].summary.is_bound]
        text += f"{things.capitalize() if modal or not kind.stays else kind.stays + things} never leave a client; "
        text += _exchanged(study)
        text += f"{listed(pooled)} pools all data in one place, as an upper bound. " if pooled else ""
    if study.single:
        return page.paragraph(f"{text}The method is {first.label}. {kind.measured(study)}", "lead")
    labels, seeds = [*study.labels.values()], len(study.seeds)
    models = [study.of(method)[0].recipe.get("model", {}) for method in study.methods]
    # Rows with learned embeddings of labels in the place of fixed ones have other models.
    alike = len(tasks(study)) < 2 and all(model == models[0] for model in models)
    text += f"{_counted(len(labels), 'method')} ({listed(labels)}) "
    text += "started from the same model" if alike else "trained on the same data"
    text += f", with {_counted(seeds, 'seed', lower=True)}. " if seeds > 1 else ". "
    return page.paragraph(text + kind.measured(study), "lead")


def _of_clients(study: StudyResults, things: str) -> str:
    """Names of the clients and the sizes of their data, in brackets; nothing where neither is told."""
    taking_part = _taking_part(study)
    names = listed(taking_part) if len(taking_part) <= 8 else ""
    examples = study.runs[0].summary.examples
    sizes = [examples[client]["train"] for client in taking_part if "train" in examples.get(client, {})]
    size = ""
    if sizes:
        low, high = int(min(sizes)), int(max(sizes))
        size = f"{low} training {things} each" if low == high else f"{low} to {high} training {things}"
    inner = "; ".join(phrase for phrase in (names, size) if phrase)
    return f"({inner}) " if inner else ""


def clients(study: StudyResults) -> int:
    """Number of clients; of very many a summary names some and counts the others."""
    return len(_taking_part(study)) + max((run.summary.more_clients for run in study.runs), default=0)


def _taking_part(study: StudyResults) -> tuple[str, ...]:
    """The clients that a summary names; across machines those that have a site, as the data may have more."""
    sites = set(chain.from_iterable(run.summary.sites for run in study.runs))
    return tuple(name for name in study.clients if name in sites) if sites else study.clients


def _exchanged(study: StudyResults) -> str:
    """Description of the communication between parties: models, activations, scores of common examples, or nothing."""
    models = False
    split: list[str] = []
    scores: list[str] = []
    nothing: list[str] = []
    for method, label in study.labels.items():
        run = study.of(method)[0]
        if any(other.summary.actions.get("step") for other in study.of(method)):
            split.append(label)
        elif run.summary.parameters.get("sent") != 0:
            models |= not run.summary.is_bound
        elif not run.summary.is_bound:
            (scores if run.summary.public_place(run.recipe) else nothing).append(label)
    if not models and not split:
        if not scores:
            return "nothing of them and of models is sent: every client trains alone. "
        alone = f"; {listed(nothing)} exchanges nothing" if nothing else ""
        return f"what the clients' models say of common examples is exchanged, and nothing of a model{alone}. "
    more = [f"{listed(split)}: activations and their gradients, batch by batch"] if split else []
    more += [f"{listed(scores)}: what the clients' models say of common examples"] if scores else []
    more += [f"{listed(nothing)}: nothing"] if nothing else []
    return "only model weights are exchanged" + (f" ({'; '.join(more)}). " if more else ". ")


def _counted(number_of: int, noun: str, lower: bool = False) -> str:
    word = _WORDS[number_of] if 0 <= number_of < len(_WORDS) else str(number_of)
    return f"{word.lower() if lower else word} {noun}{'' if number_of == 1 else 's'}"


# Figures in files ----------------------------------------------------------------------------------------------


def figures() -> dict[str, Callable[[StudyResults], Drawing | None]]:
    """Name of a file -> what draws it, of all sections of the report."""
    drawings: dict[str, Callable[[StudyResults], Drawing | None]] = {}
    for entry in section.sections():
        drawings |= entry.figures
    return drawings


def save_figures(folder: Path, out: Path | None = None, methods: Sequence[str] = ()) -> list[Path]:
    """Export of a report's figures as ``NAME.png`` and ``NAME.svg``, without those that have no data."""
    study = load(Path(folder))
    for method in methods:
        if method not in study.methods:
            raise ValueError(f"methods must be among {', '.join(study.methods)}, got {method!r}")
    if methods:
        study = replace(study, runs=tuple(run for run in study.runs if run.method in methods))
    out = Path(out) if out else study.folder / "figures"
    drawings = {name: make(study) for name, make in figures().items()}
    for measure, drawing in further_bars(study):
        drawings[f"measure-{file_name(measure.name)}"] = drawing
    paths: list[Path] = []
    for name, drawing in drawings.items():
        paths += [] if drawing is None else drawing.save(out, name)
    return paths
