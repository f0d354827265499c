"""The preset "function": plain pictures, and one kind of question per client."""

from collections.abc import Mapping

import numpy as np

from confed.datasets.scenes.graph import COLOURS, NOUNS
from confed.datasets.scenes.making import Knobs, Made, make
from confed.datasets.scenes.render import render_neutral

__all__ = ["FUNCTIONS", "make_function"]

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "object": ("qnoun",),
    "attribute": ("qcolor", "qsize"),
    "relation": ("qpos", "rel"),
    "logic": ("exist", "same", "morethan"),
    "number": ("count",),
}
"""Client -> the families of its questions."""
_EVEN = np.full(len(COLOURS), 1 / len(COLOURS))
# With all colours alike, hardly anything would be there more than once; half of the colours make counting worth while.
_FEW = np.where(np.arange(len(COLOURS)) % 2 == 0, 0.22, 0.03)


def make_function(function: str, role: str, number: int, knobs: Knobs, label: str, stream: str, seen: set[int]) -> Made:
    """``number`` questions of a function's families about plain pictures.

    Args:
        function: a key of :data:`FUNCTIONS`.
        role: what the questions are for.
        number: how many.
        knobs: the resolved options.
        label: names the examples.
        stream: names the random streams.
        seen: fingerprints of graphs that must not come again; those that are tried are added.
    """
    families = FUNCTIONS[function]
    return make(
        role=role,
        number=number,
        label=label,
        nouns=NOUNS,
        prior=_FEW if function == "number" else _EVEN,
        per_picture=min(knobs.questions_per_picture, 2 * len(families)),
        shifted=knobs.wording,
        render=render_neutral,
        seed=knobs.seed_of(role),
        seen=seen,
        stream=f"function {stream}",
        families=families,
    )
