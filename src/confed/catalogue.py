"""What there is (methods, models, ... runs), what a dataset holds, and what is installed."""

import inspect
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confed import registry

if TYPE_CHECKING:
    from confed.data.examples import Examples, FederatedDataset

__all__ = ["KINDS", "describe", "diagnose", "listing"]

KINDS = ("algorithms", "models", "tasks", "datasets", "recipes", "runs")

_SHEET_COLUMNS, _SHEET_CELL = 6, 148


def listing(kind: str, contract: bool = False, runs: Path = Path("runs")) -> list[dict[str, Any]]:
    """What there is of one kind, a row each with the same keys.

    Args:
        kind: one of :data:`KINDS`.
        contract: for algorithms, a row per method and check of the contract instead: whether it applies, or
            why not.
        runs: the folder with runs and studies.

    Raises:
        ValueError: an unknown kind, or ``contract`` with another kind than algorithms.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if contract and kind != "algorithms":
        raise ValueError(f"only algorithms have a contract, got {kind!r}")
    if contract:
        from confed.testing import contract as checks

        return [
            {"name": name, "check": check, "verdict": verdict}
            for name in registry.algorithms.names()
            for check, verdict in checks(name)
        ]
    rows: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "algorithms": lambda: [_algorithm(name) for name in registry.algorithms.names()],
        "models": lambda: _constructors(registry.models, {"answers", "vocab_size", "seed"}),
        "tasks": lambda: _constructors(registry.tasks, {"answers", "types"}),
        "datasets": lambda: _constructors(registry.datasets, set()),
        "recipes": _recipes,
        "runs": lambda: _runs(runs),
    }
    return rows[kind]()


def _algorithm(name: str) -> dict[str, Any]:
    entry: Any = registry.algorithms[name]
    own = [f for f in fields(entry) if f.name != "accumulator"]  # every method has that one
    options = {f.name: "must be given" if f.default is MISSING else f.default for f in own}
    module = sys.modules[entry.__module__]
    return {
        "name": name,
        "label": entry.label or entry.__name__,
        "summary": _first_line(entry.__doc__),
        "options": _options(options),
        "source": _citation(module.__doc__ or ""),
    }


def _constructors(found: registry.Registry, skip: set[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in found.names():
        parameters = inspect.signature(found[name]).parameters.values()
        options = {
            p.name: "must be given" if p.default is inspect.Parameter.empty else p.default
            for p in parameters
            if p.name not in skip
        }
        rows.append({"name": name, "summary": _first_line(found[name].__doc__), "options": _options(options)})
    return rows


def _recipes() -> list[dict[str, Any]]:
    from confed.recipe import packaged_recipes

    rows: list[dict[str, Any]] = []
    for name in packaged_recipes():
        text = (files("confed.recipes") / f"{name}.toml").read_text(encoding="utf-8")
        content = tomllib.loads(text)
        comment = re.match(r"(?:#[^\n]*\n)*", text)
        words = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
        methods = content.get("study", {}).get("methods") or [content.get("algorithm", {}).get("name", "")]
        rows.append({"name": name, "summary": _first_sentence(words), "methods": ", ".join(methods)})
    return rows


def _runs(root: Path) -> list[dict[str, Any]]:
    from confed.results.folder import is_run, is_study, run_folders

    rows: list[dict[str, Any]] = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if is_study(folder):
                index = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
                states = [_state(run) for run in run_folders(folder)]
                done = states.count("finished")
                pending = next((s for s in states if s != "finished"), None)
                state = "finished" if pending is None else f"{done} of {len(states)} runs finished, then {pending}"
                row = {
                    "recipe": index["recipe"],
                    "methods": ", ".join(index["methods"]),
                    "seeds": index["seeds"],
                }
            elif is_run(folder):
                recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
                row = {
                    "recipe": _summary(folder).get("recipe", ""),
                    "methods": recipe["algorithm"]["name"],
                    "seeds": [recipe["run"]["seed"]],
                }
                state = _state(folder)
            else:
                continue
        except (ValueError, KeyError, TypeError, OSError) as error:
            row, state = {"recipe": "", "methods": "", "seeds": []}, f"unreadable: {error}"
        rows.append({"name": str(folder), **row, "state": state})
    return rows


def _summary(folder: Path) -> Mapping[str, Any]:
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _state(folder: Path) -> str:
    from confed.results.folder import read_jsonl

    if (folder / "summary.json").is_file():
        return "finished"
    if not (folder / "recipe.toml").is_file():
        return "not started"
    planned = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["run"]["rounds"]
    reached = max((line.get("round", 0) for line in read_jsonl(folder / "metrics.jsonl")), default=0)
    return f"at round {min(reached, planned)} of {planned}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _first_line(text: str | None) -> str:
    line = inspect.cleandoc(text or "").partition("\n")[0]
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", line)


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    return re.split(r"(?<=[a-z0-9)])(?<! al)\.\s", text + " ", maxsplit=1)[0].strip().rstrip(".:")


def _citation(text: str) -> str:
    """The first line after a module's title that names a year, as citations do."""
    paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(text).split("\n\n")]
    for paragraph in paragraphs:
        found = re.match(r".*?\b(?:19|20)\d\d\b", paragraph)
        if found:
            return found[0].replace('"', "")
    return ""


# Datasets ---------------------------------------------------------------------------------------------------


def describe(name: str, options: Sequence[str] = (), out: Path | None = None) -> dict[str, Any]:
    """Counts, answers and facts of a dataset, and a sheet of sample pictures.

    Args:
        name: the dataset's registered name.
        options: ``key=value`` of its constructor, values as in TOML.
        out: a PNG file for the sheet.

    Returns:
        ``name``, ``answers`` and ``words`` (how many), ``rows`` (``place``, ``role``, ``questions``,
        ``pictures``, ``answers``, ``most_frequent``), ``facts`` and, with ``out``, ``sheet``.

    Raises:
        ValueError: an unknown dataset or option, a value of the wrong type, or ``out`` is no PNG file.
    """
    from confed.schema import validate

    if out is not None and out.suffix.lower() != ".png":
        raise ValueError(f"out must be a file with the ending .png, got {out}")
    constructor = registry.datasets[name]
    values = validate(constructor, dict(_option(text) for text in options), "data", set())
    dataset: FederatedDataset = constructor(**values)
    parts = list(_parts(dataset))
    description = {
        "name": name,
        "answers": len(dataset.answers),
        "words": len(dataset.words),
        "rows": [_row(*part) for part in parts],
        "facts": dict(dataset.facts),
    }
    if out is not None:
        _sheet([(place, e) for place, role, e in parts if role in ("train", "unseen")], out)
        description["sheet"] = str(out)
    return description


def _option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"an option must be key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _parts(dataset: "FederatedDataset") -> "Iterable[tuple[str, str, Examples]]":
    for name, split in dataset.clients.items():
        yield name, "train", split.train
        yield name, "validation", split.validation
        yield name, "test", split.test
    for name, examples in dataset.unseen.items():
        yield name, "unseen", examples


def _row(place: str, role: str, examples: "Examples") -> dict[str, Any]:
    counts = Counter(examples.answers)
    answer, count = counts.most_common(1)[0] if counts else ("none", 0)
    return {
        "place": place,
        "role": role,
        "questions": len(examples),
        "pictures": len(set(np.ravel(examples.image_index).tolist())),
        "answers": len(counts),
        "most_frequent": f"{answer} ({count / max(len(examples), 1):.1%})",
    }


def _sheet(parts: "Sequence[tuple[str, Examples]]", out: Path) -> None:
    """A row of pictures per place, each with one question and its answer."""
    import textwrap

    from PIL import Image, ImageDraw

    text_height, cell = 48, _SHEET_CELL
    row_height = cell + text_height + 18
    sheet = Image.new("RGB", (_SHEET_COLUMNS * (cell + 6) + 6, len(parts) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (place, examples) in enumerate(parts):
        top = number * row_height
        draw.text((6, top + 3), place.encode("ascii", "replace").decode(), fill="black")
        first = np.reshape(examples.image_index, (len(examples), -1))[:, 0]  # of pairs
        rows = {int(picture): row for row, picture in reversed(list(enumerate(first)))}
        for column, row in enumerate(sorted(rows.values())[:_SHEET_COLUMNS]):
            left = 6 + column * (cell + 6)
            picture = Image.fromarray(examples.images[int(first[row])])
            sheet.paste(picture.resize((cell, cell), Image.Resampling.NEAREST), (left, top + 18))
            text = f"{examples.questions[row]} {examples.answers[row]}".encode("ascii", "replace").decode()
            lines = textwrap.wrap(text, 24, max_lines=3, placeholder=" ...")
            draw.multiline_text((left, top + 20 + cell), "\n".join(lines), fill="black", spacing=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out, format="PNG")


# The installation -------------------------------------------------------------------------------------------


def diagnose() -> dict[str, dict[str, str]]:
    """Versions, processors, memory, GPUs and packaged weights; what is missing says how to get it."""
    return {
        "system": _system(),
        "libraries": _libraries(),
        "extras": _extras(),
        "GPUs": _gpus(),
        "packaged weights": _weights(),
    }


def _system() -> dict[str, str]:
    import torch

    from confed.engines.workers import free_cores

    disk = shutil.disk_usage(Path.cwd())
    found = {
        "python": platform.python_version(),
        "operating system": platform.platform(),
        "cores": f"{free_cores()} of {os.cpu_count()} may be used",
        "threads of torch": str(torch.get_num_threads()),
        "memory": _memory(),
        "disk": f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} GiB here",
    }
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE"):
        found[name] = os.environ.get(name, "not set")
    if found["OMP_WAIT_POLICY"].upper() != "PASSIVE":
        found["OMP_WAIT_POLICY"] += " (PASSIVE keeps waiting threads from taking cores from other processes)"
    if found["HF_HUB_OFFLINE"] in ("not set", "0"):
        found["HF_HUB_OFFLINE"] += " (names on the hub may be downloaded; 1 forbids it and fails at once)"
    return found


def _memory() -> str:
    names = os.sysconf_names if hasattr(os, "sysconf") else {}
    if "SC_PHYS_PAGES" not in names:
        return "unknown on this system"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    free = f"{int(available[1]) / 2**20:.1f} GiB available of " if available else ""
    return f"{free}{total / 2**30:.1f} GiB"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _libraries() -> dict[str, str]:
    found = {"confed": version("confed")}
    for requirement in requires("confed") or ():
        if "extra ==" not in requirement:
            name = _package(requirement)
            found[name] = _version(name) or f"missing ({requirement}): pip install {name} -c constraints.txt"
    return found


def _extras() -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for requirement in requires("confed") or ():
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if extra:
            groups.setdefault(extra[1], []).append(_package(requirement))
    found: dict[str, str] = {}
    for extra, packages in sorted(groups.items()):
        have = {name: _version(name) for name in packages}
        missing = [name for name, installed in have.items() if installed is None]
        there = ", ".join(f"{name} {installed}" for name, installed in have.items() if installed)
        hint = f"missing {', '.join(missing)}: pip install '.[{extra}]' -c constraints.txt" if missing else ""
        found[extra] = "; ".join(filter(None, (there, hint)))
    return found


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"none": f"torch {torch.__version__} sees no GPU; runs use the processor"}
    found: dict[str, str] = {}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def _weights() -> dict[str, str]:
    from confed.models.pretrained import describe as metadata
    from confed.models.pretrained import packaged, weights_file
    from confed.pretraining import MINIS

    found: dict[str, str] = {}
    for name in MINIS:
        if not packaged(name):
            found[name] = (
                f"missing: give model.pretrained=FILE, made with `confed pretrain {name} --out FILE`, or false"
            )
            continue
        facts = metadata(weights_file(name))
        accuracy = facts.get("accuracy", {}).get("overall")
        planned, done = facts.get("settings", {}).get("epochs"), facts.get("epochs_done")
        parts = [f"{weights_file(name).stat().st_size / 2**20:.1f} MiB", f"{len(facts['words'])} words"]
        if accuracy is not None:
            parts.append(f"{accuracy:.1%} of held-out public questions right")
        if facts.get("start"):
            parts.append("started from vilt_mini's")
        if planned is not None and done != planned:
            parts.append(f"unfinished: {done} of {planned} epochs")
        found[name] = ", ".join(parts)
    return found
