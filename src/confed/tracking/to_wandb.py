"""Tracked runs in Weights & Biases, online or in offline folders for ``wandb sync``."""

import json
import os
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.results.run_files import read_json
from confed.tracking.backends import Sent
from confed.tracking.records import TrackedRun

KEPT = "confed.json"
"""Id of a run -> the last round written, and whether the run was over; beside offline runs, which cannot be asked."""


def send(run: TrackedRun, place: str) -> Sent:
    """A run with the digest as its id, so that it goes on where it was; a round is logged once and as a whole."""
    import wandb  # pyright: ignore[reportMissingImports]

    folder = Path(place or os.environ.get("WANDB_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    written = _written(folder)
    last, complete = written.get(run.id, (-1, False))
    offline = wandb.setup().settings.mode == "offline"
    if offline and last >= max(run.rounds, default=-1) and (complete or not run.over):
        return Sent(0, str(folder / "wandb"))
    try:
        tracked = wandb.init(
            project=run.project, group=run.group or None, name=run.name, id=run.id, resume="allow", dir=str(folder),
            config={**run.parameters, **run.tags}, reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )  # fmt: skip
    except wandb.errors.UsageError as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"wandb: {what} (or WANDB_MODE=offline, and later `wandb sync`)") from error
    first = last + 1 if offline else tracked.step
    new = {round: values for round, values in run.rounds.items() if round >= first}
    for round, values in new.items():
        tracked.log(dict(values), step=round)
    if run.files and run.over:
        artifact = wandb.Artifact(f"confed-{run.id}", "run")
        for file in run.files:
            artifact.add_file(str(file), name=file.name)
        tracked.log_artifact(artifact)  # the same content makes no new version
    tracked.finish(exit_code=1 if run.state == "failed" else 0)
    if offline:
        written[run.id] = (max(new, default=last), run.over)
        write_atomically(folder / "wandb" / KEPT, json.dumps(written).encode())
    return Sent(sum(map(len, new.values())), str(folder / "wandb") if offline else str(tracked.url))


def _written(folder: Path) -> dict[str, tuple[int, bool]]:
    content = read_json(folder / "wandb" / KEPT)
    return {str(id): (int(last), bool(over)) for id, (last, over) in (content or {}).items()}
