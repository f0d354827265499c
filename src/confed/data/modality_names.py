"""Names of sets of modalities, such as "image+audio", in the order of tables."""

from collections.abc import Iterable, Sequence

import numpy as np

from confed.data.refusals import check_choice
from confed.federation.ownership import MODALITIES


def sort_modalities(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Modalities in the fixed order, each once."""
    given = list(names)
    for name in given:
        check_choice(f"a modality of {where}", name, MODALITIES)
    return tuple(name for name in MODALITIES if name in given)


def set_name(row: Sequence[bool] | np.ndarray) -> str:
    """Name of a set of modalities."""
    return "+".join(name for name, present in zip(MODALITIES, row, strict=True) if present)


def set_names(present: np.ndarray) -> list[str]:
    """Names of the sets of modalities of N examples."""
    kinds, inverse = np.unique(present, axis=0, return_inverse=True)
    written = [set_name(kind) for kind in kinds]
    return [written[number] for number in inverse.reshape(-1).tolist()]
