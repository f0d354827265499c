"""Gallery of a run: sample questions with global and personal answers and attention maps.

Where the method filters answers (FedP³), training questions follow, with the answers that the filter picks.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from confed.data.chat import pictures_shown, transcript
from confed.data.examples import Examples, presence
from confed.data.modalities import MODALITIES, is_modal, modalities_of
from confed.data.picture_tables import NoPictures
from confed.engines.local import Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.params import Params, copy_into
from confed.federation.protocols import Batch, Output, Task
from confed.federation.specs import Attends, ComparesCaptions, model_spec
from confed.federation.teacher import without_answers
from confed.federation.traits import GlobalModel
from confed.losses.preference import Filter, FiltersAnswers, forgotten
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.runs.encode import RunData
from confed.runs.media import kept_series, kept_sound

# Answers that FedP3's filter ranks first, for the gallery -----------------------------------------------------

SHOWN = 3
"""Answers per question, as in the paper."""


def filter_of(algorithm: Algorithm) -> Filter | None:
    """Answer filter of the method; None for other methods, and for filters that keep all or pick at random."""
    return algorithm.answer_filter if isinstance(algorithm, FiltersAnswers) else None


def picked(student: Tensor, teacher: Tensor, mode: Filter, answers: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The answers that a filter ranks first, per example."""
    r = forgotten(student, teacher, mode).softmax(dim=1)
    best = r.topk(min(SHOWN, len(answers)), dim=1).indices
    columns = {"r": r, "teacher": teacher.softmax(dim=1), "student": student.softmax(dim=1)}
    chosen = {name: torch.gather(values, 1, best).tolist() for name, values in columns.items()}
    result = []
    for b, row in enumerate(best.tolist()):
        result.append(
            [
                {"answer": answers[answer], **{name: float(f"{rows[b][n]:.3g}") for name, rows in chosen.items()}}
                for n, answer in enumerate(row)
            ]
        )
    return result


# Gallery of a run: sample questions with global and personal answers and --------------------------------------


def fill(workspace: Workspace, tensors: Mapping[str, Tensor]) -> None:
    """Loading of a model into the workspace: the initial values, then the given ones."""
    unknown = sorted(set(tensors) - set(workspace.tensors))
    if unknown:
        raise ValueError(f"the model has no tensors {unknown}")
    copy_into([workspace.tensors[n] for n in workspace.initial], list(workspace.initial.values()))
    copy_into([workspace.tensors[n] for n in tensors], list(tensors.values()))
    workspace.model.eval()


def answer(
    workspace: Workspace,
    batch: Batch,
    answers: tuple[str, ...],
    network: nn.Module | None = None,
    task: Any = None,
) -> list[dict[str, Any]]:
    """The model's answer, its probability and its attention over the picture, per question.

    Where models write captions, ``task`` (:class:`confed.tasks.captioning.Captioning`) says what they wrote.

    Where a method answers with more than the model, ``network`` does (``Algorithm.deployed_model``). Attention
    is over the patches, rows and columns, or over regions, with their "boxes" beside it.

    A head may give more scores than there are ``answers``; those beyond belong to no answer of this client.
    """
    with torch.no_grad():
        output: Output = (network or workspace.model)(batch)
        if isinstance(task, ComparesCaptions):
            return task.written(output, batch)
        # Similarities are no logits: the temperature that the model was trained with makes them some.
        temperature = model_spec(workspace.model).temperature
        best = (output.logits[:, : len(answers)] / temperature).softmax(-1).max(-1)
        plain = "image2" not in batch and "choices" not in batch  # attention over one picture, read with one text
        seen = (
            _looked(workspace.model.attention(batch), batch)
            if isinstance(workspace.model, Attends) and plain
            else [{"attention": None}] * len(output.logits)
        )
    return [
        {"answer": answers[int(i)], "probability": round(float(p), 4), **looked}
        for p, i, looked in zip(best.values, best.indices, seen, strict=True)
    ]


def _looked(maps: Tensor, batch: Batch) -> list[dict[str, Any]]:
    """Attention per question: over patches (B, rows, columns), or over regions (B, R) with their boxes.

    Regions of padding, which are all zeros, are left out.
    """
    if maps.ndim == 3:
        return [{"attention": _rounded(weights)} for weights in maps.tolist()]
    if "boxes" not in batch:
        return [{"attention": None}] * len(maps)
    has_region = batch["regions"].abs().sum(-1) > 0 if "regions" in batch else torch.ones_like(maps, dtype=torch.bool)
    result = []
    for weights, boxes, row in zip(maps, batch["boxes"], has_region, strict=True):
        result.append(
            {"attention": [round(v, 3) for v in weights[row].tolist()], "boxes": _rounded(boxes[row].tolist())}
        )
    return result


def written_models(
    folder: RunFolder, place: str, global_model: GlobalModel = "alone"
) -> tuple[Params | None, Params | None]:
    """The global model at a place, and the place's own one, as the run has written them; None where there is none."""
    paths = (folder.models / "global" / "trained.safetensors", folder.personal_model(place))
    shared, personal = (load_file(path) if path.exists() else None for path in paths)
    if shared is not None and personal is not None and global_model != "alone":
        shared = {**personal, **shared}  # as it was examined: what is shared, with what the client keeps to itself
    return shared, personal


def gallery(
    folder: RunFolder,
    workspace: Workspace,
    run_data: RunData,
    count: int,
    task_of: Callable[[str], Task] | None = None,
    *,
    network: nn.Module | None = None,
    global_model: GlobalModel = "alone",
    has_personal: bool = True,
) -> list[dict[str, Any]]:
    """``count`` test questions per place, spread over question types, from the models the run has written.

    For a method that filters answers, training questions of every client follow; they carry "forgotten". Where clients
    have answers or tasks of their own, ``task_of`` says which; ``network`` answers, where it is not the model alone.
    """
    entries: list[dict[str, Any]] = []
    places = [(name, split.test, run_data.clients[name], True) for name, split in run_data.questions.clients.items()]
    places += [(name, test, run_data.unseen[name], False) for name, test in run_data.questions.unseen.items()]
    usual = _usual(run_data)
    for number, (name, examples, data, seen) in enumerate(places):
        task = None if task_of is None else task_of(name)
        rows = _spread(examples, count, first=number)
        if not rows:
            continue
        groups = data.tables[2].groups(torch.tensor(rows))
        rows = list(chain.from_iterable(group.tolist() for group in groups))
        batches = list(map(data.tables[2].batch, groups))
        answers = run_data.dataset.answers
        if task is not None:
            answers = run_data.dataset.answer_set(name)
            workspace.set_task(task)
        common, personal = written_models(folder, name, global_model)
        common = common if seen or global_model == "alone" else None
        personal = personal if has_personal else None
        views = {
            view: None
            if tensors is None
            else [given for batch in batches for given in _answers(tensors, workspace, batch, answers, network, task)]
            for view, tensors in (("global", common), ("personal", personal))
        }
        for position, row in enumerate(rows):
            entries.append(
                {
                    **_question(name, examples, row),
                    **_senses(examples, row, usual),
                    "seen": seen,
                    **{view: given and _named(given[position], examples, row) for view, given in views.items()},
                }
            )
    return entries + _forgotten(folder, workspace, run_data, count)


def _forgotten(folder: RunFolder, workspace: Workspace, run_data: RunData, count: int) -> list[dict[str, Any]]:
    """Up to two training questions per client with what the filter picks (figure 8.5 of FedVQA)."""
    shared = folder.models / "global" / "trained.safetensors"
    mode = filter_of(load_recipe(folder.recipe).construct("algorithm")) if folder.recipe.is_file() else None
    if mode is None or not shared.exists():
        return []
    entries: list[dict[str, Any]] = []
    for number, (name, split) in enumerate(run_data.questions.clients.items()):
        personal = folder.personal_model(name)
        rows = _spread(split.train, min(count, 2), first=number)
        if not rows or not personal.exists():
            continue
        table = run_data.clients[name].tables[0]
        groups = table.groups(torch.tensor(rows))
        rows, batches = list(chain.from_iterable(group.tolist() for group in groups)), list(map(table.batch, groups))
        student, teacher = (
            torch.cat([_logits(path, workspace, without_answers(batch)) for batch in batches])
            for path in (personal, shared)
        )
        for row, answers in zip(rows, picked(student, teacher, mode, run_data.dataset.answers), strict=True):
            entries.append(
                {**_question(name, split.train, row), "seen": True, "role": "train",
                 "forgotten": {"filter": mode, "of": len(run_data.dataset.answers), "answers": answers}}
            )  # fmt: skip
    return entries


def _question(place: str, examples: Examples, row: int) -> dict[str, Any]:
    pictures = np.atleast_1d(examples.image_index[row])
    entry: dict[str, Any] = {
        "place": place,
        "question": examples.questions[row],
        "type": examples.types[row],
        "answer": examples.answers[row],
    }
    has_picture = bool(presence(examples)[row, 0])
    if examples.conversations is not None:
        pictures = pictures[: pictures_shown(examples.conversations[row])]
        has_picture = len(pictures) > 0
        entry["question"] = transcript(examples.conversations[row])
    if has_picture and not isinstance(examples.images, NoPictures):
        entry["image"] = png(examples.images[int(pictures[0])])
    if has_picture and len(pictures) > 1:
        entry["image2"] = png(examples.images[int(pictures[1])])
    if examples.captions is not None:
        entry |= {"captions": list(examples.captions[row]), "answer": examples.captions[row][0]}
    if examples.choices is not None:
        entry |= {"choices": list(examples.choices[row]), "answer": examples.choices[row][int(examples.answers[row])]}
    return entry


def _usual(run_data: RunData) -> set[str]:
    """The modalities that some client has; nothing where all examples have a picture and a text."""
    if not is_modal(run_data.questions):
        return set()
    return set(chain.from_iterable(modalities_of(run_data.questions).values()))


def _senses(examples: Examples, row: int, usual: set[str]) -> dict[str, Any]:
    """Sound and series of an example, and what it has and lacks of what is usual."""
    if not usual:
        return {}
    present = dict(zip(MODALITIES, presence(examples)[row].tolist(), strict=True))
    entry: dict[str, Any] = {
        "has": [name for name in MODALITIES if present[name]],
        "lacks": [name for name in MODALITIES if name in usual and not present[name]],
    }
    if present["audio"] and examples.sounds is not None and examples.sound_index is not None:
        entry["sound"] = kept_sound(examples.sounds, int(examples.sound_index[row]))
    if present["series"] and examples.series is not None and examples.series_index is not None:
        entry["series"] = kept_series(examples.series, int(examples.series_index[row]))
    return entry


def _named(given: dict[str, Any], examples: Examples, row: int) -> dict[str, Any]:
    """A model's answer, where the answers are positions with the text offered there."""
    if examples.choices is None:
        return given
    return {**given, "answer": examples.choices[row][int(given["answer"])]}


def _logits(path: Path, workspace: Workspace, batch: Batch) -> Tensor:
    fill(workspace, load_file(path))
    with torch.no_grad():
        return workspace.model(batch).logits


def _answers(
    tensors: Mapping[str, Tensor],
    workspace: Workspace,
    batch: Batch,
    answers: tuple[str, ...],
    network: nn.Module | None,
    task: Task | None,
) -> list[dict[str, Any]]:
    fill(workspace, tensors)
    return answer(workspace, batch, answers, network, task)


def _spread(examples: Examples, count: int, first: int) -> list[int]:
    """Rows of different types (from the ``first`` on) and different pictures, in stored order within each."""
    kinds = sorted(set(examples.types))
    if not kinds:
        return []
    rows: list[int] = []
    pictures: set[int] = set()
    seen = presence(examples)[:, 0].tolist()
    for turn in range(count):
        kind = kinds[(first + turn * max(1, len(kinds) // count)) % len(kinds)]
        for row, (own, picture) in enumerate(zip(examples.types, examples.image_index, strict=True)):
            # An example without a picture shares it with no other.
            first_picture = int(np.atleast_1d(picture)[0]) if seen[row] else -1 - row
            if own == kind and first_picture not in pictures:
                rows.append(row)
                pictures.add(first_picture)
                break
    return rows or list(range(min(count, len(examples))))


def png(pixels: Any) -> str:
    """A picture, uint8 (H, W, 3), as base64."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _rounded(values: list[list[float]]) -> list[list[float]]:
    result: list[list[float]] = []
    for row in values:
        result.append([round(v, 3) for v in row])
    return result
