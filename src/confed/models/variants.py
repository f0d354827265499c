"""Variants of a model: its published and small sizes as rows of a table, each registered under its name."""

import re
from collections.abc import Callable, Sequence
from inspect import Signature, getdoc, signature
from typing import Any, TypeVar

from confed.federation.specs import ModelSpec
from confed.models.region_model import RegionModel, assemble, question_tokenizer
from confed.registry import register_model

__all__ = ["region_variant"]

Model = TypeVar("Model", bound=RegionModel)


def region_variant(
    kind: type[Model], name: str, summary: str, *, options: Sequence[str] = (), **values: Any
) -> Callable[..., Model]:
    """A registered function that builds a model which reads regions in one size.

    Its signature is that of :func:`confed.models.region_model.assemble` with the defaults and the options of this
    variant, its documentation the summary and the descriptions of the arguments.

    Args:
        kind: the model's class, whose arguments the variant sets.
        name: what recipes call the variant, and the variable that holds the function.
        summary: first line of its documentation, which ``confed list models`` shows.
        options: further arguments of the class that recipes may set.
        values: argument -> value; a default where recipes may set the argument, fixed otherwise.
    """
    common, own = signature(assemble).parameters, signature(kind).parameters
    names = [key for key in common if key not in ("kind", "embedding", "sizes")]
    position = names.index("trainable")
    names[position:position] = options
    parameters = [common[key] if key in common else own[key] for key in names]
    defaults = [one.replace(default=values.get(one.name, one.default)) for one in parameters]
    made = Signature(defaults, return_annotation=kind)
    fixed = {key: value for key, value in values.items() if key not in names}

    def build(*arguments: Any, **given: Any) -> Model:
        try:
            bound = made.bind(*arguments, **given)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        return assemble(kind, **bound.arguments, **fixed)

    build.__name__ = build.__qualname__ = name
    build.__module__ = kind.__module__
    # The class describes its own arguments better, but for those that are converted before it gets them.
    described = _arguments(assemble) | {
        key: text for key, text in _arguments(kind).items() if key not in ("answers", "vocab_size")
    }
    build.__doc__ = f"{summary}\n\nArgs:\n" + "\n".join(described[key] for key in names if key in described)
    build.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": kind}
    build.__signature__ = made  # pyright: ignore[reportFunctionMemberAccess]
    return register_model(build, spec=ModelSpec(tokenizer=question_tokenizer, reads="regions"))


def _arguments(documented: object) -> dict[str, str]:
    """Argument -> its lines in the section ``Args`` of a docstring, indented."""
    section = (getdoc(documented) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {line.split(":")[0].strip(): line for line in re.split(r"\n(?=    \w)", section)}
