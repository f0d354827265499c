"""Multi-label UC Merced: 1,680 aerial photographs with 17 labels of objects and surfaces.

Pictures: Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM SIGSPATIAL
GIS 2010. Labels: B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised graph-theoretic
method", IEEE TGRS 56(2), 2018.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from confed.data.ml_files.records import LabelRecord, line_records
from confed.data.refusals import refuse

UCM_LABELS = (
    "airplane", "bare-soil", "buildings", "cars", "chaparral", "court", "dock", "field", "grass", "mobile-home",
    "pavement", "sand", "sea", "ship", "tanks", "trees", "water",
)  # fmt: skip
"""The 17 labels in alphabetical order."""


def ucm_records(folder: Path, user: Literal["scene", "land_use", ""] = "scene") -> Iterator[LabelRecord]:
    """All pictures in the order of ``labels.jsonl``; they lie in ``images.tar`` or in ``images/``."""
    for record in line_records(folder / "labels.jsonl", user=user, prefix="ucm-"):
        if record.split not in ("train", "val", "test"):
            refuse(record.where, "the split train, val or test", record.split)
        if user and not record.user:
            refuse(record.where, f"a text as {user!r}", found="none")
        yield record
