"""Run folder of a site after a federation: the final global model and the site's own, ready to use.

``private/run`` holds ``recipe.toml`` (with this site's data), ``models/global``, ``models/personal/<site>`` and a
``summary.json`` without results, so that :mod:`confed.inference.ask` and :mod:`confed.inference.export` take it as
any other run's.
"""

import json
import shutil
from pathlib import Path

from confed.engines.perform import Setup
from confed.federation.client_info import ClientInfo
from confed.federation.file_names import file_name
from confed.federation.params import Params
from confed.federation.state import ClientState
from confed.recipes.recipe import Recipe
from confed.results.folder import RunFolder
from confed.runs.summary import versions

KEPT = "run"
"""The run folder's name in a site's private folder."""


def write_site_run(
    private: Path, recipe: Recipe, setup: Setup, client: ClientInfo, shared: Params, state: ClientState
) -> Path:
    """Write the run folder of a site; it appears only when it is complete.

    An earlier one of the same recipe is replaced, and one of another recipe set aside as ``run-2``, ``run-3`` ...
    """
    target, unfinished = private / KEPT, private / f"{KEPT}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    folder = RunFolder.create(unfinished, recipe.to_toml())
    given = setup.algorithm.initial_private(shared)
    if setup.algorithm.global_model != "none":
        folder.write_tensors(folder.models / "global" / "trained.safetensors", {**shared, **given})
    if setup.keep_personal:
        kept, own = state.tensors.get("private", {}), state.tensors.get("personal")
        # As in the simulator: who never took part has what the server would send.
        personal = {**shared, **kept, **given} if own is None else {**kept, **own}
        folder.write_tensors(folder.models / "personal" / file_name(client.id) / "trained.safetensors", personal)
    folder.write_json(
        folder.summary,
        {
            "algorithm": recipe.sections["algorithm"]["name"],
            "label": setup.algorithm.title,
            "recipe": recipe.name,
            "seed": setup.seed,
            "rounds": setup.rounds,
            "clients": [client.id],
            "site": client.id,
            "global_model": setup.algorithm.global_model,
            "versions": versions(),
            "notes": ["models of one site of a federation across machines; results are in the server's run folder"],
        },
    )
    _make_room(target, folder.recipe.read_bytes())
    unfinished.replace(target)
    return target


def _make_room(target: Path, recipe: bytes) -> None:
    """Removes an earlier run folder of the same recipe, and sets aside that of another one."""
    if not target.exists():
        return
    before = target / "recipe.toml"
    if before.is_file() and before.read_bytes() != recipe:
        number = 2
        while (aside := target.with_name(f"{target.name}-{number}")).exists():
            number += 1
        target.replace(aside)
    else:
        shutil.rmtree(target)


def site_of(private: Path) -> tuple[Path, str] | None:
    """The run folder in a site's private folder, and the site's name; None where this is no such folder."""
    if not private.is_dir() or (private / "recipe.toml").is_file():
        return None
    summary = private / KEPT / "summary.json"
    if summary.is_file() and "site" in (content := json.loads(summary.read_text(encoding="utf-8"))):
        return private / KEPT, str(content["site"])
    if (private / "audit.jsonl").is_file() and (private / "state").is_dir():
        raise ValueError(
            f"{private} is a site's folder without final models yet: they come with the last evaluation of the run (a "
            "server that keeps a part of the model sends none without --whole)"
        )
    return None
