"""Several networks on one frozen backbone: blends of its adapters, which share what is equal among them."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.client import Client
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch, Output, Task
from confed.federation.specs import BelowHead, SplitsPass, model_spec, task_spec
from confed.federation.structure import adapters_of, head_rules

Blend = Mapping[str, float]  # adapter -> weight; see using


class Branches:
    """A model's adapters as separate networks that read the same batch.

    Where the model offers ``prefix(batch)``, ``suffix(state)`` and ``repeat(state, n)`` and nothing below its first
    adapter learns (``prefix_is_frozen``), that part runs once per batch, whatever the number of branches. Behind
    it branches have separate states, so that frozen layers have to run for each of them.

    Args:
        model: the model; switched from branch to branch, never copied.
        method: who needs adapters, for the message.
        task: whose head answers, for :meth:`answered`; the model's answer head where it has none.

    Raises:
        ValueError: the model has no adapters.
    """

    def __init__(self, model: nn.Module, method: str, task: Task | None = None) -> None:
        self.model: Any = model
        self.bank = adapters_of(model, method)
        self.split = isinstance(model, SplitsPass) and model.prefix_is_frozen
        spec = model_spec(model)
        name = spec.answer_head if task is None else spec.heads_of_tasks.get(task_spec(task).head, spec.answer_head)
        self.head = None if name is None else model.get_submodule(name)

    def begin(self, batch: Batch) -> Any:
        """What all branches share of a batch: the state before the first adapter, or the batch itself."""
        if not self.split:
            return batch
        with torch.no_grad():
            return self.model.prefix(batch)

    def run(self, state: Any, blend: Blend) -> Output:
        """One branch."""
        with self.bank.using(blend):
            return self.rest(state)

    def together(self, state: Any, *blends: Blend) -> tuple[Output, ...]:
        """Several branches in one pass over as many times the rows."""
        n = len(blends)
        repeated = self.model.repeat(state, n) if self.split else {k: torch.cat([t] * n) for k, t in state.items()}
        with self.bank.using(*blends):
            output = self.rest(repeated)
        return tuple(Output(*parts) for parts in zip(output.logits.chunk(n), output.features.chunk(n), strict=True))

    def answered(self, state: Any, blend: Blend) -> tuple[Output, Callable[[], Output] | None]:
        """One branch, and a function that answers again from the same features with the head's present values.

        For two networks with a common head that are trained in turn: after the step of one, only the head of the
        other has changed. A model whose head is more than one call of a module says where it begins: with
        ``below_head(state)`` and ``answer(below)``, the two parts of ``suffix(state)``; ``below_head`` may return None
        for a batch whose pass has no such place. The function is None there, and where the model does more with the
        features than to hand them to its head.
        """
        model = self.model
        if isinstance(model, BelowHead):
            with self.bank.using(blend):
                below = model.below_head(state if self.split else self.model.prefix(state))
            if below is not None:
                return model.answer(below), lambda: model.answer(below)
            return self.run(state, blend), None
        if self.head is None:
            return self.run(state, blend), None
        seen: list[tuple[tuple[Tensor, ...], Tensor]] = []

        def see(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.append((inputs, output))

        handle = self.head.register_forward_hook(see)
        try:
            output = self.run(state, blend)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0][1] is not output.logits:
            return output, None
        head, inputs = self.head, seen[0][0]
        return output, lambda: Output(head(*inputs), output.features)

    def rest(self, state: Any) -> Output:
        """What the adapters that are switched on make of a state."""
        return self.model.suffix(state) if self.split else self.model(state)


def tensors_of(adapter: str) -> str:
    """The glob that an adapter's tensor names match."""
    return f"*.{adapter}.*"


def chosen_adapter(model: nn.Module, wanted: str, method: str) -> str:
    """The adapter that a setting names, by default the model's first one; a ``ValueError`` where it has none such."""
    names = adapters_of(model, method).names
    if wanted and wanted not in names:
        raise ValueError(f"algorithm.adapter must be one of {', '.join(names)}, got {wanted!r}")
    return wanted or names[0]


def one_shared(adapter: str, private: Iterable[str], head: tuple[str, ...], method: str) -> Rules:
    """Rules by which one adapter is shared, globs and heads are private, and the rest stays as it is.

    Raises:
        ValueError: there is no name, because the method was not configured.
    """
    if not adapter:
        raise ValueError(f"{method} does not know this model's adapter; call configure(model, task) before the run")
    private_rules = dict.fromkeys(private, Scope.PRIVATE)
    return {tensors_of(adapter): Scope.SHARED, **private_rules, **head_rules(head, method), "*": Scope.FROZEN}


def fresh_adapter(client: Client, adapter: str) -> dict[str, Tensor]:
    """Initial values for a private adapter that are this client's own, by name.

    Normal, with each tensor's standard deviation in the run's initial values; what is constant there (zero biases)
    stays as it is. The stream is the client's, so clients that start in different rounds differ as well.
    """
    rng = client.rng(f"adapter {adapter}")
    values: dict[str, Tensor] = {}
    for name in client.names(Scope.PRIVATE):
        if fnmatchcase(name, tensors_of(adapter)):
            start = client.initial[name].detach().cpu()
            spread = start.std(correction=0)
            values[name] = torch.randn(start.shape, generator=rng) * spread if spread > 0 else start.clone()
    return values


@contextmanager
def still(tensors: Iterable[Tensor]) -> Generator[None]:
    """Context in which tensors that learn do not."""
    learning = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in learning:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in learning:
            tensor.requires_grad_(True)


def held(client: Client, scope: Scope, but: str = "") -> AbstractContextManager[None]:
    """For the duration of a ``with`` block, tensors of a scope do not learn; but those of an adapter."""
    names = [n for n in client.names(scope) if not (but and fnmatchcase(n, tensors_of(but)))]
    return still(client.tensors[n] for n in names)
