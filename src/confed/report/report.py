"""The report of a run or study in one file, ``report.html``.

It needs no network: drawings, pictures and styles are inside. It holds no date, so that the same results give
the same bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.report.comparison import compare_runs, verdict
from confed.report.html import page
from confed.report.html.gallery import gallery
from confed.report.html.image_store import ImageStore
from confed.report.html.page import Tabs
from confed.report.sections import captions as caption_sections
from confed.report.sections import fedp3_answers as forgotten
from confed.report.sections import fedp3_filter as filter_size
from confed.report.sections import general as sections
from confed.report.sections import labels as label_sections
from confed.report.sections import privacy_curve, similarity
from confed.report.sections import privacy_spent as spent
from confed.report.sections import split_steps as steps
from confed.report.sections.general import significance
from confed.report.tables import control_marks
from confed.report.tables import modalities as modality_matrix
from confed.report.tables.cells import missing_sites_note
from confed.results.metric import metric_of
from confed.results.runs import RunResults, StudyResults, load
from confed.results.settings import flat, tuning_note
from confed.results.summary import WORST, Summary, global_note, personal_note
from confed.results.views import View
from confed.system import format as formats

# Introduction of a report: methods, data ----------------------------------------------------------------------

_WORDS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six"),
    *("Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
)


def lead(study: StudyResults) -> str:
    """Introduction of a report: the methods, data and models that were run."""
    first = study.runs[0]
    taking_part = _taking_part(study)
    names = listed(taking_part) if len(taking_part) <= 8 else ""
    examples = first.summary.examples
    sizes = [examples[client]["train"] for client in taking_part if "train" in examples.get(client, {})]
    labels, things = label_sections.labelled(study), _things(study)
    size = ""
    if sizes:
        low, high = int(min(sizes)), int(max(sizes))
        size = f"{low} training {things} each" if low == high else f"{low} to {high} training {things}"
    inner = "; ".join(phrase for phrase in (names, size) if phrase)
    text = f"{_counted(clients(study), 'client')} {f'({inner}) ' if inner else ''}trained "
    rounds = first.summary.rounds
    model = first.recipe.get("model", {}).get("name")
    kind = "model that gives every example any number of labels" if labels else "vision-language model"
    kind = "multimodal model" if _modal(study) else kind
    text += f"a {kind}{f' ({model})' if model else ''} "
    text += f"for {_counted(rounds, 'round', lower=True)}. "
    if study.single and first.summary.is_bound:
        text += "All data are in one place. "
    else:
        pooled = [study.labels[m] for m in study.methods if study.of(m)[0].summary.is_bound]
        text += f"{things.capitalize() if labels or _modal(study) else f'Pictures and {things}'} never leave a client; "
        text += _exchanged(study)
        text += f"{listed(pooled)} pools all data in one place, as an upper bound. " if pooled else ""
    if study.single:
        text += f"The method is {first.label}. "
    else:
        seeds = len(study.seeds)
        methods = study.labels
        text += f"{_counted(len(methods), 'method')} ({listed(list(methods.values()))}) "
        alike = len(sections.tasks(study)) < 2 and not label_sections.models_differ(study)
        text += "started from the same model" if alike else "trained on the same data"
        text += f", with {_counted(seeds, 'seed', lower=True)}. " if seeds > 1 else ". "
    return page.paragraph(text + _measured(study), "lead")


def clients(study: StudyResults) -> int:
    """Number of clients; of very many a summary names some and counts the others."""
    return len(_taking_part(study)) + max((run.summary.more_clients for run in study.runs), default=0)


def _taking_part(study: StudyResults) -> tuple[str, ...]:
    """The clients that a summary names; across machines those that have a site, as the data may have more."""
    sites = set(chain.from_iterable(run.summary.sites for run in study.runs))
    return tuple(name for name in study.clients if name in sites) if sites else study.clients


def listed(names: Sequence[str]) -> str:
    """Names joined as in a sentence."""
    if any("," in name for name in names):
        return formats.names(names)
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _modal(study: StudyResults) -> bool:
    """Whether examples have several modalities, or some of them only."""
    return any(run.summary.has_modality_matrix for run in study.runs)


def _things(study: StudyResults) -> str:
    """Plural name of the examples: "questions", "texts" or others."""
    if label_sections.labelled(study):
        return label_sections.unit(study)
    if caption_sections.captioned(study):
        return "texts"
    return "examples" if _modal(study) else "questions"


def _exchanged(study: StudyResults) -> str:
    """Description of the communication between parties.

    A method of which no parameter is sent sends activations, or what models say of common examples, or nothing at
    all: messages that only say that a client is done have a few bytes, too.
    """
    split, scores, nothing, models = steps.splitting(study), list[str](), list[str](), False
    for method in study.methods:
        label, run = study.labels[method], study.of(method)[0]
        if label in split or run.summary.is_bound:
            continue
        if run.summary.parameters.get("sent") != 0:
            models = True
        elif run.summary.public_place(run.recipe):
            scores.append(label)
        else:
            nothing.append(label)
    if not models and not split:
        if not scores:
            return "nothing of them and of models is sent: every client trains alone. "
        alone = f"; {listed(nothing)} exchanges nothing" if nothing else ""
        return f"what the clients' models say of common examples is exchanged, and nothing of a model{alone}. "
    more = [f"{listed(split)}: activations and their gradients, batch by batch"] if split else []
    more += [f"{listed(scores)}: what the clients' models say of common examples"] if scores else []
    more += [f"{listed(nothing)}: nothing"] if nothing else []
    return "only model weights are exchanged" + (f" ({'; '.join(more)}). " if more else ". ")


def _measured(study: StudyResults) -> str:
    """Description of the measurements and the measured models."""
    if label_sections.labelled(study):
        return (
            "What is measured after the last round is how well the labels of test examples are told: by how a model "
            "sorts the examples (AP), and by which labels it predicts (P, R, F1)."
        )
    if caption_sections.captioned(study):
        return caption_sections.measured(study)
    firsts: dict[str, Summary] = {study.labels[m]: study.of(m)[0].summary for m in study.methods}
    does, things = ("does on", "examples") if _modal(study) else ("answers", "questions")
    abroad = f", also in {listed(study.scenes)}, where nobody trained." if 0 < len(study.scenes) <= 8 else "."
    personal_sentence = f"how well each client's own model {does} the {things} of that client"
    if all(summary.without_global for summary in firsts.values()):
        text = f"One thing is measured after the last round: {personal_sentence}. There is no model for everybody."
    elif all(summary.without_personal or summary.is_bound for summary in firsts.values()):
        text = f"One thing is measured after the last round: how well the one model {does} everybody's {things}{abroad}"
    else:
        everybody = f"how well the one shared model {does} those of everybody"
        text = f"Two things are measured after the last round: {personal_sentence}, and {everybody}{abroad}"
        if note := global_note(firsts):
            text += f" {note}"
    note = personal_note(firsts)
    return f"{text} {note}" if note else text


def _counted(number_of: int, noun: str, lower: bool = False) -> str:
    word = _WORDS[number_of] if 0 <= number_of < len(_WORDS) else str(number_of)
    return f"{word.lower() if lower else word} {noun}{'' if number_of == 1 else 's'}"


# The report of a run or study in one file, report.html --------------------------------------------------------

GLOSSARY: Mapping[str, str] = {
    "client": "One member of the federation, with data of its own that it does not share.",
    "personal": "A client's own model on its own test data. What makes a model a client's own depends on "
    "the method: "
    "its last local model before averaging, or the shared model after fine-tuning, or private parts "
    "beside shared "
    "ones. Methods without any use the global model.",
    "mean, worst": "Mean over clients, each counted once whatever its size; the client with the lowest value.",
    "global on seen": "The one shared model on the test data of the clients that trained it, mean over clients.",
    "global on unseen": "The one shared model on test data of places that took no part in training, mean over places.",
    "last round": "All test results are those after the last round. No round is chosen by its result.",
    "validation": "Learning curves are on the clients' validation data (a part of them, if the recipe "
    "says so); the "
    "clients' test data are looked at once, at the end. Unseen places have test data only, so their "
    "curves are on "
    "these, and nothing is chosen by them.",
    "± (sd)": "Standard deviation over seeds (divisor n − 1): other initial values and another order of examples.",
    "seed": "The number that all random choices of a run derive from. Methods with one seed start alike.",
    "bytes": "Length of the tensors' messages as they are serialised, not an estimate.",
    "central": "All data in one place, the same total number of epochs: a bound, not a federated method.",
    "local": "Every client trains alone; nothing is sent.",
    "paired test": "Both methods with the same seed (or on the same test question) are compared with "
    "each other, and "
    "only the differences count.",
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


def write_report(folder: Path) -> Path:
    """Export of ``report.html`` to the folder of a run or study.

    What is missing, as after an interrupted run, is named in the report and left out.

    Raises ``ValueError``: the folder is neither a run nor a study.
    """
    study = load(Path(folder))
    path = study.folder / "report.html"
    write_atomically(path, render(study).encode())
    return path


def render(study: StudyResults) -> str:
    """The report as HTML."""
    tabs, store = Tabs(), ImageStore()
    comparison = compare_runs(study.runs) if len(study.methods) > 1 else None
    title = _title(study)
    labels = label_sections.labelled(study)
    about = label_sections if labels else sections
    tiles = label_sections.tiles(study) if labels else _tiles(study)
    kinds = "Kinds of example" if labels or caption_sections.captioned(study) else "Types of question"
    entries = [
        ("results", "Results", tiles + about.results(study, tabs)),
        ("significance", "Differences between methods", significance(comparison, tabs)),
        ("learning", "Learning curves", sections.learning(study)),
        ("clients", "Clients", sections.clients(study)),
        ("matrix", "Each model on each client's data", sections.matrices(study, tabs)),
        ("controls", "Whether models use their input", control_marks.section(study)),
        ("modalities", "With only some of the modalities", modality_matrix.section(study, tabs)),
        ("labels", "Labels, from frequent to rare", label_sections.labels(study)),
        ("together", "Labels that go together", label_sections.pairs(study, tabs)),
        ("types", kinds, sections.question_types(study, tabs)),
        ("calibration", "Calibration", sections.calibration(study)),
        ("cost", "Cost", sections.cost(study)),
        ("steps", "Steps of split learning", steps.section(study)),
        ("privacy", "Accuracy against privacy", privacy_curve.section(study)),
        ("spent", "Privacy of clients", spent.section(study)),
        ("similarity", "Similarities before and after training", similarity.section(study, tabs)),
        ("filter", "Answers compared, and their cost", filter_size.section(study)),
        ("captions", "Written captions", caption_sections.section(study)),
        ("gallery", *_samples(study, tabs, store)),
        ("forgotten", "Answers that the filter picks", forgotten.section(study, tabs, store)),
        ("notes", "Errors and notes", _errors(study)),
        ("data", "Data and settings", _settings(study, tabs)),
        ("glossary", "What the terms mean", page.definitions(_glossary(labels))),
    ]
    verdict_text = "" if comparison is None else verdict(study, comparison)
    first = page.paragraph(verdict_text, "verdict") if verdict_text else ""
    head = f"{page.chips(_chips(study))}<h1>{page.escape(title)}</h1>{first}{lead(study)}{page.callout(_gaps(study))}"
    return page.document(title, head, entries, store.css)


def _samples(study: StudyResults, tabs: Tabs, store: ImageStore) -> tuple[str, str]:
    """Title and content of the gallery."""
    if label_sections.labelled(study):
        return f"Sample {label_sections.unit(study)}", gallery(study, tabs, store, labels=True)
    title = "Sample captions" if caption_sections.captioned(study) else "Sample answers"
    return title, _wording(study, gallery(study, tabs, store))


def _glossary(labels: bool) -> Mapping[str, str]:
    """The terms of a page."""
    if not labels:
        return GLOSSARY
    return dict(label_sections.GLOSSARY) | {term: text for term, text in GLOSSARY.items() if term != "ECE"}


def _title(study: StudyResults) -> str:
    recipe = study.recipe or "a federated run"
    if study.single:
        return f"{study.runs[0].label} on {recipe}"
    methods = len(study.methods)
    return f"{recipe}: {methods} methods compared" if methods > 1 else f"{recipe}: {study.runs[0].label}"


def _chips(study: StudyResults) -> list[str]:
    rounds = sorted({run.summary.rounds for run in study.runs})
    chips = [
        "run" if study.single else "study",
        *(dict.fromkeys(filter(None, (run.summary.membership for run in study.runs)))),
        formats.counted(clients(study), "client"),
        f"{'–'.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} round{'' if rounds[-1] == 1 else 's'}",
        f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds",
        f"metric: {'C-AP' if label_sections.labelled(study) else metric_of(study.runs)}",
    ]
    trainable = dict.fromkeys(run.summary.trainable for run in study.runs if run.summary.trainable)
    return chips + [f"trained: {name}" for name in trainable]


def _tiles(study: StudyResults) -> str:
    """The key figures of a run on its own."""
    if not study.single or not study.runs[0].complete:
        return ""
    summary = study.runs[0].summary
    names = {
        View.PERSONAL.mean: "personal models, mean over clients (%)",
        WORST: "the worst client's personal model (%)",
        View.SEEN.mean: "global model on the clients' data (%)",
        View.UNSEEN.mean: "global model on unseen places (%)",
    }
    if summary.without_personal or summary.is_bound:
        del names[View.PERSONAL.mean]  # it would be the global model's again
        names[WORST] = "the worst client (%)"
    if summary.without_global:
        names = {name: words for name, words in names.items() if name.startswith("personal")}
    names |= {name: summary.over_clients(names[name]) for name in names if name != View.UNSEEN.mean}
    tile_rows = [(formats.percent(summary.headline(name)), words) for name, words in names.items()]
    tile_rows.append((formats.size(summary.cost("bytes_total")), "sent in all"))
    tile_rows.append((formats.duration(summary.cost("seconds")), "wall time"))
    return page.tiles(tile_rows)


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


def _errors(study: StudyResults) -> str:
    """Calls that failed, notes of the runs."""
    html = ""
    lines: list[str] = []
    for run in study.runs:
        who = "" if study.single else f"{run.label}, seed {run.seed}, "
        for error in run.summary.errors:
            lines.append(f"{who}round {error.get('round')}, {error.get('client')}: {error.get('error')}")
    shown = 40
    if lines:
        items = "".join(f"<li>{page.escape(line)}</li>" for line in lines[:shown])
        more = page.paragraph(f"… and {len(lines) - shown} more.") if len(lines) > shown else ""
        html += f"<h3>Calls that failed ({len(lines)})</h3><ul>{items}</ul>{more}"
    else:
        html += page.paragraph("No call to a client failed.")
    notes = dict.fromkeys(
        f"{'' if study.single else run.label + ': '}{note}" for run in study.runs for note in run.summary.notes
    )
    if notes:
        html += "<h3>Notes</h3><ul>" + "".join(f"<li>{page.escape(note)}</li>" for note in notes) + "</ul>"
    return html


def _wording(study: StudyResults, cards: str) -> str:
    """The sample answers, after a word about the language of the questions where the data have one."""
    facts = study.runs[0].summary.facts
    if not cards or "wording" not in facts:
        return cards
    return page.paragraph(f"The questions: {facts['wording']}.", "muted") + cards


def _settings(study: StudyResults, tabs: Tabs) -> str:
    """Sizes and floors of the data, the recipes, the versions."""
    first = study.runs[0]
    html = ""
    definitions = {str(key): str(value) for key, value in first.summary.facts.items()}
    if not definitions:
        for client, sizes in first.summary.examples.items():
            definitions[client] = ", ".join(f"{size:.0f} {role}" for role, size in sizes.items())
    html += page.definitions(definitions) if definitions else ""
    note = tuning_note([study.of(method)[0] for method in study.methods])
    html += page.paragraph(note) if note else ""
    recipes = [(study.labels[m], _recipe(study.of(m)[0])) for m in study.methods if study.of(m)[0].recipe]
    if recipes:
        html += f"<details><summary>Resolved recipe</summary>{tabs(recipes)}</details>"
    versions = [f"{name} {version}" for name, version in first.summary.versions.items()]
    if versions:
        html += f"<h3>Versions</h3>{page.paragraph(', '.join(versions), 'muted')}"
    differing = [run for run in study.runs if run.complete and run.summary.versions != first.summary.versions]
    if differing:
        html += page.callout([f"{run.label}, seed {run.seed}, ran with other versions." for run in differing])
    return html


def _recipe(run: RunResults) -> str:
    lines = [f"{key} = {value!r}" for key, value in flat(run.recipe).items()]
    return f"<pre>{page.escape(chr(10).join(lines))}</pre>"
