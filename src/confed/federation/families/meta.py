"""Meta-learning: gradients after an inner step on other examples (MAML and its variants).

Notation: f(theta; b) the task's loss on batch b, alpha the inner rate. With theta' = theta - alpha grad f(theta; b1),
the gradient of f(theta'; b2) by theta is

    (I - alpha H f(theta; b1)) grad f(theta'; b2)

(Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017). Its
first-order form leaves the Hessian H out. Per-FedAvg estimates H on a third batch, by a central difference:

    H(theta; b3) g ~ (grad f(theta + delta g; b3) - grad f(theta - delta g; b3)) / (2 delta).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from confed.federation.batches import to_device, training_batches
from confed.federation.client import Client
from confed.federation.messages import Message
from confed.federation.params import Params, copy_into
from confed.federation.protocols import Batch
from confed.federation.train import Objective, needs_two, trained

Loss = Callable[[Params, Batch], Tensor]  # a batch's loss with given values of the parameters, a scalar


def look_ahead(client: Client, alpha: float, *, hessian: bool = False, delta: float = 1e-3) -> Objective:
    """The objective whose gradient is that after an inner step on examples of the client's own.

    Batches of inner steps come from the client's training examples in a separate order, so that the batches of
    the outer steps are those of FedAvg; with ``alpha`` 0 all is as in FedAvg. What is logged is the loss after the
    inner step.

    Args:
        client: a client whose workspace is filled.
        alpha: the inner rate.
        hessian: with the Hessian, by a central difference on a third batch.
        delta: its step, as long as the gradient.
    """
    live = trained(client)
    inner = endless(client, "inner")

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        if not alpha:
            yield client.task.loss(model(batch), batch)
            return

        def loss(values: Params, examples: Batch) -> Tensor:
            output = torch.func.functional_call(model, dict(values), (examples,))  # pyright: ignore
            return client.task.loss(output, examples)

        batches = [next(inner), batch, *([next(inner)] if hessian else [])]
        after, gradients = meta_gradient(loss, live, batches, alpha, delta)
        # a linear form with that gradient, and the value of the loss.
        slope = torch.stack([(live[name] * g).sum() for name, g in gradients.items()]).sum()
        yield slope + (after - slope).detach()

    return losses


def meta_gradient(
    loss: Loss, params: Params, batches: Sequence[Batch], alpha: float, delta: float = 1e-3
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the loss after a step of size alpha, by the values before it.

    Args:
        loss: f.
        params: theta.
        batches: b1 and b2, in the first-order form; with b3 the Hessian's part is subtracted.
        alpha: the inner rate.
        delta: the step of the central difference.

    Returns:
        f(theta'; b2), and name -> gradient, of those parameters that have a part in a loss.

    Raises:
        ValueError: neither two batches nor three.
    """
    if len(batches) not in (2, 3):
        raise ValueError(f"a meta-gradient needs 2 batches, or 3 with the Hessian, got {len(batches)}")
    _, first = _gradient(loss, params, batches[0])
    after, second = _gradient(loss, _moved(params, first, -alpha), batches[1])
    if len(batches) == 2:
        return after, second
    _, above = _gradient(loss, _moved(params, second, delta), batches[2])
    _, below = _gradient(loss, _moved(params, second, -delta), batches[2])
    gradients = dict(second)
    for name, gradient in above.items():
        curved = (gradient - below[name]) / (2 * delta)
        gradients[name] = gradients[name] - alpha * curved if name in gradients else -alpha * curved
    return after, gradients


def adapt(client: Client, alpha: float, steps: int) -> float:
    """Plain gradient steps on the client's own examples, in the workspace; the mean of their losses."""
    live = trained(client)
    if not live or not steps:
        return 0.0
    client.model.train()
    batches, total = endless(client, "adapt"), 0.0
    for _ in range(steps):
        batch = next(batches)
        loss = client.task.loss(client.model(batch), batch)
        total += float(loss.detach())
        gradients = torch.autograd.grad(loss, list(live.values()), allow_unused=True, materialize_grads=True)
        copy_into(list(live.values()), [p - alpha * g for p, g in zip(live.values(), gradients, strict=True)])
    return total / steps


def keep_adapted(client: Client, shared: Params, alpha: float, steps: int) -> Message:
    """What a client does when it is asked to adapt: :func:`adapt`, and it keeps the result; only the loss is sent."""
    client.load(shared)
    loss = adapt(client, alpha, steps)
    client.keep_personal = True
    client.remember()
    return Message({}, {"loss": loss})


def endless(client: Client, purpose: str) -> Iterator[Batch]:
    """The client's training batches without end, shuffled anew after each pass, on the model's device.

    A batch of a single example is left out where the model or the loss needs two, as in training.

    Raises:
        ValueError: no batch is left.
    """
    device = next(client.model.parameters()).device
    least, passes = (2 if needs_two(client) else 1), 0
    while True:
        has_batch = False
        for batch in training_batches(client, f"{purpose}/{passes}"):
            if len(batch["index"]) >= least:
                has_batch = True
                yield to_device(batch, device)
        if not has_batch:
            raise ValueError(f"client {client.info.id!r} has no training batch of at least {least} examples")
        passes += 1


def _gradient(loss: Loss, params: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and its gradient by those parameters that have a part in it."""
    values = {name: p.detach().requires_grad_() for name, p in params.items()}
    value = loss(values, batch)
    gradients = cast("tuple[Tensor | None, ...]", torch.autograd.grad(value, list(values.values()), allow_unused=True))
    return value.detach(), {name: g for name, g in zip(values, gradients, strict=True) if g is not None}


def _moved(params: Params, direction: Params, by: float) -> dict[str, Tensor]:
    return {name: p.detach() + by * direction[name] if name in direction else p.detach() for name, p in params.items()}
