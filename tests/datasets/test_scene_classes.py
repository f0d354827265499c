"""Coloured things: reserved classes, repeatability, parts, refusals."""

from typing import Any

import numpy as np
import pytest

from confed.data.few_shot import NEW
from confed.datasets.scene_classes import CLASSES, RESERVED, class_parts, scene_classes
from confed.datasets.scenes.graph import COLOURS, NOUNS
from confed.datasets.six_styles import COLOURED, coloured_objects

SMALL: dict[str, Any] = {"styles": ("clipart", "real"), "shots": 2, "validation_shots": 1, "test_per_class": 2}


def test_reserved_classes_are_a_quarter_with_every_noun_and_colour() -> None:
    assert len(CLASSES) == 176
    assert len(RESERVED) == 44
    assert {name.split()[0] for name in RESERVED} == set(COLOURS)
    assert {name.split()[1] for name in RESERVED} == set(NOUNS)


def test_parts_of_a_class_are_its_words() -> None:
    nouns, colours = class_parts(np.array([CLASSES.index("red dog")]))
    assert (NOUNS[nouns[0]], COLOURS[colours[0]]) == ("dog", "red")


def test_equal_arguments_give_equal_bytes_and_seeds_other_training_pictures() -> None:
    one, same, other = (scene_classes(8, **SMALL, seed=seed) for seed in (0, 0, 1))
    pictures = [d.clients["real"].train.images[d.clients["real"].train.image_index] for d in (one, same, other)]
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])
    tests = [d.clients["real"].test.images[d.clients["real"].test.image_index] for d in (one, other)]
    assert np.array_equal(*tests)


def test_parts_have_the_numbers_asked_for() -> None:
    dataset = scene_classes(8, **SMALL, unseen=("painting",))
    assert {c: (len(s.train), len(s.validation), len(s.test)) for c, s in dataset.clients.items()} == {
        "clipart": (8, 4, 8),
        "real": (8, 4, 8),
    }
    assert len(dataset.unseen["painting"]) == 8
    assert len(dataset.unseen[NEW]) == 16
    assert set(dataset.answers) <= set(RESERVED)


@pytest.mark.parametrize("style", COLOURED)
def test_named_colours_show_in_the_picture(style: str) -> None:
    """The mean saturated pixel of red things is redder, and of blue things bluer."""
    nouns = np.full(24, NOUNS.index("ball"))
    means = []
    for colour in ("red", "blue"):
        wanted = np.full(24, COLOURS.index(colour))
        means.append(coloured_objects(nouns, wanted, np.random.default_rng(0), style).mean((0, 1, 2)))
    assert means[0][0] > means[1][0]
    assert means[0][2] < means[1][2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 3}, "must lie in .4, 44., got 3"),
        ({"classes": ("red dog", "red dog", "x", "y")}, "must be distinct names, at least 4"),
        ({"styles": ("sketch",)}, "styles must be distinct names out of plain"),
        ({"shots": 0}, "data.shots must be at least 1"),
    ],
)
def test_bad_options_say_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scene_classes(**options)
