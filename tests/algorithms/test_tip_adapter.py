"""Tip-Adapter on the toy model: votes against a loop, sums against pooled examples, what travels, refusals."""

import math
from typing import Any

import pytest
import torch

from confed.algorithms.tip_adapter import KEYS, SUMS, TipAdapter, cached, votes
from confed.testing.toy import toy_clients, toy_setup
from confed.testing.trial import run

RNG = torch.Generator().manual_seed(5)


def pooled(setup: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of all clients' training examples."""
    model: Any = setup.model().eval()
    parts = [b for d in toy_clients().values() for b in d.train(8, torch.Generator().manual_seed(0))]
    with torch.no_grad():
        return torch.cat([model.image_features(b) for b in parts]), torch.cat([b["label"] for b in parts])


def test_votes_are_sums_over_keys_and_zeros_have_none() -> None:
    features = torch.nn.functional.normalize(torch.randn(4, 5, generator=RNG), dim=1)
    keys = torch.nn.functional.normalize(torch.randn(3, 2, 5, generator=RNG), dim=2)
    keys[1, 1] = 0.0
    found = votes(features, keys, 2.0)
    for b in range(4):
        for k in range(3):
            near = [float(features[b] @ key) for key in keys[k] if key.any()]
            assert float(found[b, k]) == pytest.approx(sum(math.exp(-2.0 * (1 - n)) for n in near), rel=1e-5)


def test_a_cache_keeps_the_first_shots_of_each_class() -> None:
    features = torch.arange(1.0, 7.0).unsqueeze(1)
    keys = cached(features, torch.tensor([2, 0, 2, 2, 0, 2]), 3, 3)
    assert keys[..., 0].tolist() == [[2, 5, 0], [0, 0, 0], [1, 3, 4]]


def test_global_cache_is_that_of_pooled_examples() -> None:
    setup = toy_setup(TipAdapter(alpha=3.0, beta=2.0), rounds=1)
    outcome = run(setup)
    features, labels = pooled(setup)
    sums = torch.stack([features[labels == c].sum(0) for c in range(3)]) / len(features)
    torch.testing.assert_close(outcome.servers["main"].params[SUMS], sums)

    model: Any = setup.model().eval()
    model.load_state_dict({SUMS: sums}, strict=False)
    x = torch.randn(4, 6, generator=RNG)
    with torch.no_grad():
        seen = model.image_features({"x": x})
        means = sums / sums.norm(dim=1, keepdim=True)
        wanted = 5 * seen @ model.handwritten_features(torch.arange(3)).T
        wanted = wanted + 3.0 * (-2.0 * (1 - seen @ means.T)).exp()
        found = setup.algorithm.deployed_model(model)({"x": x}).logits
    torch.testing.assert_close(found, wanted)

    own = torch.nn.functional.normalize(torch.randn(3, 16, 4, generator=RNG), dim=2)
    model.load_state_dict({KEYS: own}, strict=False)
    with torch.no_grad():
        found = setup.algorithm.deployed_model(model)({"x": x}).logits
    near = torch.stack([(-2.0 * (1 - seen @ keys.T)).exp().sum(1) for keys in own], 1)
    torch.testing.assert_close(found, wanted + 3.0 * near)


def test_single_features_stay_at_the_client() -> None:
    setup = toy_setup(TipAdapter(shots=2), rounds=2)
    outcome = run(setup)
    sent = [reply.message.tensors for _, call, reply in outcome.replies if call.action == "fit"]
    assert all(set(tensors) == {SUMS} for tensors in sent)
    features, _ = pooled(setup)
    for state in outcome.states.values():
        keys = state.tensors["private"][KEYS]
        assert keys.shape == (3, 2, 4)
        own = keys[keys.square().sum(-1) > 0]
        assert len(own)
        assert (own @ features.T).amax(1).min() > 1 - 1e-6


def test_new_places_have_no_keys_of_their_own() -> None:
    setup = toy_setup(TipAdapter(shots=2), rounds=1)
    given = setup.algorithm.initial_private(run(setup).servers["main"].params)
    assert given[KEYS].shape == (3, 2, 4)
    assert not given[KEYS].any()
