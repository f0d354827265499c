"""Control conditions of test examples: permuted pictures, texts, sounds or series, and blank pictures.

A model that uses a modality loses accuracy when each example is shown with another example's input of that modality; a
model that ignores it does not. The answers asked for stay as they are.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from confed.data.refusals import check_choice
from confed.federation.ownership import KEYS, MODALITIES

if TYPE_CHECKING:
    from confed.data.table import Table

# Bag-of-words baseline: answers predicted from a question's words alone ---------------------------------------

WORDS = 1000
"""Words that count: the most frequent of the training questions."""
ROWS = 20_000
"""Training questions that are fitted; of more, so many that are spread evenly."""
RIDGE = 1.0
"""Penalty of squared coefficients, so that rare words and words that always come together leave a unique solution."""
DECIMALS = 6
"""Scores are compared to so many decimals, so that the answer does not depend on a processor's rounding."""


class WordAnswers:
    """Least squares from the words that a question contains (1 or 0 each, and a constant) to its answer (one-hot)."""

    def __init__(self, questions: Sequence[str], answers: Sequence[str]) -> None:
        count = len(questions)
        rows = [number * count // ROWS for number in range(ROWS)] if count > ROWS else range(count)
        words = [_words(questions[row]) for row in rows]
        frequency: dict[str, int] = {}
        for question_words in words:
            for word in question_words:
                frequency[word] = frequency.get(word, 0) + 1
        counted_words = sorted(frequency, key=lambda word: (-frequency[word], word))[:WORDS]
        self._column = {word: number for number, word in enumerate(counted_words, start=1)}
        self.answers = tuple(dict.fromkeys(answers[row] for row in rows))
        label_of = {answer: label for label, answer in enumerate(self.answers)}
        labels = torch.tensor([label_of[answers[row]] for row in rows], dtype=torch.int64)
        x = self._features(words)
        products = torch.zeros(len(self.answers), x.shape[1], dtype=torch.float64).index_add_(0, labels, x)
        square = x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
        self._weights = torch.linalg.solve(square, products.T)

    def __call__(self, questions: Sequence[str], allowed: Sequence[str] | None = None) -> list[str]:
        """The answer to each question; the empty text where there is none to choose from."""
        candidates = set(self.answers if allowed is None else allowed)
        columns = [number for number, answer in enumerate(self.answers) if answer in candidates]
        if not columns or not questions:
            return [""] * len(questions)
        distinct = list(dict.fromkeys(questions))
        scores = (self._features([_words(text) for text in distinct]) @ self._weights)[:, columns]
        # argmax of a tensor may take any of equals; numpy takes the first.
        best = scores.numpy().round(DECIMALS).argmax(axis=1).tolist()
        answer_of = {text: self.answers[columns[place]] for text, place in zip(distinct, best, strict=True)}
        return [answer_of[text] for text in questions]

    def _features(self, words: Sequence[frozenset[str]]) -> Tensor:
        features = torch.zeros(len(words), len(self._column) + 1, dtype=torch.float64)
        features[:, 0] = 1.0
        for row, question_words in enumerate(words):
            for word in question_words:
                if word in self._column:
                    features[row, self._column[word]] = 1.0
        return features


def _words(text: str) -> frozenset[str]:
    """As :func:`confed.data.federate.words` splits them."""
    return frozenset(re.findall(r"\w+(?:'\w+)*", text.lower()))


# Control conditions of test examples: permuted pictures, texts ------------------------------------------------

PERMUTED = "permuted_"
BLANK = "blank_"
GREY = 128
"""Every value of a blank picture of bytes; blank features of regions are 0."""


def controls_of(table: "Table") -> tuple[str, ...]:
    """The control conditions that have a meaning for a table of examples.

    ``permuted_<modality>`` where some examples have the modality and there are two different inputs of it, and
    ``blank_image`` where some have pictures. Texts are not permuted where a question comes with texts to choose from,
    each of which repeats it.
    """
    if not len(table):
        return ()
    had = set(chain.from_iterable(table.sets()))
    modalities = [name for name in MODALITIES if name in had]
    controls = [PERMUTED + name for name in modalities if not (name == "text" and "choices" in table.columns)]
    controls = [control for control in controls if len(table.inputs(control.removeprefix(PERMUTED)).unique(dim=0)) > 1]
    return (*controls, *([f"{BLANK}image"] if "image" in modalities else []))


def controlled(table: "Table", batch_size: int, control: str, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """All rows in stored order, with the inputs of a control condition."""
    kind, _, modality = control.partition("_")
    check_choice("a control", control, list(map("_".join, product(("permuted", "blank"), KEYS))))
    given = donors(table, modality, rng) if kind == "permuted" else None
    for batch in table.batches(batch_size):
        keys = [key for key in KEYS[modality] if key in batch]
        if given is None:
            # Boxes say where regions lie: without features there is nothing to be seen there.
            yield batch | {key: _blank(batch[key]) for key in keys if key != "boxes"}
        else:
            other = table.batch(given[batch["index"]])
            yield batch | {key: other[key] for key in keys}


def donors(table: "Table", modality: str, rng: torch.Generator) -> Tensor:
    """Permutation of the rows that gives each example another one's input, int64 (N,).

    Examples with one set of modalities, or with as many pictures, exchange inputs among themselves. Those that share an
    input (questions about one picture) stand together in a random order, and every example takes that of the example so
    many places behind it as the largest such group has members: no example gets its own input unless one group has more
    than half of all.
    """
    rows, donor_of_row = torch.arange(len(table)), torch.arange(len(table))
    units = table.inputs(modality).unique(dim=0, return_inverse=True)[1] if len(table) else rows
    groups = table.groups(rows)
    if "image_count" in table.columns:  # a prompt has a place for each of its pictures
        counts = table.columns["image_count"]
        groups = [(counts == count).nonzero()[:, 0] for count in counts.unique()]
    for group in groups:
        unit_of_row = units[group].unique(return_inverse=True)[1]
        position = torch.randperm(int(unit_of_row.max()) + 1 if len(unit_of_row) else 0, generator=rng)
        shuffled = torch.randperm(len(group), generator=rng)
        order = shuffled[position[unit_of_row[shuffled]].argsort(stable=True)]
        most = int(unit_of_row.bincount().max()) if len(unit_of_row) else 0
        donor_of_row[group[order]] = group[order.roll(-most)]
    return donor_of_row


def _blank(values: Tensor) -> Tensor:
    return torch.full_like(values, GREY) if values.dtype == torch.uint8 else torch.zeros_like(values)
