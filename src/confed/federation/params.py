"""Named parameters and their scopes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor, nn

Params = Mapping[str, Tensor]
"""A model as a flat mapping of names to tensors: its parameters and its persistent buffers."""


class Scope(StrEnum):
    """Scope of a tensor: shared, private, frozen or at a server."""

    SHARED = "shared"  # sent both ways and aggregated
    PRIVATE = "private"  # trained on the client, stored there, never sent
    FROZEN = "frozen"  # neither trained nor sent; all parties hold the same values
    SERVER = "server"  # lives on a server only


Rules = Mapping[str, Scope]  # ordered globs over tensor names; the first that matches decides


def is_change(name: str, changes: Sequence[str]) -> bool:
    """Whether a tensor of a reply is a change, and no new value of what was received."""
    return matches_any(name, changes)


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Whether a name matches one of several globs."""
    return any(fnmatchcase(name, glob) for glob in globs)


def combined(combine: Callable[[list[Tensor]], Tensor], rows: Sequence[Params]) -> dict[str, Tensor]:
    """Tensors of several mappings with equal names, joined name by name by ``torch.cat`` or ``torch.stack``."""
    columns: dict[str, Tensor] = {}
    for name in rows[0] if rows else ():
        columns[name] = combine([row[name] for row in rows])
    return columns


def layout(
    names: Iterable[str], rules: Rules, *, frozen: Iterable[str] = (), partial: bool = False
) -> dict[str, Scope]:
    """The scope of every name.

    Args:
        names: tensor names.
        rules: globs in order of precedence.
        frozen: names the model does not train; FROZEN whatever the rules say.
        partial: the names are only some of the model's, so that a rule may match none of them.

    A name that no rule matches, or a rule that matches no name (a typing error, most often), is a ``ValueError``.
    """
    return dict(_layout(tuple(names), tuple(rules.items()), frozenset(frozen), partial))


@lru_cache(maxsize=64)  # a server works it out for every client of every round
def _layout(
    names: tuple[str, ...], ordered: tuple[tuple[str, Scope], ...], frozen: frozenset[str], partial: bool
) -> dict[str, Scope]:
    rules, scopes = dict(ordered), dict[str, Scope]()
    used: set[str] = set()
    for name in names:
        rule = next((pattern for pattern in rules if fnmatchcase(name, pattern)), None)
        if rule is None:
            raise ValueError(f"no rule says where {name!r} lives; the rules are {list(rules)}")
        used.add(rule)
        scopes[name] = Scope.FROZEN if name in frozen else Scope(rules[rule])
    unused = [pattern for pattern in rules if pattern not in used]
    if unused and not partial:
        raise ValueError(f"rules that match no tensor: {unused}; the tensors are {sorted(scopes)}")
    return scopes


def widest(layouts: Iterable[Mapping[str, Scope]]) -> dict[str, Scope]:
    """For each name the widest scope that any layout gives it: shared, then private, then server, then frozen."""
    order = (Scope.FROZEN, Scope.SERVER, Scope.PRIVATE, Scope.SHARED)
    result: dict[str, Scope] = {}
    for scopes in layouts:
        for name, scope in scopes.items():
            result[name] = max(result.get(name, Scope.FROZEN), scope, key=order.index)
    return result


def pick(params: Params, scopes: Mapping[str, Scope], *wanted: Scope) -> dict[str, Tensor]:
    """The tensors of the wanted scopes, in the order of ``params``; no tensor is copied."""
    return {name: tensor for name, tensor in params.items() if scopes[name] in wanted}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's live parameters and persistent buffers under their ``state_dict`` names.

    A tensor with several names, such as tied weights, is there once, under its first name: it is sent once and takes
    one step.
    """
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Later name of a tensor that the model has under several names -> its first one."""
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {n: first for n, t in state.items() if (first := first_names.setdefault(id(t), n)) != n}


class Mean:
    """Weighted mean of parameters, streaming and per name.

    Every name is averaged over the clients that sent it (FedAvg's Eq. 8.3 of FedVQA when all send all;
    per-modality aggregation needs nothing more). Floating tensors are averaged as a running mean
    ``m += (w / W) (x - m)``: equal inputs return exactly that input, and memory does not grow with the number
    of updates. Of integer tensors (batch counters) the maximum is kept. The result depends on the order of
    ``add``: callers add in client order, so that every engine gives the same bits.

    Args:
        dtype: precision of the accumulator (float32, or float64 at about twice the time and memory).
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._means: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(self, params: Params, weight: float) -> None:
        """Adds one update.

        Raises:
            ValueError: the weight is not positive, or a shape differs from an earlier update's.
        """
        if not weight > 0:
            raise ValueError(f"an update's weight must be positive, got {weight}")
        for name, value in params.items():
            mean = self._means.get(name)
            if mean is None:
                copy = value.detach().to(self._precision(value))
                # ``to`` returns its input where nothing changes; the accumulator must own its memory.
                self._means[name] = copy.clone() if copy.data_ptr() == value.data_ptr() else copy
                self._weights[name] = weight
                continue
            if mean.shape != value.shape:
                raise ValueError(f"{name!r} must have shape {tuple(mean.shape)}, got {tuple(value.shape)}")
            total = self._weights[name] + weight
            self._weights[name] = total
            if mean.is_floating_point():
                mean.lerp_(value.detach().to(mean.dtype), weight / total)
            else:
                torch.maximum(mean, value, out=mean)

    def result(self, like: Params) -> dict[str, Tensor]:
        """The means in the dtypes of ``like``; names that no client sent keep its values.

        Raises:
            ValueError: something was added under a name that ``like`` does not have.
        """
        unknown = sorted(set(self._means) - set(like))
        if unknown:
            raise ValueError(f"updates carry names the model does not have: {unknown}")
        return {
            name: self._means[name].to(value.dtype) if name in self._means else value for name, value in like.items()
        }

    def _precision(self, value: Tensor) -> torch.dtype:
        return self._dtype if value.is_floating_point() else value.dtype


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies values into live tensors, in place and outside autograd.

    Raises:
        ValueError: a shape differs.
    """
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if target.shape != source.shape:
                raise ValueError(f"expected shape {tuple(target.shape)}, got {tuple(source.shape)}")
            target.copy_(source)


Scalar = bool | int | float | str
