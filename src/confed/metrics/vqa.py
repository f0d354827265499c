"""Accuracy of free-form answers: the VQA challenge's score and its answer normaliser.

The score is that of Antol et al., "VQA: Visual question answering" (ICCV 2015), with the normalisation rules
of its official evaluation. Accuracies are fractions in [0, 1].
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float32, Int
from torch import Tensor

Variant = Literal["official", "always"]
"""When answers are normalised: only if the annotators disagree in writing (official), or always."""

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)} | {"none": "0"}
_ARTICLES = frozenset(("a", "an", "the"))

# A form is restored where exactly one of its apostrophes was left out. These are the forms that the official
# table can reach in lower case; what it lacks ("it's") or gets wrong ("somebody'd") stays so.
_RESTORED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
    he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've
    must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't
    shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's
    something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've
    they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's where'd
    where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
    wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _one_apostrophe_less(forms: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each form without one of its apostrophes, and the form."""
    for form in forms:
        for mark in re.finditer("'", form):
            yield form[: mark.start()] + form[mark.end() :], form


_CONTRACTIONS = dict(_one_apostrophe_less(_RESTORED.split())) | {"somebody'd": "somebodyd"}


def normalise_answer(answer: str) -> str:
    """The official normal form of an answer.

    In this order: line breaks and tabs become spaces; a punctuation mark vanishes if it touches a space
    somewhere in the answer or if the answer has digit-comma-digit, else it becomes a space; periods not
    followed by a digit vanish; lower case; number words up to ten become digits; articles vanish; apostrophes
    return to known contractions. Unlike the official form, only a blank answer is blank in it: an answer of articles
    keeps them, so that saying nothing is not "A", and one of punctuation marks stays as it is.

    Example:
        >>> normalise_answer("The T-shirt, two of 2,000!")
        'tshirt 2 of 2000'
    """
    answer = _stripped(answer)
    has_thousands = _THOUSANDS.search(answer) is not None
    text = answer
    for mark in _PUNCTUATION:
        if mark in answer:
            vanishes = has_thousands or f"{mark} " in answer or f" {mark}" in answer
            text = text.replace(mark, "" if vanishes else " ")
    words = [_NUMBERS.get(word, word) for word in _PERIOD.sub("", text).lower().split()] or [answer.lower()]
    without_articles = [word for word in words if word not in _ARTICLES] or words
    return " ".join(_CONTRACTIONS.get(word, word) for word in without_articles)


def vqa_accuracy(prediction: str, annotations: Sequence[str], variant: Variant = "official") -> float:
    """Agreement with human annotators (ten in VQA), each of whom is left out once.

    For each annotator: ``min(1, matches among the others / 3)``; the mean over the annotators. With ten, the
    values are 0, 0.3, 0.6, 0.9 and 1 for 0, 1, 2, 3 and more matches. "official" normalises the prediction and the
    annotations only if these are not all the same string once stripped, "always" in every case.
    """
    if not annotations:
        raise ValueError("annotations must hold at least one answer, got none")
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}, got {variant!r}")
    # The official evaluation strips before it asks whether the annotators agree: "two" and "two " do.
    prediction, annotations = _stripped(prediction), [_stripped(answer) for answer in annotations]
    if variant == "always" or len(set(annotations)) > 1:
        prediction = normalise_answer(prediction)
        annotations = [normalise_answer(answer) for answer in annotations]
    matches = sum(answer == prediction for answer in annotations)
    return _leave_one_out(matches, len(annotations))


def _stripped(answer: str) -> str:
    """Without line breaks, tabs and surrounding spaces, which the official evaluation removes in every case."""
    return answer.replace("\n", " ").replace("\t", " ").strip()


def soft_targets(counts: Int[Tensor, "B C"], annotators: int = 10) -> Float32[Tensor, "B C"]:
    """Training targets that equal each answer's VQA accuracy."""
    table = torch.tensor([_leave_one_out(n, annotators) for n in range(annotators + 1)], device=counts.device)
    outside = counts[(counts < 0) | (counts > annotators)]
    if len(outside):
        raise ValueError(f"counts must lie in [0, {annotators}], the number of annotators, got {outside[0].item()}")
    return table[counts.long()]


def _leave_one_out(matches: int, annotators: int) -> float:
    """The mean over annotators of min(1, matches among the others / 3)."""
    by_matching = matches * min(3, max(0, matches - 1))
    by_others = (annotators - matches) * min(3, matches)
    return (by_matching + by_others) / (3 * annotators)
