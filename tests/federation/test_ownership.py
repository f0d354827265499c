"""Modalities: what a client does not own it neither trains nor sends, whatever the method; places that own nothing."""

from dataclasses import replace

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedkd import FedKD
from confed.algorithms.local import LocalOnly
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.local import RoundRecord, Simulation
from confed.engines.participation import Members
from confed.engines.perform import Setup, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Reply
from confed.federation.ownership import MODALITIES, modalities_of, owned, restricted, unowned
from confed.federation.params import Scope
from confed.federation.state import MemoryStore
from confed.registry import algorithms
from confed.runs.build import check_whole
from confed.testing.toy import OWNED, modal_clients, toy_model, toy_setup
from toy_runs import Listener, simulated

NAMES = [
    "embed.image.shared.weight",
    "mentor.embed.audio.vector",
    "embed.text.local.weight",
    "embed.weight",
    "body.image",
]


def run(setup: Setup) -> tuple[list[RoundRecord], list[tuple[Call, Reply]], Simulation]:
    listener = Listener(setup)
    records, _, simulation = simulated(setup, executor=listener)
    return records, [(call, reply) for _, call, reply in listener.heard], simulation


def test_names_tell_their_modality() -> None:
    assert MODALITIES == ("image", "text", "audio", "series")
    assert modalities_of(NAMES) == ("image", "text", "audio")
    assert unowned(NAMES, ()) == set()
    assert unowned(NAMES, ("text",)) == {NAMES[0], NAMES[1]}
    assert unowned(NAMES, MODALITIES) == set()


def test_batches_tell_their_modalities() -> None:
    batch = {key: torch.zeros(2) for key in ("label", "text_mask", "text", "image2", "audio_length", "index")}
    assert owned(batch) == ("image", "text", "audio")
    assert list(restricted(batch, ("text",))) == ["label", "text_mask", "text", "index"]
    assert owned(restricted(batch, ())) == ()


# Every method that works with any model; the others have models without modalities of clients' own.
ANY = [
    n
    for n in algorithms.names()
    if algorithms[n].traits.made_for in ("", "modalities") and not algorithms[n].traits.centralised
]


@pytest.mark.parametrize("name", ANY)
def test_no_method_trains_or_sends_what_a_client_does_not_own(name: str) -> None:
    method: Algorithm = algorithms[name]()
    if not method.traits.clients_may_lack_modalities:
        pytest.skip("its server's sums are those of all clients: such runs are refused")
    setup = toy_setup(method, rounds=1, kind="modalities")
    _, replies, simulation = run(setup)
    workspace = Workspace(setup.model())
    assert replies
    for call, reply in replies:
        assert reply.error is None
        foreign = unowned(workspace.tensors, OWNED[call.client.id])
        assert foreign
        assert all(workspace.scopes(setup.algorithm, call.client)[n] is Scope.FROZEN for n in foreign)
        sent = {n.removeprefix("update/").partition("/")[0] for n in (*reply.message.tensors, *call.message.tensors)}
        assert not sent & foreign
        state = simulation.store.load(call.client.id)
        assert not any(foreign & set(group) for group in state.tensors.values())


def test_compressed_changes_of_a_part_of_the_model() -> None:
    records, replies, _ = run(toy_setup(FedKD(), rounds=3, kind="modalities"))
    assert not any(record.errors for record in records)
    later = [call for call, _ in replies if "base" in call.message.scalars]
    assert {call.client.id for call in later} == set(OWNED)


def test_sums_over_all_clients_need_clients_alike() -> None:
    model = toy_setup(FedAvg(), kind="modalities").build()
    with pytest.raises(ValueError, match=r"SCAFFOLD keeps sums .* 'client-0' has image\+text, 'client-1' text"):
        check_whole(Scaffold(), model, OWNED)
    check_whole(Scaffold(), model, dict.fromkeys(OWNED, ("text",)))
    check_whole(Scaffold(), toy_model(), OWNED)  # none of its tensors belongs to a modality


def test_a_modality_with_one_owner_takes_its_values() -> None:
    records, replies, _ = run(toy_setup(FedAvg(), rounds=1, kind="modalities"))
    server = records[0].servers["main"].params
    sent = {call.client.id: reply.message.tensors for call, reply in replies}
    for name in ("embed.audio.shared.weight", "embed.audio.vector"):
        assert torch.equal(server[name], sent["client-2"][name])
    text = (12 * sent["client-0"]["embed.text.vector"] + 20 * sent["client-1"]["embed.text.vector"]) / 32
    assert torch.allclose(server["embed.text.vector"], text, atol=1e-6)
    body = sum(n * sent[f"client-{k}"]["body.weight"] for k, n in enumerate((12, 20, 16)))
    assert torch.allclose(server["body.weight"], body / 48, atol=1e-6)


def test_clients_that_own_the_same_are_as_ever() -> None:
    setup = toy_setup(FedAvg(), rounds=1, kind="modalities", clients=modal_clients(0, (8, 8), [("image",)] * 2))
    everything = replace(setup, population=Members(modal_clients(0, (8, 8), [("image",)] * 2)))
    same = replace(setup, population=Members(modal_clients(0, (8, 8), [("image",)] * 2), ("image",)))
    one, other = (run(s)[0][0].servers["main"].params for s in (everything, same))
    assert set(one) - set(other) == {n for n in one if ".text." in n or ".audio." in n}
    assert all(torch.equal(one[n], other[n]) for n in other)


def test_unseen_places_are_sent_all_that_any_client_owns() -> None:
    table = modal_clients(3, (6,), [("image", "text", "audio")])["client-0"]
    setup = replace(toy_setup(FedAvg(), rounds=1, kind="modalities"), observers={"all": TableData(*table.tables)})
    records, _, simulation = run(setup)
    assert simulation.observer("all") == ClientInfo("all", 0, ("image", "text", "audio"), "answers")
    views = simulation.evaluate(records[-1].servers, 1, split="test")
    shared = simulation.shared(records[-1].servers, simulation.observer("all"))
    model = setup.model()
    model.load_state_dict({**model.state_dict(), **shared})
    batch = table.tables[2].batch(torch.arange(6))
    right = float(setup.task.predictions(model.eval()(batch), batch).sum())
    assert views["unseen"]["all"]["accuracy"] == (right, 6.0)


def test_places_where_modalities_are_not_told_apart() -> None:
    plain = toy_setup(LocalOnly(), rounds=1)
    assert Simulation(plain, MemoryStore()).observer("place") == ClientInfo("place", 0, head="answers")
    none = replace(
        toy_setup(FedAvg(), rounds=1, kind="modalities"),
        population=Members(modal_clients(0, (8,), [("text",)]), ("text",)),
    )
    assert Simulation(none, MemoryStore()).observer("place").modalities == ("text",)
