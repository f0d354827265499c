"""FedAvg per modality with late fusion: each network learns as if the other modalities were not there."""

import pytest
import torch

from confed.algorithms.late_fusion import LateFusionFedAvg
from confed.federation.local import Local
from confed.federation.ownership import modalities_of, restricted
from confed.models.late_fusion import LateFusion, late_fusion_mini
from confed.testing.toy import toy_setup
from modal_batches import modal_batch
from toy_runs import simulated

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
