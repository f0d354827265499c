"""From a recipe to a finished run folder."""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confed.data.examples import FederatedDataset, TableData, pool
from confed.engines.local import InProcess, Members, Presence, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.usage import cpu_seconds, keep_freed_memory, peak_memory, reset_peak
from confed.engines.workers import Workers, free_cores
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.protocols import ClientData, Task
from confed.federation.state import MemoryStore, ServerState, Store
from confed.materials import Materials, load_materials
from confed.models import create_model
from confed.recipe import Recipe, Run, load_recipe
from confed.registry import models
from confed.registry import tasks as registered_tasks
from confed.results.examine import Examination, examine
from confed.results.folder import RunFolder
from confed.results.summary import summarise_run
from confed.tasks.vqa import summarise

__all__ = ["Progress", "load_data", "load_run", "prepare", "run"]

EVERYONE = "everyone"
"""The one member that holds all data in a centralised run."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; handed to the caller after every step."""

    round: int
    rounds: int
    text: str


Watch = Callable[[Progress], None]


def load_data(recipe: Recipe) -> Materials:
    """A recipe's data as tensors, kept for the next recipe with the same data, model and seed.

    Raises:
        ValueError: the data are faulty (the message names the thing).
    """
    data, model = (json.dumps(recipe.sections[section], default=str) for section in ("data", "model"))
    return load_materials(data, model, recipe.run.seed)


def prepare(recipe: Recipe) -> tuple[Setup, Materials]:
    """The federation that a single-run recipe describes.

    Raises:
        ValueError: the recipe or its data are faulty, or the method cannot work with them (the message names the
            thing).
    """
    run = recipe.run
    model, materials = dict(recipe.sections["model"]), load_data(recipe)
    Presence(run.joins, run.leaves).check(list(materials.clients), 0)
    materials = _without(materials, run.without)
    _presence(run, materials.clients).check(list(materials.clients), run.rounds)
    dataset = materials.dataset
    name = model.pop("name")

    tasks = _tasks(recipe, materials)
    task: Task = _task(recipe, materials, dataset.answers if materials.answer_tokens is not None else None)
    heads = tuple(dict.fromkeys(head for t in tasks.values() if (head := getattr(t, "head", "")) != "answers"))

    def build() -> nn.Module:
        answers = dataset.widest if dataset.pools else dataset.answers
        several = {"heads": heads} if heads else {}
        built = create_model(
            name, answers=answers, vocab_size=materials.tokenizer.vocab_size, seed=run.seed, **several, **model
        )
        if materials.answer_tokens is not None:
            writer: Any = built
            writer.begin(task)
        return built

    if heads and "heads" not in signature(models[name]).parameters:
        raise ValueError(f"the model {name!r} answers questions only; the data need heads for {', '.join(heads)}")
    algorithm: Algorithm = recipe.construct("algorithm")
    if type(algorithm).suit is not Algorithm.suit:  # a model may take long to read
        algorithm = algorithm.suit(build(), task)
    clients: Mapping[str, ClientData] = materials.clients
    observers: dict[str, ClientData] = dict(materials.unseen)
    _check_method(algorithm, run, materials.clients)
    _check_pools(algorithm, dataset, shareable=materials.answer_tokens is not None)
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
        algorithm, Members(clients, ("image", "text"), {n: t.head for n, t in tasks.items() if heads}), task,
        recipe.local, build, run.rounds, run.seed, run.keep_personal, observers, device, tasks,
    )  # fmt: skip
    return setup, materials


def _tasks(recipe: Recipe, materials: Materials) -> dict[str, Any]:
    """The tasks of clients and places where the data say that they have one of their own, or that others have."""
    dataset = materials.dataset
    if not dataset.tasks and (materials.answer_tokens is None or not dataset.pools):
        return {}
    return {
        name: registered_tasks[dataset.tasks[name]]()
        if name in dataset.tasks
        else _task(recipe, materials, None if materials.answer_tokens is None else dataset.pool(name))
        for name in (*materials.clients, *materials.unseen)
    }


def _task(recipe: Recipe, materials: Materials, candidates: Sequence[str] | None) -> Any:
    """The recipe's task; of a model that writes its answers, with those among which it chooses.

    Raises:
        ValueError: the task does not choose among texts and the model does, or the other way round.
    """
    dataset, tokens = materials.dataset, materials.answer_tokens
    task: Any = recipe.construct("task", answers=dataset.widest, types=materials.types)
    if hasattr(task, "choosing") != (tokens is not None):
        model = recipe.sections["model"]["name"]
        what = (
            "writes its answers, so task.name must be 'generation'" if tokens is not None else "does not write answers"
        )
        raise ValueError(f"the model {model!r} {what}; got task.name = {recipe.sections['task']['name']!r}")
    if tokens is None or candidates is None:
        return task
    row_of = {answer: row for row, answer in enumerate(dataset.answers)}
    return task.choosing(tokens[torch.tensor([row_of[answer] for answer in candidates])])


def _check_pools(algorithm: Algorithm, dataset: FederatedDataset, *, shareable: bool) -> None:
    """Raises ValueError if clients with answers or tasks of their own would share a head.

    Args:
        algorithm: the method.
        dataset: the data.
        shareable: the head scores words, which any answers are made of.
    """
    if (dataset.pools and not shareable) or dataset.tasks:
        sharing = not algorithm.own_heads and algorithm.has_global
        if algorithm.pooled or sharing:
            raise ValueError(
                f"the clients of {dataset.name!r} have answer pools or tasks of their own, so one head cannot serve "
                f"them; {type(algorithm).__name__} needs one. Methods with a head for each client: local, fedper, "
                "fedrep, fedpeft, feddat"
            )


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
    # A process that has started a thread pool cannot be forked safely: with workers the threads are theirs.
    torch.set_num_threads(recipe.run.threads if recipe.run.workers == 1 else 1)
    keep_freed_memory()
    setup, materials = prepare(recipe)
    folder = RunFolder(root) if resume else RunFolder.create(root, recipe.to_toml())
    watch(Progress(0, recipe.run.rounds, "training"))  # what goes wrong from here on is no refusal of the recipe
    return _Runner(recipe, setup, materials, folder, watch).run()


def _presence(run: Run, clients: Collection[str]) -> Presence:
    """Who joins late and who leaves, of the clients that there are."""
    return Presence(*({n: r for n, r in named.items() if n in clients} for named in (run.joins, run.leaves)))


def _check_method(algorithm: Algorithm, run: Run, clients: Collection[str]) -> None:
    """Raises ValueError where a method cannot work with the section ``[run]``."""
    name = algorithm.label or type(algorithm).__name__
    leaves = _presence(run, clients).leaves
    if leaves and not algorithm.leavers:
        raise ValueError(
            f"run.leaves must be empty for {name}, got {', '.join(leaves)}: the server's sums would hold for good what "
            "clients that have left put into them"
        )
    if not algorithm.has_global and not run.keep_personal:
        raise ValueError(
            f"run.keep_personal must be true for {name}, got false: it has no global model, so there would be nothing "
            "to evaluate"
        )


def _without(materials: Materials, names: Sequence[str]) -> Materials:
    """The same data as if the named clients had never been; answers, words and question types are common knowledge."""
    if not names:
        return materials
    for name in names:
        if name not in materials.clients:
            raise ValueError(f"run.without names no client {name!r}; there are {', '.join(materials.clients)}")
    if set(names) == set(materials.clients):
        raise ValueError(f"run.without must leave at least one client, got all of them: {', '.join(names)}")
    data = materials.dataset
    dataset = replace(
        data,
        clients={name: split for name, split in data.clients.items() if name not in names},
        facts={name: fact for name, fact in data.facts.items() if name not in names},
    )
    clients = {name: rows for name, rows in materials.clients.items() if name not in names}
    return replace(materials, dataset=dataset, clients=clients)


class _Runner:
    """One run from start or checkpoint to summary."""

    def __init__(self, recipe: Recipe, setup: Setup, materials: Materials, folder: RunFolder, watch: Watch) -> None:
        self.recipe, self.settings, self.setup, self.materials = recipe, recipe.run, setup, materials
        self.folder, self.watch = folder, watch
        # A pooled run has no members that could come and go: its data are those of all who ever take part.
        self.presence = _presence(self.settings, () if setup.algorithm.pooled else materials.clients)
        before = {round - 1 for round in self.presence.joins.values()} - {0}
        self.always = before if self.settings.keep_checkpoints == "joins" else set[int]()
        self.checkpoints = Checkpoints(folder.checkpoint, self.settings.newest_checkpoints, self.always)
        self.cpu, self.resumed = cpu_seconds(), False
        self.saved_at = -math.inf

    def run(self) -> dict[str, Any]:
        """See :func:`run`."""
        reset_peak()
        store: Store = self.checkpoints.store if self.settings.checkpoint_every else MemoryStore()
        # Built before workers are forked, so that they inherit the imported libraries.
        workspace = Workspace(self.setup.model())
        with closing(_answerer(self.setup, self.settings, workspace)) as answerer:
            simulation = Simulation(self.setup, store, answerer, self.settings.cohort_size, self.presence)
            servers, start = self._start(simulation, workspace)
            whole: Checkpoint | None = None
            try:
                for record in simulate(simulation, servers, start):
                    self._after(simulation, record)
                    servers = record.servers
                    whole = Checkpoint(record.round, servers, self.folder.history_bytes())
                    self._checkpoint_if_due(whole)
            except KeyboardInterrupt:
                # The last round that is written down whole; what came after it is done again.
                if whole is not None and self.settings.checkpoint_every:
                    self.checkpoints.save(whole)
                raise
            self._tell(self.setup.rounds, "evaluating on test data")
            examined = examine(simulation, servers, self.materials, lambda t: self._tell(self.setup.rounds, t))
            self._write_models(servers, examined.personal)
            peak = peak_memory(answerer.processes() if isinstance(answerer, Workers) else ())
        return self._finish(examined, workspace, peak)

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        if self.checkpoints.rounds():
            checkpoint, problems = self.checkpoints.latest(self.folder.history_bytes())
            for problem in problems:
                self._tell(checkpoint.round, f"damaged checkpoint left aside: {problem}")
            self.folder.truncate(checkpoint.history_bytes, checkpoint.round)
            self.resumed = True
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

    def _checkpoint_if_due(self, checkpoint: Checkpoint) -> None:
        every, last = self.settings.checkpoint_every, checkpoint.round >= self.setup.rounds
        waited = time.monotonic() - self.saved_at >= self.settings.checkpoint_seconds
        if every and (last or checkpoint.round in self.always or (checkpoint.round % every == 0 and waited)):
            self.checkpoints.save(checkpoint)
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

    def _write_models(self, servers: Mapping[str, ServerState], personal: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Only trained tensors are written; the rest is what the recipe's model starts from."""
        if self.setup.algorithm.has_global:
            tensors = {name: t for server in servers.values() for name, t in server.params.items()}
            self.folder.write_tensors(self.folder.models / "global" / "trained.safetensors", tensors)
        if not self.setup.algorithm.pooled:
            for name, tensors in personal.items():
                self.folder.write_tensors(self.folder.models / "personal" / name / "trained.safetensors", tensors)

    def _finish(self, examined: Examination, workspace: Workspace, peak: int) -> dict[str, Any]:
        from confed.results.samples import gallery

        correct: dict[str, Tensor] = {}
        for (view, model, place), (_, tensors) in examined.results.items():
            if model == place:
                correct[f"{view}/{place}/correct"] = tensors["correct"]
                correct[f"{view}/{place}/prediction"] = tensors["prediction"]
        self.folder.write_tensors(self.folder.predictions, correct)
        if self.settings.gallery:
            workspace.turn_to(self.setup.task)
            self.folder.write_json(
                self.folder.gallery,
                gallery(self.folder, workspace, self.materials, self.settings.gallery, self.setup.task_of),
            )
        summary = summarise_run(
            self.recipe, self.setup, self.materials, self.folder, workspace, examined,
            cpu=cpu_seconds() - self.cpu, peak=peak, resumed=self.resumed,
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
        torch.set_num_threads(settings.threads)
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
    return recipe, setup, materials, Workspace(setup.model())


def methods_of(recipe: Recipe) -> Sequence[str]:
    """The study's methods, or the one of a single-run recipe."""
    return recipe.methods or (recipe.sections["algorithm"]["name"],)
