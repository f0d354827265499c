"""Questions to a finished run's models, whatever they were trained for: answers, labels, captions, conversations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from confed.data.chat import Conversation, Said
from confed.data.intake.opening import PictureSource, read_picture
from confed.data.refusals import listed
from confed.federation.specs import model_spec, task_spec
from confed.inference.finished_run import AnswerKind, FinishedRun, TrainedModel
from confed.losses.label_states import UNKNOWN
from confed.report.html import page
from confed.report.html.gallery import attention, bar, words
from confed.report.html.media import ImageStore
from confed.runs.samples import AtLabels, png, rounded, shrunk, words_of

_STATES: Mapping[str, bool] = {"yes": True, "no": False}
_WHAT: Mapping[str, str] = {"image": "a picture", "question": "a question"}


class Inputs(NamedTuple):
    """What a model is asked."""

    image: Sequence[PictureSource]
    question: Iterable[str]
    image2: Sequence[PictureSource]
    choices: Sequence[str]
    text: str | None
    known: Sequence[str]
    attention: bool
    top: int | None


class Kind(NamedTuple):
    """What models of a kind do, which inputs they read and need, and how one is asked."""

    does: str
    reads: tuple[str, ...]
    needs: tuple[str, ...]
    # None: questions are turns of one conversation
    answer: Callable[[FinishedRun, TrainedModel, Inputs], dict[str, Any]] | None


def ask(
    folder: Path | FinishedRun,
    image: PictureSource | Sequence[PictureSource] | None = None,
    question: str | Iterable[str] | None = None,
    client: str | None = None,
    *,
    top: int | None = None,
    shared: bool = False,
    image2: PictureSource | None = None,
    choices: Sequence[str] = (),
    text: str | None = None,
    known: Sequence[str] = (),
    attention: bool = False,
    names: Mapping[str, str] | None = None,
    each: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """What a finished run's model says of a picture or a text; all that can be checked is, before data are made.

    Messages call inputs by ``names``; ``each`` is called with every answer of a conversation as soon as it is written.
    """
    run = FinishedRun.of(folder)
    kind = KINDS[run.answer_kind]
    pictures = [image] if isinstance(image, PictureSource) else list(image or ())
    questions = [question] if isinstance(question, str) else question or ()
    second = () if image2 is None else (image2,)
    inputs = Inputs(pictures, questions, second, choices, text, known, attention, top)
    _check_kind(kind, inputs, names or {})
    if kind.answer is None:
        return Talk(run, [*pictures, *second], client, shared=shared).asked(questions, each)
    inputs = inputs._replace(question=list(questions))
    run.check(client, shared=shared)
    _check_values(run, inputs)
    run.load()
    return {"model": client or "global"} | kind.answer(run, run.model(client, shared=shared), inputs)


def _check_kind(kind: Kind, inputs: Inputs, names: Mapping[str, str]) -> None:
    """Check that models of a kind read what is given, and that they are given what they need."""
    given = {name for name, value in inputs._asdict().items() if value}
    if extra := next((name for name in Inputs._fields if name in given and name not in kind.reads), ""):
        raise ValueError(f"this run's models {kind.does}: leave {names.get(extra, extra)} out")
    lacking = [name for name in kind.needs if name not in given]
    if lacking:
        called = [f"{_WHAT[name]} ({names[name]})" if name in names else _WHAT[name] for name in lacking]
        raise ValueError(f"this run's models {kind.does}: give {' and '.join(called)}")


def _check_values(run: FinishedRun, inputs: Inputs) -> None:
    """Check of what is given before the data are made, which takes seconds."""
    questions = list(inputs.question)
    if len(inputs.image) > 1 or len(questions) > 1:
        raise ValueError(
            "this run's models read one picture and one question at a time, got "
            f"{len(inputs.image)} and {len(questions)}"
        )
    for name, text in (("question", next(iter(questions), None)), ("text", inputs.text)):
        if text is not None and not text.strip():
            raise ValueError(f"{name} must contain at least a word, got {text!r}")
    if inputs.top is not None and inputs.top < 1:
        raise ValueError(f"top must be at least 1, got {inputs.top}")
    if rows := run.summary.labelled.get("per_class", ()):
        known_labels(inputs.known, [str(row["label"]) for row in rows])
    for picture in (*inputs.image, *inputs.image2):
        read_picture(picture)


def _answers(run: FinishedRun, trained: TrainedModel, inputs: Inputs) -> dict[str, Any]:
    """The most probable answers to a question about a picture."""
    (image,), (question,) = inputs.image, inputs.question
    top = 3 if inputs.top is None else inputs.top
    return trained.ask(image, question, top, image2=next(iter(inputs.image2), None), choices=inputs.choices)


# Conversations and captions -----------------------------------------------------------------------------------


class Talk:
    """A conversation with a model: what was said before stands in the prompt of the next answer."""

    def __init__(
        self,
        folder: Path | FinishedRun,
        images: Sequence[PictureSource],
        client: str | None = None,
        *,
        shared: bool = False,
    ) -> None:
        run = FinishedRun.of(folder)
        run.check(client, shared=shared)
        pictures = [read_picture(image) for image in images]  # before the data are made, which takes seconds
        run.load()
        self.model, self.turns = client or "global", tuple[Said, ...]()
        self._trained = run.model(client, shared=shared)
        self._tokenizer: Any = self._trained.tokenizer
        side = self._trained.image_size
        self._count = len(pictures)
        shown = [self._trained.picture(picture) for picture in pictures]
        self._pictures = torch.cat(shown or [torch.zeros(1, 3, side, side, dtype=torch.uint8)])[None]

    def ask(self, question: str) -> str:
        """The model's answer, which becomes a part of the conversation."""
        if not question.strip():
            raise ValueError(f"question must contain at least a word, got {question!r}")
        first: tuple[None, ...] = () if self.turns else (None,) * self._count
        turns: Conversation = (*self.turns, Said("user", (*first, question.strip())))
        text, mask = self._tokenizer.padded([self._tokenizer.prompt(turns)])
        count = torch.tensor([self._count])
        batch = {"image": self._pictures, "image_count": count, "text": text, "text_mask": mask}
        answer = self._trained.task.texts(self._trained(batch))[0]
        self.turns = (*turns, Said("assistant", (answer or "…",)))
        return answer

    def asked(self, questions: Iterable[str], each: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Answers to questions, one after the other."""
        turns: list[dict[str, str]] = []
        for question in questions:
            turns.append({"question": question, "answer": self.ask(question)})
            if each is not None:
                each(turns[-1]["answer"])
        return {"model": self.model, "turns": turns}


def _caption(run: FinishedRun, trained: TrainedModel, inputs: Inputs) -> dict[str, Any]:
    """The caption that a model writes to a picture."""
    height, width = run.shapes["picture_size"]
    if height != width:
        raise ValueError(f"pictures must be square to be read here, the run's have {height} x {width} pixels")
    model: Any = trained.model
    tokenizer: Any = trained.tokenizer
    with torch.inference_mode():
        tokens = model.write({"image": trained.picture(inputs.image[0])}, None)
    return {"caption": tokenizer.decode(tokens)[0]}


# Labels of a picture or a text --------------------------------------------------------------------------------


def _labels(run: FinishedRun, trained: TrainedModel, inputs: Inputs) -> dict[str, Any]:
    """Labels by their probability, with those that are known told to the model; without, beside it."""
    labels, threshold = trained.answers, task_spec(trained.task).threshold
    states = known_labels(inputs.known, labels)
    if states and not model_spec(run.workspace.model).reads_states:
        name = run.recipe.sections["model"]["name"]
        raise ValueError(f"the model {name!r} cannot be told known labels: leave them out")
    batch = _batch(trained, next(iter(inputs.image), None), inputs.text)
    at = AtLabels(trained.model, run.workspace.model)
    alone = after = at.probabilities(batch)[0]
    told = batch
    if states:
        known_column = torch.full((1, len(labels)), UNKNOWN, dtype=torch.int8)
        for label, present in states.items():
            known_column[0, labels.index(label)] = int(present)
        told = {**batch, "known": known_column}
        after = at.probabilities(told)[0]
    maps = at.attention(told) if inputs.attention else None
    tokens = words_of(batch, trained.tokenizer)
    entries: list[dict[str, Any]] = []
    for number in after.argsort(descending=True, stable=True).tolist():
        if labels[number] in states:
            continue
        entry: dict[str, Any] = {
            "label": labels[number],
            "probability": round(float(after[number]), 6),
            "predicted": bool(after[number] >= threshold),
        }
        if states:
            entry["alone"] = round(float(alone[number]), 6)
        if maps is not None and (tokens is not None or "image" in batch):
            weights = maps[0, number]
            entry["attention"] = rounded(weights if tokens is None else weights[: len(tokens[0])])
        entries.append(entry)
    known_entries = [
        {"label": label, "state": present, "alone": round(float(alone[labels.index(label)]), 6)}
        for label, present in states.items()
    ]
    answer = {
        "run": f"{run.summary.label}, {run.recipe.name}", "threshold": threshold, "known": known_entries,
        "labels": entries[: inputs.top],
    }  # fmt: skip
    if tokens is not None:
        answer["words"] = tokens[0]
    return answer if inputs.text is None else {**answer, "unknown_words": trained.unknown_words(inputs.text)}


def _batch(trained: TrainedModel, image: PictureSource | None, text: str | None) -> dict[str, Tensor]:
    if trained.image_size:
        if text is not None:
            raise ValueError("this model reads pictures: leave the text out")
        if image is None:
            raise ValueError("this model reads pictures: give one (--image)")
        return dict(trained.seen(image))
    if image is not None:
        raise ValueError("this model reads texts: leave the picture out")
    if text is None:
        raise ValueError("this model reads texts: give one (--text)")
    ids, mask = trained.tokenizer([text])
    return {"text": ids, "text_mask": mask}


def known_labels(texts: Sequence[str], labels: Sequence[str]) -> dict[str, bool]:
    """Label -> whether it is present, of texts such as "sky=yes, car=no"."""
    lower = {name.casefold(): name for name in reversed(labels)}
    labels_given: dict[str, bool] = {}
    for text in texts:
        whole, _, last = text.rpartition("=")
        for label_text in [text] if whole.strip() in labels and "," not in last else text.split(","):
            name, sign, state = (piece.strip() for piece in label_text.rpartition("="))
            if not sign or not name or state.casefold() not in _STATES:
                raise ValueError(
                    f"known must be LABEL=yes or LABEL=no, several with commas, got {label_text.strip()!r}"
                )
            label = name if name in labels else lower.get(name.casefold())
            if label is None:
                near = [lower[word] for word in get_close_matches(name.casefold(), list(lower), 5, 0.5)]
                suggestion = f"the nearest are {', '.join(near)}" if near else f"there are {listed(labels, 10)}"
                raise ValueError(f"known: no label is called {name!r}; {suggestion}")
            present = _STATES[state.casefold()]
            if labels_given.setdefault(label, present) != present:
                raise ValueError(f"known: {label!r} cannot be both yes and no")
    return labels_given


KINDS: Mapping[AnswerKind, Kind] = {
    "answers": Kind(
        "answer questions", ("image", "question", "image2", "choices", "top"), ("image", "question"), _answers
    ),
    "labels": Kind("give labels", ("image", "text", "known", "attention", "top"), (), _labels),
    "captions": Kind("write captions", ("image",), ("image",), _caption),
    "conversations": Kind("write their answers", ("image", "question", "image2"), (), None),
}


# A page about one picture or text: the labels that a model gives it -------------------------------------------

SHOWN = 24  # labels on a page, unless more are predicted
Answer = Mapping[str, Any]


def write_page(file: Path, answer: Answer, image: Path | str | None, text: str | None) -> None:
    picture = None if image is None else png(shrunk(read_picture(image)))
    name = "a text" if image is None else Path(image).name
    file.write_text(render(answer, picture, text, name), encoding="utf-8")


def render(answer: Answer, picture: str | None, text: str | None, name: str) -> str:
    """The page as HTML that needs nothing but itself."""
    store = ImageStore()
    entries: Sequence[Answer] = answer["labels"]
    shown = max(SHOWN, sum(bool(entry["predicted"]) for entry in entries))
    rows = "".join(_row(entry, answer) for entry in entries[:shown])
    style = store.add(picture)
    example = f'<div class="picture p256 {style}"></div>' if style else f"<p class=lead>{escape(text or '')}</p>"
    beside = "<th scope=col>alone</th><th scope=col>change</th>" if answer["known"] else ""
    head = f"<tr><th scope=col>label</th><th scope=col></th><th scope=col>probability</th>{beside}</tr>"
    left = len(entries) - min(shown, len(entries))
    more = page.paragraph(f"{left} less probable labels are not listed.", "note") if left else ""
    table = f'<div class=scroll><table class="shares asked"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    sections = [
        ("labels", "Labels", f"{_told(answer)}<div class=told><div>{example}</div><div>{table}{more}</div></div>"),
        ("attention", "Where each label looked", _styles(entries[:shown], style, answer)),
    ]
    threshold = (
        f"A label is predicted from {100 * answer['threshold']:.0f} % on: bold, and right of the line in its bar."
    )
    model = "the global model" if answer["model"] == "global" else f"the model of {answer['model']}"
    if not any(entry["predicted"] for entry in entries):
        threshold += " None reaches that here; below is where the most probable ones looked."
    lead = page.paragraph(f"What {model} ({answer['run']}) says of it. {threshold}", "lead")
    return page.document(f"Labels of {name}", f"<h1>Labels of {escape(name)}</h1>{lead}", sections, store.css)


def _row(entry: Answer, answer: Answer) -> str:
    beside = ""
    if answer["known"]:
        change = round(100 * (entry["probability"] - entry["alone"]))
        crossed = (entry["alone"] >= answer["threshold"]) != bool(entry["predicted"])
        text = f"{change:+d}".replace("-", "−") if change else "0"
        beside = f"<td>{100 * entry['alone']:.0f} %</td><td>{f'<b>{text}</b>' if crossed else text}</td>"
    return bar(str(entry["label"]), entry["probability"], answer["threshold"], None, beside)


def _told(answer: Answer) -> str:
    if not answer["known"]:
        return ""
    told = ", ".join(
        f"{one['label']}: {'yes' if one['state'] else 'no'} (alone the model says {100 * one['alone']:.0f} %)"
        for one in answer["known"]
    )
    text = (
        f"Told to the model: {told}. Beside each probability what it was without that, and the change in points; bold "
        "where it crosses the threshold."
    )
    return page.paragraph(text)


def _styles(entries: Sequence[Answer], style: str, answer: Answer) -> str:
    """Attention of each label that is predicted, or of the first few where none is."""
    predicted = [entry for entry in entries if entry["predicted"]] or list(entries[:6])
    predicted = [entry for entry in predicted if entry.get("attention") is not None]
    if not predicted:
        return ""
    bright, dark = ("Darkest", "unshaded") if answer.get("words") else ("Bright", "dark")
    caption = page.paragraph(
        f"{bright} is what the label's token looked at most in the model's last layer, {dark} what it looked at "
        "little; each label for itself, so that shades cannot be compared between labels.",
        "muted",
    )
    if tokens := answer.get("words"):
        rows = "".join(
            f"<tr><td>{escape(str(e['label']))}</td><td>{words(tokens, e['attention'])}</td></tr>" for e in predicted
        )
        return f"{caption}<table class=looks>{rows}</table>"
    cells = "".join(
        f"<div>{drawn}<small>{escape(str(e['label']))} {100 * e['probability']:.0f} %</small></div>"
        for e in predicted
        if (drawn := attention(style, e["attention"]))
    )
    return f"{caption}<div class=strip>{cells}</div>" if cells else ""
