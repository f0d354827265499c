"""Structure of a model as methods ask for it: answer heads, feature width, adapters.

A model says so in its attributes: ``answer_head``, the name of the submodule that turns features into answers;
``heads_of_tasks``, where it has several, the submodule of each (``{"answers": "classifier", "nlvr2": "heads.nlvr2"}``);
``adapters``, where it can host several small networks side by side (:class:`Adapters`); ``reads_absent``, whether it
takes batches without some of the modalities.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from confed.federation.params import Rules, Scope, named_tensors
from confed.federation.specs import frozen_names, model_spec

NO_HEAD = ("none",)
"""What stands for the head of a model that writes its answers with its vocabulary: no part of it is a client's own."""


@runtime_checkable
class Adapters(Protocol):
    """A model's bank of named adapters: the same places in the backbone, several networks to put there.

    An adapter's tensors have names that match ``*.<adapter>.*``. Every place returns ``y + sum_i w_i A_i(y)`` over
    the adapters that are switched on.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters there are, in the order in which they were added."""
        ...

    def add(self, name: str, rng: torch.Generator) -> None:
        """Adds an adapter of the first one's shape to every place, switched off, with values from ``rng``.

        Raises:
            ValueError: there is one of that name.
        """
        ...

    def using(self, *weights: Mapping[str, float]) -> AbstractContextManager[None]:
        """For the duration of a ``with`` block, which adapters count and how much.

        Args:
            weights: one mapping (adapter -> weight) for all rows of a batch; or several, for as many equal chunks
                of the batch, in order: several networks in one pass.

        Raises:
            ValueError: no adapter has one of the names.
        """
        ...

    def switch(self, weights: Mapping[str, float]) -> None:
        """Sets which adapters count outside of all ``with`` blocks.

        Raises:
            ValueError: no adapter has one of the names.
        """
        ...


@runtime_checkable
class HostsAdapters(Protocol):
    """A model with places for adapters."""

    @property
    def adapters(self) -> Adapters:
        """The bank."""
        ...


@runtime_checkable
class HasFeatureShape(Protocol):
    """A model that says how many features and classes it has, whether or not a head reads them."""

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Numbers of features D and of classes C."""
        ...


def adapter_bank(model: nn.Module) -> Adapters | None:
    """The model's bank of adapters, if it has one."""
    return model.adapters if isinstance(model, HostsAdapters) else None


def adapters_of(model: nn.Module, method: str) -> Adapters:
    """The model's bank of adapters, with at least one adapter in it.

    Raises:
        ValueError: the model has no adapters.
    """
    bank = adapter_bank(model)
    if bank is None or not bank.names:
        raise ValueError(
            f"{method} trains adapters, and {type(model).__name__} has none: set model.trainable to 'adapters'"
        )
    return bank


def feature_width(model: nn.Module, method: str) -> int:
    """D of the features (B, D), which is what the answer head reads.

    Args:
        model: the model.
        method: whose modules need it, for the message.

    Raises:
        ValueError: the model does not name its answer head, or the head has no weight matrix.
    """
    name = model_spec(model).answer_head
    if name is None:
        raise ValueError(
            f"{method} needs to know how wide the features are: the model's attribute 'answer_head' must name the "
            f"submodule that reads them, got {name!r} in {type(model).__name__}"
        )
    matrix = next((p for p in model.get_submodule(name).parameters() if p.ndim == 2), None)
    if matrix is None:
        raise ValueError(f"{method} needs an answer head with a weight matrix, {name!r} has none")
    return matrix.shape[1]


def fresh_linear(inputs: int, outputs: int, rng: torch.Generator) -> nn.Linear:
    """A linear layer with PyTorch's usual initial distribution, drawn from ``rng``."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = inputs**-0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=rng)
    return layer


def heads_of(model: nn.Module) -> dict[str, str]:
    """Head as tasks call it -> submodule; empty if the model does not say."""
    return model_spec(model).heads


def reads_absent(model: nn.Module, method: str) -> None:
    """Checks that a model takes batches without some of the modalities.

    Raises:
        ValueError: the model needs all modalities.
    """
    if not model_spec(model).reads_absent:
        raise ValueError(
            f"{method} needs a model that takes examples without some of the modalities (attribute reads_absent), such "
            f"as modal_transformer_mini; {type(model).__name__} needs all of them"
        )


def private_head(model: nn.Module, wanted: tuple[str, ...], method: str, *, optional: bool = False) -> tuple[str, ...]:
    """The submodules that make up a client's own head.

    Args:
        model: the model.
        wanted: names of submodules; empty for the model's answer head.
        method: who keeps it private, for the message.
        optional: whether a model that writes its answers and names no head may go without, as :data:`NO_HEAD`.

    Raises:
        ValueError: the model does not name its head, a name has no trained tensors, or nothing would be shared.
    """
    head = wanted or tuple(heads_of(model).values())
    if optional and (wanted == NO_HEAD or (not head and model_spec(model).writes == "answers")):
        return NO_HEAD
    if not head:
        raise ValueError(
            f"{method} keeps the answer head private, and this model does not say what its head is (attribute "
            "answer_head); algorithm.head must name the submodules"
        )
    trained = set(named_tensors(model)) - frozen_names(model)
    for module_name in head:
        if not any(name.startswith(f"{module_name}.") for name in trained):
            modules = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"algorithm.head must name submodules with trained tensors, got {module_name!r}; the model has "
                f"{modules}"
            )
    beginnings = tuple(f"{module_name}." for module_name in head)
    if all(name.startswith(beginnings) for name in trained):
        raise ValueError(f"algorithm.head must leave something to share, got {head}, which is all that is trained")
    return head


def head_rules(head: tuple[str, ...], method: str) -> Rules:
    """The rules that keep a head private; none for a model without one.

    Args:
        head: from :func:`private_head`.
        method: whose rules they are, for the message.

    Raises:
        ValueError: there are no names, because the method was not configured.
    """
    if not head:
        raise ValueError(f"{method} does not know this model's head; call configure(model, task) before the run")
    return {f"{module_name}.*": Scope.PRIVATE for module_name in head if head != NO_HEAD}
