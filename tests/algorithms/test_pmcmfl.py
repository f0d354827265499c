"""PmcmFL: prototypes as means over everybody's examples, what they stand in for, and the contrast by hand."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from confed.algorithms.pmcmfl import PmcmFL
from confed.data.examples import TableData
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.state import ServerState
from confed.losses.prototypes import class_sums, likeness, prototype_contrast
from confed.testing.toy import OWNED, modal_clients, toy_setup
from refusals import refuses
from toy_runs import simulated

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
