"""What confed relies on of Flower's internal interfaces: a failure names what a new Flower release changed."""

import ast
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from repository import ROOT

SOURCE = ROOT / "src" / "confed"
PRIVATE = SOURCE / "engines" / "flower" / "private_api.py"
PUBLIC = (
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.common",
    "flwr.client",
    "flwr.server",
    "flwr.simulation",
)


def imported(path: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and local name of everything that a file imports, with what `import_module` is given as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", "") for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from ((str(arg.value), "", "") for arg in node.args if isinstance(arg, ast.Constant))


def internal(names: Iterable[tuple[str, str, str]]) -> list[str]:
    """What is imported of Flower's modules and not listed in a public module's `__all__`."""
    public = {(module, name) for module in PUBLIC for name in importlib.import_module(module).__all__}
    return [
        f"{module}.{name}"
        for module, name, _ in names
        if module.split(".")[0] == "flwr" and (module, name) not in public
    ]


NAMING = [path for path in SOURCE.rglob("*.py") if "flwr" in (text := path.read_text()) or "private_api" in text]
IMPORTS = {path.relative_to(SOURCE).as_posix(): set(imported(path)) for path in NAMING}
OURS = PRIVATE.relative_to(SOURCE).as_posix()
SOURCES = {local: (module, name) for module, name, local in sorted(IMPORTS[OURS]) if module.startswith("flwr.")}
USES = {path: set(re.findall(r"\binternal\.(\w+)", (SOURCE / path).read_text())) for path in IMPORTS}
for path, names in IMPORTS.items():
    USES[path] |= {local for module, _, local in names if module == "confed.engines.flower.private_api"}
USERS = {local: sorted(path for path, used in USES.items() if local in used) for local in SOURCES}


def test_only_one_file_imports_flowers_internal_modules() -> None:
    found = [f"{path} imports {name}" for path, names in IMPORTS.items() if path != OURS for name in internal(names)]
    assert not found, "import these from confed.engines.flower.private_api"


@pytest.mark.parametrize(
    "line",
    ["from flwr.supercore.date import now", "import flwr.proto", "from flwr import supercore",
     "from flwr.common import serde", "import_module('flwr.supercore')"],
)  # fmt: skip
def test_an_import_of_an_internal_module_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "file.py").write_text(f"from flwr.app import Message\n\ndef f():\n    {line}\n")
    assert len(internal(imported(tmp_path / "file.py"))) == 1


def test_the_file_holds_no_public_name() -> None:
    assert not [f"{module}.{name}" for module, name in SOURCES.values() if module in PUBLIC]


def test_every_name_has_a_comment_with_the_modules_that_use_it() -> None:
    for local in SOURCES:
        found = re.search(rf"^    (?:\w+ as )?{local},  # ([\w, ]+): \S", PRIVATE.read_text(), re.MULTILINE)
        assert found, f"{local} needs a comment: module, module: what is relied on"
        assert sorted(f"engines/flower/{name}.py" for name in found[1].split(", ")) == USERS[local] != []


def test_messages_have_the_internal_parts_that_are_relied_on() -> None:
    from flwr.app import Array, Metadata

    from confed.engines.flower.private_api import get_object_body, get_object_head_values_from_object_content

    about = Metadata(1, "first", 1, 2, "", "", 0.0, 1.0, "train")
    about.__dict__["_message_id"] = "second"
    assert about.message_id == "second", "Flower changed flwr.app.Metadata: its number is not in '_message_id'"
    content = Array(dtype="uint8", shape=(3,), stype="confed", data=b"abc").deflate()
    assert get_object_head_values_from_object_content(content)[0] == Array.__qualname__
    assert json.loads(get_object_body(content, Array))["arraychunk_ids"] == [0]


def test_the_store_has_all_abstract_methods_and_no_others() -> None:
    from confed.engines.flower.objects import PieceStore
    from confed.engines.flower.private_api import ObjectStore

    assert not PieceStore.__abstractmethods__
    assert ObjectStore.__abstractmethods__ == {
        "preregister", "get_object_tree", "put", "get", "delete", "delete_objects_in_run", "clear", "__contains__",
        "__len__",
    }  # fmt: skip
