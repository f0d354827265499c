"""Scores of tasks: what each name in a tally stands for, said once for checks, tables, pages and sites' noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf

from confed.metrics.calibration import calibration_names, expected_calibration_error
from confed.metrics.captions import BLEU, ORDER, bleu4

Sums = Mapping[str, tuple[float, float]]
"""Name in a tally -> sum and weight; added over batches, clients and processes."""


@dataclass(frozen=True)
class Score:
    """A score of a task: by default a share, whose value is the sum over the weight of its name in a tally."""

    title: str = ""  # its name in tables and figures, where that is another
    low: float = 0.0  # smallest value
    high: float = 1.0  # largest value
    percent: bool = True  # whether it is a share, which is written in per cent
    heads: bool = False  # whether it may head the results of a task on questions
    # whether each example adds a value in [0, 1] with a weight of 1, so that noise is defined for it
    per_example: bool = False
    of_right: bool = False  # whether it is the share of right answers where every question has one
    parts: str = ""  # start of the names in a tally that make it together: of these all are told, or none
    # name of each part -> smallest and largest value of its sum over its weight
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def tallied(self, name: str) -> Mapping[str, tuple[float, float]]:
        """Name in a tally -> range, of the score called so."""
        return self.ranges or {name: (self.low, self.high)}


def _of_question(title: str = "", of_right: bool = False) -> Score:
    return Score(title, heads=True, per_example=True, of_right=of_right)


CUTS = (1, 5, 10)
"""k of recall at k."""

RECALLS = tuple(f"{way}@{k}" for way, k in product(("tr", "ir"), CUTS))
"""Shares of texts that pictures find, and of pictures that texts find, among the first so many."""

SCORES: Mapping[str, Score] = {
    "loss": Score(low=-inf, high=inf, percent=False),
    "accuracy": _of_question(of_right=True),
    "vqa_accuracy": _of_question(of_right=True),
    "vqa_any": _of_question(),
    "cider": Score("CIDEr-D", high=10.0, percent=False, heads=True),
    "exact": _of_question("exact match"),
    "vqa": _of_question("VQA accuracy"),
    "anls": _of_question("ANLS"),
    "f1": _of_question("token F1"),
    "choice": _of_question("accuracy"),
    "token_accuracy": Score(),
    "example_f1": Score(per_example=True),
    "exact_match": Score(per_example=True),
    "label_accuracy": Score(),
    **dict.fromkeys(("O-P", "O-R", "O-F1"), Score()),
    "nan_logits": Score(),
    **dict.fromkeys(RECALLS, Score()),
    "pictures": Score(high=inf, percent=False),
    "ece": Score(parts="calibration/", ranges=dict.fromkeys(calibration_names(), (0.0, 1.0))),
    "bleu4": Score(
        "BLEU-4",
        parts=BLEU,
        ranges={**dict.fromkeys([f"{BLEU}{n}" for n in range(1, ORDER + 1)], (0.0, 1.0)), f"{BLEU}length": (0.0, inf)},
    ),
}
"""Name of a score, as in ``test_metrics`` -> what it is."""

PARTS = tuple(score.parts for score in SCORES.values() if score.parts)
"""What the names of parts begin with."""


def title_of(name: str) -> str:
    """A score's name in tables and figures; of a task of one's own as the task calls it."""
    return (SCORES[name].title if name in SCORES else "") or name


def summarise(tally: Sums) -> dict[str, float]:
    """Scores of an added tally: ``ece`` and ``bleu4`` from their parts, others as sum over weight.

    Names of weight zero are left out.
    """
    values = {name: total / weight for name, (total, weight) in tally.items() if weight and not name.startswith(PARTS)}
    if any(weight for name, (_, weight) in tally.items() if name.startswith(SCORES["ece"].parts)):
        values["ece"] = expected_calibration_error(tally)
    bleu = bleu4(tally)
    return values if bleu is None else {**values, "bleu4": bleu}
