"""Introduction of a report: methods, data, communication and measurements in sentences."""

from collections.abc import Sequence
from typing import Any

from confed.report.html import page
from confed.report.sections import captions as caption_sections
from confed.report.sections import general as sections
from confed.report.sections import labels as label_sections
from confed.report.sections import split_steps as steps
from confed.results import format as formats
from confed.results.deployed import global_note, personal_note, public_place, without_global, without_personal
from confed.results.headline import is_bound
from confed.results.runs import Study, number

__all__ = ["clients", "lead", "listed"]

_WORDS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six"),
    *("Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
)


def lead(study: Study) -> str:
    """Introduction of a report: the methods, data and models that were run."""
    first = study.runs[0]
    taking_part = _taking_part(study)
    names = listed(taking_part) if len(taking_part) <= 8 else ""
    sizes = [
        n
        for client in taking_part
        if (n := number(first.summary.get("examples", {}).get(client, {}).get("train"))) is not None
    ]
    labels, things = label_sections.labelled(study), _things(study)
    size = ""
    if sizes:
        low, high = int(min(sizes)), int(max(sizes))
        size = f"{low} training {things} each" if low == high else f"{low} to {high} training {things}"
    inner = "; ".join(part for part in (names, size) if part)
    text = f"{_counted(clients(study), 'client')} {f'({inner}) ' if inner else ''}trained "
    rounds = int(first.summary.get("rounds", 0))
    model = first.recipe.get("model", {}).get("name")
    kind = "model that gives every example any number of labels" if labels else "vision-language model"
    kind = "multimodal model" if _modal(study) else kind
    text += f"a {kind}{f' ({model})' if model else ''} "
    text += f"for {_counted(rounds, 'round', lower=True)}. "
    if study.single and is_bound(first.summary):
        text += "All data are in one place. "
    else:
        pooled = [study.labels[m] for m in study.methods if is_bound(study.of(m)[0].summary)]
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


def clients(study: Study) -> int:
    """Number of clients; of very many a summary names some and counts the others."""
    more = max((int(number(run.summary.get("more_clients")) or 0) for run in study.runs), default=0)
    return len(_taking_part(study)) + more


def _taking_part(study: Study) -> tuple[str, ...]:
    """The clients that a summary names; across machines those that have a site, as the data may have more."""
    sites = {name for run in study.runs for name in run.summary.get("federation", {})}
    return tuple(name for name in study.clients if name in sites) if sites else study.clients


def listed(names: Sequence[str]) -> str:
    """Names joined as in a sentence."""
    if any("," in name for name in names):
        return formats.names(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def _modal(study: Study) -> bool:
    """Whether examples have several modalities, or some of them only."""
    return any(run.summary.get("modality_matrix") for run in study.runs)


def _things(study: Study) -> str:
    """Plural name of the examples: "questions", "texts" or others."""
    if label_sections.labelled(study):
        return label_sections.unit(study)
    if caption_sections.captioned(study):
        return "texts"
    return "examples" if _modal(study) else "questions"


def _exchanged(study: Study) -> str:
    """Description of the communication between parties.

    A method of which no parameter is sent sends activations, or what models say of common examples, or nothing at
    all: messages that only say that a client is done have a few bytes, too.
    """
    split, scores, nothing, models = steps.splitting(study), list[str](), list[str](), False
    for method in study.methods:
        label, run = study.labels[method], study.of(method)[0]
        if label in split or is_bound(run.summary):
            continue
        if run.summary.get("parameters", {}).get("sent") != 0:
            models = True
        elif public_place(run.summary, run.recipe):
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


def _measured(study: Study) -> str:
    """Description of the measurements and the measured models."""
    if label_sections.labelled(study):
        return (
            "What is measured after the last round is how well the labels of test examples are told: by how a model "
            "sorts the examples (AP), and by which labels it predicts (P, R, F1)."
        )
    if caption_sections.captioned(study):
        return caption_sections.measured(study)
    firsts: dict[str, Any] = {study.labels[m]: study.of(m)[0].summary for m in study.methods}
    does, things = ("does on", "examples") if _modal(study) else ("answers", "questions")
    abroad = f", also in {listed(study.scenes)}, where nobody trained." if 0 < len(study.scenes) <= 8 else "."
    own = f"how well each client's own model {does} the {things} of that client"
    if all(map(without_global, firsts.values())):
        text = f"One thing is measured after the last round: {own}. There is no model for everybody."
    elif all(without_personal(summary) or is_bound(summary) for summary in firsts.values()):
        text = f"One thing is measured after the last round: how well the one model {does} everybody's {things}{abroad}"
    else:
        everybody = f"how well the one shared model {does} those of everybody"
        text = f"Two things are measured after the last round: {own}, and {everybody}{abroad}"
        if note := global_note(firsts):
            text += f" {note}"
    note = personal_note(firsts)
    return f"{text} {note}" if note else text


def _counted(number_of: int, noun: str, lower: bool = False) -> str:
    word = _WORDS[number_of] if 0 <= number_of < len(_WORDS) else str(number_of)
    return f"{word.lower() if lower else word} {noun}{'' if number_of == 1 else 's'}"
