"""Steps of DP-SGD in local training: samples of records, clipped gradients, noise (``algorithm.record_privacy``)."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.batches import rows, sampled_batches, to_device
from confed.federation.keyed_noise import noise_for
from confed.federation.protocols import Batch, DrawsAnew, LossPerExample, Output, RandomAccess, Task
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.specs import Contrasting
from confed.federation.stacked_passes import Layers, layers_of

if TYPE_CHECKING:
    from confed.federation.client import Client

OfTask = Callable[[Task], Callable[[nn.Module, Batch], Iterator[Tensor]]]  # a method's objective with another task

SIZES = 8  # of batches of a sample, the last of which is filled up
TOLERANCE = 1e-3  # largest difference of clipped sums in one pass and example by example, over the largest value
UNBOUNDED = 1e30  # a clip above all norms
ROUNDING = 1e-5  # by which an example's norm is taken larger than it was computed
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def sampling_rate(client: "Client") -> float:
    """The probability q with which a step takes an example."""
    return min(1.0, client.local.batch_size * client.local.accumulate / len(client.data))


def unprotected_reason(model: nn.Module, task: object, data: object) -> str:
    """Why records cannot be protected, as the end of a sentence; "" where they can."""
    modules: Any = model
    training = model.training
    model.train()  # frozen parts stay as they are
    norms = [name for name, module in modules.named_modules() if isinstance(module, BATCH_NORMS) and module.training]
    model.train(training)
    if norms:
        return f"{norms[0]!r} normalises over the examples of a batch: take a model without batch normalisation"
    if isinstance(task, Contrasting):
        return "the task's loss compares the examples of a batch"
    if not (isinstance(data, RandomAccess) and data.samples_rows) or (isinstance(data, DrawsAnew) and data.drawn):
        return "the client's training examples cannot be sampled one by one"
    return ""


def private_steps(
    client: "Client", privacy: RecordPrivacy, objective: OfTask, learning: Mapping[str, Tensor], steps: int, order: str
) -> Iterator[Iterator[Tensor]]:
    """Steps of local training: the noised gradient of each is in place when its loss, which is not told, is given."""
    reason = unprotected_reason(client.model, client.task, client.data)
    if reason:
        raise ValueError(f"algorithm.record_privacy must be left out: {reason}")
    rate = sampling_rate(client)
    draws = client.fixed_noise(f"sample of records/{order}", repeatable=privacy.repeatable)
    noise = client.fixed_noise(f"noise on gradients of records/{order}", repeatable=privacy.repeatable)
    gradients = RecordGradients(client, objective, learning, privacy.clip)
    device = next(iter(learning.values())).device
    threshold = math.inf if rate >= 1 else NormalDist().inv_cdf(rate)  # a normal number is below it at that rate
    precision = torch.float32 if isinstance(noise, torch.Generator) else torch.float64
    for step in range(steps):
        normal = noise_for(torch.full((len(client.data),), float(step)), draws, torch.float64)
        sample = (normal < threshold).nonzero()[:, 0]
        sums = {
            name: torch.zeros(tensor.shape, dtype=torch.float64, device=device) for name, tensor in learning.items()
        }
        left, numbers = len(sample), _filled(client.data, sample, client.local.batch_size)
        for batch in sampled_batches(client, numbers, client.local.batch_size, f"{order}/{step}"):
            for name, gradient in gradients.clipped_sum(to_device(batch, device), left).items():
                sums[name] += gradient
            left -= rows(batch)
        for name, tensor in learning.items():
            if privacy.noise > 0:
                drawn = noise_for(sums[name], noise, precision, privacy.clip, privacy.noise)
                sums[name] += privacy.noise * privacy.clip * drawn.to(device)
            tensor.grad = (sums[name] / (rate * len(client.data))).to(tensor.dtype)
        yield iter([torch.zeros((), device=device)])


def _filled(data: object, sample: Tensor, size: int) -> Tensor:
    """A sample with some of its examples again behind it, so that the last of its batches has one of few sizes.

    Features of frozen layers are kept for each size of a batch.
    """
    if not (isinstance(data, RandomAccess) and data.row_bytes and len(sample)):
        return sample
    rest = len(sample) % size
    return torch.cat([sample, sample[:1].expand(min(-rest % max(1, size // SIZES), size - rest))])


class RecordGradients:
    """Sums of clipped gradients of a client's loss on single examples."""

    def __init__(self, client: "Client", objective: OfTask, learning: Mapping[str, Tensor], clip: float) -> None:
        self._client, self._objective, self._learning, self._clip = client, objective, dict(learning), clip
        self._layers = layers_of(client.model, list(learning))
        self._checked = False

    def clipped_sum(self, batch: Batch, count: int | None = None) -> dict[str, Tensor]:
        """Sum over the examples of a batch, or the first so many, of gradients of a norm of at most C, by tensor."""
        layers = self._layers
        if layers is not None and not self._checked:
            self._checked = True
            few = {name: column[:2] for name, column in batch.items()}
            self._layers = layers = layers if self._agree(few, layers) else None
        if layers is not None:
            return self.in_one_pass(batch, layers, count)
        return self.example_by_example({name: column[:count] for name, column in batch.items()})

    def example_by_example(self, batch: Batch) -> dict[str, Tensor]:
        """The sum by a pass for each example."""
        sums = {
            name: torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
            for name, tensor in self._learning.items()
        }
        for row in range(rows(batch)):
            loss = self._loss({name: column[row : row + 1] for name, column in batch.items()})
            reached: Any = torch.autograd.grad(loss, list(self._learning.values()), allow_unused=True)
            gradients = {n: g.double() for n, g in zip(self._learning, reached, strict=True) if g is not None}
            square = sum((gradient.square().sum() for gradient in gradients.values()), torch.zeros(()))
            scale = self._scales(square)
            for name, gradient in gradients.items():
                sums[name] += scale * gradient
        return sums

    def in_one_pass(self, batch: Batch, layers: Layers, count: int | None = None) -> dict[str, Tensor]:
        """The sum by one pass for all examples, from what goes into and comes out of linear and normalising layers."""
        with _recorded(layers) as passes, _summing(self._client):
            loss = self._loss(batch)
        names = list(passes)
        gradients: Any = torch.autograd.grad(loss, [passes[name].output for name in names])
        each: dict[str, _LayerGradients] = {}
        for name, gradient in zip(names, gradients, strict=True):
            each[name] = _LayerGradients(layers[name], passes[name].entered, gradient, rows(batch))
        squares = torch.stack([of_layer.squares(self._wanted(name)) for name, of_layer in each.items()]).sum(0)
        scales = self._scales(squares).to(squares.dtype)
        if count is not None:
            scales[count:] = 0.0
        sums: dict[str, Tensor] = {}
        for name, of_layer in each.items():
            sums |= {f"{name}.{key}": total for key, total in of_layer.sums(self._wanted(name), scales).items()}
        unused = {name: torch.zeros_like(tensor) for name, tensor in self._learning.items() if name not in sums}
        return {**unused, **sums}

    def _wanted(self, layer: str) -> list[str]:
        return [key for key in ("weight", "bias") if f"{layer}.{key}" in self._learning]

    def _scales(self, squares: Tensor) -> Tensor:
        return self._clip / (squares.double().sqrt() * (1 + ROUNDING)).clamp(min=self._clip)

    def _agree(self, batch: Batch, layers: Layers) -> bool:
        """Whether one pass gives what passes of single examples give, but for rounding."""
        model = self._client.model
        training, clip = model.training, self._clip
        self._clip = UNBOUNDED  # clipped gradients may agree where their lengths do not
        model.eval()  # without dropout, whose draws differ
        try:
            together, apart = self.in_one_pass(batch, layers), self.example_by_example(batch)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            return False  # what is wrong in any case is met again example by example
        finally:
            model.train(training)
            self._clip = clip
        gap = max(float((together[name] - apart[name]).abs().max()) for name in apart)
        largest = max(float(tensor.abs().max()) for tensor in apart.values())
        return gap <= TOLERANCE * max(largest, 1e-30)

    def _loss(self, batch: Batch) -> Tensor:
        client = self._client
        device = next(iter(batch.values())).device.type
        half = client.local.precision != "fp32"
        with torch.autocast(device, torch.bfloat16) if half else nullcontext():
            losses = list(self._objective(client.task)(client.model, batch))  # the task now, whose losses may be summed
        if len(losses) != 1:
            raise ValueError(f"algorithm.record_privacy needs a method with one loss per batch, got {len(losses)}")
        return losses[0]


class _Summed:
    """A task whose loss is the sum of those of the examples."""

    def __init__(self, task: LossPerExample) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        losses = self._task.example_losses(output, batch)
        if losses is None:
            raise ValueError("the task's loss is no mean over examples")
        return losses.sum()


@contextmanager
def _summing(client: "Client") -> Generator[None]:
    """The time of a pass in which the client's task gives the sum of its examples' losses."""
    task = client.task
    if not isinstance(task, LossPerExample):
        raise ValueError("the task does not give the loss of each example")
    client.task = cast("Any", _Summed(task))
    try:
        yield
    finally:
        client.task = task


@dataclass(frozen=True)
class _Pass:
    """What went into a layer and came out of it."""

    entered: Tensor
    output: Tensor


@contextmanager
def _recorded(layers: Layers) -> Generator[dict[str, _Pass]]:
    """The one pass of each layer while the block runs; a layer with several is a ``ValueError``."""
    passes: dict[str, _Pass] = {}

    def record(name: str) -> Any:
        def hook(_layer: nn.Module, entered: tuple[Tensor, ...], output: Tensor) -> None:
            if name in passes:
                raise ValueError(f"the layer {name!r} computes twice in a pass")
            passes[name] = _Pass(entered[0].detach(), output)

        return hook

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


class _LayerGradients:
    """Gradients of B examples of a layer's tensors, from its inputs a (B, T, d) and delta (B, T, p)."""

    def __init__(self, layer: nn.Module, entered: Tensor, delta: Tensor, count: int) -> None:
        self._linear = isinstance(layer, nn.Linear)
        if isinstance(layer, nn.LayerNorm):
            entered = functional.layer_norm(entered, layer.normalized_shape, None, None, layer.eps)
        self._entered = entered.reshape(count, -1, entered.shape[-1]).to(delta.dtype)
        self._delta = delta.reshape(count, -1, delta.shape[-1])

    def squares(self, names: Sequence[str]) -> Tensor:
        """Squared norm of each example's gradients, (B,)."""
        entered, delta = self._entered, self._delta
        total = torch.zeros(len(delta), dtype=torch.float64, device=delta.device)
        if "bias" in names:
            total += delta.sum(1).double().square().sum(1)
        if "weight" not in names:
            return total
        if not self._linear:
            return total + (delta * entered).sum(1).double().square().sum(1)
        steps, inputs, outputs = entered.shape[1], entered.shape[2], delta.shape[2]
        if steps * steps < inputs * outputs:
            grams = (entered @ entered.mT) * (delta @ delta.mT)
            return total + grams.double().sum((1, 2)).clamp_min(0)
        return total + (delta.mT @ entered).double().square().sum((1, 2))

    def sums(self, names: Sequence[str], scales: Tensor) -> dict[str, Tensor]:
        """Sums over the examples of their scaled gradients."""
        delta = self._delta * scales.to(self._delta.dtype).view(-1, 1, 1)
        sums: dict[str, Tensor] = {}
        if "bias" in names:
            sums["bias"] = delta.sum((0, 1))
        if "weight" in names and self._linear:
            sums["weight"] = delta.flatten(0, 1).mT @ self._entered.flatten(0, 1)
        elif "weight" in names:
            sums["weight"] = (delta * self._entered).sum((0, 1))
        return sums
