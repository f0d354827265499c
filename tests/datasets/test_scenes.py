"""The benchmark as a dataset: determinism, splits, floors, presets, errors."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from confed.data.examples import Examples, FederatedDataset
from confed.datasets.scenes import ANSWERS, SCENES, WORDING_SHIFT, WORDS, oracle, public_split, scenes
from confed.datasets.scenes.graph import GENERAL_NOUNS, NOUNS, OWN_NOUNS, ROLES, fingerprint
from confed.datasets.scenes.making import SETTINGS, Knobs, make_scene
from confed.registry import datasets


def small(setting: str = "C", **options: Any) -> FederatedDataset:
    """The benchmark with few questions, also about unseen scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("confed.datasets.scenes.presets.UNSEEN_SIZE", 40)
        return scenes(setting, **{"train": 60, "validation": 12, "test": 40, **options})  # type: ignore[arg-type]


def digest(*parts: Examples) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.images.tobytes() + part.image_index.tobytes())
        sha.update("|".join([*part.questions, *part.answers, *part.types, *part.names]).encode())
    return sha.hexdigest()


def everything(dataset: FederatedDataset) -> list[Examples]:
    splits = [part for s in dataset.clients.values() for part in (s.train, s.validation, s.test)]
    return splits + list(dataset.unseen.values())


@pytest.fixture(scope="module")
def setting_c() -> FederatedDataset:
    return scenes()


def test_shape_of_the_default(setting_c):
    assert datasets["scenes"] is scenes
    assert list(setting_c.clients) == ["transport", "sports", "educational", "natural"]
    assert {s: len(e) for s, e in setting_c.unseen.items()} == {"home": 1000, "commercial": 1000}
    for client, split in setting_c.clients.items():
        assert (len(split.train), len(split.validation), len(split.test)) == (400, 400, 1000)
        assert split.train.images.shape == (100, 64, 64, 3)
        assert split.test.names[123] == f"{client}/test/000123"
    words, answers = set(WORDS), set(ANSWERS)
    for part in everything(setting_c):
        assert set(part.answers) <= answers
        for question in part.questions:
            asked = question.rstrip("?").split()
            assert question.endswith("?")
            assert question == question.lower()
            assert len(asked) <= 12
            assert set(asked) <= words
    assert len(WORDS) == len(words)
    assert len(ANSWERS) == len(answers)


def test_equal_arguments_give_equal_bytes_in_any_process():
    here = digest(*everything(small()))
    code = "from test_scenes import *; print(digest(*everything(small())))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_seed_moves_training_and_test_seed_moves_tests():
    base, other, moved = small(), small(seed=1), small(test_seed=1)
    for client in base.clients:
        a, b, c = base.clients[client], other.clients[client], moved.clients[client]
        assert digest(a.train) != digest(b.train)
        assert digest(a.validation) != digest(b.validation)
        assert digest(a.test) == digest(b.test) != digest(c.test)
    assert digest(base.unseen["home"]) == digest(other.unseen["home"]) != digest(moved.unseen["home"])


def test_roles_never_share_a_graph():
    assert sorted(b for role in ROLES.values() for b in role) == list(range(16))
    _, tags = public_split(800, seed=5)
    marks = {"public": set(fingerprint(tags).tolist())}
    for role in ("train", "validation", "test"):
        made = [make_scene(scene, role, 120, Knobs(wording=True, seed=s)) for scene in SCENES[:2] for s in (0, 1)]
        marks[role] = {mark for m in made for mark in fingerprint(m.tags).tolist()}
        for m in made:
            assert len(set(fingerprint(m.tags).tolist())) == len(m.tags)
    names = list(marks)
    for i, first in enumerate(names):
        assert all(int(mark) % 16 in ROLES[first] for mark in marks[first])
        for second in names[i + 1 :]:
            assert not marks[first] & marks[second]


def test_program_executor_is_the_ceiling(setting_c):
    made = make_scene("sports", "test", 1000, Knobs(wording=True))
    assert digest(made.examples) == digest(setting_c.clients["sports"].test)
    assert oracle(made.examples.questions, made.examples.image_index, made.tags) == list(made.examples.answers)
    assert setting_c.facts["oracle"].startswith("100.0 % of 9200")


def test_no_answer_gives_a_family_away(setting_c):
    for part in everything(setting_c):
        for family, total in Counter(part.types).items():
            answers = Counter(a for a, t in zip(part.answers, part.types, strict=True) if t == family)
            assert total >= len(part) / 9 / 2
            top = answers.most_common(1)[0][1]
            if family in {"exist", "qsize", "morethan", "same"}:
                assert top <= 0.52 * total
            if family == "count":
                assert top <= 0.36 * total


def test_floors_are_low(setting_c):
    floors = [fact for name, fact in setting_c.facts.items() if name not in ("oracle", "wording", "colours")]
    assert len(floors) == 6
    for fact in floors:
        majority, blind = (float(part.split()[-2]) for part in fact.split(";")[1].split(","))
        assert 20 < majority < 45
        assert 20 < blind < 45


def test_public_split_reads_plain_english_only(setting_c):
    examples, tags = public_split(3000, seed=0)
    words = {word for q in examples.questions for word in q.rstrip("?").split()}
    assert not words & set(WORDING_SHIFT.values())
    assert set(WORDING_SHIFT) <= words
    assert set(np.unique(tags.noun)) == set(range(23))
    assert oracle(examples.questions, examples.image_index, tags) == list(examples.answers)
    shifted = {w for part in everything(setting_c) for q in part.questions for w in q.rstrip("?").split()}
    assert set(WORDING_SHIFT.values()) <= shifted
    assert not set(WORDING_SHIFT) & shifted


def test_knobs_change_words_and_colours_only():
    plain, shifted = small("B"), small("B", wording=True)
    loud = small("B", conflict=1.0)
    a, b, c = (d.clients["sports"].test for d in (plain, shifted, loud))
    assert np.array_equal(a.images, b.images)
    assert list(a.questions) != list(b.questions)
    assert list(a.answers) == list(b.answers) == list(c.answers)
    assert not np.array_equal(a.images, c.images)
    a, b = (d.clients["educational"].test.images for d in (plain, loud))
    assert np.array_equal(a, b)  # the classroom does not turn the wheel
    assert [setting.train for setting in SETTINGS.values()] == [1500, 800, 400]


def test_dirichlet_preset_skews_answers():
    def spread(alpha: float) -> float:
        dataset = scenes(preset="dirichlet", clients=5, alpha=alpha, train=100, validation=8, test=60, unseen=())
        assert list(dataset.clients) == [f"client-0{k}" for k in range(1, 6)]
        assert {len(s.train) for s in dataset.clients.values()} == {100}
        shares = [Counter(s.train.answers).most_common(1)[0][1] / 100 for s in dataset.clients.values()]
        return float(np.mean(shares))

    assert spread(0.3) > 1.5 * spread(100.0)


def test_quantity_preset_is_uneven_with_a_floor():
    dataset = scenes(preset="quantity", clients=6, train=150, validation=8, test=30, unseen=("natural",))
    sizes = [len(s.train) for s in dataset.clients.values()]
    assert min(sizes) >= 64
    assert max(sizes) > 2 * min(sizes)
    assert {len(s.test) for s in dataset.clients.values()} == {30}
    assert list(dataset.unseen) == ["natural"]
    assert len({n for s in dataset.clients.values() for n in s.train.names}) == sum(sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unseen": ("moon",)}, "unseen must be distinct names out of transport.*'moon'"),
        ({"unseen": "home"}, "distinct names out of transport"),
        ({"unseen": SCENES}, "unseen must leave one of transport"),
        ({"setting": "D"}, "setting must be one of A, B, C, got 'D'"),
        ({"preset": "weather"}, "preset must be one of scene, .*got 'weather'"),
        ({"questions_per_picture": 10}, r"questions_per_picture must lie in \[1, 9\], got 10"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        scenes(**changes)


def test_public_split_rejects_nonsense():
    with pytest.raises(ValueError, match="questions must be at least 1, got 0"):
        public_split(0, 0)


def test_several_clients_share_a_scene_but_no_picture_and_no_colours():
    several = small(unseen=("home", "commercial", "natural"), clients_per_scene=3)
    assert list(several.clients) == [f"{s}-{n}" for s in ("transport", "sports", "educational") for n in (1, 2, 3)]
    assert list(several.unseen) == ["natural", "home", "commercial"]
    options = Knobs(wording=True)
    for role, number in (("train", 400), ("test", 400)):
        used: set[int] = set()
        made = [make_scene("sports", role, number, options, f"sports-{n}", used) for n in (1, 2, 3, 4)]
        marks = [mark for m in made for mark in fingerprint(m.tags).tolist()]
        assert len(marks) == len(set(marks)) == number  # four questions per picture, four clients
        assert used >= set(marks)  # graphs that gave too few questions are passed over
        assert all(mark % 16 in ROLES[role] for mark in marks)
        shares = np.array([np.bincount(m.tags.colour.ravel(), minlength=9)[1:] for m in made]).astype(float)
        shares /= shares.sum(1, keepdims=True)
        for i in range(4):
            for j in range(i):
                assert np.abs(shares[i] - shares[j]).sum() > 0.3  # each has colour frequencies of its own
        for m in made:
            things = {NOUNS[n - 1] for n in np.unique(m.tags.noun) if n}
            assert things == {*GENERAL_NOUNS, *OWN_NOUNS["sports"]}
    assert several.clients["sports-2"].test.names[3] == "sports-2/test/000003"


def test_clients_of_a_scene_keep_their_tests_when_the_seed_moves():
    base, other = (small(unseen=SCENES[1:], clients_per_scene=2, seed=seed) for seed in (0, 1))
    for client in ("transport-1", "transport-2"):
        assert digest(base.clients[client].test) == digest(other.clients[client].test)
        assert digest(base.clients[client].train) != digest(other.clients[client].train)
    assert digest(*everything(small(clients_per_scene=1))) == digest(*everything(small()))


def test_twenty_four_clients():
    many = scenes(train=8, validation=4, test=4, unseen=(), clients_per_scene=4)
    assert len(many.clients) == 24
    assert not many.unseen
    with pytest.raises(ValueError, match="clients_per_scene: expected the preset 'scene', got 'dirichlet'"):
        scenes(preset="dirichlet", clients_per_scene=2)
    with pytest.raises(ValueError, match="clients_per_scene must be at least 1, got 0"):
        scenes(clients_per_scene=0)
