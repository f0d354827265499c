"""Gates of a benchmark, judged from the summaries of runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confed.results.runs import RunResults, StudyResults
from confed.results.summary import Summary
from confed.results.views import View
from confed.studies.gates import Gate, Rows, judge

ROWS = Rows("central", "alone", ("head", "adapters"), ("all", "adapters"))


def run(method: str, seed: int, values: Mapping[str, float], **more: Any) -> RunResults:
    summary = {"clients": list(values), "personal": dict(values), **more}
    return RunResults(Path(method), method, method.title(), seed, Summary(summary), {"run": {"rounds": 10}})


def study(*runs: RunResults) -> StudyResults:
    return StudyResults(Path("made-up"), "made-up", runs)


def both(value: float) -> dict[str, float]:
    return {"a": value - 0.1, "b": value + 0.1}


def verdict(found: list[Gate]) -> dict[str, bool | None]:
    return {gate.key: gate.passed for gate in found}


def judged(*runs: RunResults, longer: StudyResults | None = None, rows: Rows = ROWS, **more: Any) -> dict[str, Gate]:
    ceilings, modal = more.get("ceilings", {}), more.get("modal", False)
    return {gate.key: gate for gate in judge(study(*runs), longer, rows, ceilings, modal)}


@pytest.mark.parametrize(("central", "passed"), [(0.551, True), (0.549, False)])
def test_pooling_must_gain_five_points(central: float, passed: bool) -> None:
    runs = [run("alone", 0, both(0.4)), run("alone", 1, both(0.6))]
    runs += [run("central", 0, both(central - 0.1)), run("central", 1, both(central + 0.1))]
    gate = judged(*runs)["a"]
    assert gate.passed is passed
    assert gate.values["difference"] == pytest.approx(100 * central - 50)


def test_pooling_is_compared_over_the_seeds_that_both_rows_have() -> None:
    runs = [run("alone", 0, both(0.4)), run("central", 0, both(0.42)), run("central", 1, both(0.8))]
    assert judged(*runs)["a"].passed is False


def test_rows_without_a_common_seed_are_not_compared() -> None:
    found = judged(run("alone", 0, both(0.4)), run("central", 1, both(0.8)))["a"]
    assert (found.passed, found.found) == (None, "not judged: no seed that both rows have")
    found = judged(run("head", 0, both(0.4)), run("adapters", 1, both(0.8)))["c"]
    assert found.found.startswith(
        "not judged: head: head and adapters: no seed that both rows have; everything: all or"
    )


def test_differences_that_are_the_threshold_on_paper_pass() -> None:
    # In floating point 61 - 56 points of these means are 4.999999999999993, and the others lie as narrowly beside it.
    runs = [run("alone", 0, {"a": 0.56}), run("central", 0, {"a": 0.61})]
    found = judged(*runs, ceilings={"a": 0.66})
    assert found["a"].values["difference"] < 5
    assert found["d"].values["difference"] < 10
    assert (found["a"].passed, found["d"].passed) == (True, True)
    before, after = run("alone", 0, {"a": 0.551}), run("alone", 0, {"a": 0.556})
    gate = judged(before, longer=study(after))["b"]
    assert gate.values["Alone"] > 0.5
    assert gate.passed is True
    ordered = [run("head", 0, {"a": 0.56}), run("adapters", 0, {"a": 0.61}), run("all", 0, {"a": 0.7})]
    assert judged(*ordered)["c"].passed is True
    ordered = [run("head", 0, {"a": 0.4}), run("adapters", 0, {"a": 0.556}), run("all", 0, {"a": 0.551})]
    assert judged(*ordered)["c"].passed is True
    floors = {"controls": {"personal": {"right": {"a": 0.7}, "constant": {"a": 0.6}}}}
    assert judged(run("central", 0, {"a": 0.7}, **floors))["e"].passed is True


def test_clients_that_left_are_in_no_mean() -> None:
    runs = [run("alone", 0, both(0.4)), run("central", 0, {"a": 0.3, "b": 0.9}, left=["b"])]
    assert judged(*runs)["a"].values["central"] == pytest.approx(30)


@pytest.mark.parametrize(("after", "passed"), [(0.504, True), (0.496, True), (0.506, False), (0.494, False)])
def test_a_row_that_moves_by_half_a_point_has_not_converged(after: float, passed: bool) -> None:
    longer = study(run("alone", 0, both(0.4)), run("central", 0, both(after)))
    gate = judged(run("alone", 0, both(0.4)), run("central", 0, both(0.5)), longer=longer)["b"]
    assert gate.passed is passed
    assert gate.values == pytest.approx({"Alone": 0, "Central": 100 * after - 50}, abs=1e-9)


def test_a_row_without_longer_runs_leaves_convergence_open() -> None:
    runs = [run("alone", 0, both(0.4)), run("central", 0, both(0.5))]
    still, moved = study(run("alone", 0, both(0.4))), study(run("alone", 0, both(0.45)))
    assert "not run: Central" in judged(*runs, longer=still)["b"].found
    assert judged(*runs, longer=still)["b"].passed is None
    assert judged(*runs, longer=moved)["b"].passed is False
    assert judged(*runs)["b"].passed is None


def test_a_row_that_failed_leaves_convergence_open() -> None:
    runs = (run("alone", 0, both(0.4)), run("central", 0, both(0.5)))
    named = {"alone": "Alone", "central": "Central"}
    for rows, passed in ((named, True), ({**named, "fedavg": "FedAvg"}, None)):
        failed = replace(study(*runs), rows=rows)
        (gate,) = [gate for gate in judge(failed, study(*runs), ROWS, {}, False) if gate.key == "b"]
        assert gate.passed is passed
        assert gate.found.endswith("; not run: FedAvg") is (passed is None)


@pytest.mark.parametrize(
    ("head", "everything", "passed"),
    [(0.44, 0.5, True), (0.46, 0.5, False), (0.44, 0.496, True), (0.44, 0.494, False), (0.44, 0.6, True)],
)
def test_heads_lie_under_adapters_and_everything_does_not(head: float, everything: float, passed: bool) -> None:
    gate = judged(run("head", 0, both(head)), run("adapters", 0, both(0.5)), run("all", 0, both(everything)))["c"]
    assert gate.passed is passed


def test_one_half_of_an_order_decides_only_if_it_fails() -> None:
    rows = Rows(heads=("head", "adapters"))
    good = judged(run("head", 0, both(0.4)), run("adapters", 0, both(0.5)), rows=rows)["c"]
    bad = judged(run("head", 0, both(0.5)), run("adapters", 0, both(0.5)), rows=rows)["c"]
    assert (good.passed, bad.passed) == (None, False)
    assert "no such pair" in good.found


@pytest.mark.parametrize(("ceiling", "passed"), [(0.51, True), (0.49, False)])
def test_the_ceiling_lies_ten_points_over_local_training(ceiling: float, passed: bool) -> None:
    ceilings = {**both(ceiling), "unseen": 1.0}
    assert judged(run("alone", 0, both(0.4)), ceilings=ceilings)["d"].passed is passed
    assert judged(run("alone", 0, both(0.4)))["d"].passed is None


def controls(**floors: Mapping[str, float]) -> dict[str, Any]:
    return {"controls": {"personal": {"right": {"a": 0.6, "b": 0.8}, **floors, "means": {}}}}


@pytest.mark.parametrize(
    ("floors", "passed"),
    [
        ({"constant": {"a": 0.1, "b": 0.2}, "permuted_image": {"a": 0.5, "b": 0.5}}, True),
        ({"constant": {"a": 0.1, "b": 0.2}, "permuted_image": {"a": 0.6, "b": 0.65}}, False),
        ({"constant": {"a": 0.1, "b": 0.2}, "words": {"a": 0.6, "b": 0.7}}, False),
        ({"constant": {"a": 0.1, "b": 0.2}, "permuted_audio": {"a": 0.49}}, True),  # b has no sounds
        ({"blank_image": {"a": 0.1, "b": 0.2}}, None),
    ],
)
def test_floors_lie_ten_points_under_centralised_training(floors: dict[str, Any], passed: bool | None) -> None:
    gate = judged(run("central", 0, both(0.7), **controls(**floors)))["e"]
    assert gate.passed is passed


def test_words_are_no_floor_where_texts_are_one_of_the_inputs() -> None:
    central = run("central", 0, both(0.7), **controls(constant={"a": 0.1}, words={"a": 0.6}))
    assert judged(central, modal=True)["e"].passed is True
    assert judged(central)["e"].passed is False


def test_what_was_not_run_is_not_judged_and_says_so() -> None:
    found = judged(run("alone", 0, both(0.4)))
    assert {gate.passed for gate in found.values()} == {None}
    assert "central" in found["a"].found
    assert all(gate.found.startswith("not judged") for gate in found.values())


def test_the_deployed_model_is_judged_where_there_is_one() -> None:
    central = run("central", 0, both(0.1), global_seen=both(0.5))
    runs = [run("alone", 0, both(0.4)), replace(central, summary=replace(central.summary, deploys=View.SEEN))]
    assert judged(*runs)["a"].values["central"] == pytest.approx(50)


def labels(method: str, value: float) -> RunResults:
    views = {"headline": "global", "global": {"C-AP": value, "O-F1": 0.1}, "personal": {"C-AP": 0.99, "O-F1": 0.99}}
    return run(method, 0, both(0.3), multilabel=views)


def test_labels_are_judged_by_the_headline_precision() -> None:
    longer = study(labels("alone", 0.406), labels("central", 0.46))
    found = judged(labels("alone", 0.4), labels("central", 0.46), longer=longer)
    assert found["a"].values == {
        "central": pytest.approx(46),
        "alone": pytest.approx(40),
        "difference": pytest.approx(6),
    }
    assert verdict(list(found.values())) == {"a": True, "b": False, "c": None, "d": None, "e": None}
