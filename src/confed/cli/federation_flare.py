"""Verbs of a federation across machines over FLARE."""

from pathlib import Path
from typing import TYPE_CHECKING

from confed.cli.app import console, interruptible, notes, show

if TYPE_CHECKING:
    import threading

    from confed.deployment.provision import Federation
    from confed.engines.remote.sites import Timeouts
    from confed.engines.remote.update_bounds import Bounds
    from confed.recipes.recipe import Recipe


def serve(
    recipe: "Recipe", kit: Path | None, sites: Path | None, state: Path, timeouts: "Timeouts", wait: float, whole: bool,
    as_json: bool, bounds: "Bounds",
) -> None:  # fmt: skip
    """Server of a federation over FLARE: ``confed server --engine flare``."""
    need_flare()
    from confed.cli.federation_status import StatusPage
    from confed.deployment.flare.job import ServerSettings
    from confed.deployment.flare.server import serve
    from confed.deployment.provision import SITES, read_sites

    if kit is None or not (kit / "startup" / "fed_server.json").is_file():
        raise ValueError("with --engine flare, --tls must be the server's folder, with startup/fed_server.json in it")
    kit = kit.resolve()
    settings = ServerSettings(
        recipe="run/recipe.toml", state=str(state.resolve()), bulletin="run", sites=read_sites(sites or kit / SITES),
        minimum=timeouts.minimum, deadline=timeouts.deadline, away=timeouts.away, wait=wait, whole=whole,
        update_bound=bounds.update, weight_bound=bounds.weight,
    )  # fmt: skip
    with interruptible(state, "the same command"), StatusPage(console, state, quiet=as_json) as page:
        summary = serve(recipe, kit, settings, progress=page)
    show(state, [summary], as_json)


def join(
    recipe: "Recipe", kit: Path, private: Path, site: str, stop: "threading.Event", epsilon: float | None, once: bool,
    evaluations: str | None = None, patience: float = 3600.0,
) -> None:  # fmt: skip
    """Site of a federation over FLARE: ``confed client --engine flare``."""
    need_flare()
    from confed.deployment.flare.server import join

    join(
        recipe, kit.resolve(), private, stop, site=site or None, epsilon=epsilon, evaluations=evaluations, once=once,
        patience=patience, progress=notes(),
    )  # fmt: skip


def check_names(federation: "Federation") -> None:
    """Check that FLARE accepts the names of all sites."""
    need_flare()
    from confed.deployment.flare.provision import check_names

    check_names(federation)


def provision(folder: Path, federation: "Federation") -> None:
    """Folders of a federation over FLARE: ``confed federation new --engine flare``."""
    need_flare()
    from confed.deployment.flare.provision import provision_flare

    provision_flare(folder, federation)


def need_flare() -> None:
    from importlib.util import find_spec

    if find_spec("nvflare") is None:
        raise ValueError("a federation over FLARE needs it: pip install '.[flare]' -c constraints.txt")
