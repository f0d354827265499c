"""Audits of what v_APN and gradients say of answers and pictures: the attacks by their steps, on toys and runs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.protocols import Batch, Output
from confed.privacy.cut import CutPrivacy
from confed.release.probes.answers import (
    SentGradients,
    agreement,
    by_frequency,
    by_known,
    equal_rows,
    expected_groups,
    followed_rows,
    k_means,
    looked_up,
    matched,
    observe,
    observe_gradients,
    score,
)
from confed.release.probes.inversion import (
    fit_decoder,
    fit_word_probe,
    judge,
    judge_words,
    mean_input,
    questions_as_sets,
    searched,
)

COUNTS = (40, 25, 12, 6, 1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dealt(seed: int = 0) -> Tensor:
    labels = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    return labels[torch.randperm(len(labels), generator=rng(seed))]


class Toy(nn.Module):
    """A cut model: two layers, one for inputs and one for answers."""

    def __init__(self, answers: int = 5, seed: int = 0) -> None:
        super().__init__()
        self.mha = nn.Linear(3, 4)
        self.apn = nn.Embedding(answers, 6)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=rng(seed)))

    def cut(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.mha(batch["x"]), self.apn(batch["label"])


def batches(labels: Tensor, size: int = 12) -> list[dict[str, Tensor]]:
    x = torch.randn(len(labels), 3, generator=rng(9))
    return [{"x": a, "label": b} for a, b in zip(x.split(size), labels.split(size), strict=True)]


def test_equal_rows_are_groups_and_their_sizes_name_them() -> None:
    labels, public = dealt(), torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03])
    seen = observe(Toy(), batches(labels))
    assert torch.equal(seen.labels, labels)
    groups = equal_rows(seen.v_apn)
    result = score(by_frequency(groups, public), seen.labels, public, groups)
    assert (result.recovered, result.agreement, result.groups) == (1.0, 1.0, 5)
    assert result.majority == 40 / 84
    assert result.examples == 84


def test_groups_are_named_by_rank() -> None:
    groups = torch.tensor([7, 7, 7, 2, 2, 4, 5])
    public = torch.tensor([1, 9, 4])
    # Sizes 3, 2, 1, 1 meet frequencies 9, 4, 1; the fourth group is named as the most frequent answer.
    assert by_frequency(groups, public).tolist() == [1, 1, 1, 2, 2, 0, 1]
    # By brute force over all one-to-one namings of three groups the likelihood is largest at that one.
    sizes, p = np.array([3, 2, 1]), public.numpy() / 14
    likelihoods = {
        order: float(sum(n * np.log(p[name]) for n, name in zip(sizes, order, strict=True)))
        for order in [(a, b, c) for a in range(3) for b in range(3) for c in range(3) if len({a, b, c}) == 3]
    }
    assert max(likelihoods, key=lambda order: likelihoods[order]) == (1, 2, 0)


def test_known_rows_name_their_groups() -> None:
    groups = torch.tensor([3, 3, 3, 1, 1, 0, 3])
    public = torch.tensor([5, 9, 7, 1])
    # Group 3 is known to be answer 2 (two votes against one); groups 1 and 0 share out answers 1 and 0.
    guesses = by_known(groups, torch.tensor([0, 1, 6]), torch.tensor([2, 2, 0]), public)
    assert guesses.tolist() == [2, 2, 2, 1, 1, 0, 2]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(by_known(groups, nothing, nothing, public), by_frequency(groups, public))
    every = torch.arange(7)
    labels = torch.tensor([1, 1, 1, 0, 0, 3, 1])
    assert torch.equal(by_known(groups, every, labels, public), labels)


def test_rows_are_followed_while_their_network_learns() -> None:
    model, labels = Toy(), dealt()
    drift = torch.randn(model.apn.weight.shape, generator=rng(4))

    def learn(batch: Batch) -> None:
        del batch
        with torch.no_grad():
            model.apn.weight += 0.05 * drift

    seen = observe(model, batches(labels), learn=learn)
    assert agreement(equal_rows(seen.v_apn), labels) < 0.4  # every step has rows of its own
    groups = followed_rows(seen.v_apn, seen.step)
    assert agreement(groups, labels) == 1.0
    public = torch.tensor(COUNTS)
    assert score(by_frequency(groups, public), labels, public, groups).recovered == 1.0


def test_a_row_alone_is_followed_and_a_far_one_is_new() -> None:
    rows = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.5, 0.0], [9.0, 9.0]])
    assert followed_rows(rows, torch.tensor([0, 0, 1, 2])).tolist() == [0, 1, 0, 2]


def test_clustering_finds_groups_behind_small_noise_only() -> None:
    labels, public = dealt(), torch.tensor(COUNTS)
    found = []
    for noise in (0.05, 3.0):
        seen = observe(Toy(), batches(labels), privacy=CutPrivacy(clip=1.0, noise=noise), rng=rng(1))
        assert len(equal_rows(seen.v_apn).unique()) == len(labels)  # no two rows are equal
        groups = k_means(seen.v_apn, 5, rng(2))
        found.append(score(by_frequency(groups, public), labels, public, groups))
    assert found[0].recovered == 1.0
    assert found[1].agreement < 0.1
    assert found[1].recovered < found[1].majority + 0.05


def test_clusters_are_those_of_the_best_partition() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [30.0]])
    groups = k_means(rows, 3, rng())

    def spread(split: tuple[int, ...]) -> float:
        parts = [rows[[i for i, g in enumerate(split) if g == k]].numpy() for k in range(3)]
        return sum(float(((part - part.mean(0)) ** 2).sum()) for part in parts if len(part))

    every = [tuple(int(d) for d in np.base_repr(n, 3).zfill(6)) for n in range(3**6)]
    assert spread(tuple(groups.tolist())) == pytest.approx(min(spread(split) for split in every))
    assert len(k_means(torch.ones(4, 2), 3, rng()).unique()) == 1


def test_as_many_groups_are_expected_as_a_draw_has_on_average() -> None:
    public = torch.tensor([6, 3, 1, 0])
    drawn = np.random.default_rng(0).choice(4, (4000, 5), p=public.numpy() / 10)
    mean = np.mean([len(set(row)) for row in drawn.tolist()])
    assert expected_groups(public, 5) == round(float(mean))
    assert expected_groups(public, 10_000) == 3
    assert expected_groups(torch.zeros(3), 4) == 1


def test_lookup_weighs_the_distance_against_the_frequency() -> None:
    table, rows = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.4], [0.8], [1.6]])
    public = torch.tensor([1, 98])
    assert looked_up(rows, table, 0.0, public).tolist() == [0, 1, 1]
    # N(row; mean, s) p, worked out with the density itself.
    s, p = 1.0, (public.numpy() + 1) / 101
    posterior = [[p[c] * np.exp(-((float(r) - c) ** 2) / (2 * s**2)) for c in range(2)] for r in rows]
    assert looked_up(rows, table, s, public).tolist() == [int(np.argmax(row)) for row in posterior] == [1, 1, 1]


def test_answers_sent_once_leave_nothing_to_count() -> None:
    labels = dealt()
    seen = observe(Toy(), batches(labels), privacy=CutPrivacy(distinct=True))
    for step in seen.step.unique():
        assert len(seen.labels[seen.step == step].unique()) == int((seen.step == step).sum())
    assert len(seen.labels) < len(labels) / 2  # what it costs
    # A batch in which one row is left has no negatives, and is not sent.
    mixed = torch.tensor([3, 3, 3, 0, 1, 1])
    sent = observe(Toy(), batches(mixed, 3), privacy=CutPrivacy(distinct=True))
    assert sent.labels.tolist() == [0, 1]
    assert sent.step.tolist() == [1, 1]


def test_agreement_is_the_adjusted_rand_index() -> None:
    a, b = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 2])
    together = [(i, j) for i in range(6) for j in range(i)]
    both = sum(bool(a[i] == a[j] and b[i] == b[j]) for i, j in together)
    ones, others = (sum(bool(x[i] == x[j]) for i, j in together) for x in (a, b))
    expected = ones * others / 15
    assert agreement(a, b) == pytest.approx((both - expected) / ((ones + others) / 2 - expected))
    assert agreement(a, 5 - a) == 1.0
    assert agreement(a[:1], b[:1]) == 1.0


ANSWERS, WIDTH = 5, 4


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.middle, self.top = nn.Linear(3, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, ANSWERS)

    def forward(self, batch: Batch) -> Output:
        z = self.middle(self.bottom(batch["x"]))
        return Output(self.top(z), z)


def _loss(output: Output, batch: Batch) -> Tensor:
    return functional.cross_entropy(output.logits, batch["label"])


def _batches(sizes: tuple[int, ...] = (6, 3)) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, 3, generator=rng), "label": torch.arange(n) % ANSWERS} for n in sizes]


def test_rows_are_those_of_the_formula() -> None:
    model, batches = _Model(), _batches()
    seen = observe_gradients(model, model.top, _loss, batches)
    expected: list[Tensor] = []
    for batch in batches:
        with torch.no_grad():
            z = model.middle(model.bottom(batch["x"]))
            wrong = model.top(z).softmax(1) - functional.one_hot(batch["label"], ANSWERS)
            expected.append(wrong @ model.top.weight / len(z))
    torch.testing.assert_close(seen.rows, torch.cat(expected))
    assert seen.labels.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    torch.testing.assert_close(seen.directions.norm(dim=1), torch.ones(9))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_are_clipped_and_noised_as_they_are_sent() -> None:
    model = _Model()
    clipped = observe_gradients(model, model.top, _loss, _batches(), privacy=CutPrivacy(gradient_clip=1e-3))
    assert float(clipped.rows.norm(dim=1).max()) <= 1e-3 * (1 + 1e-5)
    guard = CutPrivacy(gradient_clip=1e-3, gradient_noise=2.0)
    noised = observe_gradients(model, model.top, _loss, _batches((400,)), privacy=guard)
    assert math.isclose(float(noised.rows.std()), 2e-3, rel_tol=0.1)


def test_activations_are_noised_before_the_server_reads_them() -> None:
    model, batches = _Model(), _batches((400,))
    released = observe_gradients(model, model.top, _loss, batches, middle=model.middle, privacy=CutPrivacy(clip=1e-6))
    with torch.no_grad():
        # Rows of length one millionth: the server's layer answers with its bias alone.
        torch.testing.assert_close(released.z, model.middle.bias.expand(400, -1), atol=1e-5, rtol=0)
    guard = CutPrivacy(clip=1.0, noise=4.0)
    noised = observe_gradients(model, model.top, _loss, batches, middle=model.middle, privacy=guard)
    plain = observe_gradients(model, model.top, _loss, batches, middle=model.middle)
    expected = 4.0 * model.middle.weight.detach().norm(dim=1).mean()
    assert math.isclose(float((noised.z - plain.z).std(0).mean()), float(expected), rel_tol=0.1)
    assert not torch.allclose(noised.rows, plain.rows)


def test_who_knows_the_last_layers_finds_every_answer() -> None:
    model = _Model()
    seen = observe_gradients(model, model.top, _loss, _batches((64,)))
    assert torch.equal(matched(seen, model.top, _loss, ANSWERS), seen.labels)
    clipped = SentGradients(seen.rows * 1e-3, seen.z, seen.labels)
    assert torch.equal(matched(clipped, model.top, _loss, ANSWERS), seen.labels)


def test_learning_goes_on_after_the_rows_were_recorded() -> None:
    model, steps = _Model(), list[int]()
    observe_gradients(model, model.top, _loss, _batches(), learn=lambda batch: steps.append(len(batch["label"])))
    assert steps == [6, 3]


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
