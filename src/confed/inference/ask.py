"""Questions to a finished run's models, whatever they were trained for."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from confed.data.pictures import PictureSource
from confed.inference.finished_run import FinishedRun
from confed.inference.predict import predict, predict_caption, writes
from confed.inference.predict_chat import Talk, converses
from confed.inference.predict_labels import predict_labels

__all__ = ["Kind", "ask", "kind_of_answers", "unwanted"]

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
    """The error about an input that models of a kind do not read; empty if there is none.

    Args:
        kind: what they give.
        given: input as :func:`ask` calls it -> its value; None and empty ones are not given.
        names: input -> its name in the error, where that is another.
    """
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
    """What a finished run's model says.

    Args:
        run: the run.
        image: a picture of any size: a file, an array or a PIL picture; a sequence of them for a conversation.
        question: the question; a sequence of them for a conversation.
        client: whose personal model answers; None for the global one.
        top: how many answers (3 by default) or labels (all).
        shared: with a client: the global values of what is shared, with the client's own head and private tensors.
        image2: the second picture, where the task has two.
        choices: the texts to choose from, where the task is choosing.
        text: a text, for models that label texts.
        known: labels whose state is known, such as "sky=yes".
        attention: say how much each label looks at each part of the example.

    Returns:
        As :func:`confed.inference.predict.predict`, :func:`confed.inference.predict.predict_caption`,
        :func:`confed.inference.predict_labels.predict_labels` and :meth:`confed.inference.predict_chat.Talk.asked` say,
        for models that answer, write captions, label and converse.

    Raises:
        ValueError: an input is missing, not wanted or cannot be read, or there is no such model.
    """
    kind = kind_of_answers(run)
    given = {"question": question, "image2": image2 is not None, "choices": choices, "text": text, "known": known}
    if error := unwanted(kind, given | {"attention": attention, "top": top}):
        raise ValueError(error)
    pictures = [] if image is None else [image] if isinstance(image, PictureSource) else list(image)
    asked = [] if question is None else [question] if isinstance(question, str) else list(question)
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
