"""Forward pass of a model as a chain of stages, and how many of them are frozen.

A model whose pass is a chain says so with :class:`Staged`. Which stages are frozen then follows from which of its
tensors are trained, and what the frozen ones make of an example is computed once
(:mod:`confed.federation.frozen_features`).
"""

from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from confed.federation.protocols import Batch


@dataclass(frozen=True)
class Stage:
    """A part of a forward pass."""

    name: str  # what it computes, for reports
    inputs: tuple[str, ...]  # keys of a batch that it may read
    # how the names of the tensors begin that it reads; of the last stage ("",), so that every tensor belongs to one
    tensors: tuple[str, ...]
    # parts of names, such as those of adapters, of tensors that it does not read although they begin so
    without: tuple[str, ...] = ()
    # whether it computes one example at a time, so that no other example of a batch can change its rounding
    alone: bool = False

    def reads(self, tensor: str) -> bool:
        """Whether it reads a tensor, by its name."""
        return tensor.startswith(self.tensors) and set(self.without).isdisjoint(tensor.split("."))


class KeptStates(Protocol):
    """States after the first stages of a pass; :class:`confed.federation.frozen_features.FrozenFeatures` keeps some."""

    # how often the examples that come now are read in all; None where this is not known, as in training
    passes: int | None

    @property
    def active(self) -> bool:
        """Whether states are still kept."""
        ...

    def state(self, model: "Staged", batch: Batch) -> Any:
        """The state of a batch after the frozen stages, kept or computed."""
        ...

    def given(self, batch: Batch, state: Any) -> AbstractContextManager[None]:
        """Declaration for the time of a pass of the state of its batch: the pass continues from there."""
        ...

    def start(self, model: "Staged", batch: Batch, last: int) -> tuple[Any, int]:
        """A state of the batch and the number of the stage that follows it, at most ``last``; or None and 0."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A model whose forward pass is a chain of stages.

    The state after a stage is a tensor, or a named tuple of tensors and whole numbers. Each tensor has B rows, or n B
    with those of an example next to each other, and a row depends on its own example alone.
    """

    frozen_features: "KeptStates | None"  # what frozen stages made of examples; None where nothing is kept

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages in order; their number never changes."""
        ...

    @property
    def stage_variant(self) -> str:
        """What beside tensors and batch decides what the stages compute, such as the head that was selected."""
        ...

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """Stages ``first`` to ``last - 1``."""
        ...


def run_stages(model: Staged, batch: Batch, last: int) -> Any:
    """The state after the first ``last`` stages, which begin at kept features where there are some."""
    features = model.frozen_features
    state, first = (None, 0) if features is None else features.start(model, batch, last)
    return model.forward_stages(state, first, last, batch)


@contextmanager
def expected_passes(model: nn.Module, passes: int | None) -> Generator[None]:
    """Declaration for the time of some passes of how often their examples are read in all.

    States of examples that are read too seldom for that to save anything are not kept.
    """
    staged = None if passes is None else staged_part(model)
    features = None if staged is None else staged[1].frozen_features
    if features is None:
        yield
        return
    before, features.passes = features.passes, passes
    try:
        yield
    finally:
        features.passes = before


def name_of(model: nn.Module, submodule: nn.Module) -> str:
    """How the names of the tensors of a submodule begin: its own name and a dot."""
    whole: Any = model
    return next(f"{name}." for name, module in whole.named_modules() if module is submodule)


def staged_part(model: nn.Module) -> tuple[str, Staged] | None:
    """The first part of a model, or the model itself, that has stages, with its name and a dot (or nothing)."""
    whole: Any = model
    for name, module in whole.named_modules():
        if isinstance(module, Staged):
            return (f"{name}." if name else ""), module
    return None


def frozen_stages(model: Staged, trained: Collection[str]) -> int:
    """Number of stages in front of the first one that reads a trained tensor."""
    for number, stage in enumerate(model.stages):
        if any(stage.reads(name) for name in trained):
            return number
    return len(model.stages)
