"""Variants of a model: its published and small sizes as rows of a table, each registered under its name.

Options that most models have are declared and described in :func:`common` and applied here, in this order: the packaged
weights are loaded and heads of further tasks are added, where the builder does not take these options itself, and
:func:`finetune` says what learns.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Any, TypeVar

import torch

from confed.federation.ranges import check_value
from confed.federation.specs import ModelSpec
from confed.models.finetuning import USUAL, Finetuning, Trainable, finetune
from confed.models.pretrained import load_into, weights_file
from confed.registry import register_model

Model = TypeVar("Model")
Builder = Callable[..., Model]


def common(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    image_size: int | tuple[int, int] | None = None,
    pretrained: bool | Path | str = True,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    seed: int = 0,
) -> None:
    """Options of models.

    Args:
        answers: the answers, classes or labels, or how many there are. A pretrained head is loaded when they are given
            as strings and equal the pretrained ones in order; otherwise the head starts fresh.
        vocab_size: number of token ids; ignored where no words are read.
        max_length: text positions.
        image_size: pixels per side or (H, W).
        pretrained: load the packaged weights, or those of a file that ``confed weights pretrain`` wrote.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        seed: of all fresh values.
    """


def variant(
    build: Builder[Model],
    name: str,
    summary: str,
    options: str | Sequence[str],
    *,
    spec: ModelSpec,
    sources: Sequence[Callable[..., Any]] = (),
    described: Mapping[str, str] | None = None,
    weights: str = "",
    reduction: int | None = None,
    **values: Any,
) -> Builder[Model]:
    """A registered function that builds a model in one size.

    Its signature has the options in their order, the first two by position, with the annotations that they have in
    ``build`` and the defaults of this variant; its documentation is the summary and the descriptions of the options.

    Args:
        build: takes some of the options, those that are fixed here, and ``rng``, a generator from the seed, if it
            names it; what it takes of ``trainable`` and ``peft`` it checks only.
        name: as in recipes.
        summary: of the documentation.
        options: names of the options.
        spec: what the model declares.
        sources: functions whose options it has as well, beside those of :func:`common`, and takes by any keyword.
        described: option -> its description in place of the usual one.
        weights: whose packaged weights it loads; its own where this is empty.
        reduction: the usual reduction of its adapters, where it is not the model's.
        values: defaults of options, and what is fixed.
    """
    options = options.split() if isinstance(options, str) else options
    parameters, texts = _declared((common, *reversed(sources), build), options, values)
    texts |= {key: f"    {key}: {text}" for key, text in (described or {}).items()}
    made = Signature(parameters, return_annotation=build.__annotations__["return"])
    fixed = {key: value for key, value in values.items() if key not in options}

    def built(*arguments: Any, **given: Any) -> Model:
        try:
            bound = made.bind(*arguments, **given)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            check_value(value, made.parameters[key].annotation, f"model.{key}")
        return _built(build, sources, bound.arguments, fixed, weights or name, reduction)

    built.__name__ = built.__qualname__ = name
    built.__module__ = build.__module__
    built.__doc__ = f"{summary}\n\nArgs:\n" + "\n".join(texts[key] for key in options if key in texts)
    built.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": made.return_annotation}
    built.__signature__ = made  # pyright: ignore[reportFunctionMemberAccess]
    return register_model(built, spec=spec)


def _declared(
    sources: Sequence[Callable[..., Any]], options: Sequence[str], defaults: Mapping[str, Any]
) -> tuple[list[Parameter], dict[str, str]]:
    """Parameters of options, and their descriptions, each from the last function that declares or describes it."""
    parameter_of: dict[str, Parameter] = {}
    texts: dict[str, str] = {}
    for source in sources:
        section = re.split(r"\n(?:Args|Options):\n", getdoc(source) or "")[1:]
        section = "".join(section).partition("\n\n")[0]
        texts |= {line.split(":")[0].strip(): line for line in re.split(r"\n(?=    \w)", section)}
        for key, parameter in signature(source).parameters.items():
            usual = parameter_of.get(key, parameter).default
            default = usual if parameter.default is Parameter.empty else parameter.default
            parameter_of[key] = parameter.replace(default=default)
    parameters = [
        parameter_of[key].replace(
            default=defaults.get(key, parameter_of[key].default),
            kind=Parameter.KEYWORD_ONLY if place > 1 else Parameter.POSITIONAL_OR_KEYWORD,
        )
        for place, key in enumerate(options)
    ]
    return parameters, texts


def _built(
    build: Builder[Model],
    sources: Sequence[Callable[..., Any]],
    given: Mapping[str, Any],
    fixed: Mapping[str, Any],
    weights: str,
    reduction: int | None,
) -> Model:
    """A model by its builder, with its weights, heads and finetuning."""
    rng = torch.Generator().manual_seed(given["seed"])
    taken = set(signature(build).parameters)
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature(build).parameters.values()):
        for source in sources:
            taken.update(signature(source).parameters)
    options = {key: value for key, value in {**given, "rng": rng}.items() if key in taken}
    model: Any = build(**options, **fixed)
    if given.get("pretrained") and "pretrained" not in taken:
        answers = given["answers"]
        load_into(model, weights_file(weights, given["pretrained"]), None if isinstance(answers, int) else answers)
    if "heads" in given:
        model.add_heads(given["heads"], rng)
    if "trainable" in given:
        places = model.places()
        places = places if reduction is None else replace(places, reduction=reduction)
        finetune(model, given["trainable"], given.get("peft", USUAL), places, rng)
    return model
