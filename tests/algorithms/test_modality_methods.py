"""Modality Transformer, late fusion, modality fill and PmcmFL: their maps, losses and rounds by hand."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from confed.algorithms.late_fusion import LateFusionFedAvg
from confed.algorithms.modality_dropout import ModalityDropout, kept
from confed.algorithms.modality_fill import Kind, ModalityFill
from confed.algorithms.modality_transformer import ModalityTransformer
from confed.algorithms.pmcmfl import PmcmFL
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Setup
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.ownership import modalities_of, restricted
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.losses.prototypes import class_sums, likeness, prototype_contrast
from confed.models.late_fusion import LateFusion, late_fusion_mini
from confed.testing.toy import OWNED, modal_clients, toy_setup
from modal_batches import modal_batch
from refusals import refuses
from toy_runs import simulated

SGD = Local(epochs=1, batch_size=4, lr=0.1, optimizer="sgd", weight_decay=0.0)


def modal(method, **options):
    return toy_setup(method, kind="modalities", **options)


# The Transformer's maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.3, 0.8])
def test_gradients_of_the_two_maps_are_as_lambda_to_its_rest(lam: float) -> None:
    setup = modal(ModalityTransformer(lam=lam), noisy=False)
    model = setup.model()
    batch = modal_clients(0, (12,))["client-0"].tables[0].batch(torch.arange(12))
    setup.task.loss(model(batch), batch).backward()
    for m in ("image", "text"):
        local, shared = (model.get_parameter(f"embed.{m}.{part}.weight").grad for part in ("local", "shared"))
        assert local is not None
        assert shared is not None
        assert local.abs().max() > 1e-4
        assert torch.allclose((1 - lam) * local, lam * shared, rtol=1e-5, atol=1e-8)
    assert model.get_parameter("embed.audio.local.weight").grad is None


def test_local_maps_stay_at_home_and_one_owner_keeps_its_map() -> None:
    records, store, _ = simulated(modal(ModalityTransformer(lam=0.5, finetune_epochs=0), rounds=2))
    server = records[-1].servers["main"].params
    assert not any(".local." in name for name in server)
    private = store.load("client-2").tensors["private"]
    assert sorted(private) == ["embed.audio.local.weight", "embed.image.local.weight"]
    assert sorted(store.load("client-1").tensors["private"]) == ["embed.text.local.weight"]
    own = store.load("client-2").tensors["personal"]
    assert torch.equal(server["embed.audio.shared.weight"], own["embed.audio.shared.weight"])


def test_a_place_without_maps_uses_the_shared_ones() -> None:
    table = modal_clients(3, (9,), [("image", "text", "audio")])["client-0"]
    setup = replace(modal(ModalityTransformer(lam=0.6), rounds=2), observers={"elsewhere": TableData(*table.tables)})
    records, _, simulation = simulated(setup)
    servers = records[-1].servers
    # The plain model, without local maps, with the values of the server.
    model = setup.build()
    model.load_state_dict({**model.state_dict(), **servers["main"].params})
    model.eval()
    views = simulation.evaluate(servers, 2, split="test")
    for view, place, data in (
        ("unseen", "elsewhere", table),
        ("global", "client-0", modal_clients(0, (12, 20, 16))["client-0"]),
    ):
        rows = data.tables[2].batch(torch.arange(len(data)))
        right = float(setup.task.predictions(model(rows), rows).sum())
        assert views[view][place]["accuracy"] == (right, float(len(data)))


def test_a_client_that_comes_late_starts_from_the_shared_maps() -> None:
    setup = modal(ModalityTransformer(lam=0.5), local=SGD)
    server = {n: torch.full_like(t, 0.5) for n, t in setup.model().state_dict().items() if ".local." not in n}
    given = setup.algorithm.initial_private(server)
    assert sorted(given) == [f"embed.{m}.local.weight" for m in ("audio", "image", "text")]
    assert all(torch.equal(t, server[n.replace(".local.", ".shared.")]) for n, t in given.items())


def test_fine_tuning_of_two_examples_works() -> None:
    setup = modal(ModalityTransformer(finetune_epochs=2), clients=modal_clients(0, (2, 20, 16)), rounds=1)
    records, store, _ = simulated(setup)
    assert len(records) == 2
    assert not records[-1].errors
    tuned, server = store.load("client-0").tensors["personal"], records[-1].servers["main"].params
    assert not torch.equal(tuned["body.weight"], server["body.weight"])
    assert all(bool(torch.isfinite(t).all()) for t in tuned.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_local_maps_have_a_rate_of_their_own(optimizer: str) -> None:
    local = replace(SGD, optimizer=optimizer, batch_size=20, lr=0.01)
    start = modal(ModalityTransformer(lam=0.5)).model().state_dict()["embed.text.shared.weight"]

    def moved(rate: float) -> tuple[float, float]:
        """How far client-1's local and shared map of texts go in one step."""
        method = ModalityTransformer(lam=0.5, local_rate=rate, finetune_epochs=0)
        _, store, _ = simulated(modal(method, rounds=1, local=local, noisy=False))
        state = store.load("client-1").tensors
        maps = state["private"]["embed.text.local.weight"], state["personal"]["embed.text.shared.weight"]
        return float((maps[0] - start).norm()), float((maps[1] - start).norm())

    (one, shared), (three, same) = moved(1.0), moved(3.0)
    assert three == pytest.approx(3 * one, rel=1e-3)
    assert same == pytest.approx(shared, rel=1e-6)


# Dropout --------------------------------------------------------------------------------------------------------


def test_dropout_never_takes_the_last_modality() -> None:
    rng = torch.Generator().manual_seed(0)
    drawn = [kept(("image", "text"), 0.5, rng) for _ in range(4000)]
    assert all(drawn)
    share = sum("image" in left for left in drawn) / len(drawn)
    assert share == pytest.approx(0.5 + 0.25 / 2, abs=0.03)  # stays, or is the one that must
    assert sum(len(left) == 2 for left in drawn) / len(drawn) == pytest.approx(0.25, abs=0.03)
    assert kept(("audio",), 0.99, rng) == ("audio",)
    assert kept(("image", "text", "audio"), 0.0, rng) == ("image", "text", "audio")
    refuses("rate must lie", ModalityDropout, rate=1.0)


def test_only_training_batches_lose_modalities() -> None:
    seen: list[set[str]] = []
    setup = modal(ModalityDropout(rate=0.5), rounds=1, local=replace(SGD, epochs=8))
    build = setup.build

    def watched():
        model = build()
        model.register_forward_pre_hook(
            lambda module, inputs: (
                seen.append({m for m in ("image", "text", "audio") if m in inputs[0]})
                if module.training
                else seen.append({"evaluated", *inputs[0]})
            )
        )
        return model

    records, _, simulation = simulated(replace(setup, build=watched))
    assert {frozenset(s) for s in seen} >= {frozenset({"image"}), frozenset({"text"}), frozenset({"image", "text"})}
    assert all(seen)
    seen.clear()
    simulation.evaluate(records[-1].servers, 1, split="test")
    assert all("evaluated" in s for s in seen)
    assert any({"image", "text"} <= s for s in seen)


SMALL = {"width": 16, "layers": 1, "attention_heads": 2, "hidden": 16, "mels": 8, "word_width": 8}


def model(**options) -> LateFusion:
    return late_fusion_mini(5, 20, **{"modalities": ("image", "text", "audio"), **SMALL} | options)


def test_answers_are_the_mean_of_log_probabilities() -> None:
    net, batch = model().eval(), modal_batch()
    alone = [net(restricted(batch, [m])).logits for m in ("image", "text", "audio")]
    assert all(torch.allclose(each.exp().sum(1), torch.ones(len(each))) for each in alone)
    assert torch.allclose(
        net(restricted(batch, ["image", "text", "audio"])).logits, torch.stack(alone).mean(0), atol=1e-6
    )
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)


def test_every_tensor_belongs_to_one_modality() -> None:
    net = model(word_vectors="frozen")
    assert all(len(modalities_of([name])) == 1 for name in net.state_dict())
    still = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert still <= net.frozen <= set(net.state_dict())
    assert any("text" in name for name in net.frozen)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of image, text, audio"):
        model()({"label": torch.zeros(2)})


def test_objective_is_the_sum_of_the_modalities_losses() -> None:
    setup = toy_setup(LateFusionFedAvg(), kind="modalities", noisy=False)
    net, data = setup.model(), setup.data("client-0")
    batch = data.tables[0].batch(torch.arange(8))
    parts = [restricted(batch, [m]) for m in ("image", "text")]
    wanted = sum(float(setup.task.loss(net(part), part).detach()) for part in parts)

    class Here:
        task = setup.task

    (loss,) = setup.algorithm.objective(Here())(net, batch)  # type: ignore[arg-type]
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-6)
    assert float(loss.detach()) != pytest.approx(float(setup.task.loss(net(batch), batch).detach()), abs=1e-2)


def test_fine_tuning_trains_the_modalities_apart() -> None:
    local = Local(epochs=1, batch_size=8, lr=0.05)
    records, store, _ = simulated(toy_setup(LateFusionFedAvg(), kind="modalities", local=local, rounds=2))
    _, untuned, _ = simulated(toy_setup(LateFusionFedAvg(finetune_epochs=0), kind="modalities", local=local, rounds=2))
    tuned, server = store.load("client-0").tensors["personal"], records[-1].servers["main"].params
    assert not torch.equal(tuned["head.weight"], server["head.weight"])
    assert not torch.equal(untuned.load("client-0").tensors["personal"]["head.weight"], tuned["head.weight"])
    assert all(bool(torch.isfinite(t).all()) for t in tuned.values())


ALL = ("image", "text", "audio")
STILL = Local(epochs=1, batch_size=7, lr=1e-12, optimizer="sgd", weight_decay=0.0)


def noiseless(method: ModalityFill, **options: Any) -> Setup:
    return toy_setup(method, kind="modalities", noisy=False, **options)


def rows(owned: Sequence[str] = ALL, size: int = 6) -> dict[str, torch.Tensor]:
    return modal_clients(0, (size,), [tuple(owned)])["client-0"].tables[0].batch(torch.arange(size))


def by_hand(model: Any, batch: dict[str, torch.Tensor], stand_ins: dict[str, torch.Tensor]) -> torch.Tensor:
    """z of a batch in which the given vectors stand in for what it lacks."""
    size = len(batch["label"])
    slots = {m: type(model).forward(model, {m: batch[m]}).features for m in ALL if m in batch}
    slots |= {m: vector.expand(size, -1) for m, vector in stand_ins.items()}
    fusion = model.get_submodule("fusion")
    side_by_side = torch.cat([fusion.norms[m](slots[m]) for m in ALL], dim=1)
    return torch.tanh(side_by_side @ fusion.dense.weight.T / 3 + fusion.dense.bias / 3)


# What stands in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_missing_is_filled_in_training_and_when_asked(kind: Kind) -> None:
    model: Any = noiseless(ModalityFill(kind)).model()
    fusion = model.get_submodule("fusion")
    rng = torch.Generator().manual_seed(1)
    for parameter in fusion.means.values():
        parameter.data.normal_(generator=rng)
    wanted = {"zero": torch.zeros(8), "mean": fusion.means["audio"] if kind == "mean" else None,
              "token": fusion.tokens["audio"] if kind == "token" else None}[kind]  # fmt: skip
    assert wanted is not None
    for batch, stand_ins in ((rows(("image", "text")), {"audio": wanted}), (rows(), {})):
        z = by_hand(model, batch, stand_ins)
        for training in (True, False):
            output = model.train(training)(batch)
            assert torch.allclose(output.features, z, atol=1e-6)
            assert torch.allclose(output.logits, model.head(z), atol=1e-6)


def test_all_kinds_start_from_the_same_network() -> None:
    states = [noiseless(ModalityFill(kind)).model().state_dict() for kind in get_args(Kind)]
    common = set(states[0])
    assert all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in common)
    assert [len(state) - len(common) for state in states] == [0, 3, 3]


def test_gradients_reach_a_token_where_it_is_read_and_no_mean() -> None:
    for kind in ("token", "mean"):
        setup = noiseless(ModalityFill(kind))
        model = setup.model()
        batch = rows(("image", "text"))
        setup.task.loss(model(batch), batch).backward()
        gradients = {m: model.get_parameter(f"fusion.{kind}s.{m}").grad for m in ALL}
        assert gradients["image"] is None
        assert gradients["text"] is None
        if kind == "mean":
            assert gradients["audio"] is None
        else:
            assert gradients["audio"] is not None
            assert gradients["audio"].abs().max() > 1e-5


# The federation -------------------------------------------------------------------------------------------------


def test_the_server_has_the_weighted_mean_over_the_owners() -> None:
    setup = noiseless(ModalityFill("mean"), local=STILL, rounds=1)
    params = simulated(setup)[0][0].servers["main"].params
    model = setup.model().eval()
    clients = modal_clients(0, (12, 20, 16))
    for m in ALL:
        total, count = torch.zeros(8), 0
        for name, data in clients.items():
            if m in OWNED[name]:
                batch = data.tables[0].batch(torch.arange(len(data)))
                total += len(data) * type(model).forward(model, {m: batch[m]}).features.detach().mean(dim=0)
                count += len(data)
        assert torch.allclose(params[f"fusion.means.{m}"], total / count, atol=1e-5)


def test_means_come_anew_every_round_and_of_owners_alone() -> None:
    seen: list[Reply] = []

    class Watched(ModalityFill):
        def aggregate(self, server: ServerState, replies: Any) -> ServerState:
            kept = list(replies)
            seen.extend(kept)
            return ModalityFill.aggregate(self, server, kept)

    records, store, _ = simulated(noiseless(Watched("mean"), rounds=2))
    for reply in seen:
        sent = {n.removeprefix("fusion.means.") for n in reply.message.tensors if "means" in n}
        assert sent == {*OWNED[reply.client.id]}
        assert set(reply.message.scalars) == {"loss"}
    one, two = (record.servers["main"].params for record in records)
    assert all(not torch.equal(one[f"fusion.means.{m}"], two[f"fusion.means.{m}"]) for m in ALL)
    # A client without sound has, from the second round on, what the owner of sound sent in the first.
    assert torch.equal(store.load("client-1").tensors["personal"]["fusion.means.audio"], one["fusion.means.audio"])


def test_tokens_are_averaged_over_those_who_read_them() -> None:
    before = ServerState(0, {"w": torch.zeros(1), "fusion.tokens.text": torch.full((2,), 9.0)})
    replies = [
        Reply(ClientInfo(name, 10), Message({"w": torch.ones(1), "fusion.tokens.text": torch.full((2,), value),
                                             "read/text": torch.tensor([read])}))
        for name, value, read in (("a", 1.0, 30.0), ("b", 5.0, 10.0), ("c", 9.0, 0.0))
    ]  # fmt: skip
    replies.append(Reply(ClientInfo("d", 10), Message(), "lost"))
    after = ModalityFill("token").aggregate(before, replies)
    assert after.params["fusion.tokens.text"].tolist() == [2.0, 2.0]
    assert after.params["w"].tolist() == [1.0]
    nobody = ModalityFill("token").aggregate(before, [replies[2]])
    assert nobody.params["fusion.tokens.text"].tolist() == [9.0, 9.0]


def test_tokens_learn_where_something_is_missing_also_by_example() -> None:
    setup = noiseless(ModalityFill("token"), rounds=1)
    start = setup.model().state_dict()
    after = simulated(setup)[0][0].servers["main"].params
    assert all(not torch.equal(after[f"fusion.tokens.{m}"], start[f"fusion.tokens.{m}"]) for m in ALL)
    whole = modal_clients(0, (12, 20), [ALL, ALL])
    after = simulated(noiseless(ModalityFill("token"), rounds=1, clients=whole))[0][0].servers["main"].params
    assert all(torch.equal(after[f"fusion.tokens.{m}"], start[f"fusion.tokens.{m}"]) for m in ALL)


def test_a_servers_optimiser_leaves_means_alone() -> None:
    method = replace(ModalityFill("mean"), server=ServerOptimizer("adam"))
    before = ServerState(0, {"w": torch.zeros(1), "fusion.means.text": torch.zeros(2)})
    reply = Reply(ClientInfo("a", 3), Message({"w": torch.ones(1), "fusion.means.text": torch.full((2,), 4.0)}))
    after = method.aggregate(before, [reply])
    assert after.params["fusion.means.text"].tolist() == [4.0, 4.0]
    assert after.params["w"].item() != 1.0


def test_a_batch_of_no_modality_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of image, text, audio, got label"):
        noiseless(ModalityFill()).model()({"label": torch.zeros(2)})


def test_a_place_that_sees_everything_and_a_client_of_two() -> None:
    table: Table = modal_clients(3, (6,), [ALL])["client-0"].tables[0]
    setup = noiseless(ModalityFill("mean"), clients=modal_clients(0, (2, 9, 9)), rounds=1)
    records, _, _ = simulated(replace(setup, observers={"all": TableData(table, table, table)}))
    assert not any(record.errors for record in records)


PROTOTYPES = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]])  # nothing is known of class 1
Z = torch.tensor([[3.0, 4.0], [-1.0, 0.0], [5.0, 5.0]])


def extended(**options: Any) -> tuple[Any, Any]:
    """A model with fusion whose prototypes are random numbers, in evaluation mode, and its fusion."""
    setup = toy_setup(PmcmFL(**options), kind="modalities")
    model = setup.model().eval()
    rng = torch.Generator().manual_seed(2)
    fusion = model.get_submodule("fusion")
    for parameter in fusion.prototypes.values():
        parameter.data.normal_(generator=rng)
    return model, fusion


# The losses -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("faulty_arguments")
def test_class_sums_add_up() -> None:
    sums, counts = class_sums(Z, torch.tensor([2, 0, 2]), 3)
    assert sums.tolist() == [[-1.0, 0.0], [0.0, 0.0], [8.0, 9.0]]
    assert counts.tolist() == [1.0, 0.0, 2.0]
    refuses("features must have shape", class_sums, Z, torch.zeros(2, dtype=torch.int64), 3)


@pytest.mark.usefixtures("faulty_arguments")
def test_the_contrast_by_hand() -> None:
    # Cosines with classes 0 and 2: (0.6, 0.8) and (-1, 0); of the third example's class there is no prototype.
    tau, labels = 0.5, torch.tensor([0, 2, 1])
    wanted = [math.log(1 + math.exp((0.8 - 0.6) / tau)), math.log(1 + math.exp(-1 / tau))]
    z = Z.clone().requires_grad_()
    got = prototype_contrast(z, PROTOTYPES.clone().requires_grad_(), labels, tau)
    assert got.item() == pytest.approx(sum(wanted) / 2, rel=1e-6)
    got.backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())
    assert z.grad[2].tolist() == [0.0, 0.0]
    for none in (torch.zeros(3, 2), PROTOTYPES):
        nothing = prototype_contrast(z, none, torch.ones(3, dtype=torch.int64))
        assert nothing.item() == 0
        nothing.backward()
    refuses("temperature must be positive", prototype_contrast, z, PROTOTYPES, labels, 0.0)
    refuses("must have shapes", prototype_contrast, z, PROTOTYPES[:, :1], labels)


def test_likeness_to_prototypes_equals_a_computation_by_hand() -> None:
    q = likeness(Z, PROTOTYPES, 0.5)
    first = math.exp(0.6 / 0.5) / (math.exp(0.6 / 0.5) + math.exp(0.8 / 0.5))
    assert q[0].tolist() == pytest.approx([first, 0, 1 - first])
    assert q.sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    assert likeness(Z, torch.zeros(3, 2)).tolist() == [[0.0] * 3] * 3


# What stands in -------------------------------------------------------------------------------------------------


def test_missing_slots_hold_prototypes() -> None:
    model, fusion = extended(temperature=0.5)
    batch = modal_clients(0, (6,), [("image", "text", "audio")])["client-0"].tables[0].batch(torch.arange(6))
    backbone = type(model).forward
    r = {m: backbone(model, {m: batch[m]}).features for m in ("image", "text", "audio")}
    labels = batch["label"]
    assert torch.equal(fusion.stand_in("audio", {"image": r["image"]}, labels), fusion.prototypes["audio"][labels])
    q = (
        likeness(r["image"], fusion.prototypes["image"], 0.5) + likeness(r["text"], fusion.prototypes["text"], 0.5)
    ) / 2
    pair = {"image": r["image"], "text": r["text"]}
    assert torch.allclose(fusion.stand_in("audio", pair, None), q @ fusion.prototypes["audio"], atol=1e-6)
    # The model's own pass is that of nobody telling the class, whatever else the batch holds.
    given = {**pair, "audio": q @ fusion.prototypes["audio"]}
    norms = torch.cat([fusion.norms[m](given[m]) for m in ("image", "text", "audio")], dim=1)
    z = torch.tanh(fusion.dense(norms) / 3)
    output = model({"image": batch["image"], "text": batch["text"], "label": labels})
    assert torch.allclose(output.features, z, atol=1e-6)
    assert torch.allclose(output.logits, model.head(z), atol=1e-6)


def test_complete_examples_need_no_prototypes() -> None:
    model, fusion = extended()
    batch = modal_clients(0, (6,), [("image", "text", "audio")])["client-0"].tables[0].batch(torch.arange(6))
    part = {m: batch[m] for m in ("image", "text")}
    before, lacking = model(batch).logits, model(part).logits
    for parameter in fusion.prototypes.values():
        parameter.data.neg_()
    assert torch.equal(model(batch).logits, before)
    assert not torch.equal(model(part).logits, lacking)
    refuses("at least one of image, text, audio, got label", model, {"label": batch["label"]})


def test_a_copy_answers_with_its_own_values() -> None:
    model, _ = extended()
    batch = modal_clients(0, (6,))["client-0"].tables[0].batch(torch.arange(6))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch).logits, model(batch).logits)
    before = model(batch).logits
    twin.get_parameter("head.weight").data.zero_()
    assert twin(batch).logits.abs().max().item() == 0
    assert torch.equal(model(batch).logits, before)


# The federation -------------------------------------------------------------------------------------------------


def test_the_servers_prototypes_are_means_over_all_examples() -> None:
    still = Local(epochs=1, batch_size=7, lr=1e-12, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(PmcmFL(), kind="modalities", noisy=False, local=still, rounds=1)
    records, _, _ = simulated(setup)
    params = records[0].servers["main"].params
    model = setup.model().eval()
    for m in ("image", "text", "audio"):
        features, labels = list[torch.Tensor](), list[torch.Tensor]()
        for name, data in modal_clients(0, (12, 20, 16)).items():
            if m in OWNED[name]:
                rows = data.tables[0].batch(torch.arange(len(data)))
                features.append(type(model).forward(model, {m: rows[m]}).features)
                labels.append(rows["label"])
        sums, counts = class_sums(torch.cat(features), torch.cat(labels), 3)
        wanted = torch.where(counts.unsqueeze(1) > 0, sums / counts.clamp(min=1).unsqueeze(1), 0.0)
        assert torch.allclose(params[f"fusion.prototypes.{m}"].double(), wanted, atol=1e-5)
    assert params["fusion.prototypes.fused"].any(dim=1).all()


def test_a_class_that_nobody_has_keeps_its_prototype() -> None:
    before = {"w": torch.zeros(1), "fusion.prototypes.text": torch.full((2, 3), 7.0)}
    replies = [
        Reply(
            ClientInfo(name, n),
            Message({"w": torch.ones(1), "class_mean/text": mean, "class_count/text": torch.tensor([float(n), 0.0])}),
        )
        for name, n, mean in (("a", 3, torch.ones(2, 3)), ("b", 1, torch.full((2, 3), 5.0)))
    ]
    replies.append(Reply(ClientInfo("c", 1), Message(), "lost"))
    after = PmcmFL().aggregate(ServerState(0, before), replies)
    assert after.params["fusion.prototypes.text"].tolist() == [[2.0] * 3, [7.0] * 3]
    assert after.params["w"].tolist() == [1.0]
    assert after.round == 1


def test_a_client_of_two_examples_and_an_observer() -> None:
    table = modal_clients(3, (6,), [("image", "text", "audio")])["client-0"]
    setup = toy_setup(
        PmcmFL(fusion_weight=0.1, modality_weight=0.1), kind="modalities", clients=modal_clients(0, (2, 9, 9))
    )
    records, _, simulation = simulated(replace(setup, observers={"all": TableData(*table.tables)}))
    assert not any(record.errors for record in records)
    views = simulation.evaluate(records[-1].servers, 3, split="test")
    assert views["unseen"]["all"]["accuracy"][1] == 6
    assert set(views["personal"]) == set(OWNED)
