"""The equivalence matrix: every field and hook in every way of execution, as ``federation/equivalence.py`` declares."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import matrix_cases
from confed.engines.executor import InProcess
from confed.engines.perform import Workspace
from confed.federation import equivalence
from confed.federation.algorithm import Algorithm
from confed.federation.compression import Compression
from confed.federation.equivalence import HOOKS, LOCAL, OPTIONS, RUN, WAYS, Row, hooks
from confed.federation.frozen_features import FrozenFeatures
from confed.federation.local import Local
from confed.recipes.run_section import RunSection
from confed.runs.at_once import clients_at_once
from matrix_cases import CASES, FIELDS, OVERRIDES, SGD, SIZES, UNASKED, Outcome, Plain, apart, outcome, setup_of
from refusals import refuses

TABLES = {"local": LOCAL, "algorithm": OPTIONS, "run": RUN, "hook": HOOKS}
RUNS: dict[str, Callable[..., Outcome]] = {
    "stacked": matrix_cases.stacked,
    "workers": matrix_cases.workers,
    "buffered": matrix_cases.buffered,
    "kept features": matrix_cases.kept,
}


def row_of(name: str) -> Row:
    case = CASES[name]
    return TABLES[case.table][case.name]


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


@cache
def without(algorithm: Algorithm, local: Local) -> Outcome:
    return outcome(setup_of(algorithm, local))


@cache
def reference(name: str) -> Outcome:
    """One by one; the case has an effect where anything of a round may depend on it, or its cells could not fail."""
    case = CASES[name]
    found = outcome(setup_of(case.algorithm, case.local, **case.run))
    effect = apart(found, without(*case.without))
    assert found.errors == {}
    if row_of(name).in_rounds:
        assert effect > (1e-3 if case.visible else 0.0)
    else:
        assert effect == 0.0
    return found


def of_training(run: Outcome) -> dict[str, Any]:
    """Bits that training decides; own models may be evaluated at once all the same."""
    return {name: tensor for name, tensor in run.tensors.items() if not name.startswith("examined")}


def compare(name: str, way: str, run: Callable[..., Outcome]) -> None:
    case, unbatchable_reason = CASES[name], reference(name)
    result = row_of(name).result(way, case.value)
    given = setup_of(case.algorithm, case.local, **case.run)
    if result == "refused":
        refuses(r"run\.async\.buffer must be 0 for .+, got 4: .+", run, given)
        return
    found = run(given)
    assert found.errors == {}
    if way == "stacked":
        assert bool(found.executor.unbatchable_reason) == (result == "one by one"), found.executor.notes
        assert apart(unbatchable_reason, found) < 1e-5
        if result == "one by one":
            assert all(torch.equal(t, of_training(found)[n]) for n, t in of_training(unbatchable_reason).items())
    else:
        assert apart(unbatchable_reason, found) == 0.0
    if way == "kept features":
        counts = found.executor.features
        assert (counts.exact, counts.reason, counts.reused > 50) == (True, "", True)


def cells(way: str) -> list[Any]:
    """Cells of a way; what runs the clients' own training elsewhere or later is slow for its settings but the first."""
    slow = [name for name in CASES if name.startswith("local.")][1:] if way in ("workers", "resumed") else []
    return [pytest.param(name, way, id=f"{way}-{name}", marks=[pytest.mark.slow] * (name in slow)) for name in CASES]


@pytest.mark.parametrize(("name", "way"), [cell for way in RUNS for cell in cells(way)])
def test_cell(name: str, way: str):
    compare(name, way, RUNS[way])


@pytest.mark.parametrize(("name", "way"), cells("resumed"))
def test_resumed_cell(name: str, way: str, tmp_path: Path):
    compare(name, way, lambda given: outcome(given, folder=tmp_path))


@pytest.mark.parametrize("direction", RUN)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("algorithm.")])
def test_option_beside_compression(name: str, direction: str):
    method, packed = CASES[name].algorithm, {direction: Compression(8)}
    if row_of(name).packed == "refused":
        refuses(rf"run\.{direction} must be left out for Plain: ", setup_of, method, SGD, **packed)
        return
    together = outcome(setup_of(method, SGD, **packed))
    assert together.errors == {}
    assert apart(together, outcome(setup_of(method, SGD))) > 0.0
    assert apart(together, outcome(setup_of(Plain(), SGD, **packed))) > 0.0
    assert apart(together, matrix_cases.workers(setup_of(method, SGD, **packed))) == 0.0


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_a_run_is_one_or_within_the_tolerance(name: str):
    case = CASES[name]
    given = setup_of(case.algorithm, case.local, **case.run)
    chosen = clients_at_once(RunSection(), given, Workspace(given.model()))
    stacks = row_of(name).result("stacked", case.value) in ("within 1e-5", "not asked")
    if case.name == "schedule":
        assert chosen.reason == "rates follow a schedule, and clients have different numbers of steps"
        return
    assert chosen.clients == (len(SIZES) if stacks else 1)
    if stacks:
        together = outcome(replace(given, batch_clients=chosen.clients))
        assert together.executor.unbatchable_reason == ""
        assert apart(reference(name), together) < 1e-5


@pytest.fixture(scope="module")
def on_ray() -> dict[str, dict[str, float]]:
    pytest.importorskip("ray")
    from ray_scenarios import scenario

    return scenario("matrix", 1800)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_cell_on_ray(name: str, on_ray: dict[str, dict[str, float]]):
    result = "equal bits" if row_of(name).in_rounds else "not asked"
    assert row_of(name).result("Ray", CASES[name].value) == result
    assert on_ray[name] == {"errors": 0, "apart": 0.0}


# The tables are whole, and what they lack is not followed ----------------------------------------------------------


def test_every_field_and_hook_has_a_row_and_a_case():
    assert set(LOCAL) == {field.name for field in fields(Local)} == set(FIELDS)
    assert set(OPTIONS) == {field.name for field in fields(Algorithm)} == set(matrix_cases.OPTIONS)
    assert set(RUN) == set(matrix_cases.RUN)
    assert set(HOOKS) == set(hooks()) == {*OVERRIDES, *UNASKED}
    assert {*RUNS, "Ray", "resumed"} == set(WAYS)


def test_every_cell_that_is_no_equality_has_a_reason():
    for row in (*LOCAL.values(), *OPTIONS.values(), *RUN.values(), *HOOKS.values()):
        aside = row.stacks is not None or "one by one" in row.stacked or row.buffered == "refused"
        assert bool(row.reason) >= aside


@dataclass(frozen=True)
class Smoothed(Local):
    """Local training with a field that nobody has declared."""

    smoothing: float = 0.1


def unbatchable_reason(algorithm: Algorithm, local: Local) -> tuple[str, str]:
    executor = matrix_cases.stacked(setup_of(algorithm, local)).executor
    return executor.unbatchable_reason, executor.unbatchable_evaluation_reason


def test_an_undeclared_field_is_trained_and_evaluated_one_by_one():
    why = "local.smoothing is not known to stacked training"
    assert unbatchable_reason(Plain(), Smoothed(**vars(SGD))) == (why, why)


def test_an_undeclared_hook_is_not_followed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Algorithm, "late", lambda self: 0, raising=False)
    assert unbatchable_reason(Plain(), SGD) == ("", "")

    class Early(Plain):
        def late(self) -> int:
            return 1

    trained, evaluated = unbatchable_reason(Early(), SGD)
    assert trained == "Early overrides 'late', which stacked training does not know"
    assert "Early overrides 'late'" in evaluated
    refuses("it overrides 'late', which asynchronous rounds do not know", matrix_cases.buffered, setup_of(Early(), SGD))


def test_an_undeclared_option_is_trained_one_by_one(monkeypatch: pytest.MonkeyPatch):
    # A copy: a row deleted from the table itself would come back at its end, and the page would be another.
    monkeypatch.setattr(equivalence, "OPTIONS", {name: row for name, row in OPTIONS.items() if name != "accumulator"})
    assert unbatchable_reason(Plain(), SGD)[0] == "algorithm.accumulator is not known to stacked training"


def test_plain_clients_are_trained_and_evaluated_at_once():
    assert unbatchable_reason(Plain(), SGD) == ("", "")
    assert InProcess(setup_of(Plain(), SGD)).notes == []


def test_a_round_of_several_parts_is_not_asynchronous():
    # With late updates the second part would be sent what the first asks for.
    case = CASES["hook phases"]
    with pytest.raises(ValueError, match="it overrides 'phases', and a late client is sent what the first part"):
        matrix_cases.buffered(setup_of(case.algorithm, case.local))
