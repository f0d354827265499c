"""Few-shot classification: shots, base and new classes, partitions, what is offered, refusals."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from confed.data.encode import encode
from confed.data.examples import FederatedDataset
from confed.data.few_shot import NEW, ClassPool, few_shot, harmonic_mean
from confed.models.tokenizer import WordTokenizer
from refusals import refuses

CLASSES = ("ant", "bee", "cow", "dog", "elk", "fox")


def pool(train: int = 60, test: int = 10, domains: tuple[str, ...] = ()) -> ClassPool:
    """As many pictures of each class, dealt round the domains in turn."""
    each = train + test
    labels = np.repeat(np.arange(6), each)
    roles = np.array((["train"] * train + ["test"] * test) * 6)
    where = np.array([domains[i % len(domains)] for i in range(len(labels))]) if domains else None
    names = [f"{i}" for i in range(len(labels))]
    return ClassPool("some", CLASSES, np.zeros((len(labels), 2, 2, 3), np.uint8), labels, roles, names, where)


def trained(dataset: FederatedDataset) -> dict[str, Counter[str]]:
    return {client: Counter(split.train.answers) for client, split in dataset.clients.items()}


def test_shots_are_of_base_classes_and_new_ones_are_asked_apart() -> None:
    dataset = few_shot(pool(), "iid", shots=4, validation_shots=2, clients=3)
    assert sum(trained(dataset).values(), Counter()) == dict.fromkeys(CLASSES[:3], 12)
    assert sum(len(split.validation) for split in dataset.clients.values()) == 3 * 2 * 3
    assert set(dataset.unseen[NEW].answers) == set(CLASSES[3:])
    assert dataset.unseen[NEW].offered == CLASSES[3:]
    assert all(split.test.offered == CLASSES[:3] for split in dataset.clients.values())


def test_seed_draws_other_shots_and_the_same_tests() -> None:
    one, same, other = (few_shot(pool(), "classes", shots=4, clients=3, seed=seed) for seed in (0, 0, 1))
    names = [d.clients["client-01"].train.names for d in (one, same, other)]
    assert names[0] == names[1] != names[2]
    assert one.clients["client-01"].test.names == other.clients["client-01"].test.names


def test_each_client_is_asked_among_classes_of_its_own() -> None:
    dataset = few_shot(pool(), "classes", shots=4, new="none", offer="own", clients=3)
    assert [set(own) for own in trained(dataset).values()] == [{"ant", "bee"}, {"cow", "dog"}, {"elk", "fox"}]
    assert [split.test.offered for split in dataset.clients.values()] == [CLASSES[:2], CLASSES[2:4], CLASSES[4:]]
    assert all(set(split.test.answers) == set(split.test.offered) for split in dataset.clients.values())


def test_domains_are_clients_with_the_shots_of_every_class() -> None:
    dataset = few_shot(pool(domains=("a", "b", "c")), "domain", shots=5, unseen=("c",))
    assert trained(dataset) == {d: dict.fromkeys(CLASSES[:3], 5) for d in ("a", "b")}
    assert set(dataset.unseen) == {"c", NEW}
    assert set(dataset.unseen["c"].types) == {"c"}
    assert "c" not in dataset.unseen[NEW].types


def test_dirichlet_skews_classes_between_clients() -> None:
    dataset = few_shot(pool(200), "dirichlet", shots=30, clients=3, alpha=0.1)
    shares = np.array([[own[name] for name in CLASSES[:3]] for own in trained(dataset).values()], dtype=float)
    assert shares.sum() == 3 * 3 * 30
    assert (shares / shares.sum(1, keepdims=True)).max(1).mean() > 0.6  # 1/3 without skew


def test_offered_classes_become_a_column() -> None:
    part = few_shot(pool(), "iid", clients=2).unseen[NEW]
    table = encode(part, WordTokenizer(["what", "is", "it"]), CLASSES, ("class",))
    assert torch.equal(table.columns["offered"][0], torch.tensor([False] * 3 + [True] * 3))
    with pytest.raises(ValueError, match="is not among the 1 that are offered"):
        encode(replace(part, offered=("ant",)), WordTokenizer(["what"]), CLASSES, ("class",))
    with pytest.raises(ValueError, match="'yak' is offered and is not in the vocabulary"):
        encode(replace(part, offered=("yak",)), WordTokenizer(["what"]), CLASSES, ("class",))


def test_harmonic_mean_of_accuracies() -> None:
    assert harmonic_mean(0.75, 0.25) == pytest.approx(0.375)
    assert harmonic_mean(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": 40}, r"class 'ant' has 60 examples to draw from, and 4 x \(40 \+ 4\) shots"),
        ({"partition": "classes", "clients": 4}, "at most the 3 base classes"),
        ({"partition": "domain"}, "needs domains"),
        ({"unseen": ("x",)}, "unseen must be distinct names out of none, got .'x'"),
    ],
)
def test_bad_options_say_what_was_expected(options: dict[str, Any], message: str) -> None:
    refuses(message, few_shot, pool(), **{"partition": "iid", **options})


def test_classes_without_tests_or_with_one_name_are_refused() -> None:
    bare = pool()
    bare.roles[bare.labels == 4] = "train"
    refuses("class 'elk' has no test example", few_shot, bare, "iid")
    refuses("got 'ant' twice", few_shot, replace(pool(), classes=("ant", "ant", *CLASSES[2:])), "iid")


def test_base_classes_that_nobody_can_learn_are_refused() -> None:
    missing = pool()
    missing.roles[(missing.labels == 1) & (missing.roles == "train")] = "test"
    refuses(r"base class 'bee' has no training example \(1 of 3\)", few_shot, missing, "iid", shots=None)
    strangers = pool()
    strangers.roles[(strangers.labels < 3) & (strangers.roles == "train")] = "test"
    refuses("no class is both trained on and tested", few_shot, strangers, "iid", shots=None)
    refuses("class number 2 has no name", few_shot, replace(pool(), classes=("ant", "bee", " ", *CLASSES[3:])), "iid")


def test_clients_tested_on_what_they_did_not_learn_are_named() -> None:
    domains = pool(domains=("photo", "sketch"))
    here = (domains.domains == "sketch") & (domains.labels == 0) & (domains.roles == "train")  # type: ignore[operator]
    domains.roles[here] = "test"
    facts = few_shot(domains, "domain", shots=None).facts
    assert facts["not learned"].startswith("1 of 2 clients are tested on classes of which they have no example")
    assert facts["not learned"].endswith("at most 1 (sketch: ant)")
    assert "not learned" not in few_shot(pool(), "iid").facts
