"""A finished run under examination: its released models, its records, and the same training with some records only.

Training again needs no run folder: the federation is simulated with the run's own settings and seed, a part of the
clients' training records left out. With all records it is a replay, whose messages are what a server saw.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from confed.attacks.membership import example_losses
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Simulation, simulate
from confed.engines.participation import Population
from confed.engines.perform import Setup
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Reply
from confed.federation.params import Params, Scope
from confed.federation.protocols import LossPerExample, Output
from confed.federation.randomness import generator
from confed.federation.specs import task_spec
from confed.federation.state import MemoryStore, Store
from confed.inference.finished_run import FinishedRun
from confed.results.folder import RunFolder, kind_of, read_jsonl
from confed.runs.cohorts import cohorts_of, participation_of
from confed.runs.run import load_run
from confed.runs.samples import fill

MOST_RECORDS = 2000
"""Members, and others, that are scored at most."""

TRAIN, VALIDATION, TEST = 0, 1, 2
EVERYBODY = ""
"""Whose model the global one is."""

Rows = Mapping[str, Tensor]
"""Client -> numbers of its records, int64."""
Models = Mapping[str, Params]
"""Client -> the released model that answers for it; :data:`EVERYBODY` alone where one answers for all."""


class Part:
    """Population of a run with some of its clients, and some of their training records."""

    def __init__(self, whole: Population, rows: Rows) -> None:
        infos = {info.id: info for info in map(whole.info, range(len(whole)))}
        self._infos: list[ClientInfo] = []
        self._data: dict[str, TableData] = {}
        for name, chosen in rows.items():
            data: Any = whole.data(name)
            self._infos.append(replace(infos[name], num_examples=len(chosen)))
            self._data[name] = data.only(chosen)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, number: int) -> ClientInfo:
        return self._infos[number]

    def data(self, client_id: str) -> TableData:
        return self._data[client_id]


@dataclass
class Watched:
    """An executor that keeps what the server saw of the last round, and measures every update."""

    executor: InProcess
    norms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    cosines: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    last: dict[str, tuple[Call, Reply]] = field(default_factory=dict[str, tuple[Call, Reply]])
    first: dict[str, tuple[Call, Reply]] = field(default_factory=dict[str, tuple[Call, Reply]])
    middle: dict[str, tuple[Call, Reply]] = field(default_factory=dict[str, tuple[Call, Reply]])
    middle_round: int = 0

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        seen: dict[str, tuple[Call, Reply]] = {}
        for call, reply in zip(calls, self.executor(calls, store, round), strict=True):
            if call.action == "fit" and reply.error is None and not call.session:
                seen[call.client.id] = (call, reply)
            yield reply
        if seen:
            self._measure(seen)
            self.last = seen
            self.first = self.first or seen
            if round == self.middle_round:
                self.middle = seen

    def _measure(self, seen: Mapping[str, tuple[Call, Reply]]) -> None:
        updates = {name: update_of(call, reply) for name, (call, reply) in seen.items()}
        names = set.intersection(*(set(update) for update in updates.values()))
        flat = {client: flattened(update, sorted(names)) for client, update in updates.items()}
        total = torch.stack(list(flat.values())).sum(0)
        for client, update in flat.items():
            self.norms.setdefault(client, []).append(float(update.norm()))
            if len(flat) > 1:
                cosine = torch.cosine_similarity(update, total - update, dim=0)
                self.cosines.setdefault(client, []).append(float(cosine))


def update_of(call: Call, reply: Reply) -> dict[str, Tensor]:
    """What a client's training changed: reply minus broadcast, of the tensors that both have."""
    before, after = call.message.tensors, reply.message.tensors
    shared = [name for name in after if name in before and after[name].is_floating_point()]
    return {name: after[name].float() - before[name].float() for name in shared}


def flattened(tensors: Params, names: Sequence[str]) -> Tensor:
    """Tensors as one vector."""
    return torch.cat([tensors[name].flatten().double() for name in names]) if names else torch.zeros(1).double()


class Case:
    """A finished run under examination."""

    def __init__(self, folder: Path, seconds: float = math.inf) -> None:
        self.folder, self.kind = folder, kind_of(folder)
        self.finished = FinishedRun(folder)
        self.summary = self.finished.summary
        self.recipe, self.setup, self.run_data, self.workspace = load_run(folder)
        self.history = read_jsonl(RunFolder(folder).metrics)
        self.algorithm = self.setup.algorithm
        self.network = self.algorithm.deployed_model(self.workspace.model)
        self.sites = list(self.run_data.clients)
        self._without: dict[str, Models] = {}
        self.replayed = self._expected <= seconds / 2  # else no training run fits into the time

    @property
    def _expected(self) -> float:
        """Seconds that the run took, as its folder says."""
        return self.summary.cost("seconds") or 0.0

    # Training again -------------------------------------------------------------------------------------------

    @cached_property
    def members(self) -> list[str]:
        """Names of the parties that train: the sites, or the one that holds all data of a pooled run."""
        population = self.setup.population
        return [population.info(number).id for number in range(len(population))]

    @property
    def everything(self) -> dict[str, Tensor]:
        """All training records."""
        return {name: torch.arange(len(self.data_of(name))) for name in self.members}

    def data_of(self, client: str) -> Any:
        """A party's data, as it trains on them."""
        return self.setup.population.data(client)

    @cached_property
    def replay(self) -> "Replay":
        """The run once more, watched; its time is what every other training run is expected to take."""
        began = time.perf_counter()
        watched = Watched(InProcess(self.setup, self.workspace), middle_round=self.setup.rounds // 2)
        models = self.trained(self.everything, watched)
        equal = all(torch.equal(tensor, models[place][name]) for place, params in self.released.items()
                    for name, tensor in params.items())  # fmt: skip
        return Replay(models, watched, equal, time.perf_counter() - began)

    @property
    def training_seconds(self) -> float:
        """What one training run takes."""
        return self.replay.seconds if self.replayed else self._expected

    def trained(self, rows: Rows, executor: Any = None) -> dict[str, Params]:
        """The models that the run would have released with these training records alone."""
        kept = {name: chosen for name, chosen in rows.items() if len(chosen)}
        setup: Setup = replace(self.setup, population=Part(self.setup.population, kept))
        settings = self.recipe.run
        cohort, buffered = cohorts_of(settings, self.algorithm)
        participation = participation_of(settings, () if self.algorithm.traits.centralised else kept)
        executor = executor or InProcess(setup, self.workspace)
        if isinstance(executor, Watched):
            executor.executor = InProcess(setup, self.workspace)
        by_size = settings.sampling == "size"
        simulation = Simulation(setup, MemoryStore(), executor, cohort, participation, by_size, buffered=buffered)
        servers = simulation.start(self.workspace)
        for record in simulate(simulation, servers):
            servers = record.servers
        return self._answering(simulation, servers)

    def _answering(self, simulation: Simulation, servers: Any) -> dict[str, Params]:
        models: dict[str, Params] = {}
        for info in simulation.clients():
            shared = simulation.shared(servers, info)
            if self.algorithm.global_model == "alone":
                return {EVERYBODY: {**shared, **self.algorithm.initial_private(shared)}}
            state = simulation.store.load(info.id).tensors
            models[info.id] = {**state.get("private", {}), **(state.get("personal") or shared)}
        return models

    def without(self, site: str) -> Models:
        """The models of a run that this site never took part in."""
        if site not in self._without:
            rows = {name: chosen for name, chosen in self.everything.items() if name != site}
            self._without[site] = self.trained(rows)
        return self._without[site]

    def has_without(self, site: str) -> bool:
        """Whether that run was made already."""
        return site in self._without

    # Released models and what they say of records -------------------------------------------------------------

    @cached_property
    def released(self) -> Models:
        """The models that would leave: the global one, or each site's where that does not answer alone."""
        if self.algorithm.global_model == "alone":
            return {EVERYBODY: load_file(self.finished.global_file)}
        folder = RunFolder(self.folder)
        return {name: load_file(folder.personal_model(name)) for name in self.finished.owners}

    def table(self, site: str, role: int) -> Table:
        """A site's records in a role, as tensors."""
        return self.run_data.clients[site].tables[role]

    def records(self, role: int, most: int = MOST_RECORDS) -> dict[str, Tensor]:
        """Records of all sites in a role that models can be asked about, at most so many, drawn at random."""
        candidates: list[tuple[str, int]] = []
        for site in self.sites:
            columns = self.table(site, role).columns
            known = columns["label"] >= 0 if "label" in columns else torch.ones(len(self.table(site, role))) > 0
            candidates += [(site, row) for row in known.nonzero().flatten().tolist()]
        order = torch.randperm(len(candidates), generator=generator(self.setup.seed, 0, str(role), "records examined"))
        chosen = sorted(candidates[number] for number in order[:most].tolist())
        rows: dict[str, list[int]] = {site: [] for site in self.sites}
        for site, row in chosen:
            rows[site].append(row)
        return {site: torch.tensor(numbers, dtype=torch.int64) for site, numbers in rows.items() if numbers}

    def outputs(self, models: Models, rows: Rows, role: int) -> Iterator[tuple[str, Mapping[str, Tensor], Output]]:
        """Site, batch and output of the models that answer for the sites, batch by batch."""
        loaded: str | None = None
        for site, chosen in rows.items():
            owner = EVERYBODY if EVERYBODY in models else site
            if owner not in models:
                continue
            if owner != loaded:
                fill(self.workspace, models[owner])
                self.network.eval()
                loaded = owner
            self.workspace.set_task(self.setup.task_of(site))
            for batch in self.table(site, role).batches(self.setup.local.eval_batch_size, chosen):
                with torch.no_grad():
                    yield site, batch, self.network(batch)

    @property
    def unasked(self) -> str:
        """Why the losses of single test records are not known; "" where they are."""
        texts = task_spec(self.setup.task).judges in ("captions", "texts")
        if texts:
            return "test records have no texts to learn, so no losses: see Repeated text"
        return "" if self.records(TEST, 1) else "there are no test records"

    def losses(self, models: Models, rows: Rows, role: int) -> Tensor:
        """The task's loss of every record, float64, in the order of the rows."""
        parts: list[Tensor] = [torch.zeros(0, dtype=torch.float64)]
        for site, batch, output in self.outputs(models, rows, role):
            task = self.setup.task_of(site)
            each = task.example_losses(output, batch) if isinstance(task, LossPerExample) else None
            parts.append(
                each.double().cpu() if each is not None else example_losses(lambda _, o=output: o, task, [batch])
            )
        return torch.cat(parts)

    def groups(self, rows: Rows, role: int) -> np.ndarray:
        """Number of the picture that each record is about; records without pictures are groups of their own."""
        numbers: list[np.ndarray] = []
        offset = 0
        for site, chosen in rows.items():
            table = self.table(site, role)
            pictured = table.images is not None or table.regions is not None
            index = table.image_index[chosen] if pictured else chosen
            first = index if index.ndim == 1 else index[:, 0]
            numbers.append(first.numpy() + offset)
            offset += int(first.max()) + 1 if len(first) else 0
        return np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)

    # What the server saw --------------------------------------------------------------------------------------

    @property
    def unseen_updates(self) -> str:
        """Why no server sees a site's update; "" where one does."""
        traits = self.algorithm.traits
        if traits.centralised or not traits.communicates:
            return "no site sends updates"
        if traits.splits or not traits.sends_values:
            return f"{self.algorithm.title} sends no values of the model"
        if self.algorithm.secure_sum is not None:
            return "under secure aggregation the server sees the sum of the updates only"
        if not self.replayed:
            return f"what the server saw would take a replay of {self._expected:.0f} s, more than half of the time"
        return ""

    @property
    def classes(self) -> int:
        """Number of answers that sites share; 0 where records have no label among such."""
        if task_spec(self.setup.task).judges != "scores":
            return 0
        labelled = all("label" in self.table(site, TRAIN).columns for site in self.sites)
        apart = bool(
            getattr(self.run_data.dataset, "answer_sets", None) or getattr(self.run_data.dataset, "tasks", None)
        )
        writes = self.run_data.answer_tokens is not None
        return 0 if apart or writes or not labelled else len(self.run_data.questions.answers)

    def trained_names(self, client: str) -> list[str]:
        """Names of the tensors that a site trains and sends."""
        info = next(i for i in map(self.setup.population.info, range(len(self.setup.population))) if i.id == client)
        scopes = self.workspace.scopes(self.algorithm, info)
        return [n for n, t in self.workspace.tensors.items() if scopes.get(n) is Scope.SHARED and t.requires_grad]


@dataclass(frozen=True)
class Replay:
    """The run once more."""

    models: Models
    watched: Watched
    equal: bool  # whether it ended with the very tensors that the run released
    seconds: float
