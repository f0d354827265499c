"""Site of a federation over FLARE: FLARE's client, kept running, with this site's settings."""

import json
import threading
import time
from pathlib import Path

from confed.deployment.flare.job import ENDING, SiteSettings, StatusReader, write_settings
from confed.deployment.flare.server import client_command, supervised
from confed.engines.flare.transport import MEMBER
from confed.federation.checkpoint import write_atomically
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.recipes.recipe import Recipe
from confed.system.events import Note, Progress, ignore
from confed.system.folder_lock import exclusive


def join(
    recipe: Recipe,
    kit: Path,
    private: Path,
    stop: threading.Event,
    *,
    site: str | None = None,
    epsilon: float | None = None,
    evaluations: str | None = None,
    once: bool = False,
    patience: float = 3600.0,
    progress: Progress = ignore,
) -> None:
    """Participation in a federation over FLARE until told to stop.

    Where FLARE's client does not start, a RuntimeError has the end of its output. The workspace's folder ``run`` is
    locked meanwhile, and a job's process locks the private folder: a ValueError says which other process has one.
    """
    try:
        config = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
        name, server = str(config["client"]["fqsn"]), str(config["servers"][0]["service"]["target"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{kit} is no FLARE workspace of a site: startup/fed_client.json: {error!r}") from error
    with exclusive(kit / "run"):
        with exclusive(private, ENDING):
            pass  # a job's process locks it; who works there already is said before FLARE starts
        _join(recipe, kit, private, stop, name, server, site, epsilon, evaluations, once, patience, progress)


def _join(
    recipe: Recipe, kit: Path, private: Path, stop: threading.Event, name: str, server: str, site: str | None,
    epsilon: float | None, evaluations: str | None, once: bool, patience: float, progress: Progress,
) -> None:  # fmt: skip
    """:func:`join` with both folders free; ``name`` and ``server`` are FLARE's."""
    if evaluations is not None:
        EvaluationPolicy.parse(evaluations)  # here, and not in the process that FLARE starts
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    if (missing := missing_class(kit)) is not None:
        progress(Note(missing))
    run = kit / "run"
    run.mkdir(exist_ok=True)
    write_atomically(run / "recipe.toml", recipe.to_toml().encode())
    write_settings(
        SiteSettings("run/recipe.toml", str(private.resolve()), site, epsilon=epsilon, evaluations=evaluations), kit
    )
    log, news = run / "flare.log", StatusReader(run)
    news.begin()
    with supervised(client_command(kit, name), log) as client:
        busy = time.monotonic()
        progress(Note(f"FLARE's client {name!r} dials {server}; what it says is in {log}"))
        # The end of a job's process before its job's would be a failure of the job.
        while not stop.wait(0.5) and not (once and news.outcome() and not client.jobs()):
            client.check()
            busy = time.monotonic() if not once or client.jobs() else busy
            if time.monotonic() - busy >= patience:
                raise RuntimeError(f"no run at {server} for {patience:g} s: it may be over")
            for text in news.notes():
                progress(Note(text))
        for text in news.notes():
            progress(Note(text))


def missing_class(kit: Path) -> str | None:
    """Deprecation line for a workspace that does not allow the class which jobs of the next release name."""
    path = kit / "local" / "resources.json"
    try:
        resources = json.loads(path.read_text(encoding="utf-8"))
        allowed = resources["class_allow_list"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(allowed, list) or MEMBER in allowed:
        return None
    return (
        f"deprecated: class_allow_list in {path} has names of confed 0.1 only, which jobs of the next release do not "
        f"use; add {MEMBER!r} to it"
    )
