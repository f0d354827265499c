"""Compatibility checks of a recipe's method with its model, task, data and run.

Those of its model, task and data with one another are the table of :mod:`confed.runs.combinations`.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import chain, islice
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from confed.data.examples import FederatedDataset, TableData
from confed.data.modalities import longest
from confed.engines.participation import listed
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo, NamesClients
from confed.federation.families.public_data import UsesPublicData
from confed.federation.local import Local
from confed.federation.measure import kept_of, values_of
from confed.federation.model_contract import check_model_kept, on_trial, reading_fault
from confed.federation.ownership import unowned
from confed.federation.params import Scope, layout, named_tensors
from confed.federation.protocols import ClientData
from confed.federation.record_gradients import unprotected_reason
from confed.federation.specs import TaskAware, WritesAnswers, frozen_names, model_spec
from confed.federation.structure import heads_of
from confed.federation.task_contract import task_faults
from confed.models.tokenizer import CountsShortened
from confed.privacy.examples import ProtectsExamples
from confed.recipes.recipe import Recipe
from confed.recipes.run_section import RunSection
from confed.registry import datasets, measures, models, tasks

if TYPE_CHECKING:
    from confed.runs.encode import RunData

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
