"""Tracking: names and values from a run's files, and tools that get each value once."""

import json
import os
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from command_line import confed
from confed import load_run, load_study
from confed.system.folder_lock import exclusive
from confed.tracking import follow
from confed.tracking.backends import BACKENDS, Backend, Sent, backend_of
from confed.tracking.follow import track
from confed.tracking.records import MANY_PLACES, Names, TrackedRun, tracked_runs
from refusals import refuses
from synthetic_study import CLIENTS, ROUNDS, SCENES, make_run, make_study


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trackio's folder, which it reads from the environment when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.setenv("WANDB_MODE", "offline")
        yield folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "fedavg")


def cut(folder: Path, rounds: int, to: Path) -> Path:
    """The same run, killed while it wrote the line after a round."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("summary.json", "predictions*"))
    for name in ("metrics.jsonl", "timings.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["round"] <= rounds]
        (to / name).write_text("".join(kept) + lines[-1][:20])
    return to


def events(folder: Path) -> dict[tuple[str, int], list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[tuple[str, int], list[float]] = {}
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            found.setdefault((tag, event.step), []).append(event.value)
    return found


def rows(database: Path, name: str) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    with sqlite3.connect(database) as connection:
        for step, metrics in connection.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (name,)):
            for metric, value in json.loads(metrics).items():
                found.setdefault((metric, step), []).append(value)
    return found


def stored(tool: str, at: Path, databases: Path, run: TrackedRun) -> dict[tuple[str, int], list[float]]:
    """What a tool has of a run, each value as often as it is there."""
    if tool == "tensorboard":
        return events(at / run.project / run.group / run.name)
    if tool == "trackio":
        return rows(databases / f"{run.project}.db", run.name)
    assert tool == "mlflow"
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{at}.db")
    number = client.get_experiment_by_name(run.project).experiment_id
    (found,) = client.search_runs([number])
    return {
        (key, metric.step): [metric.value]
        for key in found.data.metrics
        for metric in client.get_metric_history(found.info.run_id, key)
    }


def test_values_are_those_of_the_files(run: Path) -> None:
    (found,) = tracked_runs(run)
    assert (found.project, found.group, found.name, found.state) == ("fedvqa_scenes", "", "run", "finished")
    assert found.parameters["local.lr"] == 0.003
    assert found.parameters["model.trainable"] == "adapters"
    assert sorted(found.rounds) == list(range(ROUNDS + 1))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        values = found.rounds[line["round"]]
        if line["event"] == "round":
            assert values["train/loss"] == pytest.approx(sum(line["loss"].values()) / len(CLIENTS))
            assert values["train/loss/sports"] == line["loss"]["sports"]
            assert values["traffic/bytes_up"] == 4 * 1_200_000
        else:
            places = line["unseen"]
            assert values["validation/unseen/accuracy"] == pytest.approx(
                sum(places[place]["accuracy"] for place in SCENES) / 2
            )
            assert values["validation/personal/accuracy/school"] == line["personal"]["school"]["accuracy"]
            assert values["validation/global/ece"] == pytest.approx(0.05)
    summary = json.loads((run / "summary.json").read_text())
    assert found.rounds[ROUNDS]["test/personal_mean"] == summary["personal_mean"]
    assert found.rounds[ROUNDS]["test/global_unseen/home"] == summary["global_unseen"]["home"]
    assert not any(name.startswith("test/") for r in range(ROUNDS) for name in found.rounds[r])
    assert [file.name for file in found.files] == ["recipe.toml", "summary.json"]
    steps = [found.times[r + 1] - found.times[r] for r in range(1, ROUNDS)]
    assert steps == pytest.approx([6.0] * (ROUNDS - 1), abs=1e-3)  # 5 s of training, 1 s of evaluation


def test_many_clients_are_tracked_by_their_mean(run: Path) -> None:
    line = {"event": "round", "round": 1, "loss": {f"user {i}": 1.0 * i for i in range(MANY_PLACES + 1)}}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = tracked_runs(run)
    assert [name for name in found.rounds[1] if name.startswith("train/loss")] == ["train/loss"]
    assert found.rounds[1]["train/loss"] == MANY_PLACES / 2


def test_names_of_places_are_such_as_tools_take(run: Path) -> None:
    line = {"event": "round", "round": 1, "loss": {"a/b": 1.0, "São Paulo": 2.0, "50 %": 3.0, "nan": float("nan")}}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    names = [name for name in tracked_runs(run)[0].rounds[1] if name.startswith("train/loss/")]
    assert names == ["train/loss/a_x2F_b", "train/loss/São Paulo", "train/loss/50 _x25_"]


def test_run_is_known_again_by_what_it_began_with(run: Path, tmp_path: Path) -> None:
    (first,) = tracked_runs(run)
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere" / "run")
    assert tracked_runs(elsewhere)[0].id == first.id
    shutil.copyfile(run / "recipe.toml", run / "begun.toml")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe + "workers = 4\n")  # as for `confed resume`
    assert tracked_runs(run)[0].id == first.id
    (run / "begun.toml").write_text(recipe.replace("0.003", "0.03"))
    assert tracked_runs(run)[0].id != first.id
    assert tracked_runs(run, Names(name="other"))[0].id != first.id


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within the tools
@pytest.mark.parametrize("tool", BACKENDS)
def test_each_value_is_sent_once_and_resumed_runs_go_on(
    tool: str, run: Path, tmp_path: Path, databases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(BACKENDS[tool].package) is None:
        pytest.skip(f"{tool} is not installed")
    monkeypatch.chdir(tmp_path)
    at = tmp_path / "at"
    place = {"trackio": "", "mlflow": f"sqlite:///{at}.db"}.get(tool, str(at))
    names = Names(project=f"once_{tool}")
    (whole,) = tracked_runs(run, names)
    live = cut(run, 3, tmp_path / "live" / "run")
    (sent,) = track(live, tool, at=place, names=names)
    before = [r for r in whole.rounds if r <= (2 if BACKENDS[tool].whole_rounds else 3)]
    tested = {name for name in whole.rounds[ROUNDS] if name.startswith(("test/", "cost/"))}
    assert sent.state == "stopped"
    assert sent.values == sum(len(whole.rounds[r]) for r in before)
    assert next(track(live, tool, at=place, names=names)).values == 0
    shutil.copytree(run, live, dirs_exist_ok=True)  # the run went on to its end
    (sent,) = track(live, tool, at=place, names=names)
    assert sent.values == sum(map(len, whole.rounds.values())) - sum(len(whole.rounds[r]) for r in before)
    assert next(track(live, tool, at=place, names=names)).values == 0
    if tool != "wandb":  # whose offline files only its own service reads
        found = stored(tool, at, databases, whole)
        wanted = {(m, r): [pytest.approx(x)] for r, values in whole.rounds.items() for m, x in values.items()}
        assert found == wanted
        assert {(name, ROUNDS) for name in tested} <= set(found)


def test_password_of_a_tracking_address_is_not_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = MagicMock()
    mlflow.get_tracking_uri.return_value = "postgresql://ann:secret@host:5432/runs?x=a@b"
    found = MagicMock(data=MagicMock(metrics={}, params={}, tags={}))
    mlflow.MlflowClient.return_value.search_runs.return_value = [found]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    (tracked,) = tracked_runs(run)
    send = BACKENDS["mlflow"].load()
    assert send(tracked, "").where == "postgresql://host:5432/runs?x=a@b"
    assert send(tracked, "sqlite:////tmp/a@b.db").where == "sqlite:////tmp/a@b.db"
    mlflow.MlflowClient.assert_any_call("sqlite:////tmp/a@b.db")


@pytest.mark.parametrize(
    ("tool", "project"), [("tensorboard", "apart"), ("trackio", "apart"), ("trackio", "apart v1.0/x")]
)
def test_another_run_of_the_same_name_is_kept_apart(tool: str, project: str, tmp_path: Path, databases: Path) -> None:
    if find_spec(BACKENDS[tool].package) is None:
        pytest.skip(f"{tool} is not installed")
    place, names = ("" if tool == "trackio" else str(tmp_path / "at")), Names(project=project)
    for train in (400, 800):
        folder = make_run(tmp_path / str(train) / "run", "fedavg", train=train)
        assert next(track(folder, tool, at=place, names=names)).values > 100
        assert next(track(folder, tool, at=place, names=names)).values == 0


@pytest.mark.parametrize("names", [("../../victim", "g", "n"), ("p", "../..", "../victim"), ("{}/victim", "", "..")])
def test_names_of_others_stay_in_the_log_folder(names: tuple[str, str, str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from confed.tracking.to_tensorboard import send

    (tmp_path / "summary.json").write_text("{}")
    project, group, name = (text.format(tmp_path) for text in names)
    send(TrackedRun("id", project, group, name, "finished", files=[tmp_path / "summary.json"]), str(tmp_path / "a/at"))
    written = {file.relative_to(tmp_path).parts[:2] for file in tmp_path.rglob("*") if file.is_file()}
    assert written == {("summary.json",), ("a", "at")}


def test_damaged_mark_is_that_of_another_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from confed.tracking.to_tensorboard import send

    (tmp_path / "p/n").mkdir(parents=True)
    for number, mark in enumerate(("[]", "{")):
        (tmp_path / "p/n/confed.json").write_text(mark)
        send(TrackedRun(f"{number}-run-id", "p", "", "n", "finished"), str(tmp_path))
        assert (tmp_path / "p/n/confed.json").read_text() == mark
        assert (tmp_path / f"p/n-{number}-run-/confed.json").is_file()


def test_study_is_a_group_with_its_own_files(tmp_path: Path, databases: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = make_study(tmp_path / "five", seeds=1)
    (folder / "report.html").write_text("<p>report")
    sent = list(track(folder, "tensorboard", at=str(tmp_path / "at")))
    assert [s.name for s in sent][-2:] == ["five/central/seed-0", "five/study"]
    assert (tmp_path / "at/fedvqa_scenes/five/study/report.html").read_text() == "<p>report"
    assert (tmp_path / "at/fedvqa_scenes/five/fedp3/seed-0/recipe.toml").is_file()
    (folder / "report.html").write_text("<p>report again")
    list(track(folder, "tensorboard", at=str(tmp_path / "at")))
    assert (tmp_path / "at/fedvqa_scenes/five/study/report.html").read_text() == "<p>report again"
    assert not any(run.files for run in tracked_runs(folder, files=False))


def test_sweep_is_a_group_of_studies(tmp_path: Path) -> None:
    points = [{"settings": {"data.shards": str(n)}, "folder": f"shards-{n}"} for n in (1, 2)]
    for point in points:
        make_study(tmp_path / "sweep" / str(point["folder"]), seeds=1)
    index = {"recipe": "r", "over": "data.shards", "points": points, "references": [], "margin": 0.01}
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(index))
    found = tracked_runs(tmp_path / "sweep", files=False)
    assert [run.name for run in found][:2] == ["shards-1/local/seed-0", "shards-1/fedavg/seed-0"]
    assert len({run.id for run in found}) == len(found) == 10
    assert {run.group for run in found} == {"sweep"}


class Recorder:
    """A tool that remembers what it was given."""

    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []

    def __call__(self, run: TrackedRun, place: str) -> Sent:
        self.runs.append(run)
        return Sent(len(run.rounds), place)


@pytest.mark.parametrize("whole", [False, True])
def test_following_ends_with_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    tool = Recorder()
    monkeypatch.setitem(BACKENDS, "recorder", Backend("json", "", whole_rounds=whole))
    monkeypatch.setattr(Backend, "load", lambda self: tool)
    live = cut(run, 2, tmp_path / "live" / "run")
    holder = exclusive(live)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        """The first look finds nothing new; then a round comes, and then the end."""
        looks.append(seconds)
        if len(looks) == 2:
            shutil.rmtree(tmp_path / "more", ignore_errors=True)
            for name in ("metrics.jsonl", "timings.jsonl"):
                shutil.copyfile(cut(run, 3, tmp_path / "more") / name, live / name)
                shutil.rmtree(tmp_path / "more")
        if len(looks) == 3:
            shutil.copytree(run, live, dirs_exist_ok=True)
            holder.__exit__(None, None, None)

    monkeypatch.setattr(follow.time, "sleep", sleep)
    holder.__enter__()
    seen = [(sent.state, sent.round) for sent in track(live, "recorder", follow=True, every=0.5)]
    assert seen == [("running", 2), ("running", 3), ("finished", ROUNDS)]
    assert looks == [0.5, 0.5, 0.5]
    assert [max(given.rounds) for given in tool.runs] == ([1, 2, ROUNDS] if whole else [2, 3, ROUNDS])


def test_models_of_a_site_are_tracked_with_what_they_cost(run: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    site = shutil.copytree(run, private / "run", ignore=shutil.ignore_patterns("*.jsonl", "predictions*"))
    summary = {"algorithm": "fedavg", "rounds": 3, "seed": 0, "clients": ["sports"], "site": "sports", "recipe": "r"}
    (site / "summary.json").write_text(json.dumps(summary))
    lines = [{"round": r, "epsilon": 0.5 * r, "run": "x", "noise": 1.0} for r in (1, 2, 3)]
    (private / "privacy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = tracked_runs(site)
    assert {r: values["privacy/epsilon"] for r, values in found.rounds.items()} == {1: 0.5, 2: 1.0, 3: 1.5}
    assert found.over


def test_the_command_tracks_a_run_and_says_where_to_look(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "recorder", Backend("json", "", show="look at {where}"))
    monkeypatch.setattr(Backend, "load", lambda self: Recorder())
    assert confed("track", run, "--to", "recorder", "--at", "here", "--project", "mine", "--json") == 0
    (told,) = json.loads(capfd.readouterr().out)["runs"]
    assert told == {"project": "mine", "name": "run", "state": "finished", "round": 6, "values": 7, "where": "here"}
    assert confed("track", run, "--to", "recorder", "--at", "here") == 0
    assert "look at here" in capfd.readouterr().err


def test_runs_and_studies_are_tracked_from_python(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(BACKENDS, "recorder", Backend("json", ""))
    monkeypatch.setattr(Backend, "load", lambda self: recorder)
    (sent,) = load_run(run).track("recorder", at="here", project="mine", name="first")
    assert (sent.project, sent.name, sent.state, sent.round, sent.where) == ("mine", "first", "finished", 6, "here")
    folder = make_study(tmp_path / "study", seeds=1)
    names = {one.name for one in load_study(folder).track("recorder", group="ours", files=False)}
    assert names == {one.name for one in track(folder, "recorder", names=Names("", "ours", ""), files=False)}
    assert all(name.startswith("ours/") for name in names)
    refuses("the tracking tool must be one of", load_run(run).track, "excel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "excel"], "the tracking tool must be one of trackio, tensorboard, mlflow, wandb, got 'excel'"),
        (["--to", "absent"], "tracking with absent needs the package absent_tool: pip install absent_tool"),
        (["--to", "recorder", "--name", "one"], "a name is for a run on its own"),
    ],
)
def test_a_faulty_command_is_refused_in_one_line(
    tmp_path: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "excel" not in arguments:
        monkeypatch.setitem(BACKENDS, "absent", Backend("absent_tool", ""))
        monkeypatch.setitem(BACKENDS, "recorder", Backend("json", ""))
        monkeypatch.setattr(Backend, "load", lambda self: Recorder())
    assert confed("track", make_study(tmp_path / "study", seeds=1), *arguments) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert message in err
    assert Counter(err)["\n"] == 0


def test_folder_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "recorder", Backend("json", ""))
    monkeypatch.setattr(Backend, "load", lambda self: Recorder())
    refuses("is neither a run, a study nor a sweep", list, track(tmp_path, "recorder"))
    damaged = make_run(tmp_path / "run", "fedavg")
    (damaged / "summary.json").write_text("{")
    refuses(r"summary\.json", list, track(damaged, "recorder"))


def test_tool_that_cannot_be_imported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: TrackedRun, place: str) -> Sent:
        raise ImportError("cannot import name 'service'")

    monkeypatch.setitem(BACKENDS, "broken", Backend("json", ""))
    monkeypatch.setattr(Backend, "load", lambda self: broken)
    refuses("json is installed and cannot be imported: cannot import name 'service'", list, track(run, "broken"))


def test_missing_trackio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.tracking.backends.find_spec", lambda name: None)
    refuses(r"needs the package trackio: pip install '\.\[track\]' -c constraints\.txt", backend_of, "trackio")


def test_servers_of_trackio_are_refused(run: Path, databases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://localhost:1")
    refuses("TRACKIO_SERVER_URL is set", lambda: BACKENDS["trackio"].load()(tracked_runs(run)[0], ""))
    assert os.environ["TRACKIO_DIR"] == str(databases)
