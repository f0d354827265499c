"""The verdict of a study: two plain sentences that say what its tables say."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from confed.comparison.paired import LEVEL
from confed.report.comparison import Comparison, compare_runs, verdict
from confed.results.runs import StudyResults, load
from synthetic_study import changed, make_study

SPREAD = [0.000, 0.004, -0.003, 0.002, -0.001]
NOISE = [0.003, -0.004, 0.002, -0.003, 0.004]


def with_values(folder: Path, values: Mapping[str, Sequence[float]], key: str = "personal_mean") -> None:
    """Other means of the methods' seeds."""
    for method, own in values.items():
        for seed, value in enumerate(own):
            changed(folder / method / f"seed-{seed}", **{key: value})


def read(folder: Path) -> tuple[StudyResults, Comparison]:
    study = load(folder)
    return study, compare_runs(study.runs)


def personal(folder: Path) -> str:
    text = verdict(*read(folder))
    return text[: text.index(" The global model")]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Five seeds: FedP³ is best, FedProx close to it, the others far behind; central is ten points ahead of local."""
    folder = make_study(tmp_path / "study", seeds=5)
    values = {
        "fedp3": [0.80 + s for s in SPREAD], "fedprox": [0.798 + s + n for s, n in zip(SPREAD, NOISE, strict=True)],
        "fedavg": [0.7 + s + n for s, n in zip(SPREAD, NOISE, strict=True)],
        "local": [0.6 + 2 * s for s in SPREAD], "central": [0.9 - s for s in SPREAD],
    }  # fmt: skip
    with_values(folder, values)
    return folder


def test_two_plain_sentences(study: Path) -> None:
    assert personal(study) == (
        "Personal models on their own clients' data: FedP³ has the highest mean (80.0 %), 0.2 points ahead of FedProx. "
        "Over 5 seeds FedP³ is ahead of Local and FedAvg (p below 0.001); the difference of FedP³ to FedProx may be "
        "noise (p at least 0.764; a true difference of 0.6 points would show in 4 of 5 cases)."
    )
    single = load(study / "fedavg" / "seed-0")
    assert verdict(single, compare_runs(single.runs)) == ""


def test_verdict_and_tables_cannot_disagree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = make_study(tmp_path / "study", seeds=5)
    methods = ("local", "fedavg", "fedprox", "fedp3")
    outcomes: set[str] = set()
    for _ in range(6):
        means = rng.uniform(0.55, 0.62, len(methods))
        values = {m: (mean + rng.normal(0, 0.008, 5)).tolist() for m, mean in zip(methods, means, strict=True)}
        with_values(folder, values | {"central": [0.9] * 5})
        text, best = personal(folder), max(values, key=lambda m: float(np.mean(values[m])))
        comparison = compare_runs(load(folder).runs, best)
        table = comparison.table()
        ahead, _, level = text.partition("the difference of")
        for row in table.rows:
            others = [comparison.labels[m] for m in methods if m != best]
            if row[0].text != "personal on own data" or row[1].text not in others:
                continue
            claimed = f" {row[1].text}" in ahead.partition("is ahead of")[2] or "every other method" in ahead
            p = row[[c.full_title for c in table.columns].index("over seeds p")].value
            assert p is not None
            assert claimed == (p <= LEVEL) == row[4].text.endswith("*")
            assert claimed != (f" {row[1].text}" in level or "any other method" in level)
            outcomes.add(f"{claimed}")
    assert outcomes == {"True", "False"}


def test_few_seeds_are_judged_on_examples(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", seeds=1)
    with_values(folder, {"central": [0.99]})
    _, comparison = read(folder)
    text = personal(folder)
    best = text.partition("clients' data: ")[2].split(" ")[0]
    assert f"On these test examples (1 seed, others may differ) {best}" in text
    tested = [d for d in comparison.pairs if d.measure == "personal_mean" and "central" not in (d.method, d.reference)]
    assert len(tested) == 6
    assert all(d.examples_p is not None and d.seeds_p is None for d in tested)


def test_a_measure_without_headroom_cannot_be_judged(study: Path) -> None:
    with_values(study, {"central": [0.64] * 5})
    text = personal(study)
    said = "gate a fails, Central is 3.9 points ahead of Local and at least 5 ahead are needed"
    assert text.endswith(f"Nothing can be judged here: {said}.")
    assert "noise" not in text
    with_values(study, {"central": [0.651] * 5})
    assert "Nothing can be judged" not in personal(study)


def test_unseen_places_have_a_gate_of_their_own(study: Path) -> None:
    key = "global_unseen_mean"
    with_values(study, {"fedavg": [0.6] * 5, "central": [0.567] * 5, "fedp3": [0.61] * 5, "fedprox": [0.5] * 5}, key)
    text = verdict(*read(study))
    assert "Nothing can be judged" not in text[: text.index("The global model")]
    assert text.endswith("gate a fails, Central is 3.3 points behind FedAvg and at least 5 ahead are needed.")
    with_values(study, {"central": [0.65] * 5}, key)
    assert "Nothing can be judged" not in verdict(*read(study))


def test_equal_seeds_are_level_and_shifts_untested(study: Path) -> None:
    best = [0.80 + s for s in SPREAD]
    with_values(study, {"fedprox": best, "fedavg": [v - 0.1 for v in best]})
    text = personal(study)
    assert "FedAvg is not tested" in text
    assert "may be noise (p at least 1.000" in text
    assert "share the highest mean (80.0 %)" in text
