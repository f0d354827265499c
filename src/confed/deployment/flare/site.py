"""A site of a federation over FLARE: FLARE's client, kept running, with this site's settings."""

import json
import threading
from pathlib import Path

from confed.deployment.flare.job import MemberSettings, write_settings
from confed.deployment.flare.processes import client_command, kept
from confed.deployment.flare.status import BulletinReader
from confed.federation.checkpoint import write_atomically
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.recipes.recipe import Recipe
from confed.system.events import Note, Progress, ignore

__all__ = ["join"]


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
    progress: Progress = ignore,
) -> None:
    """Takes part until told to stop.

    Args:
        recipe: the federation's, with this site's data.
        kit: this site's FLARE workspace.
        private: the folder for what must not leave this machine.
        stop: set by somebody else.
        site: which of the data's clients this is; None where FLARE calls it the same.
        epsilon: what this site's updates may cost in all; None for no limit.
        evaluations: see :func:`confed.deployment.site.open_site`.
        once: end when the server says that the run is over.
        progress: called with every progress event.

    Raises:
        ValueError: the kit is none, or the policy for evaluations is.
        RuntimeError: FLARE's client does not start.
    """
    try:
        config = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
        name, server = str(config["client"]["fqsn"]), str(config["servers"][0]["service"]["target"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{kit} is no FLARE workspace of a site: startup/fed_client.json: {error!r}") from error
    if evaluations is not None:
        EvaluationPolicy.parse(evaluations)  # here, and not in the process that FLARE starts
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    run = kit / "run"
    run.mkdir(exist_ok=True)
    write_atomically(run / "recipe.toml", recipe.to_toml().encode())
    write_settings(
        MemberSettings("run/recipe.toml", str(private.resolve()), site, epsilon=epsilon, evaluations=evaluations), kit
    )
    log, news = run / "flare.log", BulletinReader(run)
    news.begin()
    with kept(client_command(kit, name), log) as client:
        progress(Note(f"FLARE's client {name!r} dials {server}; what it says is in {log}"))
        # The end of a job's process before its job's would be a failure of the job.
        while not stop.wait(0.5) and not (once and news.outcome() and not client.jobs()):
            client.check()
            for text in news.notes():
                progress(Note(text))
        for text in news.notes():
            progress(Note(text))
