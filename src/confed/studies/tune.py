"""Hyper-parameter tuning: equally many configurations for every method, chosen on the clients' validation data.

What is tried is the learning rate that all methods share, crossed with what the method itself names as worth trying
(``Traits.search``; see :mod:`confed.studies.tune`). Every one is trained to the end unless stopping early is
asked for: then one stops whose best score so far lies below the median of the earlier ones' best (the median rule of
Golovin et al., "Google Vizier", KDD 2017) by more than two standard errors of a validation score, in two rounds in a
row. Scores are the mean over clients of the validation
score of the model that the method deploys there: what the recipe's or the row's headline names, else the client's own,
or the global part with the client's own head where that is the method's.
Of multi-label data the score is ``C-AP-binned``, or what ``[study] score`` names, of all clients' validation examples
together: of the global model, or of the clients' own where a method has none or the recipe's headline is "personal".
Clients without validation examples are judged on an unseen place called "validation", where there is one.
No test example is read, and no other unseen place is looked at. With several seeds a
configuration is trained with each, and its score after a round is the mean.

A tuning folder is a sweep over the methods: it holds a study for each, whose rows are the configurations, each a run
folder that goes on after an interruption. The study's index has their scores, from which a later call goes on; beside
the studies are ``scores.csv`` and ``tuned.toml`` (:mod:`confed.studies.tuned`).

The first configuration is always the recipe's own. The next ones come from Optuna's tree-structured Parzen estimator
(Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011).
"""

import itertools
import json
import math
import random
import shutil
import statistics
import time
from collections import ChainMap
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import file_name
from confed.federation.protocols import Counting
from confed.federation.randomness import derive
from confed.federation.reading import faults_of, read_bounded
from confed.federation.specs import task_spec
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import SCORES, RunFolder, read_jsonl
from confed.results.summary import VALIDATION, deployed_by
from confed.results.sweep import ROWS, Point, Sweep, write_sweep_index
from confed.runs.encode import load_run_data
from confed.runs.run import load_data
from confed.studies import pool
from confed.studies.runner import goes_on, refusals
from confed.studies.study import Job, cell_folder, differing, joined, write_study
from confed.studies.tuned import (
    TUNING,
    Trial,
    Tuned,
    effective_questions,
    in_words,
    merge,
    scores_csv,
    standard_error,
    tuned_toml,
)
from confed.system.events import Event, JobEnded, JobsPlanned, Progress, RunProgress, ignore
from confed.system.folder_lock import exclusive

if TYPE_CHECKING:
    from confed.engines.local import Setup
    from confed.runs.encode import RunData

# Validation scores of a method after each round ---------------------------------------------------------------

NOTHING = "tuning chooses on the clients' validation examples, and there are none; see data.validation"

LOOKED_AT = 1000  # clients whose validation examples judge a configuration, of multi-label data; the first so many


def validation_scores(recipe: Recipe, folder: Path) -> Generator[float]:
    """Validation scores of a single-run recipe after every round, and after fine-tuning; no test example is read."""
    import torch

    from confed.runs.at_once import begin
    from confed.runs.run import Runner
    from confed.runs.same_recipe import pinned_as

    with exclusive(folder):
        resuming = goes_on(folder)
        torch.set_num_threads(recipe.run.threads)
        recipe, setup, run_data, workspace, _ = begin(pinned_as(RunFolder(folder), recipe) if resuming else recipe)
        setup = replace(setup, observers=_onlookers(setup, run_data))
        files = RunFolder(folder) if resuming else RunFolder.create(folder, recipe.to_toml())
        runner = Runner(recipe, setup, run_data, files, ignore, workspace)
        runner.most_evaluated = LOOKED_AT if isinstance(setup.task, Counting) else None
        scores: list[float] = []
        with runner.opened() as (simulation, workspace):
            for record in runner.train(simulation, workspace):
                for client, error in record.errors.items():
                    raise RuntimeError(f"client {client!r} failed in round {record.round}: {error}")
                before, scores = len(scores), _scores(recipe, setup, files)
                yield from scores[before:]
        yield from _scores(recipe, setup, files)[len(scores) :]  # where all rounds had been done before


def _onlookers(setup: "Setup", run_data: "RunData") -> Mapping[str, Any]:
    """Who is evaluated beside the members: the clients of a method that trains on all data, and one unseen place."""
    place: dict[str, Any] = {}
    if isinstance(setup.task, Counting) and VALIDATION in run_data.unseen:
        judges = islice(run_data.clients.values(), LOOKED_AT)
        if not any(len(data.tables[1]) for data in judges):
            place = {VALIDATION: run_data.unseen[VALIDATION]}
    return ChainMap(place, cast(Any, run_data.clients)) if setup.algorithm.traits.centralised else place


def _scores(recipe: Recipe, setup: "Setup", folder: RunFolder) -> list[float]:
    """The score of every round that a run has written down, by the same rule as of tables (results/summary.py)."""
    wanted = recipe.headline or deployed_by(setup.algorithm.global_model)
    first, second = ("global", "personal") if wanted == "global_seen" else ("personal", "global")
    scores: list[float] = []
    for line in read_jsonl(folder.metrics):
        if line["event"] != "evaluation" or not line["round"]:
            continue
        if isinstance(setup.task, Counting):
            scores.append(_pooled_score(recipe, setup, line.get("pooled", {})))
            continue
        of_places = [values[setup.task_of(place).metric] for place, values in (line[first] or line[second]).items()]
        if not of_places:
            raise ValueError(NOTHING)
        scores.append(sum(of_places) / len(of_places))
    return scores


def validation_sizes(run_data: "RunData", without: Sequence[str]) -> list[int]:
    """Numbers of validation examples of the places that judge a configuration."""
    from confed.data.lazy import without as leave_out

    remaining = leave_out(run_data.clients, without)
    if run_data.dataset.kind == "labels":
        # Counts of all clients' examples are added up before there is a metric: as one place with all of them.
        sizes = [sum(len(data.tables[1]) for data in islice(remaining.values(), LOOKED_AT))]
        if not sizes[0] and VALIDATION in run_data.unseen:
            return [len(run_data.unseen[VALIDATION].tables[1])]
    else:
        sizes = [len(data.tables[1]) for data in remaining.values()]
    if not any(sizes):
        raise ValueError(NOTHING)
    return sizes


def _pooled_score(recipe: Recipe, setup: "Setup", values: Mapping[str, Mapping[str, float]]) -> float:
    """The metric that selects multi-label configurations, of the view that the method is judged by."""
    wanted = ["personal", "global"] if recipe.headline == "personal" else ["global", "personal"]
    view = next((name for name in [*wanted, f"unseen/{VALIDATION}"] if values.get(name)), None)
    if view is None:
        raise ValueError(NOTHING)
    score = recipe.score or task_spec(setup.task).score
    if score not in values[view]:
        raise ValueError(f"study.score must be one of {', '.join(values[view])}, got {score!r}")
    return values[view][score]


# Search spaces of tuning, and the next configuration to try ---------------------------------------------------

FACTORS = (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)
"""Learning rates tried, as multiples of the recipe's, where it names none itself."""

RANDOM_FIRST = 3  # configurations before the estimator has something to go by; also before any is stopped early

LR = "local.lr"


def search_space(recipe: Recipe, row: str) -> dict[str, tuple[Any, ...]]:
    """Search space of a row: knob -> the values that are tried, the recipe's own among them."""
    single = recipe.method(row)
    recipe_rate = single.local.lr
    rates = recipe.lr or tuple(float(f"{recipe_rate * factor:.6g}") for factor in FACTORS)
    algorithm, method = single.sections["algorithm"], single.algorithm
    space = {LR: _with(rates, recipe_rate)} if method.traits.has_steps else {}
    for name, values in method.search_space().items():
        if name not in algorithm:
            raise ValueError(f"{row}: search names {name!r}, which is none of {', '.join(algorithm)}")
        # None may stand for one of the values: as a separate value it would be tried twice.
        space[name] = _with(values, method.effective_value(name))
    return space


def _with(values: Sequence[Any], of_row: Any) -> tuple[Any, ...]:
    """The values, each once, the row's own among them; it takes the place of one that is equal but for rounding."""
    distinct = tuple(dict.fromkeys(of_row if _same(value, of_row) else value for value in values))
    return distinct if of_row in distinct else (of_row, *distinct)


def _same(first: Any, second: Any) -> bool:
    numbers = isinstance(first, float | int) and isinstance(second, float | int)
    if numbers and not isinstance(first, bool) and not isinstance(second, bool):
        return math.isclose(first, second, rel_tol=1e-5)
    return type(first) is type(second) and first == second


def own_choice(recipe: Recipe, row: str, space: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Positions of the recipe's own values in a row's search space."""
    single = recipe.method(row)
    method = single.algorithm
    values = {knob: single.local.lr if knob == LR else method.effective_value(knob) for knob in space}
    return {knob: choices.index(values[knob]) for knob, choices in space.items()}


def next_choice(recipe: Recipe, row: str, space: Mapping[str, Sequence[Any]], done: Sequence[Trial]) -> dict[str, int]:
    """The next configuration: the recipe's own first, then what the estimator proposes and was not tried yet."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    if not done:
        return own_choice(recipe, row, space)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = derive(recipe.run.seed, len(done), row, "tune") % 2**32
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_FIRST)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, BaseDistribution] = {
        knob: CategoricalDistribution(range(len(values))) for knob, values in space.items()
    }
    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    for trial in done:
        sound = trial.score is None or math.isfinite(trial.score)
        study.add_trial(
            create_trial(
                state=states[trial.state] if sound else TrialState.FAIL,
                value=trial.score if sound else None,
                params=dict(trial.choice),
                distributions=distributions,
                intermediate_values=dict(enumerate(trial.scores, 1)),
            )
        )
    choice = dict(study.ask(distributions).params)
    tried = [trial.choice for trial in done]
    if choice not in tried:
        return choice
    positions = itertools.product(*(range(len(values)) for values in space.values()))
    points = [dict(zip(space, at, strict=True)) for at in positions]
    left = [point for point in points if point not in tried]
    return random.Random(json.dumps([*tried, choice])).choice(left)


# Hyper-parameter tuning: equally many configurations for every method -----------------------------------------

BELOW = 2.0  # standard errors of a validation score below the median at which a configuration may be stopped early

CHECKPOINT_SECONDS = 30.0
"""Least time between checkpoints of a configuration, which are of use after an interruption only."""

SHORTAGES = ("MemoryError", "out of memory", "enough memory", "allocate memory", "No space left")
"""In the text of an error that says nothing about a configuration: a later call tries it again."""


def tune(
    recipe: Recipe,
    root: Path,
    *,
    budget: int,
    seed: int,
    workers: int,
    progress: Progress,
    prune: bool = False,
    seeds: int = 1,
) -> list[Tuned]:
    """Tuning of every row of a recipe; configurations that a folder holds already are not tried again."""
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if prune and seeds > 1:
        raise ValueError(f"prune goes by the rounds of one seed; leave it out with seeds = {seeds}")
    seldom = max(recipe.run.checkpoint_seconds, CHECKPOINT_SECONDS)
    wanted = recipe.with_run(seed=seed, workers=1, evaluate_every=1, evaluate_examples=0, checkpoint_seconds=seldom)
    # Not times the seeds: where a dataset publishes its validation questions, all seeds have the same ones.
    questions = effective_questions(validation_sizes(load_data(wanted), wanted.run.without))
    errors, failed = refusals(wanted, seed), set[str]()
    if workers > 1:
        load_run_data.cache_clear()  # the processes read the data themselves
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        file = root / TUNING
        before = load_recipe(file) if file.is_file() else wanted
        recipe = joined(before, wanted)
        _check_settings(before, recipe, root)
        terms = {"budget": budget, "stopping": "margin" if prune else "none", "seeds": seeds, "questions": questions}
        held = {row: _checked(recipe, row, root, terms, row in wanted.methods) for row in recipe.methods}
        for row, tries in held.items():
            write_tries(recipe, row, root, tries)
        points = tuple(Point({ROWS: row}, _study(root, row).name, recipe.label(row)) for row in recipe.methods)
        write_sweep_index(root, Sweep(recipe.name, ROWS, points))
        write_atomically(file, recipe.to_toml().encode())
        rows = [row for row in wanted.methods if row not in errors]
        progress(JobsPlanned([recipe.label(row) for row in rows]))

        def note(event: Event) -> None:
            if isinstance(event, JobEnded) and event.outcome != "done":
                errors[rows[event.job]] = event.text
                if event.outcome == "failed":
                    failed.add(rows[event.job])
            progress(event)

        limit = str(questions) if prune else ""
        shared = {"root": str(root), "budget": budget, "stop_below": limit, "seeds": seeds}
        jobs = [{**shared, "row": row} for row in rows]
        pool.carry_out("confed.studies.tune:tune_row", jobs, workers, note)
        tuned_rows = [
            replace(tuned, error=errors.get(tuned.row, ""), failed=tuned.row in failed) for tuned in tuned_so_far(root)
        ]
        write_atomically(root / "scores.csv", scores_csv(tuned_rows).encode())
        write_atomically(root / "tuned.toml", tuned_toml(recipe, tuned_rows, budget, seeds).encode())
    return tuned_rows


def tuned_so_far(root: Path) -> list[Tuned]:
    """What a folder holds of every row."""
    recipe, rows = load_recipe(root / TUNING), list[Tuned]()
    for row in recipe.methods:
        tries = read_tries(root, row)
        trials = tries.trials[: tries.terms.get("budget")]
        rows.append(Tuned(row, recipe.label(row), trials, questions=tries.terms.get("questions", 0.0)))
    return rows


def is_tuning(root: Path) -> bool:
    """Whether a folder holds configurations that were tried."""
    return (root / TUNING).is_file()


def tuned_before(root: Path) -> tuple[Recipe, dict[str, Any]]:
    """Recipe of a tuning folder and the terms, as keywords of :func:`tune`, on which its rows were begun."""
    recipe = load_recipe(root / TUNING)
    head = next((terms for row in recipe.methods if (terms := read_tries(root, row).terms)), {})
    if "budget" not in head or head.get("stopping") == "median":
        raise ValueError(f"{root} does not say on what terms it was begun; go on with the same `confed tune`")
    prune, seeds = head["stopping"] == "margin", head.get("seeds", 1)
    return recipe, {"budget": head["budget"], "prune": prune, "seeds": seeds, "seed": recipe.run.seed}


def tune_row(job: Mapping[str, Any], progress: Progress) -> str:
    """Tuning of one row; returns the best configuration in one line."""
    root, row = Path(job["root"]), str(job["row"])
    recipe = load_recipe(root / TUNING)
    tries, space = read_tries(root, row), search_space(recipe, row)
    budget = min(int(job["budget"]), math.prod(map(len, space.values())))
    done = list(tries.trials[:budget])
    for number in range(len(done), budget):
        choice = next_choice(recipe, row, space, done)
        values = {knob: space[knob][at] for knob, at in choice.items()}
        single = recipe.with_rows([row], {row: merge(recipe.overrides.get(row, {}), values)}).method(row)
        single = replace(single, score=recipe.score, headline=recipe.deploys(row))  # what it is chosen by
        write_tries(recipe, row, root, replace(tries, trials=tuple(done)), begun=values)

        def report(round: int, text: str, number: int = number) -> None:
            progress(RunProgress(round, recipe.run.rounds, "training", f"configuration {number + 1}/{budget}{text}"))

        def hopeless(scores: Sequence[float], earlier: Sequence[Trial] = tuple(done)) -> bool:
            return bool(job["stop_below"]) and clearly_worse(scores, earlier, float(job["stop_below"]))

        report(0, "")
        seeds = range(single.run.seed, single.run.seed + int(job["seeds"]))
        folders = {seed: _study(root, row) / cell_folder(str(number + 1), seed) for seed in seeds}
        done.append(_try(single, choice, values, report, hopeless, folders))
        write_tries(recipe, row, root, replace(tries, trials=tuple(done)))
    best = Tuned(row, "", tuple(done)).best
    outcome = f"best {best.scores[-1]:.1%} with {in_words(best.values)}" if best else "none of them worked"
    return f"{len(done)} configurations tried, {outcome}"


def _try(
    recipe: Recipe,
    choice: Mapping[str, int],
    values: Mapping[str, Any],
    report: Callable[[int, str], None],
    hopeless: Callable[[Sequence[float]], bool],
    folders: Mapping[int, Path],
) -> Trial:
    """Training of one configuration with each seed, ended early where it is far below the earlier ones."""
    began, by_seed, state, error = time.perf_counter(), list[list[float]](), "complete", ""
    try:
        for number, (seed, folder) in enumerate(folders.items(), 1):
            scores = list[float]()
            by_seed.append(scores)
            of_seed = f", seed {number}/{len(folders)}" if len(folders) > 1 else ""
            for score in validation_scores(recipe.with_run(seed=seed), folder):
                scores.append(score)
                report(min(len(scores), recipe.run.rounds), f"{of_seed}, {score:.1%}")
                if recipe.run.rounds // 3 < len(scores) < recipe.run.rounds and hopeless(scores):
                    state = "pruned"
                    break
    except (RuntimeError, ValueError) as failure:  # a learning rate at which training diverges is a finding
        if any(shortage in f"{type(failure).__name__}: {failure}" for shortage in SHORTAGES):
            raise
        state, error = "failed", str(failure)
    for folder, scores in zip(folders.values(), by_seed, strict=False):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / SCORES, json.dumps(scores).encode())
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # nobody goes on from there
    means = tuple(statistics.fmean(of_round) for of_round in zip(*by_seed, strict=state == "complete"))
    last = tuple(scores[-1] for scores in by_seed if scores) if len(folders) > 1 else ()
    return Trial(choice, values, state, means, round(time.perf_counter() - began, 2), error, last)


def clearly_worse(scores: Sequence[float], earlier: Sequence[Trial], questions: float) -> bool:
    """Whether a configuration lies far below the earlier ones in its two last rounds, beyond what is noise."""
    finished = [trial.scores for trial in earlier if trial.score is not None]
    if len(finished) < RANDOM_FIRST - 1 or len(scores) < 2:
        return False
    for end in (len(scores) - 1, len(scores)):
        middle = statistics.median(max(rounds[:end]) for rounds in finished)
        error = standard_error(middle, questions)
        if error is None or not max(scores[:end]) < middle - BELOW * error:
            return False
    return True


# The study of a row's configurations, each of which is a row of it -------------------------------------------------


@dataclass(frozen=True)
class Tries:
    """What a folder holds of one row: how its values are tried, and the configurations that were."""

    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])  # empty where none was begun
    trials: tuple[Trial, ...] = ()


def _study(root: Path, row: str) -> Path:
    return root / file_name(row)


def read_tries(root: Path, row: str) -> Tries:
    """The configurations of a row, also of a folder of an earlier version, which had a file of lines for each row."""
    index = _study(root, row) / "summary.json"
    if index.is_file():
        with faults_of(index, "a study of configurations"):
            content = json.loads(read_bounded(index).decode())
            return Tries(content["terms"], tuple(_trial(line) for line in content["trials"]))
    for name in (row, file_name(row)):
        if lines := read_jsonl(root / "trials" / f"{name}.jsonl"):
            return Tries(lines[0], tuple(map(_trial, lines[1:])))
    return Tries()


def _trial(line: Mapping[str, Any]) -> Trial:
    return Trial(**{**line, **{key: tuple(line.get(key, ())) for key in ("scores", "by_seed")}})


def write_tries(recipe: Recipe, row: str, root: Path, tries: Tries, begun: Mapping[str, Any] | None = None) -> None:
    """Write the index and recipe of the study of a row's configurations, those tried and one that is begun."""
    method, terms = recipe.overrides.get(row, {}), tries.terms
    configurations = [trial.values for trial in tries.trials] + ([] if begun is None else [begun])
    rows = {str(n): {"name": row, **merge(method, values)} for n, values in enumerate(configurations, 1)}
    study = replace(recipe, table=(), score="").with_rows(list(rows), rows)
    seeds = range(recipe.run.seed, recipe.run.seed + terms["seeds"])
    jobs = [Job(number, seed, cell_folder(number, seed)) for number, seed in product(rows, seeds)]
    more = {"errors": {}, "terms": dict(terms), "trials": [vars(trial) for trial in tries.trials]}
    write_study(study, _study(root, row), jobs, **more)


def _check_settings(before: Recipe, recipe: Recipe, root: Path) -> None:
    """Check that existing trials were made with the present settings."""
    for row in before.methods:
        different = differing(before.method(row), recipe.method(row))
        if before.score != recipe.score:
            different = different or f"study.score = {before.score!r}"
        if different and read_tries(root, row).terms:
            raise ValueError(f"{root}: {row} was tuned with {different}; give another folder with --out")


def _checked(recipe: Recipe, row: str, root: Path, terms: Mapping[str, Any], again: bool) -> Tries:
    """What a folder holds of a row with the terms of this call, so that all its choices are on equal terms."""
    space, tries = {knob: list(values) for knob, values in search_space(recipe, row).items()}, read_tries(root, row)
    head, trials = tries.terms or {"space": space}, tries.trials
    # A folder of an earlier version says at least how much was tried, and does not name its rule.
    budget, stopping = head.get("budget", max(terms["budget"], len(trials))), head.get("stopping", "median")
    seeds = head.get("seeds", 1)
    if trials and not again and budget != terms["budget"]:
        raise ValueError(
            f"{root}: {row} was tuned with a budget of {budget}, not {terms['budget']}; give --budget {budget}, name "
            f"{row} in --methods too, or give another folder with --out"
        )
    if trials and stopping != terms["stopping"]:
        how = {"none": "without --prune", "margin": "with --prune"}.get(stopping, "by an earlier version's median rule")
        raise ValueError(f"{root}: {row} was tuned {how}; do so again, or give another folder with --out")
    if trials and seeds != terms["seeds"]:
        raise ValueError(
            f"{root}: {row} was tuned with {seeds} seeds each, not {terms['seeds']}; give --seeds {seeds}, or another "
            "folder with --out"
        )
    if head["space"] != json.loads(json.dumps(space)):
        raise ValueError(f"{root}: {row} has trials of {head['space']}, not of {space}; give another folder with --out")
    return Tries({**head, **terms}, trials)
