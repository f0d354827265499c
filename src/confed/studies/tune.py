"""Hyper-parameter tuning: equally many configurations for every method, chosen on the clients' validation data.

What is tried is the learning rate that all methods share, crossed with what the method itself names as worth trying
(``Traits.search``; see :mod:`confed.studies.search`). Every one is trained to the end unless stopping early is
asked for: then one stops whose best score so far lies below the median of the earlier ones' best (the median rule of
Golovin et al., "Google Vizier", KDD 2017) by more than two standard errors of a validation score, in two rounds in a
row. Scores are the mean over clients of the validation
score of the model that the method deploys there: what the recipe's or the row's headline names, else the client's own,
or the global part with the client's own head where that is the method's.
Of multi-label data the score is ``C-AP-binned``, or what ``[study] score`` names, of all clients' validation examples
together: of the global model, or of the clients' own where a method has none or the recipe's headline is "personal".
Clients without validation examples are judged on an unseen place called "validation", where there is one.
Test examples and unseen places are taken out of the data before anything is trained. With several seeds a
configuration is trained with each, and its score after a round is the mean.

A tuning folder holds ``trials/<row>.jsonl`` (a head, then one line per configuration: what a later call goes on
from), ``scores.csv`` and ``tuned.toml`` (:mod:`confed.studies.tuned`).
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import file_name
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import read_jsonl
from confed.runs.encode import load_run_data
from confed.runs.run import load_data
from confed.studies import pool
from confed.studies.runner import refusals
from confed.studies.search import RANDOM_FIRST, next_choice, search_space
from confed.studies.study import differing, joined
from confed.studies.tuned import (
    Trial,
    Tuned,
    effective_questions,
    in_words,
    merge,
    scores_csv,
    standard_error,
    tuned_toml,
)
from confed.studies.validation import validation_scores, validation_sizes
from confed.system.events import Event, JobEnded, JobsPlanned, Progress, RunProgress
from confed.system.folder_lock import exclusive

__all__ = ["clearly_worse", "tune", "tune_row"]

BELOW = 2.0
"""Standard errors of a validation score below the median at which a configuration may be stopped early."""

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
    """Tuning of every row of a recipe; configurations that a folder holds already are not tried again.

    Args:
        recipe: with the rows as its methods; see :meth:`confed.recipes.recipe.Recipe.with_rows`.
        root: the tuning folder.
        budget: configurations per row, the recipe's own included; fewer where there are not so many.
        seed: the first of the tuning runs' seeds.
        workers: rows at a time, each in a separate process. The figures are the same for any number.
        progress: called with the planned rows, and with every event of each.
        prune: stop configurations early that are clearly worse than the median one.
        seeds: how many seeds each configuration is trained with; scores are means over them.

    Raises:
        ValueError: a budget or number of seeds below 1, stopping early with several seeds, faulty data or no validation
            examples, or a folder that was tuned with other settings or whose other rows had another budget, number of
            seeds or rule for stopping early.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if prune and seeds > 1:
        raise ValueError(f"prune goes by the rounds of one seed; leave it out with seeds = {seeds}")
    asked = recipe.with_run(seed=seed, workers=1, evaluate_every=1, evaluate_examples=0)
    # Not times the seeds: where a dataset publishes its validation questions, all seeds have the same ones.
    questions = effective_questions(validation_sizes(load_data(asked), asked.run.without))
    errors, failed = refusals(asked, seed), set[str]()
    if workers > 1:
        load_run_data.cache_clear()  # the processes read the data themselves
    (root / "trials").mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        file = root / "tuning.toml"  # not recipe.toml: this is no run folder
        before = load_recipe(file) if file.is_file() else asked
        recipe = joined(before, asked)
        _check_settings(before, recipe, root)
        terms = {"budget": budget, "stopping": "margin" if prune else "none", "seeds": seeds}
        held = {row: _checked(recipe, row, root, terms, row in asked.methods) for row in recipe.methods}
        for row, lines in held.items():
            # Written anew, because what a kill left of a line would run into the next one.
            write_atomically(_file(root, row), b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        write_atomically(file, recipe.to_toml().encode())
        rows = [row for row in asked.methods if row not in errors]
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
        found: list[Tuned] = []
        for row in recipe.methods:
            trials = tuple(_trials(_file(root, row))[:budget])
            found.append(Tuned(row, recipe.label(row), trials, errors.get(row, ""), row in failed, questions))
        write_atomically(root / "scores.csv", scores_csv(found).encode())
        write_atomically(root / "tuned.toml", tuned_toml(recipe, found, budget, seeds).encode())
    return found


def tune_row(job: Mapping[str, Any], progress: Progress) -> str:
    """Tuning of one row; returns the best configuration in one line.

    Args:
        job: "root" (the tuning folder), "row", "budget", "seeds" and "stop_below": the number of validation questions
            that the margin for stopping early goes by, or empty where every configuration is trained to the end.
        progress: called after every round.
    """
    root, row = Path(job["root"]), str(job["row"])
    recipe = load_recipe(root / "tuning.toml")
    file, space = _file(root, row), search_space(recipe, row)
    budget = min(int(job["budget"]), math.prod(map(len, space.values())))
    done = _trials(file)[:budget]
    for number in range(len(done), budget):
        choice = next_choice(recipe, row, space, done)
        values = {knob: space[knob][at] for knob, at in choice.items()}
        single = _configured(recipe, row, values)
        single = replace(single, score=recipe.score, headline=recipe.deploys(row))  # what it is chosen by

        def report(round: int, text: str, number: int = number) -> None:
            progress(RunProgress(round, recipe.run.rounds, "training", f"configuration {number + 1}/{budget}{text}"))

        def hopeless(scores: Sequence[float], earlier: Sequence[Trial] = tuple(done)) -> bool:
            return bool(job["stop_below"]) and clearly_worse(scores, earlier, float(job["stop_below"]))

        report(0, "")
        done.append(_try(single, choice, values, report, hopeless, int(job["seeds"])))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(vars(done[-1])) + "\n")
    best = Tuned(row, "", tuple(done)).best
    found = f"best {best.scores[-1]:.1%} with {in_words(best.values)}" if best else "none of them worked"
    return f"{len(done)} configurations tried, {found}"


def _try(
    recipe: Recipe,
    choice: Mapping[str, int],
    values: Mapping[str, Any],
    report: Callable[[int, str], None],
    hopeless: Callable[[Sequence[float]], bool],
    seeds: int,
) -> Trial:
    """Training of one configuration, ended early where it is far below the earlier ones."""
    began, by_seed, state, error = time.perf_counter(), list[list[float]](), "complete", ""
    try:
        for number in range(seeds):
            scores = list[float]()
            by_seed.append(scores)
            of_seed = f", seed {number + 1}/{seeds}" if seeds > 1 else ""
            for score in validation_scores(recipe.with_run(seed=recipe.run.seed + number)):
                scores.append(score)
                report(min(len(scores), recipe.run.rounds), f"{of_seed}, {score:.1%}")
                if recipe.run.rounds // 3 < len(scores) < recipe.run.rounds and hopeless(scores):
                    state = "pruned"
                    break
    except (RuntimeError, ValueError) as failure:  # a learning rate at which training diverges is a finding
        if any(shortage in f"{type(failure).__name__}: {failure}" for shortage in SHORTAGES):
            raise
        state, error = "failed", str(failure)
    means = tuple(statistics.fmean(of_round) for of_round in zip(*by_seed, strict=state == "complete"))
    last = tuple(scores[-1] for scores in by_seed if scores) if seeds > 1 else ()
    return Trial(choice, values, state, means, round(time.perf_counter() - began, 2), error, last)


def clearly_worse(scores: Sequence[float], earlier: Sequence[Trial], questions: float) -> bool:
    """Whether a configuration lies far below the earlier ones in its two last rounds, beyond what is noise.

    Args:
        scores: its score after each round so far.
        earlier: the configurations before it; those that were trained to the end count.
        questions: what a score is a mean over, see :func:`confed.studies.tuned.effective_questions`.
    """
    finished = [trial.scores for trial in earlier if trial.score is not None]
    if len(finished) < RANDOM_FIRST - 1 or len(scores) < 2:
        return False
    for end in (len(scores) - 1, len(scores)):
        middle = statistics.median(max(there[:end]) for there in finished)
        error = standard_error(middle, questions)
        if error is None or not max(scores[:end]) < middle - BELOW * error:
            return False
    return True


def _configured(recipe: Recipe, row: str, values: Mapping[str, Any]) -> Recipe:
    return recipe.with_rows([row], {row: merge(recipe.overrides.get(row, {}), values)}).method(row)


def _file(root: Path, row: str) -> Path:
    old = root / "trials" / f"{row}.jsonl"  # earlier versions wrote names with a colon as they are
    return old if old.is_file() else old.with_name(f"{file_name(row)}.jsonl")


def _check_settings(before: Recipe, recipe: Recipe, root: Path) -> None:
    """Check that existing trials were made with the present settings."""
    for row in before.methods:
        different = differing(before.method(row), recipe.method(row))
        if before.score != recipe.score:
            different = different or f"study.score = {before.score!r}"
        if different and _file(root, row).is_file():
            raise ValueError(f"{root}: {row} was tuned with {different}; give another folder with --out")


def _checked(recipe: Recipe, row: str, root: Path, terms: Mapping[str, Any], again: bool) -> list[dict[str, Any]]:
    """Lines of a row's file with the terms of this call, so that all choices of a folder are on equal terms.

    Args:
        recipe: the recipe.
        row: one of its rows.
        root: the tuning folder.
        terms: budget and rule for stopping early.
        again: whether this call tunes the row; others must have had its budget.

    Raises:
        ValueError: the file holds trials with another budget, rule for stopping early, number of seeds or search space.
    """
    file, space = _file(root, row), {knob: list(values) for knob, values in search_space(recipe, row).items()}
    head, *trials = read_jsonl(file) or [{"space": space}]
    # A folder of an earlier version says at least how much was tried, and does not name its rule.
    budget, stopping = head.get("budget", max(terms["budget"], len(trials))), head.get("stopping", "median")
    if trials and not again and budget != terms["budget"]:
        raise ValueError(
            f"{root}: {row} was tuned with a budget of {budget}, not {terms['budget']}; give --budget {budget}, name "
            f"{row} in --methods too, or give another folder with --out"
        )
    if trials and stopping != terms["stopping"]:
        how = {"none": "without --prune", "margin": "with --prune"}.get(stopping, "by an earlier version's median rule")
        raise ValueError(f"{root}: {row} was tuned {how}; do so again, or give another folder with --out")
    if trials and head.get("seeds", 1) != terms["seeds"]:
        raise ValueError(
            f"{root}: {row} was tuned with {head.get('seeds', 1)} seeds each, not {terms['seeds']}; give --seeds "
            f"{head.get('seeds', 1)}, or another folder with --out"
        )
    if head["space"] != json.loads(json.dumps(space)):
        raise ValueError(f"{file} holds trials of {head['space']}, not of {space}; give another folder with --out")
    return [{**head, **terms}, *trials]


def _trials(file: Path) -> list[Trial]:
    lines = read_jsonl(file)[1:]
    return [Trial(**{**line, **{key: tuple(line.get(key, ())) for key in ("scores", "by_seed")}}) for line in lines]
