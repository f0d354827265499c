"""The built-in multi-label data: labels against loops over words, who has what, and its recipes."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from confed.data.examples import Examples, FederatedDataset
from confed.datasets.scene_labels import (
    COARSE,
    COARSE_OF,
    DRAWING_STYLES,
    FINE,
    THINGS,
    draw_graphs,
    fine_labels,
    scene_labels,
)
from confed.datasets.scenes.graph import COLOURS, NOUNS, ROLES, Tags, fingerprint, objects
from confed.models.ctran import ctran_mini
from confed.models.label_embeddings import load_label_embeddings, write_mini_label_embeddings
from confed.models.pretrained import weights_file
from confed.recipes.recipe import load_recipe
from refusals import refuses

SMALL: dict[str, Any] = {"clients": 8, "train": 10, "validation": 3, "test": 4, "unseen": 6}
EVERYTHING = np.ones(len(NOUNS))


@pytest.fixture(scope="module")
def small() -> FederatedDataset:
    return scene_labels(**SMALL)


def said(tags: Tags, picture: int) -> set[str]:
    """A picture's fine labels, by walking through its things in words."""
    things = objects(tags, picture)
    found = {f"{thing.colour} {thing.noun}" for thing in things}
    for first in things:
        for second in things:
            if second.cell == first.cell + 1 and first.cell % 4 < 3:
                found.add(f"{first.noun} left of {second.noun}")
            if second.cell == first.cell + 4:
                found.add(f"{first.noun} on top of {second.noun}")
    return found & set(FINE)


def test_each_of_eighty_fine_labels_has_one_coarse_label():
    assert len(FINE) == len(set(FINE)) == 80
    assert len(COARSE) == 24
    assert set(COARSE_OF) == set(FINE)
    assert Counter(COARSE_OF.values()) == {**dict.fromkeys(NOUNS, 3), "on top of": 7, "left of": 7}
    assert COARSE_OF["red ball"] == "ball"
    assert COARSE_OF["cat on top of chair"] == "on top of"
    assert set(THINGS) == set(NOUNS)
    assert all(len(set(own)) == 3 and set(own) <= set(COLOURS) for own in THINGS.values())


def test_labels_are_what_a_walk_through_the_graph_finds():
    tags = draw_graphs("train", 300, EVERYTHING, np.random.default_rng(0), set())
    truth = fine_labels(tags)
    for picture in range(300):
        assert {FINE[number] for number in np.flatnonzero(truth[picture])} == said(tags, picture)
    # A thing has its three colours only: every coloured thing of a picture is a label.
    for picture in range(50):
        assert {f"{thing.colour} {thing.noun}" for thing in objects(tags, picture)} <= set(FINE)


def test_roles_never_share_a_picture_and_none_is_public():
    seen: set[int] = set()
    marks = {}
    for role in ("train", "validation", "test"):
        tags = draw_graphs(role, 60, EVERYTHING, np.random.default_rng(1), seen)
        marks[role] = set(fingerprint(tags).tolist())
        assert {mark % 16 for mark in marks[role]} <= set(ROLES[role])
        assert len(marks[role]) == 60
        assert all(3 <= len(objects(tags, picture)) <= 8 for picture in range(60))
    assert seen == marks["train"] | marks["validation"] | marks["test"]


def test_labels_have_a_long_tail_and_depend_on_each_other():
    tags = draw_graphs("train", 3000, EVERYTHING, np.random.default_rng(2), set())
    truth = fine_labels(tags)
    share = np.sort(truth.mean(axis=0))
    assert share[-1] > 0.3
    assert 0 < share[0] < 0.01
    assert np.median(share) < 0.05
    first, second = truth[:, FINE.index("red car")], truth[:, FINE.index("yellow bus")]
    assert (first & second).mean() > 1.3 * first.mean() * second.mean()


def test_the_table_has_the_rows_of_one_client_after_another(small: FederatedDataset):
    first = small.clients["transport-01"].train
    table = first.labels.table
    assert [*small.clients] == [
        "transport-01", "sports-01", "educational-01", "natural-01", "art-01", "abstract-01", "transport-02",
        "sports-02",
    ]  # fmt: skip
    assert [*table.users] == [*small.clients, *small.unseen]
    rows = np.concatenate([
        *(part.image_index for split in small.clients.values() for part in (split.train, split.validation, split.test)),
        *(part.image_index for part in small.unseen.values()),
    ])  # fmt: skip
    assert rows.tolist() == list(range(len(table)))
    owned = table.of_users()
    for name, split in small.clients.items():
        own = np.concatenate([split.train.image_index, split.validation.image_index, split.test.image_index])
        assert own.tolist() == owned[name].tolist()
        assert (len(split.validation), len(split.test)) == (3, 4)
        assert set(split.train.types) == {name[:-3]}
        assert split.test.names[0] == f"{name}/test/000000"
    assert len(set(table.names)) == len(table)
    assert first.images.shape == (len(table), 64, 64, 3)
    assert first.labels.dense().sum(axis=1).min() >= 1
    assert small.answers == FINE
    assert small.coarse == COARSE_OF
    assert {"counts", "chance", "skew", "sizes", "labels"} <= set(small.facts)


def test_unseen_places_are_newcomers_with_styles_of_nobody(small: FederatedDataset):
    assert {place: len(part) for place, part in small.unseen.items()} == {
        "newcomers": 6, "home": 6, "commercial": 6, "blurred": 6,
    }  # fmt: skip
    newcomers = small.unseen["newcomers"]
    assert newcomers.types is not None
    assert Counter(newcomers.types) == dict.fromkeys([*list(DRAWING_STYLES)[:4], "art", "abstract"], 1)
    assert len(set(newcomers.names)) == 6
    two = scene_labels(clients=3, train=2, validation=1, test=1, unseen=1, styles=("art", "home"))
    assert [*two.clients] == ["art-01", "home-01", "art-02"]
    assert set(two.unseen) == {"newcomers", *DRAWING_STYLES} - {"art", "home"}
    assert not scene_labels(clients=1, train=1, validation=1, test=1, unseen=0).unseen


def test_coarse_labels_are_those_of_the_fine_ones(small: FederatedDataset):
    coarse = scene_labels("coarse", **SMALL)
    assert coarse.answers == COARSE
    assert not coarse.coarse
    for name, split in small.clients.items():
        other = coarse.clients[name].train
        assert np.array_equal(split.train.images[split.train.image_index[0]], other.images[other.image_index[0]])
        for fine, its in zip(split.train.image_index, other.image_index, strict=True):
            wanted = {COARSE_OF[label] for label in split.train.labels.table.labels_of(int(fine))}
            assert set(other.labels.table.labels_of(int(its))) == wanted


def pictures(examples: Examples) -> np.ndarray:
    return np.stack([examples.images[row] for row in examples.image_index])


def test_tests_and_clients_are_the_same_for_all_seeds(small: FederatedDataset):
    again, other = scene_labels(**SMALL), scene_labels(**SMALL, seed=1)
    moved = scene_labels(**SMALL, test_seed=1)
    for name, split in small.clients.items():
        assert np.array_equal(pictures(split.train), pictures(again.clients[name].train))
        assert np.array_equal(pictures(split.test), pictures(other.clients[name].test))
        assert len(split.train) == len(other.clients[name].train)
        assert not np.array_equal(pictures(split.train), pictures(other.clients[name].train))
        assert not np.array_equal(pictures(split.validation), pictures(other.clients[name].validation))
        assert not np.array_equal(pictures(split.test), pictures(moved.clients[name].test))
    for place, part in small.unseen.items():
        assert np.array_equal(pictures(part), pictures(other.unseen[place]))
        assert np.array_equal(part.labels.dense(), other.unseen[place].labels.dense())


def test_sizes_and_tastes_are_as_skewed_as_asked():
    few: dict[str, Any] = {"clients": 30, "train": 30, "validation": 1, "test": 1, "unseen": 0, "styles": ("abstract",)}
    even, uneven = scene_labels(**few, sigma=0.0, alpha=1000.0), scene_labels(**few)
    assert {len(split.train) for split in even.clients.values()} == {30}
    sizes = [len(split.train) for split in uneven.clients.values()]
    assert min(sizes) == 10
    assert max(sizes) > 50
    assert abs(np.mean(sizes) - 30) < 3  # the smallest ones are raised to 10, the others are not lowered

    def apart(data: FederatedDataset) -> float:
        """Mean distance between a client's label shares and everybody's."""
        shares = np.stack([split.train.labels.dense().mean(axis=0) for split in data.clients.values()])
        return float(np.abs(shares - shares.mean(axis=0)).sum(axis=1).mean())

    assert apart(uneven) > 1.5 * apart(even)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "finest"}, "level must be one of fine, coarse, got 'finest'"),
        ({"styles": ()}, r"styles must be distinct names, at least 1, .*got \(\)"),
        ({"styles": "art"}, "styles must be distinct names, at least 1, .*got 'art'"),
        ({"styles": ("art", "art")}, "styles must be distinct"),
        ({"styles": ("oil",)}, "out of transport, .*, blurred, got .'oil'"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"train": 0}, "train must be at least 1, got 0"),
        ({"test": 0}, "test must be at least 1, got 0"),
        ({"unseen": -1}, "unseen must not be negative, got -1"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"sigma": -1.0}, "sigma must not be negative, got -1.0"),
        ({"alpha": 0.0}, "alpha must be positive, got 0.0"),
        ({"alpha": float("nan")}, "alpha must be a number, got nan"),
    ],
)
def test_faulty_options_are_named(options: dict[str, Any], message: str):
    refuses(message, scene_labels, **options)


def test_the_packaged_embeddings_are_what_the_command_makes(tmp_path):
    made = write_mini_label_embeddings((*FINE, *COARSE), tmp_path / "made.safetensors")
    packaged = load_label_embeddings("scene_labels", (*FINE, *COARSE), 64)
    assert torch.equal(made.vectors, packaged.vectors)
    assert torch.equal(made.positive, packaged.positive)
    assert torch.equal(made.negative, packaged.negative)
    assert weights_file("scene_labels").stat().st_size < 100_000
    # Labels that share a word lie nearer to each other than labels that share none.
    vectors = dict(zip(packaged.names, torch.nn.functional.normalize(packaged.vectors, dim=1), strict=True))
    assert vectors["red ball"] @ vectors["orange ball"] > vectors["red ball"] @ vectors["green tree"]
    assert ctran_mini(FINE, embeddings="scene_labels").tokens.labels.shape == (80, 64)


ROWS = {
    "fedlgt_scenes": ["central", "fedavg", "fedctran", "fedctran_ule", "fedlgt", "fedprox", "fedbn"],
    "fedlgt_ablation": ["neither", "ule", "camle", "fedlgt"],
    "fedlgt_growing": ["fedctran", "fedctran_ule", "fedlgt"],
    "flair_benchmark_scenes": ["flair", "fedavg", "moving_norm", "fedbn", "scratch"],
}


@pytest.mark.parametrize("name", list(ROWS))
def test_recipes_have_their_rows(name: str):
    recipe = load_recipe(name)
    assert list(recipe.methods) == ROWS[name]
    for row in {*recipe.methods, *recipe.table}:
        recipe.check_row(row)
    clients = scene_labels(train=1, validation=1, test=1, unseen=0).clients if recipe.run.joins else {}
    assert set(recipe.run.joins) <= set(clients)
    if name == "fedlgt_growing":
        assert set(recipe.run.joins) == {client for client in clients if client.startswith("abstract")}


def test_rows_differ_in_what_their_names_say():
    recipe = load_recipe("fedlgt_scenes")
    sections = {row: recipe.method(row).sections for row in recipe.methods}
    assert sections["fedavg"]["model"]["name"] == "resnet_multilabel_mini"
    assert sections["fedavg"]["task"]["known"] == 0
    assert {row: sections[row]["model"].get("learn_labels") for row in sections} == {
        "central": True, "fedavg": None, "fedctran": True, "fedctran_ule": False, "fedlgt": False, "fedprox": True,
        "fedbn": True,
    }  # fmt: skip
    # One way of training for all who federate.
    assert len({str(sections[row]["local"]) for row in sections if row != "central"}) == 1
    assert all(sections[row]["model"]["pretrained"] is True for row in sections)
    flair = load_recipe("flair_benchmark_scenes").method("flair").sections
    assert (flair["local"]["optimizer"], flair["local"]["lr"], flair["local"]["clip"]) == ("sgd", 0.01, 10.0)
    assert (flair["local"]["epochs"], flair["local"]["batch_size"]) == (2, 16)
    server = load_recipe("flair_benchmark_scenes").method("flair").construct("algorithm").server
    assert (server.optimizer, server.lr, server.tau) == ("adam", 0.1, 0.01)
    assert flair["model"]["norm"] == "frozen"
