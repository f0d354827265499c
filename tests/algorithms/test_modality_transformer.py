"""The multimodal personalised Transformer and modality dropout: identities that hold to the bit, and draws."""

from dataclasses import replace

import pytest
import torch

from confed.algorithms.modality_dropout import ModalityDropout, kept
from confed.algorithms.modality_transformer import ModalityTransformer
from confed.data.examples import TableData
from confed.federation.local import Local
from confed.testing.toy import modal_clients, toy_setup
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
    with pytest.raises(ValueError, match="rate must lie"):
        ModalityDropout(rate=1.0)


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
