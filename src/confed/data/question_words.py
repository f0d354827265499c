"""Bag-of-words baseline: answers predicted from a question's words alone."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["WordAnswers"]

WORDS = 1000
"""Words that count: the most frequent of the training questions."""
ROWS = 20_000
"""Training questions that are fitted; of more, so many that are spread evenly."""
RIDGE = 1.0
"""Penalty of squared coefficients, so that rare words and words that always come together leave a unique solution."""
DECIMALS = 6
"""Scores are compared to so many decimals, so that the answer does not depend on a processor's rounding."""


class WordAnswers:
    """Least squares from the words that a question contains (1 or 0 each, and a constant) to its answer (one-hot).

    The answer with the highest score is given, of equals the one that comes first among the training answers.

    Args:
        questions: training questions.
        answers: the answer to each.
    """

    def __init__(self, questions: Sequence[str], answers: Sequence[str]) -> None:
        count = len(questions)
        rows = [number * count // ROWS for number in range(ROWS)] if count > ROWS else range(count)
        words = [_words(questions[row]) for row in rows]
        frequency: dict[str, int] = {}
        for own in words:
            for word in own:
                frequency[word] = frequency.get(word, 0) + 1
        kept = sorted(frequency, key=lambda word: (-frequency[word], word))[:WORDS]
        self._column = {word: number for number, word in enumerate(kept, start=1)}
        self.answers = tuple(dict.fromkeys(answers[row] for row in rows))
        label_of = {answer: label for label, answer in enumerate(self.answers)}
        labels = torch.tensor([label_of[answers[row]] for row in rows], dtype=torch.int64)
        x = self._features(words)
        products = torch.zeros(len(self.answers), x.shape[1], dtype=torch.float64).index_add_(0, labels, x)
        square = x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
        self._weights = torch.linalg.solve(square, products.T)

    def __call__(self, questions: Sequence[str], allowed: Sequence[str] | None = None) -> list[str]:
        """The answer to each question; the empty text where there is none to choose from.

        Args:
            questions: what is asked.
            allowed: answers that may be given; None for all training answers.
        """
        known = set(self.answers if allowed is None else allowed)
        columns = [number for number, answer in enumerate(self.answers) if answer in known]
        if not columns or not questions:
            return [""] * len(questions)
        distinct = list(dict.fromkeys(questions))
        scores = (self._features([_words(text) for text in distinct]) @ self._weights)[:, columns]
        # argmax of a tensor may take any of equals; numpy takes the first.
        best = scores.numpy().round(DECIMALS).argmax(axis=1).tolist()
        said = {text: self.answers[columns[place]] for text, place in zip(distinct, best, strict=True)}
        return [said[text] for text in questions]

    def _features(self, words: Sequence[frozenset[str]]) -> Tensor:
        found = torch.zeros(len(words), len(self._column) + 1, dtype=torch.float64)
        found[:, 0] = 1.0
        for row, own in enumerate(words):
            for word in own:
                if word in self._column:
                    found[row, self._column[word]] = 1.0
        return found


def _words(text: str) -> frozenset[str]:
    """As :func:`confed.data.federate.words` splits them."""
    return frozenset(re.findall(r"\w+(?:'\w+)*", text.lower()))
