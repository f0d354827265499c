"""Datasets as readers: a function reads files into a pool, and the common options share the pool out.

A dataset's function takes common options first, such as :class:`confed.data.options.Options`, and its own options
behind them, and returns a :class:`Reading` (or a finished dataset). :func:`reader` names the options that it has, in
the order of its signature, and the defaults that differ. Their meanings are those of the common options, or what the
section ``Options`` of its docstring says.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, describe_splits, federate, words
from confed.data.intake.account import Account, settled
from confed.data.ml_files.integrity import check_share, unreadable_rows
from confed.data.ml_files.table import MultiLabelTable
from confed.data.options import Options
from confed.data.picture_files import HELD, Check, NamedPictures, open_pictures
from confed.data.pictures import empty_table
from confed.data.targets import Kind
from confed.federation.ranges import check_value
from confed.registry import register_dataset

_CHANGED = "it could be read when all pictures were checked"


def drop_unreadable(
    table: MultiLabelTable,
    source: Path,
    size: int,
    *,
    at_most: float = 0.01,
    check: Check = "decoded",
    hold: int = 0,
) -> "Labelled":
    """Removal of rows with unreadable pictures, with a warning, or an error if there are too many."""
    pictures = open_pictures(source, table.pictures, size)
    held = empty_table(len(table), size) if len(table) * size * size * 3 <= hold else None
    lost = unreadable_rows(pictures, check) if held is None else _read_into(held, pictures)
    readable = np.ones(len(table), dtype=bool)
    if lost:
        warnings.warn(check_share(len(lost), len(table), f"in {source}", at_most, lost[min(lost)]), stacklevel=2)
        readable[list(lost)] = False
        names = tuple(table.pictures[row] for row in sorted(lost))
        table = replace(table.keep(readable), unreadable=(*table.unreadable, *names))
    if held is not None:
        if lost:
            held, whole = empty_table(len(table), size), held
            held[:] = whole[readable]
        return table, held
    if lost:
        pictures = pictures.take(np.flatnonzero(readable))
    pictures.advice = 'data.check = "decoded" would leave it out' if check == "present" else _CHANGED
    return table, pictures


def _read_into(held: np.ndarray, pictures: NamedPictures) -> dict[int, str]:
    """Decoding of all pictures into a table (M, S, S, 3); the result has errors by row."""
    lost: dict[int, str] = {}
    for row in range(len(pictures)):
        try:
            held[row] = pictures[row]
        except ValueError as error:
            lost[row] = str(error)
    return lost


@dataclass(frozen=True)
class Reading:
    """Examples that were read, before they are shared out.

    Attributes:
        account: what became of the rows of the files; None where there are none.
        left_out: why rows are in no split, where they are in the pool.
        facts: what is told of the data, before counts and floors.
        notes: what is told of them behind these.
        answers: the answer vocabulary; by default the labels, or the answers that occur, sorted.
        outside: whether test questions may have an answer outside of it.
        options: in place of those that were given.
        order: the clients in their order; by default that of the partition.
        places: place -> test examples that no client trains on, besides those of the pool.
        coarse: label -> its coarse label, where there are two levels.
    """

    pool: Pool
    account: Account | None
    left_out: str
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    answers: tuple[str, ...] = ()
    outside: bool = False
    options: Options | None = None
    order: Sequence[str] = ()
    places: Mapping[str, Examples] = field(default_factory=dict[str, Examples])
    coarse: Mapping[str, str] = field(default_factory=dict[str, str])

    def shared(self, name: str, options: Options) -> FederatedDataset:
        """The dataset."""
        splits, tests = federate(self.pool, self.options or options)
        splits = {client: splits[client] for client in self.order or splits}
        examples, places = self.pool.examples, {**self.places, **tests}
        known = tuple(sorted(set(examples.answers))) if examples.labels is None else examples.labels.names
        facts = {**self.facts, **describe_splits(splits, places.values()), **self.notes}
        dataset = FederatedDataset(
            name, self.answers or known, splits, places, words(examples.questions), facts, outside=self.outside,
            coarse=self.coarse,
        )  # fmt: skip
        return settled(dataset, self.account, self.left_out)


@dataclass(frozen=True)
class Nothing:
    """Options of datasets that have none of the common ones."""


Labelled = tuple[MultiLabelTable, NamedPictures | np.ndarray]
"""Rows with labels, and their pictures."""


def with_readable_pictures(table: MultiLabelTable, source: Path, options: Options) -> Labelled:
    """The rows whose pictures can be read, and their pictures, in memory where they are few."""
    return drop_unreadable(
        table, source, options.image_size, at_most=options.unreadable, check=options.check, hold=HELD
    )


def labelled_reading(
    train: Labelled, test: Labelled | None, account: Account, facts: Mapping[str, str], options: Options, **more: Any
) -> Reading:
    """Pictures with labels that are shared out among clients, and the place "test" where others are the test."""
    table, pictures = train
    facts, places = {**facts, **table.facts()}, dict[str, Examples]()
    if test is not None:
        central, shown = test
        places["test"] = Examples.labelled(central, shown, np.arange(len(central)))
        facts |= {f"test: {key}": value for key, value in central.facts().items()}
        options = replace(options, test_share=0.0)
    pool = Pool(Examples.labelled(table, pictures, np.arange(len(table))), np.full(len(table), "train"))
    return Reading(pool, account, "beyond max_train", facts, options=options, places=places, **more)


def reader(
    names: str, *, things: str = "questions", kind: Kind = "answers", **defaults: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: registers a function of common options and own options as a dataset.

    The common ones are fields of the dataclass that the function takes first, such as ``Options`` or ``Nothing``.

    Args:
        names: the options in the order of the signature; those behind "*" are given by keyword only.
        things: what the dataset calls its examples.
        kind: what is asked of them.
        defaults: of common options, where they differ; for one of several values a ``Literal``, whose first value is
            the default (None where None is among them), or an ``Annotated`` one with its default.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        taken = signature(function).parameters
        checked = get_type_hints(function, include_extras=True)
        hints = get_type_hints(function)
        first, *own = taken
        common = hints[first]
        parameters: list[Parameter] = []
        positional, _, keyword = names.partition("*")
        for text, given_by in ((positional, Parameter.POSITIONAL_OR_KEYWORD), (keyword, Parameter.KEYWORD_ONLY)):
            for name in text.split():
                if name in own:
                    parameter = taken[name].replace(annotation=hints[name])
                else:
                    parameter = _common(common, name, defaults)
                parameters.append(parameter.replace(kind=given_by))
        told = FederatedDataset if kind == "answers" else Annotated[FederatedDataset, kind]
        made = Signature(parameters, return_annotation=told)

        def built(*arguments: Any, **given: Any) -> Any:
            try:
                bound = made.bind(*arguments, **given)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            bound.apply_defaults()
            values = bound.arguments
            for parameter in parameters:
                name = parameter.name
                check_value(values[name], checked[name] if name in own else parameter.annotation, f"data.{name}")
            options = common(**{name: value for name, value in values.items() if name not in own})
            result = function(options, **{name: values[name] for name in own})
            return result.shared(function.__name__, options) if isinstance(result, Reading) else result

        built.__name__ = built.__qualname__ = function.__name__
        built.__module__ = function.__module__
        built.__doc__ = _documented(function, common, [parameter.name for parameter in parameters], things)
        built.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": made.return_annotation}
        built.__signature__ = made  # pyright: ignore[reportFunctionMemberAccess]
        return register_dataset(built)

    return decorate


def _common(common: type, name: str, defaults: Mapping[str, Any]) -> Parameter:
    """A common option; ``root`` must be given, and a type in place of a default says which values there are."""
    annotation = get_type_hints(common)[name]
    default = defaults.get(name, signature(common).parameters[name].default)
    if get_origin(default) is Annotated:
        base, *ranges, default = get_args(default)
        annotation = Annotated[base, *ranges] if ranges else base
    elif get_origin(default) in (Literal, Union, UnionType):
        annotation, choices = default, get_args(default)
        default = None if type(None) in choices else choices[0]
    if name == "root":
        default = Parameter.empty
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _documented(function: Callable[..., Any], common: type, names: Sequence[str], things: str) -> str:
    """A docstring whose section ``Args`` has all options, in place of the section ``Options``."""
    head, _, rest = cleandoc(function.__doc__ or "").partition("\n\nOptions:\n")
    section, _, tail = rest.partition("\n\n")
    meanings: dict[str, str] = {}
    for base in reversed(common.__mro__):
        described = cleandoc(base.__doc__ or "").partition("\n\nAttributes:\n")[2]
        meanings |= _meanings(described.partition("\n\n")[0].replace("{things}", things))
    meanings |= _meanings(section)
    return "\n\n".join([head, "Args:\n" + "\n".join(meanings[name] for name in names), *([tail] if tail else [])])


def _meanings(section: str) -> dict[str, str]:
    """Option -> its lines in a section of a docstring, indented."""
    return {line.split(":")[0].strip(): line for line in re.split(r"\n(?=    \w)", section) if line}
