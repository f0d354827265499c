"""Accuracy against epsilon: what noise on the activations of split learning costs, and what it is worth."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confed.privacy.accountant import epsilon, releases_of
from confed.results.drawing import HUES, Drawing, Look, Pen, dress, style
from confed.results.runs import Run, Study, number
from confed.results.tables import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Point", "accuracy_against_epsilon", "curves"]

KINDS: Mapping[str, int] = {"bicsl": 2, "split_learning": 2}
"""Method -> kinds of rows that go up per example and step: v_MHA and v_APN; h and the gradient of z."""


@dataclass(frozen=True)
class Point:
    """Runs with the same noise.

    Attributes:
        epsilon: of the whole run; infinite without a guarantee.
        accuracies: of the global model, one per seed, as fractions.
    """

    epsilon: float
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return math.fsum(self.accuracies) / len(self.accuracies)

    @property
    def sd(self) -> float:
        """Standard deviation over seeds, 0 for one."""
        if len(self.accuracies) < 2:
            return 0.0
        return math.sqrt(math.fsum((a - self.mean) ** 2 for a in self.accuracies) / (len(self.accuracies) - 1))


def curves(study: Study, delta: float = 1e-5) -> dict[str, list[Point]]:
    """The rows of a study that are split learning, by method, each from the smallest epsilon to the largest.

    Epsilon is that of a client's rows over the whole run, where an example may be replaced by any other. A run whose
    rows are not all noised has no guarantee.

    Args:
        study: rows that differ in ``algorithm.privacy.noise``.
        delta: of the guarantee.

    Raises:
        ValueError: dp-accounting is not installed.
    """
    found: dict[str, list[Point]] = {}
    for row in study.methods:
        runs = study.of(row)
        name = str(runs[0].recipe.get("algorithm", {}).get("name", ""))
        accuracies = [a for run in runs if (a := headline(run.summary, "global_seen_mean")) is not None]
        if name in KINDS and accuracies:
            found.setdefault(name, []).append(Point(_epsilon(runs[0], name, delta), tuple(accuracies)))
    return {name: sorted(points, key=lambda point: point.epsilon) for name, points in found.items()}


def accuracy_against_epsilon(study: Study, delta: float = 1e-5) -> Drawing | None:
    """Accuracy of the global model against epsilon, a line per method; dotted where there is no noise.

    None where fewer than two rows of a method have a finite epsilon.

    Args:
        study: see :func:`curves`.
        delta: of the guarantee.

    Raises:
        ValueError: dp-accounting is not installed.
    """
    if not any(_noise(run.recipe) > 0 for run in study.runs):
        return None
    known = curves(study, delta)
    lines = {n: [p for p in points if math.isfinite(p.epsilon)] for n, points in known.items()}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    metric = f"test {study.runs[0].metric} of the global model, %"

    def draw(figure: "Figure", pen: Pen) -> None:
        axes = figure.add_subplot()
        for number_, (name, points) in enumerate(lines.items()):
            label = next(r.label for r in study.runs if r.recipe.get("algorithm", {}).get("name") == name)
            look = Look(label, f"m{number_ % HUES + 1}")
            x, y = [p.epsilon for p in points], [100 * p.mean for p in points]
            axes.errorbar(x, y, [100 * p.sd for p in points], label=label, capsize=2, **style(look, pen, 5))
            for free in known[name]:
                if math.isinf(free.epsilon):
                    axes.axhline(100 * free.mean, color=pen(look.colour), linewidth=1, linestyle=":")
        axes.set_xscale("log")
        dress(axes, pen, "", f"ε of all rows of a client (δ = {delta:g}), dotted: no noise", metric)
        axes.legend(fontsize=8.5, frameon=False, labelcolor=pen("ink"))

    return Drawing(f"accuracy-epsilon {study.recipe}", 5.2, 3.4, draw)


def _epsilon(run: Run, name: str, delta: float) -> float:
    """Epsilon of a run's rows."""
    noise = _noise(run.recipe)
    privacy: Mapping[str, Any] = run.recipe.get("algorithm", {}).get("privacy", {})
    if name == "split_learning":  # the gradients that go up tell of the labels
        noise = min(noise, number(privacy.get("gradient_noise")) or 0.0)
    epochs = int(run.recipe["run"]["rounds"]) * int(run.recipe["local"]["epochs"])
    return epsilon(noise, releases_of(epochs, KINDS[name]), delta)


def _noise(recipe: Mapping[str, Any]) -> float:
    return number(recipe.get("algorithm", {}).get("privacy", {}).get("noise")) or 0.0
