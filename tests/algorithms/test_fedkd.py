"""FedKD and its compression against NumPy, and in limiting cases."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.algorithms.fedkd import FedKD, mutual_losses
from confed.engines.local import Setup, Simulation, Workspace
from confed.engines.perform import answer, perform
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Scope
from confed.federation.protocols import Output
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.federation.wire import size
from confed.losses.low_rank import compress, energy_rank, restore, truncate
from confed.testing.toy import toy_setup
from refusals import refuses
from toy_runs import simulated


def _matrix(rows: int, columns: int, rank: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(rows * 100 + columns)
    if rank is None:
        return rng.normal(size=(rows, columns)) * np.exp(-0.3 * np.arange(columns))
    return rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))


# Compression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("energy", "rank"),
    # Squares 9, 4, 1 of 14: shares .643, .929, 1. The share must be exceeded, and 1 cannot be.
    [(0.0, 1), (0.64, 1), (0.65, 2), (0.92, 2), (0.93, 3), (0.999, 3), (1.0, 3)],
)
def test_the_fewest_values_above_the_energy(energy: float, rank: int) -> None:
    assert energy_rank(torch.tensor([3.0, 2.0, 1.0]), energy) == rank
    assert energy_rank(torch.tensor([1.0, 1.0]), 0.5) == 2  # met exactly is not exceeded
    assert energy_rank(torch.zeros(3), energy) == 0


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (24, 24), (64, 8)])
@pytest.mark.parametrize("energy", [0.7, 0.95, 0.98])
def test_the_factors_are_numpys_truncated_decomposition(shape: tuple[int, int], energy: float) -> None:
    matrix = _matrix(*shape)
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    squares = s**2 / (s**2).sum()
    rank = next(k for k in range(1, len(s) + 1) if squares[:k].sum() > energy)
    factors = truncate(torch.tensor(matrix, dtype=torch.float32), energy)
    assert factors is not None
    assert [tuple(f.shape) for f in factors] == [(shape[0], rank), (rank,), (rank, shape[1])]
    assert np.allclose(factors[1], s[:rank], rtol=1e-5)
    left = ((factors[0] * factors[1]) @ factors[2]).numpy()
    assert np.allclose(left, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5)
    assert ((matrix - left) ** 2).sum() / (matrix**2).sum() == pytest.approx(1 - squares[:rank].sum(), abs=1e-5)


def test_rank_one_travels_as_one_singular_value() -> None:
    matrix = torch.tensor(_matrix(64, 64, rank=1), dtype=torch.float32)
    sent = compress({"w": matrix}, 0.98, "update/")
    assert {n: tuple(t.shape) for n, t in sent.items()} == {
        "update/w/u": (64, 1), "update/w/s": (1,), "update/w/v": (1, 64)
    }  # fmt: skip
    assert size(Message(sent)) < size(Message({"w": matrix})) / 20
    assert torch.allclose(restore(sent, {"w": matrix}, "update/")["w"], matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("energy", [0.5, 0.95, 1.0])
def test_never_more_values_than_the_matrix_has(energy: float) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {f"{m}x{n}": torch.randn(m, n, generator=rng) for m, n in ((1, 9), (9, 1), (3, 3), (2, 50), (16, 16))}
    sent = compress(tensors, energy)
    for name, tensor in tensors.items():
        assert sum(t.numel() for key, t in sent.items() if key.split("/")[0] == name) <= tensor.numel()
        if energy == 1.0:
            assert sent[name] is tensor


def test_only_floating_matrices_are_decomposed() -> None:
    tensors = {
        "vector": torch.arange(5.0),
        "kernel": torch.ones(2, 3, 4, 4),
        "counts": torch.ones(8, 8, dtype=torch.int64),
        "broken": torch.full((8, 8), torch.nan),
        "none": torch.zeros(8, 8),
    }
    sent = compress(tensors, 0.9)
    assert set(sent) == {"vector", "kernel", "counts", "broken", "none/u", "none/s", "none/v"}
    assert sent["none/s"].shape == (0,)
    back = restore(sent, tensors)
    assert all(torch.equal(back[n], t) for n, t in tensors.items() if n != "broken")


def _faults() -> dict[str, tuple[str, dict[str, Tensor]]]:
    u, s, v, b = torch.ones(8, 2), torch.ones(2), torch.ones(2, 6), torch.ones(3)
    many = {"w/u": torch.ones(8, 7), "w/s": torch.ones(7), "w/v": torch.ones(7, 6)}
    return {
        "a missing factor": (r"lacks \['w/s'\]", {"w/u": u, "w/v": v, "b": b}),
        "a missing tensor": ("'b' is missing", {"w/u": u, "w/s": s, "w/v": v}),
        "a foreign tensor": (r"unknown tensors \['x'\]", {"w/u": u, "w/s": s, "w/v": v, "b": b, "x": b}),
        "both forms": ("unknown tensors", {"w": torch.ones(8, 6), "w/u": u, "w/s": s, "w/v": v, "b": b}),
        "ranks that differ": ("factors", {"w/u": u, "w/s": torch.ones(3), "w/v": v, "b": b}),
        "a rank too large": ("factors", {**many, "b": b}),
        "transposed factors": ("factors", {"w/u": v.T, "w/s": s, "w/v": u.T, "b": b}),
        "scalars for factors": ("factors", {"w/u": u, "w/s": torch.tensor(1.0), "w/v": v, "b": b}),
        "a vector in factors": ("factors", {"w/u": u, "w/s": s, "w/v": v, "b/u": u, "b/s": s, "b/v": v}),
        "another shape": ("must have shape", {"w": torch.ones(6, 8), "b": b}),
        "another precision": ("torch.float64", {"w/u": u.double(), "w/s": s, "w/v": v, "b": b}),
    }  # fmt: skip


@pytest.mark.parametrize("fault", list(_faults()))
def test_malformed_factors_are_refused(fault: str) -> None:
    message, sent = _faults()[fault]
    refuses(message, restore, sent, {"w": torch.zeros(8, 6), "b": torch.zeros(3)})


# The losses ---------------------------------------------------------------------------------------------------


def _outputs(grad: bool = False) -> list[Output]:
    rng = np.random.default_rng(3)
    pairs = [(rng.normal(size=(4, 5)), rng.normal(size=(4, 6))) for _ in range(2)]
    return [Output(torch.tensor(z, requires_grad=grad), torch.tensor(h, requires_grad=grad)) for z, h in pairs]


@pytest.mark.parametrize("reduction", ["element", "batch"])
@pytest.mark.parametrize("detach", [False, True])
def test_the_losses_are_the_formulas(reduction: str, detach: bool) -> None:
    mentor, mentee = _outputs()
    got = mutual_losses(mentor, mentee, torch.tensor(1.2), torch.tensor(0.5), detach, reduction)  # type: ignore[arg-type]
    divergences = [0.0, 0.0]
    for row in range(4):
        p_t, p_s = (np.exp(o.logits[row].numpy()) / np.exp(o.logits[row].numpy()).sum() for o in (mentor, mentee))
        for answer_ in range(5):
            divergences[0] += p_s[answer_] * np.log(p_s[answer_] / p_t[answer_])  # L_t holds KL(p_s || p_t)
            divergences[1] += p_t[answer_] * np.log(p_t[answer_] / p_s[answer_])
    hidden = ((mentor.features - mentee.features).numpy() ** 2).sum() / 24
    count = 20 if reduction == "element" else 4
    assert got[0].item() == pytest.approx(1.2 + (divergences[0] / count + hidden) / 1.7, rel=1e-6)
    assert got[1].item() == pytest.approx(0.5 + (divergences[1] / count + hidden) / 1.7, rel=1e-6)


def test_detached_losses_move_one_network_each() -> None:
    for index in (0, 1):
        outputs = _outputs(grad=True)
        tasks = [output.logits.square().mean() for output in outputs]
        mutual_losses(outputs[0], outputs[1], tasks[0], tasks[1], detach=True)[index].backward()
        assert outputs[index].features.grad is not None
        assert outputs[1 - index].features.grad is None
        assert outputs[index].logits.grad is not None
        assert outputs[1 - index].logits.grad is None


def test_without_detaching_both_are_moved_and_the_divisor_too() -> None:
    mentor, mentee = _outputs(grad=True)
    ce_t, ce_s = torch.tensor(1.2, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    loss_t, _ = mutual_losses(mentor, mentee, ce_t, ce_s)
    loss_t.backward()
    assert mentee.logits.grad is not None
    assert mentee.features.grad is not None
    term = (loss_t.item() - 1.2) * 1.7
    assert ce_t.grad is not None
    assert ce_t.grad.item() == pytest.approx(1 - term / 1.7**2, rel=1e-6)
    assert ce_s.grad is not None
    assert ce_s.grad.item() == pytest.approx(-term / 1.7**2, rel=1e-6)


# The federation -----------------------------------------------------------------------------------------------


def _run(method: FedKD, rounds: int = 3, cohort: int | None = None) -> tuple[list[ServerState], MemoryStore, Setup]:
    setup = toy_setup(method, rounds=rounds)
    finished = simulated(setup, cohort, sound=True)
    return finished.states, finished.store, setup


def _asked(setup: Setup, server: ServerState, clients: Sequence[ClientInfo]) -> Sequence[Call]:
    return next(setup.algorithm.round(server, clients))


def _finished(setup: Setup, server: ServerState, calls: Sequence[Call], replies: Sequence[Reply]) -> ServerState:
    flow = setup.algorithm.round(server, [call.client for call in calls])
    next(flow)
    with pytest.raises(StopIteration) as stop:
        flow.send(replies)
    return stop.value.value


def _infos(setup: Setup) -> list[ClientInfo]:
    return [setup.population.info(i) for i in range(len(setup.population))]


def test_the_mentor_is_private_and_shares_what_is_frozen() -> None:
    setup = toy_setup(FedKD())
    workspace = Workspace(setup.model())
    mentor = workspace.model.get_submodule("mentor")
    assert mentor.get_parameter("stem.weight") is workspace.model.get_parameter("stem.weight")
    assert mentor.get_parameter("head.weight") is not workspace.model.get_parameter("head.weight")
    assert torch.equal(mentor.get_parameter("head.weight"), workspace.model.get_parameter("head.weight"))
    scopes = workspace.scopes(FedKD(), setup.population.info(0))
    shared = {n for n, s in scopes.items() if s is Scope.SHARED}
    assert {n for n, s in scopes.items() if s is Scope.PRIVATE} == {f"mentor.{n}" for n in shared}
    assert {n for n, s in scopes.items() if s is Scope.FROZEN} == {"stem.weight", "stem.bias"}


def test_the_personal_model_is_the_mentor() -> None:
    servers, store, setup = _run(FedKD())
    state = store.load("client-1")
    personal, private = state.tensors["personal"], state.tensors["private"]
    assert personal.keys() == servers[-1].params.keys()
    assert all(torch.equal(t, private[f"mentor.{n}"]) for n, t in personal.items())
    assert not torch.allclose(personal["head.weight"], servers[-1].params["head.weight"], atol=1e-3)
    # What is evaluated as the client's own is the mentor.
    workspace, seen = Workspace(setup.model()), {}
    for view, tensors in (("personal", personal), ("global", servers[-1].params)):
        call = Call(setup.population.info(1), "examine", Message(dict(tensors)))
        seen[view] = perform(setup, workspace, call, state.copy(), 3)[0].scalars["examined:accuracy:sum"]
    call = Call(setup.population.info(1), "evaluate", Message(dict(servers[-1].params)))
    scalars = perform(setup, workspace, call, state.copy(), 3)[0].scalars
    assert {view: scalars[f"{view}:accuracy:sum"] for view in seen} == seen


@pytest.mark.parametrize("compress_download", [True, False])
def test_at_full_energy_the_server_takes_the_plain_mean(compress_download: bool) -> None:
    method = FedKD(energy_start=1.0, energy_end=1.0, compress_download=compress_download)
    servers, _, setup = _run(method, rounds=1)
    workspace, mean = Workspace(setup.model()), dict[str, np.ndarray]()
    for info in _infos(setup):
        client_call = Call(info, "fit", Message(servers[0].params, {"round": 0}))
        reply, _ = perform(setup, workspace, client_call, ClientState(), 0)
        for name, start in servers[0].params.items():  # at full energy nothing is decomposed
            mean[name] = mean.get(name, 0) + (start + reply.tensors[f"update/{name}"]).double().numpy() / 3
    for name, value in servers[1].params.items():
        if value.is_floating_point():
            assert np.allclose(value, mean[name], atol=1e-6)


@pytest.mark.parametrize("cohort", [None, 2])
def test_every_client_trains_from_the_servers_model(cohort: int | None) -> None:
    """Whether it took part in the round before or not, and although only a truncated change was sent."""
    servers, store, setup = _run(FedKD(energy_start=0.4, energy_end=0.5), rounds=4, cohort=cohort)
    for info in _infos(setup):
        state = store.load(info.id)
        if "held" in state.tensors:
            received = servers[int(state.scalars["held"])].params
            assert all(torch.equal(t, received[n]) for n, t in state.tensors["held"].items())
    calls = {call.client.id: call for call in _asked(setup, servers[-1], _infos(setup))}
    last = {info.id for info in _infos(setup) if store.load(info.id).scalars.get("held") == 3}
    assert {name for name, call in calls.items() if "base" in call.message.scalars} == last
    assert 0 < len(last) == (cohort or 3)
    whole = _values(Message(servers[-1].params))
    assert all((_values(call.message) < whole) is (name in last) for name, call in calls.items())


def _values(message: Message) -> int:
    """Numbers sent; the toy's matrices are smaller than their names."""
    return sum(tensor.numel() for tensor in message.tensors.values())


def test_the_energy_rises_to_its_end() -> None:
    values = [FedKD().energy(r, 4) for r in range(4)]
    assert values == pytest.approx([0.9575, 0.965, 0.9725, 0.98])
    assert values[-1] == 0.98
    assert all(FedKD(energy_start=0.97, energy_end=0.97).energy(r, 7) == 0.97 for r in range(7))


def _round(setup: Setup, server: ServerState, store: MemoryStore) -> tuple[Sequence[Call], list[Reply]]:
    workspace, calls = Workspace(setup.model()), _asked(setup, server, _infos(setup))
    return calls, [answer(setup, workspace, call, store, server.round) for call in calls]


def _spoilt(reply: Reply, **changes: Tensor | float) -> Reply:
    scalars = {**reply.message.scalars, **{n: v for n, v in changes.items() if isinstance(v, float)}}
    tensors = {**reply.message.tensors, **{f"update/{n}": v for n, v in changes.items() if isinstance(v, Tensor)}}
    return replace(reply, message=Message(tensors, scalars))


@pytest.mark.parametrize(
    "spoil",
    [{"norm/u": torch.ones(2, 1)}, {"energy": 0.2}, {"energy": float("nan")}],
    ids=["a foreign tensor", "an energy out of bounds", "no number"],
)
def test_an_unreadable_reply_is_left_out(spoil: Mapping[str, Tensor | float]) -> None:
    setup = toy_setup(FedKD(compress_download=False))
    store, workspace = MemoryStore(), Workspace(setup.model())
    server = Simulation(setup, store).start(workspace)["main"]
    calls, replies = _round(setup, server, store)
    kept = _finished(setup, server, calls, [replies[0], Reply(replies[1].client, Message(), "absent"), replies[2]])
    with pytest.warns(UserWarning, match="'client-1'"):
        got = _finished(setup, server, calls, [replies[0], _spoilt(replies[1], **spoil), replies[2]])
    assert all(torch.equal(t, kept.params[n]) for n, t in got.params.items())


def test_who_failed_or_was_refused_receives_the_whole_model() -> None:
    setup = toy_setup(FedKD())
    store, workspace = MemoryStore(), Workspace(setup.model())
    server = Simulation(setup, store).start(workspace)["main"]
    calls, replies = _round(setup, server, store)
    with pytest.warns(UserWarning, match="'client-1'"):
        server = _finished(
            setup, server, calls,
            [replies[0], _spoilt(replies[1], x=torch.zeros(1)), Reply(replies[2].client, Message(), "absent")],
        )  # fmt: skip
    calls, replies = _round(setup, server, store)
    assert ["base" in call.message.scalars for call in calls] == [True, False, False]
    assert [reply.error for reply in replies] == [None, None, None]
    for info in _infos(setup):
        held = store.load(info.id).tensors["held"]
        assert all(torch.equal(t, server.params[n]) for n, t in held.items())


def test_a_round_without_a_readable_reply_changes_nothing() -> None:
    setup = toy_setup(FedKD())
    workspace, store = Workspace(setup.model()), MemoryStore()
    server = Simulation(setup, store).start(workspace)["main"]
    calls = _asked(setup, server, _infos(setup))
    after = _finished(setup, server, calls, [Reply(call.client, Message(), "absent") for call in calls])
    assert after.round == 1
    assert all(torch.equal(t, after.params[n]) for n, t in server.params.items())
    assert all("base" not in call.message.scalars for call in _asked(setup, after, _infos(setup)))


def test_a_change_of_a_model_that_is_not_held_is_refused() -> None:
    servers, _, setup = _run(FedKD(), rounds=1)
    call = _asked(setup, servers[1], _infos(setup))[0]
    reply = answer(setup, Workspace(setup.model()), call, MemoryStore(), 1)
    assert "the model held is of round none" in (reply.error or "")


def test_the_server_may_step_along_the_mean() -> None:
    servers, _, _ = _run(replace(FedKD(), server=ServerOptimizer("momentum", lr=0.5)))
    assert {"server/momentum", "last_update", "holders"} <= set(servers[-1].slots)
