"""Construction of a federation from a recipe, and whether its method goes with its model, task, data and run.

What model, task and data have to say to one another is the table of :mod:`confed.runs.combinations`.
"""

import json
import os
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import chain, islice
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from confed.data.chat_tables import right_answers
from confed.data.examples import FederatedDataset, TableData
from confed.data.lazy import changed, known_sizes
from confed.data.lazy import without as leave_out
from confed.data.ml_files.integrity import cache_folder
from confed.data.modalities import longest, owned_by_clients
from confed.data.modality_names import sort_modalities
from confed.data.table import Table, concatenate_tables
from confed.engines.buffered import Buffered, check_buffered
from confed.engines.executor import Executor, InProcess, check_compiler
from confed.engines.local import Members, Participation, Setup, Simulation
from confed.engines.participation import listed
from confed.engines.perform import Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo, NamesClients
from confed.federation.compression import Compression
from confed.federation.families.public_data import ServerLearns, ServerSide, UsesPublicData
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.measure import kept_of, values_of
from confed.federation.model_contract import check_model_kept, on_trial, reading_fault, task_faults
from confed.federation.ownership import unowned
from confed.federation.params import Scope, layout, named_tensors
from confed.federation.protocols import ClientData, Task
from confed.federation.record_gradients import unprotected_reason
from confed.federation.specs import (
    ChecksPictures,
    ComparesCaptions,
    RanksTexts,
    TaskAware,
    WrapsModel,
    WritesAnswers,
    frozen_names,
    model_spec,
    task_spec,
)
from confed.federation.state import Store
from confed.federation.structure import heads_of
from confed.models import create_model
from confed.models.tokenizer import CountsShortened, known_words
from confed.privacy.examples import ProtectsExamples
from confed.privacy.protections import check_layouts
from confed.recipes.recipe import Recipe, RunSection
from confed.registry import datasets, measures, models, tasks
from confed.registry import tasks as registered_tasks
from confed.runs.combinations import Combination, check_combination, combination
from confed.runs.encode import TOKENIZER_KEYS, RunData, derived_options, load_run_data, table_data
from confed.system.collector import collector_at_rest

if TYPE_CHECKING:
    pass


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


# Warnings of settings without effect and of missing test data -------------------------------------------------

LOOKED_AT = 1000
"""Clients whose test examples are looked for; where none of the first so many has any, more are not asked."""


def warn_of_ignored(data: Mapping[str, Any], run: RunSection, run_data: "RunData") -> None:
    """Warnings of an ineffective number of clients, of a cohort beyond it, and of missing test data."""
    client_count = len(run_data.clients)
    number, usual = data.get("clients"), signature(datasets[data["name"]]).parameters.get("clients")
    default = Parameter.empty if usual is None else usual.default
    made = client_count + len(run.without)
    # A card puts a site's data in the terms of all; whose examples these are is another matter.
    if isinstance(number, int) and number not in (made, default) and run_data.dataset.elsewhere is None:
        _say(f"data.clients = {number} has no effect: who the {made} clients are follows from other keys of [data]")
    if run.cohort >= 1 and run.cohort > client_count:
        clients = "one client there is" if client_count == 1 else f"{client_count} clients there are"
        _say(f"run.cohort = {run.cohort:g} is more than the {clients}: all take part in every round")
    # Unseen places first: clients' examples may be made only when they are asked for.
    places = chain(run_data.unseen.values(), islice(run_data.clients.values(), LOOKED_AT))
    if run_data.dataset.elsewhere is None and not any(len(data.tables[2]) for data in places):
        _say("there are no test examples, of clients or unseen places: nothing is measured at the end of the run")


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def warn_of_long_texts(run_data: "RunData") -> None:
    """Warning that counts truncated texts."""
    cut, texts = run_data.texts_cut
    if cut and isinstance(run_data.tokenizer, CountsShortened):
        _say(
            f"{cut} of {texts} different texts of {run_data.dataset.name!r} are longer than model.max_length = "
            f"{run_data.tokenizer.max_length} tokens and lose their end"
        )


# Method x data, method x run --------------------------------------------------------------------------------------


def check_heads(algorithm: Algorithm, model: nn.Module, clients: Sequence[str], dataset: FederatedDataset) -> None:
    """Check that clients with different answers do not share an answer head."""
    heads = {head: f"{module_name}." for head, module_name in heads_of(model).items()}
    names = [name for name in named_tensors(model) if name.startswith(tuple(heads.values()))]
    frozen = frozen_names(model)
    rules = [algorithm.rules(ClientInfo(name, 0, ("image", "text"))) for name in clients]
    shared = any(Scope.SHARED in layout(names, r, frozen=frozen, partial=True).values() for r in rules)
    if algorithm.traits.centralised or shared or algorithm.global_model == "alone":
        reason = "tasks" if dataset.tasks else "answer sets"
        raise ValueError(
            f"the clients of {dataset.name!r} have {reason} of their own, so one head cannot serve them, and "
            f"{type(algorithm).__name__} needs one: set algorithm.name to a method with a private head for each "
            "client"
        )


def check_class_lists(algorithm: Algorithm, dataset: FederatedDataset) -> None:
    """Check that clients have the same class lists where a method states the privacy of an example."""
    noised = isinstance(algorithm, ProtectsExamples) and algorithm.example_privacy.noise > 0
    if not (noised or algorithm.record_privacy is not None):
        return
    if len({split.train.offered for split in dataset.clients.values()}) > 1:
        raise ValueError(
            f"{algorithm.title} protects examples, and clients classify among classes that their own examples have, "
            "which no noise hides: set data.offer = 'base'"
        )


def check_records(model: nn.Module, task: object, data: ClientData) -> None:
    """Check before round 1 that the gradient of every record can be clipped."""
    if reason := unprotected_reason(model, task, data):
        raise ValueError(f"algorithm.record_privacy must be left out: {reason}")


def check_method(algorithm: Algorithm, run: RunSection, clients: Collection[str]) -> None:
    """Check that a method can work with the recipe's section ``[run]``."""
    name = algorithm.title
    for setting, named in (algorithm.named_clients() if isinstance(algorithm, NamesClients) else {}).items():
        if unknown := [client for client in named if client not in clients]:
            raise ValueError(f"algorithm.{setting} names no client {unknown[0]!r}; there are {listed(list(clients))}")
    leaves = [client for client in run.leaves if client in clients]
    if leaves and not algorithm.traits.clients_may_leave:
        raise ValueError(
            f"run.leaves must be empty for {name}, got {', '.join(leaves)}: the server's sums would hold for good what "
            "clients that have left put into them"
        )
    if algorithm.global_model == "none" and not run.keep_personal:
        raise ValueError(
            f"run.keep_personal must be true for {name}, got false: it has no global model, so there would be nothing "
            "to evaluate"
        )


def check_local(algorithm: Algorithm, local: Local) -> None:
    """Check that a method can train as the recipe's section ``[local]`` says."""
    traits = algorithm.traits
    refused = (
        ("accumulate", 1, traits.splits or traits.in_sessions, "client and server step after every batch"),
        ("iterations", 0, traits.splits or traits.in_epochs, "its rounds are made of epochs"),
        ("schedule.horizon", 0, traits.splits, "client and server step by one schedule over the whole run"),
    )
    for name, only, applies, why in refused:
        value = attrgetter(name)(local)
        if applies and value > only:
            raise ValueError(f"local.{name} must be {only} for {algorithm.title}, got {value}: {why}")
    if local.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise ValueError(
            "local.optimizer = 'adamw8bit' needs the library bitsandbytes: install confed with the extra 'quantised'"
        )


def check_scores(algorithm: Algorithm, task: object) -> None:
    """Check that answers are chosen from a list, by scores of them, where a method compares such scores."""
    compares = bool(algorithm.traits.answers_compared) or isinstance(algorithm, UsesPublicData)
    if compares and isinstance(task, WritesAnswers) and task.writing is not None:
        raise ValueError(
            f"{algorithm.title} compares scores of answers, and the model writes them freely: set task.metric = "
            '"choice", so that it chooses among the answers of the data'
        )


def check_whole(algorithm: Algorithm, model: nn.Module, owned: Mapping[str, tuple[str, ...]]) -> None:
    """Check that clients have the same modalities where a method needs all clients in the whole model."""
    names = named_tensors(model)
    read = {client: {*names} - unowned(names, client_modalities) for client, client_modalities in owned.items()}
    first = next(iter(read))
    other = next((client for client in read if read[client] != read[first]), None)
    if other is not None:
        raise ValueError(
            f"{algorithm.title} keeps sums over all clients, so all of them must have the "
            f"same modalities, and {first!r} has {'+'.join(owned[first])}, {other!r} {'+'.join(owned[other])}"
        )


def public_data(
    algorithm: Algorithm,
    dataset: FederatedDataset,
    unseen: Mapping[str, ClientData],
    owned: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
) -> tuple[ClientData | None, Mapping[str, ClientData]]:
    """Public data that the method needs at every client, and the remaining unseen places."""
    if not isinstance(algorithm, UsesPublicData):
        return None, unseen
    place = algorithm.public_place()
    name = algorithm.title
    if dataset.answer_sets or dataset.tasks:
        raise ValueError(
            f"{name} averages what clients say of public examples, and the clients of {dataset.name!r} have answers or "
            "tasks of their own"
        )
    if place not in unseen:
        alternatives = f"one of {listed(list(unseen))}" if unseen else f"one, but {dataset.name!r} has none"
        raise ValueError(
            f"algorithm.public must name an unseen place whose examples every client is to hold, {alternatives}; got "
            f"{place!r}"
        )
    data = unseen[place]
    table = data.tables[0] if isinstance(data, TableData) else None
    sets = [] if table is None or table.present is None else table.sets()
    for client, client_modalities in ({} if isinstance(owned, tuple) else owned).items():
        strange = next((names for names in sets if not set(names) & set(client_modalities)), None)
        if strange is not None:
            raise ValueError(
                f"algorithm.public must name a place whose every example each client can see: {place!r} has some with "
                f"{'+'.join(strange)} only, and client {client!r} has {'+'.join(client_modalities)}"
            )
    return data, {other: examples for other, examples in unseen.items() if other != place}


# Models and tasks of one's own -----------------------------------------------------------------------------------


def check_own(recipe: Recipe, model: nn.Module, data: ClientData, task: Any, on_cpu: bool) -> None:
    """Check of a model or a task that does not come with confed, before it is trained or asked for scores."""
    name, task_name = recipe.sections["model"]["name"], recipe.sections["task"]["name"]
    if models.is_own(name):
        check_model_kept(name, model)
    batch = next(iter(data.train(2, torch.Generator().manual_seed(0))), None)
    if not on_cpu or batch is None:
        return
    if fault := reading_fault(model, batch):
        height, width = batch["image"].shape[-2:] if "image" in batch else (0, 0)
        seen = f" with pictures of {height} x {width} pixels" if height else ""
        raise ValueError(
            f"the model {name!r} {fault}, for two examples{seen}: set data.image_size to what the model reads, or let "
            "its function take the keyword picture_size, (height, width)"
        )
    tests = next(iter(data.test(2)), None)
    if tasks.is_own(task_name) and tests is not None:
        with on_trial(model):
            output = model(tests)
        for _, fault in task_faults(task, output, tests):
            raise ValueError(f"the task {task_name!r} {fault}")


def check_measures(named: Mapping[str, Any]) -> None:
    """Check that tasks declare what they score (:attr:`confed.federation.protocols.Task.measures`)."""
    for name, task in named.items():
        if getattr(task, "measures", None) is None:
            raise ValueError(
                f"the task {name!r} does not declare what it scores: give it measures, a mapping of each name in its "
                'tally to its lowest and highest value, such as {"loss": (0.0, 1e12), "accuracy": (0.0, 1.0)}'
            )


def check_chosen_measures(
    names: Sequence[str],
    build: Callable[[], nn.Module],
    task: Any,
    tasks_of_places: Mapping[str, Any],
    run_data: "RunData",
) -> None:
    """Check that ``run.measures`` can be computed, on two test examples of the first place of each task."""
    chosen = {name: measures[name]() for name in names}
    if len({measure.name for measure in chosen.values()}) < len(names):
        raise ValueError(f"run.measures must have different names, got {', '.join(names)}")
    places = {**run_data.clients, **run_data.unseen} if chosen else {}
    examples: dict[str, Any] = {}
    for place, data in places.items():
        if len(data.tables[2]):
            examples.setdefault(tasks_of_places.get(place, task).name, (place, data))
    if not examples:
        return
    model = build()
    for task_name, (place, data) in examples.items():
        if isinstance(model, TaskAware):
            model.begin(tasks_of_places.get(place, task))
        batch = next(iter(data.test(2)))
        with on_trial(model):
            output = model(batch)
        for name, measure in chosen.items():
            try:
                values_of([measure], kept_of([measure], output, batch))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"run.measures: {name!r} cannot be computed of the task {task_name!r}: {what}"
                ) from error


# Model x modalities of the data ---------------------------------------------------------------------------------


def check_modalities(recipe: Recipe, data: str, owned: tuple[str, ...] | Mapping[str, tuple[str, ...]]) -> None:
    """Check that the model reads something of every client, with a warning for modalities that no client has."""
    if isinstance(owned, tuple):
        return
    model = recipe.sections["model"]
    gaps = model_spec(models[model["name"]]).reads_absent
    reads: Sequence[str] | None = model.get("modalities") if gaps else ("image", "text")
    if reads is None:
        return
    blind = [name for name, client_modalities in owned.items() if not set(reads) & set(client_modalities)]
    if blind and gaps:
        raise ValueError(
            f"model.modalities must have something of every client, got {', '.join(reads)}; of these {listed(blind)} "
            "have nothing"
        )
    if blind:
        raise ValueError(
            f"the model {model['name']!r} reads pictures and texts, of which {listed(blind)} have neither: leave these "
            "clients out (run.without), or take a model that reads other modalities"
        )
    present = set(chain.from_iterable(owned.values()))
    nobodys = [name for name in reads if name not in present]
    if nobodys and gaps:
        _say(
            f"model.modalities names {', '.join(nobodys)}, which no client of {data!r} has: what reads it never learns"
        )


def check_lengths(recipe: Recipe, dataset: FederatedDataset) -> None:
    """Check of the lengths of sounds and series against what the model reads."""
    model = recipe.sections["model"]
    if not model_spec(models[model["name"]]).reads_absent:
        return
    options = {"audio": ("audio_seconds", "sounds"), "series": ("series_steps", "series")}
    longest_of = longest(dataset)
    if "series" in (model.get("modalities") or ()) and "series" not in longest_of:
        raise ValueError(
            f"model.modalities names series, of which {dataset.name!r} has none, so nothing tells how many channels "
            "to read"
        )
    for modality, (length, unit) in longest_of.items():
        key, what = options[modality]
        most = model.get(key)
        if most is not None and length > round(most * unit):
            raise ValueError(
                f"model.{key} must be at least {ceil(100 * length / unit) / 100:g}, as long as the longest of the "
                f"{what} of {dataset.name!r}, got {most}"
            )
