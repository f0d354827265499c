"""The package: layers, names and portability."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
import warnings
from graphlib import TopologicalSorter
from inspect import signature
from pathlib import Path

import pytest

import confed
from confed import registry
from confed.federation.algorithm import Algorithm
from confed.recipes.recipe import load_recipe, packaged_recipes
from confed.registry import datasets
from repository import ROOT, script_module
from source_trees import dotted, imports_of, nodes_of

SOURCE = ROOT / "src" / "confed"
FILES = sorted(SOURCE.rglob("*.py"))

# The layers of docs/architecture.md, from the bottom. A package imports from lower layers only, and of those what
# MAY_IMPORT lists; a package that is not named here fails.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("registry", "system", "federation", "losses", "metrics"),
    ("data", "privacy", "comparison"),
    ("algorithms", "models", "datasets", "engines", "recipes", "measures", "results"),
    ("tasks", "report", "tracking"),
    ("runs", "prepare", "testing"),
    ("studies", "inference", "deployment", "unlearning"),
    ("analysis", "api"),
    ("release",),
    ("cli",),
)
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
BELOW_RUNS = {package for packages in LAYERS[:4] for package in packages}

MAY_IMPORT: dict[str, set[str]] = {
    "registry": set(),
    "system": set(),
    "federation": set(),
    "losses": set(),
    "metrics": set(),
    "data": {"federation", "losses", "metrics"},
    "privacy": {"federation", "metrics"},
    "comparison": {"metrics", "system"},
    "results": {"federation", "registry", "system", "metrics", "data", "comparison"},
    "measures": {"registry", "federation"},
    "algorithms": {"federation", "losses", "privacy"},
    "models": {"federation", "data", "losses", "registry"},
    "datasets": {"data", "federation", "metrics", "registry"},
    "engines": {"federation", "privacy", "system"},
    "recipes": {"registry", "federation", "data"},
    "tasks": {"federation", "losses", "metrics", "models", "data", "registry"},
    "report": {"results", "comparison", "metrics", "privacy", "federation", "data", "system"},
    "tracking": {"results", "federation", "system"},
    "runs": BELOW_RUNS - {"report", "tracking"},
    "prepare": BELOW_RUNS,
    "testing": BELOW_RUNS,
    "studies": BELOW_RUNS - {"report", "tracking"} | {"runs"},
    "inference": BELOW_RUNS | {"runs"},
    "deployment": BELOW_RUNS | {"runs"},
    "unlearning": BELOW_RUNS - {"report", "tracking"} | {"runs"},
    "analysis": BELOW_RUNS | {"runs", "inference"},
    "api": BELOW_RUNS | {"runs", "studies", "inference", "testing"},
    "release": BELOW_RUNS | {"runs", "inference", "analysis", "deployment"},
    "cli": set(LAYER) - {"cli"},
}
ROOT_FILES = {"__init__.py", "py.typed", "registry.py"}
ENTRIES = {"__main__.py", "flare_apps.py", "flower_apps.py"}
"""`python -m confed`, and import paths of confed 0.1 that kits and apps name; these go with the next release."""

TRANSPORTS = {
    "flwr": ("engines/flower", "deployment"),
    "nvflare": ("engines/flare", "deployment/flare"),
    "ray": ("engines/ray",),
}

# An environment may lack it; its tests are skipped then.
OPTIONAL = {"nvflare", "ray"}

# Words that mean something else as well, and where.
OTHER_MEANINGS = {
    "local": None,  # the section of a recipe
    "robust": None,  # the protection of every method
    "central": {"report/report.py"},  # an entry of the glossary
}
NAMED = {
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
"""Methods that are named outside ``algorithms/``, where others ask for their traits."""

FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_NAMES = {"torch.load", "torch.save", "torch.manual_seed", "np.random.seed", "numpy.random.seed"}


def package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


HEAVY = ("transformers", "peft", "matplotlib", "typer", "scipy")


def test_importing_is_quick_and_loads_nothing_heavy() -> None:
    code = f"import confed, sys, time; print([m for m in {HEAVY} if m in sys.modules], time.process_time())"
    heavy, seconds = in_a_new_process(code).rsplit(maxsplit=1)
    assert heavy == "[]"
    assert float(seconds) < 2.5


def test_every_public_name_is_there_and_loads_nothing_heavy() -> None:
    code = (
        "import confed, json, sys\n"
        "missing = [name for name in confed.__all__ if getattr(confed, name, None) is None]\n"
        f"print(json.dumps([missing, [m for m in {HEAVY} if m in sys.modules]]))"
    )
    assert json.loads(in_a_new_process(code)) == [[], []]
    assert len(set(confed.__all__)) == len(confed.__all__)
    assert set(confed.__all__) <= set(dir(confed))
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        _ = confed.Manager


def test_federation_imports_only_torch_and_safetensors() -> None:
    for path in (SOURCE / "federation").glob("*.py"):
        for name in imports_of(path):
            allowed = name.split(".")[0] in {"torch", "safetensors", *sys.stdlib_module_names}
            # One optional optimiser, imported where a recipe asks for it.
            allowed |= path.name == "local.py" and name.split(".")[0] == "bitsandbytes"
            assert allowed or name.startswith("confed.federation."), f"{path.name} imports {name}"


def test_methods_import_only_the_core_the_losses_and_privacy() -> None:
    for path in (SOURCE / "algorithms").glob("*.py"):
        for name in imports_of(path):
            allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names}
            ours = ("confed.federation.", "confed.losses.", "confed.privacy.")
            assert allowed or name.startswith(ours), f"{path.name}: {name}"


def test_root_holds_the_registry_and_nothing_else() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == ROOT_FILES | ENTRIES
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} | {"registry"} == (
        set(LAYER)
    )
    assert set(MAY_IMPORT) == set(LAYER)
    for name, others in MAY_IMPORT.items():
        assert all(LAYER[other] < LAYER[name] for other in others), name


def test_packages_import_what_their_layer_may() -> None:
    for path in FILES:
        if path.parent == SOURCE and path.name in {"__init__.py", *ENTRIES}:
            continue  # public names and entries refer to everything
        for name in imports_of(path):
            if name.startswith("confed."):
                mine, other = package(path), name.split(".")[1]
                assert other == mine or other in MAY_IMPORT[mine], f"{path.relative_to(ROOT)} imports {name}"


def expanded(cell: str) -> set[str]:
    """The packages of "layers 1–3 but losses; runs, tasks" (layers count from 1)."""
    packages: set[str] = set()
    for part in cell.split(";"):
        among = re.fullmatch(r"layers 1–(\d)(?: but ([\w, ]+))?", part.strip())
        if among is None:
            packages |= set(re.findall(r"\w+", part))
        else:
            packages |= {name for names in LAYERS[: int(among[1])] for name in names}
            packages -= set(re.findall(r"\w+", among[2] or ""))
    return packages


def test_the_page_on_the_architecture_has_this_table_and_picture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert {name: int(layer) for layer, name, _ in rows} == {name: layer + 1 for name, layer in LAYER.items()}
    assert {name: expanded(cell) for _, name, cell in rows} == MAY_IMPORT
    assert script_module("docs/draw_architecture.py").check(), "run python docs/draw_architecture.py"


def test_only_transports_import_flower_flare_and_ray() -> None:
    for path in FILES:
        for name in imports_of(path):
            folders = TRANSPORTS.get(name.split(".")[0])
            where = path.relative_to(SOURCE).as_posix()
            assert folders is None or where.startswith(tuple(f"{folder}/" for folder in folders)), f"{where}: {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    graph = TopologicalSorter[str]()
    for module, path in modules.items():
        if module != "confed":
            named = imports_of(path)
            found = {name if name in modules else name.rpartition(".")[0] for name in named if name[:7] == "confed."}
            graph.add(module, *(found - {"confed", module}))
    graph.prepare()  # raises CycleError with the circle


def test_no_method_extends_another() -> None:
    names = registry.algorithms.names()
    assert {"local", "central", "fedavg", "fedprox", "fedavg_ft", "st", "fedp3"} <= set(names)
    for name in names:
        bases = registry.algorithms[name].__bases__  # type: ignore[attr-defined]
        assert all(base is Algorithm or base.__module__.startswith("confed.federation.families.") for base in bases)


def test_no_method_is_named_outside_algorithms() -> None:
    methods = set(registry.algorithms.names())
    for path in FILES:
        where = path.relative_to(SOURCE).as_posix()
        if where.startswith("algorithms/"):
            continue
        texts = {
            node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        modules = {".".join(name.split(".")[:3]) for name in imports_of(path) if name.startswith("confed.algorithms.")}
        excepted = {name for name, files in OTHER_MEANINGS.items() if files is None or where in files}
        assert {name for name in texts & methods | modules if (where, name) not in NAMED} <= excepted, where


def safe_loads(path: Path) -> list[ast.AST]:
    """The uses of ``torch.load`` that are allowed: in one file, and only with ``weights_only=True`` written out."""
    if path != SOURCE / "prepare" / "checkpoints.py":
        return []
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    safe = [node for node in calls if "weights_only=True" in map(ast.unparse, node.keywords)]
    return [node.func for node in safe if dotted(node.func) == "torch.load"]


def test_nothing_unpickles_and_nothing_touches_global_randomness() -> None:
    for path in FILES:
        named, safe = set(imports_of(path)), safe_loads(path)
        assert not FORBIDDEN & {name.split(".")[0] for name in named}, path
        assert not FORBIDDEN_NAMES & named, path
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node not in safe:
                assert dotted(node) not in FORBIDDEN_NAMES, f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", f"{path}:{node.value.lineno}"


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == confed.__version__


def test_recipes_are_package_data_and_valid() -> None:
    files = {path.stem for path in (SOURCE / "recipes").glob("*.toml")}
    assert files == set(packaged_recipes())
    assert "fedvqa_scenes" in files
    for name in files:
        data = tomllib.loads((SOURCE / "recipes" / f"{name}.toml").read_text())["data"]["name"]
        reads_files = "root" in signature(datasets[data]).parameters
        recipe = load_recipe(name, ["data.root=somewhere"] if reads_files else [])
        for method in recipe.methods:
            recipe.method(method)


def test_every_dependency_has_one_pinned_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [n for n in (ROOT / "constraints.txt").read_text().splitlines() if n and not n.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    assert len(pinned) == len(lines)
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {re.match(r"[\w\-.]+", item)[0].lower() for item in wanted} <= pinned  # type: ignore[index]


def test_every_module_can_be_imported_and_its_public_names_exist() -> None:
    for path in FILES:
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # typer imports names that click is about to drop
            warnings.simplefilter("ignore", FutureWarning)  # import paths of 0.1, kept for one release
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in OPTIONAL:
                    continue
                raise
        missing = [n for n in getattr(module, "__all__", ()) if not hasattr(module, n)]
        assert not missing, f"{name}: {missing}"


def test_what_one_world_of_examples_replaced_is_gone() -> None:
    gone = {
        "LabelDataset", "LabelExamples", "LabelSplit", "LabelPool", "LabelTable", "LabelData", "LabelReading", "Both",
        "LazyClients", "LazyTables", "Selected", "ModalTable", "CaptionTable", "federate_labels", "share_labels",
        "share_questions", "label_facts", "encode_labels", "pool_labels", "kinds_of", "lazy_clients", "with_turns",
        "answer_counts", "Dealing", "federate_chat",
    }  # fmt: skip
    for path in FILES:
        named = set(re.findall(r"^ *(?:def |class )(\w+)", path.read_text(), re.MULTILINE))
        assert not gone & named, path
    for name in ("labelled", "label_tables", "label_federate", "modal_tables", "caption_tables", "table_concatenation"):
        assert not (SOURCE / "data" / f"{name}.py").exists()


def test_what_records_and_views_replaced_is_gone() -> None:
    gone = {"VIEWS", "HEADLINES", "MEASURES", "_VIEWS", "_MEAN_OF", "is_shown", "label_value_of", "strict_scores"}
    for path in [path for folder in ("results", "report", "api") for path in (SOURCE / folder).rglob("*.py")]:
        named = set(re.findall(r"^(?:def |class )?(\w+)", path.read_text(), re.MULTILINE))
        assert not gone & named, path
    for path in FILES:  # a task declares its scores as part of its own protocol
        assert not re.search(r"^class (Measured|Counted)\b", path.read_text(), re.MULTILINE), path
    for folder in ("results", "report"):
        for name in ("headline.py", "traits.py", "deployed.py", "statistics"):
            assert not (SOURCE / folder / name).exists()
    # The content of summary.json is read by its keys in one file.
    reading = re.compile(r"\bsummary(?:\.content)?(?:\.get\(|\[)[\"']")
    for path in FILES:
        if path.parent.name in ("report", "tables", "figures", "sections", "html", "results", "comparison", "tracking"):
            assert path.name == "summary.py" or not reading.search(path.read_text()), path
