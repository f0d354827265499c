"""Construction of a federation from a recipe."""

import json
import os
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from confed.data.chat_tables import right_answers
from confed.data.examples import FederatedDataset, TableData
from confed.data.lazy import changed, known_sizes
from confed.data.lazy import without as leave_out
from confed.data.ml_files.integrity import cache_folder
from confed.data.modalities import owned_by_clients
from confed.data.modality_names import sort_modalities
from confed.data.table import Table, concatenate_tables
from confed.engines.buffered import Buffered, check_buffered
from confed.engines.executor import Executor, InProcess, check_compiler
from confed.engines.local import Members, Participation, Setup, Simulation
from confed.engines.participation import listed
from confed.engines.perform import Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.compression import Compression
from confed.federation.families.public_data import ServerLearns, ServerSide, UsesPublicData
from confed.federation.frozen_features import FeatureSettings
from confed.federation.protocols import Task
from confed.federation.specs import (
    ChecksPictures,
    ComparesCaptions,
    RanksTexts,
    TaskAware,
    WrapsModel,
    model_spec,
    task_spec,
)
from confed.federation.state import Store
from confed.models import create_model
from confed.models.tokenizer import known_words
from confed.privacy.protections import check_layouts
from confed.recipes.recipe import Recipe, RunSection
from confed.registry import measures, models
from confed.registry import tasks as registered_tasks
from confed.runs.checks import (
    check_chosen_measures,
    check_class_lists,
    check_heads,
    check_lengths,
    check_local,
    check_measures,
    check_method,
    check_modalities,
    check_own,
    check_records,
    check_scores,
    check_whole,
    public_data,
    warn_of_ignored,
    warn_of_long_texts,
)
from confed.runs.combinations import Combination, check_combination, combination
from confed.runs.encode import (
    TOKENIZER_KEYS,
    RunData,
    derived_options,
    load_run_data,
    table_data,
)
from confed.system.collector import collector_at_rest

Owned = tuple[str, ...] | Mapping[str, tuple[str, ...]]  # modalities of all clients, or of each
EVERYONE = "everyone"  # the one member that holds all data in a centralised run


def load_data(recipe: Recipe) -> RunData:
    """A recipe's data as tensors, kept for the next recipe with the same data, model and seed."""
    # Of the model only what its tokenizer depends on: rows that finetune it in different ways share their data.
    model = {key: value for key, value in recipe.sections["model"].items() if key in ("name", *TOKENIZER_KEYS)}
    data, tokenizer = (json.dumps(section, default=str) for section in (recipe.sections["data"], model))
    return load_run_data(data, tokenizer, recipe.run.seed)


def prepare(recipe: Recipe) -> tuple[Setup, RunData]:
    """The federation that a single-run recipe describes."""
    run, algorithm = recipe.run, recipe.algorithm
    run_data = _present(recipe, algorithm, load_data(recipe))
    task, tasks = tasks_of(recipe, run_data)
    heads = tuple(dict.fromkeys(head for t in tasks.values() if (head := task_spec(t).head) != "answers"))
    build = _Models(_builder(recipe, run_data, task, heads))
    check_lengths(recipe, run_data.dataset)
    warn_of_long_texts(run_data)
    _check_fit(recipe, run_data, task, tasks, heads)
    algorithm = _configured(recipe, algorithm, build, task, tasks, run_data)
    owned = owned_by_clients(run_data.dataset)
    public, observers = public_data(algorithm, run_data.dataset, run_data.unseen, owned)
    if public is not None:
        side = ServerSide(build, public, task, run.seed, _device(run.device))
        if isinstance(algorithm, UsesPublicData):
            examples = (run_data.dataset.elsewhere or {}).get(algorithm.public_place(), len(public))
            algorithm = algorithm.with_public_data(examples, run_data.dataset.widest)
        algorithm = algorithm.with_server_side(side) if isinstance(algorithm, ServerLearns) else algorithm
    _check_method(recipe, run_data, algorithm, build, task, owned)
    if algorithm.traits.centralised:  # the clients only look on
        observers = ChainMap[str, Any](dict(observers), cast(Any, run_data.clients))
    if run.compile:
        check_compiler(_device(run.device))
    travels = algorithm.traits.communicates and not algorithm.traits.centralised
    members = _members(run_data, algorithm, task, owned, {name: t.head for name, t in tasks.items() if heads})
    setup = Setup(
        algorithm, members, task, recipe.local, build, run.rounds, run.seed, run.keep_personal, observers,
        _device(run.device), tasks, public,
        features=_features(run),
        batch_clients=1 if run.batch_clients == "auto" else run.batch_clients,  # which a run decides when it begins
        compile=run.compile,
        device_data=int(run.device_data * 1e9),
        measures=tuple(measures[name]() for name in run.measures),
        uplink=run.uplink if travels else Compression(),
        downlink=run.downlink if travels else Compression(),
    )  # fmt: skip
    _check_protections(setup, build)
    return setup, run_data


def _members(run_data: RunData, algorithm: Algorithm, task: Task, owned: Owned, heads: Mapping[str, str]) -> Members:
    """Those who train: the clients, or one with all their data; the task may hide labels from them."""
    clients = run_data.clients
    if algorithm.traits.centralised:
        if not isinstance(owned, tuple):
            owned = sort_modalities(chain.from_iterable(owned.values()), "a client")
        clients, owned = {EVERYONE: _everyone(run_data)}, {EVERYONE: owned}
    if known := task_spec(task).known:
        clients = changed(clients, partial(TableData.masked, known=known))
    sizes = known_sizes(clients)
    return Members(clients, owned, heads, None if sizes is None else sizes.tolist())


def _present(recipe: Recipe, algorithm: Algorithm, run_data: RunData) -> RunData:
    """The data of the clients that take part."""
    run = recipe.run
    Participation(run.joins, run.leaves).check(list(run_data.clients), 0)
    run_data = _without(run_data, run.without)
    warn_of_ignored(recipe.sections["data"], run, run_data)
    check_cohorts(algorithm, run, run_data.clients)
    return run_data


def participation_of(run: RunSection, clients: Collection[str]) -> Participation:
    """Participation of clients: late arrivals and departures."""
    joins = {name: round for name, round in run.joins.items() if name in clients}
    return Participation(joins, {name: round for name, round in run.leaves.items() if name in clients})


def simulation_of(
    run: RunSection, setup: Setup, clients: Collection[str], store: Store, executor: InProcess | Executor
) -> Simulation:
    """The federation's rounds as a recipe's section ``[run]`` has them."""
    # A pooled run has no members that could come and go: its data are those of all who ever take part.
    participation = participation_of(run, () if setup.algorithm.traits.centralised else clients)
    cohort, buffered = cohorts_of(run, setup.algorithm)
    return Simulation(setup, store, executor, cohort, participation, run.sampling == "size", buffered=buffered)


def cohorts_of(run: RunSection, algorithm: Algorithm) -> tuple[Callable[[int], int], Buffered | None]:
    """Clients that train in a round, or at any time, out of those present; settings of asynchronous rounds."""
    if not run.async_.buffer:
        return run.cohort_size, None
    if algorithm.traits.centralised or not algorithm.traits.communicates:
        return lambda present: min(run.async_.buffer, present), None
    return run.cohort_size, Buffered(run.async_.buffer, run.async_.staleness, run.async_.delays)


def check_cohorts(algorithm: Algorithm, run: RunSection, clients: Collection[str]) -> None:
    """Check that every round has clients, and that the method has asynchronous rounds where the run asks for them."""
    participation = participation_of(run, clients)
    participation.check(list(clients), run.rounds)
    size, buffered = cohorts_of(run, algorithm)
    if buffered is not None:
        check_buffered(buffered, algorithm, participation, len(clients), size(len(clients)), run.downlink)


def _check_fit(recipe: Recipe, run_data: RunData, task: Task, tasks: Mapping[str, Any], heads: Sequence[str]) -> None:
    """Check of model, task and data with one another."""
    headless = heads and "heads" not in signature(models[recipe.sections["model"]["name"]]).parameters
    others = ", ".join(f"{n} ({t.name})" for n, t in tasks.items() if t.head in heads) if headless else ""
    check_combination(
        replace(_combination(recipe, run_data, task), wraps=isinstance(task, WrapsModel), heads_missing=others)
    )


def _combination(recipe: Recipe, run_data: RunData, task: Task) -> Combination:
    names = [recipe.sections[section]["name"] for section in ("model", "task")]
    return combination(names[0], run_data.dataset, names[1], task, reads_answers=run_data.answer_tokens is not None)


def _check_method(
    recipe: Recipe, run_data: RunData, algorithm: Algorithm, build: "_Models", task: Task, owned: Owned
) -> None:
    """Check of the method with run, task, model and data."""
    dataset, clients = run_data.dataset, run_data.clients
    check_method(algorithm, recipe.run, clients)
    check_local(algorithm, recipe.local)
    check_scores(algorithm, task)
    check_modalities(recipe, dataset.name, owned)
    if not algorithm.traits.clients_may_lack_modalities and not isinstance(owned, tuple):
        check_whole(algorithm, build.first, owned)
    check_class_lists(algorithm, dataset)
    if (dataset.answer_sets and run_data.answer_tokens is None) or dataset.tasks:
        check_heads(algorithm, build.first, list(clients), dataset)


def _check_protections(setup: Setup, build: "_Models") -> None:
    """Check that noise and secure sums find in every client what they need."""
    algorithm = setup.algorithm
    if algorithm.record_privacy is not None:
        check_records(build.first, setup.task, setup.data(setup.population.info(0).id))
    if algorithm.update_privacy is None and algorithm.secure_sum is None:
        return
    adds = type(algorithm).add_modules is not Algorithm.add_modules
    workspace = Workspace(setup.model() if adds else build.first)
    people = map(setup.population.info, range(len(setup.population)))
    check_layouts(algorithm, (workspace.scopes(algorithm, info) for info in people))


class _Models:
    """Factory of a run's model that hands out, as the first one, the model that was made for checks before the run."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build, self._first = build, None

    @property
    def first(self) -> nn.Module:
        """The model that the next call returns; must not be changed."""
        self._first = self._build() if self._first is None else self._first
        return self._first

    def __call__(self) -> nn.Module:
        """A model with its initial values that nobody else has."""
        model, self._first = self.first, None
        return model


def _configured(
    recipe: Recipe, algorithm: Algorithm, build: "_Models", task: Any, tasks: Mapping[str, Any], run_data: RunData
) -> Algorithm:
    """A method that has looked at the model, and the model at pictures of the data's size."""
    name = recipe.sections["model"]["name"]
    check_measures({recipe.sections["task"]["name"]: task, **tasks})
    check_chosen_measures(recipe.run.measures, lambda: build.first, task, tasks, run_data)
    if registered_tasks.is_own(recipe.sections["task"]["name"]) or models.is_own(name):
        client = next(iter(run_data.clients))
        on_cpu = _device(recipe.run.device) == "cpu"
        check_own(recipe, build.first, run_data.clients[client], tasks.get(client, task), on_cpu)
    known_share = task_spec(task).known or 0.0
    configures = type(algorithm).configure is not Algorithm.configure
    if not (known_share or configures or model_spec(models[name]).converses):  # a model may take long to read
        return algorithm
    built = build.first
    if isinstance(built, ChecksPictures) and "picture_size" in run_data.shapes:
        built.check_pictures(torch.zeros(3, *run_data.shapes["picture_size"], dtype=torch.uint8))
    algorithm = algorithm.configure(built, task)
    if known_share and not model_spec(built).reads_states:
        raise ValueError(
            f"the model {name!r} reads no label states, so that labels known in training would only be missing in "
            f"its loss: task.known must be 0 for it, got {known_share}"
        )
    return algorithm


def tasks_of(recipe: Recipe, run_data: RunData) -> tuple[Task, dict[str, Any]]:
    """Tasks of a run: the recipe's task on the data, and tasks of single clients or places."""
    answers = run_data.dataset.answers if run_data.answer_tokens is not None else None
    return _task(recipe, run_data, answers), _tasks(recipe, run_data)


def _builder(recipe: Recipe, run_data: RunData, task: Any, heads: Sequence[str]) -> Callable[[], nn.Module]:
    """Factory of the recipe's model."""
    options = dict(recipe.sections["model"])
    name, dataset, seed = options.pop("name"), run_data.dataset, recipe.run.seed

    def build() -> nn.Module:
        answers = dataset.widest if dataset.answer_sets else dataset.answers
        words = known_words(run_data.tokenizer)
        derived = derived_options(name, run_data.region_width, words, run_data.shapes)
        if heads:
            derived["heads"] = heads
        with collector_at_rest():  # the model's classes are imported here
            built = create_model(
                name, answers=answers, vocab_size=run_data.tokenizer.vocab_size, seed=seed, **derived, **options
            )
        if run_data.answer_tokens is not None:
            assert isinstance(built, TaskAware)  # as every model that writes its answers
            built.begin(task)
        if isinstance(task, WrapsModel):
            return task.wrap(built, dataset.answers, torch.Generator().manual_seed(seed))
        return built

    return build


def _device(name: str) -> str:
    """The device that a recipe names; "auto" is a graphics card where there is one."""
    if name != "auto":
        return name
    # The ordinary check would open a CUDA context, after which workers can no longer be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _features(run: RunSection) -> FeatureSettings | None:
    """How the simulator keeps features of frozen layers; in a folder of this user, where there is a home folder."""
    allowed = os.environ.get("CONFED_FEATURES", "auto")  # what this machine's owner says, whatever recipes say
    if allowed not in ("auto", "memory", "off"):
        raise ValueError(f"CONFED_FEATURES must be auto, memory or off, got {allowed!r}")
    if "off" in (run.features.keep, allowed):
        return None
    folder: Path | None = None
    with suppress(OSError):
        folder = cache_folder().parent / "features" if run.features.keep == allowed == "auto" else None
    kept = run.features
    return FeatureSettings(int(kept.memory * 1e9), folder, int(kept.disk * 1e9), kept.tolerance)


def check_device(recipe: Recipe, *, alone: bool = False) -> None:
    """Check, before a run begins, that the machine has the device of the recipe; nodes of a cluster may have others."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if recipe.run.engine == "local" and recipe.run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "run.device is 'cuda', and PyTorch finds no CUDA device on this machine; 'auto' takes one if there is any"
        )
    if recipe.sections["model"].get("device_map") == "auto":
        _check_several_gpus(replace(recipe.run, workers=1) if alone else recipe.run)


def _check_several_gpus(run: RunSection) -> None:
    wanted = "model.device_map = 'auto' spreads the model over the GPUs of one process"
    if run.engine != "local" or run.workers != 1:
        given = f"run.engine = {run.engine!r}, run.workers = {run.workers}"
        raise ValueError(f"{wanted}, and needs run.engine = 'local' and run.workers = 1, got {given}")
    count = 0 if run.device == "cpu" else torch.cuda.device_count()
    if count < 2:
        raise ValueError(
            f"{wanted}, and needs run.device = 'cuda' and at least two of them, got run.device = {run.device!r} and "
            f"{count}; set model.device_map = 'one'"
        )


def _everyone(run_data: RunData) -> TableData:
    """All clients' training examples as one client's."""
    dataset = run_data.dataset
    rows = concatenate_tables([_without_labels(data.tables[0], dataset) for data in run_data.clients.values()])
    return table_data(rows, rows.take(0), rows.take(0), dataset.mixture)


def _tasks(recipe: Recipe, run_data: RunData) -> dict[str, Any]:
    """The tasks of clients and places where the data say that they have one of their own, or that others have."""
    dataset = run_data.dataset
    if not dataset.tasks and (run_data.answer_tokens is None or not dataset.answer_sets):
        return {}
    tasks: dict[str, Any] = {}
    for name in (*run_data.clients, *run_data.unseen):
        answers = None if run_data.answer_tokens is None else dataset.answer_set(name)
        own_task = dataset.tasks.get(name)
        tasks[name] = registered_tasks[own_task]() if own_task else _task(recipe, run_data, answers)
    return tasks


def _task(recipe: Recipe, run_data: RunData, candidates: Sequence[str] | None) -> Any:
    """The recipe's task; of a model that writes its answers, with those among which it chooses."""
    dataset, tokens = run_data.dataset, run_data.answer_tokens
    task: Any = recipe.construct("task", answers=dataset.widest, types=run_data.types)
    check_combination(_combination(recipe, run_data, task))
    if isinstance(task, ComparesCaptions):
        task = _reading(task, run_data)
    if tokens is None or candidates is None or not isinstance(task, RanksTexts):
        return task
    if not len(tokens):  # too many answers for a list
        return task.choosing(tokens)
    row_of = {answer: row for row, answer in enumerate(dataset.answers)}
    return task.choosing(tokens[torch.tensor([row_of[answer] for answer in candidates])])


def _reading(task: ComparesCaptions, run_data: RunData) -> Any:
    """A task that compares what a model writes with what people wrote of all validation and test examples."""
    dataset = run_data.dataset
    asked_about = chain.from_iterable((split.validation, split.test) for split in dataset.clients.values())
    captions = list(chain.from_iterable(map(right_answers, chain(asked_about, dataset.unseen.values()))))
    # Where all examples are at other sites, texts are compared with captions there.
    return task.reading(run_data.tokenizer, [("nothing",) * 10] if dataset.elsewhere is not None else captions)


def _without_labels(table: Table, dataset: FederatedDataset) -> Table:
    """A table to be put together with others: positions in a client's own answer set mean nothing there."""
    if not dataset.answer_sets:
        return table
    columns = {name: column for name, column in table.columns.items() if name != "label"}
    return replace(table, columns=columns, targets=None)


def _without(run_data: RunData, names: Sequence[str]) -> RunData:
    """The same data as if the named clients had never been; answers, words and question types are common knowledge."""
    if not names:
        return run_data
    for name in names:
        if name not in run_data.clients:
            raise ValueError(f"run.without names no client {name!r}; there are {listed(list(run_data.clients))}")
    if set(names) == set(run_data.clients):
        raise ValueError(f"run.without must leave at least one client, got all of them: {listed(names)}")
    data = run_data.dataset
    facts, tasks, modalities = (leave_out(values, names) for values in (data.facts, data.tasks, data.modalities))
    dataset = replace(data, clients=leave_out(data.clients, names), facts=facts, tasks=tasks, modalities=modalities)
    return replace(run_data, dataset=dataset, clients=leave_out(run_data.clients, names))
