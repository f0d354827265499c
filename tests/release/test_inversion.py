"""Rebuilding inputs from activations: where it must work, where it cannot, and the figures by hand."""

import pytest
import torch
from torch import Tensor

from confed.federation.protocols import Batch
from confed.privacy.cut import CutPrivacy
from confed.release.probes.inversion import (
    fit_decoder,
    fit_word_probe,
    judge,
    judge_words,
    mean_input,
    questions_as_sets,
    searched,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(count: int, seed: int, regions: int = 3, width: int = 4) -> Tensor:
    return 1.0 + 2.0 * torch.randn(count, regions, width, generator=rng(seed))


MIXING = torch.randn(16, 12, generator=rng(42))
MIXING.requires_grad_(False)


def part(batch: Batch) -> Tensor:
    """A client's part that loses nothing: twelve numbers become sixteen."""
    return torch.tanh(batch["regions"].flatten(1) @ MIXING.T * 0.1)


def test_a_decoder_rebuilds_what_an_injective_part_passes_on() -> None:
    own, truth = inputs(600, 1), inputs(100, 2)
    decoder = fit_decoder(part({"regions": own}), own, rng(3))
    result = judge(decoder(part({"regions": truth})), truth, own.mean(0))
    assert result > 0.9


def test_noise_on_the_activations_takes_it_away() -> None:
    own, truth = inputs(600, 1), inputs(100, 2)
    privacy = CutPrivacy(clip=1.0, noise=4.0)
    seen = privacy.activations(part({"regions": own}), rng(4))
    decoder = fit_decoder(seen, own, rng(3), epochs=20)
    result = judge(decoder(privacy.activations(part({"regions": truth}), rng(5))), truth, own.mean(0))
    assert result < 0.1


def test_the_search_finds_the_input_and_leaves_padding_alone() -> None:
    own, truth = inputs(300, 1), inputs(5, 2).clamp(-4, 6)
    truth[0, 2] = 0
    batch = {"regions": truth, "text": torch.zeros(5, 2, dtype=torch.int64)}
    found = searched(part, batch, part(batch), "regions", own, steps=300, prior=1e-6)
    assert torch.equal(found[0, 2], torch.zeros(4))
    assert judge(found, truth, own.mean(0)) > 0.95
    # Only the shape and the padding of the truth are read.
    masked = {**batch, "regions": torch.where(truth != 0, 1.0, 0.0)}
    assert torch.equal(found, searched(part, masked, part(batch), "regions", own, steps=300, prior=1e-6))


def test_the_search_stays_at_the_mean_where_nothing_is_seen() -> None:
    own = inputs(300, 1)
    batch = {"regions": inputs(4, 2)}
    found = searched(lambda b: 0.0 * b["regions"].flatten(1) + 1.0, batch, torch.ones(4, 12), "regions", own, steps=5)
    torch.testing.assert_close(found, own.mean(0).expand_as(found))


def test_the_figures_by_hand() -> None:
    truth = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])  # the second row is padding
    found = torch.tensor([[[4.0, 3.0], [9.0, 9.0]]])
    result = judge(found, truth, torch.tensor([[1.0, 0.0], [5.0, 5.0]]))
    assert result == pytest.approx(1 - ((1 + 1) / 2) / ((4 + 16) / 2))
    assert judge(truth, truth, truth[0]) == 0  # nothing to explain


def test_the_mean_of_regions_leaves_padding_out() -> None:
    own = torch.tensor([[[2.0, 4.0], [1.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]]])
    assert mean_input(own).tolist() == [[3.0, 2.0], [1.0, 0.0]]
    assert mean_input(own.flatten(1)).tolist() == [3.0, 2.0, 0.5, 0.0]
    assert mean_input(torch.zeros(2, 1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_questions_become_sets_of_words() -> None:
    text = torch.tensor([[1, 5, 6, 5, 2], [1, 7, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    sets = questions_as_sets(text, mask, 8, torch.tensor([0, 1, 2]))
    assert [row.nonzero()[:, 0].tolist() for row in sets] == [[5, 6], [7]]


def test_words_are_found_from_activations_and_counted_by_hand() -> None:
    generator = rng(8)
    words = (torch.rand(400, 10, generator=generator) < torch.linspace(0.1, 0.6, 10)).float()
    hidden = words @ torch.randn(10, 12, generator=generator)
    probe, frequency = fit_word_probe(hidden[:300], words[:300])
    gained, _ = judge_words(probe(hidden[300:]), words[300:], frequency)
    assert gained > 0.2
    torch.testing.assert_close(frequency, words[:300].mean(0))

    scores = torch.tensor([[0.9, 0.1, 0.8, 0.0], [0.0, 0.9, 0.5, 0.1], [1.0, 0.0, 0.0, 0.0]])
    truth = torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert judge_words(scores, truth, torch.tensor([0.1, 0.2, 0.3, 0.4])) == (pytest.approx((1 / 2 + 1) / 2), 2)
    assert judge_words(scores, truth, torch.tensor([0.4, 0.3, 0.2, 0.1])) == (pytest.approx((1 + 2) / 4 - 1 / 2), 2)


def test_the_probe_is_where_the_gradient_of_the_loss_vanishes() -> None:
    generator = rng(9)
    v = torch.randn(60, 2, generator=generator)
    words = (torch.rand(60, 1, generator=generator) < torch.sigmoid(2 * v[:, :1])).float()
    probe, _ = fit_word_probe(v, words, decay=1e-3)
    # Of the standardised problem: mean (p - y) z + 2 decay w = 0 and mean (p - y) = 0.
    p = torch.sigmoid(probe(v))
    z, w = (v - v.mean(0)) / v.std(0, correction=0), probe.weight * v.std(0, correction=0)
    assert float((p - words).mean()) == pytest.approx(0, abs=1e-4)
    torch.testing.assert_close(((p - words) * z).mean(0), -2e-3 * w[0], atol=1e-4, rtol=0)


def test_nothing_depends_on_global_randomness() -> None:
    own = inputs(40, 1)
    results: list[Tensor] = []
    for _ in range(2):
        torch.rand(3)
        results.append(fit_decoder(part({"regions": own}), own, rng(3), epochs=2)(part({"regions": own})))
    assert torch.equal(*results)


def test_without_words_none_are_recovered() -> None:
    assert judge_words(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3)) == (0, 0)
    assert judge(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2)) == 0
