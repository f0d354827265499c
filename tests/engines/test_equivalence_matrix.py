"""The equivalence matrix: every field and hook in every way of execution, as ``federation/equivalence.py`` declares."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from confed.federation.algorithm import Algorithm
from confed.federation.equivalence import HOOKS, LOCAL, OPTIONS, WAYS, Row, hooks
from confed.federation.frozen_features import FrozenFeatures
from confed.federation.local import Local
import matrix_cases
from matrix_cases import Case, Outcome, apart, cases, outcome, setup_of

CASES = cases()
ROWS = {**{f"local.{n}": r for n, r in LOCAL.items()}, **{f"algorithm.{n}": r for n, r in OPTIONS.items()}}
ROWS |= {f"hook {name}": row for name, row in HOOKS.items()}
RUNS: dict[str, Callable[..., Outcome]] = {
    "stacked": matrix_cases.stacked,
    "workers": matrix_cases.workers,
    "buffered": matrix_cases.buffered,
    "kept features": matrix_cases.kept,
}


def row_of(name: str) -> Row:
    return ROWS[name if name.startswith("hook") else name.split()[0]]


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


@cache
def reference(name: str) -> Outcome:
    """One by one, with an effect of its own where it may have one."""
    case = CASES[name]
    found, without = outcome(setup_of(case.algorithm, case.local)), outcome(setup_of(*case.without))
    assert found.errors == {}
    if row_of(name).asked:
        least = 0.0 if case.name == "accumulator" else 1e-3
        assert apart(found, without) > least, "the case has no effect, so that its cells cannot fail"
    return found


def test_every_field_and_hook_has_a_row_and_a_case():
    assert list(LOCAL) == [field.name for field in fields(Local)] or set(LOCAL) == {f.name for f in fields(Local)}
