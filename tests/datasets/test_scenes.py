"""The benchmark as a dataset: determinism, splits, presets, parts, own answers, classes, descriptions, errors."""

import colorsys
import hashlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confed.data.examples import Examples, FederatedDataset
from confed.data.few_shot import NEW
from confed.data.seeding import generator
from confed.datasets.scene_captions import WAYS, scene_captions, scene_descriptions
from confed.datasets.scene_classes import CLASSES, RESERVED, class_parts, scene_classes
from confed.datasets.scenes import ANSWERS, SCENES, WORDING_SHIFT, WORDS, oracle, public_split, scenes
from confed.datasets.scenes.backgrounds import place, random_backgrounds
from confed.datasets.scenes.drawings import DRAWINGS, sprites
from confed.datasets.scenes.graph import (
    COLOURS,
    GENERAL_NOUNS,
    NOUNS,
    OWN_NOUNS,
    ROLES,
    Object,
    Tags,
    colour_prior,
    fingerprint,
)
from confed.datasets.scenes.making import SETTINGS, Knobs, make_scene
from confed.datasets.scenes.questions import FAMILIES, TEMPLATES, Balance, Program, ask, execute, parse, phrase
from confed.datasets.scenes.render import palette, render_scene
from confed.datasets.six_styles import COLOURED, coloured_objects
from confed.recipes.recipe import load_recipe
from confed.registry import datasets
from confed.runs.run import run
from refusals import refuses


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
    refuses(message, scenes, **changes)


def test_public_split_rejects_nonsense():
    refuses("questions must be at least 1, got 0", public_split, 0, 0)


def test_clients_share_a_scene_but_no_picture_and_no_colours():
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
    refuses("clients_per_scene must be at least 1, got 0", scenes, clients_per_scene=0)


# . dog(red small)  car(red large)  .  /  ...  /  ... box(blue large)  /  dog(green small) ...
GRAPH = (
    Object(1, "dog", "red", "small"),
    Object(2, "car", "red", "large"),
    Object(11, "box", "blue", "large"),
    Object(12, "dog", "green", "small"),
)


@pytest.mark.parametrize(
    ("family", "arguments", "answer"),
    [
        ("exist", ("red", "car"), "yes"),
        ("exist", ("blue", "car"), "no"),
        ("count", ("red",), "2"),
        ("count", ("pink",), "0"),
        ("qcolor", ("box",), "blue"),
        ("qcolor", ("dog",), None),
        ("qsize", ("car",), "large"),
        ("qnoun", ("green",), "dog"),
        ("qnoun", ("red",), None),
        ("qpos", ("car",), "top right"),
        ("qpos", ("box",), "bottom right"),
        ("qpos", ("cat",), None),
        ("morethan", ("red", "blue"), "yes"),
        ("morethan", ("blue", "green"), "no"),
        ("same", ("car", "box"), "no"),
        ("same", ("car", "dog"), None),
        ("rel", ("box",), None),
        ("rel", ("car",), None),
    ],
)
def test_program_executor_equals_answers_by_hand(family, arguments, answer):
    assert execute(Program(family, arguments), GRAPH) == answer


def test_right_of_means_the_next_cell_of_the_same_row():
    graph = (
        Object(5, "cup", "pink", "small"),
        Object(6, "hill", "cyan", "large"),
        Object(7, "net", "red", "large"),
        Object(8, "bag", "blue", "small"),
    )
    assert execute(Program("rel", ("cup",)), graph) == "cyan"
    assert execute(Program("rel", ("net",)), graph) is None  # cell 8 begins the next row


def test_seven_red_things_have_no_number_among_the_answers():
    graph = [Object(c, "dog", "red", "small") for c in range(6)]
    assert execute(Program("count", ("red",)), graph) is None


def test_unknown_family_is_named():
    refuses("got 'rhyme'", execute, Program("rhyme", ("dog",)), GRAPH)


def test_every_phrase_is_parsed_back():
    arguments = {"exist": ("red", "dog"), "count": ("blue",), "qnoun": ("pink",), "same": ("cat", "till")}
    arguments["morethan"] = ("cyan", "orange")
    seen = set()
    for family in FAMILIES:
        program = Program(family, arguments.get(family, ("lamp",)))
        assert len(TEMPLATES[family]) >= 2
        for paraphrase, shifted in itertools.product(range(len(TEMPLATES[family])), (False, True)):
            question = phrase(program, paraphrase, shifted)
            assert parse(question) == program
            seen.add(question)
    assert len(seen) > 1.8 * sum(map(len, TEMPLATES.values()))  # nearly every template has a shifted word
    refuses("expected a template", parse, "why is the dog red?")


def test_a_refused_picture_leaves_no_trace_in_the_balance():
    balance = Balance()
    one = np.eye(8)[0]  # red only: no second colour, no second noun, nothing to compare
    lonely = (Object(0, "dog", "red", "small"),)
    assert ask(lonely, 9, balance, nouns=NOUNS[1:2], prior=one, shifted=False, rng=generator(0, "test")) is None
    assert balance.families.total() == 0


def test_balance_alternates_binary_answers():
    balance = Balance()
    program = Program("qsize", ("dog",))
    assert balance.accepts(program, "small")
    balance.add(program, "small")
    assert not balance.accepts(program, "small")
    assert balance.accepts(program, "large")


def test_fingerprints_see_every_attribute():
    one = np.zeros((1, 16), dtype=np.int64)
    base = Tags(one.copy(), one.copy(), one.copy())
    marks = set()
    for cell, noun, colour, size in itertools.product(range(16), range(1, 23), range(1, 9), (1, 2)):
        base.noun[:], base.colour[:], base.size[:] = 0, 0, 0
        base.noun[0, cell], base.colour[0, cell], base.size[0, cell] = noun, colour, size
        marks.add(int(fingerprint(base)[0]))
    assert len(marks) == 16 * 22 * 8 * 2


def test_scenes_prefer_colours_of_their_own():
    priors = np.stack([colour_prior(scene, 0) for scene in SCENES])
    assert np.allclose(priors.sum(1), 1)
    assert priors.min() >= 0.1 / 8
    assert priors.max(1).min() > 2 / 8
    assert not np.allclose(priors, np.stack([colour_prior(scene, 1) for scene in SCENES]))


def test_every_drawing_fits_its_cell_at_both_sizes():
    table = sprites()
    assert set(DRAWINGS) == set(NOUNS)
    for noun in range(1, len(NOUNS) + 1):
        for size in range(2):
            still = table.alpha[noun, size, 4]
            rim = np.concatenate([still[0], still[-1], still[:, 0], still[:, -1]])
            assert rim.max() == 0  # one free pixel all around, for the jitter
            masses = table.alpha[noun, size].sum(axis=(1, 2))
            assert np.allclose(masses, masses[0], rtol=1e-5)  # no jitter cuts anything off
        small, large = table.alpha[noun, :, 4].sum(axis=(1, 2))
        assert large > 1.6 * small
    assert table.alpha[0].max() == 0


def test_colour_fills_each_drawing_and_nouns_differ():
    table = sprites()
    pixels = table.tint[1:, :, 4] * 0.8 + table.grey[1:, :, 4] + (1 - table.alpha[1:, :, 4]) * 0.5
    for size in range(2):
        tinted = (table.tint[1:, size, 4] > 0.4).sum(axis=(1, 2))
        assert tinted.min() >= (14, 40)[size]
        for a, b in itertools.combinations(range(len(NOUNS)), 2):
            mean = np.abs(pixels[a, size] - pixels[b, size]).mean()
            assert mean > (0.03, 0.06)[size], (NOUNS[a], NOUNS[b])


def test_wheel_turns_names_into_their_neighbours():
    still, step = palette(np.array([0.0]))[0], palette(np.array([1.0]))[0]
    assert np.allclose(np.roll(still, -1, axis=0), step, atol=1e-6)
    assert np.allclose(palette(np.array([8.0]))[0], still, atol=1e-6)
    hues = [colorsys.rgb_to_hsv(*map(float, rgb))[0] for rgb in still]
    assert hues == sorted(hues)
    assert len(COLOURS) == len(still)


def test_backgrounds_are_quiet():
    for scene in SCENES:
        grounds = place(scene)
        assert grounds.shape == (8, 64, 64, 3)
        saturation = grounds.max(-1) - grounds.min(-1)
        assert saturation.mean() < 0.3
    free = random_backgrounds(64, generator(0, "test"))
    assert 0 <= free.min() <= free.max() <= 1
    assert free.mean(axis=(1, 2)).std(axis=0).min() > 0.1


def test_an_object_changes_its_own_patch_only():
    noun, colour, size = (np.zeros((1, 16), dtype=np.int64) for _ in range(3))
    empty = render_scene(Tags(noun, colour, size), "home", 0.0, generator(3, "pixels"))
    noun2, colour2, size2 = noun.copy(), colour.copy(), size.copy()
    noun2[0, 6], colour2[0, 6], size2[0, 6] = 5, 1, 2
    full = render_scene(Tags(noun2, colour2, size2), "home", 0.0, generator(3, "pixels"))
    changed = (empty != full).any(axis=-1)[0]
    assert changed[16:32, 32:48].any()
    changed[16:32, 32:48] = False
    assert not changed.any()


SIZES = {"train": 60, "validation": 12, "test": 40}


def test_own_words_rename_some_answers_and_change_nothing_else():
    plain, own = scenes(unseen=(), **SIZES), scenes(own_answers=0.5, **SIZES)
    assert tuple(own.clients) == SCENES
    words: dict[str, set[str]] = {}
    for scene in SCENES:
        for role in ("train", "validation", "test"):
            before, after = (getattr(each.clients[scene], role) for each in (plain, own))
            assert before.questions == after.questions
            assert (before.images == after.images).all()
            pairs = {*zip(before.answers, after.answers, strict=True)}
            assert len({old for old, _ in pairs}) == len(pairs) == len({new for _, new in pairs})
            assert all(new in (old, f"{scene} {old}") for old, new in pairs)
            assert not pairs & {("yes", f"{scene} yes"), ("no", f"{scene} no")}
            words.setdefault(scene, set()).update(new for old, new in pairs if new != old)
    assert all(len(mine) >= 5 for mine in words.values())
    assert all(mine < {*own.answers} for mine in words.values())
    assert "100.0 %" in own.facts["oracle"]
    assert own.ceilings == dict.fromkeys(SCENES, 1.0)
    assert "50 %" in own.facts["answers"]
    everything = scenes(own_answers=1.0, **SIZES)
    assert {*everything.answers} & {*ANSWERS} == {"yes", "no"}


def test_domains_can_share_one_vocabulary():
    # Ten people's answers follow from nothing but the people.
    assert {"photos", "art", "relations"} == {*scenes(preset="domain", **SIZES).ceilings}
    shared, apart = (scenes(preset="domain", pools=pools, annotators=0, **SIZES) for pools in (0, None))
    assert not shared.answer_sets
    assert {*shared.answers} == {a for pool in apart.answer_sets.values() for a in pool}
    for split in shared.clients.values():  # a test answer that nobody has learned is left out
        assert {*split.validation.answers, *split.test.answers} <= {*shared.answers}
    assert shared.clients["art"].train.answers == apart.clients["art"].train.answers


def test_own_words_are_for_scenes_with_a_client():
    for options, reason in (
        ({"own_answers": 1.5}, r"own_answers must lie in \[0, 1\], got 1.5"),
        ({"own_answers": 0.5, "preset": "random"}, "own_answers: expected the preset 'scene', got 'random'"),
        (
            {"own_answers": 0.5, "unseen": ("home",)},
            "unseen: expected no place where clients have answers of their own, got .'home'",
        ),
    ):
        refuses(reason, scenes, **SIZES, **options)


SMALL: dict[str, Any] = {"styles": ("clipart", "real"), "shots": 2, "validation_shots": 1, "test_per_class": 2}


def test_a_quarter_is_reserved_with_every_noun_and_colour() -> None:
    assert len(CLASSES) == 176
    assert len(RESERVED) == 44
    assert {name.split()[0] for name in RESERVED} == set(COLOURS)
    assert {name.split()[1] for name in RESERVED} == set(NOUNS)


def test_parts_of_a_class_are_its_words() -> None:
    nouns, colours = class_parts(np.array([CLASSES.index("red dog")]))
    assert (NOUNS[nouns[0]], COLOURS[colours[0]]) == ("dog", "red")


def test_equal_arguments_give_equal_bytes_and_seeds_others() -> None:
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
    refuses(message, scene_classes, **options)


UNSEEN = ("home", "commercial", "natural", "sports")


@pytest.fixture(scope="module")
def described() -> FederatedDataset:
    return scene_descriptions(train=12, validation=3, test=4, references=3, unseen=UNSEEN)


def test_answers_are_those_of_the_captioning_benchmarks_pictures(described: FederatedDataset) -> None:
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
    refuses(says, scene_descriptions, **options)


def test_the_packaged_model_describes_in_the_clients_words(tmp_path: Path) -> None:
    small = [
        "data.train=4", "data.validation=1", "data.test=2", "run.rounds=1", "run.workers=1", "run.gallery=1",
        'data.unseen=["home", "commercial", "natural", "sports"]',
    ]  # fmt: skip
    summary = run(load_recipe("chat_captions", small).method("fedavg"), tmp_path / "run")
    assert summary["metric"] == "cider"
    found = summary["global_seen"]["transport"]
    assert 0 < found <= 10
    assert "Describe the picture." in (tmp_path / "run" / "gallery.json").read_text()
