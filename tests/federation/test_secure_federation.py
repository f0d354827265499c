"""Secure aggregation around methods: the same models as without, drop-outs, what travels, and what is refused."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedkd import FedKD
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.fedyogi import FedYogi
from confed.algorithms.robust import Robust
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.local import InProcess, Members, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params, Rules, Scope
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore, ServerState, Store
from confed.federation.update_privacy import UpdatePrivacy
from confed.federation.wire import decode, decode_state, encode, encode_state
from confed.privacy.protections import check_layouts, protect
from confed.privacy.secure_sum.exchange import _heavy  # type: ignore[attr-defined]
from confed.testing.toy import toy_clients, toy_setup
from memory_transport import Without, rounds
from refusals import refuses

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
