"""Clients that train in a round of a run, or at any time where its rounds are asynchronous."""

from collections.abc import Callable, Collection
from dataclasses import replace

from confed.engines.buffered import Buffered, check_buffered
from confed.engines.participation import Participation
from confed.federation.algorithm import Algorithm
from confed.models.hub_names import commit_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.recipes.run_section import RunSection
from confed.results.folder import RunFolder

# Recipe with the commit of its model by name ------------------------------------------------------------------


def pinned(recipe: Recipe) -> Recipe:
    """The same recipe with ``model.revision``, where a model by name on a hub leaves it out."""
    model = recipe.sections["model"]
    if model.get("revision") != "":
        return recipe
    return _at_revision(recipe, commit_of(str(model.get("source", ""))))


def pinned_as(folder: RunFolder, recipe: Recipe) -> Recipe:
    """The same recipe with the commit that its run began with, where it leaves it out."""
    file = folder.begun if folder.begun.is_file() else folder.recipe
    if recipe.sections["model"].get("revision") != "" or not file.is_file():
        return recipe
    return _at_revision(recipe, load_recipe(file).sections["model"].get("revision", ""))


def _at_revision(recipe: Recipe, revision: str | None) -> Recipe:
    if not revision:
        return recipe
    return replace(recipe, sections={**recipe.sections, "model": {**recipe.sections["model"], "revision": revision}})


# Clients that train in a round of a run -----------------------------------------------------------------------


def participation_of(run: RunSection, clients: Collection[str]) -> Participation:
    """Participation of clients: late arrivals and departures."""
    joins = {name: round for name, round in run.joins.items() if name in clients}
    return Participation(joins, {name: round for name, round in run.leaves.items() if name in clients})


def cohorts_of(run: RunSection, algorithm: Algorithm) -> tuple[Callable[[int], int], Buffered | None]:
    """Number of clients that train in a round, or at any time, out of those present; settings of asynchronous rounds.

    Where clients send nothing there is nothing to wait for: beside methods with asynchronous rounds, a round of theirs
    is one of as many clients as the buffer holds, so that clients train equally often.
    """
    if not run.async_.buffer:
        return run.cohort_size, None
    if algorithm.traits.centralised or not algorithm.traits.communicates:
        return lambda present: min(run.async_.buffer, present), None
    return run.cohort_size, Buffered(run.async_.buffer, run.async_.staleness, run.async_.delays)


def check_cohorts(algorithm: Algorithm, run: RunSection, clients: Collection[str]) -> None:
    """Check that every round has clients, and that the method has asynchronous rounds where the run asks for them.

    Raises ``ValueError``: a setting of ``run`` does not fit; the message names it.
    """
    participation = participation_of(run, clients)
    participation.check(list(clients), run.rounds)
    size, buffered = cohorts_of(run, algorithm)
    if buffered is not None:
        check_buffered(buffered, algorithm, participation, len(clients), size(len(clients)), run.downlink)
