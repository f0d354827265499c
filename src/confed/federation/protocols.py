"""Protocols of models, tasks and client data that the federation core expects.

Three small protocols. A backbone, a task or a dataset that follows them works with every method and every
engine; none of them knows that a federation exists.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
"""One mini-batch: one key per modality and label, first dimension B; an absent modality is an absent key."""

Tally = Mapping[str, tuple[float, float]]
"""Metric name -> (weighted sum, weight); tallies of batches, clients and processes add up exactly."""


class Output(NamedTuple):
    """Output of every model; both fields are always present.

    Attributes:
        logits: scores of the answers, labels or choices, shape (B, C).
        features: the pooled representation below the head, shape (B, D).
    """

    logits: Tensor
    features: Tensor


Forward = Callable[[Batch], Output]  # a model seen as a function of a batch


@runtime_checkable
class Task(Protocol):
    """Protocol of tasks: a loss to train and a tally to report.

    A task may name, in an attribute ``head``, which of a model's heads answers it (``answers`` for questions over
    an answer vocabulary).
    """

    @property
    def metric(self) -> str:
        """Name of the headline metric in the tally."""
        ...

    @property
    def measures(self) -> Mapping[str, tuple[float, float]]:
        """Name in a tally -> the smallest and the largest value of sum over weight."""
        ...

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Training loss, a scalar: the mean over the batch."""
        ...

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch."""
        ...

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's score in [0, 1], shape (B,): what paired tests over examples compare."""
        ...


@runtime_checkable
class SingleLabel(Protocol):
    """Protocol of tasks with one right class per example, which some distillation losses need."""

    @property
    def single_label(self) -> bool:
        """Whether every example has exactly one right class."""
        ...

    def labels(self, batch: Batch) -> Tensor:
        """Each example's right class, int64, shape (B,)."""
        ...


def single_label(task: Task, need: str, otherwise: str = "") -> SingleLabel:
    """The task as one whose examples have exactly one right class.

    Args:
        task: the task.
        need: beginning of the message: why the method needs this.
        otherwise: what to set for other tasks.

    Raises:
        ValueError: the task is another one.
    """
    if isinstance(task, SingleLabel) and task.single_label:
        return task
    raise ValueError(
        f'{need}, so it needs a task whose examples have exactly one right answer each (the task "vqa" with '
        f'objective = "ce"){otherwise}; got {task!r}'
    )


@runtime_checkable
class LossPerExample(Protocol):
    """Protocol of tasks whose loss is a mean over examples, so that it can be computed for several clients at once."""

    def example_losses(self, output: Output, batch: Batch) -> Tensor | None:
        """Each example's loss, (B,), whose mean is :meth:`Task.loss` but for rounding; None where it is no such mean.

        The examples may be those of several clients, and a value depends on its own example alone.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """Protocol of tasks whose headline metrics are no means over examples, such as means over classes."""

    @property
    def count_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name of a count -> its shape; all are int64 and not negative."""
        ...

    def counts(self, output: Output, batch: Batch) -> Mapping[str, Tensor]:
        """Counts for the metrics, on the host; those of batches, clients and processes add up."""
        ...

    def values(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of added counts."""
        ...

    def records(self, output: Output, batch: Batch) -> Mapping[str, Tensor]:
        """Records of each example for the final evaluation, on the host, each with first dimension B."""
        ...


@runtime_checkable
class ClientData(Protocol):
    """One client's examples. The order of training batches is a function of ``rng`` alone."""

    # True when an example yields the same tensors every time, so that outputs of a frozen model may be kept for a
    # round, keyed by batch["index"]. Mirrored pictures are marked in the batch (batches), and tensors that change
    # nevertheless are named by DrawsAnew
    deterministic: bool

    def __len__(self) -> int:
        """Number of training examples."""
        ...

    def train(self, batch_size: int, rng: torch.Generator) -> Iterable[Batch]:
        """One epoch of shuffled training batches; each carries ``index``, the examples' numbers (B,)."""
        ...

    def validation(self, batch_size: int) -> Iterable[Batch]:
        """Validation batches in a fixed order; may be empty."""
        ...

    def test(self, batch_size: int) -> Iterable[Batch]:
        """Test batches in a fixed order; may be empty."""
        ...


@runtime_checkable
class Controllable(Protocol):
    """Protocol of client data with control conditions of test examples."""

    def controlled_test(self, batch_size: int, control: str, rng: torch.Generator) -> Iterable[Batch]:
        """Test batches in the order of :meth:`ClientData.test`, with the inputs of a control condition.

        Args:
            batch_size: most examples of a batch.
            control: such as "permuted_image" or "blank_image"; see :mod:`confed.data.controls`.
            rng: which example's input each example gets follows from it alone.
        """
        ...


# Optional behaviour of client data ------------------------------------------------------------------------------


@runtime_checkable
class RandomAccess(Protocol):
    """Client data whose training examples can be had by their numbers."""

    samples_rows: bool  # whether they can; False where batches are mixed in another way
    row_bytes: int  # bytes of an example in a batch, where a part of a batch is the batch of these examples; else 0

    def chosen(self, numbers: Tensor, batch_size: int) -> Iterable[Batch]:
        """Training batches of the given examples, int64 (n,), in that order; the last batch may be smaller."""
        ...


@runtime_checkable
class DrawsAnew(Protocol):
    """Client data with tensors that differ in every epoch; outputs that depend on these are not kept."""

    drawn: tuple[str, ...]  # names of the tensors, such as the states of labels in label-mask training


class FromRows(ABC):
    """A batch of rows of one table, as they are; its tensors may be gathered when they are read.

    No protocol: every batch is asked several times whether it is one, and looking at attributes takes long.
    """

    source: object  # the same object for all batches of a table, and for no other's
    rows: Tensor  # their numbers, (B,)

    @abstractmethod
    def same_rows(self, names: Iterable[str]) -> bool:
        """Whether these tensors are rows of the table as they are: none was added or changed in place."""
        ...


@runtime_checkable
class Movable(Protocol):
    """Client data whose tensors may lie on the device where the model computes."""

    def on(self, move: Callable[[Tensor], Tensor]) -> "ClientData":
        """The same examples, batches of which are gathered from copies of their tensors.

        Args:
            move: the copy of a tensor, or the tensor itself where it stays; the same for the same tensor.
        """
        ...


@runtime_checkable
class NoAugmentation(Protocol):
    """Client data that may refuse augmentation, because other inputs were computed from the pictures."""

    fixed: bool  # whether pictures stay as they are


@runtime_checkable
class StepsByKind(Protocol):
    """Client data with batches of several kinds, of which there are more than their number of examples says."""

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of training batches in an epoch, of at least ``least`` examples each."""
        ...
