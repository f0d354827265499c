"""Validation scores of a method after each round; test examples are taken out of the data beforehand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from confed.federation.specs import task_spec
from confed.recipes.recipe import Recipe
from confed.results.deployed import deployed

if TYPE_CHECKING:
    from confed.data.examples import TableData
    from confed.engines.local import Members, Setup
    from confed.runs.encode import RunData

__all__ = ["validation_scores", "validation_sizes"]

NOTHING = "tuning chooses on the clients' validation examples, and there are none; see data.validation"

LOOKED_AT = 1000
"""Clients whose validation examples judge a configuration, of multi-label data; the first so many."""


def validation_scores(recipe: Recipe) -> Iterator[float]:
    """Validation scores of a single-run recipe, one after every round of its training; nothing is stored.

    A method that does something after the last round (fine-tuning) yields once more after it.

    Yields:
        The headline metric's mean over clients, of the model that ``recipe.headline`` names: "personal", each
        one's own, or "global_seen", what is global with each client's own head where it has one; the other of the
        two where a method has no such model. Without a headline what is global where the method has heads of each
        client's own, else each client's own. Of multi-label data a metric of all validation examples together.

    Raises:
        ValueError: the recipe or its data are faulty, there are no validation examples, or the method cannot work
            with them.
        RuntimeError: a client failed: a mean without it would be that of an easier federation.
    """
    import torch

    from confed.data.label_tables import Both, LazyTables
    from confed.engines.local import Participation, Simulation, Workspace, simulate
    from confed.federation.protocols import Counting
    from confed.federation.state import MemoryStore
    from confed.results.headline import VALIDATION
    from confed.runs.cohorts import cohorts_of
    from confed.runs.pooled_metrics import PooledCounts
    from confed.runs.run import prepare
    from confed.tasks.vqa import summarise

    run = recipe.run
    torch.set_num_threads(run.threads)
    setup, run_data = prepare(recipe)
    pooled = setup.algorithm.traits.centralised
    clients: Mapping[str, TableData]
    observers: Mapping[str, TableData] = {}
    most: int | None = None
    if isinstance(run_data.clients, LazyTables):
        clients, population = run_data.clients.without_tests(), setup.population
        if not pooled:
            population = _looking_on(setup, clients.masked(task_spec(setup.task).known or 0.0))
        place = None if _any_validation(clients) else run_data.unseen.get(VALIDATION)
        observers = {} if place is None else {VALIDATION: place}
        observers = Both(clients, observers) if pooled else observers
        most = LOOKED_AT
    else:
        clients = {name: _without_test(data) for name, data in run_data.clients.items()}
        # A method that trains on all clients' data has one member; the clients only look on.
        population = setup.population if pooled else _looking_on(setup, clients)
        observers = clients if pooled else {}
    setup = replace(setup, population=population, observers=observers)
    there = {} if pooled else clients
    participation = Participation(*({n: r for n, r in who.items() if n in there} for who in (run.joins, run.leaves)))
    workspace = Workspace(setup.model(), setup.device)
    store, by_size = MemoryStore(), run.sampling == "size"
    cohort, buffered = cohorts_of(run, setup.algorithm)
    with Simulation(setup, store, None, cohort, participation, by_size, buffered=buffered) as simulation:
        for record in simulate(simulation, simulation.start(workspace)):
            for client, error in record.errors.items():
                raise RuntimeError(f"client {client!r} failed in round {record.round}: {error}")
            counts = PooledCounts(setup.task, setup.algorithm, run_data.unseen)
            views = simulation.evaluate(record.servers, record.round, split="validation", most=most, counted=counts.add)
            if isinstance(setup.task, Counting):
                yield _pooled_score(recipe, setup, counts.values())
                continue
            # The same rule as of tables (results/deployed.py): what is chosen by is what will be judged.
            wanted = recipe.headline or deployed(setup.algorithm.global_model)
            first, second = ("global", "personal") if wanted == "global_seen" else ("personal", "global")
            places = views["unseen"] if pooled else views[first] or views[second]
            scores = [summarise(tally)[setup.task_of(place).metric] for place, tally in places.items()]
            if not scores:
                raise ValueError(NOTHING)
            yield sum(scores) / len(scores)


def validation_sizes(run_data: "RunData", without: Sequence[str]) -> list[int]:
    """Numbers of validation examples of the places that judge a configuration.

    Args:
        run_data: the data.
        without: clients that take no part.

    Raises:
        ValueError: there are no validation examples.
    """
    from confed.data.label_tables import LazyTables
    from confed.results.headline import VALIDATION

    if isinstance(run_data.clients, LazyTables):
        there = run_data.clients.without(without)
        # Counts of all clients' examples are added up before there is a metric: as one place with all of them.
        sizes = [sum(len(data.tables[1]) for data, _ in zip(there.values(), range(LOOKED_AT), strict=False))]
        if not sizes[0] and VALIDATION in run_data.unseen:
            return [len(run_data.unseen[VALIDATION].tables[1])]
    else:
        sizes = [len(data.tables[1]) for name, data in run_data.clients.items() if name not in without]
    if not any(sizes):
        raise ValueError(NOTHING)
    return sizes


def _any_validation(clients: "Mapping[str, TableData]") -> bool:
    """Whether one of the first clients has validation examples."""
    return any(len(data.tables[1]) for data, _ in zip(clients.values(), range(LOOKED_AT), strict=False))


def _without_test(data: "TableData") -> "TableData":
    """A client's training and validation examples."""
    from confed.data.examples import TableData

    train, validation, _ = data.tables
    return TableData(train, validation, validation.take(0))


def _pooled_score(recipe: Recipe, setup: "Setup", values: Mapping[str, Mapping[str, float]]) -> float:
    """The metric that selects multi-label configurations, of the view that the method is judged by."""
    from confed.results.headline import VALIDATION

    wanted = ["personal", "global"] if recipe.headline == "personal" else ["global", "personal"]
    view = next((name for name in [*wanted, f"unseen/{VALIDATION}"] if values.get(name)), None)
    if view is None:
        raise ValueError(NOTHING)
    score = recipe.score or task_spec(setup.task).score
    if score not in values[view]:
        raise ValueError(f"study.score must be one of {', '.join(values[view])}, got {score!r}")
    return values[view][score]


def _looking_on(setup: "Setup", clients: "Mapping[str, TableData]") -> "Members":
    from confed.engines.local import Members

    infos = [setup.population.info(number) for number in range(len(setup.population))]
    sizes = [info.num_examples for info in infos]
    return Members(clients, {info.id: info.modalities for info in infos}, {info.id: info.head for info in infos}, sizes)
