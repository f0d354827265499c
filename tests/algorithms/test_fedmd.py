"""FedMD: who sees what of the public examples, the mean of the scores, and the digestion, by hand."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedmd import FedMD
from confed.data.examples import FederatedDataset, TableData
from confed.engines.local import Setup
from confed.engines.perform import Workspace, perform
from confed.engines.remote.protocol import seal
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Call, Message, Reply, drive
from confed.federation.state import ClientState, ServerState
from confed.runs.checks import public_data
from confed.testing.toy import modal_clients, toy_clients, toy_setup
from memory_transport import Letters, remote_of, rounds
from refusals import refuses
from toy_runs import Listener, simulated

STILL = Local(epochs=1, batch_size=100, lr=1e-12, optimizer="sgd", weight_decay=0.0)
PUBLIC = 10


def ask(setup: Setup, client: str, action: str, message: Message, state: ClientState, round: int = 0):
    infos = {info.id: info for info in map(setup.population.info, range(3))}
    return perform(setup, Workspace(setup.model()), Call(infos[client], action, message), state, round)


def test_who_answered_is_sent_the_plain_mean() -> None:
    cohort = [ClientInfo(name, n) for name, n in (("a", 5), ("b", 50), ("c", 1))]
    sent = {"a": torch.tensor([[1.0, 2.0]]), "c": torch.tensor([[4.0, -2.0]])}
    asked: list[tuple[str, str]] = []
    given: list[torch.Tensor] = []

    def exchange(calls) -> Iterator[Reply]:
        for call in calls:
            asked.append((call.client.id, call.action))
            if call.action == "predict":
                lost = call.client.id not in sent
                tensors = {} if lost else {"logits": sent[call.client.id]}
                yield Reply(call.client, Message(tensors), "lost" if lost else None)
            else:
                given.append(call.message.tensors["logits"])
                yield Reply(call.client, Message({}, {"loss": 0.0}))

    after = drive(FedMD().round(ServerState(4, {}), cohort), exchange)
    assert after.round == 5
    assert not after.params
    assert asked == [("a", "predict"), ("b", "predict"), ("c", "predict"), ("a", "fit"), ("c", "fit")]
    assert all(torch.equal(t, torch.tensor([[2.5, 0.0]])) for t in given)


def test_scores_of_another_shape_are_left_out() -> None:
    cohort = [ClientInfo(name, 1) for name in ("a", "b", "c", "d")]
    sent = {"a": {"weights": torch.zeros(1, 2)}, "b": {"logits": torch.ones(1, 2)}, "c": {"logits": torch.zeros(2, 2)}}
    heard: list[str] = []

    def exchange(calls) -> Iterator[Reply]:
        for call in calls:
            if call.action == "fit":
                heard.append(call.client.id)
                assert torch.equal(call.message.tensors["logits"], torch.full((1, 2), 2.0))
            tensors = sent.get(call.client.id, {"logits": torch.full((1, 2), 3.0)}) if call.action == "predict" else {}
            yield Reply(call.client, Message(tensors))

    with pytest.warns(UserWarning, match="leaves out a reply of '[ac]': no scores like the others'"):
        drive(FedMD().round(ServerState(0, {}), cohort), exchange)
    assert heard == ["b", "d"]


def test_replies_must_have_the_shape_of_public_examples(tmp_path: Path) -> None:
    """Nobody is left out because another site was heard first."""
    method = FedMD(items=4, public_epochs=0).with_public_data(PUBLIC, 3)
    letters = Letters(toy_setup(method, rounds=1), tmp_path)

    def longer(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        return head, seal(Message({"logits": torch.zeros(5, 3)}))

    letters.tamper[0] = longer
    (record,) = rounds(letters.setup, remote_of(letters))
    assert record.errors.keys() == {"client-0"}
    assert re.search(r"'logits' must be .* of shape \(4, 3\)", record.errors["client-0"])
    asked = next(method.round(ServerState(0, {}), [ClientInfo("a", 1)]))
    assert {name: tuple(t.shape) for name, t in asked[0].expects.items()} == {"logits": (4, 3)}
    few = next(FedMD(items=40).with_public_data(PUBLIC, 3).round(ServerState(0, {}), [ClientInfo("a", 1)]))
    assert few[0].expects["logits"].shape == (PUBLIC, 3)


def test_scores_are_in_the_order_of_the_public_examples() -> None:
    setup = toy_setup(FedMD(public_epochs=0), noisy=False, local=STILL)
    message, state = ask(setup, "client-1", "predict", Message(), ClientState())
    model = setup.model()
    model.load_state_dict({**model.state_dict(), **state.tensors["private"]})
    rows = setup.public.tables[0].batch(torch.arange(PUBLIC))
    assert torch.allclose(message.tensors["logits"], model.eval()(rows).logits, atol=1e-6)


def test_the_drawn_public_examples_are_one_set_per_round() -> None:
    setup = toy_setup(FedMD(items=4, public_epochs=0), noisy=False, local=STILL)
    everything = setup.model().eval()(setup.public.tables[0].batch(torch.arange(PUBLIC))).logits

    def rows(client: str, round: int) -> list[int]:
        scores = ask(setup, client, "predict", Message(), ClientState(), round)[0].tensors["logits"]
        near = torch.cdist(scores, everything)
        assert near.min(dim=1).values.max() < 1e-4
        return near.argmin(dim=1).tolist()

    chosen = [rows("client-0", round) for round in range(4)]
    assert all(len(set(part)) == 4 and part == sorted(part) for part in chosen)
    assert chosen[2] == rows("client-2", 2)
    assert len({tuple(part) for part in chosen}) > 1


def test_digestion_is_a_step_on_the_mean_absolute_error() -> None:
    rate = 0.1
    local = Local(epochs=1, batch_size=100, lr=rate, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(FedMD(), noisy=False, local=local)
    wanted = torch.randn(PUBLIC, 3, generator=torch.Generator().manual_seed(1))
    _, state = ask(setup, "client-0", "fit", Message({"logits": wanted}), ClientState())
    model, data = setup.model(), setup.population.data("client-0")
    public, own = setup.public.tables[0].batch(torch.arange(PUBLIC)), data.tables[0].batch(torch.arange(12))
    learned = [p for p in model.parameters() if p.requires_grad]

    def step(loss: torch.Tensor) -> None:
        for p, g in zip(learned, torch.autograd.grad(loss, learned), strict=True):
            p.data.sub_(rate * g)

    step((model(public).logits - wanted).abs().mean())
    step(setup.task.loss(model(own), own))
    for name, tensor in state.tensors["private"].items():
        assert torch.allclose(tensor, model.state_dict()[name], atol=1e-6)


def test_nothing_but_scores_travels() -> None:
    sizes: set[tuple[int, ...]] = set()

    setup = toy_setup(FedMD(), kind="modalities", rounds=2)
    listener = Listener(setup)
    records, _, simulation = simulated(setup, executor=listener, sound=True)
    for message in (message for _, call, reply in listener.heard for message in (call.message, reply.message)):
        assert set(message.tensors) <= {"logits"}
        sizes.update(tuple(t.shape) for t in message.tensors.values())
    assert sizes == {(PUBLIC, 3)}
    assert not records[-1].servers["main"].params
    assert set(simulation.evaluate(records[-1].servers, 2, split="test")["personal"]) == {
        f"client-{k}" for k in range(3)
    }


def test_clients_see_public_examples_of_their_modalities() -> None:
    setup = toy_setup(FedMD(), kind="modalities")
    heard, seen = (replace(setup, public=modal_clients(5, (6,), [(m,)])["client-0"]) for m in ("audio", "text"))
    with pytest.raises(ValueError, match=r"client 'client-1' has \(text\), got one with audio only"):
        ask(heard, "client-1", "predict", Message(), ClientState())
    assert ask(seen, "client-1", "predict", Message(), ClientState())[0].tensors["logits"].shape == (6, 3)


def test_missing_public_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="needs public examples at every client"):
        ask(replace(toy_setup(FedMD()), public=None), "client-0", "predict", Message(), ClientState())


def test_the_recipe_names_the_public_place() -> None:
    dataset = FederatedDataset("toy", ("a",), {}, {}, ())
    places = {name: TableData(*data.tables) for name, data in toy_clients().items()}
    public, left = public_data(FedMD(public="client-1"), dataset, places)
    assert public is places["client-1"]
    assert list(left) == ["client-0", "client-2"]
    refuses("one of client-0, client-1, client-2; got ''", public_data, FedMD(), dataset, places)
    refuses("'toy' has none", public_data, FedMD(), dataset, {})
    with pytest.raises(ValueError, match="answers or tasks of their own"):
        public_data(FedMD(public="client-1"), replace(dataset, answer_sets={"x": ("a",)}), places)
