"""Asking a finished run's models about a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from confed.data.examples import channels_first
from confed.data.pictures import PictureSource, read_picture, resize
from confed.inference.finished_run import FinishedRun

__all__ = ["predict", "predict_caption", "writes"]


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
    """Asks a finished run's model about a picture.

    Args:
        folder: a run folder, or a run that was read.
        image: a picture of any size: a file, an array or a PIL picture.
        question: the question.
        client: whose personal model answers; None for the global one.
        top: how many answers.
        image2: the second picture, for a client whose task has two.
        choices: the texts to choose from, for a client whose task is choosing.
        shared: with a client: the global values of what is shared, with the client's own head and private tensors.

    Returns:
        ``model`` ("global" or the client), and ``answers`` and ``unknown_words`` as
        :meth:`TrainedModel.ask` has them.

    Raises:
        ValueError: the folder is not that of a finished run, it has no such model, the question is empty, or
            the picture cannot be read.
    """
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
    """What a finished run's model says about a picture.

    Args:
        folder: a run folder, or a run that was read.
        image: a picture of any size: a file, an array or a PIL picture; it is squeezed to the
            shape of the training pictures.
        client: whose personal model writes; None for the global one.
        beams: width of the search; the recipe's by default.
        shared: with a client: the global values of what is shared, with the client's own private tensors.

    Returns:
        ``model`` ("global" or the client) and ``caption``.

    Raises:
        ValueError: the folder is not that of a finished run, it has no such model or one that writes no captions, the
            width is below 1, or the picture is missing or cannot be read.
    """
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
    table = channels_first(resize(picture, height)[None])
    assert isinstance(table, torch.Tensor)
    model: Any = trained.model
    with torch.inference_mode():
        tokens = model.write({"image": table}, beams)
    return {"model": client or "global", "caption": run.tokenizer.decode(tokens)[0]}
