"""FedMD and CreamFL, which learn from public examples: losses and rounds by hand, and what is sent."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from confed.algorithms.creamfl import CLASSIFIER, PICTURES, TEXTS, CreamFL, Views, aggregated
from confed.algorithms.fedmd import FedMD
from confed.algorithms.local import LocalOnly
from confed.data.examples import FederatedDataset, TableData
from confed.engines.local import Setup
from confed.engines.perform import Workspace, client_of, perform
from confed.engines.remote.protocol import seal
from confed.federation.actions import OFFERED
from confed.federation.client_info import ClientInfo
from confed.federation.families.public_data import ServerSide
from confed.federation.local import Local
from confed.federation.messages import Call, Message, Reply, drive
from confed.federation.state import ClientState, ServerState
from confed.losses import info_nce as losses_module
from confed.losses.info_nce import inter_modal, match_scores
from confed.recipes.recipe import load_recipe
from confed.recipes.run_section import RunSection
from confed.report.tables.columns import Context, columns_of, method_row
from confed.results.summary import Summary
from confed.runs.build import check_method, public_data
from confed.runs.run import run as run_recipe
from confed.testing.toy import ToyPromptModel, ToyTask, modal_clients, toy_clients, toy_setup
from confed.testing.trial import run
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


STEP = Local(epochs=1, batch_size=100, lr=0.5, optimizer="sgd", weight_decay=0.0)
UNMOVED = replace(STEP, lr=1e-12)
CONTEXT = "context.vectors"


def units(*shape: int, seed: int = 0) -> Tensor:
    return functional.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def softmax_log(scores: list[float], which: int) -> float:
    return scores[which] - math.log(sum(math.exp(s) for s in scores))


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def public(setup: Setup) -> Mapping[str, Tensor]:
    assert setup.public is not None
    batch = next(iter(setup.public.train(100, torch.Generator())))
    order = batch["index"].argsort()
    return {name: tensor[order] for name, tensor in batch.items()}


def seen(model: ToyPromptModel, pairs: Mapping[str, Tensor], context: Tensor) -> tuple[Tensor, Tensor]:
    """Representations of all pairs' pictures and texts."""
    return model.image_features(pairs), model.class_features(context, torch.arange(3))[pairs["label"]]


def of_both(heard: Sequence[Mapping[str, Tensor]], own: Views, **options: bool) -> tuple[Tensor, Tensor]:
    """The aggregates of pictures and texts, of which there are some."""
    pictures, texts = aggregated(heard, own, **options)
    assert pictures is not None
    assert texts is not None
    return pictures, texts


# Equations ------------------------------------------------------------------------------------------------------


def test_inter_modal_contrast_by_loops() -> None:
    local, others, k = units(3, 4), units(5, 4, seed=1), torch.tensor([4, 0, 2])
    losses = [-softmax_log([dot(local[b], t) / 0.5 for t in others], int(k[b])) for b in range(3)]
    assert float(inter_modal(local, others, k, 0.5)) == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_match_scores_by_loops_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    local, others = units(5, 4), units(5, 4, seed=1)
    expected = [softmax_log([dot(local[k], t) for t in others], k) for k in range(5)]
    monkeypatch.setattr(losses_module, "ROWS", 2)
    assert match_scores(local, others).tolist() == pytest.approx(expected, rel=1e-5)


def test_aggregation_by_loops_with_a_text_of_two_pairs() -> None:
    text_of = torch.tensor([1, 0, 1])
    own = Views(units(3, 4), units(2, 4, seed=1), text_of)
    heard = [{PICTURES: units(3, 4, seed=2 + c), TEXTS: units(2, 4, seed=5 + c)} for c in range(3)]
    pictures, texts = of_both(heard, own)
    for k in range(3):
        scores = {
            PICTURES: [softmax_log([dot(r[PICTURES][k], own.texts[t]) for t in text_of], k) for r in heard],
            TEXTS: [softmax_log([dot(r[TEXTS][text_of[k]], i) for i in own.pictures], k) for r in heard],
        }
        for name, found, row in ((PICTURES, pictures, k), (TEXTS, texts, int(text_of[k]))):
            w = np.exp(scores[name]) / np.exp(scores[name]).sum()
            expected = sum(w[c] * heard[c][name][row].numpy() for c in range(3))
            np.testing.assert_allclose(found[k].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_clients_loss_by_loops() -> None:
    method = CreamFL(contrast=0.7, temperature=0.4)
    setup = toy_setup(method, local=STEP)
    pairs, model = public(setup), setup.model()
    assert isinstance(model, ToyPromptModel)
    info = setup.population.info(0)
    state = ClientState({"personal": {CONTEXT: model.initial_context() + 0.3}})
    client = client_of(setup, Workspace(model), Call(info, "fit", Message()), state, 1)
    client.load(state.tensors["personal"])
    with torch.no_grad():
        old_pictures, old_texts = seen(model, pairs, model.initial_context() - 0.2)
    before = Views(old_pictures, old_texts, torch.arange(10))
    received = Views(units(10, 4), units(10, 4, seed=1), torch.arange(10))
    batch = next(iter(client.data.train(100, torch.Generator())))
    (loss,) = (found.item() for found in method._regularised(client, received, before)(model, batch))
    with torch.no_grad():
        views, task = seen(model, pairs, client.tensors[CONTEXT]), setup.task.loss(model(batch), batch)
    inter = intra = 0.0
    for local, same, other, old in zip(views, received[:2], (received[1], received[0]), before[:2], strict=True):
        for k in range(10):
            inter -= softmax_log([dot(local[k], o) / 0.4 for o in other], k) / 10
            intra -= softmax_log([dot(local[k], same[k]) / 0.4, dot(local[k], old[k]) / 0.4], 0) / 20
    assert loss == pytest.approx(task.item() + 0.7 * (inter + intra), rel=1e-4)


# Parties --------------------------------------------------------------------------------------------------------


def a_round(setup: Setup, replies: Mapping[str, Mapping[str, Tensor]]) -> tuple[ServerState, ServerState, Message]:
    """The server before and after a round in which clients send this, and what it sent them."""
    method = setup.algorithm
    context = setup.model().state_dict()[CONTEXT]
    before = ServerState(2, {CONTEXT: context}, rounds=5, local=setup.local)
    told: list[Message] = []

    def exchange(calls) -> Iterator[Reply]:
        for call in calls:
            told.append(call.message)
            lost = call.client.id not in replies
            yield Reply(call.client, Message({} if lost else replies[call.client.id]), "lost" if lost else None)

    after = drive(method.round(before, [ClientInfo(name, 3) for name in "abc"]), exchange)
    assert after.round == 3
    assert all(torch.equal(t, told[0].tensors[n]) for message in told for n, t in message.tensors.items())
    return before, after, told[0]


def test_the_server_takes_a_step_towards_the_aggregate() -> None:
    setup = toy_setup(CreamFL(server_epochs=0), local=STEP)
    pairs, model = public(setup), setup.model()
    assert isinstance(model, ToyPromptModel)
    classes, text_of = pairs["label"].unique(return_inverse=True)
    heard = {n: {PICTURES: units(10, 4, seed=s), TEXTS: units(len(classes), 4, seed=s + 9)} for s, n in enumerate("ac")}
    before, after, told = a_round(setup, heard)
    context = before.params[CONTEXT].clone().requires_grad_()
    pictures, texts = seen(model, pairs, context)
    assert torch.allclose(told.tensors[PICTURES], pictures)
    assert torch.allclose(told.tensors[TEXTS][text_of], texts.detach())
    own = Views(pictures.detach(), told.tensors[TEXTS], text_of)
    wanted = of_both(list(heard.values()), own)
    loss = ((pictures - wanted[0]) ** 2).sum() / 10 + ((texts - wanted[1]) ** 2).sum() / 10
    (gradient,) = torch.autograd.grad(loss, context)
    assert torch.allclose(after.params[CONTEXT], context.detach() - 0.5 * gradient, atol=1e-6)
    mean = a_round(toy_setup(CreamFL(server_epochs=0, aggregation="mean"), local=STEP), heard)[1]
    assert not torch.allclose(after.params[CONTEXT], mean.params[CONTEXT], atol=1e-4)


def test_the_server_trains_on_the_pairs_before_it_sends() -> None:
    setup = toy_setup(CreamFL(distill_epochs=0, server_lr=0.2), local=STEP)
    pairs, model = public(setup), setup.model()
    assert isinstance(model, ToyPromptModel)
    (gradient,) = torch.autograd.grad(ToyTask().loss(model(pairs), pairs), [model.get_parameter(CONTEXT)])
    before, after, told = a_round(setup, {"b": {PICTURES: units(10, 4), TEXTS: units(3, 4)}})
    stepped = before.params[CONTEXT] - 0.2 * gradient
    assert torch.allclose(after.params[CONTEXT], stepped, atol=1e-6)
    texts = model.class_features(stepped, pairs["label"].unique())
    assert torch.allclose(told.tensors[TEXTS], texts, atol=1e-6)


def test_a_client_goes_on_from_its_own_model_and_sends_none() -> None:
    setup = replace(toy_setup(CreamFL(), local=UNMOVED), keep_personal=False)
    model = setup.model()
    assert isinstance(model, ToyPromptModel)
    pairs = public(setup)
    mine = model.initial_context() + 1.0
    there = pairs["label"].unique()
    sent = Message({PICTURES: units(10, 4), TEXTS: units(len(there), 4)})
    call = Call(setup.population.info(1), "fit", sent)
    reply, state = perform(setup, Workspace(setup.model()), call, ClientState({"personal": {CONTEXT: mine}}), 1)
    assert set(reply.tensors) == {PICTURES, TEXTS}
    assert torch.allclose(reply.tensors[TEXTS], model.class_features(mine, there), atol=1e-6)
    assert torch.allclose(state.tensors["personal"][CONTEXT], mine)
    first, state = perform(setup, Workspace(setup.model()), call, ClientState(), 0)
    assert torch.allclose(first.tensors[TEXTS], model.class_features(model.initial_context(), there), atol=1e-6)
    assert state.tensors["personal"]


def test_without_contrast_clients_train_alone() -> None:
    ours, alone = run(toy_setup(CreamFL(contrast=0.0))), run(toy_setup(LocalOnly(), kind="prompts"))
    for name, state in ours.states.items():
        assert torch.equal(state.tensors["personal"][CONTEXT], alone.states[name].tensors["private"][CONTEXT])
    contrasted = run(toy_setup(CreamFL()))
    assert not torch.equal(
        ours.states["client-0"].tensors["personal"][CONTEXT], contrasted.states["client-0"].tensors["personal"][CONTEXT]
    )


# Clients of one modality ----------------------------------------------------------------------------------------

MIXED = CreamFL(contrast=0.7, temperature=0.4, pictures_only=("client-0",), texts_only=("client-1",))


@pytest.mark.parametrize(("number", "side"), [(0, 0), (1, 1)])
def test_the_loss_of_a_client_of_one_modality_by_loops(number: int, side: int) -> None:
    setup = toy_setup(MIXED, local=STEP)
    pairs, model = public(setup), setup.model()
    assert isinstance(model, ToyPromptModel)
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    model.get_parameter(f"{CLASSIFIER}.weight").data.copy_(weights)
    info = setup.population.info(number)
    client = client_of(setup, Workspace(model), Call(info, "fit", Message()), ClientState(), 1)
    with torch.no_grad():
        old = seen(model, pairs, model.initial_context() - 0.2)
    before, received = (
        Views(old[0], old[1], torch.arange(10)),
        Views(units(10, 4), units(10, 4, seed=1), torch.arange(10)),
    )
    batch = dict(next(iter(client.data.train(100, torch.Generator()))))
    batch |= {"label": batch["label"] % 2, OFFERED: torch.tensor([[True, True, False]]).expand(len(batch["x"]), -1)}
    (loss,) = (found.item() for found in MIXED._regularised(client, received, before)(model, batch))
    expected = 0.0
    with torch.no_grad():
        own, views = (
            seen(model, batch, model.initial_context())[side],
            seen(model, pairs, model.initial_context())[side],
        )
    for b, z in enumerate(own):
        expected -= softmax_log([5 * dot(z, w) for w in weights[:2]], int(batch["label"][b])) / len(own)
    same, other = received[side], received[1 - side]
    for k, z in enumerate(views):
        expected -= 0.7 * softmax_log([dot(z, o) / 0.4 for o in other], k) / 10
        expected -= 0.7 * softmax_log([dot(z, same[k]) / 0.4, dot(z, old[side][k]) / 0.4], 0) / 10
    assert loss == pytest.approx(expected, rel=1e-4)


def test_clients_of_one_modality_send_that_alone() -> None:
    ran = run(toy_setup(MIXED, local=STEP))
    sent = {(client, *reply.message.tensors) for client, call, reply in ran.replies if call.action == "fit"}
    assert sent == {("client-0", PICTURES), ("client-1", TEXTS), ("client-2", PICTURES, TEXTS)}
    for name, state in ran.states.items():
        private = state.tensors.get("private", {})
        assert set(private) == ({f"{CLASSIFIER}.weight"} if name != "client-2" else set())
        assert all(bool(tensor.any()) for tensor in private.values())
    assert not any(CLASSIFIER in name for name in ran.servers["main"].params)


def test_a_client_of_pictures_leaves_the_text_tower_as_it_is() -> None:
    setup = toy_setup(MIXED, local=STEP)
    pairs = public(setup)
    sent = Message({PICTURES: units(10, 4), TEXTS: units(len(pairs["label"].unique()), 4)})
    start = setup.model().state_dict()[CONTEXT]
    for number, names in enumerate(({PICTURES}, {TEXTS}, {PICTURES, TEXTS})):
        call = Call(setup.population.info(number), "fit", sent)
        reply, state = perform(setup, Workspace(setup.model()), call, ClientState(), 0)
        assert set(reply.tensors) == names
        # The context is all that learns of the toy model's towers, and it belongs to texts.
        assert torch.equal(state.tensors["personal"][CONTEXT], start) == (names == {PICTURES})


def test_the_server_distils_each_modality_from_its_owners() -> None:
    setup = toy_setup(replace(MIXED, server_epochs=0, pictures_only=("a",), texts_only=("c",)), local=STEP)
    pairs, model = public(setup), setup.model()
    assert isinstance(model, ToyPromptModel)
    classes, text_of = pairs["label"].unique(return_inverse=True)
    heard = {
        "a": {PICTURES: units(10, 4)},
        "b": {PICTURES: units(10, 4, seed=1), TEXTS: units(len(classes), 4, seed=2)},
        "c": {TEXTS: units(len(classes), 4, seed=3)},
    }
    before, after, told = a_round(setup, heard)
    context = before.params[CONTEXT].clone().requires_grad_()
    pictures, texts = seen(model, pairs, context)
    own = Views(pictures.detach(), told.tensors[TEXTS], text_of)
    wanted = aggregated([heard["b"], heard["c"] | {PICTURES: heard["a"][PICTURES]}], own)
    assert wanted[0] is not None
    assert wanted[1] is not None
    loss = ((pictures - wanted[0]) ** 2).sum() / 10 + ((texts - wanted[1]) ** 2).sum() / 10
    (gradient,) = torch.autograd.grad(loss, context)
    assert torch.allclose(after.params[CONTEXT], context.detach() - 0.5 * gradient, atol=1e-6)


def test_a_modality_that_nobody_sent_is_not_distilled() -> None:
    own = Views(units(3, 4), units(2, 4, seed=1), torch.tensor([1, 0, 1]))
    pictures, texts = aggregated([{PICTURES: units(3, 4, seed=2)}], own)
    assert texts is None
    assert pictures is not None
    assert torch.allclose(pictures, units(3, 4, seed=2))
    setup = toy_setup(replace(MIXED, server_epochs=0, pictures_only=("a", "b", "c"), texts_only=()), local=STEP)
    before, after, _ = a_round(setup, {name: {PICTURES: units(10, 4)} for name in "abc"})
    # Its pictures' tower is frozen and texts are not distilled, so that nothing moves.
    assert torch.equal(before.params[CONTEXT], after.params[CONTEXT])


# Refusals -------------------------------------------------------------------------------------------------------


def test_names_of_clients_of_one_modality_are_checked() -> None:
    with pytest.raises(ValueError, match=r"must name different clients, got 'shop' twice"):
        CreamFL(pictures_only=("shop",), texts_only=("park", "shop"))
    with pytest.raises(ValueError, match=r"algorithm.texts_only names no client 'oil'; there are park, shop"):
        check_method(CreamFL(texts_only=("shop", "oil")), RunSection(), ["park", "shop"])


def test_a_server_that_knows_the_pairs_number_alone_is_refused() -> None:
    setup = toy_setup(CreamFL())
    assert isinstance(setup.public, TableData)
    none = TableData(*(table.take(0) for table in setup.public.tables))
    method = CreamFL(public="shop").with_server_side(ServerSide(setup.build, none, setup.task, 0))
    with pytest.raises(ValueError, match=r"trains on the public pairs, and has none: .* 'shop' itself"):
        drive(method.round(ServerState(0, {}, local=STEP), []), lambda calls: iter(()))


def test_pairs_that_are_not_the_servers_are_refused() -> None:
    setup = toy_setup(CreamFL())
    call = Call(setup.population.info(0), "fit", Message({PICTURES: units(9, 4), TEXTS: units(3, 4)}))
    with pytest.raises(
        ValueError, match=r"pairs of 'client-0' are not the server's: 10 pictures and 3 texts, .* 9 and 3"
    ):
        perform(setup, Workspace(setup.model()), call, ClientState(), 0)


def test_a_run_of_the_recipe_with_its_recalls(tmp_path: Path) -> None:
    small = ["data.classes=8", "data.shots=2", "data.validation_shots=0", "data.test_per_class=2", "run.rounds=1"]
    recipe = load_recipe("retrieval_scenes", [*small, "local.epochs=1"])
    folder = tmp_path / "study" / "creamfl" / "seed-0"
    summary = run_recipe(recipe.method("creamfl"), folder)
    pairs = 2 * 4 * 4  # pictures of each of the four other classes in four styles
    sent = 4 * 64 * (pairs + 4)
    assert summary["parameters"]["sent"] == 0 < summary["parameters"]["trained"]
    assert summary["public_place"] == "new classes"
    assert not summary["global_unseen"]
    assert all(sent < bytes < sent + 1000 for bytes in summary["bytes_up"]["1"].values())
    context = Context([method_row("CreamFL", [Summary(summary)])])
    recalls = {column.title: column.cells(context.rows)[0] for column in columns_of("paper", context) if column.detail}
    found = [place["ir@1"] for place in summary["test_metrics"]["personal"].values()]
    assert list(recalls) == ["tr@1", "tr@5", "tr@10", "ir@1", "ir@5", "ir@10"]
    assert recalls["ir@1"].value == pytest.approx(100 * sum(found) / len(found))
