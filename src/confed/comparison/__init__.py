"""Comparison of methods: records of runs in, paired tests and a verdict out; knows no files and no pages.

A :class:`Record` is what one run of one method measured: scores of test examples by place, or values alone.
:func:`compare` pairs them by seed, place and example, tests, corrects over all pairs, and refuses what is no pair.
"""

from confed.comparison.paired import Difference
from confed.comparison.records import Examples, Outcome, Record, Resampled, Role
from confed.comparison.verdict import Compared, compare

__all__ = ["Compared", "Difference", "Examples", "Outcome", "Record", "Resampled", "Role", "compare"]
