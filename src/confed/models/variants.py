"""Variants of a model: its published and small sizes as rows of a table, each registered under its name."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, getdoc, signature
from typing import Any, TypeVar

from confed.federation.specs import ModelSpec
from confed.models.region_model import RegionModel, assemble, question_tokenizer
from confed.registry import register_model

Model = TypeVar("Model")
Region = TypeVar("Region", bound=RegionModel)


def variant(
    build: Callable[..., Model],
    name: str,
    summary: str,
    options: str | Sequence[str],
    *,
    spec: ModelSpec,
    sources: Sequence[Callable[..., Any]] = (),
    described: Mapping[str, str] | None = None,
    **values: Any,
) -> Callable[..., Model]:
    """A registered function that builds a model in one size.

    Its signature has the options in their order, the first two by position, with the annotations that they have in
    ``build`` and the defaults of this variant; its documentation is the summary and the descriptions of the options.
    """
    options = options.split() if isinstance(options, str) else options
    parameter_of: dict[str, Parameter] = {}
    texts: dict[str, str] = {}
    for source in (*reversed(sources), build):
        parameter_of |= signature(source).parameters
        texts |= arguments_of(source)
    texts |= described or {}
    parameters = [
        parameter_of[key].replace(
            default=values.get(key, parameter_of[key].default),
            kind=Parameter.KEYWORD_ONLY if place > 1 else Parameter.POSITIONAL_OR_KEYWORD,
        )
        for place, key in enumerate(options)
    ]
    made = Signature(parameters, return_annotation=build.__annotations__["return"])
    fixed = {key: value for key, value in values.items() if key not in options}

    def built(*arguments: Any, **given: Any) -> Model:
        try:
            bound = made.bind(*arguments, **given)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        return build(**bound.arguments, **fixed)

    built.__name__ = built.__qualname__ = name
    built.__module__ = build.__module__
    built.__doc__ = f"{summary}\n\nArgs:\n" + "\n".join(texts[key] for key in options if key in texts)
    built.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": made.return_annotation}
    built.__signature__ = made  # pyright: ignore[reportFunctionMemberAccess]
    return register_model(built, spec=spec)


def region_variant(
    kind: type[Region], name: str, summary: str, *, options: Sequence[str] = (), **values: Any
) -> Callable[..., Region]:
    """A registered function that builds a model which reads regions in one size; see :func:`variant`.

    Its arguments are those of :func:`confed.models.region_model.assemble` and the options of this variant.
    """

    def build(**given: Any) -> Region:
        return assemble(kind, **given)

    build.__annotations__["return"], build.__module__ = kind, kind.__module__
    names = [key for key in signature(assemble).parameters if key not in ("kind", "embedding", "sizes")]
    position = names.index("trainable")
    names[position:position] = options
    # The class describes its own arguments better, but for those that are converted before it gets them.
    own_arguments = {key: text for key, text in arguments_of(kind).items() if key not in ("answers", "vocab_size")}
    spec = ModelSpec(tokenizer=question_tokenizer, reads="regions")
    return variant(build, name, summary, names, spec=spec, sources=(assemble, kind), described=own_arguments, **values)


def arguments_of(documented: object) -> dict[str, str]:
    """Argument -> its lines in the section ``Args`` of a docstring, indented."""
    section = (getdoc(documented) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {line.split(":")[0].strip(): line for line in re.split(r"\n(?=    \w)", section)}
