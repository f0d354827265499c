"""Answers in scenes' own words, and domains that share one vocabulary."""

import pytest

from confed.datasets.scenes import ANSWERS, SCENES, scenes

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
        with pytest.raises(ValueError, match=reason):
            scenes(**SIZES, **options)
