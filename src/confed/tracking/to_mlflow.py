"""Tracked runs in MLflow's tracking store."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from confed.system.plain_text import without_password
from confed.tracking.backends import Sent
from confed.tracking.records import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]


ID, FILES = "confed.run", "confed.files"  # tags: which run it is, and a digest of its files

MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 6000
"""Entries of one request, and characters of a parameter, that MLflow takes."""

STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "running": "RUNNING"}


def send(run: TrackedRun, place: str) -> Sent:
    """A run in the experiment of the project's name, with parameters, metrics and artifacts."""
    import mlflow  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

    client = mlflow.MlflowClient(place or None)
    run_info = _find(client, run)
    id, logged = run_info.info.run_id, set()
    for key in run_info.data.metrics:
        logged |= {(key, metric.step) for metric in client.get_metric_history(id, key)}
    new = run.without(logged)
    parameters = [Param(k, str(v)[:LONGEST]) for k, v in run.parameters.items() if k not in run_info.data.params]
    for some in _parts(parameters, MOST_PARAMETERS):
        client.log_batch(id, params=some)
    metrics = []
    for round, values in new.items():
        metrics += [Metric(metric, value, int(1000 * run.times[round]), round) for metric, value in values.items()]
    for some in _parts(metrics, MOST_METRICS):
        client.log_batch(id, metrics=some)
    content = blake2b(b"".join(file.read_bytes() for file in run.files), digest_size=8).hexdigest()
    if run.files and run_info.data.tags.get(FILES) != content:
        for file in run.files:
            client.log_artifact(id, str(file))
        client.set_tag(id, FILES, content)
    if run_info.info.status != STATES[run.state]:
        client.update_run(id, STATES[run.state])
    return Sent(len(metrics), without_password(place or mlflow.get_tracking_uri()))


def _find(client: "MlflowClient", run: TrackedRun) -> Any:
    """The run with this digest, new if there is none."""
    experiment = client.get_experiment_by_name(run.project)
    number = experiment.experiment_id if experiment else client.create_experiment(run.project)
    matches = client.search_runs([number], f"tags.`{ID}` = '{run.id}'", max_results=1)
    if matches:
        return matches[0]
    return client.create_run(number, tags={**run.tags, "group": run.group, ID: run.id}, run_name=run.title)


def _parts(entries: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), most):
        yield entries[start : start + most]
