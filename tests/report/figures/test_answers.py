"""The figure of each place's answers: what is told as one place's own, as some places' and as everybody's."""

from collections import Counter

import pytest
from matplotlib.figure import Figure

from confed import registry
from confed.cli.dataset_description import describe
from confed.report.figures.answers import ANSWERS, answers_by_place, shared_by

COUNTS = {
    "sea": {"yes": 5, "fish": 3, "blue": 2, "crab": 0},
    "wood": {"yes": 1, "tree": 6, "blue": 1},
    "town": {"yes": 2, "bus": 2},
}


def drawn(counts):
    """Place -> kind -> answer -> width of its bar, read off the axes."""
    drawing = answers_by_place("made", counts)
    assert drawing is not None
    figure = Figure()
    drawing.draw(figure, lambda name: "#2a66c8")
    found = {}
    for axes in figure.axes:
        names = {
            round(place): label.get_text()
            for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        }
        found[axes.get_title(loc="left")] = {
            bars.get_label(): {names[round(b.get_y() + b.get_height() / 2)]: b.get_width() for b in bars}
            for bars in axes.containers
        }
    return found


def test_answers_are_told_by_how_many_places_have_them():
    found = drawn(COUNTS)
    assert found["sea"] == {
        "in this place only": {"fish": 30.0},
        "in some places": {"blue": 20.0},
        "in all places": {"yes": 50.0},
    }
    assert found["wood"]["in this place only"] == {"tree": 75.0}
    assert found["town"] == {"in this place only": {"bus": 50.0}, "in all places": {"yes": 50.0}}


def test_an_answer_that_nobody_gives_is_in_no_place():
    assert shared_by(COUNTS) == {"yes": 3, "fish": 1, "blue": 2, "tree": 1, "bus": 1}


def test_each_panel_has_the_most_frequent_answers():
    many = {"a": {f"answer {i:02}": 100 - i for i in range(40)}, "b": {"answer 00": 1}}
    bars = drawn(many)["a"]
    assert sorted(answer for of_kind in bars.values() for answer in of_kind) == sorted(many["a"])[:ANSWERS]


def test_of_one_place_nothing_is_drawn():
    assert answers_by_place("made", {"sea": COUNTS["sea"], "empty": {"yes": 0}}) is None


def test_counts_are_of_answers_and_of_labels():
    scenes = registry.datasets["scenes"](train=20, validation=5, test=5)
    part = scenes.clients["transport"].roles["train"]
    assert part.target.counts() == Counter(part.answers)
    labels = registry.datasets["scene_labels"](clients=4)
    users = next(iter(labels.clients.values())).roles["train"]
    assert users.target.counts()[users.labels.names[0]] == int(users.labels.numbers()[0])


def test_a_description_writes_the_figure(tmp_path):
    file = tmp_path / "new" / "answers.svg"
    description = describe("scenes", ["train=20", "validation=5", "test=5"], answers=file)
    assert description["figure"] == str(file)
    assert "in this place only" in file.read_text()


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"answers must be a file with the ending \.svg or \.png"):
        describe("scenes", answers=tmp_path / "answers.pdf")
