"""Scores of answers and of texts."""

import random
import re

import pytest
import torch

from confed.metrics.captions import anls, edits, squad_words, token_f1
from confed.metrics.vqa import normalise_answer, soft_targets, vqa_accuracy
from refusals import refuses


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("2,000", "2000"),
        ("U.S.", "us"),
        ("dont know", "don't know"),
        ("an apple, red", "apple red"),
        ("None", "0"),
        ("yes/no", "yes no"),
        ("T-shirt", "t shirt"),
        ("10:30", "10:30"),
        ("$5", "$5"),
        ("3.", "3"),
        ("1.5", "1.5"),
        ("9,000!", "9000"),
        ("ten", "10"),
        ("Im", "im"),
        ("(red)", "red"),
        # One apostrophe missing is restored, two are not; the table's own slip is kept.
        ("couldnt've couldn'tve couldntve", "couldn't've couldn't've couldntve"),
        # Only a blank answer is blank in its normal form.
        ("A", "a"),
        ("A.", "a"),
        ("(a)", "a"),
        ("the a", "the a"),
        ("?!", "?!"),
        (" ", ""),
        ("its somebody'd", "its somebodyd"),
        ("\tThe T-shirt, two of 2,000!\n", "tshirt 2 of 2000"),
    ],
)
def test_normalised_answers_have_their_golden_values(answer, normal):
    assert normalise_answer(answer) == normal


@pytest.mark.parametrize(
    ("prediction", "annotations", "official", "always"),
    [
        ("2", ["two"] * 8 + ["2", "three"], 1, 1),
        ("2", ["two"] * 10, 0, 1),
        ("cat's", ["the cat's"] * 6 + ["cat"] * 4, 1, 1),
        (" two\n", ["two"] * 10, 1, 1),
        # Equal once they are stripped, so nothing is normalised.
        ("2", ["two"] * 9 + ["two "], 0, 1),
        ("two", ["two"] * 5 + ["two\n"] * 5, 1, 1),
    ],
)
def test_both_variants_of_the_score_have_their_values(prediction, annotations, official, always):
    assert vqa_accuracy(prediction, annotations) == official
    assert vqa_accuracy(prediction, annotations, "always") == always


@pytest.mark.parametrize("blank", ["", " ", "\n", "?", "..."])
def test_an_answer_that_says_nothing_is_not_an_article(blank):
    assert vqa_accuracy(blank, ["A"] * 10, "always") == 0
    assert vqa_accuracy(blank, ["A"] * 9 + ["B"]) == 0
    assert vqa_accuracy("the", ["a"] * 10, "always") == 0
    assert vqa_accuracy("a.", ["A"] * 10, "always") == 1


def by_the_official_steps(prediction: str, annotations: list[str]) -> float:
    """The official evaluation's steps, one after the other, on words without apostrophes."""

    def clean(text: str) -> str:
        return re.sub(r"[\n\t]", " ", text).strip()

    def processed(text: str) -> str:
        marks = [mark for mark in ';/[]"{}()=+\\_-><@`,?!' if mark in text]
        glued = re.search(r"\d,\d", text) is not None
        out = text
        for mark in marks:
            beside_space = re.search(f" {re.escape(mark)}|{re.escape(mark)} ", text) is not None
            out = out.replace(mark, "" if glued or beside_space else " ")
        out = re.sub(r"\.(?!\d)", "", out)
        digits = {"none": "0", "zero": "0", "one": "1", "two": "2", "ten": "10"}
        return " ".join(digits.get(word, word) for word in out.lower().split() if word not in ("a", "an", "the"))

    said, people = clean(prediction), [clean(one) for one in annotations]
    if len(set(people)) > 1:
        said, people = processed(said), [processed(one) for one in people]
    left_out = [[one for j, one in enumerate(people) if j != i] for i in range(len(people))]
    return sum(min(1.0, others.count(said) / 3) for others in left_out) / len(people)


def test_score_is_that_of_the_official_steps():
    rng = random.Random(7)
    words = ["two", "2", "Two", "the two", "2.", "a cat", "cat", "cat,", "1,000", "1000", "none", "0", "t-shirt"]
    pads = ["", "", "", " ", "\n", "\t ", "  "]

    def said(pool: list[str]) -> str:
        return rng.choice(pads) + rng.choice(pool) + rng.choice(pads)

    padded = 0
    for _ in range(4000):
        pool = rng.sample(words, rng.choice([1, 1, 2, 3]))
        annotations, prediction = [said(pool) for _ in range(10)], said(words)
        wanted = by_the_official_steps(prediction, annotations)
        assert vqa_accuracy(prediction, annotations) == pytest.approx(wanted), (prediction, annotations)
        # What the order of stripping and comparing decides.
        padded += len(set(annotations)) > 1 and len({one.strip() for one in annotations}) == 1
    assert padded > 1000


def test_soft_targets_are_the_scores():
    given = [["yes"] * 3 + ["no"] * 7, ["maybe"] * 9 + ["no"]]
    counts = torch.tensor([[answers.count(answer) for answer in ("yes", "no")] for answers in given])
    torch.testing.assert_close(soft_targets(counts), torch.tensor([[0.9, 1.0], [0.0, 0.3]]))


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vqa_accuracy("yes", []), "at least one answer"),
        (
            lambda: vqa_accuracy("yes", ["yes"], "never"),
            "variant must be one of official, always, got 'never'",
        ),
        (lambda: soft_targets(torch.tensor([[0, 11]])), r"counts must lie in \[0, 10\].* got 11"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    refuses(message, call)


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
    refuses("needs a reference at least", score, "red", [])
