"""ANLS and token F1 against values worked out by hand."""

import random

import pytest

from confed.metrics.texts import anls, edits, squad_words, token_f1


def slow_edits(one: str, other: str) -> int:
    """By the recursion itself."""
    if not one or not other:
        return len(one) + len(other)
    here = slow_edits(one[1:], other[1:]) + (one[0] != other[0])
    return min(slow_edits(one[1:], other) + 1, slow_edits(one, other[1:]) + 1, here)


def test_edits_are_the_fewest() -> None:
    assert edits("kitten", "sitting") == 3
    draw = random.Random(0)
    for _ in range(30):
        one, other = ("".join(draw.choices("ab", k=draw.randrange(6))) for _ in range(2))
        assert edits(one, other) == slow_edits(one, other) == edits(other, one)


def test_anls_is_one_minus_the_distance_and_nothing_from_half_on() -> None:
    assert anls(" COCA  cola", ["coca cola"]) == 1
    assert anls("coca col", ["Coca Cola"]) == pytest.approx(1 - 1 / 9)
    assert anls("ab", ["abcd"]) == 0  # distance 2 of 4 is the threshold
    assert anls("abc", ["abcde"]) == pytest.approx(0.6)
    assert anls("abc", ["xyz", "abd"]) == pytest.approx(2 / 3)
    assert anls("abc", ["abd"], threshold=0.3) == 0
    assert anls("", [""]) == 1


def test_token_f1_counts_shared_words_once_each() -> None:
    assert squad_words("The T-shirt, a red one!") == ["tshirt", "red", "one"]
    assert token_f1("the red red ball", ["a red ball on grass"]) == pytest.approx(2 * 2 / (3 + 4))
    assert token_f1("blue", ["red", "Blue."]) == 1
    assert token_f1("the", ["red"]) == 0
    assert token_f1("A.", ["a"]) == token_f1("the ball", ["A ball"]) == 1


def test_only_a_blank_text_has_no_words() -> None:
    assert [squad_words(text) for text in ("A", "the a", "?!", " ")] == [["a"], ["the", "a"], ["?!"], []]
    for blank in ("", " ", "\n"):
        assert [token_f1(blank, [reference]) for reference in ("A", "the", "?", "red")] == [0, 0, 0, 0]
    assert (token_f1("?", ["A"]), token_f1("the", ["A"]), token_f1("?", ["?"]), token_f1("", [""])) == (0, 0, 1, 1)


@pytest.mark.parametrize("score", [anls, token_f1])
def test_no_reference_is_named(score) -> None:
    with pytest.raises(ValueError, match="needs a reference at least"):
        score("red", [])
