"""Tracked runs in the local databases of Trackio."""

import io
import os
from contextlib import redirect_stdout

from confed.tracking.backends import Sent
from confed.tracking.records import TrackedRun

ID = "confed_run"  # key of the configuration that says which run it is: Trackio finds runs by name


def send(run: TrackedRun, place: str) -> Sent:
    """A run in the project's SQLite database, with its parameters, and its files as a versioned artifact."""
    for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        if os.environ.get(key):
            raise ValueError(
                f"{key} is set: runs are tracked in a local database; unset it, and copy with `trackio sync`"
            )
    if place:
        os.environ["TRACKIO_DIR"] = place  # read when the module is imported
    import trackio  # pyright: ignore[reportMissingImports]
    from trackio.utils import TRACKIO_DIR  # pyright: ignore[reportMissingImports]

    with redirect_stdout(io.StringIO()):
        name = _name(run)
        new = run.without(_logged(run.project, name))
        tracked = trackio.init(
            run.project, name, run.group or None, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
            config={**run.parameters, **run.tags, ID: run.id},
        )  # fmt: skip
        for round, values in new.items():
            tracked.log(values, step=round)
        if run.files and run.over:
            artifact = trackio.Artifact(f"confed-{run.id}", "run", description=name)
            for file in run.files:
                artifact.add_file(file, name=file.name)
            tracked.log_artifact(artifact)  # the same content makes no new version
        trackio.finish()  # now, and not at the end of the process, where it would write to standard output
    return Sent(sum(map(len, new.values())), str(TRACKIO_DIR))


def _name(run: TrackedRun) -> str:
    """Name in the project, with a part of the digest where another run has it."""
    import trackio  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    name = run.title
    if not SQLiteStorage.get_project_db_path(run.project).exists():  # the list of projects has names of files
        return name
    owners = [(tracked.config or {}).get(ID) for tracked in trackio.Api().runs(run.project) if tracked.name == name]
    others = {owner for owner in owners if owner} - {run.id}  # a run without metrics has no configuration
    return f"{name}-{run.id[:6]}" if others and run.id not in owners else name


def _logged(project: str, name: str) -> set[tuple[str, int]]:
    """Metrics and rounds that the database has."""
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    result = set()
    for line in SQLiteStorage.get_logs(project, name):
        result |= {(metric, int(line["step"])) for metric in line}
    return result
