"""Declared traits of a method, such as whether it has a global model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, Literal, get_args

Group = Literal[
    "references", "averaging", "personalisation", "distillation", "finetuning", "prompts", "split", "modalities",
    "protection",
]  # fmt: skip
GROUPS: tuple[Group, ...] = get_args(Group)  # kinds of methods, in the order of lists
GlobalModel = Literal["alone", "with own parts", "none"]
"""What is global of a method on a model: a model that answers anywhere; one that answers only with parts that each
client keeps to itself, such as its head or one factor of LoRA, so not in unseen places; or nothing."""

_OF_THE_CLASS = (
    "label", "group", "requires", "neutral", "search", "has_steps", "steps_alone", "unbatchable_reason",
    "updates_compressible",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a method, the same for every value of its hyper-parameters; the defaults are those of FedAvg.

    Attributes:
        label: name of the method in tables; the class's name by default.
        group: kind of method, under which lists have it.
        centralised: one party holds all training data: a bound, which no table ranks.
        communicates: clients send something; False where each trains alone.
        sends_values: clients send values of the model; False where something else travels, and shared tensors reach a
            client in evaluations only.
        has_global: there is a global model; whether it answers alone depends on the model that the method is for
            (:attr:`confed.federation.algorithm.Algorithm.global_model`).
        has_personal: clients keep their own models; where they do not, all use the global one.
        private_beside: the global model answers without what clients keep private, or with what
            ``initial_private`` gives.
        splits: a client holds only a part of the model, and sends activations batch by batch.
        rows_up: kinds of rows that a client sends per example and step across the cut; 0 where nothing is split.
        gradients_up: some of these rows are gradients, with separate noise.
        answers_compared: answers whose probabilities clients keep near the global model's: "filtered" or "all".
        clients_may_leave: False where the server keeps a part of every client that it cannot take out again.
        clients_may_lack_modalities: False where the server's sums are over all clients.
        counts_examples: the server needs the number of training examples of all clients
            (:attr:`confed.federation.state.ServerState.examples`), which costs a look at every client.
        updates_compressible: the tensors of replies to ``fit`` are new values of what was received, or ``changes``, so
            that their updates may be rounded (``run.uplink``); the contract checks it.
        in_epochs: a round is made of passes over the examples, in place of which no number of steps can stand.
        in_sessions: clients train in sessions of many calls, as many as follow from their numbers of examples.
        synchronous: why all updates of a round must begin with the same model, as the end of a sentence; "" where they
            need not (:mod:`confed.engines.buffered`).
        aggregates: globs of shared tensors that only the server computes; not counted as trained or sent.
        changes: globs of tensors in replies to ``fit`` that are changes, and no new values of what was received.
        sums: globs of tensors that travel as sums over examples (numbers of examples, moments), whose values grow with
            these (:class:`confed.privacy.protections.ValueBound`).
        made_for: kind of model that the contract tries the method on: "adapters", "lora", "modalities",
            "contrastive", "states", "prompts"; "" for any.
        requires: checks of a model, each called with it and the method's title before training, such as
            :func:`confed.federation.structure.reads_absent`.
        reference: rank among the references that other methods are compared with, from 1; 0 for none.
        neutral: hyper-parameters at which the method is FedAvg (the contract checks it), or why there are none.
        search: hyper-parameter -> values that ``confed tune`` may try.
        has_steps: clients train by steps of an optimiser; where they do not, no learning rate is searched.
        steps_alone: although the method overrides ``fit`` or ``objective``, a step of training follows from the trained
            tensors, the optimiser, the batch and what was computed before the first step, so that training can go on
            from the middle of a round (:mod:`confed.federation.step_checkpoints`).
        unbatchable_reason: why clients cannot be trained at once (``run.batch_clients``), as the end of a sentence; ""
            where the method's own ``objective`` yields one loss per batch, for which it runs the model once, on that
            batch, and reads trained values from ``client.tensors`` only, while it computes that loss; None where that
            is not known of an own ``objective``.
    """

    label: str = ""
    group: Group = "averaging"
    centralised: bool = False
    communicates: bool = True
    sends_values: bool = True
    has_global: bool = True
    has_personal: bool = True
    private_beside: bool = False
    splits: bool = False
    rows_up: int = 0
    gradients_up: bool = False
    answers_compared: Literal["", "filtered", "all"] = ""
    clients_may_leave: bool = True
    clients_may_lack_modalities: bool = True
    counts_examples: bool = False
    updates_compressible: bool = True
    in_epochs: bool = False
    in_sessions: bool = False
    synchronous: str = ""
    aggregates: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    made_for: str = ""
    requires: tuple[Callable[[Any, str], object], ...] = ()
    reference: int = 0
    neutral: Mapping[str, Any] | str = field(default_factory=dict[str, Any])
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    has_steps: bool = True
    steps_alone: bool = False
    unbatchable_reason: str | None = None

    def stated(self) -> dict[str, Any]:
        """Traits of a method for a run's ``summary.json``."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_CLASS}


HOOKS: Mapping[str, str] = {
    "suit": "configure",
    "extend": "add_modules",
    "newcomer": "initial_private",
    "published": "with_public_data",
    "refuses": "unsupported_reason",
    "worth_trying": "search_space",
    "in_effect": "effective_value",
    "answering": "deployed_model",
}
"""Hook -> its name now."""

TRAITS: Mapping[str, str] = {
    "label": "label",
    "pooled": "centralised",
    "has_global": "has_global",
    "has_personal": "has_personal",
    "leavers": "clients_may_leave",
    "partial": "clients_may_lack_modalities",
    "counts_examples": "counts_examples",
    "in_sessions": "in_sessions",
    "carried": "aggregates",
    "changes": "changes",
    "finetuning": "made_for",
    "neutral": "neutral",
    "search": "search",
}
"""Class variable -> its name in :class:`confed.federation.traits.Traits`."""


def check_names(method: type) -> None:
    """Checks that a method uses no earlier name, which would be ignored: the method would run, but as FedAvg.

    Args:
        method: a class that is being made; a hyper-parameter may have such a name.

    Raises:
        ValueError: it does; the message says the name now.
    """
    members, where = method.__dict__, method.__qualname__
    if "own_heads" in members:
        raise ValueError(f"{where}.own_heads is now said by the property global_model, which follows from rules")
    annotated = get_annotations(method)
    for old, new in HOOKS.items():
        if callable(members.get(old)):
            raise ValueError(f"{where}.{old} is now called {new}: rename it")
    for old, new in TRAITS.items():
        if old in members and ("ClassVar" in str(annotated[old]) if old in annotated else not callable(members[old])):
            raise ValueError(f"{where}.{old} is now a trait: write traits = Traits({new}=...) instead")
