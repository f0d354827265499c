"""Search spaces of tuning, and the next configuration to try.

The first configuration is always the recipe's own. The next ones come from Optuna's tree-structured Parzen estimator
(Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011).
"""

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from confed.federation.randomness import derive
from confed.recipes.recipe import Recipe
from confed.studies.tuned import Trial

__all__ = ["FACTORS", "RANDOM_FIRST", "next_choice", "own_choice", "search_space"]

FACTORS = (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)
"""Learning rates tried, as multiples of the recipe's, where it names none itself."""

RANDOM_FIRST = 3
"""Configurations before the estimator has something to go by; also before any is stopped early."""

LR = "local.lr"


def search_space(recipe: Recipe, row: str) -> dict[str, tuple[Any, ...]]:
    """Search space of a row: knob -> the values that are tried, the recipe's own among them.

    Args:
        recipe: its ``[study] lr``, or multiples of the row's own learning rate, where the method has one.
        row: one of its rows.

    Raises:
        ValueError: the method names a hyper-parameter that it does not have.
    """
    single = recipe.method(row)
    own = single.local.lr
    rates = recipe.lr or tuple(float(f"{own * factor:.6g}") for factor in FACTORS)
    algorithm, method = single.sections["algorithm"], single.construct("algorithm")
    space = {LR: _with(rates, own)} if method.traits.has_steps else {}
    for name, values in method.search_space().items():
        if name not in algorithm:
            raise ValueError(f"{row}: search names {name!r}, which is none of {', '.join(algorithm)}")
        # None may stand for one of the values: as a separate value it would be tried twice.
        space[name] = _with(values, method.effective_value(name))
    return space


def _with(values: Sequence[Any], own: Any) -> tuple[Any, ...]:
    """The values, each once, the row's own among them; it takes the place of one that is equal but for rounding."""
    taken = [own if _same(value, own) else value for value in values]
    there = tuple(dict.fromkeys(taken))
    return there if own in there else (own, *there)


def _same(first: Any, second: Any) -> bool:
    numbers = isinstance(first, float | int) and isinstance(second, float | int)
    if numbers and not isinstance(first, bool) and not isinstance(second, bool):
        return math.isclose(first, second, rel_tol=1e-5)
    return type(first) is type(second) and first == second


def own_choice(recipe: Recipe, row: str, space: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Positions of the recipe's own values in a row's search space."""
    single = recipe.method(row)
    method = single.construct("algorithm")
    values = {knob: single.local.lr if knob == LR else method.effective_value(knob) for knob in space}
    return {knob: choices.index(values[knob]) for knob, choices in space.items()}


def next_choice(recipe: Recipe, row: str, space: Mapping[str, Sequence[Any]], done: Sequence[Trial]) -> dict[str, int]:
    """The next configuration: the recipe's own first, then what the estimator proposes and was not tried yet.

    It depends on what was found, not on when it was found.

    Args:
        recipe: with the row, and the seed of tuning.
        row: one of its rows.
        space: its search space, with configurations that were not tried.
        done: the configurations that were tried.

    Returns:
        Knob -> position among its values.
    """
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
    points = [dict(zip(space, at, strict=True)) for at in itertools.product(*(range(len(v)) for v in space.values()))]
    left = [point for point in points if point not in tried]
    return random.Random(json.dumps([*tried, choice])).choice(left)
