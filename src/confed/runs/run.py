"""Execution of a recipe into a run folder."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from confed.engines.executor import InProcess
from confed.engines.local import RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.setup_source import SetupSource
from confed.engines.usage import cpu_seconds, keep_freed_memory, peak_memory, reset_peak
from confed.engines.workers import Workers, free_cores
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter, private_folder, remove_unfinished
from confed.federation.device_tables import DeviceCounts
from confed.federation.frozen_features import FeatureCounts
from confed.federation.measure import KEPT
from confed.federation.state import MemoryStore, ServerState, Store
from confed.metrics.scores import summarise
from confed.privacy.ledger import PrivacyLedger
from confed.recipes.recipe import Recipe, load_recipe, parse_recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.results.run_files import ANSWERS, NAMES, TRUTH, line_digest, lines_of, name_hashes
from confed.results.stored import NONE, FinalResult, Recorder, Records, examples_of_predictions, write_records
from confed.results.summary import PRIVACY
from confed.results.views import EVALUATED
from confed.runs.at_once import begin
from confed.runs.build import check_device, load_data, participation_of, prepare, simulation_of
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination, PooledCounts, examine, kept_probabilities
from confed.runs.privacy_spent import ledger_of, line_of
from confed.runs.same_recipe import (
    check_same_data,
    check_same_recipe,
    machine_note,
    note_data,
    note_recipe,
    pinned,
    pinned_as,
)
from confed.runs.summary import summarise_run
from confed.system.events import Caution, Note, Progress, RunProgress, Stage, ignore
from confed.system.folder_lock import check_held, exclusive
from confed.system.processor import check_pinned

if TYPE_CHECKING:
    from confed.engines.ray.executor import RayActors
    from confed.engines.remote.server import Remote

# Names and labels of test examples, for a run's stored predictions --------------------------------------------


def examples_tried(run_data: RunData, examined: Examination) -> dict[str, Tensor]:
    """Names and right answers of the test examples that models were tried on, for ``predictions.safetensors``."""
    dataset, rows = run_data.dataset, dict[str, Tensor]()
    counts = {
        place: len(tensors["correct"]) for (_, owner, place), (_, tensors) in examined.results.items() if owner == place
    }
    for place, count in counts.items():
        examples = dataset.unseen[place] if place in dataset.unseen else dataset.clients[place].test
        if len(examples) != count:
            continue
        rows[f"{NAMES}/{place}"] = torch.from_numpy(name_hashes(examples.names))
        columns = (run_data.unseen if place in run_data.unseen else run_data.clients)[place].tables[2].columns
        if "label" in columns:
            rows[f"{TRUTH}/{place}"] = columns["label"]
            rows[f"{ANSWERS}/{place}"] = torch.from_numpy(name_hashes(examples.answers))
    return rows


# Setup of a recipe, for processes that make their own ---------------------------------------------------------


def source_of(recipe: Recipe) -> SetupSource:
    """What another process makes the setup of a single-run recipe from: the recipe's text."""
    return SetupSource(f"{__name__}:{setup_of.__name__}", {"recipe": recipe.to_toml()})


def setup_of(recipe: str) -> Setup:
    """The federation that a single-run recipe describes, with its data."""
    return prepare(parse_recipe(recipe))[0]


# Choice of who computes the clients of a run: this process, worker processes ----------------------------------


def local_executor(recipe: Recipe, setup: Setup, workspace: Workspace) -> InProcess | Workers:
    """Executor on this machine."""
    settings, places = recipe.run, len(setup.population) + len(setup.observers)
    count = 1 if setup.batch_clients > 1 else settings.workers or min(free_cores(), places)
    if count == 1:
        torch.set_num_threads(settings.threads)
        return InProcess(setup, workspace if setup.device == "cpu" else None)
    return Workers(setup, count, settings.threads, settings.start_method, source_of(recipe))


@contextmanager
def needing_ray(what: str) -> Iterator[None]:
    """Imports of Ray, without which a ValueError says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ValueError(f"{what} needs Ray, which is not installed: pip install '.[ray]' -c constraints.txt") from None


def ray_actors(recipe: Recipe, workspace: Workspace, progress: Progress) -> "RayActors":
    """Actors on the Ray cluster of a recipe."""
    with needing_ray("run.engine = 'ray'"):
        from confed.engines.ray.executor import RayActors
        from confed.engines.ray.placement import Wanted
    import psutil

    settings = recipe.run
    trained = sum(t.nbytes for t in workspace.tensors.values() if t.requires_grad)
    wanted = Wanted(
        settings.workers,
        settings.threads,
        {"cpu": False, "cuda": True, "auto": None}[settings.device],
        psutil.Process().memory_info().rss + 3 * trained,
    )
    cores = settings.workers * settings.threads or free_cores()
    return RayActors(source_of(recipe), wanted, settings.address, cores, progress)


# Execution of a recipe into a run folder ----------------------------------------------------------------------

__all__ = ["Runner", "load_data", "load_run", "prepare", "run", "run_locked"]


def run(recipe: Recipe, root: Path, *, resume: bool = False, progress: Progress = ignore) -> dict[str, Any]:
    """Execution of a single-run recipe into a folder, or its continuation."""
    with exclusive(root):
        return run_locked(recipe, root, resume=resume, progress=progress)


def run_locked(
    recipe: Recipe,
    root: Path,
    *,
    resume: bool = False,
    progress: Progress = ignore,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """:func:`run` in a folder that the caller has locked."""
    # A process that has started a thread pool cannot be forked safely: with workers the threads are theirs.
    apart = recipe.run.workers != 1 or recipe.run.engine == "ray"
    torch.set_num_threads(1 if apart else recipe.run.threads)
    keep_freed_memory()
    check_pinned()
    check_device(recipe)
    if resume:
        check_same_recipe(RunFolder(root), recipe)
    recipe = pinned_as(RunFolder(root), recipe) if resume else pinned(recipe)
    # Weights that are none, and a cluster that is none, must not leave a folder behind.
    recipe, setup, run_data, workspace, at_once = begin(recipe)
    actors = None
    with ExitStack() as opened:
        if recipe.run.engine == "ray":
            actors = opened.enter_context(closing(ray_actors(recipe, workspace, progress)))
            setup = setup if torch.cuda.is_available() else replace(setup, device="cpu")
        folder = RunFolder(root) if resume else RunFolder.create(root, recipe.to_toml())
        if at_once.clients > 1:
            progress(Note(str(at_once)))
        progress(
            RunProgress(0, recipe.run.rounds, "starting", "training")
        )  # what goes wrong from here on is no refusal of the recipe
        return Runner(recipe, setup, run_data, folder, progress, workspace, stopping, actors).run()


class Runner:
    """One run from start or checkpoint to summary."""

    def __init__(
        self,
        recipe: Recipe,
        setup: Setup,
        run_data: RunData,
        folder: RunFolder,
        progress: Progress,
        workspace: Workspace | None = None,
        stopping: Callable[[], bool] = lambda: False,
        actors: "RayActors | None" = None,
    ) -> None:
        self.workspace, self.stopping, self.actors = workspace, stopping, actors
        self.recipe, self.settings, self.setup, self.run_data = recipe, recipe.run, setup, run_data
        self.folder, self.progress = folder, progress
        clients = () if setup.algorithm.traits.centralised else run_data.clients
        self.participation = participation_of(self.settings, clients)
        before = {round - 1 for round in self.participation.joins.values()} - {0}
        self.always = before if self.settings.keep_checkpoints == "joins" else set[int]()
        self.checkpoints = Checkpoints(folder.checkpoint, self.settings.newest_checkpoints, self.always)
        self.writer = CheckpointWriter(self.checkpoints)
        self.cpu, self.resumed = cpu_seconds(), False
        self.device_data: DeviceCounts | None = None
        self.saved_at = -math.inf
        self.notes: list[str] = []
        self.ledger: PrivacyLedger | None = None
        self.recorder = Recorder()
        self.servers: Mapping[str, ServerState] = {}
        self.most_evaluated: int | None = 100  # clients whose validation examples are looked at in a round

    def run(self) -> dict[str, Any]:
        """See :func:`run`."""
        reset_peak()
        with self.opened() as (simulation, workspace):
            executor = simulation.executor
            for _ in self.train(simulation, workspace):
                pass
            servers = self.servers
            for note in executor.notes if isinstance(executor, InProcess) else ():
                self.notes.append(note)
                self.progress(Caution(note))
            self._report(self.setup.rounds, "evaluating", "evaluating on test data")
            examined = self.examine(simulation, servers)
            examined.notes.extend(self.notes)
            self._write_models(servers, examined.personal)
            local = executor if isinstance(executor, InProcess | Workers) else None
            features = None if local is None else local.features
            self.device_data = None if local is None else local.device_data
            if features is not None:
                for note in features.notes:
                    self.progress(Caution(note))
            peak = peak_memory(executor.processes() if isinstance(executor, Workers) else ())
            if self.actors is not None:
                peak = max(peak, self.actors.peak_memory)
        summary = self._finish(examined, workspace, peak, features)
        if isinstance(executor, InProcess):
            executor.release()
        return summary

    @contextmanager
    def opened(self) -> Iterator[tuple[Simulation, Workspace]]:
        """The federation, with those who answer its calls, and the model."""
        store: Store = self.checkpoints.store if self.settings.checkpoint_every else MemoryStore()
        # Built before workers are forked, so that they inherit the imported libraries.
        workspace = Workspace(self.setup.model()) if self.workspace is None else self.workspace
        with closing(self.executor(workspace)) as executor:
            simulation = self.simulation(store, executor)
            simulation.answered = self._answered
            yield simulation, workspace

    def train(self, simulation: Simulation, workspace: Workspace) -> Iterator[RoundRecord]:
        """The rounds that are still to be done, each written down; where it is left, the last one is saved."""
        self.servers, start = self._start(simulation, workspace)
        self.ledger = ledger_of(self.setup.algorithm, self.settings, read_jsonl(self.folder.metrics))
        whole: Checkpoint | None = None
        try:
            for record in simulate(simulation, self.servers, start):
                self._after(simulation, record)
                self.servers = record.servers
                whole = Checkpoint(record.round, record.servers, self.folder.history_bytes())
                self._checkpoint_if_due(whole)
                yield record
                if record.round < self.setup.rounds and self.stopping():
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, GeneratorExit):
            # The last round that is written down whole; what came after it is done again.
            if whole is not None and self.settings.checkpoint_every:
                self.writer.save(whole)
            raise
        finally:
            self.writer.close()

    # What is different where clients are on other machines ------------------------------------------------------

    def executor(self, workspace: Workspace) -> "InProcess | Workers | Remote | RayActors":
        """Executor of the clients' actions."""
        return self.actors or local_executor(self.recipe, self.setup, workspace)

    def simulation(self, store: Store, executor: "InProcess | Workers | Remote | RayActors") -> Simulation:
        """The federation's rounds."""
        return simulation_of(self.settings, self.setup, self.run_data.clients, store, executor)

    def examine(self, simulation: Simulation, servers: Mapping[str, ServerState]) -> Examination:
        """The final models on test data."""
        return examine(
            simulation, servers, self.run_data, self.progress,
            self.settings.modality_matrix, self.settings.controls != "none",
        )  # fmt: skip

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        remove_unfinished(self.folder.root)
        if self.checkpoints.rounds():
            check_same_recipe(self.folder, self.recipe)
            if note := machine_note(self.folder):
                warnings.warn(note, stacklevel=2)
                self.notes.append(note)
            check_same_data(self.folder, self.run_data)
            checkpoint, problems = self.checkpoints.latest(self.folder.history_bytes())
            for problem in problems:
                self.progress(Caution(f"damaged checkpoint left aside: {problem}"))
            self.folder.truncate(checkpoint.history_bytes, checkpoint.round)
            for line in lines_of(self.folder.metrics, most=None):
                self.recorder.add(line)
            self.resumed = True
            if not self.folder.begun.is_file():
                note_recipe(self.folder, self.recipe)
            return checkpoint.servers, checkpoint.round
        note_recipe(self.folder, self.recipe)
        note_data(self.folder, self.run_data)
        self.checkpoints.store.rewind(0)
        self.folder.truncate(0, -1)
        servers = simulation.start(workspace)
        if self.settings.evaluate_every:
            self._evaluate(simulation, servers, 0)
        return servers, 0

    def _after(self, simulation: Simulation, record: RoundRecord) -> None:
        """Record of a round, with evaluation and checkpoint where due."""
        check_held(self.folder.root)
        spent = self._spent(simulation, record)
        self._note(
            {
                "event": "round" if record.round <= self.setup.rounds else "finish",
                "round": record.round,
                "loss": record.losses,
                "errors": record.errors,
                "bytes_up": record.bytes_up,
                "bytes_down": record.bytes_down,
                **({"traffic": {n: t._asdict() for n, t in record.traffic.items()}} if len(record.servers) > 1 else {}),
                **({} if record.clock is None else {"clock": record.clock, "staleness": record.staleness}),
                **spent,
            },
        )
        for span in record.timeline:
            self.folder.append(self.folder.timeline, {"round": record.round, **asdict(span)})
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
            self.progress(Caution(f"client {client!r} left out of round {record.round}: {error}"))
        loss = sum(record.losses.values()) / len(record.losses) if record.losses else None
        text = "losses stay with the clients" if loss is None else f"loss {loss:.3f}"
        stage = "training" if record.round <= self.setup.rounds else "fine-tuning"  # which follows the last round
        text = text if stage == "training" else f"{stage}, {text}"
        epsilon = max(spent[PRIVACY]["epsilon"].values(), default=None) if spent else None
        self.progress(
            RunProgress(
                min(record.round, self.setup.rounds), self.setup.rounds, stage, text, loss=loss, epsilon=epsilon
            )
        )

    def _note(self, line: dict[str, Any]) -> None:
        """A line of the history, in its file and in the records."""
        written = self.folder.append(self.folder.metrics, line)
        self.recorder.add({**line, "digest": line_digest(written, line)})

    def _spent(self, simulation: Simulation, record: RoundRecord) -> dict[str, Any]:
        """Privacy cost of a round, where updates are noised."""
        if self.ledger is None or record.round > self.setup.rounds:
            return {}
        present, cohort = simulation.sample(record.round - 1)
        return line_of(self.ledger, record.round, [client.id for client in cohort], present)

    def _checkpoint_if_due(self, checkpoint: Checkpoint) -> None:
        every, last = self.settings.checkpoint_every, checkpoint.round >= self.setup.rounds
        waited = time.monotonic() - self.saved_at >= self.settings.checkpoint_seconds
        if every and (last or checkpoint.round in self.always or (checkpoint.round % every == 0 and waited)):
            self.writer.save(checkpoint)
            self.saved_at = time.monotonic()

    def _evaluate(self, simulation: Simulation, servers: Mapping[str, ServerState], round: int) -> None:
        pooled = PooledCounts(self.setup.task, self.setup.algorithm, self.run_data.unseen)
        limit = self.settings.evaluate_examples
        views = simulation.evaluate(
            servers, round, split="validation", limit=limit, most=self.most_evaluated, counted=pooled.add
        )
        values: dict[str, dict[str, dict[str, float]]] = {}
        for view, places in views.items():
            values[view] = {p: summarise(t) for p, t in places.items()}
        missing = {"unanswered": dict(simulation.unanswered)} if simulation.unanswered else {}
        if self.setup.algorithm.traits.centralised:
            # One model serves all clients: it is each client's, and the global one.
            client_values = {p: v for p, v in values["unseen"].items() if p in self.run_data.clients}
            unseen = {p: v for p, v in values["unseen"].items() if p in self.run_data.unseen}
            values = {"global": client_values, "personal": client_values, "unseen": unseen}
        elif not self.setup.algorithm.traits.has_personal:
            values = {**values, "personal": values["global"]}
        self._note(
            {"event": "evaluation", "round": round, "split": "validation", **values, **pooled.lines(), **missing},
        )

    def _write_models(self, servers: Mapping[str, ServerState], personal: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Only trained tensors are written; the rest is what the recipe's model starts from."""
        if self.setup.algorithm.global_model != "none":
            tensors = dict(chain.from_iterable(server.params.items() for server in servers.values()))
            tensors |= self.setup.algorithm.initial_private(tensors)
            self.folder.write_tensors(self.folder.models / "global" / "trained.safetensors", tensors)
        if personal and not self.setup.algorithm.traits.centralised:
            private_folder(self.folder.models / "personal")
            for name, tensors in personal.items():
                self.folder.write_tensors(self.folder.personal_model(name), tensors)

    def _finish(
        self, examined: Examination, workspace: Workspace, peak: int, features: FeatureCounts | None
    ) -> dict[str, Any]:
        from confed.runs.samples import gallery, similarities

        predictions = examples_tried(self.run_data, examined) | kept_probabilities(examined)
        for (view, model, place), (_, tensors) in examined.results.items():
            for name, tensor in tensors.items() if model == place else ():
                if name in ("correct", "prediction") or name.startswith(KEPT):
                    predictions[f"{view}/{place}/{name}"] = tensor
        records = self._write_records(examined, {name: tensor.numpy() for name, tensor in predictions.items()})
        self.folder.write_tensors(self.folder.predictions, predictions)
        if self.settings.gallery:
            samples = gallery(self.folder, workspace, self.run_data, self.settings.gallery, self.setup)
            self.folder.write_json(self.folder.gallery, samples)
        similar = similarities(self.folder, workspace, self.run_data, self.setup.local.batch_size)
        if similar is not None:
            self.folder.write_json(self.folder.similarity, similar)
        cpu = cpu_seconds() - self.cpu + (0.0 if self.actors is None else self.actors.cpu_seconds)
        summary = summarise_run(
            self.recipe, self.setup, self.run_data, self.folder, workspace, examined, records, self.ledger,
            cpu=cpu, peak=peak, resumed=self.resumed, features=features, device_data=self.device_data,
            engine={} if self.actors is None else self.actors.described(),
        )  # fmt: skip
        self.folder.write_json(self.folder.summary, summary)
        self._report(self.setup.rounds, "done", "done")
        return summary

    def _write_records(self, examined: Examination, predictions: Mapping[str, np.ndarray]) -> Records:
        """All that the run measured, in its files: what tables, figures and ``summary.json`` are made from."""
        tests: dict[str, list[FinalResult]] = {}
        for (view, owner, place), (values, rows) in examined.results.items():
            examples = len(rows["correct"]) if "correct" in rows else NONE
            tests.setdefault(view, []).append(FinalResult(owner, place, examples, values))
        records = self.recorder.records(tests)
        by_view = {view: examples_of_predictions(predictions, view) for view in EVALUATED}
        write_records(self.folder.root, records, by_view)
        return records

    def _report(self, round: int, stage: Stage, text: str, share: float = 0.0) -> None:
        self.progress(RunProgress(min(round, self.setup.rounds), self.setup.rounds, stage, text, share))

    def _answered(self, round: int, replies: int, calls: int) -> None:
        """Progress within a round, of which a method may have several parts: the bar of each begins anew."""
        if round < self.setup.rounds and replies < calls:
            self._report(round, "answering", f"round {round + 1}: {replies} of {calls} clients", replies / calls)


def load_run(root: Path) -> tuple[Recipe, Setup, RunData, Workspace]:
    """A finished or interrupted run's recipe, data and model, from its folder."""
    folder = RunFolder(root)
    if not folder.recipe.is_file():
        raise ValueError(f"{root} is not a run folder: it has no recipe.toml")
    recipe = load_recipe(folder.recipe)
    torch.set_num_threads(recipe.run.threads)
    setup, run_data = prepare(recipe)
    return recipe, setup, run_data, Workspace(setup.model())
