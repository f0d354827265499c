"""Contracts of what a file of one's own declares: methods, models, datasets, tasks and measures."""

import importlib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from confed import registry
from confed.federation.algorithm import Algorithm
from confed.federation.model_contract import on_trial
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.build import prepare
from confed.runs.run import run
from confed.testing import ContractViolation, check_algorithm, check_dataset, check_model, check_task

SMALL = (
    "study.methods=[]", "algorithm.name=fedavg", "model.name=vilt_tiny", "data.train=8", "data.validation=4",
    "data.test=8", "local.epochs=1", "run.rounds=1", "run.workers=1", "run.gallery=0", "run.controls=none",
)  # fmt: skip
"""What the recipe runs with where the command says nothing else."""

A_RUN = "a run of one round"


@dataclass
class Checked:
    """Verdicts on one thing.

    Attributes:
        kind: "method", "model", "dataset", "task" or "measure".
        name: as recipes name it, "module:attribute".
        verdicts: checks in their order, each with "passed" or why it does not apply.
        fault: what failed, one line; empty where nothing did.
    """

    kind: str
    name: str
    verdicts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    fault: str = ""


def check_file(file: Path | str, overrides: Sequence[str] = (), recipe: str = "") -> Iterator[Checked]:
    """Verdicts on all that a Python file declares, each as soon as it is known; the file's code is run.

    Everything passes its contract (:func:`confed.check_algorithm` and its siblings) and then runs for one round.

    Args:
        file: the file, such as "my_method.py"; its folder becomes importable.
        overrides: "section.key=value" of the recipe, such as "data.root=photographs".
        recipe: what it runs with; by default drawn scenes and a tiny model. A dataset runs only with a recipe that is
            given, as pictures of its size need a model for them.

    Raises:
        ValueError: there is no such file, it cannot be imported, or it declares nothing.
    """
    module = _imported(Path(file))
    declared = list(_declared(module))
    if not declared:
        raise ValueError(
            f"{file} declares nothing: expected a subclass of Algorithm, or a function or class under "
            "@register_model, @register_dataset, @register_task or @register_measure"
        )
    for kind, attribute in declared:
        checked = Checked(kind, f"{module.__name__}:{attribute}")
        try:
            small = load_recipe(
                recipe or "fedvqa_scenes", [*_small(kind, recipe), *overrides, _named(kind, checked.name)]
            )
            checked.verdicts += _contract(kind, getattr(module, attribute), small)
            if kind == "dataset" and not recipe:
                checked.verdicts.append((A_RUN, "give --recipe FILE with a model that reads its pictures"))
            else:
                with tempfile.TemporaryDirectory() as folder:
                    run(small, Path(folder) / "run")
                checked.verdicts.append((A_RUN, "passed"))
        except ContractViolation as error:
            checked.fault = str(error)
        except Exception as error:  # whatever code of one's own raises
            checked.fault = _raised(error, Path(file))
        yield checked


def _raised(error: BaseException, file: Path) -> str:
    """An error in one line, with the line of the file that it comes from."""
    cause: BaseException | None = error
    lines: list[int] = []
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        lines += [frame.lineno or 0 for frame in frames if Path(frame.filename).resolve() == file.resolve()]
        cause = cause.__cause__ or cause.__context__
    place = f"{file.name}, line {lines[-1]}: " if lines else ""
    return f"{place}{' '.join(str(error).split())}"


def _imported(file: Path) -> ModuleType:
    """The module that a file is."""
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise ValueError(f"{file} must be a Python file that can be imported, such as my_method.py")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    registry.allow_code(file.stem)
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if module.__file__ is None or Path(module.__file__).resolve() != file.resolve():
        raise ValueError(f"{file} has the name of another module, {module.__file__ or file.stem}: rename the file")
    return module


def _declared(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Kind and attribute of everything in a module that recipes can name."""
    registries = {"model": registry.models, "dataset": registry.datasets, "task": registry.tasks}
    registries["measure"] = registry.measures
    for attribute, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type) and issubclass(value, Algorithm) and not isabstract(value):
            yield "method", attribute
        for kind, entries in registries.items():
            if entries.name_of(value) is not None:
                yield kind, attribute


def _small(kind: str, recipe: str) -> list[str]:
    """What makes a recipe small."""
    own_sizes = [one for one in SMALL if not one.startswith("data.")]
    if recipe:
        return [one for one in own_sizes if not one.startswith(("model.", "algorithm."))]
    return own_sizes if kind == "dataset" else [*SMALL]


def _named(kind: str, name: str) -> str:
    """The override that names a thing in a recipe."""
    if kind == "measure":
        return f'run.measures=["{name}"]'
    return f"{ {'method': 'algorithm', 'dataset': 'data'}.get(kind, kind) }.name={name}"


def _contract(kind: str, declared: Any, recipe: Recipe) -> list[tuple[str, str]]:
    """Verdicts of the contract of a kind of thing."""
    if kind == "method":
        return check_algorithm(recipe.algorithm)
    if kind == "dataset":
        return check_dataset(declared, **{key: v for key, v in recipe.sections["data"].items() if key != "name"})
    if kind == "measure":  # a run tries it on two examples before round 1
        return []
    setup, _ = prepare(recipe)
    client = setup.population.info(0).id
    model, data = setup.build(), setup.population.data(client)
    if kind == "model":
        return check_model(model, next(iter(data.train(4, torch.Generator().manual_seed(0)))))
    batch = next(iter(data.test(4)))
    with on_trial(model):
        output = model(batch)
    return check_task(setup.tasks.get(client, setup.task), output, batch)
