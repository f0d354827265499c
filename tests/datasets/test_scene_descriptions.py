"""The built-in captions as answers to one question, and the recipe that learns them."""

from pathlib import Path

import numpy as np
import pytest

from confed.data.examples import FederatedDataset
from confed.datasets.scene_captions import WAYS, scene_captions, scene_descriptions
from confed.recipes.recipe import load_recipe
from confed.runs.run import run

UNSEEN = ("home", "commercial", "natural", "sports")


@pytest.fixture(scope="module")
def described() -> FederatedDataset:
    return scene_descriptions(train=12, validation=3, test=4, references=3, unseen=UNSEEN)


def test_answers_are_what_people_say_of_the_pictures_of_the_captioning_benchmark(described: FederatedDataset) -> None:
    told = scene_captions(
        train=12, validation=3, test=4, references=3, unseen=UNSEEN, texts=0, documents=0, reader=False
    )
    assert list(described.clients) == list(told.clients) == ["transport", "educational"]
    for name, split in described.clients.items():
        other = told.clients[name]
        assert np.array_equal(np.asarray(split.test.images), np.asarray(other.test.images))
        assert [*(split.test.annotations or ())] == [*(other.test.captions or ())]
        assert [text for own in (split.train.annotations or ()) for text in own] == [*other.train.questions]
        assert [own[0] for own in (split.train.annotations or ())] == [*split.train.answers]


def test_every_picture_is_asked_the_same(described: FederatedDataset) -> None:
    parts = [part for s in described.clients.values() for part in (s.train, s.validation, s.test)]
    questions = {text for part in (*parts, *described.unseen.values()) for text in part.questions}
    assert questions == {"Describe the picture."}
    assert {*described.words} >= {"describe", "the", "picture"}
    assert described.kind != "captions"
    assert [*described.unseen] == [*UNSEEN]


def test_a_client_mostly_puts_captions_in_its_own_way() -> None:
    dataset = scene_descriptions(train=100, validation=1, test=1)
    (first, second, *_) = dataset.clients.values()
    own = [sum(" and " in a and "things" not in a for a in part.train.answers) for part in (first, second)]
    assert WAYS[0] == "list"
    assert own[0] > 2 * own[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": 0}, "train must be at least 1, got 0"),
        ({"question": " "}, "data.question: expected a word at least, got ' '"),
        ({"unseen": ("moon",)}, "unseen must be distinct names out of transport"),
        ({"conflict": 2.0}, r"conflict must lie in \[0, 1\], got 2.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scene_descriptions(**options)  # type: ignore[arg-type]


def test_the_packaged_model_describes_pictures_in_the_clients_words(tmp_path: Path) -> None:
    small = [
        "data.train=4", "data.validation=1", "data.test=2", "run.rounds=1", "run.workers=1", "run.gallery=1",
        'data.unseen=["home", "commercial", "natural", "sports"]',
    ]  # fmt: skip
    summary = run(load_recipe("chat_captions", small).method("fedavg"), tmp_path / "run")
    assert summary["metric"] == "cider"
    found = summary["global_seen"]["transport"]
    assert 0 < found <= 10
    assert "Describe the picture." in (tmp_path / "run" / "gallery.json").read_text()
