"""Faults of data are found, and sound data have none."""

from dataclasses import replace

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.faults import faults
from confed.datasets.scene_labels import scene_labels
from confed.datasets.scenes import scenes

TABLE = np.zeros((100, 4, 4, 3), np.uint8)


def examples(pictures: list[int], answers: list[str], question: str = "what?") -> Examples:
    return Examples(
        TABLE, np.array(pictures, dtype=np.int64), [question] * len(answers), answers,
        ["x"] * len(answers), [f"{question}{number}{pictures}" for number in range(len(answers))],
    )  # fmt: skip


def sound(first: int) -> Split:
    train = examples(list(range(first, first + 12)), ["a", "b"] * 6)
    return Split(train, examples([first + 12], ["a"]), examples([first + 13, first + 14], ["a", "b"]))


def federated(**clients: Split) -> FederatedDataset:
    return FederatedDataset("mine", ("a", "b", "c"), clients, {}, ("what",), outside=True)


def test_sound_data_have_none() -> None:
    assert faults(federated(one=sound(0), two=sound(20))) == []


def test_each_fault_is_named_with_an_example() -> None:
    good = sound(0)
    cases = {
        "1 of 2 clients have no test examples, such as 'two'": replace(sound(20), test=examples([], [])),
        "1 answers occur in test questions only, such as 'c': 33.3%": replace(sound(20), test=examples([40], ["c"])),
        "1 of 3 answers have fewer than 5 training examples, such as 'c'":
            replace(sound(20), train=examples(list(range(20, 32)), ["a", "b"] * 5 + ["c"] * 2)),
        "1 training questions about one picture have different answers, such as 'what?' with 'a' and 'b'":
            replace(sound(20), train=examples([20, 20, *range(21, 31)], ["a", "b"] * 6)),
        "1 pictures are in both training and test examples of one client":
            replace(sound(20), test=examples([20], ["a"])),
        "1 test pictures of a client are training pictures of another": replace(sound(20), test=examples([0], ["a"])),
    }  # fmt: skip
    for text, split in cases.items():
        found = faults(federated(one=good, two=split))
        assert any(text in line for line in found), (text, found)
        assert len(found) <= 2, found


def test_equal_numbers_in_other_tables_are_other_pictures() -> None:
    def apart(part: Examples) -> Examples:
        return replace(part, images=TABLE.copy())

    split = sound(0)
    again = Split(apart(split.train), apart(split.validation), apart(replace(split.train, answers=["b", "a"] * 6)))
    assert faults(federated(one=split, two=again)) == []


def test_drawn_scenes_share_no_picture() -> None:
    found = faults(scenes("C", train=8, validation=4, test=8))
    assert not [line for line in found if "picture" in line], found


def test_damaged_label_data_are_found() -> None:
    found = faults(scene_labels(clients=4, test=8))
    assert all("labels have" in line or "no label" in line or "differ" in line for line in found)
