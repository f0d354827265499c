"""Check that a resumed run has the recipe, the data and the machine that it began with.

``begun.toml`` in the run folder is the recipe as it was when the first round began; ``begun.json`` are the processor
and the library versions of then, ``data.json`` the pictures that could not be read. These are left out before the first
round, so that one that is damaged or mended between two starts would change what is trained on and tested. Of
multi-label data the others are dealt to clients after that: it could change who owns what, and put training pictures
into tests.
"""

import hashlib
import json
import tomllib
from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.federation.checkpoint import write_atomically
from confed.models.hub_names import commit_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder
from confed.results.settings import flat
from confed.runs.summary import versions
from confed.system.processor import machine, machine_differences

if TYPE_CHECKING:
    from confed.runs.encode import RunData

INDIFFERENT = (
    "name", "run.engine", "run.address", "run.workers", "run.start_method", "run.threads", "run.device",
    "run.checkpoint_every", "run.checkpoint_seconds", "run.keep_checkpoints", "run.gallery", "run.modality_matrix",
    "run.features.keep", "run.features.memory", "run.features.disk", "run.device_data",
)  # fmt: skip
"""Settings with which a run may go on: they say how it is computed and shown, not what."""


def pinned(recipe: Recipe) -> Recipe:
    """The same recipe with ``model.revision``, where a model by name on a hub leaves it out."""
    model = recipe.sections["model"]
    if model.get("revision") != "":
        return recipe
    return _at_revision(recipe, commit_of(str(model.get("source", ""))))


def pinned_as(folder: RunFolder, recipe: Recipe) -> Recipe:
    """The same recipe with the commit and the clients at once that its run began with, where it leaves them open."""
    file = folder.begun if folder.begun.is_file() else folder.recipe
    if file.is_file() and recipe.run.batch_clients == "auto":
        recipe = recipe.with_run(batch_clients=stored_recipe(file).run.batch_clients)
    return at_commit_of(file, recipe)


def at_commit_of(file: Path, recipe: Recipe) -> Recipe:
    """The same recipe with the model's commit of a stored one, of a run or a study, where it leaves that open."""
    if not file.is_file() or recipe.sections["model"].get("revision") != "":
        return recipe
    return _at_revision(recipe, load_recipe(file).sections["model"].get("revision", ""))


def stored_recipe(file: Path) -> Recipe:
    """A run's recipe as it was stored; "auto" there is of a version or of sites that train clients one by one."""
    recipe = load_recipe(file)
    return recipe.with_run(batch_clients=1) if recipe.run.batch_clients == "auto" else recipe


def _at_revision(recipe: Recipe, revision: str | None) -> Recipe:
    if not revision:
        return recipe
    return replace(recipe, sections={**recipe.sections, "model": {**recipe.sections["model"], "revision": revision}})


def note_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Record of a run's recipe and machine at its start."""
    write_atomically(folder.begun, recipe.to_toml().encode())
    folder.write_json(folder.begun_with, _now())


def check_same_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Check of a recipe against the record of the run's start, if there is one."""
    if not folder.begun.is_file() or not (folder.summary.is_file() or any(folder.checkpoint.glob("round-*"))):
        return  # nothing was written down, or nothing is there that it would go on from
    changed = differing_settings(stored_recipe(folder.begun), recipe)
    if changed:
        keys = ", ".join(f"{key}={then}, now {now}" for key, (then, now) in changed.items())
        raise ValueError(
            f"{folder.root}: the run began with {keys}; a run does not change on the way. Put it back as it was, or "
            "begin a new run"
        )


def differing_settings(
    before: Recipe, now: Recipe, indifferent: Collection[str] = INDIFFERENT
) -> dict[str, tuple[Any, Any]]:
    """The settings, by key, that make two single-run recipes different runs; "unset" stands for a missing one."""
    settings_before, here = (flat(tomllib.loads(recipe.to_toml())) for recipe in (before, now))
    if here.get("model.revision") == "":  # left open: the commit that the other one was pinned to will do
        here["model.revision"] = settings_before.get("model.revision", "")
    if here.get("run.batch_clients") == "auto":  # left open: the number that the other one began with will do
        here["run.batch_clients"] = settings_before.get("run.batch_clients", "auto")
    if here.get("run.batch_clients", 1) != 1:  # clients at once round otherwise where features are kept
        indifferent = [key for key in indifferent if key != "run.features.keep"]
    differing: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*settings_before, *here]):
        pair = settings_before.get(key, "unset"), here.get(key, "unset")
        if key not in indifferent and pair[0] != pair[1]:
            differing[key] = pair
    return differing


def machine_note(folder: RunFolder) -> str:
    """Note on a resumed run's different instruction set or libraries; empty without differences."""
    try:
        before: Any = json.loads(folder.begun_with.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    differences = machine_differences(_now(), before if isinstance(before, dict) else {})
    if not differences:
        return ""
    what = ", ".join(f"{name} {values}" for name, values in differences.items())
    return f"goes on with {what} as it began: its numbers need not be those of a run in one go, to the last digit"


def _now() -> dict[str, Any]:
    return {"machine": machine(), "versions": versions()}


# Data that the run began with -----------------------------------------------------------------------------------

_MOST = 5  # names of pictures that are written down


def note_data(folder: RunFolder, run_data: "RunData") -> None:
    """Record of a new run's rows and unreadable pictures; nothing where no pictures are checked."""
    if left_out := _left_out(run_data):
        folder.write_json(folder.data, left_out)


def check_same_data(folder: RunFolder, run_data: "RunData") -> None:
    """Check of the data against the record of the run's start, if there is one."""
    left_out = _left_out(run_data)
    if not left_out or not folder.data.is_file():
        return
    before = json.loads(folder.data.read_text(encoding="utf-8"))
    if before == left_out:
        return
    lost, now = (
        f"{d['unreadable']} that cannot be read ({', '.join(d['first']) or 'none'})" for d in (before, left_out)
    )
    raise ValueError(
        f"{folder.root}: the data are not those that the run began with: then {before['rows']} examples and {lost}, "
        f"now {left_out['rows']} and {now}. Clients would have other examples, and be tested on others; "
        "put the files back as they were, or begin a new run"
    )


def _left_out(run_data: "RunData") -> dict[str, Any]:
    """Rows of all tables, and which pictures were left out of them; empty where no pictures were checked."""
    dataset = run_data.dataset
    labelled = [examples.labels.table for examples in dataset.everything if examples.labels is not None]
    if labelled and dataset.elsewhere is None:
        tables = list({id(table): table for table in labelled}.values())
        names = list(chain.from_iterable(table.unreadable for table in tables))
        rows, content = sum(map(len, tables)), [json.dumps([[*table.unreadable] for table in tables]).encode()]
        content += [table.names.values.tobytes() for table in tables]
    elif dataset.unreadable is not None:
        parts = dataset.everything
        names = sorted(dataset.unreadable.pictures)
        rows, content = sum(map(len, parts)), [json.dumps([names, [[*examples.names] for examples in parts]]).encode()]
    else:
        return {}
    digest = hashlib.sha256(b"".join(content)).hexdigest()
    return {"rows": rows, "unreadable": len(names), "first": sorted(names)[:_MOST], "digest": digest}
