"""Rows with several labels dealt to clients: disjoint, covering, deterministic, and skewed as promised."""

import numpy as np
import pytest

from confed.data.partitions import dirichlet, draw_preferences, label_sets, label_skew, users_within
from refusals import refuses

N, C = 900, 6
_RNG = np.random.default_rng(5)
HOT = _RNG.random((N, C)) < np.array([0.5, 0.4, 0.3, 0.2, 0.1, 0.02])
OFFSETS = np.concatenate([[0], np.cumsum(HOT.sum(axis=1))])
VALUES = np.nonzero(HOT)[1].astype(np.int32)
GROUPS = _RNG.integers(0, 400, N)


def _rng(seed=0):
    return np.random.default_rng(seed)


def _skewed(rng, groups=None, alpha=0.3, clients=5):
    return label_skew(OFFSETS, VALUES, draw_preferences(C, clients, alpha, _rng(9)), rng, groups=groups)


DEALS = {
    "sets": lambda rng, groups: dirichlet(label_sets(OFFSETS, VALUES, 10), 5, 0.3, rng, groups=groups),
    "skew": _skewed,
}


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["rows", "groups"])
@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS.keys())
def test_disjoint_covering_deterministic_and_whole_groups(deal, groups):
    owners = deal(_rng(7), groups)
    np.testing.assert_array_equal(np.sort(np.concatenate(list(owners.values()))), np.arange(N))
    again = deal(_rng(7), groups)
    assert all(np.array_equal(owners[name], again[name]) for name in owners)
    assert any(not np.array_equal(owners[name], own) for name, own in deal(_rng(8), groups).items())
    assert all((np.diff(own) > 0).all() for own in owners.values())
    if groups is not None:
        assert sum(len(set(groups[own])) for own in owners.values()) == len(set(groups))


def test_rare_sets_count_as_their_rarest_label():
    # Rows {0,1} {0,1} {0,2} {1} {} : label 0 three times, 1 three times, 2 once.
    offsets, values = np.array([0, 2, 4, 6, 7, 7]), np.array([0, 1, 0, 1, 0, 2, 1])
    assert label_sets(offsets, values).tolist() == ["0 1", "0 1", "0 2", "1", ""]
    assert label_sets(offsets, values, 2).tolist() == ["0 1", "0 1", "2", "1", ""]
    # With equal frequencies, the lower number.
    assert label_sets(offsets, values, 3).tolist() == ["0", "0", "2", "1", ""]


def _spread(owners):
    """Standard deviation over clients of each label's frequency, mean over the labels."""
    return np.std([HOT[own].mean(axis=0) for own in owners.values()], axis=0).mean()


def test_small_alpha_skews_and_a_large_one_does_not():
    for deal in (
        lambda alpha: _skewed(_rng(1), alpha=alpha),
        lambda alpha: dirichlet(label_sets(OFFSETS, VALUES, 10), 5, alpha, _rng(1)),
    ):
        assert _spread(deal(0.2)) > 2 * _spread(deal(1e6))


def test_skew_follows_the_preferences():
    # Label 0 belongs to client 0, label 1 to client 1, the others to client 2: probabilities by hand.
    preferences = np.zeros((3, C))
    preferences[0, 0] = preferences[1, 1] = 1
    preferences[2, 2:] = 1
    owners = label_skew(OFFSETS, VALUES, preferences, _rng(2))
    owner = np.empty(N, dtype=int)
    for number, own in enumerate(owners.values()):
        owner[own] = number
    alone = HOT.sum(axis=1) == 1
    assert (owner[alone & HOT[:, 0]] == 0).all()
    assert (owner[alone & HOT[:, 1]] == 1).all()
    both = HOT[:, 0] & HOT[:, 1] & (HOT.sum(axis=1) == 2)
    assert not (owner[both] == 2).any()
    assert abs((owner[both] == 0).mean() - 0.5) < 3 * 0.5 / np.sqrt(both.sum())
    none = ~HOT.any(axis=1)
    assert abs((owner[none] == 2).mean() - 1 / 3) < 3 * 0.48 / np.sqrt(none.sum())


def test_preferences_sum_to_one():
    drawn = draw_preferences(4, 7, 0.5, _rng())
    assert drawn.shape == (7, 4)
    np.testing.assert_allclose(drawn.sum(axis=0), 1)


def test_users_have_few_rows_of_one_scene():
    scenes = np.repeat(["city", "sea"], [700, 200])
    owners = users_within(scenes, _rng(), median=4, sigma=1.0, largest=20)
    np.testing.assert_array_equal(np.sort(np.concatenate(list(owners.values()))), np.arange(900))
    for name, own in owners.items():
        assert set(scenes[own]) == {name.rsplit("-", 1)[0]}
    sizes = np.array([len(own) for own in owners.values()])
    assert (sizes.min() >= 1, sizes.max() <= 20) == (True, True)
    assert 3 <= np.median(sizes) <= 5
    assert {len(own) for own in users_within(scenes, _rng(), median=4, sigma=0.0).values()} == {4}


def test_options_out_of_range_are_refused():
    refuses(r"groups must have one entry per row \(900\), got 3", _skewed, _rng(), groups=[1, 2, 3])
    with pytest.raises(ValueError, match="more than the 900 that are shared out"):
        label_skew(OFFSETS, VALUES, draw_preferences(C, 10, 1.0, _rng()), _rng(), 100)
    refuses("no draw out of", label_skew, OFFSETS, VALUES, np.repeat([[1.0], [0.0]], C, axis=1), _rng(), 450)
