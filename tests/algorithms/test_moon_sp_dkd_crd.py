"""MOON, SP, DKD and CRD: their losses by hand, and what teachers are."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.algorithms.crd import CRD
from confed.algorithms.dkd import DKD
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.moon import MOON
from confed.algorithms.sp import SP
from confed.data.examples import TableData
from confed.engines.local import Workspace
from confed.engines.perform import perform
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.local import Local
from confed.federation.messages import Call, Message
from confed.federation.params import Scope
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import isolated
from confed.federation.state import ClientState, Store
from confed.federation.teacher import global_features
from confed.losses.distillation import (
    Embedding,
    MemoryBanks,
    contrast,
    decoupled,
    draw_negatives,
    similarity_preserving,
)
from confed.losses.info_nce import model_contrastive
from confed.testing.toy import ToyTask, toy_clients, toy_model, toy_setup
from refusals import refuses
from toy_runs import client_in, simulated

Z = [[1.0, 0, 2], [0, 1, 1], [1, 1, 0]]
NEAR = [[1, 0.5, 1], [0, 2, 1], [2, 0, 0.5]]
FAR = [[0.0, 1, 1], [1, 1, 0], [0, 0, 1]]


def _by_hand(z: np.ndarray, near: np.ndarray, far: np.ndarray, tau: float) -> float:
    """The mean of Eq. 3 over the examples, as a loop."""

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    terms: list[float] = []
    for own, positive, negative in zip(z, near, far, strict=True):
        up, down = np.exp(cosine(own, positive) / tau), np.exp(cosine(own, negative) / tau)
        terms.append(-np.log(up / (up + down)))
    return float(np.mean(terms))


def test_the_term_has_its_golden_value() -> None:
    value = model_contrastive(torch.tensor(Z), torch.tensor(NEAR), torch.tensor(FAR), 0.5)
    assert value.item() == pytest.approx(0.3443472, abs=1e-6)


@pytest.mark.parametrize("tau", [0.07, 0.5, 3.0])
def test_the_term_is_the_formula(tau: float) -> None:
    z, near, far = np.random.default_rng(0).normal(size=(3, 7, 5))
    got = model_contrastive(torch.tensor(z), torch.tensor(near), torch.tensor(far), tau)
    assert got.item() == pytest.approx(_by_hand(z, near, far, tau), rel=1e-9)


def test_the_term_only_moves_the_local_view() -> None:
    z, near, far = (torch.tensor(v, requires_grad=True) for v in (Z, NEAR, FAR))
    model_contrastive(z, near, far).backward()
    assert z.grad is not None
    assert near.grad is None
    assert far.grad is None
    before = torch.cosine_similarity(z, near).mean() - torch.cosine_similarity(z, far).mean()
    moved = z - 0.1 * z.grad
    assert torch.cosine_similarity(moved, near).mean() - torch.cosine_similarity(moved, far).mean() > before


@pytest.mark.usefixtures("faulty_arguments")
def test_the_term_refuses_what_does_not_fit() -> None:
    refuses("one shape", model_contrastive, torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        model_contrastive(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), 0)


# The method ---------------------------------------------------------------------------------------------------


def _client(method: MOON, previous: Mapping[str, Tensor] | None = None, data: TableData | None = None) -> Client:
    state = ClientState() if previous is None else ClientState({"previous": dict(previous)})
    client = client_in(toy_setup(method), state=state, data=data)
    client.load({n: t for n, t in client.initial.items() if client.scopes[n] is Scope.SHARED})
    return client


def _shifted(client: Client, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        n: t + 0.3 * torch.randn(t.shape, generator=rng) if t.is_floating_point() and "running" not in n else t.clone()
        for n, t in client.initial.items()
    }


def _separate(client: Client, values: Mapping[str, Tensor]) -> nn.Module:
    """A network of its own with these values, in evaluation mode."""
    network = copy.deepcopy(client.model)
    network.load_state_dict(values, strict=False)
    return network.eval()


@pytest.mark.parametrize("projection", [True, False])
def test_the_objective_is_the_formula_with_three_networks(projection: bool) -> None:
    method = MOON(mu=0.7, temperature=0.4, projection=projection)
    blank = _client(method)
    previous, received = _shifted(blank, 1), _shifted(blank, 2)
    client = _client(method, previous)
    client.load(received)
    losses = method.objective(client)
    with torch.no_grad():  # the student moves on from what it received
        for name, value in _shifted(blank, 3).items():
            client.tensors[name].copy_(value)
    client.model.eval()  # no dropout, so that the student can be recomputed
    batch = next(iter(client.data.train(8, client.rng("order/0"))))
    (loss,) = losses(client.model, batch)

    def view(network: nn.Module) -> np.ndarray:
        with torch.no_grad():
            features = network(batch).features
            return (network.get_submodule("projection")(features) if projection else features).numpy()

    z, near, far = (view(_separate(client, v)) for v in (_shifted(blank, 3), received, previous))
    assert z.shape == (8, 256 if projection else 8)
    with torch.no_grad():
        task = ToyTask().loss(client.model(batch), batch).item()
    assert loss.item() == pytest.approx(task + 0.7 * _by_hand(z, near, far, 0.4), rel=1e-5)


def test_views_kept_for_a_round_change_nothing() -> None:
    method = MOON(mu=2.0)
    results: list[Message] = []
    for deterministic in (True, False):
        data = toy_clients()["client-1"]
        data.deterministic = deterministic
        client = _client(method, _shifted(_client(method), 1), data)
        with isolated(0):  # the same dropout
            results.append(method.fit(client, Message(_shifted(client, 2))))
    kept, computed = results
    assert all(torch.allclose(t, computed.tensors[n], atol=1e-6) for n, t in kept.tensors.items())


def _after(method: Algorithm, rounds: int) -> Mapping[str, Tensor]:
    return simulated(toy_setup(method, rounds=rounds)).states[-1].params


def test_the_first_round_is_fedavgs() -> None:
    moon, fedavg = _after(MOON(mu=5.0), 1), _after(FedAvg(), 1)
    assert all(torch.equal(moon[name], value) for name, value in fedavg.items())


def test_the_second_round_is_not() -> None:
    moon, fedavg = _after(MOON(mu=5.0), 2), _after(FedAvg(), 2)
    assert not torch.equal(moon["body.weight"], fedavg["body.weight"])
    assert set(moon) - set(fedavg) == {f"projection.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert moon["projection.2.weight"].shape == (256, 8)
    assert not torch.equal(moon["projection.0.weight"], _after(MOON(), 1)["projection.0.weight"])


@pytest.mark.parametrize("keep_personal", [True, False])
def test_the_previous_model_is_what_the_client_last_sent(keep_personal: bool) -> None:
    method = MOON()
    setup = replace(toy_setup(method), keep_personal=keep_personal)
    workspace, info = Workspace(setup.model()), setup.population.info(0)
    shared = dict(workspace.initial)
    reply, state = perform(setup, workspace, Call(info, "fit", Message(shared)), ClientState(), 0)
    assert reply.tensors.keys() == state.tensors["previous"].keys() == shared.keys()
    assert all(torch.equal(state.tensors["previous"][n], t) for n, t in reply.tensors.items())
    assert ("personal" in state.tensors) is keep_personal


def test_no_network_is_added_where_there_is_no_term() -> None:
    for method in (MOON(mu=0), MOON(projection=False)):
        assert set(_after(method, 1)) == set(_after(FedAvg(), 1))


def test_the_projection_starts_from_the_seed_alone() -> None:
    one, other, third = (toy_setup(MOON(), seed=seed).model().state_dict() for seed in (0, 0, 1))
    assert torch.equal(one["projection.0.weight"], other["projection.0.weight"])
    assert not torch.equal(one["projection.0.weight"], third["projection.0.weight"])
    assert one["projection.0.weight"].abs().max() <= 8**-0.5


def test_bf16_training_stays_finite() -> None:
    local = Local(epochs=2, batch_size=4, lr=0.01, precision="bf16")
    setup = toy_setup(MOON(), local=local, rounds=2)
    for record in simulated(setup, sound=True).records:
        assert all(np.isfinite(v) for v in record.losses.values())


STUDENT = torch.tensor([[2, 1, 0, -1], [0.5, -0.5, 1.5, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1, 2, 0.5, -1], [0, 0, 2, 1]], dtype=torch.float64)
LABELS = torch.tensor([1, 2])
Q = torch.tensor([[1, 0, 2], [0, 1, 1], [1, 1, 0]], dtype=torch.float64)
K = torch.tensor([[1, 0.5, 1], [0, 2, 1], [2, 0, 0.5]], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


# The losses ---------------------------------------------------------------------------------------------------


def similarity_by_loops(student: np.ndarray, teacher: np.ndarray) -> float:
    grams = []
    for features in (student, teacher):
        rows = [[float(np.dot(a, b)) for b in features] for a in features]
        grams.append([[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in rows])
    count = len(student)
    return sum((grams[0][i][j] - grams[1][i][j]) ** 2 for i in range(count) for j in range(count)) / count**2


def test_similarity_golden_and_by_loops() -> None:
    assert similarity_preserving(Q, K).item() == pytest.approx(0.0735242, abs=1e-7)
    student, teacher = normal(5, 4).double(), normal(5, 7, seed=1).double()
    wanted = similarity_by_loops(student.numpy(), teacher.numpy())
    assert similarity_preserving(student, teacher).item() == pytest.approx(wanted, abs=1e-12)


def test_similarity_of_one_example_and_of_zeros_is_harmless() -> None:
    for student in (normal(1, 4), torch.zeros(3, 4)):
        student.requires_grad_()
        loss = similarity_preserving(student, normal(len(student), 4, seed=1))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(student.grad).all()
    assert similarity_preserving(normal(1, 4), normal(1, 4, seed=1)).item() == pytest.approx(0, abs=1e-12)


def test_similarity_gradient_and_precision() -> None:
    assert torch.autograd.gradcheck(lambda s: similarity_preserving(s, K), Q.clone().requires_grad_())
    teacher = K.clone().requires_grad_()
    similarity_preserving(Q.clone().requires_grad_(), teacher).backward()
    assert teacher.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert similarity_preserving(Q.float(), K.float()).item() == pytest.approx(0.0735242, abs=1e-6)


def decoupled_by_loops(student: np.ndarray, teacher: np.ndarray, labels: list[int], tau: float) -> tuple[float, float]:
    tckd = nckd = 0.0
    for s, t, y in zip(student, teacher, labels, strict=True):
        p, q = (np.exp(row / tau) / np.exp(row / tau).sum() for row in (s, t))
        tckd += q[y] * math.log(q[y] / p[y]) + (1 - q[y]) * math.log((1 - q[y]) / (1 - p[y]))
        for c in range(len(s)):
            if c != y:
                share = q[c] / (1 - q[y])
                nckd += share * math.log(share / (p[c] / (1 - p[y])))
    return tau**2 * tckd / len(labels), tau**2 * nckd / len(labels)


def test_decoupled_golden_and_by_loops() -> None:
    tckd, nckd = decoupled(STUDENT, TEACHER, LABELS, 4.0)
    assert (tckd.item(), nckd.item()) == pytest.approx((0.0899485, 0.2105260), abs=1e-7)
    assert (tckd + 8 * nckd).item() == pytest.approx(1.7741567, abs=1e-7)
    student, teacher, labels = normal(7, 5).double(), normal(7, 5, seed=1).double(), [0, 4, 2, 2, 1, 3, 0]
    for tau in (0.5, 1.0, 3.0):
        wanted = decoupled_by_loops(student.numpy(), teacher.numpy(), labels, tau)
        got = decoupled(student, teacher, torch.tensor(labels), tau)
        assert (got[0].item(), got[1].item()) == pytest.approx(wanted, abs=1e-12)


def test_decoupled_gradient_extremes_and_bad_input() -> None:
    assert torch.autograd.gradcheck(lambda s: decoupled(s, TEACHER, LABELS, 2.0), STUDENT.clone().requires_grad_())
    teacher = TEACHER.clone().requires_grad_()
    certain = torch.tensor([[1000.0, 0.0, 0.0], [0.0, 0.0, -1000.0]], requires_grad=True)
    torch.stack(decoupled(certain, certain.detach().flip(0), torch.tensor([0, 1]), 1.0)).sum().backward()
    assert torch.isfinite(certain.grad).all()
    torch.stack(decoupled(STUDENT.clone().requires_grad_(), teacher, LABELS)).sum().backward()
    assert teacher.grad is None
    assert decoupled(normal(3, 2), normal(3, 2, seed=1), torch.zeros(3, dtype=torch.int64))[1].item() == 0
    with pytest.raises(ValueError, match=r"C of at least 2 and labels \(B,\), got \(3, 1\)"):
        decoupled(normal(3, 1), normal(3, 1), torch.zeros(3, dtype=torch.int64))


def test_contrast_has_its_golden_values() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.1], [0.5, 0.4, 0.3]], dtype=torch.float64)
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert contrast(scores[:, 0], scores[:, 1:], everything, 10).item() == pytest.approx(1.8253297, abs=1e-7)
    # A third anchor without negatives adds nothing but counts in the mean.
    wide = torch.cat([scores, torch.tensor([[0.3, 0.7, 0.2]], dtype=torch.float64)])
    some = torch.cat([everything, torch.zeros(1, 2, dtype=torch.bool)])
    assert contrast(wide[:, 0], wide[:, 1:], some, 10).item() == pytest.approx(1.8253297 * 2 / 3, abs=1e-7)


class BanksByLoops:
    """CRD's arithmetic in NumPy, one anchor and one negative at a time."""

    def __init__(self, student: np.ndarray, teacher: np.ndarray, tau: float, momentum: float) -> None:
        self.banks = [student.copy(), teacher.copy()]
        self.tau, self.momentum = tau, momentum
        self.z: list[float] = []

    def __call__(self, student: np.ndarray, teacher: np.ndarray, index: list[int], negatives: list[list[int]]) -> float:
        count, total = len(self.banks[0]), 0.0
        scores = [
            [
                [math.exp(np.dot(bank[j], v) / self.tau) for j in [i, *others]]
                for i, v, others in zip(index, anchors, negatives, strict=True)
            ]
            for anchors, bank in ((student, self.banks[1]), (teacher, self.banks[0]))
        ]
        if not self.z:
            self.z = [count * float(np.mean([s for row in side for s in row])) for side in scores]
        for side, z in zip(scores, self.z, strict=True):
            for positive, *others in side:
                noise, p = len(others) / count, positive / z
                total -= math.log(p / (p + noise + 1e-7)) / len(index)
                total -= sum(math.log(noise / (x / z + noise + 1e-7)) for x in others) / len(index)
        for bank, new in zip(self.banks, (student, teacher), strict=True):
            for i, v in zip(index, new, strict=True):
                mixed = self.momentum * bank[i] + (1 - self.momentum) * v
                bank[i] = mixed / math.sqrt(sum(x * x for x in mixed))
        return total


def test_banks_equal_loops_over_several_batches() -> None:
    examples, width = 12, 6
    banks = MemoryBanks.new(examples, width, torch.Generator().manual_seed(3))
    assert banks.rows.abs().max() <= math.sqrt(3 / width)
    banks.momentum = 0.3
    loops = BanksByLoops(banks.rows[0].double().numpy(), banks.rows[1].double().numpy(), 0.07, 0.3)
    draw = np.random.default_rng(0)
    for step in range(4):
        index = draw.permutation(examples)[:3].tolist()
        others = [draw.permutation([j for j in range(examples) if j != i]).tolist() for i in index]
        negatives = [row[: 2 + k] for k, row in enumerate(others)]
        chosen = torch.zeros(3, examples, dtype=torch.bool)
        for row, drawn in enumerate(negatives):
            chosen[row, drawn] = True
        student, teacher = units(3, width, seed=step), units(3, width, seed=50 + step)
        got = banks.loss(student, teacher, torch.tensor(index), chosen)
        banks.update(student, teacher, torch.tensor(index))
        wanted = loops(student.double().numpy(), teacher.double().numpy(), index, negatives)
        assert got.item() == pytest.approx(wanted, rel=1e-5)
        assert np.allclose(banks.rows.numpy(), loops.banks, atol=1e-6)


def test_each_side_learns_from_its_own_anchors_only() -> None:
    banks = MemoryBanks.new(8, 4, torch.Generator().manual_seed(0))
    chosen = ~torch.eye(8, dtype=torch.bool)[:3]
    index = torch.arange(3)
    student, teacher = (units(3, 4, seed=s).requires_grad_() for s in (1, 2))
    loss = banks.loss(student, teacher, index, chosen)
    first, second = torch.autograd.grad(loss, [student, teacher])
    assert not banks.rows.requires_grad
    # The student's gradient does not depend on the teacher's anchors, nor the other way round.
    (alone,) = torch.autograd.grad(banks.loss(student, units(3, 4, seed=9), index, chosen), student)
    torch.testing.assert_close(first, alone)
    assert second.abs().max() > 0


def test_stored_banks_are_copied() -> None:
    stored = MemoryBanks.new(5, 3, torch.Generator().manual_seed(0)).tensors()
    before = {name: t.clone() for name, t in stored.items()}
    banks = MemoryBanks.of(stored, torch.device("cpu"), 0.07, 0.5)
    batch = units(2, 3), units(2, 3, seed=1), torch.arange(2)
    banks.loss(*batch, torch.ones(2, 5, dtype=torch.bool))
    banks.update(*batch)
    assert all(torch.equal(before[name], t) for name, t in stored.items())
    assert not torch.equal(banks.rows, stored["rows"])


def test_negatives_are_drawn_without_repetition() -> None:
    candidates = torch.rand(40, 30, generator=torch.Generator().manual_seed(0)) < 0.4
    candidates[0] = False
    rng = torch.Generator().manual_seed(1)
    counts = torch.zeros(40, 30)
    for _ in range(300):
        drawn = draw_negatives(candidates, 5, rng)
        assert not (drawn & ~candidates).any()
        assert torch.equal(drawn.sum(1), candidates.sum(1).clamp(max=5))
        counts += drawn
    share = (counts / 300)[candidates]
    wanted = (5 / candidates.sum(1, keepdim=True)).clamp(max=1).expand(-1, 30)[candidates]
    assert (share - wanted).abs().max() < 5 * math.sqrt(0.25 / 300)  # five standard deviations


def test_few_candidates_are_all_taken_and_cost_no_random_number() -> None:
    candidates = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    rng = torch.Generator().manual_seed(1)
    before = rng.get_state()
    assert torch.equal(draw_negatives(candidates, 9, rng), candidates)
    assert torch.equal(draw_negatives(candidates, int(candidates.sum(1).max()), rng), candidates)
    assert torch.equal(rng.get_state(), before)
    refuses("most must be at least 1", draw_negatives, candidates, 0, rng)


def test_embeddings_are_unit_vectors_in_full_precision() -> None:
    layer = Embedding(16, 8, torch.Generator().manual_seed(0))
    assert layer.linear.weight.abs().max() <= 0.25
    x = normal(5, 16)
    plain = layer(x)
    torch.testing.assert_close(plain.norm(dim=1), torch.ones(5))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain)


# The methods --------------------------------------------------------------------------------------------------


def client_of(
    method: Algorithm, local: Local | None = None, round: int = 1, state: ClientState | None = None
) -> Client:
    """A client in the middle of a run: what it received is not what it starts from, so that both differ."""
    setup = toy_setup(method, local=local or Local(epochs=2, batch_size=7), rounds=4, noisy=False)
    client = client_in(setup, round=round, state=state)
    client.load({n: client.initial[n] for n in client.names(Scope.SHARED)})
    return client


def disturb(client: Client) -> None:
    with torch.no_grad():
        for number, name in enumerate(client.names(Scope.SHARED)):
            client.tensors[name].add_(0.3 * normal(*client.tensors[name].shape, seed=number))


def one_loss(method: Algorithm, client: Client) -> tuple[Tensor, Output, Output, Batch]:
    """The first batch's loss, and what student and teacher said on it."""
    batch = next(iter(client.data.train(7, torch.Generator().manual_seed(0))))
    received = toy_model(noisy=False)(batch)
    losses = method.objective(client)
    disturb(client)
    loss = next(iter(losses(client.model, batch)))
    return loss, client.model(batch), received, batch


def test_sp_adds_its_term_to_the_tasks_loss() -> None:
    method = SP(lam=5.0)
    loss, student, teacher, batch = one_loss(method, client_of(method))
    term = similarity_by_loops(student.features.detach().double().numpy(), teacher.features.detach().double().numpy())
    assert loss.item() == pytest.approx(F.cross_entropy(student.logits, batch["label"]).item() + 5 * term, rel=1e-5)


@pytest.mark.parametrize(("round", "weight"), [(1, 0.25), (2, 0.5), (3, 0.5)])
def test_dkd_adds_its_term_with_warmup(round: int, weight: float) -> None:
    method = DKD(lam=0.5, alpha=2.0, beta=3.0, temperature=2.0, warmup=2)
    loss, student, teacher, batch = one_loss(method, client_of(method, round=round))
    logits = (o.logits.detach().double().numpy() for o in (student, teacher))
    tckd, nckd = decoupled_by_loops(*logits, batch["label"].tolist(), 2.0)
    plain = F.cross_entropy(student.logits, batch["label"]).item()
    assert loss.item() == pytest.approx(plain + weight * (2 * tckd + 3 * nckd), rel=1e-5)


def test_crd_adds_its_term_to_the_tasks_loss() -> None:
    method = CRD(lam=0.5, width=5)
    client = client_of(method)
    loss, student, teacher, batch = one_loss(method, client)
    labels = client.data.tables[0].columns["label"].tolist()
    index = batch["index"].tolist()
    negatives = [[j for j, other in enumerate(labels) if other != labels[i]] for i in index]
    start = MemoryBanks.new(20, 5, client.rng("banks")).rows.double().numpy()
    vectors = []
    for side, output in (("student", student), ("teacher", teacher)):
        weight, bias = (client.tensors[f"crd_{side}.linear.{kind}"].detach().double() for kind in ("weight", "bias"))
        mapped = output.features.detach().double() @ weight.T + bias
        vectors.append((mapped / mapped.norm(dim=1, keepdim=True)).numpy())
    term = BanksByLoops(start[0], start[1], 0.07, 0.5)(*vectors, index, negatives)
    plain = F.cross_entropy(student.logits, batch["label"]).item()
    assert loss.item() == pytest.approx(plain + 0.5 * term, rel=1e-5)
    assert client.state.tensors["crd"]["labels"].tolist() == labels


@pytest.mark.parametrize("method", [SP(), DKD(), CRD()], ids=lambda m: m.title)
def test_gradients_reach_the_student_and_its_own_embeddings_only(method: Algorithm) -> None:
    client = client_of(method)
    received = {n: t.clone() for n, t in client.incoming.items()}
    one_loss(method, client)[0].backward()
    assert all(torch.equal(t, client.incoming[n]) for n, t in received.items())
    assert not any(t.requires_grad for t in client.incoming.values())
    assert client.tensors["body.weight"].grad.abs().max() > 0
    own = client.names(Scope.PRIVATE)
    assert bool(own) == isinstance(method, CRD)
    assert all(client.tensors[n].grad.abs().max() > 0 for n in own)


@pytest.mark.parametrize("method", [SP(start_round=2), DKD(start_round=2), CRD(start_round=2)], ids=lambda m: m.title)
def test_before_its_first_round_a_method_is_fedavg(method: Algorithm) -> None:
    runs = [run(m, rounds=2)[0] for m in (method, FedAvg())]
    assert all(torch.equal(t, runs[1][n]) for n, t in runs[0].items())
    assert any(not torch.equal(t, runs[1][n]) for n, t in run(replace(method, start_round=1), rounds=2)[0].items())


def run(method: Algorithm, rounds: int, **clients: object) -> tuple[dict[str, Tensor], Store]:
    local = Local(epochs=2, batch_size=4, lr=0.02)
    setup = toy_setup(method, local=local, rounds=rounds, noisy=False, **clients)  # type: ignore[arg-type]
    records, store, _ = simulated(setup)
    assert not any(record.errors for record in records)
    return dict(records[-1].servers["main"].params), store


def test_global_features_are_computed_once_per_example() -> None:
    client = client_of(FedAvg(), Local(epochs=3, batch_size=7))
    known = global_features(client)
    wanted = toy_model(noisy=False)(next(iter(client.data.test(50)))).features.detach()
    disturb(client)
    calls: list[int] = []
    client.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        for batch in client.data.train(7, torch.Generator().manual_seed(0)):
            torch.testing.assert_close(known(batch), wanted[batch["index"]])
    assert len(calls) == 3  # batches of one epoch


def test_crd_keeps_its_memory_and_sends_none_of_it() -> None:
    servers, store = run(CRD(), rounds=3)
    plain, _ = run(FedAvg(), rounds=1)
    assert servers.keys() == plain.keys()
    for name, data in toy_clients().items():
        kept = store.load(name).tensors
        sizes = {group: t.numel() * t.element_size() for group, t in kept["crd"].items()}
        assert sizes == {"rows": 2 * len(data) * 128 * 4, "normalisers": 8, "labels": 8 * len(data)}
        assert {n.split(".")[0] for n in kept["private"]} == {"crd_student", "crd_teacher"}
        torch.testing.assert_close(kept["crd"]["rows"].norm(dim=2), torch.ones(2, len(data)))


def test_crds_normalisers_are_those_of_the_first_batch_for_good() -> None:
    client = client_of(CRD(), round=1)
    shared = client.incoming
    CRD().fit(client, Message(shared))
    first = {n: t.clone() for n, t in client.state.tensors["crd"].items()}
    state = client.state.copy()
    later = client_of(CRD(), round=2, state=state)
    CRD().fit(later, Message(shared))
    assert (first["normalisers"] > 0).all()
    assert torch.equal(later.state.tensors["crd"]["normalisers"], first["normalisers"])
    # A state is shared with the store by reference: the second round has not touched the first one's tensors.
    assert all(torch.equal(t, client.state.tensors["crd"][n]) for n, t in first.items())
    assert not torch.equal(later.state.tensors["crd"]["rows"], first["rows"])


def test_a_client_of_one_class_trains_as_in_fedavg() -> None:
    clients = toy_clients()
    for data in clients.values():
        data.tables[0].columns["label"].fill_(1)  # type: ignore[union-attr]
    got, _ = run(CRD(start_round=0), rounds=2, clients=clients)
    wanted, _ = run(FedAvg(), rounds=2, clients=clients)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, msg=name)
    # All others as negatives do not need classes.
    other, _ = run(CRD(start_round=0, negatives_from="others"), rounds=2, clients=clients)
    assert any(not torch.allclose(other[name], value) for name, value in wanted.items())


def test_a_client_whose_data_changed_is_told_so() -> None:
    memory = {**MemoryBanks.new(3, 128, torch.Generator()).tensors(), "labels": torch.zeros(3, dtype=torch.int64)}
    client = client_of(CRD(), state=ClientState({"crd": memory}))
    refuses("'client-1' has 20 training examples and a memory of 3", CRD().objective, client)
