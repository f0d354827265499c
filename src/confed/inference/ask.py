"""Questions to a finished run's models, whatever they were trained for."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from confed.data.chat import Conversation, Said
from confed.data.examples import channels_first
from confed.data.intake.opening import PictureSource, read_picture
from confed.data.pictures import resize
from confed.inference.finished_run import FinishedRun, TrainedModel
from confed.losses.label_states import UNKNOWN
from confed.report.html import page
from confed.report.html.gallery import attention, bar, words
from confed.report.html.media import ImageStore
from confed.runs.samples import png, shrunk

# Conversations with a finished run's models about pictures ----------------------------------------------------


def converses(run: FinishedRun) -> bool:
    """Whether a run's models write free answers."""
    return run.recipe.sections["task"]["name"] == "chat"


class Talk:
    """A conversation with a model: what was said before stands in the prompt of the next answer.

    Attributes:
        turns: what was said so far.
    """

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
        if not converses(run):
            raise ValueError(f"the models of {run.folder} hold no conversation: ask them one question (--question)")
        pictures = [read_picture(image) for image in images]  # before the data are made, which takes seconds
        run.load()
        self.model, self.turns = client or "global", tuple[Said, ...]()
        self._trained = run.model(client, shared=shared)
        self._task, self._tokenizer = run.task(client), run.tokenizer
        size = self._trained.image_size
        shown = [channels_first(resize(picture, size, self._trained.fit)[None]) for picture in pictures]
        self._pictures = torch.cat([p for p in shown if isinstance(p, torch.Tensor)]) if shown else None
        self._none = torch.zeros(1, 3, size, size, dtype=torch.uint8)

    def ask(self, question: str) -> str:
        """The model's answer, which becomes a part of the conversation."""
        if not question.strip():
            raise ValueError(f"question must contain at least a word, got {question!r}")
        count = 0 if self._pictures is None else len(self._pictures)
        first: tuple[None, ...] = () if self.turns else (None,) * count
        asked: Conversation = (*self.turns, Said("user", (*first, question.strip())))
        text, mask = self._tokenizer.padded([self._tokenizer.prompt(asked)])
        image = (self._none if self._pictures is None else self._pictures)[None]
        batch = {"image": image, "image_count": torch.tensor([count]), "text": text, "text_mask": mask}
        answer = self._task.texts(self._trained(batch))[0]
        self.turns = (*asked, Said("assistant", (answer or "…",)))
        return answer

    def asked(self, questions: Sequence[str]) -> dict[str, Any]:
        """Answers to questions, one after the other."""
        return {"model": self.model, "turns": [{"question": text, "answer": self.ask(text)} for text in questions]}


# A page about one picture or text: the labels that a model gives it -------------------------------------------

SHOWN = 24  # labels on a page, unless more are predicted
Found = Mapping[str, Any]


def write_page(file: Path, found: Found, image: Path | str | None, text: str | None) -> None:
    picture = None if image is None else png(shrunk(read_picture(image)))
    name = "a text" if image is None else Path(image).name
    file.write_text(render(found, picture, text, name), encoding="utf-8")


def render(found: Found, picture: str | None, text: str | None, name: str) -> str:
    """The page as HTML that needs nothing but itself."""
    store = ImageStore()
    entries: Sequence[Found] = found["labels"]
    shown = max(SHOWN, sum(bool(entry["predicted"]) for entry in entries))
    rows = "".join(_row(entry, found) for entry in entries[:shown])
    style = store.add(picture)
    example = f'<div class="picture p256 {style}"></div>' if style else f"<p class=lead>{escape(text or '')}</p>"
    beside = "<th scope=col>alone</th><th scope=col>change</th>" if found["known"] else ""
    head = f"<tr><th scope=col>label</th><th scope=col></th><th scope=col>probability</th>{beside}</tr>"
    left = len(entries) - min(shown, len(entries))
    more = page.paragraph(f"{left} less probable labels are not listed.", "note") if left else ""
    table = f'<div class=scroll><table class="shares asked"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    sections = [
        ("labels", "Labels", f"{_known(found)}<div class=told><div>{example}</div><div>{table}{more}</div></div>"),
        ("attention", "Where each label looked", _styles(entries[:shown], style, found)),
    ]
    threshold = (
        f"A label is predicted from {100 * found['threshold']:.0f} % on: bold, and right of the line in its bar."
    )
    model = "the global model" if found["model"] == "global" else f"the model of {found['model']}"
    if not any(entry["predicted"] for entry in entries):
        threshold += " None reaches that here; below is where the most probable ones looked."
    lead = page.paragraph(f"What {model} ({found['run']}) says of it. {threshold}", "lead")
    return page.document(f"Labels of {name}", f"<h1>Labels of {escape(name)}</h1>{lead}", sections, store.css)


def _row(entry: Found, found: Found) -> str:
    beside = ""
    if found["known"]:
        change = round(100 * (entry["probability"] - entry["alone"]))
        crossed = (entry["alone"] >= found["threshold"]) != bool(entry["predicted"])
        text = f"{change:+d}".replace("-", "−") if change else "0"
        beside = f"<td>{100 * entry['alone']:.0f} %</td><td>{f'<b>{text}</b>' if crossed else text}</td>"
    return bar(str(entry["label"]), entry["probability"], found["threshold"], None, beside)


def _known(found: Found) -> str:
    if not found["known"]:
        return ""
    told = ", ".join(
        f"{one['label']}: {'yes' if one['state'] else 'no'} (alone the model says {100 * one['alone']:.0f} %)"
        for one in found["known"]
    )
    text = (
        f"Told to the model: {told}. Beside each probability what it was without that, and the change in points; bold "
        "where it crosses the threshold."
    )
    return page.paragraph(text)


def _styles(entries: Sequence[Found], style: str, found: Found) -> str:
    """Attention of each label that is predicted, or of the first few where none is."""
    predicted = [entry for entry in entries if entry["predicted"]] or list(entries[:6])
    predicted = [entry for entry in predicted if entry.get("attention") is not None]
    if not predicted:
        return ""
    bright, dark = ("Darkest", "unshaded") if found.get("words") else ("Bright", "dark")
    caption = page.paragraph(
        f"{bright} is what the label's token looked at most in the model's last layer, {dark} what it looked at "
        "little; each label for itself, so that shades cannot be compared between labels.",
        "muted",
    )
    if tokens := found.get("words"):
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


# Asking a finished run's models which labels a picture or a text has ------------------------------------------

_STATES: Mapping[str, bool] = {"yes": True, "no": False}


def predict_labels(
    folder: Path | FinishedRun,
    image: PictureSource | None = None,
    text: str | None = None,
    client: str | None = None,
    top: int | None = None,
    *,
    known: Sequence[str] = (),
    shared: bool = False,
    attention: bool = False,
) -> dict[str, Any]:
    """Asks a finished run's model for the labels of a picture or a text."""
    run = FinishedRun.of(folder)
    run.check(client, shared=shared)
    if not run.labelled:
        raise ValueError(
            f"the models of {run.folder} answer questions: give a question, and neither text nor known labels"
        )
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    rows = run.summary.labelled.get("per_class", ())
    if rows:  # before the data are made, which takes seconds
        known_labels(known, [str(row["label"]) for row in rows])
    if image is not None:
        read_picture(image)
    if text is not None and not text.strip():
        raise ValueError(f"text must contain at least a word, got {text!r}")
    run.load()
    trained = run.model(client, shared=shared)
    states = known_labels(known, trained.answers)
    if states and not run.reads_states:
        name = run.recipe.sections["model"]["name"]
        raise ValueError(f"the model {name!r} cannot be told known labels: leave them out")
    batch = _batch(trained, image, text)
    answer = {"run": f"{run.summary.label}, {run.recipe.name}", "model": client or "global"}
    answer |= _asked(trained, run, batch, states, top, attention)
    return answer if text is None else {**answer, "unknown_words": trained.unknown_words(text)}


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
                suggestion = f"the nearest are {', '.join(near)}" if near else f"there are {_some(labels)}"
                raise ValueError(f"known: no label is called {name!r}; {suggestion}")
            present = _STATES[state.casefold()]
            if labels_given.setdefault(label, present) != present:
                raise ValueError(f"known: {label!r} cannot be both yes and no")
    return labels_given


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


def _asked(
    trained: TrainedModel,
    run: FinishedRun,
    batch: dict[str, Tensor],
    states: Mapping[str, bool],
    top: int | None,
    attention: bool,
) -> dict[str, Any]:
    from confed.runs.samples import AtLabels, rounded, words_of

    labels = trained.answers
    at = AtLabels(trained.model, run.workspace.model)
    alone = at.probabilities(batch)[0]
    told = batch
    if states:
        known_column = torch.full((1, len(labels)), UNKNOWN, dtype=torch.int8)
        for label, present in states.items():
            known_column[0, labels.index(label)] = int(present)
        told = {**batch, "known": known_column}
    after = at.probabilities(told)[0] if states else alone
    maps = at.attention(told) if attention else None
    words = words_of(batch, trained.tokenizer)
    entries: list[dict[str, Any]] = []
    for number in after.argsort(descending=True, stable=True).tolist():
        if labels[number] in states:
            continue
        entry: dict[str, Any] = {
            "label": labels[number],
            "probability": round(float(after[number]), 6),
            "predicted": bool(after[number] >= run.threshold),
        }
        if states:
            entry["alone"] = round(float(alone[number]), 6)
        if maps is not None and (words is not None or "image" in batch):
            weights = maps[0, number]
            entry["attention"] = rounded(weights if words is None else weights[: len(words[0])])
        entries.append(entry)
    return {
        "threshold": run.threshold,
        "known": [
            {"label": label, "state": present, "alone": round(float(alone[labels.index(label)]), 6)}
            for label, present in states.items()
        ],
        "labels": entries[:top],
        **({} if words is None else {"words": words[0]}),
    }


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")


# Asking a finished run's models about a picture ---------------------------------------------------------------


def predict(
    folder: Path | FinishedRun,
    image: PictureSource,
    question: str,
    client: str | None = None,
    top: int = 3,
    *,
    image2: PictureSource | None = None,
    choices: Sequence[str] = (),
    shared: bool = False,
) -> dict[str, Any]:
    """Asks a finished run's model about a picture."""
    run = FinishedRun.of(folder)
    run.check(client, shared=shared)
    if run.labelled:
        raise ValueError(f"the models of {run.folder} give labels and answer no questions: leave the question out")
    if not question.strip():  # before the data are made, which takes seconds
        raise ValueError(f"question must contain at least a word, got {question!r}")
    for file in (image, image2):
        if file is not None:
            read_picture(file)
    run.load()
    trained = run.model(client, shared=shared)
    return {"model": client or "global", **trained.ask(image, question, top, image2=image2, choices=choices)}


def writes(run: FinishedRun) -> bool:
    """Whether a run's models write captions."""
    return run.recipe.sections["task"]["name"] == "captioning"


def predict_caption(
    folder: Path | FinishedRun,
    image: PictureSource,
    client: str | None = None,
    *,
    beams: int | None = None,
    shared: bool = False,
) -> dict[str, Any]:
    """What a finished run's model says about a picture."""
    run = FinishedRun.of(folder)
    run.check(client, shared=shared)
    if not writes(run):
        raise ValueError(f"the models of {run.folder} write no captions: ask them a question (--question)")
    picture = read_picture(image)  # before the data are made, which takes seconds
    run.load()
    trained = run.model(client, shared=shared)
    height, width = run.shapes["picture_size"]
    if height != width:
        raise ValueError(f"pictures must be square to be read here, the run's have {height} x {width} pixels")
    table = channels_first(resize(picture, height, trained.fit)[None])
    assert isinstance(table, torch.Tensor)
    model: Any = trained.model
    with torch.inference_mode():
        tokens = model.write({"image": table}, beams)
    return {"model": client or "global", "caption": run.tokenizer.decode(tokens)[0]}


# Questions to a finished run's models, whatever they were trained for -----------------------------------------

Kind = Literal["answers", "labels", "captions", "conversations"]

_DOES: Mapping[Kind, str] = {
    "answers": "answer questions and give no labels",
    "labels": "give labels and answer no questions",
    "captions": "write captions",
    "conversations": "write their answers",
}
_UNWANTED: Mapping[Kind, tuple[str, ...]] = {
    "answers": ("text", "known", "attention"),
    "labels": ("question", "image2", "choices"),
    "captions": ("question", "image2", "choices", "text", "known", "attention", "top"),
    "conversations": ("choices", "text", "known", "attention", "top"),
}


def kind_of_answers(run: FinishedRun) -> Kind:
    """What a run's models make of an example."""
    if run.labelled:
        return "labels"
    if writes(run):
        return "captions"
    return "conversations" if converses(run) else "answers"


def unwanted(kind: Kind, given: Mapping[str, object], names: Mapping[str, str] | None = None) -> str:
    """The error about an input that models of a kind do not read; empty if there is none."""
    extra = next((name for name in _UNWANTED[kind] if given.get(name)), "")
    return extra and f"this run's models {_DOES[kind]}: leave {(names or {}).get(extra, extra)} out"


def ask(
    run: FinishedRun,
    image: PictureSource | Sequence[PictureSource] | None = None,
    question: str | Sequence[str] | None = None,
    client: str | None = None,
    *,
    top: int | None = None,
    shared: bool = False,
    image2: PictureSource | None = None,
    choices: Sequence[str] = (),
    text: str | None = None,
    known: Sequence[str] = (),
    attention: bool = False,
) -> dict[str, Any]:
    """What a finished run's model says."""
    kind = kind_of_answers(run)
    given = {"question": question, "image2": image2 is not None, "choices": choices, "text": text, "known": known}
    if error := unwanted(kind, given | {"attention": attention, "top": top}):
        raise ValueError(error)
    pictures = [image] if isinstance(image, PictureSource) else list(image or ())
    asked = [question] if isinstance(question, str) else list(question or ())
    if kind == "conversations":
        shown = pictures if image2 is None else [*pictures, image2]
        return Talk(run, shown, client, shared=shared).asked(asked)
    if len(pictures) > 1 or len(asked) > 1:
        raise ValueError("this run's models read one picture and one question at a time")
    picture = pictures[0] if pictures else None
    if kind == "labels":
        return predict_labels(run, picture, text, client, top, known=known, shared=shared, attention=attention)
    if picture is None or (kind == "answers" and not asked):
        what = "captions: give a picture" if kind == "captions" else "answers: give a picture and a question"
        raise ValueError(f"this run's models give {what}")
    if kind == "captions":
        return predict_caption(run, picture, client, shared=shared)
    return predict(
        run, picture, asked[0], client, 3 if top is None else top, image2=image2, choices=choices, shared=shared
    )
