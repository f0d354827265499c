"""Partitions: disjoint, covering, deterministic, whole groups; splits that do not leak."""

import numpy as np
import pytest

from confed.data.examples import Examples, Split
from confed.data.federate import Pool, federate, floors, words
from confed.data.options import Options
from confed.data.partitions import by_key, dirichlet, hold_out, iid, mirror, quantity
from refusals import refuses


def _rng(seed=0):
    return np.random.default_rng(seed)


N = 600
GROUPS = _rng(1).integers(0, 150, N)
LABELS = np.array(list("abcde"))[_rng(2).integers(0, 5, N)]
DEALS = {
    "iid": lambda rng, groups: iid(N, 4, rng, groups=groups),
    "dirichlet": lambda rng, groups: dirichlet(LABELS, 4, 0.5, rng, groups=groups),
    "quantity": lambda rng, groups: quantity(N, 4, rng, 1.0, groups=groups),
}


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["rows", "groups"])
@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS.keys())
def test_disjoint_covering_deterministic_and_whole_groups(deal, groups):
    owners = deal(_rng(7), groups)
    assert list(owners) == [f"client-{k:02d}" for k in range(4)]
    np.testing.assert_array_equal(np.sort(np.concatenate(list(owners.values()))), np.arange(N))
    again = deal(_rng(7), groups)
    assert all(np.array_equal(owners[name], again[name]) for name in owners)
    assert any(not np.array_equal(owners[name], own) for name, own in deal(_rng(8), groups).items())
    if groups is not None:
        sets = [set(groups[own]) for own in owners.values()]
        assert sum(map(len, sets)) == len(set(groups))


def test_iid_sizes_differ_by_one():
    assert sorted(map(len, iid(10, 4, _rng()).values())) == [2, 2, 3, 3]


def _skew(alpha):
    """Mean share of a client's commonest label, over clients and draws."""
    shares = []
    for seed in range(10):
        for own in dirichlet(LABELS, 4, alpha, _rng(seed)).values():
            shares.append(np.unique(LABELS[own], return_counts=True)[1].max() / len(own))
    return np.mean(shares)


def test_dirichlet_concentration_and_minimum():
    assert _skew(100.0) < 0.3
    assert _skew(0.1) > 0.5
    assert min(map(len, dirichlet(LABELS, 10, 0.1, _rng(3), minimum=10).values())) >= 10


def test_dirichlet_full_clients_get_no_more():
    # At a very small alpha one client takes all of the first class, half of the rows: it is full and gets
    # nothing of the second.
    owners = dirichlet(["a"] * 100 + ["b"] * 100, 2, 1e-3, _rng(0), minimum=1)
    assert sorted(len(own) for own in owners.values()) == [100, 100]


def test_dirichlet_group_class_is_its_rarest_label():
    # Every group has one "yes" and one rare label: the rare one decides, and a tiny alpha separates those.
    labels = np.array([answer for rare in ("r", "s") for _ in range(50) for answer in ("yes", rare)])
    owners = dirichlet(labels, 2, 1e-3, _rng(0), groups=np.repeat(np.arange(100), 2))
    assert {frozenset(labels[own]) for own in owners.values()} == {
        frozenset({"yes", "r"}),
        frozenset({"yes", "s"}),
    }


def test_sizes_of_quantity_skew_spread_with_sigma():
    assert {len(own) for own in quantity(400, 4, _rng(), 0.0).values()} == {100}
    sizes = [len(own) for own in quantity(2000, 8, _rng(), 1.5).values()]
    assert min(sizes) >= 64
    assert max(sizes) > 3 * min(sizes)


def test_mirror_follows_label_shares():
    owners = {"x": np.arange(0, 90), "y": np.arange(90, 200)}
    labels = np.array(["a"] * 60 + ["b"] * 60 + ["a"] * 40 + ["b"] * 40)  # x: 60 a, 30 b; y: 40 a, 70 b
    other = np.array(["a"] * 50 + ["b"] * 50)
    second = mirror(owners, labels, other, _rng())
    assert sorted(np.concatenate(list(second.values()))) == list(range(100))
    assert [int((other[second[name]] == "a").sum()) for name in "xy"] == [30, 20]
    assert [int((other[second[name]] == "b").sum()) for name in "xy"] == [15, 35]


def test_mirror_leaves_no_client_empty():
    owners = {"x": np.arange(99), "y": np.array([99])}
    second = mirror(owners, ["a"] * 100, ["a"] * 3 + ["new"], _rng())
    assert min(map(len, second.values())) >= 1


def test_rows_of_a_key_are_one_client():
    assert {key: own.tolist() for key, own in by_key(["b", "a", "b"]).items()} == {"a": [1], "b": [0, 2]}


def test_groups_are_held_out_as_a_whole():
    mask = hold_out(np.repeat(np.arange(10), 3), 0.2, _rng())
    assert mask.sum() == 6
    assert not hold_out([1, 1, 1], 0.9, _rng()).any()  # the only group stays in training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(5, 6, _rng()), "6 clients need more than the 5"),
        (lambda: iid(5, 3, _rng(), groups=[1, 1, 2, 2, 2]), "3 clients need more than the 2"),
        (lambda: iid(5, 2, _rng(), groups=[1]), "one entry per row"),
        (lambda: dirichlet(LABELS[:30], 4, 1.0, _rng()), "more than the 30"),
        (lambda: dirichlet(["a"] * 40, 4, 1e-3, _rng()), "raise alpha"),
        (lambda: quantity(100, 2, _rng(), 1.0), "more than the 100"),
    ],
)
def test_partitions_with_bad_options_are_refused(call, message):
    refuses(message, call)


@pytest.fixture(scope="module")
def pool():
    """120 pictures of 8 questions: 90 of train, 30 of test; scenes x, y, z; two types on every picture."""
    image = np.repeat(np.arange(120), 8)
    rows = np.arange(len(image))
    examples = Examples(
        np.zeros((120, 2, 2, 3), dtype=np.uint8),
        image,
        [f"is it {i % 4}?" for i in rows],
        [("yes", "no", "maybe")[(i // 8 + i % 2) % 3] for i in rows],
        [("a", "b")[i % 2] for i in rows],
        [f"n{i}" for i in rows],
    )
    scenes = np.array(["x", "y", "z"])[image % 3]
    return Pool(
        examples,
        np.where(image < 90, "train", "test"),
        scenes,
        {"scene": scenes, "type": np.array(examples.types)},
    )


def _pictures(examples):
    return set(np.asarray(examples.image_index).tolist())


@pytest.mark.parametrize("partition", ["scene", "type", "iid", "dirichlet", "quantity"])
def test_federate_does_not_leak(pool, partition):
    limits = {"validation": 0.2, "max_train": 80, "max_test": 20, "clients": 3}
    splits, tests = federate(pool, Options(partition=partition, unseen=("z",), **limits))
    again, tests_again = federate(pool, Options(partition=partition, unseen=("z",), seed=1, **limits))
    train = set().union(*(_pictures(split.train) for split in splits.values()))
    held = set().union(*(_pictures(split.validation) for split in splits.values()))
    assert train
    assert held
    assert not train & held
    assert max(train | held) < 90 <= min(_pictures(tests["z"]))
    assert {image % 3 for image in train | held} == {0, 1}
    assert {image % 3 for image in _pictures(tests["z"])} == {2}
    for split in splits.values():
        assert 0 < len(split.train) <= 80
        assert 0 < len(split.test) <= 20
        assert min(_pictures(split.test)) >= 90
        assert split.train.images is pool.examples.images
    if partition != "type":
        own = [_pictures(split.train) | _pictures(split.validation) for split in splits.values()]
        assert sum(map(len, own)) == len(set().union(*own))
    assert [s.test.names for s in splits.values()] == [s.test.names for s in again.values()]
    assert tests["z"].names == tests_again["z"].names
    assert [s.train.names for s in splits.values()] != [s.train.names for s in again.values()]


def test_federate_keeps_quantity_skew_under_the_cap(pool):
    free, _ = federate(pool, Options(partition="quantity", unseen=(), clients=3, sigma=1.0))
    capped, _ = federate(pool, Options(partition="quantity", unseen=(), clients=3, sigma=1.0, max_train=150))
    largest = max(len(split.train) for split in free.values())
    for name, split in capped.items():
        assert len(split.train) == max(64, round(len(free[name].train) * 150 / largest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": "colour"}, "partition must be one of scene, type, iid.*'colour'"),
        ({"unseen": ("w",)}, "unseen must be distinct names out of x, y, z"),
        ({"unseen": "z"}, "unseen must be distinct names"),
        ({"unseen": ("x", "y", "z")}, "no training example is left"),
        ({"max_train": 0}, "max_train must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative"),
        ({"validation": -0.1}, "validation"),
    ],
)
def test_federate_with_bad_options_is_refused(pool, change, message):
    with pytest.raises(ValueError, match=message):
        federate(pool, Options(**{"partition": "scene", "unseen": ("z",), **change}))


def test_floors_equal_a_computation_by_hand():
    def part(*pairs):
        images = np.zeros((1, 1, 1, 3), dtype=np.uint8)
        n = len(pairs)
        questions, answers = [q for q, _ in pairs], [a for _, a in pairs]
        return Examples(images, np.zeros(n, dtype=np.int64), questions, answers, ["t"] * n, ["n"] * n)

    left = Split(part(("q", "yes"), ("q", "yes"), ("r", "no")), part(), part(("q", "yes"), ("r", "no")))
    right = Split(part(("q", "no"), ("r", "no")), part(), part(("q", "no"), ("new", "no")))
    facts = floors({"left": left, "right": right})
    # All clients: majority no (3 of 5), q -> yes (2 of 3), r -> no.
    # Own: left majority yes, q -> yes, r -> no; right always no.
    assert facts["majority floor"] == "0.750 (one for all clients), 0.750 (one each)"
    assert facts["question-only floor"] == "0.750 (one for all clients), 1.000 (one each)"
    assert facts["counts"] == "2 clients; 5 train, 0 validation, 4 test"


def test_words_are_lower_case_and_sorted():
    assert words(["Is it RED?", "don't, is it 3?"]) == ("3", "don't", "is", "it", "red")
