"""The built-in six-style pictures: counts, bytes, and the looks that the styles promise."""

import numpy as np
import pytest

from confed.datasets import six_styles as module
from confed.datasets.scenes.graph import NOUNS
from confed.datasets.six_styles import plain_objects, six_styles
from refusals import refuses

SMALL = {"train": 44, "validation": 11, "test": 33}


@pytest.fixture(scope="module")
def data():
    return six_styles(11, **SMALL)


def test_counts_classes_and_names(data):
    assert list(data.clients) == ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
    assert data.answers == NOUNS[:11]
    assert data.words == ("is", "it", "what")
    names = []
    for style, split in data.clients.items():
        for part, count in ((split.train, 44), (split.validation, 11), (split.test, 33)):
            assert part.images.shape == (count, 64, 64, 3)
            assert sorted(part.answers) == sorted(data.answers * (count // 11))
            assert list(part.answers) != sorted(part.answers)
            assert set(part.types) == {style}
            names += part.names
    assert len(set(names)) == len(names)
    assert not data.unseen


def test_the_seed_draws_training_pictures_not_test_pictures(data):
    some = ("clipart", "real", "sketch")
    again, other = six_styles(11, **SMALL, styles=some), six_styles(11, **SMALL, styles=some, seed=1)
    for style in some:
        one, same, changed = (d.clients[style] for d in (data, again, other))
        np.testing.assert_array_equal(one.train.images, same.train.images)
        np.testing.assert_array_equal(one.test.images, changed.test.images)
        assert one.test.answers == changed.test.answers
        assert (one.train.images != changed.train.images).any()
    # A style's pictures do not depend on who else takes part.
    alone = six_styles(11, **SMALL, styles=("real", "sketch"), unseen=("sketch",))
    assert list(alone.clients) == ["real"]
    np.testing.assert_array_equal(alone.clients["real"].train.images, data.clients["real"].train.images)
    np.testing.assert_array_equal(alone.unseen["sketch"].images, data.clients["sketch"].test.images)


def test_styles_look_as_they_say(data):
    shots = {style: split.train.images / 255 for style, split in data.clients.items()}
    colourful = {style: float(np.ptp(pictures, axis=-1).mean()) for style, pictures in shots.items()}
    assert colourful["quickdraw"] == 0
    assert colourful["sketch"] < 0.05
    assert min(colourful[style] for style in ("clipart", "infograph", "painting", "real")) > 0.07
    # Two tones only, most of it white; nearly the same goes for what clip art has around its things.
    assert ((shots["quickdraw"] < 0.05) | (shots["quickdraw"] > 0.95)).mean() > 0.85
    assert shots["quickdraw"].mean() > 0.6
    corners = shots["clipart"][:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.min() > 0.85
    # Noise is where it should be: differences between neighbours in the upper left corner.
    rough = {style: np.abs(np.diff(pictures[:, :6, :6], axis=2)).mean() for style, pictures in shots.items()}
    assert rough["clipart"] == 0 == rough["quickdraw"]
    assert min(rough["sketch"], rough["real"]) > 0.01


def test_a_pose_without_movement_is_the_drawing_itself():
    nouns = np.arange(len(NOUNS))
    still = module._pose(nouns, np.random.default_rng(0), size=(1, 1), shift=0, turn=0)
    plates = module._plates()
    for drawn, plate in zip(still, plates, strict=True):
        mirrored = plate[..., ::-1]
        assert min(np.abs(drawn - plate).max(), np.abs(drawn - mirrored).max()) < 1e-4
    # Half the size is a quarter of the area.
    half = module._pose(nouns, np.random.default_rng(0), size=(0.5, 0.5), shift=0, turn=0)
    np.testing.assert_allclose(half[:, 2].sum((1, 2)), plates[:, 2].sum((1, 2)) / 4, rtol=0.03)
    # Every noun covers something, has contours, and no two nouns are alike.
    assert plates[:, 2].mean((1, 2)).min() > 0.1
    assert plates[:, 3].max((1, 2)).min() > 0.9
    flat = plates.reshape(len(NOUNS), -1)
    distance = np.abs(flat[:, None] - flat[None]).mean(-1) + np.eye(len(NOUNS))
    assert distance.min() > 0.03


def test_plain_things_for_pretraining():
    pictures, labels = plain_objects(60, 0)
    again, same = plain_objects(60, 0)
    assert pictures.shape == (60, 64, 64, 3)
    np.testing.assert_array_equal(pictures, again)
    np.testing.assert_array_equal(labels, same)
    assert labels.min() >= 0
    assert labels.max() < len(NOUNS)
    assert (plain_objects(60, 1)[0] != pictures).any()
    _, few = plain_objects(30, 0, ("cat", "dog"))
    assert set(few.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 1}, "classes must lie in .2, 22., got 1"),
        ({"classes": ("cat",)}, "classes must be distinct names, at least 2, .*got .'cat',."),
        ({"classes": ("cat", "horse")}, "classes must be distinct names, at least 2, out of person, dog"),
        ({"styles": ("photo",)}, "styles must be distinct names out of clipart"),
        ({"unseen": "real"}, "unseen must be distinct names"),
        ({"styles": ("real",), "unseen": ("real",)}, "unseen must leave one of real"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    refuses(message, six_styles, **options)
