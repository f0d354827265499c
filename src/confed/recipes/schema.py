"""A constructor's signature as the schema of its keywords: unknown keys, wrong types and defaults."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_origin, get_type_hints

DERIVED = {
    "model": {"answers", "vocab_size", "seed", "heads", "region_width", "words"}
    | {"picture_size", "sample_rate", "series_channels"},
    "task": {"answers", "types"},
    "data": {"seed"},
}
"""Section -> arguments that the run works out: a recipe does not give them."""


_ELSEWHERE = {
    "learning_rate": "lr", "eta": "lr", "step_size": "lr", "batch": "batch_size", "batchsize": "batch_size",
    "local_epochs": "epochs", "num_epochs": "epochs", "n_epochs": "epochs", "num_rounds": "rounds",
    "n_rounds": "rounds", "bs": "batch_size",
    "communication_rounds": "rounds", "wd": "weight_decay", "l2": "weight_decay", "grad_clip": "clip",
    "max_grad_norm": "clip", "max_norm": "clip", "scheduler": "schedule", "lr_scheduler": "schedule",
    "clients_per_round": "cohort", "num_clients": "clients", "n_clients": "clients", "optim": "optimizer",
    "gradient_accumulation_steps": "accumulate", "steps": "iterations", "local_steps": "iterations", "beta": "alpha",
}  # fmt: skip
"""Name of a setting in other libraries -> its name here."""


def validate(constructor: Callable[..., Any], values: Mapping[str, Any], where: str, skip: set[str]) -> dict[str, Any]:
    """Check of keywords against a constructor's signature; returns them with defaults filled in."""
    from pydantic import ValidationError

    model, names = _schema(constructor, frozenset(skip))
    for key in values:
        if key not in names:
            near = [name for name in (_ELSEWHERE.get(key.lower().replace("-", "_"), ""),) if name in names]
            near = near or get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            row = f"; of one method of a comparison: methods.NAME.{key}" if where == "algorithm" else ""
            raise ValueError(
                f"unknown key {where}.{key}={values[key]!r}; {hint}valid keys: {', '.join(names) or 'none'}{row}"
            )
    try:
        checked = model.model_validate(dict(values))
    except ValidationError as error:
        first, key = _first_fault(error.errors(), model, values)
        key = ".".join([where, *key])
        if first["type"] == "missing":
            raise ValueError(f"{key} must be given; valid keys: {', '.join(names)}") from error
        message = str(first.get("ctx", {}).get("error", ""))
        if first["type"] == "value_error" and message.startswith(f"{key}."):  # a part that checks its own values
            raise ValueError(message) from error
        raise ValueError(f"{key}: {first['msg']}; got {first['input']!r}") from error
    for name, value in values.items():
        _check_numbers(value, getattr(checked, name), f"{where}.{name}")
    # Paths become absolute, so that a run folder can be resumed from anywhere.
    values = {name: getattr(checked, name) for name in names}
    return {name: v.expanduser().resolve() if isinstance(v, Path) else v for name, v in values.items()}


def _check_numbers(given: Any, taken: Any, where: str) -> None:
    """Refuses true and false where a number was meant, which pydantic takes as 1 and 0."""
    if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
        raise ValueError(f"{where} must be a number, got {str(given).lower()}")
    if isinstance(given, list | tuple) and isinstance(taken, list | tuple):
        for number, (first, second) in enumerate(zip(given, taken, strict=False)):
            _check_numbers(first, second, f"{where}.{number}")
    if isinstance(given, Mapping):
        for key, value in given.items():
            item = taken.get(key) if isinstance(taken, Mapping) else getattr(taken, str(key), None)
            _check_numbers(value, item, f"{where}.{key}")


def _first_fault(faults: Sequence[Any], model: Any, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The first fault and its key; where several types are allowed, what all of them expect."""
    first, name = faults[0], str(faults[0]["loc"][0])
    faults_of_name = [fault for fault in faults if fault["loc"][0] == name]
    # Behind a name pydantic gives the type that did not fit, or a position in a sequence or mapping.
    if get_origin(model.model_fields[name].annotation) in (Union, UnionType) and len(faults_of_name) > 1:
        rest = [str(fault["msg"]).removeprefix("Input should be ") for fault in faults_of_name[1:]]
        return {"type": "union", "msg": ", or ".join([faults_of_name[0]["msg"], *rest]), "input": values[name]}, [name]
    return first, [str(step) for step in first["loc"]]


@lru_cache(maxsize=256)
def _schema(constructor: Callable[..., Any], skip: frozenset[str]) -> tuple[Any, tuple[str, ...]]:
    from pydantic import ConfigDict, Field, create_model

    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    fields: dict[str, Any] = {}
    for name, keyword in keywords(constructor, skip).items():
        default = ... if keyword.required else Field(default_factory=keyword.make)
        fields[name] = (hints.get(keyword.parameter, Any), default)
    # Protected namespaces are pydantic's own; keywords such as ``model_...`` are legitimate here.
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), allow_inf_nan=False)
    return create_model("Section", __config__=config, **fields), tuple(fields)


@dataclass(frozen=True)
class Keyword:
    """A keyword of a constructor that a recipe may give."""

    name: str  # the parameter's, without the underscore behind a word of Python's own
    parameter: str
    default: Any  # inspect.Parameter.empty where it must be given
    factory: Callable[[], Any] | None = None  # where a dataclass makes the default anew

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.factory is None and self.default is inspect.Parameter.empty

    def make(self) -> Any:
        """The default."""
        return self.default if self.factory is None else self.factory()


def keywords(constructor: Callable[..., Any], skip: Collection[str] = ()) -> dict[str, Keyword]:
    """Name -> keyword of a function or class, in their order."""
    of_class: Any = dataclass_fields(constructor) if inspect.isclass(constructor) and is_dataclass(constructor) else ()
    factories = {field.name: field.default_factory for field in of_class if field.default_factory is not MISSING}
    parameters = inspect.signature(constructor).parameters
    taken = [name for name in parameters if name not in skip and name != "self"]
    found: dict[str, Keyword] = {}
    for parameter in taken:
        name = parameter.removesuffix("_")
        found[name] = Keyword(name, parameter, parameters[parameter].default, factories.get(parameter))
    return found


def arguments(constructor: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter -> value of a section's keywords."""
    return {keyword.parameter: values[name] for name, keyword in keywords(constructor).items() if name in values}


def plain(value: Any) -> Any:
    """A checked value as TOML can hold it; what is None is left out of mappings."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    return value
