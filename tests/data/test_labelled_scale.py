"""What must not grow with the number of users, and what may be kept of networks that see label states."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedbn import FedBN
from confed.algorithms.fedlgt import FedLGT
from confed.algorithms.moon import MOON
from confed.data.examples import Examples, FederatedDataset, Split, TableData
from confed.data.lazy import Lazy, known_sizes
from confed.data.ml_files.table import MultiLabelTable
from confed.data.ragged import PackedTexts, Ragged
from confed.data.table import Table
from confed.data.targets import SparseLabels
from confed.engines.local import InProcess, Members, Participation, Setup, Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.protocols import Output
from confed.federation.state import ClientState, MemoryStore
from confed.federation.teacher import global_features, global_logits
from confed.models.tokenizer import WordTokenizer
from confed.runs.dataset import Source
from confed.runs.encode import encoded
from confed.tasks.multilabel import Multilabel
from refusals import refuses

LABELS, USERS, EACH, COHORT = ("red", "green", "blue"), 3000, 2, 5
LOCAL = Local(epochs=3, batch_size=4, lr=0.05, optimizer="sgd")


class Scores(nn.Module):
    """Linear in mean colours that are normalised over the batch, and in label states."""

    reads_states = True
    answer_head = "head"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.BatchNorm1d(3), nn.Linear(6, 4), nn.Linear(4, 3)
        with torch.no_grad():
            rng = torch.Generator().manual_seed(0)
            for tensor in self.body.weight, self.body.bias, self.head.weight, self.head.bias:
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=rng))

    def forward(self, batch):
        known = batch.get("known", torch.full_like(batch["labels"], -1))
        colours = self.norm(batch["image"].float().mean((2, 3)) / 100)
        features = self.body(torch.cat([colours, known.float()], 1)).tanh()
        return Output(self.head(features), features)


def label_data(known: float, examples: int = 10) -> TableData:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (examples, 3, 4, 4)).astype(np.uint8))
    present = rng.random((examples, 3)) < 0.5
    offsets = np.concatenate([[0], np.cumsum(present.sum(1))])
    labels = SparseLabels(Ragged(np.nonzero(present)[1].astype(np.int32), offsets), 3)
    table = Table(images, torch.arange(examples), {}, labels=labels)
    return TableData(table, table.take(0), table.take(0), known)


def client_of(known: float) -> Client:
    workspace, data = Workspace(Scores()), label_data(known)
    info = ClientInfo("a", len(data))
    client = Client(
        info=info, data=data, model=workspace.model, tensors=workspace.tensors, task=Multilabel(3, known=known),
        local=LOCAL, state=ClientState(), scopes=workspace.scopes(FedAvg(), info), initial=workspace.initial, round=0,
        rounds=1, seed=0,
    )  # fmt: skip
    client.load(workspace.initial)
    return client


@pytest.mark.parametrize("kind", [global_logits, global_features])
def test_a_teachers_label_states_are_not_kept_for_the_next_epoch(kind):
    client = client_of(known=1.0)
    ask, state = kind(client), {n: t.clone() for n, t in client.model.state_dict().items()}
    reference = Scores().eval()
    reference.load_state_dict(state)
    calls, differs = [], []
    client.model.register_forward_hook(lambda *_: calls.append(1))
    answers: dict[int, torch.Tensor] = {}
    for epoch in range(3):
        for batch in client.data.train(4, client.rng(f"order/{epoch}")):
            with torch.no_grad():
                wanted = reference(batch)
            got = ask(batch)
            torch.testing.assert_close(got, wanted.logits if kind is global_logits else wanted.features)
            for row, values in zip(batch["index"].tolist(), got, strict=True):
                differs.append(row in answers and not torch.equal(answers[row], values))
                answers[row] = values
    assert len(calls) == 9  # three epochs of three batches
    assert any(differs)


def test_what_it_makes_of_pictures_alone_is_kept():
    for known in (0.0, 1.0):  # nothing is drawn; or the method leaves the states out
        client, calls = client_of(known), []
        ask = global_logits(client)
        client.model.register_forward_hook(lambda *a, calls=calls: calls.append(len(a[2].logits)))
        for epoch in range(3):
            for batch in client.data.train(4, client.rng(f"order/{epoch}")):
                ask({name: value for name, value in batch.items() if name != "known"})
        assert sum(calls) == len(client.data)


def trained(method, deterministic: bool, calls: list[int]) -> dict[str, torch.Tensor]:
    data = {"a": label_data(0.75), "b": label_data(0.75, 7)}
    for own in data.values():
        own.deterministic = deterministic  # type: ignore[misc]
    setup = Setup(method, Members(data), Multilabel(3, known=0.75), LOCAL, Scores, 2)
    workspace = Workspace(setup.model())
    workspace.model.register_forward_hook(lambda m, _, output: calls.append(0 if m.training else len(output.logits)))
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    servers = simulation.start(workspace)
    for record in simulate(simulation, servers):
        assert not record.errors
        servers = record.servers
    return dict(servers["main"].params)


@pytest.mark.parametrize("method", [MOON(mu=2.0), FedLGT()], ids=lambda method: type(method).__name__)
def test_keeping_a_teachers_outputs_changes_nothing(method):
    kept, anew = list[int](), list[int]()
    first, second = trained(method, True, kept), trained(method, False, anew)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    # FedLGT's teacher sees pictures alone: each of the 17 once in each of the two rounds, not in each of three epochs.
    assert sum(kept) == (2 * 17 if isinstance(method, FedLGT) else sum(anew))


# Many users ---------------------------------------------------------------------------------------------------


def many(made: list[str]) -> FederatedDataset:
    rng = np.random.default_rng(1)
    rows = USERS * EACH
    present = rng.random((rows, 3)) < 0.4
    offsets = np.concatenate([[0], np.cumsum(present.sum(1))])
    names = PackedTexts.of(map(str, range(rows)))
    users = PackedTexts.of(f"user {number}" for number in range(USERS))
    values = np.nonzero(present)[1].astype(np.int32)
    table = MultiLabelTable(LABELS, Ragged(values, offsets), names, names, None, users, EACH * np.arange(USERS + 1))
    pictures = (rng.integers(0, 100, (rows, 2, 2, 3)) + 100 * present[:, None, None]).astype(np.uint8)

    def split(user: str, own: np.ndarray) -> Split:
        made.append(user)
        return Split(*(Examples.labelled(table, pictures, part) for part in (own, own[:0], own[:0])))

    own = table.of_users()
    return FederatedDataset("many", LABELS, Lazy(own, lambda u: split(u, own[u]), np.full(USERS, EACH)), {})


def federation(root: Path, rounds: int, made: list[str], method=None) -> tuple[Simulation, Checkpoints, Workspace]:
    clients = encoded(Source(many(made)), {"name": "ctran_mini"}, WordTokenizer(("picture",))).clients
    made.clear()
    method = FedBN(norms=("norm",)) if method is None else method
    members = Members(clients, sizes=known_sizes(clients).tolist())
    setup = Setup(method, members, Multilabel(3), LOCAL, Scores, rounds)
    checkpoints, workspace = Checkpoints(root), Workspace(setup.model())
    simulation = Simulation(setup, checkpoints.store, InProcess(setup, workspace), COHORT, by_size=True)
    return simulation, checkpoints, workspace


def test_a_run_among_thousands_makes_only_users_that_took_part(tmp_path):
    made = list[str]()
    simulation, checkpoints, workspace = federation(tmp_path / "whole", 4, made)
    servers, seen = simulation.start(workspace), set[str]()
    for record in simulate(simulation, servers):
        checkpoints.save(Checkpoint(record.round, record.servers, 0))
        servers, seen = record.servers, seen | set(record.losses)
    assert len(made) == 4 * COHORT
    assert set(made) == seen == set(checkpoints.store.clients())
    wanted = {client: checkpoints.store.load(client) for client in seen}

    simulation, checkpoints, workspace = federation(tmp_path / "parts", 4, made)
    rounds = simulate(simulation, simulation.start(workspace))
    for _ in range(2):
        record = next(rounds)
        checkpoints.save(Checkpoint(record.round, record.servers, 0))
    next(rounds)  # killed before its checkpoint was written
    simulation, checkpoints, _ = federation(tmp_path / "parts", 4, made)
    found, problems = checkpoints.latest()
    assert found.round == 2
    assert not problems
    assert not made  # nobody's data are looked at to go on
    for record in simulate(simulation, found.servers, found.round):
        resumed = record.servers
    assert all(torch.equal(t, servers["main"].params[n]) for n, t in resumed["main"].params.items())
    assert set(checkpoints.store.clients()) == seen
    for client, state in wanted.items():
        ours = checkpoints.store.load(client).tensors
        assert all(torch.equal(t, ours[group][n]) for group, own in state.tensors.items() for n, t in own.items())
    assert wanted[min(seen)].tensors["private"].keys() >= {"norm.weight", "norm.running_mean"}


def test_messages_about_users_name_a_few(tmp_path):
    names = [f"user {number}" for number in range(USERS)]
    with pytest.raises(ValueError, match=r"no client 'nobody'; there are user 0, .* and 2950 more") as caught:
        Participation(joins={"nobody": 2, **dict.fromkeys(names[:100], 2)}).check(names, 3)
    assert len(str(caught.value)) < 1000
    simulation, _, _ = federation(tmp_path, 1, [], method=replace(FedBN(norms=("norm",))))
    refuses("and 2950 more", simulation.setup.population.data, "nobody")
