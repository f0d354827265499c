"""Asking a finished run's models which labels a picture or a text has, and how known labels change the others."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.data.pictures import PictureSource, read_picture
from confed.inference.finished_run import FinishedRun
from confed.inference.trained_model import TrainedModel
from confed.losses.label_states import UNKNOWN

__all__ = ["known_labels", "predict_labels"]

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
    """Asks a finished run's model for the labels of a picture or a text.

    Args:
        folder: the folder of a run whose examples have labels, or the run.
        image: a picture of any size: a file, an array or a PIL picture, for a model of pictures.
        text: for a model of texts.
        client: whose personal model answers; None for the global one.
        top: how many labels, the most probable ones; all by default.
        known: labels whose state is known, as :func:`known_labels` reads them.
        shared: as for :func:`confed.inference.predict.predict`.
        attention: say how much each label looks at each part of the example, where the model tells.

    Returns:
        ``run``, method and recipe; ``model`` ("global" or the client); ``threshold``, the probability from which on a
        label is predicted; ``known``, a list of ``label``, ``state`` (True: present) and ``alone``; ``labels``, those
        that are not known, the most probable first: ``label``, ``probability``, ``predicted``, where some are known
        ``alone``, and with ``attention`` that of each label, rows and columns, or one weight for each of ``words``, the
        largest being 1. ``alone`` is the probability that the model gives when it is told nothing. Of texts besides
        ``words``, the tokens, where the tokenizer tells them, and ``unknown_words``.

    Raises:
        ValueError: the folder is not that of a finished run with labels, it has no such model, the picture or the text
            is missing, not wanted or cannot be read, or ``known`` is faulty or the model does not read it.
    """
    run = FinishedRun.of(folder)
    run.check(client, shared=shared)
    if not run.labelled:
        raise ValueError(
            f"the models of {run.folder} answer questions: give a question, and neither text nor known labels"
        )
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    rows = run.summary.get("multilabel", {}).get("per_class", ())
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
    found = {"run": f"{run.summary['label']}, {run.recipe.name}", "model": client or "global"}
    found |= _asked(trained, run, batch, states, top, attention)
    return found if text is None else {**found, "unknown_words": trained.unknown_words(text)}


def known_labels(texts: Sequence[str], labels: Sequence[str]) -> dict[str, bool]:
    """Label -> whether it is present, of texts such as "sky=yes, car=no".

    Args:
        texts: each names one label or several with commas between them; capitals do not matter.
        labels: the names that there are, which may hold commas themselves in a text of their own.

    Raises:
        ValueError: a part is no "LABEL=yes" or "LABEL=no", names no label (the nearest ones are listed), or says both.
    """
    lower = {name.casefold(): name for name in reversed(labels)}
    found: dict[str, bool] = {}
    for text in texts:
        whole, _, last = text.rpartition("=")
        for part in [text] if whole.strip() in labels and "," not in last else text.split(","):
            name, sign, state = (piece.strip() for piece in part.rpartition("="))
            if not sign or not name or state.casefold() not in _STATES:
                raise ValueError(f"known must be LABEL=yes or LABEL=no, several with commas, got {part.strip()!r}")
            label = name if name in labels else lower.get(name.casefold())
            if label is None:
                near = [lower[word] for word in get_close_matches(name.casefold(), list(lower), 5, 0.5)]
                there = f"the nearest are {', '.join(near)}" if near else f"there are {_some(labels)}"
                raise ValueError(f"known: no label is called {name!r}; {there}")
            present = _STATES[state.casefold()]
            if found.setdefault(label, present) != present:
                raise ValueError(f"known: {label!r} cannot be both yes and no")
    return found


def _batch(trained: TrainedModel, image: PictureSource | None, text: str | None) -> dict[str, Tensor]:
    """One example as the model reads it."""
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
    from confed.runs.label_samples import AtLabels, rounded, words_of

    labels = trained.answers
    at = AtLabels(trained.model, run.workspace.model)
    alone = at.probabilities(batch)[0]
    told = batch
    if states:
        known = torch.full((1, len(labels)), UNKNOWN, dtype=torch.int8)
        for label, present in states.items():
            known[0, labels.index(label)] = int(present)
        told = {**batch, "known": known}
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
