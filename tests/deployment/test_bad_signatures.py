"""A site that signs secure aggregation with another key than the list has, led as `confed server` leads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from confed.deployment.flower_app import apps
from confed.deployment.provision import SITES, make_key, read_sites, write_sites
from confed.deployment.server import run_server
from confed.deployment.site import signatures_by_list
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import Timeouts
from confed.recipes.recipe import Recipe
from confed.runs.run import run
from led_recipe import recipe_of

FOUR = ("warm", "cold", "both", "late")


def signing_grid(recipe: Path, root: Path, liar: str) -> LoopbackGrid:
    """Four sites with keys; the list of one of them has another key for it than everybody else's."""
    keys = {name: make_key(root / f"{name}.key") for name in FOUR}
    write_sites(root / SITES, keys)
    (root / f"{liar}.key").unlink()
    write_sites(root / "liars.json", keys | {liar: make_key(root / f"{liar}.key")})
    _, client = apps(recipe)
    configs: dict[int, dict[str, bool | float | int | str]] = {
        number: {
            "site": name, "private": str(root / name), "key": str(root / f"{name}.key"),
            "members": str(root / ("liars.json" if name == liar else SITES)),
        }
        for number, name in enumerate(FOUR)
    }  # fmt: skip
    return LoopbackGrid(dict.fromkeys(configs, client), configs)


def led(recipe: Recipe, root: Path, checked: bool) -> dict[str, Any]:
    """A run of the server with the four sites, with and without its check of signatures."""
    root.mkdir()
    (file := root / "recipe.toml").write_text(recipe.to_toml())
    grid = signing_grid(file, root, "late")
    signatures = signatures_by_list(recipe, read_sites(root / SITES)) if checked else None
    timeouts = Timeouts(minimum=3, interval=1e-3)
    return run_server(recipe, root / "state", FlowerTransport(grid), timeouts=timeouts, signatures=signatures)


def test_a_bad_signature_is_its_sites_error_alone(tmp_path: Path) -> None:
    of_four = ("data.name=toy_federation:squares_of_four", "run.evaluate_every=0", "run.controls=none")
    summed = recipe_of("fedavg", *of_four, "algorithm.secure_sum.colluders=1")
    with pytest.warns(UserWarning, match="'late' is left out of secure aggregation: the keys of 'late' are not"):
        summary = led(summed, tmp_path / "checked", checked=True)
    said = "ValueError: update refused: the keys of 'late' are not signed by the key in the list of members"
    assert summary["errors"] == [{"round": r, "client": "late", "error": said} for r in (1, 2)]
    found = load_file(tmp_path / "checked" / "state" / "models" / "global" / "trained.safetensors")
    run(recipe_of("fedavg", *of_four, 'run.without=["late"]'), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "models" / "global" / "trained.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.allclose(tensor, plain[name], atol=1e-4) for name, tensor in found.items())
    # The other sites check it too: where the server does not, no site goes on.
    with pytest.raises(RuntimeError, match="needs 3 clients, and 1 are left after 'secure_shares'"):
        led(summed, tmp_path / "unchecked", checked=False)
