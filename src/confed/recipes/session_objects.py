"""Names for objects that only this Python session has: modules, datasets and functions without a home.

A recipe names such an object ``"session:KIND@DIGEST"``; the registry of this process gives it back, and in any other
process the name is an error that says so. The digest is of the object's values, so that a run goes on with the same
object, made again or not, and with no other one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
from torch import Tensor, nn

from confed.data.examples import FederatedDataset
from confed.data.labelled import LabelDataset
from confed.data.tables import Tables, is_table, tables_of
from confed.federation.model_contract import check_model_kept
from confed.federation.params import named_tensors
from confed.federation.specs import model_spec
from confed.recipes.overrides import NAMED
from confed.registry import SESSION

__all__ = ["digest_of", "session_name"]


def session_name(section: str, value: Any) -> str:
    """The name of an object of this session, which is registered under it.

    Args:
        section: one of :data:`confed.recipes.overrides.NAMED`.
        value: a module, a dataset, a table, or a function or class that no other process can import.
    """
    if isinstance(value, nn.Module):
        check_model_kept(type(value).__name__, value)
        name = f"{SESSION}{type(value).__name__}@{digest_of((str(value), named_tensors(value)))}"
        NAMED[section].add(name, _model(value))
    elif isinstance(value, FederatedDataset | LabelDataset):
        name = f"{SESSION}{value.name}@{digest_of(value)}"
        NAMED[section].add(name, lambda: value)
    elif is_table(value):
        tables = tables_of(value)
        rows = {
            split: (table.column_names, [table[row] for row in range(len(table))])
            for split, table in tables.splits.items()
        }
        name = f"{SESSION}{tables.name}@{digest_of(rows)}"
        NAMED[section].add(name, _tabled(tables))
    else:
        name = f"{SESSION}{value.__name__}"
        NAMED[section].add(name, value)
    return name


def _tabled(tables: Tables) -> Any:
    """Constructor of a federation of tables, with the keywords of the dataset "hub" that are left."""
    hub = NAMED["data"]["hub"]

    @wraps(hub)
    def build(**keywords: Any) -> FederatedDataset:
        return hub(tables, **keywords)

    left = [item for key, item in signature(hub).parameters.items() if key not in ("source", "revision", "config")]
    named = [item.replace(kind=item.KEYWORD_ONLY) for item in left]
    build.__signature__ = signature(hub).replace(parameters=named)  # pyright: ignore[reportAttributeAccessIssue]
    return build


def _model(module: nn.Module) -> Any:
    """Constructor of copies of a module, with what the module declares of itself."""

    def build(answers: Any, vocab_size: int, seed: int = 0) -> nn.Module:
        del answers, vocab_size, seed  # the module has been made
        return deepcopy(module)

    build.spec = model_spec(module)  # pyright: ignore[reportFunctionMemberAccess]
    return build


def digest_of(value: object) -> str:
    """Digest of the values in an object, 8 hexadecimal digits.

    Pictures that are read when they are asked for count by their number and size.
    """
    found = hashlib.blake2b(digest_size=4)
    _add(found, value, {})
    return found.hexdigest()


def _add(found: "hashlib.blake2b", value: object, seen: dict[int, object]) -> None:
    """Values in an order that depends on nothing but them; large things that come again count once."""
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if isinstance(value, str | int | float | bool | bytes | type(None)):
        found.update(repr(value).encode())
        return
    if id(value) in seen:
        found.update(b"again")
        return
    seen[id(value)] = value  # kept, so that no other object gets its id
    found.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).data if value.dtype != object else repr(value.tolist()).encode())
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            found.update(field.name.encode())
            _add(found, vars(value).get(field.name), seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _add(found, item, seen)
    elif isinstance(value, Sequence):
        found.update(f"{len(value)}".encode())
        for item in value:
            _add(found, item, seen)
