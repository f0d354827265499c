"""The VQA score and its normaliser, against the official evaluation's results."""

import pytest
import torch

from confed.metrics.vqa import answer_counts, exact_match, normalise_answer, soft_targets, vqa_accuracy


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("2,000", "2000"),
        ("U.S.", "us"),
        ("dont know", "don't know"),
        ("a", ""),
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
        ("its somebody'd", "its somebodyd"),
        ("\tThe T-shirt, two of 2,000!\n", "tshirt 2 of 2000"),
    ],
)
def test_normaliser_golden(answer, normal):
    assert normalise_answer(answer) == normal


@pytest.mark.parametrize(("matches", "score"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_score_by_matches(matches, score):
    assert vqa_accuracy("yes", ["yes"] * matches + ["no"] * (10 - matches)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "annotations", "official", "always"),
    [
        ("2", ["two"] * 8 + ["2", "three"], 1, 1),
        ("2", ["two"] * 10, 0, 1),
        ("cat's", ["the cat's"] * 6 + ["cat"] * 4, 1, 1),
        (" two\n", ["two"] * 10, 1, 1),
    ],
)
def test_variants(prediction, annotations, official, always):
    assert vqa_accuracy(prediction, annotations) == official
    assert vqa_accuracy(prediction, annotations, "always") == always


def test_score_is_the_leave_one_out_mean():
    annotations = ["red", "red", "blue", "red", "green"]
    by_definition = [min(1, sum(other == "red" for j, other in enumerate(annotations) if j != i) / 3) for i in range(5)]
    assert vqa_accuracy("red", annotations) == pytest.approx(sum(by_definition) / 5)


def test_soft_targets_are_the_scores():
    given = [["yes"] * 3 + ["no"] * 7, ["maybe"] * 9 + ["no"]]
    counts = answer_counts(given, ["yes", "no"])
    assert counts.tolist() == [[3, 7], [0, 1]]
    torch.testing.assert_close(soft_targets(counts), torch.tensor([[0.9, 1.0], [0.0, 0.3]]))


def test_exact_match_does_not_normalise():
    assert exact_match("left", "left") == 1
    assert exact_match("the left", "left") == 0


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
    with pytest.raises(ValueError, match=message):
        call()
