"""Ranges of hyper-parameters, declared beside their types, and the check that a dataclass's values lie in them.

A field says what it may be where it is declared: ``lam: Annotated[float, NOT_NEGATIVE] = 0.1``. :func:`check_fields`
then refuses what lies outside, what is no number (NaN) or infinite in any number field, ranges or not, ``true`` and
``false`` where a number is expected, and values that a ``Literal`` does not list. Methods have this from
:class:`confed.federation.algorithm.Algorithm`; other sections of a recipe call it in their ``__post_init__``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Range of a numeric field."""

    low: float = -math.inf  # the least value
    high: float = math.inf  # the largest one
    above: bool = False  # low itself is not among them
    below: bool = False  # high itself is not among them

    def __contains__(self, value: float) -> bool:
        # Comparisons with NaN are false, so it lies in no range.
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        """How an error ends: what the value must be."""
        if self.low == -math.inf and self.high == math.inf:
            return "be a number"
        if self.high < math.inf:
            return f"lie in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"
        if self.low == 0:
            return "be positive" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {self.low:g}"


NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
AT_LEAST_ONE = Range(1)
SHARE = Range(0, 1)  # from nothing to all
BELOW_ONE = Range(0, 1, below=True)  # a factor of decay, or a share that leaves something


def check_fields(instance: Any, where: str) -> None:
    """Check of a dataclass's values against the types and ranges of its fields.

    The first such value is a ValueError with its name, what is expected and what came.

    Args:
        instance: of a dataclass, whose ``__init__`` takes its fields.
        where: the section's name in a recipe, for messages; may be empty.
    """
    prefix = f"{where}." if where else ""
    for name, hint in _hints(cast("type[Any]", type(instance))):
        check_value(getattr(instance, name), hint, f"{prefix}{name}")


def check_value(value: Any, hint: Any, where: str) -> None:
    """Check of a value against a type hint with ranges; of other types than numbers only a Literal's.

    Raises:
        ValueError: names it, says what is expected and what came.
    """
    allowed, options = _meaning(hint)
    if allowed is not None and not isinstance(value, str) and value is not None:
        items = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else (value,)
        for item in items:
            _check_number(item, allowed, where, value)
    elif options and value not in options:
        listed = ", ".join(str(option) or "''" for option in options if option is not None)
        raise ValueError(f"{where} must be one of {listed}, got {value!r}")


def _check_number(item: Any, allowed: Range, where: str, whole: Any) -> None:
    if isinstance(item, bool):
        raise ValueError(f"{where} must be a number, got {str(item).lower()}")
    if not isinstance(item, int | float):
        return
    if math.isnan(item):
        raise ValueError(f"{where} must be a number, got {whole}")
    if item not in allowed:
        raise ValueError(f"{where} must {allowed}, got {whole}")
    if not math.isfinite(item):
        raise ValueError(f"{where} must be finite, got {whole}")


@lru_cache(maxsize=256)
def _hints(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind.__init__, include_extras=True)
    return tuple((name, hint) for name, hint in hints.items() if name != "return")


def _meaning(hint: Any) -> tuple[Range | None, tuple[Any, ...]]:
    """The range of a hint of numbers (or sequences of them), or the options of a Literal; neither for other types."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rest = get_args(hint)
        declared = next((annotation for annotation in rest if isinstance(annotation, Range)), None)
        allowed, options = _meaning(base)
        return declared or allowed, options
    if origin is tuple and get_args(hint):
        return _meaning(get_args(hint)[0])[0], ()
    if origin in (Union, UnionType):
        return _meaning_of_several(hint)
    return (Range() if hint in (int, float) else None), (get_args(hint) if origin is Literal else ())


def _meaning_of_several(hint: Any) -> tuple[Range | None, tuple[Any, ...]]:
    parts = [_meaning(alternative) for alternative in get_args(hint) if alternative is not type(None)]
    allowed = next((meaning for meaning, _ in parts if meaning is not None), None)
    if allowed is not None or not all(options for _, options in parts):
        # What is no number may be something else here; where it is used is where it is looked at.
        return allowed, ()
    options = list(chain.from_iterable(meaning for _, meaning in parts))
    return None, (*options, None) if type(None) in get_args(hint) else tuple(options)
