"""Tuning: the same budget for all, validation data only, the same choice however often it was interrupted."""

import csv
import json
import math
import shutil
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import Capture, Patch, confed, refusal, refused
from confed.algorithms.fedp3 import FedP3
from confed.cli.grids import tuned_values
from confed.data.examples import TableData
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.watching import states_of
from confed.runs import build as preparing
from confed.runs import run as experiment
from confed.runs.run import run
from confed.studies import tune as tuning
from confed.studies.study import read_study
from confed.studies.tune import clearly_worse, own_choice, search_space, tune, validation_scores
from confed.studies.tuned import Trial, Tuned, apply, effective_questions, read_tuned, standard_error
from confed.system.events import ignore
from refusals import refuses

TINY = [
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=40", "data.validation=20", "data.test=20",
    "data.preset=quantity", "data.clients=2", "local.epochs=1", "run.rounds=2", "run.gallery=0",
]  # fmt: skip

SEARCH = {"lam": (0.001, 0.1), "top_n": (5, 20)}
FOUR = "study.lr=[3e-4, 9e-4, 3e-3, 9e-3]"


def tiny(*rows: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, "run.rounds=6", FOUR]).with_rows(rows)


def chosen(recipe: Recipe, root: Path, *, budget: int = 4, workers: int = 1, **more: Any) -> list[Tuned]:
    """Tuning with seed 100, by default of four configurations in this process."""
    return tune(recipe, root, budget=budget, seed=100, workers=workers, progress=ignore, **more)


def invented(recipe: Recipe):
    """Six rounds of scores that depend on the configuration alone; two configurations are as good as each other."""
    lr, lam = recipe.local.lr, recipe.sections["algorithm"].get("lam", 0.0)
    top = 0.9 - abs(np.log10(lr / 1e-3)) / 4 - abs(lam - 0.003)
    for round in range(1, 7):
        yield float(top * (1 - 0.5**round))


def as_version_0_2(root: Path, row: str, *terms: str) -> None:
    """Configurations of a row as earlier versions kept them: a file of lines, first some terms, then one for each."""
    folder = root / row
    index = json.loads((folder / "summary.json").read_text())
    lines = [{key: index["terms"][key] for key in terms}, *index["trials"]]
    (root / "trials").mkdir(exist_ok=True)
    (root / f"trials/{row}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(folder)


@pytest.fixture
def synthetic(monkeypatch: Patch):
    calls: list[Recipe] = []

    def scores(recipe: Recipe, folder: Path):
        calls.append(recipe)
        return invented(recipe)

    monkeypatch.setattr(tuning, "validation_scores", scores)
    monkeypatch.setattr(FedP3, "traits", replace(FedP3.traits, search=SEARCH))
    return calls


def test_the_space_is_the_learning_rate_and_the_methods_own(monkeypatch: Patch) -> None:
    monkeypatch.setattr(FedP3, "traits", replace(FedP3.traits, search=SEARCH))
    recipe = load_recipe("fedvqa_scenes", ["study.lr=[]", "local.lr=3e-3", "methods.fedprox.local.lr=1e-2"])
    assert search_space(recipe, "fedavg") == {"local.lr": (0.0003, 0.0009, 0.0018, 0.003, 0.006, 0.009)}
    assert search_space(recipe, "fedprox")["local.lr"] == (0.001, 0.003, 0.006, 0.01, 0.02, 0.03)
    # The recipe's own value is always among those tried.
    assert search_space(recipe, "fedp3")["lam"] == (0.003, 0.001, 0.1)
    own = load_recipe("fedvqa_scenes", ["study.lr=[1e-3, 3e-3]"])
    assert search_space(own, "fedavg") == {"local.lr": (0.001, 0.003)}


def test_regularisers_that_are_off_are_not_searched() -> None:
    recipe = load_recipe("prompts_scenes")
    assert set(search_space(recipe, "promptfl")) == {"local.lr"}
    assert search_space(recipe, "kgcoop")["knowledge"] == (1.0, 4.0, 8.0)
    assert set(search_space(recipe, "promptsrc")) == {"local.lr", "consistency"}


def test_no_learning_rate_is_searched_where_no_optimiser_steps() -> None:
    assert set(search_space(load_recipe("prompts_scenes"), "afl")) == {"ridge"}


def test_one_budget_no_duplicates_and_the_best_of_the_finished(synthetic: list[Recipe], tmp_path: Path) -> None:
    found = chosen(tiny("fedavg", "fedp3"), tmp_path, budget=8)
    assert [len(tuned.trials) for tuned in found] == [4, 8]  # FedAvg's space has four points
    assert all(recipe.run.seed == 100 for recipe in synthetic)
    for tuned in found:
        space = search_space(tiny(tuned.row), tuned.row)
        points = [tuple(trial.values.values()) for trial in tuned.trials]
        assert len(set(points)) == len(points)
        assert set(points) <= set(product(*space.values()))
        assert tuned.trials[0].values["local.lr"] == 0.003  # the recipe's own comes first
        complete = [t for t in tuned.trials if t.state == "complete"]
        assert tuned.best is not None
        assert tuned.best.score == max(t.scores[-1] for t in complete)
        assert all(len(t.scores) == 6 for t in complete)
    assert found[0].best is not None
    assert found[0].best.values == {"local.lr": 0.0009}
    assert {trial.state for tuned in found for trial in tuned.trials} == {"complete"}  # none is stopped unless asked
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert len(rows) == 12
    written = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert written["tuning"] == {"recipe": "fedvqa_scenes", "seed": 100, "budget": 8}
    assert written["methods"]["fedavg"] == {"local": {"lr": 0.0009}}


def _without_seconds(root: Path) -> list[dict[str, str]]:
    return [{**row, "seconds": ""} for row in csv.DictReader((root / "scores.csv").read_text().splitlines())]


def test_interrupted_and_enlarged_it_chooses_the_same(
    synthetic: list[Recipe], tmp_path: Path, monkeypatch: Patch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    chosen(tiny("fedp3"), whole, budget=9)
    assert len(synthetic) == 9
    chosen(tiny("fedp3"), cut, budget=3)

    def interrupted(recipe: Recipe, folder: Path):
        raise KeyboardInterrupt
        yield 0.0

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "validation_scores", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chosen(tiny("fedp3"), cut, budget=9)
    chosen(tiny("fedp3"), cut, budget=9)
    assert _without_seconds(cut) == _without_seconds(whole)
    # Another row later keeps what is there; other settings are another folder's.
    found = chosen(tiny("fedavg"), cut, budget=9)
    assert [(tuned.row, len(tuned.trials)) for tuned in found] == [("fedavg", 4), ("fedp3", 9)]
    assert len(synthetic) == 9 + 9 + 4
    other = load_recipe("fedvqa_scenes", [*TINY, "run.rounds=5", FOUR]).with_rows(["fedp3"])
    refuses(r"fedavg was tuned with run\.rounds=6, not 5; give another folder", chosen, other, cut, budget=9)


def test_resume_goes_on_on_the_terms_of_the_folder(
    synthetic: list[Recipe], tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    chosen(tiny("fedavg"), tmp_path, budget=3, prune=True)
    whole = _without_seconds(tmp_path)
    index = tmp_path / "fedavg/summary.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "trials": content["trials"][:1]}))
    monkeypatch.setattr("confed.cli.grids.default_workers", lambda recipe: 1)
    assert confed("resume", tmp_path) == 0
    assert "Chosen on validation data" in capfd.readouterr().out
    assert _without_seconds(tmp_path) == whole
    assert len(synthetic) == 3 + 2
    index.write_text(index.read_text().replace('"margin"', '"median"'))
    assert "go on with the same `confed tune`" in refusal(capfd, "resume", tmp_path)


def test_a_configuration_that_diverges_is_a_finding(
    synthetic: list[Recipe], tmp_path: Path, monkeypatch: Patch
) -> None:
    def diverging(recipe: Recipe, folder: Path):
        if recipe.local.lr > 0.005:
            raise RuntimeError("client 'a' failed in round 1: training diverged")
        yield from invented(recipe)

    monkeypatch.setattr(tuning, "validation_scores", diverging)
    (found,) = chosen(tiny("fedavg"), tmp_path)
    assert sorted(t.state for t in found.trials).count("failed") == 1
    assert "diverged" in (tmp_path / "scores.csv").read_text()
    assert found.best is not None


def test_with_several_seeds_the_mean_chooses(monkeypatch: Patch, tmp_path: Path) -> None:
    # The recipe's 3e-3 is best with seed 100 alone, 9e-4 in the mean over three seeds.
    final = {3e-3: (0.90, 0.40, 0.50), 9e-4: (0.80, 0.70, 0.75), 3e-4: (0.1, 0.2, 0.3), 9e-3: (0.3, 0.2, 0.1)}

    def scores(recipe: Recipe, folder: Path):
        last = final[recipe.local.lr][recipe.run.seed - 100]
        yield from (last / 2, last)

    monkeypatch.setattr(tuning, "validation_scores", scores)
    recipe = tiny("fedavg")
    one = chosen(recipe, tmp_path / "one")[0]
    three = chosen(recipe, tmp_path / "three", seeds=3)[0]
    assert one.best is not None
    assert one.best.values == {"local.lr": 3e-3}
    assert one.best.by_seed == ()
    assert three.best is not None
    assert three.best.values == {"local.lr": 9e-4}
    assert three.best.by_seed == (0.80, 0.70, 0.75)
    assert three.best.scores == pytest.approx((0.375, 0.75))
    assert three.questions == one.questions  # all seeds may have the same ones
    assert read_tuned(tmp_path / "three" / "tuned.toml")[1] == range(100, 103)
    assert read_tuned(tmp_path / "one" / "tuned.toml")[1] == range(100, 101)
    with (tmp_path / "three" / "scores.csv").open() as file:
        assert "0.800000 0.700000 0.750000" in {line["seeds"] for line in csv.DictReader(file)}
    # The same folder does not mix trials of different numbers of seeds.
    refuses("fedavg was tuned with 3 seeds each, not 2", chosen, recipe, tmp_path / "three", seeds=2)


def test_a_configuration_that_diverges_with_one_seed_is_out(monkeypatch: Patch, tmp_path: Path) -> None:
    def scores(recipe: Recipe, folder: Path):
        if recipe.local.lr == 3e-3 and recipe.run.seed == 101:
            raise RuntimeError("the loss is NaN")
        yield 0.9 if recipe.local.lr == 3e-3 else 0.5

    monkeypatch.setattr(tuning, "validation_scores", scores)
    found = chosen(tiny("fedavg"), tmp_path, seeds=2)[0]
    assert found.trials[0].state == "failed"
    assert "NaN" in found.trials[0].error
    assert found.best is not None
    assert found.best.values["local.lr"] != 3e-3


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    for given, message in (
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": 2, "prune": True}, "prune goes by the rounds of one seed"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
    ):
        refuses(message, chosen, tiny("fedavg"), tmp_path, **given)


def test_no_seed_that_chose_values_reports_them(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text("[tuning]\nseed = 100\nseeds = 3\n[methods.fedavg.local]\nlr = 0.001\n")
    assert tuned_values(file, "fedvqa_scenes", ["run.seed=97"], 3) is not None
    refuses("seed 102 chose the values", tuned_values, file, "fedvqa_scenes", ["run.seed=102"], 3)


def test_rows_of_one_folder_have_one_budget(synthetic: list[Recipe], tmp_path: Path) -> None:
    chosen(tiny("fedavg", "fedprox"), tmp_path, budget=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for budget in (1, 4):
        with refused(rf"fedavg was tuned with a budget of 3, not {budget}; give --budget 3, "):
            chosen(tiny("fedadam"), tmp_path, budget=budget)
    refuses("fedprox was tuned with a budget of 3, not 4", chosen, tiny("fedavg"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    found = chosen(tiny("fedavg", "fedprox", "fedadam"), tmp_path)
    assert [len(tuned.trials) for tuned in found] == [4, 4, 4]
    # A folder whose files do not say their budget had at least as many configurations as it holds.
    for row in ("fedavg", "fedprox", "fedadam"):
        as_version_0_2(tmp_path, row, "space")
    refuses("tuned with a budget of 4, not 2", chosen, tiny("fedadam"), tmp_path, budget=2)


def test_a_shortage_is_no_finding_and_a_crash_no_refusal(
    synthetic: list[Recipe], tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    arguments = ["tune", "fedvqa_scenes", *TINY, "run.rounds=6", FOUR, "--methods", "fedavg", "--workers", "1"]
    arguments += ["--budget", "2", "--out", str(tmp_path / "t")]
    shortages = [torch.OutOfMemoryError("CUDA"), OSError(28, "No space left on device"), MemoryError("no"),
                 RuntimeError("client 'a' failed in round 1: OutOfMemoryError: CUDA out of memory")]  # fmt: skip
    for error in shortages:

        def short(recipe: Recipe, folder: Path, error: Exception = error):
            if recipe.local.lr != 0.003:
                raise error
            yield from invented(recipe)

        with monkeypatch.context() as patch:
            patch.setattr(tuning, "validation_scores", short)
            assert confed(*arguments) == 1
        assert f"without FedAvg: {type(error).__name__}" in " ".join(capfd.readouterr().out.split())
        assert len(json.loads((tmp_path / "t/fedavg/summary.json").read_text())["trials"]) == 1  # the recipe's own
    rows = list(csv.DictReader((tmp_path / "t/scores.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["complete", "failed"]
    for more in ([], ["--methods", "fedbn"], []):  # a row that was refused before is no failure of a later call
        assert confed(*arguments, *more) == 0
    rows = list(csv.DictReader((tmp_path / "t/scores.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["complete", "complete"]


def test_without_validation_examples_it_says_so(tmp_path: Path, monkeypatch: Patch) -> None:
    def bare(recipe: Recipe, read=experiment.load_data):
        there = read(recipe)
        parts = {name: data.tables for name, data in there.clients.items()}
        return replace(there, clients={name: TableData(a, b.take(0), c) for name, (a, b, c) in parts.items()})

    monkeypatch.setattr(experiment, "load_data", bare)
    monkeypatch.setattr(tuning, "load_data", bare)
    monkeypatch.setattr(preparing, "load_data", bare)
    recipe = load_recipe("fedvqa_scenes", TINY)
    refuses(r"none; see data\.validation", chosen, recipe.with_rows(["local"]), tmp_path / "t", budget=1)
    assert not (tmp_path / "t").exists()
    with refused(r"none; see data\.validation"):
        list(validation_scores(recipe.method("local").with_run(workers=1), tmp_path / "cell"))


@pytest.mark.parametrize("row", ["local", "fedavg_ft", "central"])
def test_scores_are_those_of_a_run_without_test_data(row: str, tmp_path: Path, monkeypatch: Patch) -> None:
    recipe = load_recipe("fedvqa_scenes", TINY).method(row).with_run(seed=100, workers=1, evaluate_examples=0)
    run(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    places = [line["personal"] for line in lines if line["event"] == "evaluation" and line["round"] > 0]
    expected = [sum(v["accuracy"] for v in p.values()) / 2 for p in places]

    def untouchable(self, batch_size):
        raise AssertionError("test data were read")

    monkeypatch.setattr(TableData, "test", untouchable)
    whole = list(validation_scores(recipe, tmp_path / "cell"))
    assert whole == pytest.approx(expected, abs=1e-12)
    assert len(expected) == (3 if row == "fedavg_ft" else 2)
    cut = validation_scores(recipe, tmp_path / "cut")
    assert next(cut) == whole[0]
    cut.close()
    assert list(validation_scores(recipe, tmp_path / "cut")) == whole
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "cell/metrics.jsonl").read_bytes()


def test_a_tuning_is_a_sweep_of_studies_that_other_commands_show(tmp_path: Path, capfd: Capture) -> None:
    root, recipe = tmp_path / "t", load_recipe("fedvqa_scenes", TINY).with_rows(["local"])
    (tuned,) = chosen(recipe, root, budget=2)
    states = [(state.name, state.state, state.round) for state in states_of(root)]
    assert states == [(f"local/{number}/seed-100", "finished", 2) for number in (1, 2)]
    study = read_study(root / "local").recipe
    assert [study.method(row).local.lr for row in ("1", "2")] == [trial.values["local.lr"] for trial in tuned.trials]
    assert not list(root.rglob("checkpoint"))
    assert confed("report", root) == 0
    assert "Chosen on validation data" in capfd.readouterr().out


def test_tuned_values_come_back_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text("[methods.fedp3]\nlam = 0.2\ntop_n = 5\n[methods.fedp3.local]\nlr = 0.5\n[methods.x]\ny = 1\n")
    values, seeds = read_tuned(path)
    assert values["fedp3"] == {"lam": 0.2, "top_n": 5, "local.lr": 0.5}
    assert not seeds
    recipe = load_recipe("fedvqa_scenes").with_rows(["fedavg", "fedp3"])
    full, used = apply(recipe, values)
    single = full.method("fedp3")
    algorithm = single.sections["algorithm"]
    assert (algorithm["lam"], algorithm["top_n"], single.local.lr) == (0.2, 5, 0.5)
    assert full.method("fedavg").local.lr == recipe.local.lr
    assert used == {"fedp3": values["fedp3"]}
    for override, knob in (("algorithm.lam=1", "lam"), ("local.lr=1", "local.lr"), ("methods.fedp3.top_n=9", "top_n")):
        _, used = apply(recipe, values, [override])
        assert used == {"fedp3": {k: v for k, v in values["fedp3"].items() if k != knob}}
    path.write_text("methods = 3")
    refuses(r"no tuned\.toml", read_tuned, path)


def test_the_command_prints_what_it_chose(synthetic: list[Recipe], tmp_path: Path, capfd: Capture) -> None:
    arguments = ["tune", "fedvqa_scenes", *TINY, "run.rounds=6", "--methods", "fedavg,fedbn", "--workers", "1"]
    arguments += ["--out", str(tmp_path / "t"), "--budget", "3"]
    for more in ([], ["--json"]):
        assert confed(*arguments, *more) == 0
        out, err = capfd.readouterr()
        if more:
            found = json.loads(out)
            assert [len(tuned["trials"]) for tuned in found["methods"]] == [3, 0]
            assert err == ""
        else:
            assert "without FedBN: FedBN keeps" in " ".join(out.split())
            assert "3 configurations tried, best" in err
    assert len(synthetic) == 3


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    recipe = replace(load_recipe("fedvqa_scenes", TINY), lr=(0.003,)).with_rows(["local", "fedavg"])
    for workers in (1, 2):
        chosen(recipe, tmp_path / f"{workers}", budget=2, workers=workers)
    assert _without_seconds(tmp_path / "1") == _without_seconds(tmp_path / "2")


ONE_ROUND = [
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
    single = load_recipe("fedvqa_scenes", ONE_ROUND).method("fedavg")
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
    recipe = load_recipe("fedvqa_scenes", [*ONE_ROUND, "run.rounds=6", "data.validation=40", lr]).with_rows(["fedavg"])
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
