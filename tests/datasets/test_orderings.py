"""Whether the built-in benchmark separates methods as it should; minutes, so run by hand before a release."""

import json
from pathlib import Path

import pytest

from confed.metrics.statistics import paired_t
from confed.models.pretrained import MINI_WEIGHTS, describe
from confed.recipes.recipe import load_recipe
from confed.runs.run import run

SEEDS = range(5)


def _values(folder: Path, setting: str, method: str, key: str) -> list[float]:
    quick = [f"data.setting={setting}", "run.gallery=0", "run.evaluate_every=0", "run.checkpoint_every=0"]
    values = []
    for seed in SEEDS:
        root = folder / f"{setting}-{method}-{seed}"
        summary = root / "summary.json"
        recipe = load_recipe("fedvqa_scenes", [*quick, f"run.seed={seed}"]).method(method)

        content = json.loads(summary.read_text()) if summary.exists() else run(recipe, root)
        values.append(content[key])
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orderings")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("setting", "better", "worse"),
    [
        # Under full conflict one model for all loses to personal ones (by 11.7 points when this was written);
        # under the shared shift federation beats local training (by 3.6). Personal against global under C is no
        # criterion: 0.6 points, p = 0.09.
        ("A", ("fedavg", "personal_mean"), ("fedavg", "global_seen_mean")),
        ("C", ("fedavg", "personal_mean"), ("local", "personal_mean")),
    ],
)
def test_settings_separate_methods(folder: Path, setting: str, better: tuple, worse: tuple) -> None:
    high, low = _values(folder, setting, *better), _values(folder, setting, *worse)
    test = paired_t(high, low)
    print(setting, better, worse, test)
    assert test.p is not None
    assert test.p < 0.05
    assert sum(high) > sum(low)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_families_can_be_learned_where_nothing_shifts(folder: Path) -> None:
    summary = run(
        load_recipe("fedvqa_scenes", ["data.setting=B", "data.conflict=0", "data.wording=false", "run.gallery=0",
                                      "run.checkpoint_every=0"]).method("central"), folder / "neutral",
    )  # fmt: skip
    print(summary["personal_mean"])
    # 0.87 when this was written. The backbone's weak families (more than, same) set the ceiling: it answers 91 % of
    # held-out public questions.
    assert summary["personal_mean"] >= 0.85
    assert describe(MINI_WEIGHTS)["accuracy"]["overall"] >= 0.90
