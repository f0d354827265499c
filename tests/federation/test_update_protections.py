"""Robust means, secure sums and noise on updates in federations."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedadam import FedAdam
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedkd import FedKD
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.fedper import FedPer
from confed.algorithms.fedprox import FedProx
from confed.algorithms.fedyogi import FedYogi
from confed.algorithms.moon import MOON
from confed.algorithms.robust import Robust
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.local import InProcess, Members, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Params, Rules, Scope
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore, ServerState, Store
from confed.federation.update_privacy import UpdatePrivacy
from confed.federation.wire import decode, decode_state, encode, encode_state
from confed.privacy.accountant import epsilon, sampled_epsilon
from confed.privacy.ledger import PrivacyLedger
from confed.privacy.protections import actions, check_layouts, protect
from confed.privacy.secure_sum.exchange import _heavy  # type: ignore[attr-defined]
from confed.recipes.recipe import load_recipe
from confed.testing.toy import toy_clients, toy_model, toy_setup
from memory_transport import Without, rounds
from refusals import refuses
from toy_runs import Listener, simulated


def drawn(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(2, 3, generator=rng), "b": torch.randn(4, generator=rng)} for _ in range(count)]


def flat(update: Params) -> np.ndarray[Any, Any]:
    return np.concatenate([update[name].double().numpy().ravel() for name in sorted(update)])


def mean_of(
    rule: RobustMean, updates: Sequence[Params], start: Params, weights: Sequence[float] | None = None
) -> Params:
    given = list(zip(updates, weights or [1.0] * len(updates), strict=True))
    return rule.of(given, start, precision=torch.float64)


def scores(points: Sequence[np.ndarray[Any, Any]], near: int) -> list[float]:
    """Krum's, by the definition: the least sum over all choices of so many others."""
    found: list[float] = []
    for i, x in enumerate(points):
        others = [((x - y) ** 2).sum() for j, y in enumerate(points) if j != i]
        found.append(min(sum(chosen) for chosen in combinations(others, near)))
    return found


def test_multi_krum_is_the_mean_of_the_best() -> None:
    updates, start = drawn(7, seed=2), drawn(1, seed=9)[0]
    updates[4] = {name: value + 30 for name, value in updates[4].items()}
    points = [flat(update) for update in updates]
    order = np.argsort(scores(points, 7 - 2 - 2))
    for selected, count in ((None, 5), (1, 1), (3, 3)):
        found = flat(mean_of(RobustMean("multi_krum", malicious=2, selected=selected), updates, start))
        np.testing.assert_allclose(found, np.mean([points[i] for i in order[:count]], axis=0), rtol=1e-6)
    one = mean_of(RobustMean("krum", malicious=2), updates, start)
    np.testing.assert_array_equal(flat(one), points[int(order[0])])


def test_every_rule_is_what_its_paper_says() -> None:
    updates, start = drawn(5, seed=1), drawn(1, seed=8)[0]
    table, origin = np.stack([flat(update) for update in updates]), flat(start)
    np.testing.assert_allclose(flat(mean_of(RobustMean("median"), updates, start)), np.median(table, 0), rtol=1e-6)
    trimmed = mean_of(RobustMean("trimmed", malicious=1), updates, start)
    np.testing.assert_allclose(flat(trimmed), stats.trim_mean(table, 0.2), rtol=1e-5)
    moved, weights = table - origin, np.array([1.0, 2, 3, 4, 5])
    short = moved * np.minimum(1, 2.0 / np.sqrt((moved**2).sum(1, keepdims=True)))
    bounded = mean_of(RobustMean("clip", norm=2.0), updates, start, weights.tolist())
    np.testing.assert_allclose(flat(bounded), origin + weights @ short / 15, rtol=1e-5)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "multi_krum"])
def test_who_did_not_send_a_tensor_does_not_count_for_it(rule: Any) -> None:
    updates, start = drawn(6, seed=3), drawn(1, seed=7)[0]
    mean = RobustMean(rule, malicious=1)
    partly = [{"b": u["b"]} if k in (0, 5) else u for k, u in enumerate(updates)]
    found = mean_of(mean, partly, start)
    assert torch.equal(found["a"], mean_of(mean, [{"a": u["a"]} for u in updates[1:5]], {"a": start["a"]})["a"])
    assert torch.equal(found["b"], mean_of(mean, [{"b": u["b"]} for u in updates], {"b": start["b"]})["b"])
    # Of a tensor that too few sent (for the median: nobody) the server's values stay.
    few = mean_of(mean, [u if k < mean.needed - 1 else {"b": u["b"]} for k, u in enumerate(updates)], start)
    assert few["a"] is start["a"]
    refuses(r"names the model does not have: \['z'\]", mean_of, mean, [{**u, "z": u["b"]} for u in updates], start)


def test_a_federation_that_is_too_small_is_told_so() -> None:
    server = ServerState(0, drawn(1)[0], clients=3)
    replies = [Reply(ClientInfo(str(i), 5), Message(update)) for i, update in enumerate(drawn(3))]
    with pytest.raises(
        ValueError, match="the robust mean 'multi_krum' with malicious = 1 needs at least 5 clients, got 3"
    ):
        FedAvg(robust=RobustMean("multi_krum", selected=5)).average(server, replies)


# In methods ---------------------------------------------------------------------------------------------------


class Liar(InProcess):
    """One client sends nonsense."""

    def __call__(self, calls: Any, store: Any, round: int) -> Any:
        for reply in super().__call__(calls, store, round):
            if reply.client.id != "client-1" or not reply.message.tensors:
                yield reply
                continue
            lies = {
                n: torch.full_like(t, 50.0) if t.is_floating_point() else t for n, t in reply.message.tensors.items()
            }
            yield replace(reply, message=Message(lies, reply.message.scalars))


def final(algorithm: Algorithm, liar: bool = False) -> Mapping[str, Tensor]:
    setup = toy_setup(algorithm, clients=toy_clients(sizes=(12, 20, 16, 12, 12)), rounds=1, noisy=False)
    return simulated(setup, executor=(Liar if liar else InProcess)(setup)).states[1].params


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(), FedAdam(), FedDyn(), Scaffold(), FedDC(correction="off")],
    ids=lambda a: type(a).__name__,
)
def test_one_liar_moves_the_mean_and_no_robust_one(algorithm: Algorithm) -> None:
    honest, start = final(algorithm), toy_setup(algorithm, noisy=False).model().state_dict()
    way = max(float((t - start[n]).abs().max()) for n, t in honest.items() if t.is_floating_point())

    def off(rule: RobustMean | None) -> float:
        found = final(replace(algorithm, robust=rule), liar=True)
        return max(float((t - honest[n]).abs().max()) for n, t in found.items() if t.is_floating_point())

    assert isinstance(algorithm, FedAdam) or off(None) > 5 * way  # Adam's steps have one length, true or false
    for rule in ("median", "trimmed", "krum", "multi_krum"):
        assert off(RobustMean(rule)) <= 2 * way
    if not isinstance(algorithm, FedAdam):
        assert off(RobustMean("clip", norm=0.1)) <= 2 * way


def test_the_method_robust_is_fedavg_with_the_option() -> None:
    for rule in ("median", "krum"):
        one, other = final(Robust(rule=rule)), final(FedAvg(robust=RobustMean(rule)))  # type: ignore[arg-type]
        assert all(torch.equal(t, other[n]) for n, t in one.items())


def test_a_recipe_chooses_protections_and_writes_them_down() -> None:
    more = ["study.methods=[]", "algorithm.name=fedprox"]
    recipe = load_recipe("fedvqa_scenes", [*more, "algorithm.robust.rule=trimmed", "algorithm.update_privacy.clip=2.0"])
    method = recipe.construct("algorithm")
    assert method.robust == RobustMean("trimmed")
    assert method.update_privacy.clip == 2
    assert "[algorithm.robust]" in recipe.to_toml()
    assert "robust" not in load_recipe("fedvqa_scenes", more).to_toml()
    for key, message in (
        ("robust.rule=mode", r"algorithm\.robust"),
        ("robust.roole=median", r"algorithm\.robust"),
        ("update_privacy.noise=1.0", r"algorithm\.update_privacy"),
        ("secure_sum.bits=7", r"algorithm\.secure_sum"),
    ):
        refuses(message, load_recipe, "fedvqa_scenes", [*more, f"algorithm.{key}"])


SIZES = (12, 20, 16, 8)


class Wire(InProcess):
    """Sends everything through bytes; clients named in ``away`` fail at an action."""

    def __init__(self, setup: Setup, away: Mapping[str, str] | None = None) -> None:
        super().__init__(setup)
        self.setup, self.away, self.heard = setup, away or {}, list[tuple[Call, Reply]]()

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call in calls:
            if self.away.get(call.client.id) == call.action:
                yield Reply(call.client, Message(), "unplugged")
                continue
            there = MemoryStore()
            there.save(call.client.id, decode_state(encode_state(store.load(call.client.id))))
            sent = replace(call, message=decode(encode(call.message)))
            reply = answer(self.setup, Workspace(self.setup.model(), lasting=False), sent, there, round)
            store.save(call.client.id, there.load(call.client.id))
            self.heard.append((call, replace(reply, message=decode(encode(reply.message)))))
            yield self.heard[-1][1]


def outcome(
    algorithm: Algorithm, away: Mapping[str, str] | None = None, rounds: int = 2
) -> tuple[ServerState, Wire, MemoryStore]:
    setup = toy_setup(algorithm, clients=toy_clients(sizes=SIZES), rounds=rounds)
    executor, store = Wire(setup, away), MemoryStore()
    simulation = Simulation(setup, store, executor)
    servers = simulation.start(executor.workspace)
    for record in simulate(simulation, servers):
        servers = dict(record.servers)
        assert set(record.errors) == set(away or {})
    return servers["main"], executor, store


def closest(one: Params, other: Params) -> float:
    pairs = [(t, other[n]) for n, t in one.items() if t.is_floating_point()]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedAvgFT(), FedYogi(), FedDyn(), Scaffold(), FedDAT(weighting="examples"), FedLoRA()],
    ids=lambda a: type(a).__name__,
)
def test_methods_come_to_the_same_model(algorithm: Algorithm) -> None:
    plain, _, _ = outcome(replace(algorithm, accumulator="float64"), rounds=1)
    secure, wire, store = outcome(replace(algorithm, accumulator="float64", secure_sum=SecureSum()), rounds=1)
    assert closest(plain.params, secure.params) < 1e-6
    for slot, tensors in plain.slots.items():
        assert closest(tensors, secure.slots[slot]) < 1e-6
    updates = [reply.message for call, reply in wire.heard if call.action == "fit"]
    assert len(updates) == 4
    for message in updates:  # nothing but masked integers, and no loss
        assert not message.scalars
        assert {t.dtype for t in message.tensors.values()} == {torch.int64}
    for number in range(4):  # nothing is kept when it is over
        assert "secure sum" not in store.load(f"client-{number}").tensors


@pytest.mark.parametrize("action", ["secure_keys", "secure_shares", "fit", "secure_unmask"])
def test_who_drops_out_at_any_moment_is_as_if_it_had_failed(action: str) -> None:
    # Its update is in the sum, once its masked blocks have come.
    lost = {} if action == "secure_unmask" else {"client-2": "fit"}
    plain, _, _ = outcome(FedAvg(), lost, rounds=1)
    secure, _, _ = outcome(FedAvg(secure_sum=SecureSum()), {"client-2": action}, rounds=1)
    assert closest(plain.params, secure.params) < 1e-6


def test_with_too_few_left_the_run_ends_with_the_reason() -> None:
    away = {"client-2": "fit", "client-0": "secure_shares"}
    with pytest.raises(RuntimeError, match="round 1 needs 3 clients, and 2 are left after 'fit'; client-2: unp"):
        outcome(FedAvg(secure_sum=SecureSum()), away)


def test_a_client_gives_no_update_without_a_sum() -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()))
    workspace = Workspace(setup.model())
    shared = dict(workspace.initial)
    call = Call(ClientInfo("client-0", 12), "fit", Message(shared))
    reply = answer(setup, workspace, call, MemoryStore(), 0)
    assert "gives its update to secure aggregation only, and is asked for it bare" in str(reply.error)
    call = replace(call, message=Message({**shared, "secure sum/parcels": torch.zeros(3, 9, dtype=torch.uint8)}))
    assert "in the middle of no secure aggregation" in str(answer(setup, workspace, call, MemoryStore(), 0).error)


def test_it_goes_with_noise_at_the_client_and_with_workers() -> None:
    method = FedAvg(update_privacy=UpdatePrivacy(clip=0.5))
    plain, _, _ = outcome(replace(method, accumulator="float64"), rounds=1)
    secure, _, _ = outcome(replace(method, secure_sum=SecureSum(bits=32, reach=1.0)), rounds=1)
    assert closest(plain.params, secure.params) < 1e-5
    setup = toy_setup(replace(method, secure_sum=SecureSum()), clients=toy_clients(sizes=SIZES), rounds=1)
    found: list[Mapping[str, ServerState]] = []
    for executor in (InProcess(setup), Workers(setup, 2)):
        with Simulation(setup, MemoryStore(), executor) as simulation:
            servers = simulation.start(Workspace(setup.model()))
            found += [record.servers for record in simulate(simulation, servers)]
    one, other = (servers["main"].params for servers in found)
    assert all(torch.equal(t, other[n]) for n, t in one.items())  # the masks differ, the sum does not


# Owners -----------------------------------------------------------------------------------------------------


class Owned(FedAvg):
    """The head belongs to some clients only."""

    owners = ("client-0", "client-1", "client-3")

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.SHARED if client.id in self.owners else Scope.FROZEN, "*": Scope.SHARED}


def test_what_some_clients_own_is_summed_among_them() -> None:
    plain, _, _ = outcome(Owned(accumulator="float64"), rounds=1)
    secure, _, _ = outcome(Owned(secure_sum=SecureSum()), rounds=1)
    assert closest(plain.params, secure.params) < 1e-6
    start = toy_setup(FedAvg()).model().state_dict()
    with pytest.warns(UserWarning, match=r"round 1: of the clients that send 'head\.\w+' only 2 stayed"):
        partly, _, _ = outcome(Owned(secure_sum=SecureSum()), {"client-1": "fit"}, rounds=1)
    assert torch.equal(partly.params["head.weight"], start["head.weight"])
    assert not torch.equal(partly.params["body.weight"], start["body.weight"])


def test_fewer_than_three_owners_are_refused() -> None:
    shared, frozen = {"a": Scope.SHARED, "b": Scope.SHARED}, {"a": Scope.SHARED, "b": Scope.FROZEN}
    check_layouts(FedAvg(secure_sum=SecureSum()), [shared, shared, frozen, shared])
    with pytest.raises(ValueError, match="at least 3 clients that send a tensor, and 'b' has 2"):
        check_layouts(FedAvg(secure_sum=SecureSum()), [shared, frozen, frozen, shared])

    class Two(Owned):
        owners = ("client-0", "client-3")

    with pytest.raises(ValueError, match=r"at least 3 clients that send a tensor, got 2 for 'head\.\w+': client-0, cl"):
        outcome(Two(secure_sum=SecureSum()))
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), clients=dict(list(toy_clients().items())[:2]))
    with pytest.raises(ValueError, match="colluders = 1 needs at least 3 clients in a cohort, got 2"):
        next(
            simulate(Simulation(setup, MemoryStore()), Simulation(setup, MemoryStore()).start(Workspace(setup.model())))
        )


# What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (BiCSL(), "must be left out for BiCSL: its clients send activations"),
        (FedKD(), "must be left out for FedKD: its clients send the factors"),
        (FedLoRA(ranks={"client-0": 1}), r"must be left out for FedLoRA: algorithm\.ranks gives clients factors of"),
        (Robust(rule="median"), "must be left out for Robust FedAvg: its rule needs every update"),
    ],
)
def test_methods_whose_servers_need_more_than_a_sum_refuse(algorithm: Algorithm, message: str) -> None:
    refuses(rf"algorithm\.secure_sum {message}", toy_setup, replace(algorithm, secure_sum=SecureSum()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"robust": RobustMean("krum")}, r"algorithm\.robust\.rule = 'krum' needs every client's update, which algori"),
        (
            {"update_privacy": UpdatePrivacy(clip=1.0, at="server")},
            "the server cannot clip updates that it does not see",
        ),
    ],
)
def test_other_protections_that_need_single_updates_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, toy_setup, FedAvg(secure_sum=SecureSum(), **options))


def test_weights_that_are_no_whole_numbers_are_refused() -> None:
    class Halves(FedAvg):
        def weight(self, reply: Reply) -> float:
            return 0.5

    call = Call(ClientInfo("a", 3), "fit", Message(), expects={"w": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"needs whole numbers of at least 1 as weights, got 0\.5 of 'a'"):
        protect(Halves(secure_sum=SecureSum()), lambda calls: iter(()), seed=0, round=0)([call])


def test_a_value_out_of_reach_is_its_clients_failure() -> None:
    clients = toy_clients(sizes=SIZES)
    wild = clients["client-1"].tables[0]
    columns: dict[str, Tensor] = {**wild.columns, "x": wild.columns["x"] * 1e4}
    table = replace(wild, columns=columns)
    setup = toy_setup(
        FedAvg(secure_sum=SecureSum(reach=8.0)),
        clients={**clients, "client-1": TableData(table, table, table)},
        rounds=1,
    )
    simulation = Simulation(setup, MemoryStore())
    (record,) = simulate(simulation, simulation.start(Workspace(setup.model())))
    assert list(record.errors) == ["client-1"]
    # How far is a value of an update, which the server is not to know.
    end = r"reach is 8\.0, and a value of '[a-z]+\.[a-z_]+' in the update moved further$"
    assert re.search(end, record.errors["client-1"])


# Claims -----------------------------------------------------------------------------------------------------


def claiming(sizes: Sequence[int], **options: Any) -> Iterator[RoundRecord]:
    """Two rounds of clients that claim these numbers of examples."""
    clients = toy_clients(sizes=SIZES)
    setup = toy_setup(FedAvg(secure_sum=SecureSum(**options)), clients=clients, rounds=2)
    setup = replace(setup, population=Members(clients, sizes=sizes))
    simulation = Simulation(setup, MemoryStore())
    return simulate(simulation, simulation.start(Workspace(setup.model())))


def test_a_claim_that_leaves_too_few_bits_leaves_its_client_out() -> None:
    honest = replace(toy_setup(FedAvg(accumulator="float64"), clients=toy_clients(sizes=SIZES), rounds=2))
    lost = rounds(honest, Without(honest, "client-1", 0), stop=0)[0].servers["main"].params
    with pytest.warns(
        UserWarning, match=r"round \d: 'client-1' is left out of secure aggregation: its weight of 1048576, by"
    ):
        records = list(claiming((12, 2**20, 16, 8), bits=32))
    for record in records:
        assert set(record.errors) == {"client-1"}
        assert "update refused: its weight of 1048576, by the number of examples" in record.errors["client-1"]
    assert closest(lost, records[0].servers["main"].params) < 1e-4
    assert not any(record.errors for record in claiming((12, 2**20, 16, 8)))  # 64 bits have room for it


def test_where_no_sum_is_possible_nobody_is_to_blame() -> None:
    with pytest.raises(ValueError, match="weights that sum up to 200000 leaves 7 bits behind the point, and needs at"):
        next(claiming((50_000,) * 4, bits=32))
    few = "needs 4 clients, and 3 are left after 'secure_keys'; client-1: ValueError: update refused: its w"
    with pytest.raises(RuntimeError, match=few), pytest.warns(UserWarning, match="'client-1' is left out"):
        next(claiming((12, 2**20, 16, 8), bits=32, threshold=4))


@pytest.mark.parametrize(
    ("weights", "most", "out"),
    [
        ((5, 5, 5), 15, []),
        ((5, 9, 5), 15, ["b"]),
        ((5, 9, 5, 80), 20, ["d"]),
        ((5, 9, 5, 80), 19, []),  # four of the median are more
        ((4, 9, 4, 80), 16, ["d", "b"]),
        ((6, 6, 6), 15, []),
    ],
)
def test_the_largest_claims_are_left_out_until_the_others_fit(
    weights: Sequence[int], most: int, out: Sequence[str]
) -> None:
    assert _heavy(dict(zip("abcd", weights, strict=False)), most) == list(out)


def test_the_largest_sum_of_weights_leaves_enough_bits() -> None:
    for options in (SecureSum(bits=32), SecureSum(bits=32, reach=3.0), SecureSum(reach=0.1), SecureSum(reach=1e5)):
        assert options.fraction(options.most) >= 8
        refuses("leaves 7 bits", options.fraction, options.most + options.most // 2**40 + 1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


START = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]]), "n": torch.tensor(5)}
SENT = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([[6.0]]), "n": torch.tensor(9)}  # moved by 3, 0 and 4


# What is released -------------------------------------------------------------------------------------------


def test_an_update_is_shortened_as_a_whole() -> None:
    released = UpdatePrivacy(clip=1.0).release(SENT, START, rng())
    torch.testing.assert_close(released["a"], torch.tensor([1.6, 1.0]))  # norm 5, so a fifth of 3 and of 4
    torch.testing.assert_close(released["b"], torch.tensor([[2.8]]))
    assert int(released["n"]) == 5  # counters tell nothing
    released = UpdatePrivacy(clip=5.1).release(SENT, START, rng())
    torch.testing.assert_close(released["a"], SENT["a"])


def test_or_every_tensor_by_itself_within_the_same_bound() -> None:
    released = UpdatePrivacy(clip=math.sqrt(2.0), norm="tensor").release(SENT, START, rng())
    torch.testing.assert_close(released["a"], torch.tensor([2.0, 1.0]))  # two tensors, so 1 each
    torch.testing.assert_close(released["b"], torch.tensor([[3.0]]))


@pytest.mark.parametrize("scale", [1.0, 1e3, 3e4, 1e6, 1e30])
@pytest.mark.parametrize("norm", ["update", "tensor"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rounding_lengthens_no_update(scale: float, norm: Any, kind: torch.dtype) -> None:
    """Where a unit in the last place is as large as a coordinate, rounding once at the end doubles a norm."""
    start = {"w": torch.linspace(1, 1.9, 4000).mul(scale).to(kind), "v": torch.full((30,), scale).to(kind)}
    moved = {n: torch.randn(t.shape, generator=rng(), dtype=torch.float64) for n, t in start.items()}
    sent = {n: (t.double() + moved[n]).to(kind) for n, t in start.items()}
    released = UpdatePrivacy(clip=0.125, norm=norm).release(sent, start, rng())
    length = math.sqrt(sum(float((t.double() - start[n].double()).square().sum()) for n, t in released.items()))
    assert length <= 0.125 * (1 + 1e-12)
    if scale == 1.0 and kind is torch.float32:  # where there is room for it, nothing but the length changes
        assert length > 0.1249
    # With noise, what is rounded has left already: the same noise on the same origin differs by the clipped update.
    loud = UpdatePrivacy(clip=0.125, noise=1e-300, norm=norm)
    exact = loud.release({n: t.double() for n, t in sent.items()}, {n: t.double() for n, t in start.items()}, rng())
    left = math.sqrt(sum(float((t - start[n].double()).square().sum()) for n, t in exact.items()))
    assert scale > 1e6 or left == pytest.approx(min(0.125, left), rel=1e-6)
    assert all(torch.equal(t, exact[n].to(kind)) for n, t in loud.release(sent, start, rng()).items())


def test_changes_are_clipped_towards_zero() -> None:
    sent = {"c/a": torch.tensor([3.0, 4.0])}
    released = UpdatePrivacy(clip=1.0).release(sent, {"c/a": torch.full((2,), 100.0)}, rng(), changes=("c/*",))
    torch.testing.assert_close(released["c/a"], torch.tensor([0.6, 0.8]))


def test_noise_has_the_stated_spread() -> None:
    start = {"w": torch.zeros(200, 100)}
    privacy = UpdatePrivacy(clip=0.5, noise=3.0)
    noise = privacy.release(start, start, rng())["w"]
    assert stats.kstest(noise.flatten().numpy(), "norm", args=(0, 1.5)).pvalue > 0.01
    shared = privacy.release(start, start, rng(1), among={"w": 9})["w"]
    assert stats.kstest(shared.flatten().numpy(), "norm", args=(0, 0.5)).pvalue > 0.01
    assert torch.equal(noise, privacy.release(start, start, rng())["w"])
    secret = [privacy.release(start, start, None)["w"] for _ in range(2)]
    assert not torch.equal(*secret)
    for drawn in secret:
        assert stats.kstest(drawn.flatten().numpy(), "norm", args=(0, 1.5)).pvalue > 1e-4


# At the server ----------------------------------------------------------------------------------------------


def fits(sent: Sequence[Params | None], start: Params, sizes: Sequence[int]) -> tuple[list[Call], Exchange]:
    """Calls of ``fit`` and an exchange that answers with what is given, or with an error."""
    infos = [ClientInfo(f"c{i}", size) for i, size in enumerate(sizes)]
    calls = [Call(info, "fit", Message(start), expects=start) for info in infos]

    def exchange(asked: Sequence[Call]) -> Iterator[Reply]:
        for call, tensors in zip(asked, sent, strict=True):
            yield Reply(call.client, Message(tensors or {}, {"loss": 1.0}), None if tensors else "broken")

    return calls, exchange


def test_at_the_server_the_sum_has_a_fixed_divisor() -> None:
    start = {"w": torch.zeros(2)}
    sent = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 0.5])}, None, {"w": torch.tensor([1.0, 0.0])}]
    calls, exchange = fits(sent, start, sizes=(1000, 1, 10, 10))
    algorithm = FedAvg(update_privacy=UpdatePrivacy(clip=1.0, at="server"))
    replies = protect(algorithm, exchange, seed=0, round=0)(calls)
    mean = algorithm.average(ServerState(0, start), replies)["w"]
    # ([0.6, 0.8] + [0, 0.5] + nothing + [1, 0]) / 4, whatever the numbers of examples.
    torch.testing.assert_close(mean, torch.tensor([0.4, 0.325]))


def test_noise_at_the_server_is_one_gaussian_mechanism() -> None:
    start = {"w": torch.zeros(150, 100), "own": torch.zeros(150, 100)}
    sent: list[Params | None] = [dict(start), dict(start), None, {"w": start["w"]}]
    calls, exchange = fits(sent, start, sizes=(5, 1, 1, 1))
    calls[3] = replace(calls[3], message=Message({"w": start["w"]}), expects={"w": start["w"]})
    algorithm = FedAdam(update_privacy=UpdatePrivacy(clip=0.5, noise=2.0, at="server"))
    mean = algorithm.average(ServerState(0, start), protect(algorithm, exchange, seed=0, round=0)(calls))
    # z C / m, with m the clients that were asked for the tensor.
    assert stats.kstest(mean["w"].flatten().numpy(), "norm", args=(0, 1 / 4)).pvalue > 0.01
    assert stats.kstest(mean["own"].flatten().numpy(), "norm", args=(0, 1 / 3)).pvalue > 0.01


# In a federation --------------------------------------------------------------------------------------------


def federation(algorithm: Algorithm, **options: Any) -> tuple[dict[str, ServerState], list[tuple[Call, Reply]]]:
    setup = toy_setup(algorithm, noisy=False, rounds=2, **options)
    listener = Listener(setup)
    finished = simulated(setup, executor=listener, sound=True)
    return dict(finished.records[-1].servers), [(call, reply) for _, call, reply in listener.heard]


WORKING = [
    FedAvg(), FedAvgFT(), FedAdam(), FedPer(), MOON(), FedDyn(), Scaffold(), FedDC(), FedDAT(), FedLoRA(),
    Robust(rule="median"), FedAvg(robust=RobustMean("krum", malicious=0)),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", WORKING, ids=lambda a: type(a).__name__)
def test_what_any_method_sends_is_within_the_bound(algorithm: Algorithm) -> None:
    _, replies = federation(replace(algorithm, update_privacy=UpdatePrivacy(clip=0.01)))
    seen = 0
    for call, reply in replies:
        assert "loss" not in reply.message.scalars
        if call.action == "fit":
            moved = [
                t - (0 if n.startswith("variate/") else call.message.tensors[n])
                for n, t in reply.message.tensors.items()
                if t.is_floating_point()
            ]
            norm = math.sqrt(sum(float(d.double().square().sum()) for d in moved))
            assert 0.0099 < norm < 0.0101
            seen += 1
    assert seen == 6


def test_a_wide_bound_without_noise_changes_nothing_but_weights() -> None:
    plain, _ = federation(FedAvg())
    wide, _ = federation(FedAvg(update_privacy=UpdatePrivacy(clip=1e6)))
    for name, tensor in wide["main"].params.items():
        torch.testing.assert_close(tensor, plain["main"].params[name])


def test_noise_is_another_for_every_client_and_round() -> None:
    _, replies = federation(FedAvg(update_privacy=UpdatePrivacy(clip=1e-9, noise=1e9)))
    drawn = [
        (r.message.tensors["head.weight"] - c.message.tensors["head.weight"]) for c, r in replies if c.action == "fit"
    ]
    for i, one in enumerate(drawn):
        assert all(float((one - other).abs().max()) > 0.1 for other in drawn[:i])


def test_only_updates_may_leave() -> None:
    class Chatty(FedAvg):
        def personalise(self, client: Any, message: Message) -> Message:
            return Message({"secret": torch.ones(1)})

        personalise.__dict__["is_action"] = True

    offered = actions(Chatty(update_privacy=UpdatePrivacy(clip=1.0)))
    with pytest.raises(
        ValueError, match="the action 'personalise' would send secret, which is neither noised nor masked"
    ):
        offered["personalise"](None, Message())  # type: ignore[arg-type]


def test_at_the_server_what_is_no_mean_refuses() -> None:
    privacy = UpdatePrivacy(clip=1.0, at="server")
    with pytest.raises(ValueError, match=r"at must be 'client' together with algorithm\.robust\.rule = 'median'"):
        toy_setup(FedAvg(update_privacy=privacy, robust=RobustMean("median")))
    with pytest.raises(ValueError, match="must be left out for Robust FedAvg: its rule 'krum' is no mean"):
        toy_setup(Robust(rule="krum", update_privacy=privacy))
    refuses(r"set algorithm\.correction to 'off', got 'auto'", toy_setup, FedDC(update_privacy=privacy))
    federation(FedDC(update_privacy=privacy, correction="off"))


def test_noise_on_running_statistics_is_refused() -> None:
    def layouts(noisy: bool) -> list[Mapping[str, Scope]]:
        return [dict.fromkeys(toy_model(noisy=noisy).state_dict(), Scope.SHARED)]

    method = FedAvg(update_privacy=UpdatePrivacy(clip=1.0, noise=1.0))
    with pytest.raises(ValueError, match=r"running statistics are shared, such as 'norm\.running_mean', got 1\.0"):
        check_layouts(method, layouts(noisy=True))
    check_layouts(method, layouts(noisy=False))
    check_layouts(FedAvg(update_privacy=UpdatePrivacy(clip=1.0)), layouts(noisy=True))


# What it costs ----------------------------------------------------------------------------------------------


def always(client: str, round: int) -> bool:
    return True


def test_clients_pay_for_the_rounds_in_which_they_were_asked() -> None:
    pytest.importorskip("dp_accounting")
    ledger = PrivacyLedger(UpdatePrivacy(clip=1.0, noise=2.0), uniform=True, present=always)
    for round, asked in enumerate((["a", "b"], ["a", "c"], ["a", "b"]), start=1):
        ledger.add(round, asked, 4)
    assert not ledger.amplified
    assert [ledger.taken_part(name) for name in "abcd"] == [3, 2, 1, 0]
    # Three Gaussian mechanisms are one with a third of the variance; half the multiplier, as a client is replaced.
    assert ledger.epsilon("a") == pytest.approx(epsilon(2.0 / math.sqrt(3), 1, 1e-5), rel=1e-6)
    assert ledger.epsilon("d") == 0
    assert ledger.epsilon("b", 1) == ledger.epsilon("b", 2) == ledger.epsilon("c") < ledger.epsilon("b")
    ledger.add(3, ["c"], 4)  # the round was done again
    assert [ledger.taken_part(name) for name in "abc"] == [2, 1, 2]
    silent = PrivacyLedger(UpdatePrivacy(clip=1.0), uniform=True, present=always)
    silent.add(1, ["a"], 4)
    assert silent.epsilon("a") == math.inf


def test_amplification_is_claimed_where_it_holds_only() -> None:
    pytest.importorskip("dp_accounting")
    privacy = UpdatePrivacy(clip=1.0, noise=3.0, at="server")

    def ledger(privacy: UpdatePrivacy, uniform: bool = True) -> PrivacyLedger:
        made = PrivacyLedger(privacy, uniform, lambda client, round: client != "late" or round > 10)
        for round in range(1, 21):
            made.add(round, ["a", "b"], 40)
        return made

    found = ledger(privacy)
    assert found.amplified
    assert found.epsilon("a") == found.epsilon("never drawn") == sampled_epsilon(3.0, {(2, 40): 20}, 1e-5)
    assert found.epsilon("late") == sampled_epsilon(3.0, {(2, 40): 10}, 1e-5) < found.epsilon("a")
    full = epsilon(3.0, 20, 1e-5)
    assert found.epsilon("a") < full / 3
    for other in (
        ledger(privacy, uniform=False),
        ledger(replace(privacy, at="client")),
        ledger(replace(privacy, repeatable=False)),  # others know the seed, and so who was drawn
    ):
        assert not other.amplified
        assert other.epsilon("a") == full
        assert other.epsilon("never drawn") == 0
    kept = ledger(replace(privacy, adjacency="zero-out"))
    assert not kept.amplified
    assert kept.epsilon("a") == epsilon(3.0, 20, 1e-5, "zero-out")


def test_a_sample_of_everybody_amplifies_nothing() -> None:
    pytest.importorskip("dp_accounting")
    assert sampled_epsilon(2.0, {(4, 4): 3}, 1e-5) == epsilon(2.0, 3, 1e-5)
    # Of nearly whole cohorts the bound that counts on sampling is the looser one: 15.88 against 8.72.
    assert sampled_epsilon(5.0, {(9, 10): 20}, 1e-5) == epsilon(5.0, 20, 1e-5) == pytest.approx(8.72, abs=0.01)
    assert sampled_epsilon(5.0, {(1, 10): 20}, 1e-5) < 0.5 * epsilon(5.0, 20, 1e-5)
    assert sampled_epsilon(0.0, {(2, 4): 3}, 1e-5) == math.inf
    assert sampled_epsilon(2.0, {}, 1e-5) == 0
    refuses("between 1 and 4 clients, got 5", sampled_epsilon, 2.0, {(5, 4): 3}, 1e-5)
