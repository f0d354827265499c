"""FedLGT: steps by hand in NumPy, what the guiding model is and does not touch, and the label graph of two clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedlgt import FedLGT
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import InProcess, Members, Participation, Setup, Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.protocols import Output
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import MemoryStore, ServerState
from confed.models.ctran import LabelGraph, ctran_mini
from confed.models.resnet import resnet_multilabel_mini
from confed.tasks.multilabel import Multilabel
from confed.testing import CHECKS, protections, steadiness, trial
from confed.testing.toy import ToyModel, toy_setup
from method_contract import TRANSPORTS, with_and_without_transports
from refusals import refuses
from toy_runs import simulated

PLAIN = Local(epochs=1, batch_size=2, lr=0.1, optimizer="sgd", weight_decay=0.0)


class Told(nn.Module):
    """Scores ``w_c x_c``, and ``s`` more or less for a label that is known; with a graph, what it adds to them."""

    reads_states = True

    def __init__(self, labels, calls=None, graph=False):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.4, 1.6, labels))
        self.s = nn.Parameter(torch.tensor(0.3))
        self.calls = [] if calls is None else calls
        self.label_graph = "graph" if graph else ""
        if graph:
            self.graph = LabelGraph(labels)

    def forward(self, batch):
        self.calls.append((self.training, batch))
        logits = batch["x"] * self.w
        if "known" in batch:
            logits = logits + self.s * (2 * batch["known"] - 1).where(batch["known"] >= 0, 0)
        if self.label_graph:
            logits = logits + logits.sigmoid() @ self.graph()
        return Output(logits, logits)


class InOrder(TableData):
    """Examples whose training batches come as stored."""

    def train(self, batch_size, rng):
        return self.tables[0].batches(batch_size)


def examples(x, labels, known=None, kind: type[TableData] = InOrder):
    columns = {"x": torch.as_tensor(x).float(), "labels": torch.as_tensor(labels).float()}
    if known is not None:
        columns["known"] = torch.as_tensor(known).to(torch.int8)
    count = len(columns["x"])
    table = Table(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64), columns)
    return kind(table, table, table)


def run(method, clients, build, labels, rounds=1, local=PLAIN, participation=None):
    """The records of a run and the clients' states after it."""
    asked = Multilabel(labels, known=0.75)
    setup = Setup(method.configure(build(), asked), Members(clients), asked, local, build, rounds=rounds)
    store = MemoryStore()
    with Simulation(setup, store, InProcess(setup), participation=participation) as simulation:
        records = list(simulate(simulation, simulation.start(Workspace(setup.model()))))
    assert all(not record.errors for record in records)
    return records, {name: store.load(name) for name in clients}


# CA-MLE -------------------------------------------------------------------------------------------------------

X = np.array([[0.05, 2.0, -1.0], [1.0, -0.02, 0.5], [0.1, 0.04, -2.0], [-0.03, 1.0, 0.01]])
Y = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]])
KNOWN = np.array([[1, 0, -1], [0, 1, -1], [1, -1, 0], [0, 0, 1]])


def by_hand(guided, steps, lr):
    """Gradient descent on the sum over unknown labels, the states of each step given; returns w and s."""
    w, s = np.linspace(0.4, 1.6, 3), 0.3
    for rows in steps:
        gw, gs = np.zeros(3), 0.0
        for n in rows:
            for c in range(3):
                if guided[n, c] == -1:
                    gw[c] += (1 / (1 + np.exp(-w[c] * X[n, c])) - Y[n, c]) * X[n, c]
        w, s = w - lr * gw, s - lr * gs  # a known label adds s to its own score only, which no loss sees
    return w, s


@pytest.mark.parametrize(
    ("options", "guided_rows"),
    [
        ({}, (0, 1, 2, 3)),
        ({"preset": "code"}, (0, 2)),
        ({"first_sample_only": True}, (0, 2)),
        ({"preset": "code", "first_sample_only": False}, (0, 1, 2, 3)),
        ({"guidance": False}, ()),
    ],
)
def test_guided_steps_equal_a_computation_by_hand(options, guided_rows):
    method = FedLGT(eps=0.03, **options)
    start = np.linspace(0.4, 1.6, 3)
    guided = KNOWN.copy()
    for n in guided_rows:
        for c in range(3):
            if 0.47 <= 1 / (1 + np.exp(-start[c] * X[n, c])) <= 0.53:
                guided[n, c] = -1
    assert (guided != KNOWN).sum() == {4: 5, 2: 2, 0: 0}[len(guided_rows)]
    records, _ = run(method, {"a": examples(X, Y, KNOWN)}, lambda: Told(3), 3)
    w, s = by_hand(guided, [(0, 1), (2, 3)], 0.1)
    got = records[-1].servers["main"].params
    np.testing.assert_allclose(got["w"].numpy(), w, rtol=1e-5)
    np.testing.assert_allclose(got["s"].numpy(), s, rtol=1e-5)


def test_the_received_model_guides_once_and_is_told_nothing():
    calls = []
    local = replace(PLAIN, epochs=3, lr=5.0)  # so that the model being trained would guide in another way
    run(FedLGT(eps=0.03), {"a": examples(X, Y, KNOWN)}, lambda: Told(3, calls), 3, local=local)
    guiding = [batch for training, batch in calls if not training]
    trained = [batch["known"] for training, batch in calls if training]
    assert len(guiding) == 2
    assert len(trained) == 6
    assert not any("known" in batch for batch in guiding)
    for epoch in (1, 2):
        assert torch.equal(trained[2 * epoch], trained[0])
        assert torch.equal(trained[2 * epoch + 1], trained[1])
    guided = torch.cat(trained[:2]).numpy()
    assert (guided != KNOWN).any()
    assert (guided[guided != KNOWN] == -1).all()  # known labels become unknown, and nothing else happens


def test_a_guide_that_is_never_unsure_changes_no_bit():
    # The toy has batch normalisation and dropout: the guiding pass leaves both as they would have been.
    local = Local(epochs=2, batch_size=4, lr=0.05)
    states = []
    for method in (FedLGT(eps=0.0), FedAvg()):
        setup = toy_setup(method, local=local, kind="states")
        states.append(simulated(setup).params)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_cannot_work_is_refused():
    task = Multilabel(3, known=0.75)
    refuses("ResNetMultilabel reads no label states", FedLGT().configure, resnet_multilabel_mini(3), task)
    assert FedLGT(guidance=False).configure(resnet_multilabel_mini(3), task).graph == ""
    with pytest.raises(ValueError, match=r"task\.known is 0; set task\.known to the largest share"):
        FedLGT().configure(Told(3), Multilabel(3, known=0.0))
    with pytest.raises(ValueError, match=r"algorithm\.graph_noise .* set model\.graph to true.*got 2\.0"):
        FedLGT(graph_noise=2.0).configure(Told(3), task)
    with pytest.raises(ValueError, match=r"algorithm\.server\.optimizer must be 'none'.*got 'adam'"):
        FedLGT(server=ServerOptimizer("adam")).configure(Told(3, graph=True), task)
    with pytest.raises(RuntimeError, match=r"a training batch has index, labels, x only; set task\.known"):
        run(FedLGT(), {"a": examples(X[:, :3], Y, kind=WithoutPictures)}, lambda: Told(3), 3)


class WithoutPictures(InOrder):
    def train(self, batch_size, rng):
        for batch in super().train(batch_size, rng):
            del batch["image"]
            yield batch


# The label graph ----------------------------------------------------------------------------------------------


def two_clients(sizes=(5, 3), labels=4):
    rng = np.random.default_rng(0)
    truth = [(rng.random((size, labels)) < 0.5).astype(int) for size in sizes]
    parts = [(rng.standard_normal(y.shape), y, np.full(y.shape, -1)) for y in truth]
    return truth, {name: examples(*part, kind=TableData) for name, part in zip("ab", parts, strict=True)}


def shares(*parts):
    """Shares of all examples that carry both labels, by counting."""
    rows = [row for part in parts for row in part]
    width = len(rows[0])
    return np.array([[sum(row[i] * row[j] for row in rows) / len(rows) for j in range(width)] for i in range(width)])


def graph_of(record):
    params = record.servers["main"].params
    return params["graph.co_occurrence"].numpy(), float(params["graph.examples"])


def test_the_graph_of_two_clients_is_that_of_all_their_examples():
    truth, clients = two_clients()
    local = replace(PLAIN, epochs=2)  # every example is seen twice and counts once
    records, states = run(FedLGT(), clients, lambda: Told(4, graph=True), 4, rounds=3, local=local)
    for record in records:
        pairs, count = graph_of(record)
        np.testing.assert_allclose(pairs, shares(*truth), rtol=1e-6)
        assert count == 8
    scales = [float(record.servers["main"].params["graph.scale"]) for record in records]
    assert scales[0] == 0  # the graph was empty in the first round
    assert scales[1] != 0
    # A client's own model has the graph that it was trained with.
    own = states["a"].tensors["personal"]["graph.co_occurrence"]
    np.testing.assert_allclose(own.numpy(), shares(*truth), rtol=1e-6)


def test_a_late_client_is_added_and_nobody_counts_twice():
    truth, clients = two_clients()
    participation = Participation(joins={"b": 2}, leaves={"a": 3})
    records, _ = run(FedLGT(), clients, lambda: Told(4, graph=True), 4, rounds=4, participation=participation)
    for record, parts, count in zip(records, (truth[:1], truth, truth, truth), (5, 8, 8, 8), strict=True):
        pairs, examples_seen = graph_of(record)
        np.testing.assert_allclose(pairs, shares(*parts), rtol=1e-6)
        assert examples_seen == count


def test_other_methods_leave_the_graph_empty():
    _, clients = two_clients()
    records, _ = run(FedAvg(), clients, lambda: Told(4, graph=True), 4, rounds=2)
    pairs, count = graph_of(records[-1])
    assert count == 0
    assert torch.equal(torch.from_numpy(pairs), LabelGraph(4).co_occurrence)


def test_noise_on_counts_is_one_for_both_orders_of_a_pair():
    labels, size, noise = 40, 6, 3.0
    rng = np.random.default_rng(1)
    truth = (rng.random((size, labels)) < 0.3).astype(int)
    client = examples(rng.standard_normal(truth.shape), truth, np.full(truth.shape, -1))
    method, local = FedLGT(graph_noise=noise), replace(PLAIN, epochs=2)
    (record,), _ = run(method, {"a": client}, lambda: Told(labels, graph=True), labels, local=local)
    pairs, count = graph_of(record)
    assert count == size
    np.testing.assert_array_equal(pairs, pairs.T)
    added = (size * (pairs - shares(truth)))[np.triu_indices(labels)]
    # 820 independent values: bounds of six standard errors.
    assert abs(added.mean()) < 6 * noise / np.sqrt(len(added))
    assert abs(added.std() - noise) < 6 * noise / np.sqrt(2 * len(added))
    assert abs(np.corrcoef(added[:-1], added[1:])[0, 1]) < 6 / np.sqrt(len(added))


def test_a_clients_weight_in_the_graph_is_bounded():
    server = ServerState(3, {"graph.co_occurrence": torch.zeros(2, 2), "graph.examples": torch.tensor(10.0)})

    def reply(name, value, claimed, error=None):
        tensors = {"graph.co_occurrence": torch.full((2, 2), value), "graph.examples": torch.tensor(claimed)}
        return Reply(ClientInfo(name, 10), Message(tensors), error)

    replies = [reply("a", 1.0, 1e9), reply("b", 0.4, 0.0), reply("c", 9.0, -5.0), reply("d", 9.0, 10.0, "gone")]
    mean = FedLGT(graph="graph").average(server, replies)
    assert mean["graph.co_occurrence"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert mean["graph.examples"] == 20


def test_counts_and_probabilities_stay_in_full_precision():
    # bfloat16 has no number between 300 and 302, and none between 0.5195 and 0.5234.
    size = 301
    client = examples(np.ones((size, 2)), np.ones((size, 2)), np.full((size, 2), -1))
    local = replace(PLAIN, batch_size=size, precision="bf16")
    (record,), _ = run(FedLGT(), {"a": client}, lambda: Told(2, graph=True), 2, local=local)
    pairs, count = graph_of(record)
    assert (pairs.tolist(), count) == ([[1, 1], [1, 1]], size)
    batch = {"x": torch.zeros(1, 2), "known": torch.tensor([[1, 0]], dtype=torch.int8)}
    logits = torch.tensor([[0.0825, 0.078]], dtype=torch.bfloat16)  # probabilities of 0.5206 and 0.5195
    assert FedLGT()._guided(batch, lambda asked: logits)["known"].tolist() == [[1, -1]]


class GraphToy(ToyModel):
    """The contract's model for label states with a graph behind it."""

    label_graph = "graph"

    def __init__(self, noisy):
        super().__init__(noisy, torch.Generator().manual_seed(7), states=True)
        self.graph = LabelGraph(3)

    def forward(self, batch):
        output = super().forward(batch)
        return output._replace(logits=output.logits + output.logits.sigmoid() @ self.graph())


@with_and_without_transports
def test_contract_with_a_graph(monkeypatch, transports):
    def with_graph(algorithm, *, noisy=True, **options):
        setup = toy_setup(FedAvg(), kind="states", noisy=noisy, **options)
        return replace(setup, algorithm=algorithm.configure(GraphToy(noisy), setup.task), build=lambda: GraphToy(noisy))

    for module in (trial, steadiness):
        monkeypatch.setattr(module, "toy_setup", with_graph)
    method = FedLGT(eps=0.1, graph_noise=0.5)
    # FedAvg's graph stays empty; the method that knows of a graph has no asynchronous rounds and no protections.
    others = {"neutral coefficients give FedAvg", "one full step equals gradient descent", "asynchronous rounds"}
    others |= protections.PROTECTED.keys()
    for name, check in CHECKS.items():
        if name not in others and (name in TRANSPORTS) == transports:
            check(method)


def test_ctran_learns_with_guidance_and_graph():
    labels = ("car", "tree", "sea")
    truth = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1]]).float()
    rng = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (4, 3, 64, 64), generator=rng, dtype=torch.uint8)
    known = torch.tensor([[1, -1, -1], [-1, 1, 0], [0, 0, -1], [-1, -1, -1]], dtype=torch.int8)
    table = Table(pictures, torch.arange(4), {"labels": truth, "known": known})
    local = Local(epochs=1, batch_size=4, lr=1e-3)
    records, _ = run(
        FedLGT(eps=0.2),
        {"a": TableData(table, table, table)},
        lambda: ctran_mini(labels, graph=True),
        3,
        rounds=2,
        local=local,
    )
    pairs, count = graph_of(records[0])
    np.testing.assert_allclose(pairs, shares(truth.numpy()), rtol=1e-6)
    assert count == 4
    assert records[1].servers["main"].params["graph.scale"].abs() > 0
