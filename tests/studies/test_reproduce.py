"""Published results, written, read and run again: equal bits, within the interval, or different and where."""

import functools
import json
import math
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import confed
from command_line import Capture, Patch, refusal, refused
from command_line import confed as command
from confed.cli.tables import show_verdict
from confed.results.runs import RunResults, load
from confed.results.sweep import MODELS, Point, Sweep, write_sweep_index
from confed.studies.published import TABLE, Published, read_published, same, write_rows
from confed.studies.reproduce import Figure, Verdict, judge, repeat
from confed.studies.runner import run_study
from confed.studies.study import free_folder, open_study
from refusals import refuses
from repository import ROOT
from tiny_runs import TINY

NAME = "fedvqa_scenes-fedavg"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "study"
    recipe = confed.load_recipe("fedvqa_scenes", {**TINY, "run.rounds": 2}).with_rows(["fedavg"])
    open_study(recipe, folder, [0, 1], side_by_side=False)
    run_study(folder)
    return folder


@pytest.fixture(scope="module")
def results(study: Path) -> Path:
    folder = study.parent / "results"
    write_rows(load(study), folder)
    return folder


@pytest.fixture
def file(results: Path, tmp_path: Path) -> Path:
    """A results file that may be changed."""
    return Path(shutil.copytree(results, tmp_path / "results")) / f"{NAME}.json"


@pytest.fixture(scope="module")
def repeated(results: Path, study: Path) -> confed.Run:
    published = read_published(str(results / f"{NAME}.json"))
    verdict = repeat(published, 1, study.parent / "again")
    assert (verdict.word, verdict.where, verdict.causes) == ("equal bits", (), ())
    assert verdict.compared == ("history", "predictions", "models")
    return confed.load_run(verdict.folder)


@pytest.fixture(scope="module")
def run(repeated: confed.Run) -> RunResults:
    """The repetition of seed 1."""
    (run,) = load(repeated.folder).runs
    return run


def changed(file: Path, change: Callable[[dict[str, Any]], object], method: str = "") -> Published:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return read_published(str(file), method)


def test_row_has_every_seed_and_its_statistics(study: Path, results: Path) -> None:
    row = json.loads((results / f"{NAME}.json").read_text())
    values = [
        json.loads((study / f"fedavg/seed-{seed}/summary.json").read_text())["global_seen_mean"] for seed in (0, 1)
    ]
    middle, sd = sum(values) / 2, abs(values[0] - values[1]) / math.sqrt(2)
    found, t = row["metrics"]["global_seen_mean"], 12.706204736432095  # Student's t, one degree of freedom, 97.5%
    assert (found["mean"], found["sd"]) == pytest.approx((middle, sd))
    assert found["interval"] == pytest.approx([middle - t * sd / math.sqrt(2), middle + t * sd / math.sqrt(2)])
    assert found["one_run"] == pytest.approx([middle - t * sd * math.sqrt(1.5), middle + t * sd * math.sqrt(1.5)])
    assert (row["method"], row["label"], row["seeds"]) == ("fedavg", "FedAvg", [0, 1])
    assert row["resolved"]["data"]["train"] == 6
    assert row["commands"] == {"repeat": f"confed reproduce {NAME}.json"}
    assert set(row["runs"][0]["digests"]) == {"code", "packages", "data", "history", "predictions", "models"}
    assert row["runs"][0]["digests"]["data"] != row["runs"][1]["digests"]["data"]  # another seed draws other noise
    assert row["packages"]["torch"] == row["runs"][0]["versions"]["torch"]


def test_paired_predictions_lie_beside(study: Path, results: Path) -> None:
    published = read_published(str(results / f"{NAME}.json"))
    for seed in (0, 1):
        there = load_file(study / f"fedavg/seed-{seed}/predictions.safetensors")
        assert set(published.predictions[seed]) == set(there)
        assert all(np.array_equal(values, published.predictions[seed][key]) for key, values in there.items())


def test_single_runs_interval_is_over_examples(study: Path) -> None:
    folder = study / "fedavg/seed-0"
    scores = [v for k, v in load_file(folder / "predictions.safetensors").items() if k.startswith("global/")]
    scores = [v.astype(float) for v in scores if v.dtype == np.float32]
    error = math.sqrt(sum(v.var(ddof=1) / len(v) for v in scores)) / len(scores)
    figure = read_published(str(folder)).row["metrics"]["global_seen_mean"]
    assert figure["interval"] is None
    assert np.diff(figure["one_run"])[0] == pytest.approx(2 * 1.959963984540054 * error)


def test_values_within_the_interval_have_the_first_difference(file: Path, run: RunResults) -> None:
    def change(row: dict[str, Any]) -> None:
        run = row["runs"][1]
        run["digests"]["history"] = run["digests"]["predictions"] = "0"
        line = next(line for line in run["history"] if line["event"] == "round" and line["round"] == 2)
        line["digest"], line["values"]["loss"]["cold"] = "0", 9.5
        run["figures"]["global_seen_mean"] += 1e-3
        row["metrics"]["global_seen_mean"]["one_run"] = [0.0, 1.0]
        run["machine"]["instructions"] = "ABACUS"
        row["packages"]["numpy"] = "0.1"

    predictions = load_file(file.with_suffix(".safetensors"))
    predictions["seed-1/global/warm/prediction"] = predictions["seed-1/global/warm/prediction"] + 1
    save_file(predictions, file.with_suffix(".safetensors"))
    digest = sha256((file.with_suffix(".safetensors")).read_bytes()).hexdigest()
    published = changed(file, lambda row: (change(row), row["predictions"].update(sha256=digest)))
    verdict = judge(published, run)
    assert verdict.word == "within the interval"
    loss = run.records.by_round("training", "loss")[2]["cold"]
    assert verdict.where[0] == f"first in round 2 (training): loss of 'cold' {loss!r}, published 9.5"
    assert verdict.where[1] == "predictions of global/warm: 4 of 4 examples"
    assert verdict.where[2].startswith("global_seen_mean: ")
    assert any(cause.startswith("instructions: ") and cause.endswith("not ABACUS") for cause in verdict.causes)
    assert any(cause.startswith("numpy: ") and cause.endswith("not 0.1") for cause in verdict.causes)


def test_value_outside_the_interval_is_different(file: Path, run: RunResults) -> None:
    def change(row: dict[str, Any]) -> None:
        row["runs"][1]["figures"]["global_seen_mean"] = 0.95
        row["metrics"]["global_seen_mean"].update(mean=0.95, one_run=[0.9, 1.0])
        row["runs"][1]["digests"]["data"] = row["runs"][1]["digests"]["code"] = "0"

    verdict = judge(changed(file, change), run)
    assert verdict.word == "different"
    assert [name for name, figure in verdict.figures.items() if not figure.inside] == ["global_seen_mean"]
    assert verdict.causes == ("data: not the same examples", "confed: not the same source code")


def test_bits_alone_are_no_equality_where_no_interval_is_known(file: Path, run: RunResults) -> None:
    def change(row: dict[str, Any]) -> None:
        row["runs"][1]["digests"]["models"] = "0"
        for figure in row["metrics"].values():
            figure["one_run"] = None

    verdict = judge(changed(file, change), run)
    assert (verdict.word, verdict.where[:-1]) == ("different", ("trained models: other bits",))
    assert verdict.where[-1].startswith("no figure has an interval in which another run is expected")
    assert all(figure.inside for figure in verdict.figures.values())  # equal, and no reason to call them outside


def test_a_figure_without_an_interval_is_compared_by_its_digits(file: Path, run: RunResults, capfd: Capture) -> None:
    def change(row: dict[str, Any]) -> None:
        row["runs"][1]["digests"]["models"] = "0"
        row["metrics"]["personal_worst"]["one_run"] = None
        row["metrics"]["global_seen_mean"].update(mean=0.5, one_run=[0.0, 1.0])
        row["runs"][1]["figures"]["personal_worst"] += 0.25

    verdict = judge(changed(file, change), run)
    assert verdict.word == "within the interval"  # of those that are judged
    judged = {name: figure.inside for name, figure in verdict.figures.items()}
    assert judged.pop("personal_worst") is None
    assert all(judged.values())
    show_verdict(verdict)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.strip().startswith("personal_worst ")]
    assert line.rstrip().endswith("– (not judged)")
    assert [Figure(0.123, found, None, digits=3).inside for found in (0.12349, 0.1236, None)] == [True, None, False]


@pytest.mark.parametrize(
    ("published", "found", "digits", "expected"),
    [
        # half a unit of the last digit, whatever the first digit is
        (0.9512, 0.95124, 4, True), (0.9512, 0.95126, 4, False), (0.9512, 0.95085, 4, False),
        (0.1001, 0.10006, 4, True), (0.1001, 0.10016, 4, False), (12.5, 12.549, 3, True), (12.5, 12.56, 3, False),
        (-0.9512, -0.95126, 4, False), (0.0, 0.0, 4, True), (0.0, 1e-12, 4, False), (math.inf, math.inf, 4, True),
        (math.inf, 1.0, 4, False), (0.5, None, 4, False), (0.1 + 0.2, 0.3, None, False),
    ],
)  # fmt: skip
def test_figures_are_equal_to_half_a_unit_of_the_last_digit(
    published: float, found: float | None, digits: int | None, expected: bool
) -> None:
    assert same(published, found, digits) is expected


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda run: run["digests"].clear(), "equal figures"),
        (lambda run: (run["digests"].clear(), run["figures"].update(global_seen_mean=-9.0)), "within the interval"),
        (lambda run: run["figures"].clear(), "equal bits"),
    ],
)
def test_only_what_was_compared_is_equal(
    file: Path, run: RunResults, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    published = changed(file, lambda row: change(row["runs"][1]))
    verdict = judge(published, run)
    assert (verdict.word, bool(verdict.where)) == (word, "equal" not in word)


def test_another_seed_is_refused_before_the_run(results: Path, tmp_path: Path) -> None:
    with refused(r"run\.seed must be that of the published run, 1, got 7"):
        repeat(read_published(str(results / f"{NAME}.json")), 1, tmp_path / "run", ["run.seed=7"])
    assert not (tmp_path / "run").exists()


def test_texts_of_a_published_file_do_not_control_the_terminal(capfd: Capture) -> None:
    figures = {"\x1b[2Jfigure": Figure(0.5, 0.5, None)}
    show_verdict(
        Verdict("different", "\x1b[2J\nequal bits", 0, Path("\x1b[2J"), (), figures, ("\x1b[2J",), ("\x1b[2J",))
    )
    out = capfd.readouterr().out
    assert "\x1b" not in out
    assert out.count("\\u001b[2J") == 5
    assert not any(line.startswith("equal bits") for line in out.splitlines())


def test_run_folder_and_its_summary_alone_can_be_judged(study: Path, tmp_path: Path, run: RunResults) -> None:
    folder = study / "fedavg" / "seed-1"
    assert judge(read_published(str(folder)), run).word == "equal bits"
    assert read_published(str(folder / "summary.json")).folder == folder
    shutil.copy(folder / "summary.json", tmp_path / "summary.json")
    alone = judge(read_published(str(tmp_path / "summary.json")), run)
    assert (alone.word, alone.compared) == ("equal bits", ("history", "predictions", "models"))


def test_changed_setting_is_named(results: Path, tmp_path: Path) -> None:
    published = read_published(str(results / f"{NAME}.json"))
    verdict = repeat(published, 0, tmp_path / "run", ["run.rounds=1", "run.threads=2"])
    assert "setting run.rounds: 1, published 2" in verdict.causes
    assert not any("threads" in cause for cause in verdict.causes)
    assert verdict.word != "equal bits"


@pytest.fixture
def address(results: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(results)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_published_row_is_read_from_an_address(results: Path, address: str) -> None:
    there, here = read_published(f"{address}/{NAME}.json"), read_published(str(results / f"{NAME}.json"))
    assert there.row == here.row
    assert set(there.predictions[1]) == set(here.predictions[1])
    with pytest.raises(RuntimeError, match=r"nothing\.json cannot be fetched: HTTP Error 404"):
        read_published(f"{address}/nothing.json")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"nonsense\r\n\r\n", "cannot be fetched: nonsense"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "cannot be fetched: it ends 7 bytes early"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}", "cannot be fetched: IncompleteRead"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1:9/x\r\n\r\n", "leads to 'ftp://127.0.0.1:9/x'"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 200, "takes longer than 0.1 s"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 200, "takes longer than 0.1 s"),  # headers that do not end
    ],
)
def test_faulty_and_slow_servers_are_one_line(answer: bytes, message: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("confed.studies.published.MOST_SECONDS", 0.1)

    def serve() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            head, body = answer[:-200], answer[-200:] if len(answer) > 200 else b""
            connection.sendall(head or answer)
            for byte in body:
                connection.sendall(bytes([byte]))
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RuntimeError, match=message):
            read_published(f"http://127.0.0.1:{server.getsockname()[1]}/x.json")
        thread.join()


def test_address_that_is_none_is_one_line() -> None:
    for address in ("http://127.0.0.1:9/a b", "http://[x"):
        with pytest.raises(RuntimeError, match="cannot be fetched"):
            read_published(address)


def drop(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: [row.pop(key) for key in keys]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("format"), "results file or a summary.json: it has no 'format'"),
        (lambda row: row.update(format="confed-results/9"), "has the format 'confed-results/9'; this version reads"),
        (drop("metrics"), "lacks the key 'metrics'"),
        (lambda row: row.update(seeds=[0]), r"seeds must be those of its runs, each once, got \[0\]"),
        (lambda row: row["runs"][1].pop("figures"), r"runs\[1\] lacks the key 'figures'"),
        (lambda row: row["runs"][0].update(seed="0"), r"runs\[0\]: seed must be int, got '0'"),
        (lambda row: row["predictions"].update(file="../x.safetensors"), "predictions must lie beside it"),
        (lambda row: row["predictions"].update(file="file:%2Ftmp%2Fx.safetensors"), "predictions must lie beside it"),
        (lambda row: row["predictions"].update(sha256="0"), "is not the file that belongs to it"),
        (lambda row: row.update(runs=[], seeds=[]), "has no runs"),
        (lambda row: row.update(seeds=[0, 0], runs=[row["runs"][0]] * 2), "seeds must be those of its runs, each once"),
        (lambda row: row["runs"][1].update(figures={}, digests={"code": "0"}), r"runs\[1\] has neither figures nor"),
        (lambda row: row["runs"][0].update(history=["x"]), r"runs\[0\]: history\[0\] must be an object, got 'x'"),
        (lambda row: row["runs"][0].update(history=[{"values": {"loss": 1}}]), "values: loss must be dict, got '1'"),
        (lambda row: row["runs"][0]["figures"].update(x=math.nan), "figures: x must be a finite number, got 'nan'"),
        (lambda row: row["runs"][0]["digests"].update(models=1), "digests: models must be str, got '1'"),
        (lambda row: row["metrics"]["personal_mean"].update(one_run=["a", 1]), "one_run must be null or two finite"),
    ],
)
def test_faulty_results_file_is_refused(file: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    refuses(message, changed, file, change)


@pytest.mark.parametrize("name", ["x/../../../victim", "/victim", "..\\victim"])
def test_a_row_that_is_called_like_a_path_is_refused(file: Path, name: str) -> None:
    for key in ("recipe", "method"):
        with refused(rf"{key} must (be no path|begin with neither)"):
            changed(file, lambda row, key=key: row.update({"recipe": "x", "method": "y", key: name}))
    with refused("label must have no control characters"):
        changed(file, lambda row: row.update(recipe="x", method="m:y", label="a\x1b[31m"))
    published = changed(file, lambda row: row.update(recipe="x", method="m:y", label="a/b"))
    assert free_folder(f"reproduced-{published.name}").parent == Path("runs")


def test_what_is_no_result_is_refused(study: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1")
    for source, message in [
        (tmp_path / "x.json", "must be a results file or a summary.json"),
        (tmp_path / "none.json", "no published result at"),
        (tmp_path, "is no run folder"),
        (study, "is a study: give one of its runs, such as .*seed-0"),
    ]:
        refuses(message, read_published, str(source))
    shutil.copytree(study / "fedavg/seed-0", tmp_path / "old")
    summary = json.loads((tmp_path / "old/summary.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in summary.items() if k != "resolved"}))
    refuses("this summary has no resolved recipe", read_published, str(tmp_path / "old.json"))
    (tmp_path / "old/summary.json").unlink()
    refuses("is not finished: `confed resume", read_published, str(tmp_path / "old"))


def test_foreign_code_in_a_published_recipe_is_not_run(file: Path) -> None:
    published = changed(file, lambda row: row["resolved"].update(algorithm={"name": "shutil:rmtree"}))
    refuses("shutil", published.recipe, 0, [])


def test_seeds_that_differ_in_more_than_the_seed_are_no_row(study: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(study, tmp_path / "study"))
    recipe = other / "fedavg/seed-1/recipe.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 2", "rounds = 3"))
    refuses(r"a row is one setting, and run\.rounds is 3 here, 2 in", write_rows, load(other), tmp_path / "results")


def row_files(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def test_no_row_is_written_over_another(study: Path, tmp_path: Path, capfd: Capture) -> None:
    runs = [study / f"fedavg/seed-{seed}" for seed in (0, 1)]
    assert command("compare", *runs, "--results", tmp_path / "seeds") == 0
    (row,) = row_files(tmp_path / "seeds").values()
    assert row["seeds"] == [0, 1]
    assert row["metrics"]["global_seen_mean"]["sd"] is not None
    sweep = tmp_path / "sweep"
    for model in ("small", "large"):
        shutil.copytree(study, sweep / model)
    points = tuple(Point({MODELS: name}, name, name) for name in ("small", "large"))
    write_sweep_index(sweep, Sweep("fedvqa_scenes", MODELS, points))
    assert command("compare", sweep, "--results", tmp_path / "models") == 0
    assert set(row_files(tmp_path / "models")) == {f"fedvqa_scenes-{m}-fedavg.json" for m in ("small", "large")}
    other = shutil.copytree(runs[1], tmp_path / "other")
    (other / "recipe.toml").write_text((other / "recipe.toml").read_text().replace("rounds = 2", "rounds = 3"))
    for folders, message in [
        ((study, sweep / "small"), f"would both be written as {NAME}.json"),
        ((runs[0], other), "run.rounds is not the same"),
        ((runs[0], runs[0]), f"would both be written as {NAME}.json"),
    ]:
        capfd.readouterr()
        assert message in refusal(capfd, "compare", *folders, "--results", tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_what_a_row_deploys_is_a_figure_of_its_repetition_too(
    study: Path, tmp_path: Path, repeated: confed.Run, run: RunResults
) -> None:
    other = Path(shutil.copytree(study, tmp_path / "study"))
    index = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**index, "deploys": {"fedavg": "global_seen"}}))
    (file,) = write_rows(load(other), tmp_path / "results")
    published = read_published(str(file))
    figures = published.row["metrics"]
    assert figures["deployed_mean"] == figures["global_seen_mean"] != figures["personal_mean"]
    verdict = judge(published, run)
    assert verdict.word == "equal bits"
    found = verdict.figures["deployed_mean"]
    assert found.found == found.published == repeated.summary["global_seen_mean"]
    with refused(r"deploys must be one of personal, global_seen, got 'all'"):
        changed(file, lambda row: row.update(deploys="all"))


@pytest.fixture
def table(results: Path, tmp_path: Path) -> Path:
    """A table's file with two rows and figures of four digits, as it is made of CSV files."""
    row = json.loads((results / f"{NAME}.json").read_text())
    figures = {run["seed"]: {key: float(f"{v:.4g}") for key, v in run["figures"].items()} for run in row["runs"]}
    own = {"algorithm": row["resolved"].pop("algorithm")}
    kept = {"label": "FedAvg", "seeds": row["seeds"], "metrics": row["metrics"], "figures": figures, "resolved": own}
    other = {**kept, "method": "local", "label": "Local only", "resolved": {"algorithm": {"name": "local"}}}
    content = {"format": TABLE, "recipe": row["recipe"], "command": "", "digits": 4, "resolved": row["resolved"]}
    (tmp_path / "table.json").write_text(json.dumps({**content, "rows": [other, {**kept, "method": "fedavg"}]}))
    return tmp_path / "table.json"


@pytest.mark.parametrize("method", ["fedavg", "FedAvg"])
def test_row_of_a_table_is_equal_as_far_as_it_has_digits(table: Path, run: RunResults, method: str) -> None:
    verdict = judge(read_published(str(table), method), run)
    assert (verdict.word, verdict.compared, verdict.digits, verdict.label) == ("equal figures", (), 4, "FedAvg")
    assert any(figure.found != figure.published for figure in verdict.figures.values())

    def one_digit(content: dict[str, Any]) -> None:
        of = content["rows"][1]["figures"]["1"]
        of["global_seen_mean"] = round(of["global_seen_mean"] * 1.002, 4)

    verdict = judge(changed(table, one_digit, "fedavg"), run)
    assert verdict.word == "within the interval"
    assert [text.partition(":")[0] for text in verdict.where] == ["global_seen_mean"]
    assert read_published(str(table)).row["method"] == "local"  # the first


def test_row_without_values_of_seeds_is_judged_by_its_means(table: Path, run: RunResults, capfd: Capture) -> None:
    published = changed(table, lambda content: content["rows"][1].update(figures={}), "fedavg")
    verdict = judge(published, run)
    figure = verdict.figures["global_seen_mean"]
    mean = published.row["metrics"]["global_seen_mean"]["mean"]
    assert (verdict.word, figure.published, figure.mean_of) == ("within the interval", mean, 2)
    assert not any("/" in key for key in verdict.figures)
    show_verdict(verdict)
    assert "(mean of 2)" in capfd.readouterr().out
    published.row["metrics"]["global_seen_mean"].update(mean=mean + 1.5, one_run=[mean + 1, mean + 2])
    verdict = judge(published, run)
    assert verdict.word == "different"
    found = run.summary.headline("global_seen_mean")
    assert verdict.where == (
        f"global_seen_mean: {found:.6g}, outside what is expected of one run where the mean of 2 is {mean + 1.5:.6g}",
    )


def one_seed(content: dict[str, Any]) -> None:
    """A table's row of seed 1 alone, of which only the mean over seeds is stated, without an interval."""
    row = content["rows"][1]
    values = row["figures"]["1"]
    metrics = {
        key: {"mean": value, "sd": None, "interval": None, "one_run": None}
        for key, value in values.items()
        if "/" not in key
    }
    row.update(seeds=[1], figures={}, metrics=metrics)


def higher(content: dict[str, Any]) -> None:
    """A table's second row with another mean."""
    content["rows"][1]["metrics"]["global_seen_mean"]["mean"] += 0.01


def test_means_of_one_seed_are_that_seeds_figures(table: Path, run: RunResults) -> None:
    verdict = judge(changed(table, one_seed, "fedavg"), run)
    assert (verdict.word, verdict.where) == ("equal figures", ())
    assert {figure.mean_of for figure in verdict.figures.values()} == {1}
    verdict = judge(changed(table, higher, "fedavg"), run)
    assert verdict.word == "different"
    assert [line.partition(":")[0] for line in verdict.where[:-1]] == ["global_seen_mean"]
    assert verdict.where[-1].startswith("no figure has an interval in which another run is expected")


def of_row(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Change of a table's second row."""
    return lambda content: change(content["rows"][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(rows=[]), "has no rows"),
        (lambda content: content.update(digits=0), "digits must be a whole number from 1 to 17, got '0'"),
        (lambda content: content.pop("resolved"), "lacks the key 'resolved'"),
        (of_row(lambda row: row.update(method="ditto")), "has no row 'fedavg'; it has local, ditto"),
        (of_row(lambda row: row.pop("metrics")), "rows[1] lacks the key 'metrics'"),
        (of_row(lambda row: row.update(figures={}, metrics={})), "nothing to compare"),
        (of_row(lambda row: row["metrics"].update(x={"mean": "high"})), "x: mean must be a finite"),
        (of_row(lambda row: row.update(seeds=[0, 0], figures={})), "each once"),
        (of_row(lambda row: row.update(seeds=["0"], figures={})), "seed must be int"),
        (
            of_row(lambda row: row["figures"].update({"7": {}})),
            "figures of fedavg must be those of its seeds 0, 1, or none, got 0, 1, 7",
        ),
        (
            of_row(lambda row: row.update(figures={"0": {"x": 0.5}, "1": {"x": 0.5}})),
            "runs[0]: none of its figures is judged: one must be personal_mean, personal_worst,",
        ),
        (
            of_row(lambda row: [row.update(figures={}), [f.update(one_run=None) for f in row["metrics"].values()]]),
            "runs[0] has no figures of its own, and no mean over the 2 seeds has one_run",
        ),
        (
            of_row(lambda row: row["metrics"]["personal_mean"].update(mean=0.5, one_run=[0.6, 0.7])),
            "metrics: personal_mean: one_run must hold the mean, low <= mean <= high, got 0.6 <= 0.5 <= 0.7",
        ),
    ],
)
def test_faulty_table_is_refused(table: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    refuses(re.escape(message), changed, table, change, "fedavg")


def test_single_row_of_another_method_is_refused(results: Path, study: Path, tmp_path: Path) -> None:
    folder, alone = study / "fedavg/seed-0", tmp_path / "summary.json"
    shutil.copy(folder / "summary.json", alone)
    assert read_published(str(alone), "fedavg").row["method"] == "fedavg"
    for source in (results / f"{NAME}.json", folder, folder / "summary.json", alone):
        refuses("is a row of fedavg, not of fedprox", read_published, str(source), "fedprox")


def test_commands_write_and_repeat(study: Path, tmp_path: Path, capfd: Capture) -> None:
    assert command("compare", study, "--results", tmp_path / "rows", "--json") == 0
    file = tmp_path / "rows" / f"{NAME}.json"
    capfd.readouterr()
    assert command("reproduce", file, "--out", tmp_path / "again", "--quiet") == 0
    out = capfd.readouterr().out
    assert out.startswith("equal bits (history, predictions, models): FedAvg, seed 0\n")
    assert "global_seen_mean" in out
    changed(file, lambda row: row["runs"][0]["figures"].update(global_seen_mean=5.0))
    changed(file, lambda row: row["metrics"]["global_seen_mean"].update(mean=5.0, one_run=[4.0, 6.0]))
    assert command("reproduce", file, "--out", tmp_path / "other", "--json") == 1
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    assert (run["word"], run["figures"]["global_seen_mean"]["interval"]) == ("different", [4.0, 6.0])
    for words, message in [
        ((file, "--seed", 7), "has no seed 7; it has 0, 1"),
        ((file, "--seed", 0, "--all-seeds"), "exclude each other"),
        ((file, "--out", tmp_path / "again"), "exists already"),
        ((tmp_path / "none",), "no published result at"),
    ]:
        assert command("reproduce", *words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*-*.json")), ids=lambda file: file.stem)
def test_published_rows_of_the_documentation_repeat(file: Path, tmp_path: Path) -> None:
    published = read_published(str(file))
    assert repeat(published, published.seeds[0], tmp_path / "run").word != "different"
