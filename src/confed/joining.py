"""Joins a federation across machines: from a recipe and a client's name to a site that answers requests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from confed.engines.site import Site, client_named
from confed.leading import common_ground
from confed.preparing import check_device, prepare
from confed.recipe import Recipe, load_recipe

__all__ = ["open_site", "site_recipe"]


def site_recipe(source: str | Path, data: Sequence[str] = (), device: str | None = None) -> Recipe:
    """The federation's recipe with what is different at this site.

    Args:
        source: the recipe's file, or the name of a packaged one.
        data: ``key=value`` for the section ``[data]``, such as where the examples lie.
        device: where to compute; the recipe's by default.

    Raises:
        ValueError: the recipe or a key is faulty.
    """
    overrides = [f"data.{given}" for given in data]
    if device is not None:
        overrides.append(f"run.device={device}")
    recipe = load_recipe(source, overrides)
    if recipe.methods:
        raise ValueError(f"a federation runs one method, {recipe.name!r} is a study of several: {recipe.methods}")
    return recipe


def open_site(
    recipe: Recipe,
    client: str,
    private: Path,
    tell: Callable[[str], None] = lambda _: None,
    *,
    limit: float | None = None,
    over: Callable[[], None] = lambda: None,
) -> Site:
    """A client's end of a federation.

    Args:
        recipe: the federation's, with this site's data.
        client: which of the data's clients this site is.
        private: the folder for what must not leave this machine.
        tell: told in words what is being done.
        limit: epsilon that this site's updates may cost in all; None for no limit.
        over: called when the server says that the run is over.

    Raises:
        ValueError: faulty recipe or data, no such client, one without training examples, or a limit where clients add
            no noise.
    """
    torch.set_num_threads(recipe.run.threads)
    check_device(recipe)
    setup, materials = prepare(recipe)
    info = client_named(setup, client)
    if not info.num_examples:
        raise ValueError(f"there are no training examples of client {client!r} here, so that it cannot take part")
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    return Site(
        setup, info, private, common=common_ground(recipe, materials), audit=private / "audit.jsonl", tell=tell,
        limit=limit, over=over,
    )  # fmt: skip
