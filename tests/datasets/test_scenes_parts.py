"""The parts of the benchmark: executor by hand, templates, balance, drawings, colours."""

import colorsys
import itertools

import numpy as np
import pytest

from confed.data.seeding import generator
from confed.datasets.scenes.backgrounds import place, random_backgrounds
from confed.datasets.scenes.drawings import DRAWINGS, sprites
from confed.datasets.scenes.graph import COLOURS, NOUNS, SCENES, Object, Tags, colour_prior, fingerprint
from confed.datasets.scenes.questions import FAMILIES, TEMPLATES, Balance, Program, ask, execute, parse, phrase
from confed.datasets.scenes.render import palette, render_scene

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
    with pytest.raises(ValueError, match="got 'rhyme'"):
        execute(Program("rhyme", ("dog",)), GRAPH)


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
    with pytest.raises(ValueError, match="expected a template"):
        parse("why is the dog red?")


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
