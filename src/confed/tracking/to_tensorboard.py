"""Tracked runs as event files of TensorBoard."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import path_of
from confed.results.run_files import read_json
from confed.tracking.backends import Sent
from confed.tracking.records import TrackedRun

MARK = "confed.json"  # beside the events: whose they are


def send(run: TrackedRun, place: str) -> Sent:
    """Event files in ``<place>/<project>/<group>/<name>``, with scalars, parameters and copies of the files."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    root = Path(place or "tensorboard")
    wanted = root
    for folder_name in filter(None, f"{run.project}/{run.group}/{run.name}".split("/")):
        wanted = path_of(wanted, folder_name)  # names come from files of others: none of them leaves the log folder
    folder = _folder(wanted, run.id)
    new = run.without(_logged(folder))
    begun = (folder / MARK).is_file()
    if new or not begun:
        with SummaryWriter(str(folder)) as writer:
            if not begun and run.parameters:
                events = writer._get_file_writer()  # `add_hparams` would begin a folder of its own
                for summary in hparams({**run.parameters, **run.tags}, {}):
                    events.add_summary(summary)
            for round, values in new.items():
                for metric, value in values.items():
                    writer.add_scalar(metric, value, round, walltime=run.times[round])
        write_atomically(folder / MARK, json.dumps({"id": run.id}).encode())
    for file in run.files:
        if not (folder / file.name).is_file() or (folder / file.name).read_bytes() != file.read_bytes():
            shutil.copyfile(file, folder / file.name)
    return Sent(sum(map(len, new.values())), str(root))


def _folder(wanted: Path, id: str) -> Path:
    """The wanted folder, or one beside it if another run of that name is there."""
    mark = wanted / MARK
    content = read_json(mark)
    mine = isinstance(content, Mapping) and content.get("id") == id
    return wanted.with_name(f"{wanted.name}-{id[:6]}") if mark.is_file() and not mine else wanted


def _logged(folder: Path) -> set[tuple[str, int]]:
    """Metrics and rounds that the folder's events have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    if not any(folder.glob("events.out.tfevents.*")):
        return set()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    result = set()
    for tag in events.Tags()["scalars"]:
        result |= {(tag, event.step) for event in events.Scalars(tag)}
    return result
