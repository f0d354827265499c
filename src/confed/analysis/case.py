"""A finished run under examination: its released models, its records, and the same training with some records only.

Training again needs no run folder: the federation is simulated with the run's own settings and seed, a part of the
clients' training records left out. With all records it is a replay, whose messages are what a server saw.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import simulate
from confed.engines.participation import Population
from confed.engines.perform import Setup, Workspace
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Reply
from confed.federation.params import Params, Scope
from confed.federation.protocols import Batch, LossPerExample, Output
from confed.federation.randomness import generator
from confed.federation.specs import model_spec, task_spec
from confed.federation.state import MemoryStore, Store
from confed.inference.finished_run import FinishedRun
from confed.privacy.membership import example_losses
from confed.results.folder import RunFolder
from confed.results.stored import read_records
from confed.runs.build import simulation_of
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
Tables = Mapping[str, Table]
"""Client -> its training records with other values in them."""
Seen = dict[str, tuple[Call, Reply]]
"""Client -> what it was sent in a round, and its update."""
Listener = Callable[[Call, Reply], None]
"""Told of every update after its round."""


def ignored(call: Call, reply: Reply) -> None:
    """Listener to nothing."""


class Part:
    """Population of a run with some of its clients, and some of their training records, which may be changed ones."""

    def __init__(self, whole: Population, rows: Rows, changed: Tables) -> None:
        infos = {info.id: info for info in map(whole.info, range(len(whole)))}
        self._infos = [replace(infos[name], num_examples=len(chosen)) for name, chosen in rows.items()]
        self._data: dict[str, TableData] = {}
        for name, chosen in rows.items():
            data: Any = whole.data(name)
            if name in changed:
                data = data.with_tables(changed[name], *data.tables[1:])
            self._data[name] = data.only(chosen)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, number: int) -> ClientInfo:
        """See :class:`confed.engines.participation.Population`."""
        return self._infos[number]

    def data(self, client_id: str) -> TableData:
        """See :class:`confed.engines.participation.Population`."""
        return self._data[client_id]


class Watched(InProcess):
    """An executor that keeps what the server saw of the first, a middle and the last round, and measures updates."""

    def __init__(self, setup: Setup, workspace: Workspace) -> None:
        super().__init__(setup, workspace)
        self.norms, self.cosines = dict[str, list[float]](), dict[str, list[float]]()
        self.first, self.middle, self.last = Seen(), Seen(), Seen()
        self.watching, self._listener = True, ignored

    def begin(self, setup: Setup, listener: Listener) -> None:
        """Begins another training, with the features of frozen layers that are kept."""
        self._setup, self._listener = setup, listener

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies, watched."""
        seen = Seen()
        for call, reply in zip(calls, super().__call__(calls, store, round), strict=True):
            if call.action == "fit" and reply.error is None and not call.session:
                seen[call.client.id] = (call, reply)
            yield reply
        for pair in seen.values():
            self._listener(*pair)
        if seen and self.watching:
            self._measure(seen)
            self.first, self.last = self.first or seen, seen
            self.middle = seen if round == self._setup.rounds // 2 else self.middle

    def _measure(self, seen: Seen) -> None:
        updates = {client: update_of(call, reply) for client, (call, reply) in seen.items()}
        names = sorted(set.intersection(*(set(update) for update in updates.values())))
        flat = {client: flattened(update, names) for client, update in updates.items()}
        total = torch.stack(list(flat.values())).sum(0)
        for client, update in flat.items():
            self.norms.setdefault(client, []).append(float(update.norm()))
            if len(flat) > 1:
                cosine = torch.cosine_similarity(update, total - update, dim=0)
                self.cosines.setdefault(client, []).append(float(cosine))


def with_other_words(texts: Tensor, words: Tensor, rng: torch.Generator) -> Tensor:
    """Texts (..., L) with other words between their first token and their last."""
    changed = texts.clone()
    for text in changed.view(-1, changed.shape[-1]):
        count = max(int((text != 0).sum()) - 2, 0)
        text[1 : 1 + count] = words[torch.randint(len(words), (count,), generator=rng)]
    return changed


def update_of(call: Call, reply: Reply) -> dict[str, Tensor]:
    """What a client's training changed: reply minus broadcast, of the tensors that both have."""
    before, after = call.message.tensors, reply.message.tensors
    changes: dict[str, Tensor] = {}
    for name, tensor in after.items():
        if name in before and tensor.is_floating_point():
            changes[name] = tensor.float() - before[name].float()
    return changes


def sent_model(call: Call, reply: Reply) -> Models:
    """The global model as a client sent it back."""
    sent = {name: tensor for name, tensor in reply.message.tensors.items() if name in call.message.tensors}
    return {EVERYBODY: {**call.message.tensors, **sent}}


def flattened(tensors: Params, names: Sequence[str]) -> Tensor:
    """Tensors as one vector."""
    return torch.cat([torch.zeros(0).double(), *(tensors[name].flatten().double() for name in names)])


class Case:
    """A finished run under examination, for which so many seconds may be spent."""

    def __init__(self, folder: Path, seconds: float = math.inf) -> None:
        self.folder, self.finished = folder, FinishedRun(folder)
        self.summary = self.finished.summary
        self.recipe, self.setup, self.run_data, self.workspace = load_run(folder)
        self.run_records = read_records(folder)
        self.algorithm, self.sites = self.setup.algorithm, list(self.run_data.clients)
        self._executor = Watched(self.setup, self.workspace)
        self.network = self.algorithm.deployed_model(self.workspace.model)
        population = self.setup.population
        infos = [population.info(number) for number in range(len(population))]
        self.infos = {info.id: info for info in infos}  # those who train: the sites, or a pooled run's one party
        self.training_seconds = self.summary.cost("seconds") or 0.0  # of one run; the replay measures it
        self.replayed = self.training_seconds <= seconds / 2  # else no training run fits into the time
        self.left_out: dict[str, Models] = {}  # site -> the models of a run without it, as far as they were trained

    # Training again -------------------------------------------------------------------------------------------

    @property
    def everything(self) -> dict[str, Tensor]:
        """All training records."""
        return {name: torch.arange(len(self.setup.population.data(name))) for name in self.infos}

    @cached_property
    def replay(self) -> tuple[Watched, bool]:
        """The run once more, watched, and whether it ended with the very tensors that the run released."""
        began = time.perf_counter()
        models = self.trained(self.everything)
        self._executor.watching = False
        self.training_seconds = time.perf_counter() - began
        same_bits = True
        for owner, params in self.released.items():
            for name, tensor in params.items():
                same_bits &= torch.equal(tensor, models[owner][name])
        return self._executor, same_bits

    def trained(
        self,
        rows: Rows,
        changed: Tables = MappingProxyType({}),
        seed: int | None = None,
        listener: Listener = ignored,
    ) -> Models:
        """The models of the run with these training records alone; a seed changes orders and draws."""
        rows = {name: chosen for name, chosen in rows.items() if len(chosen)}
        seed = self.setup.seed if seed is None else seed
        setup = replace(self.setup, population=Part(self.setup.population, rows, changed), seed=seed)
        self._executor.begin(setup, listener)
        simulation = simulation_of(self.recipe.run, setup, rows, MemoryStore(), self._executor)
        servers = simulation.start(self.workspace)
        for record in simulate(simulation, servers):
            servers = record.servers
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
        if site not in self.left_out:
            self.left_out[site] = self.trained({name: rows for name, rows in self.everything.items() if name != site})
        return self.left_out[site]

    # Released models and what they say of records -------------------------------------------------------------

    @cached_property
    def released(self) -> Models:
        """The models that would leave: the global one, or each site's where that does not answer alone."""
        if self.algorithm.global_model == "alone":
            return {EVERYBODY: load_file(self.finished.global_file)}
        return {name: load_file(RunFolder(self.folder).personal_model(name)) for name in self.finished.owners}

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
        rows: dict[str, list[int]] = {site: [] for site in self.sites}
        for number in sorted(order[:most].tolist()):
            rows[candidates[number][0]].append(candidates[number][1])
        return {site: torch.tensor(numbers, dtype=torch.int64) for site, numbers in rows.items() if numbers}

    def load(self, models: Models, site: str) -> None:
        """Puts the model that answers for a site into the network, ready to be asked its questions."""
        fill(self.workspace, models[EVERYBODY if EVERYBODY in models else site])
        self.network.eval()
        self.workspace.set_task(self.setup.task_of(site))

    def outputs(
        self, models: Models, rows: Rows, role: int, changed: Tables = MappingProxyType({})
    ) -> Iterator[tuple[str, Batch, Output]]:
        """Site, batch and output of the models that answer for the sites, batch by batch."""
        for site, chosen in rows.items():
            if EVERYBODY not in models and site not in models:
                continue
            self.load(models, site)
            table = changed[site] if site in changed else self.table(site, role)
            for batch in table.batches(self.setup.local.eval_batch_size, chosen):
                with torch.no_grad():
                    yield site, batch, self.network(batch)

    @property
    def writes(self) -> bool:
        """Whether answers are texts that models write."""
        return task_spec(self.setup.task).judges in ("captions", "texts")

    @property
    def answer_column(self) -> str:
        """Name of the column of training records that has what is to be learnt."""
        if self.run_data.answer_tokens is not None:
            return "answer_tokens"
        return "text" if self.writes else "label"

    def texts(self, site: str) -> Tensor:
        """Tokens of the text that each of a site's training records teaches, (N, L), of several the first."""
        column = self.table(site, TRAIN).columns[self.answer_column]
        return column if column.ndim == 2 else column[:, 0]

    @property
    def unasked(self) -> str:
        """Why the losses of single test records are not known; "" where they are."""
        if self.writes:
            return "test records have no texts to learn, so no losses: see Repeated text"
        return "" if self.records(TEST, 1) else "there are no test records"

    def losses(self, models: Models, rows: Rows, role: int, changed: Tables = MappingProxyType({})) -> Tensor:
        """The task's loss of every record, float64, in the order of the rows."""
        parts = [torch.zeros(0, dtype=torch.float64)]
        for site, batch, output in self.outputs(models, rows, role, changed):
            task = self.setup.task_of(site)
            each = task.example_losses(output, batch) if isinstance(task, LossPerExample) else None
            if each is None:
                each = example_losses(lambda _, output=output: output, task, [batch])
            parts.append(each.double().cpu())
        return torch.cat(parts)

    def text_loss(self, batch: Batch, site: str) -> float:
        """Loss of one record's text under the model that is loaded."""
        with torch.no_grad():
            return float(self.setup.task_of(site).loss(self.network(batch), batch))

    def learnt_losses(self, models: Models, rows: Rows, changed: Tables = MappingProxyType({})) -> Tensor:
        """The loss of every training record as it is learnt, with its text where models write, float64."""
        if self.answer_column == "label":
            return self.losses(models, rows, TRAIN, changed)
        losses: list[float] = []
        for site, chosen in rows.items():
            self.load(models, site)
            table = changed[site] if site in changed else self.table(site, TRAIN)
            losses += [self.text_loss(table.batch(row[None]), site) for row in chosen]
        return torch.tensor(losses, dtype=torch.float64)

    def groups(self, rows: Rows, role: int) -> np.ndarray:
        """Number of the picture that each record is about; records without pictures are groups of their own."""
        numbers = [np.zeros(0, dtype=np.int64)]
        offset = 0
        for site, chosen in rows.items():
            table = self.table(site, role)
            index = table.image_index[chosen] if table.images is not None or table.regions is not None else chosen
            first = index if index.ndim == 1 else index[:, 0]
            numbers.append(first.numpy() + offset)
            offset += int(first.max()) + 1 if len(first) else 0
        return np.concatenate(numbers)

    # What the server saw --------------------------------------------------------------------------------------

    @property
    def sends_nothing(self) -> str:
        """Why no values of the model leave a site; "" where some do."""
        traits = self.algorithm.traits
        if traits.centralised or not traits.communicates:
            return "no site sends updates"
        return (
            f"{self.algorithm.title} sends no values of the model" if traits.splits or not traits.sends_values else ""
        )

    @property
    def unseen_updates(self) -> str:
        """Why no server sees a site's update, or it cannot be replayed; "" where neither is so."""
        if self.algorithm.secure_sum is not None:
            return "under secure aggregation the server sees the sum of the updates only"
        if self.sends_nothing or self.replayed:
            return self.sends_nothing
        return f"what the server saw would take a replay of {self.training_seconds:.0f} s, more than half of the time"

    @property
    def unlabelled_updates(self) -> str:
        """Why updates are not of one whole model that chooses among answers that all sites share; "" if they are."""
        alone = self.algorithm.global_model == "alone" and not self.algorithm.traits.changes
        apart = self.run_data.dataset.answer_sets or self.run_data.dataset.tasks
        judged = task_spec(self.setup.task).judges == "scores" and self.run_data.answer_tokens is None
        shared = alone and not apart and judged and "label" in self.table(self.sites[0], TRAIN).columns
        return self.unseen_updates or ("" if shared else "sites train no whole model on answers that all of them share")

    @property
    def noised(self) -> bool:
        """Whether what sites send has noise, which a step that is looked at alone lacks."""
        protections = (self.algorithm.record_privacy, self.algorithm.update_privacy)
        return any(protection is not None and protection.noise > 0 for protection in protections)

    def activations(self, batch: Batch) -> Tensor:
        """What the client's part of the model hands on, (B, D): v_MHA, or what the answer head reads."""
        model = self.workspace.model
        split_part = model.get_submodule("mha") if model_spec(model).split_parts else None
        output: Output = self.network(batch) if split_part is None else split_part(batch)
        return output.features

    @property
    def classes(self) -> int:
        """Number of answers."""
        return len(self.run_data.dataset.answers)

    def sent_names(self) -> list[str]:
        """Names of the tensors that the first site trains and sends."""
        scopes = self.workspace.scopes(self.algorithm, next(iter(self.infos.values())))
        shared = [name for name in self.workspace.tensors if scopes.get(name) is Scope.SHARED]
        return [name for name in shared if self.workspace.tensors[name].requires_grad]
