"""Choice of a model for a folder of data by a short trial on a part of its examples."""

import inspect
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from confed.engines.executor import attach
from confed.engines.perform import Workspace
from confed.federation.batches import rows
from confed.federation.evaluate import evaluate
from confed.federation.local import make_optimizer
from confed.federation.protocols import Counting
from confed.federation.specs import task_spec
from confed.prepare.own_data import Found
from confed.prepare.recipe_draft import Training, candidates, draft
from confed.recipes.recipe import Recipe, parse_recipe
from confed.registry import datasets
from confed.runs.build import prepare

VISION = "google/mobilenet_v2_1.0_224"
TEXT = "sentence-transformers/paraphrase-MiniLM-L3-v2"
HUB = ("huggingface.co", 443)
PATIENCE = 1.0  # seconds in which the hub must answer to count as reachable
EXAMPLES, FEWEST = 320, 60  # training examples of a trial, and fewest that there must be
JUDGED, LEAST = 128, 20  # validation examples that it is judged by, and fewest
PASSES = 12
MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Tried:
    """What a trial measured of one model."""

    name: str
    metric: str  # of the score
    score: float
    trained: int  # examples
    judged: int  # examples
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.metric} {self.score:.0%} on {self.judged} validation examples, after "
            f"{self.seconds:.0f} s with {self.trained} training examples"
        )


def choose(found: Found, encoder: str, text_encoder: str, seconds: float) -> tuple[Training | None, list[str]]:
    """The best of the models that a form of data can be trained with, and what was measured; None if nothing was."""
    vision, texts, why = _encoders(
        encoder, text_encoder, reads_texts=found.form not in ("classes", "labels", "objects")
    )
    options = candidates(found.form, vision, texts)
    if len(options) < 2 or not seconds:
        return None, []
    tried: list[tuple[Tried, Training]] = []
    told = [why] if why else []
    for name, training in options.items():
        recipe = parse_recipe(draft(found, "trial", training=training), "trial")
        try:
            # An encoder computes features once, which takes most of its time.
            share = 0.5 if training.model["name"] == "encoders" else 0.25
            result = measure(name, _small(recipe), seconds * share)
        except ValueError as error:
            told.append(f"not tried: {name}: {error}")
            continue
        if result is None:
            return None, [f"no trial of models: it takes {FEWEST} training examples and {LEAST} to validate on"]
        tried.append((result, training))
    if not tried:
        return None, told
    best = max(tried, key=lambda item: item[0].score)
    told = [*(f"tried {result}" for result, _ in tried), *told]
    return best[1], [*told, f"taken: {best[0].name}, the best of a trial of {len(tried)}"]


def _small(recipe: Recipe) -> Recipe:
    """The recipe with pictures that are opened when they are read, where its dataset can do that."""
    name = recipe.sections["data"]["name"]
    lazy = {"in_memory": False} if "in_memory" in inspect.signature(datasets[name]).parameters else {}
    sections = {**recipe.sections, "data": {**recipe.sections["data"], **lazy}}
    return replace(recipe, sections=sections).method("fedavg")


def measure(name: str, recipe: Recipe, seconds: float) -> Tried | None:
    """A model trained on a part of the examples of all clients together, for at most so long; None for too few."""
    setup, run_data = prepare(recipe)
    clients = list(run_data.clients.values())
    judging = _in_turn([iter(client.validation(LEAST)) for client in clients])
    if sum(map(len, clients)) < FEWEST or sum(map(rows, islice(judging, len(clients)))) < LEAST:
        return None
    model: Any = Workspace(setup.model())
    model, frozen = model.model, model.frozen
    attach(model, frozen, MEMORY)
    optimizer = make_optimizer([value for value in model.parameters() if value.requires_grad], recipe.local)
    rng = torch.Generator().manual_seed(recipe.run.seed)
    batch_size = recipe.local.batch_size
    began = time.monotonic()
    part: list[Mapping[str, Any]] = []
    trained = 0

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        setup.task.loss(model(batch), batch).backward()
        optimizer.step()

    model.train()
    for batch in _in_turn([iter(client.train(batch_size, rng)) for client in clients]):
        step(batch)
        part.append(batch)
        trained += rows(batch)
        if trained >= EXAMPLES or time.monotonic() - began > 0.5 * seconds:
            break
    for batch in chain.from_iterable([part] * (PASSES - 1)):
        if time.monotonic() - began > 0.7 * seconds:
            break
        step(batch)
    judged = 0

    def judged_in_time() -> Iterator[Any]:
        nonlocal judged
        for batch in _in_turn([iter(client.validation(16)) for client in clients]):
            judged += rows(batch)
            yield batch
            if judged >= JUDGED or (judged >= LEAST and time.monotonic() - began > seconds):
                return

    counts: dict[str, torch.Tensor] = {}
    total, weight = evaluate(model, setup.task, judged_in_time(), counts=counts)[setup.task.metric]
    metric, score = setup.task.metric, total / weight
    if isinstance(setup.task, Counting):  # of labels, which are rare, a threshold says little after so short a training
        metric = task_spec(setup.task).score
        score = setup.task.values(counts)[metric]
    return Tried(name, metric, score, trained, judged, time.monotonic() - began)


def _in_turn(sources: list[Iterator[Any]]) -> Iterator[Any]:
    """One item of each source after the other, until all are at their end."""
    while sources:
        rest: list[Iterator[Any]] = []
        for source in sources:
            item = next(source, None)
            if item is not None:
                yield item
                rest.append(source)
        sources = rest


def _encoders(encoder: str, text_encoder: str, *, reads_texts: bool) -> tuple[str, str, str]:
    """The encoders of pictures and texts that can be read now, empty where there is none, and what is missing."""
    vision, text = encoder or VISION, text_encoder or TEXT
    wanted = [vision, *([text] if reads_texts else [])]
    lacking = [name for name in wanted if not (Path(name).expanduser().is_dir() or name.startswith("tiny:"))]
    lacking = [name for name in lacking if not in_cache(name)]
    if lacking and not hub_answers():
        return (
            "",
            "",
            f"not tried: {lacking[0]} is not in the cache and the hub does not answer (--encoder NAME or FOLDER)",
        )
    return vision, text if reads_texts else "", ""


def in_cache(name: str) -> bool:
    """Whether the weights of a name on the hub were fetched before."""
    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)


def hub_answers() -> bool:
    """Whether the hub answers within a second; not asked where the environment says that there is no network."""
    if any(
        os.environ.get(key, "").upper() in ("1", "TRUE", "YES", "ON")
        for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return False
    answered: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection(HUB, PATIENCE):
            answered.append(True)

    thread = threading.Thread(target=connect, daemon=True)  # a name server may be slower than any time-out
    thread.start()
    thread.join(PATIENCE)
    return bool(answered)
