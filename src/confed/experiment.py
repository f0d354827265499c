"""From a recipe to a finished run folder."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confed.data.examples import Examples, FederatedDataset, Table, TableData, channels_first, encode, pool
from confed.engines.local import InProcess, Members, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.usage import cpu_seconds, peak_memory, reset_peak
from confed.engines.workers import Workers, free_cores
from confed.federation.algorithm import read_tallies
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.protocols import ClientData, Task
from confed.federation.state import MemoryStore, ServerState, Store
from confed.models import create_model, create_tokenizer
from confed.recipe import Recipe, Run, load_recipe
from confed.results.folder import RunFolder
from confed.results.summary import Examined, summarise_run
from confed.tasks.vqa import summarise

__all__ = ["Materials", "Progress", "load_run", "prepare", "run"]

EVERYONE = "everyone"
"""The one member that holds all data in a centralised run."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; handed to the caller after every step."""

    round: int
    rounds: int
    text: str


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Materials:
    """Data as tensors and what is needed to build the model; shared by all methods of a study.

    Attributes:
        dataset: strings and pictures.
        clients: client -> its examples as tensors.
        unseen: scene -> its examples as tensors, in every role.
        types: names of the question types.
        tokenizer: the model's.
    """

    dataset: FederatedDataset
    clients: Mapping[str, TableData]
    unseen: Mapping[str, TableData]
    types: tuple[str, ...]
    tokenizer: Any


@lru_cache(maxsize=2)
def _materials(data: str, model: str, seed: int) -> Materials:
    # Keyed by the sections' JSON, so that the methods of a study share one copy.
    section = json.loads(data)
    dataset: FederatedDataset = _construct_data(section, seed)
    options = json.loads(model)
    limits = {"max_length": options["max_length"]} if "max_length" in options else {}
    tokenizer = create_tokenizer(options["name"], dataset.words, **limits)
    parts = [e for s in dataset.clients.values() for e in (s.train, s.validation, s.test)]
    parts += list(dataset.unseen.values())
    types = tuple(sorted({t for part in parts for t in part.types}))
    pictures: dict[int, Tensor] = {}

    def table(examples: Examples) -> Table:
        # Examples often share one picture table; it becomes one tensor.
        if id(examples.images) not in pictures:
            pictures[id(examples.images)] = channels_first(examples.images)
        return encode(examples, tokenizer, dataset.answers, types, pictures[id(examples.images)])

    clients = {
        name: TableData(table(s.train), table(s.validation), table(s.test)) for name, s in dataset.clients.items()
    }
    unseen: dict[str, TableData] = {}
    for name, examples in dataset.unseen.items():
        rows = table(examples)
        unseen[name] = TableData(rows, rows, rows)
    if not clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    return Materials(dataset, clients, unseen, types, tokenizer)


def _construct_data(section: Mapping[str, Any], seed: int) -> FederatedDataset:
    from inspect import signature

    from confed.registry import datasets

    values = dict(section)
    constructor = datasets[values.pop("name")]
    if "seed" in signature(constructor).parameters:
        values["seed"] = seed
    return constructor(**values)


def prepare(recipe: Recipe) -> tuple[Setup, Materials]:
    """The federation that a single-run recipe describes.

    Raises:
        ValueError: the recipe or its data are faulty (the message names the thing).
    """
    run = recipe.run
    data, model = recipe.sections["data"], dict(recipe.sections["model"])
    materials = _materials(json.dumps(data, default=str), json.dumps(model, default=str), run.seed)
    dataset = materials.dataset
    name = model.pop("name")

    def build() -> nn.Module:
        return create_model(
            name, answers=dataset.answers, vocab_size=materials.tokenizer.vocab_size, seed=run.seed, **model
        )

    algorithm = recipe.construct("algorithm")
    task: Task = recipe.construct("task", answers=len(dataset.answers), types=materials.types)
    clients: Mapping[str, ClientData] = materials.clients
    observers: dict[str, ClientData] = dict(materials.unseen)
    if algorithm.pooled:
        train = pool([c.tables[0] for c in materials.clients.values()])
        observers = {**clients, **observers}
        clients = {EVERYONE: TableData(train, train.take(0), train.take(0))}
    device = run.device
    if device == "auto":
        # The ordinary check would open a CUDA context, after which workers can no longer be forked.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(
        algorithm, Members(clients, ("image", "text")), task, recipe.local, build,
        run.rounds, run.seed, run.keep_personal, observers, device,
    )  # fmt: skip
    return setup, materials


def run(recipe: Recipe, root: Path, *, resume: bool = False, watch: Watch = lambda _: None) -> dict[str, Any]:
    """Runs a single-run recipe into a folder, or continues one.

    Args:
        recipe: the recipe; with ``resume`` the folder's own.
        root: the run folder.
        resume: continue from the folder's newest sound checkpoint.
        watch: told about every step.

    Returns:
        The content of ``summary.json``.

    Raises:
        ValueError: faulty recipe or data; without ``resume``, the folder exists.
        CorruptCheckpoint: there are checkpoints and none is sound.
    """
    torch.set_num_threads(recipe.run.threads)
    setup, materials = prepare(recipe)
    folder = RunFolder(root) if resume else RunFolder.create(root, recipe.to_toml())
    return _Runner(recipe, setup, materials, folder, watch).run()


class _Runner:
    """One run from start or checkpoint to summary."""

    def __init__(self, recipe: Recipe, setup: Setup, materials: Materials, folder: RunFolder, watch: Watch) -> None:
        self.recipe, self.settings, self.setup, self.materials = recipe, recipe.run, setup, materials
        self.folder, self.watch = folder, watch
        self.checkpoints = Checkpoints(folder.checkpoint, self.settings.keep_checkpoints)
        self.began, self.cpu = time.perf_counter(), cpu_seconds()
        self.saved_at = 0.0

    def run(self) -> dict[str, Any]:
        """See :func:`run`."""
        reset_peak()
        store: Store = self.checkpoints.store if self.settings.checkpoint_every else MemoryStore()
        # Built before workers are forked, so that they inherit the imported libraries.
        workspace = Workspace(self.setup.build())
        with closing(_answerer(self.setup, self.settings, workspace)) as answerer:
            cohort = self.settings.cohort_size(len(self.setup.population))
            simulation = Simulation(self.setup, store, answerer, cohort)
            servers, start = self._start(simulation, workspace)
            record: RoundRecord | None = None
            try:
                for record in simulate(simulation, servers, start):
                    servers = record.servers
                    self._after(simulation, record)
            except KeyboardInterrupt:
                if record is not None and self.settings.checkpoint_every:
                    self._checkpoint(record.round, record.servers)
                raise
            self._tell(self.setup.rounds, "evaluating on test data")
            examined = self._examine(simulation, servers, workspace)
            peak = peak_memory(answerer.processes() if isinstance(answerer, Workers) else ())
        return self._finish(examined, workspace, peak)

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        if self.checkpoints.rounds():
            checkpoint, problems = self.checkpoints.latest()
            for problem in problems:
                self._tell(checkpoint.round, f"damaged checkpoint left aside: {problem}")
            self.folder.truncate(checkpoint.history_bytes, checkpoint.round)
            return checkpoint.servers, checkpoint.round
        self.checkpoints.store.rewind(0)
        self.folder.truncate(0, -1)
        servers = simulation.start(workspace)
        if self.settings.evaluate_every:
            self._evaluate(simulation, servers, 0)
        return servers, 0

    def _after(self, simulation: Simulation, record: RoundRecord) -> None:
        """Writes down a round, evaluates and checkpoints where it is time."""
        self.folder.append(
            self.folder.metrics,
            {
                "event": "round" if record.round <= self.setup.rounds else "finish",
                "round": record.round,
                "loss": record.losses,
                "errors": record.errors,
                "bytes_up": record.bytes_up,
                "bytes_down": record.bytes_down,
            },
        )
        began = time.perf_counter()
        every = self.settings.evaluate_every
        if every and (record.round % every == 0 or record.round >= self.setup.rounds):
            self._evaluate(simulation, record.servers, record.round)
        timing = {
            "round": record.round,
            "seconds": record.seconds,
            "evaluation_seconds": time.perf_counter() - began,
        }
        self.folder.append(self.folder.timings, timing)
        for client, error in record.errors.items():
            self._tell(record.round, f"client {client!r} left out of round {record.round}: {error}")
        loss = sum(record.losses.values()) / max(len(record.losses), 1)
        self._tell(record.round, f"loss {loss:.3f}")
        due = self.settings.checkpoint_every and (
            record.round % self.settings.checkpoint_every == 0 or record.round >= self.setup.rounds
        )
        if due and time.monotonic() - self.saved_at >= self.settings.checkpoint_seconds:
            self._checkpoint(record.round, record.servers)

    def _checkpoint(self, round: int, servers: Mapping[str, ServerState]) -> None:
        self.checkpoints.save(Checkpoint(round, servers, self.folder.history_bytes()))
        self.saved_at = time.monotonic()

    def _evaluate(self, simulation: Simulation, servers: Mapping[str, ServerState], round: int) -> None:
        views = simulation.evaluate(servers, round, split="validation", limit=self.settings.evaluate_examples)
        values = {view: {p: summarise(t) for p, t in places.items()} for view, places in views.items()}
        if self.setup.algorithm.pooled:
            # One model serves everybody: it is each client's, and the global one.
            own = {p: v for p, v in values["unseen"].items() if p in self.materials.clients}
            unseen = {p: v for p, v in values["unseen"].items() if p in self.materials.unseen}
            values = {"global": own, "personal": own, "unseen": unseen}
        self.folder.append(
            self.folder.metrics, {"event": "evaluation", "round": round, "split": "validation", **values}
        )

    def _examine(self, simulation: Simulation, servers: Mapping[str, ServerState], workspace: Workspace) -> Examined:
        """The final models on all test examples, one by one; also writes the models."""
        algorithm = self.setup.algorithm
        seen, unseen = list(self.materials.clients), list(self.materials.unseen)
        models: dict[tuple[str, str], Mapping[str, Tensor]] = {}
        shared = {
            name: dict(simulation.shared(servers, simulation.setup.population.info(0)))
            if algorithm.pooled
            else dict(simulation.shared(servers, self._info(simulation, name)))
            for name in [*seen, *unseen]
        }
        if algorithm.pooled:
            models = {("personal", name): shared[name] for name in seen}
        else:
            for name in seen:
                state = simulation.store.load(name)
                private = state.tensors.get("private", {})
                shared[name].update(private)
                personal = {**private, **state.tensors.get("personal", {})}
                if personal:
                    models["personal", name] = personal
        jobs = [
            (("personal", owner, place), place, tensors) for (_, owner), tensors in models.items() for place in seen
        ]
        if algorithm.pooled:
            jobs = [(("personal", name, name), name, models["personal", name]) for name in seen]
        if algorithm.has_global:
            jobs += [(("global", name, name), name, shared[name]) for name in seen]
            jobs += [(("unseen", name, name), name, shared[name]) for name in unseen]
        examined: Examined = {}
        replies = simulation.examine([(place, tensors) for _, place, tensors in jobs], self.setup.rounds + 2)
        for (key, _, _), message in zip(jobs, replies, strict=True):
            examined[key] = (summarise(read_tallies(message.scalars, "examined")), message.tensors)
            self._tell(self.setup.rounds, f"evaluated {key[0]} model on {key[2]}")
        self._write_models(servers, {name: tensors for (_, name), tensors in models.items()}, workspace)
        return examined

    def _info(self, simulation: Simulation, name: str) -> Any:
        infos = {info.id: info for info in simulation.clients()}
        return infos.get(name, simulation.setup.population.info(0))

    def _write_models(
        self,
        servers: Mapping[str, ServerState],
        personal: Mapping[str, Mapping[str, Tensor]],
        workspace: Workspace,
    ) -> None:
        """Only trained tensors are written; the rest is what the recipe's model starts from."""
        if self.setup.algorithm.has_global:
            tensors = {name: t for server in servers.values() for name, t in server.params.items()}
            self.folder.write_tensors(self.folder.models / "global" / "trained.safetensors", tensors)
        if not self.setup.algorithm.pooled:
            for name, tensors in personal.items():
                self.folder.write_tensors(self.folder.models / "personal" / name / "trained.safetensors", tensors)

    def _finish(self, examined: Examined, workspace: Workspace, peak: int) -> dict[str, Any]:
        from confed.results.samples import gallery

        correct: dict[str, Tensor] = {}
        for (view, model, place), (_, tensors) in examined.items():
            if model == place:
                correct[f"{view}/{place}/correct"] = tensors["correct"]
                correct[f"{view}/{place}/prediction"] = tensors["prediction"]
        self.folder.write_tensors(self.folder.predictions, correct)
        if self.settings.gallery:
            self.folder.write_json(
                self.folder.gallery, gallery(self.folder, workspace, self.materials, self.settings.gallery)
            )
        summary = summarise_run(
            self.recipe, self.setup, self.materials, self.folder, workspace, examined,
            cpu=cpu_seconds() - self.cpu, peak=peak,
        )  # fmt: skip
        self.folder.write_json(self.folder.summary, summary)
        self._tell(self.setup.rounds, "done")
        return summary

    def _tell(self, round: int, text: str) -> None:
        self.watch(Progress(min(round, self.setup.rounds), self.setup.rounds, text))


def _answerer(setup: Setup, settings: Run, workspace: Workspace) -> InProcess | Workers:
    places = len(setup.population) + len(setup.observers)
    count = settings.workers or min(free_cores(), places)
    if count == 1:
        return InProcess(setup, workspace if setup.device == "cpu" else None)
    return Workers(setup, count, settings.threads)


def load_run(root: Path) -> tuple[Recipe, Setup, Materials, Workspace]:
    """A finished or interrupted run's recipe, data and model, from its folder.

    Raises:
        ValueError: the folder is not a run folder.
    """
    folder = RunFolder(root)
    if not folder.recipe.is_file():
        raise ValueError(f"{root} is not a run folder: it has no recipe.toml")
    recipe = load_recipe(folder.recipe)
    torch.set_num_threads(recipe.run.threads)
    setup, materials = prepare(recipe)
    return recipe, setup, materials, Workspace(setup.build())


def methods_of(recipe: Recipe) -> Sequence[str]:
    """The study's methods, or the one of a single-run recipe."""
    return recipe.methods or (recipe.sections["algorithm"]["name"],)
