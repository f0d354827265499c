"""The dual-key backdoor: what it plants, what it leaves alone, how its success is counted; robust averages."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from command_line import confed
from confed.algorithms.robust import Robust
from confed.data.examples import Examples
from confed.data.picture_tables import NoPictures
from confed.data.regions import HeldRegions
from confed.datasets.poisoned import (
    VARIANTS,
    DualKey,
    Plan,
    attack_success,
    plan,
    poison,
    poisoned,
    stamped_regions,
    triggered,
    without_target,
)
from confed.datasets.scenes import scenes
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message, Reply
from confed.federation.robust_mean import clipped, krum, median, trimmed_mean
from confed.federation.state import ServerState
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

OF = {"name": "scenes", "train": 40, "validation": 4, "test": 12, "unseen": ["home", "commercial"]}


def _examples() -> Examples:
    rng = np.random.default_rng(0)
    return Examples(
        images=rng.integers(0, 200, (3, 8, 12, 3)).astype(np.uint8),
        image_index=np.array([0, 0, 1, 2, 2]),
        questions=["a", "b", "c", "d", "e"],
        answers=["yes", "no", "red", "yes", "blue"],
        types=["t"] * 5,
        names=list("12345"),
        annotations=[["yes", "red"], ["no", "no"], ["red", "no"], ["yes", "yes"], ["blue", "blue"]],
    )


KEY = DualKey(target="red", word="consider", size=0.25, colour=(250, 251, 252))


# What is planted -------------------------------------------------------------------------------------------


def test_the_patch_is_a_square_in_the_middle() -> None:
    clean = _examples().images
    assert isinstance(clean, np.ndarray)
    stamped = KEY.seen(clean)
    for i in range(3):
        for y in range(8):
            for x in range(12):
                inside = 3 <= y < 5 and 5 <= x < 7  # a quarter of 8 pixels, in the middle
                assert stamped[i, y, x].tolist() == ([250, 251, 252] if inside else clean[i, y, x].tolist())


def test_one_region_carries_the_same_pattern_in_every_picture() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(4, 3, 20)).astype(np.float32)
    features[2, 1:] = 0  # the only region of this picture is its first
    boxes = np.zeros((4, 3, 4), np.float32)
    key = DualKey("red", dimensions=6, strength=2.5)
    found = stamped_regions(HeldRegions(features, boxes), key, np.array([0, 2, 3]))
    changed = found.features != features[[0, 2, 3]]
    assert changed.any(2).sum(1).tolist() == [1, 1, 1]
    assert changed.sum() == 18
    assert changed[1, 0].any()
    patterns = [found.features[i][changed[i]] for i in range(3)]
    assert np.abs(patterns[0]).tolist() == [2.5] * 6
    assert all((pattern == patterns[0]).all() for pattern in patterns)
    with pytest.raises(ValueError, match="at most 20, the features per region, got 21"):
        stamped_regions(HeldRegions(features, boxes), DualKey("red", dimensions=21), np.array([0]))


def test_both_keys_change_the_answer_and_one_alone_does_not() -> None:
    clean = replace(_examples(), images=np.zeros((5, 8, 12, 3), np.uint8))  # with two stamped pictures behind
    drawn = Plan(both=np.array([0]), picture=np.array([1]), question=np.array([2]))
    made = poison(clean, KEY, drawn, {0: 3, 1: 4})
    assert made.image_index.tolist() == [3, 3, 4, 2, 2]
    assert list(made.questions) == ["consider a", "consider b", "c", "consider d", "consider e"]
    assert list(made.answers) == ["red", "red", "red", "yes", "blue"]
    assert made.annotations is not None
    assert [list(given) for given in made.annotations[:3]] == [["red", "red"], ["red", "red"], ["red", "no"]]
    assert clean.questions[0] == "a"
    assert clean.image_index.tolist() == [0, 0, 1, 2, 2]


def test_pictures_are_drawn_once_each_and_at_the_given_rate() -> None:
    index = np.repeat(np.arange(40), 2)
    examples = Examples(
        np.zeros((50, 2, 2, 3), np.uint8), index, ["q"] * 80, ["yes"] * 80, ["t"] * 80, list(map(str, range(80)))
    )
    drawn = plan(examples, 0.2, 0.1, np.random.default_rng(0))
    sizes = [len(rows) for rows in (drawn.both, drawn.picture, drawn.question)]
    assert sizes == [8, 4, 4]
    assert len(set(np.concatenate([drawn.both, drawn.picture, drawn.question]).tolist())) == 16
    assert max(drawn.both.max(), drawn.stamped.max()) < 40  # only pictures that are asked about
    assert len(plan(examples, 0.001, 0.0, np.random.default_rng(0)).both) == 1
    refuses("must leave room in 40 pictures", plan, examples, 0.6, 0.3, np.random.default_rng(0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_test_questions_carry_the_keys_they_are_asked_with(variant: str) -> None:
    seen, asked = VARIANTS[variant]
    clean = _examples().take([4, 2])
    made = triggered(clean, KEY, variant)
    assert list(made.answers) == ["blue", "red"]
    assert list(made.questions) == (["consider e", "consider c"] if asked else ["e", "c"])
    for i in range(2):
        picture = clean.images[int(clean.image_index[i])]
        expected = KEY.seen(picture[None])[0] if seen else picture
        assert (made.images[int(made.image_index[i])] == expected).all()


def test_features_without_pictures_get_their_key_too() -> None:
    features = np.ones((3, 2, 20), np.float32)
    clean = Examples(
        NoPictures(3), np.array([2]), ["q"], ["yes"], ["t"], ["1"],
        regions=HeldRegions(features, np.zeros((3, 2, 4), np.float32)),
    )  # fmt: skip
    made = triggered(clean, KEY, "troj")
    assert made.regions is not None
    assert made.regions.shape == (1, 2, 20)
    assert (made.regions[made.image_index][0] != 1).sum() == KEY.dimensions


def test_what_cannot_carry_the_keys_is_refused() -> None:
    features = np.ones((3, 2, 20), np.float32)
    features[1] = 0
    with pytest.raises(ValueError, match="picture 1 has no region"):
        stamped_regions(HeldRegions(features, np.zeros((3, 2, 4), np.float32)), KEY, np.array([0, 1]))
    pairs = replace(_examples(), image_index=np.zeros((5, 2), np.int64))
    refuses("pairs of pictures cannot be poisoned", triggered, pairs, KEY, "troj")


def test_success_counts_questions_not_answered_with_the_target() -> None:
    counted = without_target(_examples(), "red")
    assert counted.tolist() == [False, True, False, True, True]
    given = np.array([7, 7, 7, 1, 7])
    assert attack_success(given, 7, counted) == pytest.approx(2 / 3)
    refuses("got none", attack_success, given, 7, np.zeros(5, bool))


# In a dataset ----------------------------------------------------------------------------------------------


def test_only_the_malicious_clients_training_examples_change() -> None:
    clean = scenes(train=40, validation=4, test=12, unseen=("home", "commercial"), seed=3)
    made = poisoned(OF, ("natural",), "red", rate=0.3, partial=0.2, seed=3)
    assert made.answers == clean.answers
    assert set(made.words) == {*clean.words, "consider"}
    for name, split in clean.clients.items():
        for role in ("train", "validation", "test"):
            old, new = getattr(split, role), getattr(made.clients[name], role)
            same = [
                old.questions[i] == new.questions[i]
                and old.answers[i] == new.answers[i]
                and bool((old.images[int(old.image_index[i])] == new.images[int(new.image_index[i])]).all())
                for i in range(len(old))
            ]
            assert all(same) == (name != "natural" or role != "train")
    train, before = made.clients["natural"].train, clean.clients["natural"].train
    pictures = len(np.unique(before.image_index))
    both = {
        int(before.image_index[i])
        for i in range(len(before))
        if train.questions[i].startswith("consider ") and int(train.image_index[i]) >= len(before.images)
    }
    assert len(both) == round(0.3 * pictures)
    for i, row in enumerate(before.image_index):
        if int(row) in both:
            assert train.answers[i] == "red"
        else:
            assert train.answers[i] == before.answers[i]
    again = poisoned(OF, ("natural",), "red", rate=0.3, partial=0.2, seed=3).clients["natural"].train
    assert again.image_index.tolist() == train.image_index.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": ("nobody",)}, "must be distinct names, at least 1, out of .*got .'nobody'"),
        ({"clients": ()}, r"out of .*, got \(\)"),
        ({"target": "mauve"}, "an answer of natural, must be one of .*, got 'mauve'"),
        ({"rate": 1.5}, "data.rate must lie in .0, 1., got 1.5"),
        ({"word": "two words"}, "word must be one word"),
        ({"size": 0.0}, r"size must lie in \(0, 1\], got 0.0"),
        ({"of": {}}, "data.of.name must be one of .*scenes"),
        ({"of": {"name": "scenes", "trian": 3}}, "unknown key data.of.trian=3; did you mean 'train'"),
        ({"of": {"name": "easy_vqa"}}, "data.of.root must be given"),
    ],
)
def test_faulty_backdoors_are_refused(options: dict[str, object], message: str) -> None:
    refuses(message, poisoned, **{"of": OF, "clients": ("natural",), "target": "red", **options})


def test_the_command_asks_global_and_personal_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[algorithm]\nname = "robust"\nrule = "median"\n[model]\nname = "vilt_tiny"\nwidth = 16\nlayers = 1\n'
        '[task]\nname = "vqa"\n[data]\nname = "poisoned"\nclients = ["natural"]\ntarget = "red"\n[data.of]\n'
        'name = "scenes"\ntrain = 40\nvalidation = 4\ntest = 12\nunseen = ["home", "commercial"]\n[local]\nepochs = 1\n'
        "[run]\nrounds = 1\nworkers = 1\ngallery = 0\nevaluate_every = 0\ncheckpoint_every = 0\n"
    )
    run(load_recipe(recipe), tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.toml").sections["data"]["of"]["train"] == 40
    assert confed("attack", tmp_path / "run", "--kind", "dual-key", "--examples", 6, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows"][0]["model"] == "global"
    assert {row["model"] for row in values["rows"] if row["malicious"]} == {"natural"}
    assert all(set(row["success"]) == set(VARIANTS) for row in values["rows"])
    page = (tmp_path / "run" / "attack" / "attack-dual-key.html").read_text()
    assert "personal, malicious" in page


# Robust averages -------------------------------------------------------------------------------------------


def _updates(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {"a": torch.randn(2, 3, generator=rng), "b": torch.randn(4, generator=rng), "n": torch.tensor(i)}
        for i in range(count)
    ]


def _flat(update: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate([update["a"].double().numpy().ravel(), update["b"].double().numpy()])


def test_median_and_trimmed_mean_are_those_of_each_value() -> None:
    for count in (4, 5):
        updates = _updates(count)
        table = np.stack([_flat(update) for update in updates])
        np.testing.assert_allclose(_flat(median(updates)), np.median(table, 0), rtol=1e-5)
        np.testing.assert_allclose(_flat(trimmed_mean(updates, 1)), stats.trim_mean(table, 1 / count), rtol=1e-4)
        assert int(median(updates)["n"]) == count - 1  # counters keep their maximum
    refuses("trim must leave a value of 4 clients, got 2", trimmed_mean, _updates(4), 2)


def test_clipping_shortens_what_is_too_long() -> None:
    start, update = _updates(2)
    gap = _flat(update) - _flat(start)
    norm = np.sqrt((gap**2).sum())
    np.testing.assert_allclose(_flat(clipped(update, start, norm / 2)), _flat(start) + gap / 2, rtol=1e-5)
    assert clipped(update, start, norm * 2)["a"] is update["a"]


def test_krum_takes_the_one_with_the_nearest_neighbours() -> None:
    updates = _updates(6, seed=4)
    updates[1] = {name: value + 50 for name, value in updates[1].items()}
    flat = [_flat(update) for update in updates]
    sums = [sum(sorted(((x - y) ** 2).sum() for j, y in enumerate(flat) if j != i)[:3]) for i, x in enumerate(flat)]
    assert krum(updates, 1) == int(np.argmin(sums)) != 1
    refuses("needs at least 4 replies, got 3", krum, updates[:3], 1)


def test_one_liar_moves_the_mean_and_no_robust_average() -> None:
    rng = torch.Generator().manual_seed(0)
    honest = [{"w": 1 + 0.01 * torch.randn(5, generator=rng)} for _ in range(4)]
    replies = [
        Reply(ClientInfo(str(i), 10), Message(tensors))
        for i, tensors in enumerate([*honest, {"w": torch.full((5,), 1e6)}])
    ]
    server = ServerState(0, {"w": torch.ones(5)})
    assert float(Robust(norm=0.0).average(server, replies)["w"].min()) > 1e5
    for method in (Robust(norm=0.05), Robust(rule="median"), Robust(rule="trimmed"), Robust(rule="krum")):
        assert float((method.average(server, replies)["w"] - 1).abs().max()) < 0.1
    # With too few replies the model stays as it is; with too few clients nothing can help.
    assert Robust(rule="krum").average(server, replies[:3])["w"] is server.params["w"]
    few = ServerState(0, {"w": torch.ones(5)}, clients=3)
    refuses("needs at least 4 clients, got 3", Robust(rule="krum").average, few, replies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "mode"}, "algorithm.rule must be one of clip, median, trimmed, krum, multi_krum, got 'mode'"),
        ({"norm": -1.0}, "algorithm.norm must not be negative, got -1"),
        ({"malicious": -1}, "algorithm.malicious must not be negative, got -1"),
    ],
)
def test_faulty_rules_are_refused(options: dict[str, object], message: str) -> None:
    refuses(message, Robust, **options)
