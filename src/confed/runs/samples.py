"""Gallery of a run: test examples with the answers or labels of global and personal models, and attention maps.

Where the method filters answers (FedP³), training questions follow, with the answers that the filter picks. Of
contrastive models also similarities of a test batch before and after training.
"""

import base64
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from confed.data.chat import pictures_shown, transcript
from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.modalities import MODALITIES, is_modal, modalities_of
from confed.data.sounds import Series, Sounds
from confed.data.table import Table
from confed.engines.local import Setup, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.params import Params, copy_into
from confed.federation.protocols import Batch, Output, Task
from confed.federation.specs import Attends, ComparesCaptions, HasGrid, model_spec, task_spec
from confed.federation.teacher import without_answers
from confed.federation.traits import GlobalModel
from confed.losses.preference import Filter, FiltersAnswers, forgotten
from confed.models.contrastive import ContrastiveAnswerer
from confed.models.tokenizer import HasVocabulary
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.results.summary import VALIDATION
from confed.runs.encode import RunData
from confed.runs.evaluate import evenly
from confed.tasks.contrastive import same_answer_share

SHOWN = 3  # answers per question that the filter of FedP³ ranks first, as in the paper

LONGEST = 160_000
"""Bytes of sound that a sample has, at most: 10 s at 8 kHz, 5 s at 16 kHz. The rest is left out and said so."""

STEPS, CHANNELS = 128, 6  # steps, evenly spread, and channels of a series that a sample has, at most

CLIENTS, UNSEEN = 6, 4
"""Places with samples of labels: clients spread evenly over those with test examples, and the first unseen places."""

ASKED = 50  # clients that are looked through for those with test examples

SHOWN_LABELS, LEAST = 8, 5
"""Labels of an example that are shown: those that it has or that are predicted, and the most probable ones."""

SIDE = 256  # pixels per side of a picture in a page
COMPARED = 32  # examples whose similarities are shown; more could not be told apart in a drawing


def filter_of(algorithm: Algorithm) -> Filter | None:
    """Answer filter of the method; None for other methods, and for filters that keep all or pick at random."""
    return algorithm.answer_filter if isinstance(algorithm, FiltersAnswers) else None


def picked(student: Tensor, teacher: Tensor, mode: Filter, answers: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The answers that a filter ranks first, per example."""
    r = forgotten(student, teacher, mode).softmax(dim=1)
    best = r.topk(min(SHOWN, len(answers)), dim=1).indices
    columns = (r, teacher.softmax(dim=1), student.softmax(dim=1))
    shares = torch.stack([torch.gather(column, 1, best) for column in columns], dim=2)
    result: list[list[dict[str, Any]]] = []
    for labels, rows in zip(best.tolist(), shares.tolist(), strict=True):
        entries: list[dict[str, Any]] = []
        for label, row in zip(labels, rows, strict=True):
            named = zip(("r", "teacher", "student"), row, strict=True)
            entries.append({"answer": answers[label], **{name: float(f"{share:.3g}") for name, share in named}})
        result.append(entries)
    return result


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
    """The model's answer, its probability and its attention over patches or regions, per question."""
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
    """Attention per question: over patches (B, rows, columns), or over regions (B, R) with their boxes."""
    if maps.ndim == 3:
        return [{"attention": rounded(weights)} for weights in maps.cpu()]
    if "boxes" not in batch:
        return [{"attention": None}] * len(maps)
    has_region = batch["regions"].abs().sum(-1) > 0 if "regions" in batch else torch.ones_like(maps, dtype=torch.bool)
    rows = zip(maps.cpu(), batch["boxes"].cpu(), has_region.cpu(), strict=True)
    return [{"attention": rounded(weights[row]), "boxes": rounded(boxes[row])} for weights, boxes, row in rows]


def rounded(values: Tensor, decimals: int = 3) -> Any:
    """A tensor as lists of rounded numbers."""
    return [rounded(row, decimals) if row.ndim else round(float(row), decimals) for row in values]


def written_models(
    folder: RunFolder, place: str, global_model: GlobalModel = "alone"
) -> tuple[Params | None, Params | None]:
    """The global model at a place, and the place's own one, as the run has written them; None where there is none."""
    paths = (folder.models / "global" / "trained.safetensors", folder.personal_model(place))
    shared, personal = (load_file(path) if path.exists() else None for path in paths)
    if shared is not None and personal is not None and global_model != "alone":
        shared = {**personal, **shared}  # as it was examined: what is shared, with what the client keeps to itself
    return shared, personal


def by_view(
    folder: RunFolder, workspace: Workspace, method: Algorithm, place: str, seen: bool,
    look: Callable[[], list[dict[str, Any]]],
) -> dict[str, list[dict[str, Any]] | None]:  # fmt: skip
    """What a function sees with the global model at a place, and with the place's own; None where there is no such."""
    common, personal = written_models(folder, place, method.global_model)
    models = {
        "global": common if seen or method.global_model == "alone" else None,
        "personal": personal if seen and method.traits.has_personal else None,
    }
    views: dict[str, list[dict[str, Any]] | None] = {}
    for view, tensors in models.items():
        if tensors is not None:
            fill(workspace, tensors)
        views[view] = None if tensors is None else look()
    return views


def gallery(
    folder: RunFolder, workspace: Workspace, run_data: RunData, count: int, setup: Setup
) -> list[dict[str, Any]]:
    """``count`` test examples of each of some places, from the models that the run has written."""
    workspace.set_task(setup.task)
    entries_of = _of_labels if run_data.dataset.kind == "labels" else _of_questions
    return entries_of(folder, workspace, run_data, count, setup)


def _of_questions(
    folder: RunFolder, workspace: Workspace, run_data: RunData, count: int, setup: Setup
) -> list[dict[str, Any]]:
    """Test questions, spread over question types; for a method that filters answers, training questions too."""
    network = setup.algorithm.deployed_model(workspace.model)
    entries: list[dict[str, Any]] = []
    places = [(name, split.test, run_data.clients[name], True) for name, split in run_data.dataset.clients.items()]
    places += [(name, test, run_data.unseen[name], False) for name, test in run_data.dataset.unseen.items()]
    usual = _usual(run_data)
    for number, (name, examples, data, seen) in enumerate(places):
        rows = _spread(examples, count, first=number)
        if not rows:
            continue
        rows, batches = _batches(data.tables[2], rows)
        task, answers = setup.task_of(name), run_data.dataset.answer_set(name)
        workspace.set_task(task)

        def look(batches: list[Batch] = batches, answers: tuple[str, ...] = answers, task: Task = task) -> list[Any]:
            return list(chain.from_iterable(answer(workspace, batch, answers, network, task) for batch in batches))

        views = by_view(folder, workspace, setup.algorithm, name, seen, look)
        for position, row in enumerate(rows):
            entry = {**_question(name, examples, row), **_senses(examples, row, usual), "seen": seen}
            entry |= {view: given and _named(given[position], examples, row) for view, given in views.items()}
            entries.append(entry)
    return entries + _forgotten(folder, workspace, run_data, count)


def _batches(table: Table, rows: Sequence[int]) -> tuple[list[int], list[Batch]]:
    """Rows in the order of batches of what can be read together, and these batches."""
    groups = table.groups(torch.tensor(rows))
    return list(chain.from_iterable(group.tolist() for group in groups)), list(map(table.batch, groups))


def _forgotten(folder: RunFolder, workspace: Workspace, run_data: RunData, count: int) -> list[dict[str, Any]]:
    """Up to two training questions per client with what the filter picks (figure 8.5 of FedVQA)."""
    shared = folder.models / "global" / "trained.safetensors"
    mode = filter_of(load_recipe(folder.recipe).algorithm) if folder.recipe.is_file() else None
    if mode is None or not shared.exists():
        return []
    entries: list[dict[str, Any]] = []
    for number, (name, split) in enumerate(run_data.dataset.clients.items()):
        personal = folder.personal_model(name)
        rows = _spread(split.train, min(count, 2), first=number)
        if not rows or not personal.exists():
            continue
        rows, batches = _batches(run_data.clients[name].tables[0], rows)
        student, teacher = _logits(personal, workspace, batches), _logits(shared, workspace, batches)
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
    if has_picture and examples.has_pictures:
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
    if not is_modal(run_data.dataset):
        return set()
    return set(chain.from_iterable(modalities_of(run_data.dataset).values()))


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
        entry["sound"] = _sound(examples.sounds, int(examples.sound_index[row]))
    if present["series"] and examples.series is not None and examples.series_index is not None:
        entry["series"] = _series(examples.series, int(examples.series_index[row]))
    return entry


def _sound(sounds: Sounds, row: int) -> dict[str, Any]:
    """A shortened recording."""
    clip, buffer = sounds.row(row), io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sounds.rate)
        file.writeframes(clip[: LONGEST // 2].astype("<i2").tobytes())
    return {"wav": base64.b64encode(buffer.getvalue()).decode(), "seconds": round(len(clip) / sounds.rate, 3)}


def _series(series: Series, row: int) -> dict[str, Any]:
    """A shortened series."""
    values = series.row(row)
    chosen = np.linspace(0, len(values) - 1, min(len(values), STEPS)).round().astype(int)
    channels: list[list[float]] = []
    for channel in values[chosen, :CHANNELS].T.tolist():
        channels.append([float(f"{value:.4g}") for value in channel])
    return {"channels": list(series.channels), "values": channels, "steps": len(values)}


def _named(given: dict[str, Any], examples: Examples, row: int) -> dict[str, Any]:
    """A model's answer, where the answers are positions with the text offered there."""
    if examples.choices is None:
        return given
    return {**given, "answer": examples.choices[row][int(given["answer"])]}


def _logits(path: Path, workspace: Workspace, batches: Sequence[Batch]) -> Tensor:
    fill(workspace, load_file(path))
    with torch.no_grad():
        return torch.cat([workspace.model(without_answers(batch)).logits for batch in batches])


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
        for row, (row_kind, picture) in enumerate(zip(examples.types, examples.image_index, strict=True)):
            # An example without a picture shares it with no other.
            first_picture = int(np.atleast_1d(picture)[0]) if seen[row] else -1 - row
            if row_kind == kind and first_picture not in pictures:
                rows.append(row)
                pictures.add(first_picture)
                break
    return rows or list(range(min(count, len(examples))))


def png(pixels: Any) -> str:
    """A picture, uint8 (H, W, 3), as base64."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


# Examples with labels ------------------------------------------------------------------------------------------


class AtLabels:
    """Probabilities of labels, and how each label's token looks at the picture or the text."""

    def __init__(self, network: nn.Module, model: nn.Module | None = None) -> None:
        self.network, self.model = network, network if model is None else model

    @torch.no_grad()
    def probabilities(self, batch: Batch) -> Tensor:
        """Probabilities of labels, (B, C); 0 where a logit is NaN, as in evaluations."""
        return self.network(batch).logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf).sigmoid()

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor | None:
        """Attention of each label, (B, C, rows, columns) or (B, C, L), its largest 1; None if not told."""
        if not isinstance(self.model, Attends):
            return None
        maps = self.model.attention(batch)
        maps = maps / maps.amax(-1, keepdim=True).clamp_min(1e-12)
        if "image" not in batch:
            return maps
        return maps.unflatten(-1, self.model.grid) if isinstance(self.model, HasGrid) else None


def look(
    at: AtLabels, batch: Batch, labels: Sequence[str], threshold: float, words: Sequence[Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """Predictions and attention of a model for each example of a batch."""
    maps, examples = at.attention(batch), list[dict[str, Any]]()
    rows = zip(at.probabilities(batch).cpu(), batch["labels"].bool().cpu(), strict=True)
    for row, (probabilities, truth) in enumerate(rows):
        chosen, others = _chosen(probabilities, truth, threshold)
        entries: list[dict[str, Any]] = []
        for number in chosen:
            probability = round(float(probabilities[number]), 4)
            entry: dict[str, Any] = {"label": labels[number], "probability": probability, "there": bool(truth[number])}
            if maps is not None:
                weights = maps[row, number]
                entry["attention"] = rounded(weights if words is None else weights[: len(words[row])])
            entries.append(entry)
        examples.append({"labels": entries, "others": others})
    return examples


def _chosen(probabilities: Tensor, truth: Tensor, threshold: float) -> tuple[list[int], int]:
    """The labels shown, most probable first, and how many that matter are left out."""
    order = probabilities.argsort(descending=True, stable=True).tolist()
    matter = {number for number in order if probabilities[number] >= threshold or truth[number]}
    first = [number for number in order if number in matter][:SHOWN_LABELS]
    # What is there and not predicted must not be pushed out by what is predicted.
    missed = [number for number in order if truth[number] and number not in first]
    first = (first[: max(SHOWN_LABELS - len(missed), SHOWN_LABELS // 2)] + missed)[:SHOWN_LABELS]
    others = [number for number in order if number not in matter]
    shown = {*first, *others[: max(0, LEAST - len(first))]}
    return [number for number in order if number in shown], len(matter - shown)


def _of_labels(
    folder: RunFolder, workspace: Workspace, run_data: RunData, count: int, setup: Setup
) -> list[dict[str, Any]]:
    """``count`` test examples of each of some places, spread over their rows, from the models the run has written."""
    dataset = run_data.dataset
    at = AtLabels(setup.algorithm.deployed_model(workspace.model), workspace.model)
    threshold, entries = task_spec(setup.task).threshold, list[dict[str, Any]]()
    for name, examples, seen in _places(dataset):
        rows = evenly(range(len(examples)), count)
        data = (run_data.clients if seen else run_data.unseen)[name]
        batch = data.tables[2].batch(torch.tensor(rows))
        words = words_of(batch, run_data.tokenizer)
        seeing = partial(look, at, batch, dataset.answers, threshold, words)
        views = by_view(folder, workspace, setup.algorithm, name, seen, seeing)
        for position, row in enumerate(rows):
            entry = _example(examples, row, None if words is None else words[position])
            outputs = {view: None if given is None else given[position] for view, given in views.items()}
            entries.append({"place": name, "seen": seen, **entry, "threshold": threshold, **outputs})
            for output in filter(None, outputs.values() if position else ()):
                for label in output["labels"]:
                    label.pop("attention", None)
    return entries


def _places(dataset: FederatedDataset) -> list[tuple[str, Examples, bool]]:
    seen = {name: dataset.clients[name].test for name in evenly(list(dataset.clients), ASKED)}
    unseen = {name: examples for name, examples in dataset.unseen.items() if name != VALIDATION}
    seen_places = [(name, examples, True) for name, examples in seen.items() if len(examples)]
    unseen_places = [(name, examples, False) for name, examples in unseen.items() if len(examples)]
    return [*evenly(seen_places, CLIENTS), *unseen_places[:UNSEEN]]


def _example(examples: Examples, row: int, words: Sequence[str] | None) -> dict[str, Any]:
    assert examples.labels is not None
    entry: dict[str, Any] = {"name": examples.names[row], "labels": list(examples.labels.of(row))}
    if examples.types[row]:
        entry["type"] = examples.types[row]
    if examples.tables["image"]:
        entry["image"] = png(shrunk(examples.images[int(examples.image_index[row])]))
    else:
        entry["text"] = examples.questions[row]
    return entry | ({} if words is None else {"words": list(words)})


def shrunk(pixels: np.ndarray) -> np.ndarray:
    """A picture, uint8 (H, W, 3), with at most :data:`SIDE` pixels per side, as a page shows it."""
    scale = SIDE / max(pixels.shape[:2])
    if scale >= 1:
        return pixels
    height, width = (max(1, round(scale * side)) for side in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def words_of(batch: Batch, tokenizer: Any) -> list[list[str]] | None:
    """The tokens of each text; None of pictures, and where the tokenizer does not tell them."""
    if "text" not in batch or "image" in batch or not isinstance(tokenizer, HasVocabulary):
        return None
    result: list[list[str]] = []
    for row, length in zip(batch["text"].tolist(), batch["text_mask"].sum(1).tolist(), strict=True):
        result.append([tokenizer.vocabulary[token] for token in row[:length]])
    return result


# Similarities of contrastive models ----------------------------------------------------------------------------


def similarities(
    folder: RunFolder, workspace: Workspace, run_data: RunData, batch_size: int, count: int = COMPARED
) -> dict[str, Any] | None:
    """Content of ``similarity.json`` for a run with stored models; None for models that are not contrastive."""
    model = workspace.model
    if not isinstance(model, ContrastiveAnswerer):
        return None
    place = next((name for name, data in run_data.clients.items() if len(data.tables[2])), None)
    if place is None:
        return None
    files = {"personal": folder.personal_model(place), "global": folder.models / "global" / "trained.safetensors"}
    trained = {whose: load_file(path) for whose, path in files.items() if path.is_file()}
    if not trained:
        return None
    table = run_data.clients[place].tables[2]
    labels = table.columns["label"]
    in_vocabulary = (labels >= 0).nonzero().flatten()  # an answer outside the vocabulary has no representation
    if len(in_vocabulary) < 2:
        return None
    rows = in_vocabulary[torch.linspace(0, len(in_vocabulary) - 1, min(count, len(in_vocabulary))).round().long()]
    names = run_data.dataset.answers
    rows = torch.tensor(sorted(rows.tolist(), key=lambda row: (names[int(labels[row])], row)))
    batch = table.batch(rows)
    answers = [names[int(label)] for label in labels[rows]]
    summary: dict[str, Any] = {"place": place, "kind": model.eval_similarity, "answers": answers}
    summary["same"] = _same(run_data, batch_size)
    # What is global, with what the client keeps to itself where it does.
    after = trained.get("personal", {}) | trained.get("global", {})
    for when, tensors in (("before", {}), ("after", after)):
        fill(workspace, tensors)
        with torch.no_grad():
            similar = model(batch).logits[:, labels[rows]]
        summary[when] = rounded(similar.cpu(), 4)
    return summary


def _same(run_data: RunData, batch_size: int) -> float:
    """The share of same-answer negatives of an epoch, the mean over clients weighted by their examples."""
    total, examples = 0.0, 0
    for data in run_data.clients.values():
        labels = data.tables[0].columns["label"]
        total += len(labels) * same_answer_share(labels, batch_size, torch.Generator().manual_seed(0))
        examples += len(labels)
    return total / max(examples, 1)
