"""The audit of what v_APN says about answers: each step of the attack by itself, and on a toy that is cut in two."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch
from confed.privacy.cut import CutPrivacy
from confed.release.probes.answers import (
    agreement,
    by_frequency,
    by_known,
    equal_rows,
    expected_groups,
    followed_rows,
    k_means,
    looked_up,
    observe,
    score,
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
