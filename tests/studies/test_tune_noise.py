"""Tuning within noise: what is judged is what is chosen by, distinct tries, no early stop by chance, ties said."""

import json
import math
import tomllib
from pathlib import Path

import pytest

from command_line import Patch, refused
from confed.recipes.recipe import Recipe, load_recipe
from confed.studies import tune as tuning
from confed.studies.tune import clearly_worse, own_choice, search_space, tune, validation_scores
from confed.studies.tuned import Trial, Tuned, effective_questions, standard_error
from confed.system.events import ignore

TINY = [
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=20", "data.validation=20", "data.test=5",
    "data.preset=quantity", "data.clients=2", "local.epochs=1", "run.rounds=1", "run.gallery=0", "run.workers=1",
]  # fmt: skip


def finished(*scores: float) -> Trial:
    return Trial({}, {"local.lr": scores[-1]}, "complete", scores, 0.0)


def test_the_headline_says_which_model_is_scored(monkeypatch: Patch, tmp_path: Path) -> None:
    from confed.engines.local import Simulation

    views = {"global": {"a": {"accuracy": (1.0, 10.0)}}, "personal": {"a": {"accuracy": (7.0, 10.0)}}, "unseen": {}}

    def evaluated(self, servers, round, **how):
        client = next(iter(self.present(round, None))).id
        return {view: dict.fromkeys([client] if places else [], places.get("a")) for view, places in views.items()}

    monkeypatch.setattr(Simulation, "evaluate", evaluated)
    single = load_recipe("fedvqa_scenes", TINY).method("fedavg")
    found: dict[str, list[float]] = {}
    for headline in ("", "personal", "global_seen"):
        found[headline] = list(validation_scores(_headline(single, headline), tmp_path / f"cell-{headline}"))
    assert found == {"": [0.7], "personal": [0.7], "global_seen": [0.1]}
    # A method without such a model is judged by the other one.
    views["global"] = {}
    assert list(validation_scores(_headline(single, "global_seen"), tmp_path / "cell")) == [0.7]


def _headline(recipe: Recipe, headline: str) -> Recipe:
    from dataclasses import replace

    return replace(recipe, headline=headline)


def test_none_is_not_tried_beside_the_value_that_it_stands_for() -> None:
    recipe = load_recipe("feddat_domain")
    space = search_space(recipe, "feddat")
    assert space["temperature"] == (1.0, 3.0)
    assert math.prod(map(len, space.values())) == len(space["local.lr"]) * 3 * 2
    assert own_choice(recipe, "feddat", space)["temperature"] == 0
    code = load_recipe("feddat_domain", ["methods.feddat.preset=code"])
    assert own_choice(code, "feddat", search_space(code, "feddat"))["temperature"] == 1
    other = load_recipe("feddat_domain", ["methods.feddat.temperature=2.0"])
    assert search_space(other, "feddat")["temperature"] == (2.0, 1.0, 3.0)


def test_weights_that_are_tried_fit_the_reduction() -> None:
    recipe = load_recipe("fedvqa_gqa_a", ["data.root=somewhere"])
    assert search_space(recipe, "fedp3")["lam"] == (1.0, 0.4, 1.2, 4.0, 40.0)
    rows = load_recipe("fedvqa_scenes", ["algorithm.reduction=rows", "algorithm.lam=0.06"])
    assert search_space(rows, "fedp3")["lam"] == (0.02, 0.06, 0.2, 2.0)
    assert search_space(load_recipe("fedvqa_scenes"), "fedp3")["lam"] == (0.001, 0.003, 0.01, 0.1)


def test_the_weight_of_a_pair_can_be_held_while_n_changes() -> None:
    recipe = load_recipe("fedvqa_topn", ["algorithm.reduction=mean", "algorithm.lam=1.2"])
    methods = [recipe.method(row).construct("algorithm") for row in recipe.methods if row.startswith("top_")]
    assert {(method.reduction, method.lam) for method in methods} == {("mean", 1.2)}
    assert len({method.top_n for method in methods}) == 5


def test_rates_that_differ_by_rounding_only_are_one_try() -> None:
    recipe = load_recipe("fedvqa_scenes", ["study.lr=[]", "local.lr=0.00123456789"])
    rates = search_space(recipe, "fedavg")["local.lr"]
    assert len(rates) == 6
    assert rates[3] == 0.00123456789
    twice = load_recipe("fedvqa_scenes", ["study.lr=[1e-3, 0.001, 3e-3]"])
    assert search_space(twice, "fedavg")["local.lr"] == (0.001, 0.003)


def test_clients_of_unequal_size_are_worth_fewer_questions() -> None:
    assert effective_questions([200] * 5) == pytest.approx(1000)
    # Variance of the mean of two means: s^2 / 4 * (1/10 + 1/1000).
    assert effective_questions([10, 1000, 0]) == pytest.approx(4 / (1 / 10 + 1 / 1000))
    assert effective_questions([0]) == 0
    assert standard_error(0.5, 100) == pytest.approx(0.05)
    assert standard_error(1.2, 100) is None
    assert standard_error(0.5, 0) is None


def test_only_what_is_far_below_twice_is_stopped() -> None:
    """The case of FedDAT on Domain: 0.6718 against a median of 0.6728 of 1,000 questions, ahead in rounds before."""
    earlier = [finished(0.626, 0.658, 0.6728), finished(0.624, 0.653, 0.6729)]
    assert not clearly_worse((0.635, 0.663, 0.6718), earlier, 1000)
    assert not clearly_worse((0.63, 0.655, 0.655), earlier, 1000)  # within two standard errors of 1.5 points
    assert clearly_worse((0.50, 0.55, 0.56), earlier, 1000)
    assert not clearly_worse((0.50, 0.55, 0.56), earlier, 30)
    assert not clearly_worse((0.61, 0.64, 0.61), earlier, 1000)  # a bad round after good ones
    assert not clearly_worse((0.50, 0.55, 0.56), earlier[:1], 1000)
    assert not clearly_worse((0.1,), earlier, 1000)


def test_a_lead_within_noise_is_said_in_questions() -> None:
    assert Tuned("r", "R", (finished(0.687), finished(0.685), finished(0.6)), questions=1000).lead == (
        "the next is 0.2 points behind, about 2 of 1,000 questions; "
        "within noise (one standard error, 1.5 points): 1 of 2 others"
    )
    assert Tuned("r", "R", (finished(0.5), finished(0.5)), questions=100).lead == (
        "the next is level; within noise (one standard error, 5.0 points): the only other"
    )
    assert Tuned("r", "R", (finished(0.9), finished(0.5)), questions=100).lead == (
        "the next is 40.0 points behind, about 40 of 100 questions"
    )
    assert Tuned("r", "R", (finished(1.5), finished(1.4))).lead == "the next is 10.0 points behind"
    assert Tuned("r", "R", (finished(0.5),), questions=9).lead == ""


def test_a_folder_keeps_to_one_rule_for_stopping(tmp_path: Path, monkeypatch: Patch) -> None:
    calls: list[float] = []

    def falling(recipe: Recipe, folder: Path):
        calls.append(recipe.local.lr)
        for _ in range(6):
            yield 0.9 if len(calls) < 3 else 0.1

    monkeypatch.setattr(tuning, "validation_scores", falling)
    lr = "study.lr=[3e-4, 9e-4, 3e-3, 9e-3]"
    recipe = load_recipe("fedvqa_scenes", [*TINY, "run.rounds=6", "data.validation=40", lr]).with_rows(["fedavg"])
    (whole,) = tune(recipe, tmp_path / "whole", budget=4, seed=100, workers=1, progress=ignore)
    assert [trial.state for trial in whole.trials] == ["complete"] * 4
    assert "# fedavg: the next is level; within noise" in (tmp_path / "whole/tuned.toml").read_text()
    assert tomllib.loads((tmp_path / "whole/tuned.toml").read_text())["methods"]
    calls.clear()
    (cut,) = tune(recipe, tmp_path / "cut", budget=4, seed=100, workers=1, progress=ignore, prune=True)
    assert [(trial.state, len(trial.scores)) for trial in cut.trials[2:]] == [("pruned", 3)] * 2
    with refused("fedavg was tuned with --prune; do so again, or give another folder"):
        tune(recipe, tmp_path / "cut", budget=4, seed=100, workers=1, progress=ignore)
    index = tmp_path / "cut/fedavg/summary.json"
    content = json.loads(index.read_text())
    del content["terms"]["stopping"]
    index.write_text(json.dumps(content))
    with refused("an earlier version's median rule"):
        tune(recipe, tmp_path / "cut", budget=4, seed=100, workers=1, progress=ignore)
