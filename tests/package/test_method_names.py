"""Methods are named in `algorithms/`, in recipes, tests and docs; everything else asks for their traits."""

import ast
from pathlib import Path

import pytest

import confed
from confed.registry import algorithms
from source_trees import nodes_of

SOURCE = Path(confed.__file__).parent
FILES = sorted(f for f in SOURCE.rglob("*.py") if f.relative_to(SOURCE).parts[0] != "algorithms")

# Words that mean something else as well, and where.
OTHER_MEANINGS = {
    "local": None,  # the section of a recipe
    "robust": None,  # the protection of every method
    "central": {"report/report.py"},  # an entry of the glossary
}
ALLOWED = {
    ("testing/steadiness.py", "confed.algorithms.fedavg"),  # the contract compares every method with FedAvg
    ("recipes/recipe.py", "fedavg"),  # the default of a recipe made of objects
    # These write the rows of a recipe.
    ("prepare/recipe_draft.py", "fedavg"),
    ("prepare/recipe_draft.py", "fedavg_ft"),
    ("cli/model_trial.py", "fedavg"),
    ("prepare/recipe_draft.py", "central"),
    ("studies/gates.py", "central"),
    ("release/gains.py", "central"),  # the bound of pooled data
}


def _named(path: Path) -> list[str]:
    found = [node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    modules = [node.module or "" for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in nodes_of(path) if isinstance(node, ast.Import) for alias in node.names]
    methods = set(algorithms.names())
    return [text for text in found if text in methods] + [
        module for module in modules + names if module.startswith("confed.algorithms.")
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_method_is_named_outside_algorithms(file: Path) -> None:
    where = file.relative_to(SOURCE).as_posix()
    named = {name for name in _named(file) if (where, name) not in ALLOWED}
    for name, files in OTHER_MEANINGS.items():
        if files is None or where in files:
            named.discard(name)
    assert not named
