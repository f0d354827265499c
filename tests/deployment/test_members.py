"""Sites that come late are added to the one table; nothing is asked twice, and a mean over a part says so."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from command_line import confed
from confed.deployment.provision import Federation, provision
from confed.deployment.server import FinalResults, run_server
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.supernode import SuperNode
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.protocol import HELLO, Request, seal
from confed.engines.remote.sites import Timeouts
from confed.federation.messages import Message
from confed.report.report import write_report
from confed.report.tables.methods import paper_table, results_table
from confed.results.runs import load
from confed.results.summary import Summary
from confed.system.events import Caution, Event, RunProgress
from hostile_reply import COLD
from led_recipe import SITES_OF, grid_of, recipe_of
from refusals import refuses
from repository import SUPPORT

WARM, BOTH = SITES_OF.index("warm"), SITES_OF.index("both")
INTERVAL = 0.01  # seconds between two questions who is here
TABLE = ("personal", "global_seen", "global_unseen", "personal_mean", "personal_worst", "global_seen_mean")


class Killed(Exception):
    """End of a server at once."""


class Federated:
    """A server that is started, killed and started again, and sites that go away and return."""

    def __init__(self, root: Path, rounds: int = 1) -> None:
        self.root, self.state, self.said = root, root / "state", list[str]()
        self.recipe = recipe_of("fedavg", f"run.rounds={rounds}", "run.evaluate_every=0", "run.checkpoint_seconds=0")
        root.mkdir(exist_ok=True)
        (root / "recipe.toml").write_text(self.recipe.to_toml())
        self.grid: LoopbackGrid = grid_of(root / "recipe.toml", root)

    def away(self, *numbers: int) -> None:
        for number in numbers:
            self.grid.since.pop(number, None)

    def back(self, *numbers: int) -> None:
        self.grid.since.update(dict.fromkeys(numbers, "again"))

    def restarted(self) -> None:
        """All sites are processes anew, those that are away stay away."""
        there = dict(self.grid.since)
        self.grid = grid_of(self.root / "recipe.toml", self.root)
        self.grid.since = dict.fromkeys(there, "restarted")

    def run(self, told: Callable[[Event], None] = lambda event: None, *, deliver: bool = False) -> dict[str, Any]:
        def progress(event: Event) -> None:
            if isinstance(event, RunProgress | Caution):
                self.said.append(event.text)
            told(event)

        return run_server(
            self.recipe, self.state, FlowerTransport(self.grid), names=SITES_OF, wait=0.05, deliver=deliver,
            timeouts=Timeouts(minimum=1, interval=INTERVAL, away=0.0), progress=progress,
        )  # fmt: skip

    def run_without_cold_at_the_end(self) -> dict[str, Any]:
        def told(event: Event) -> None:
            if isinstance(event, RunProgress) and event.stage == "evaluating":
                self.away(COLD)

        return self.run(told)

    def run_killed_at_the_end(self) -> None:
        """Cold goes away before the evaluation, and the server dies after it, without a summary."""

        def told(event: Event) -> None:
            if isinstance(event, RunProgress) and event.stage == "evaluating":
                self.away(COLD)
            if isinstance(event, Caution) and "every mean" in event.text:
                raise Killed

        with pytest.raises(Killed):
            self.run(told)
        assert not (self.state / "summary.json").is_file()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Nobody is ever away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        return Federated(tmp_path_factory.mktemp("whole") / "all").run()


def restart(led: Federated) -> None:
    led.run_without_cold_at_the_end()
    led.back(COLD)
    led.run()


def deliver(led: Federated) -> None:
    led.run_without_cold_at_the_end()
    led.restarted()
    led.back(COLD)
    led.run(deliver=True)


def killed_then_restart(led: Federated) -> None:
    led.run_killed_at_the_end()
    led.restarted()
    led.back(COLD)
    led.run()


def killed_then_only_the_late_one(led: Federated) -> None:
    led.run_killed_at_the_end()
    led.away(WARM, BOTH)
    led.back(COLD)
    led.run()


def restart_while_others_are_away(led: Federated) -> None:
    led.run_without_cold_at_the_end()
    led.away(BOTH)
    assert led.run()["personal"].keys() == {"warm", "both"}
    led.away(WARM)
    led.back(COLD)
    led.run(deliver=True)


def killed_while_delivering(led: Federated) -> None:
    led.run_without_cold_at_the_end()
    led.back(COLD)

    def told(event: Event) -> None:
        if isinstance(event, RunProgress) and event.stage == "done":
            raise Killed

    with pytest.raises(Killed):
        led.run(told, deliver=True)
    led.away(WARM, COLD)
    led.run()


ORDERS = [
    restart, deliver, killed_then_restart, killed_then_only_the_late_one, restart_while_others_are_away,
    killed_while_delivering,
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_kills_returns_and_restarts_give_one_table(
    tmp_path: Path, whole: dict[str, Any], order: Callable[[Federated], None]
) -> None:
    led = Federated(tmp_path)
    order(led)
    summary = json.loads((led.state / "summary.json").read_text())
    for key in (*TABLE, "membership", "bytes_up", "bytes_down"):
        assert summary[key] == whole[key], key
    assert not [note for note in summary["notes"] if "not evaluated" in note or "every mean" in note]
    for name in SITES_OF:  # nobody is asked of the same model twice, and everybody has it
        assert len((tmp_path / name / "evaluations.jsonl").read_text().splitlines()) == 1
        assert (tmp_path / name / "audit.jsonl").read_text().count('"action": "evaluate"') == 1
        given = load_file(tmp_path / name / "run" / "models" / "global" / "trained.safetensors")
        model = load_file(led.state / "models" / "global" / "trained.safetensors")
        assert all((given[key] == value).all() for key, value in model.items())
    lines = [json.loads(line) for line in (led.state / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["round"]


def test_a_mean_over_a_part_is_named_so_everywhere(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    summary = led.run_without_cold_at_the_end()
    evaluated = summary["membership"]["evaluated"]
    assert list(evaluated) == ["warm", "both"]
    assert {site["round"] for site in evaluated.values()} == {1}
    assert {site["rounds_taken_part"] for site in evaluated.values()} == {1}
    assert len({site["model"] for site in evaluated.values()}) == 1
    reason = "ConnectionError: the site is not connected"
    assert summary["membership"]["missing"] == {"cold": reason}
    assert "every mean over clients is over 2 of 3 sites (warm, both)" in summary["notes"]
    assert f"cold was not evaluated: {reason}" in summary["notes"]
    assert led.said[-1] == "done, means over 2 of 3 sites"
    assert any("over 2 of 3 sites" in text and "--deliver" in text for text in led.said[:-1])
    study = load(led.state)
    for table in (paper_table(study), results_table([("FedAvg", [Summary(summary)])])):
        assert table.sections[0][0][0].text == "FedAvg (2 of 3 sites)"
        assert any("every mean over clients is over 2 of 3 sites (not evaluated: cold: " in n for n in table.notes)
    page = write_report(led.state).read_text()
    head = page[page.index("<h1>") - 600 : page.index("<h2")]
    assert "2 of 3 sites" in head
    assert "personal models, mean over 2 of 3 sites (%)" in page
    assert "mean over clients (%)" not in page


def test_a_site_that_never_took_part_is_handed_the_model(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    led.away(COLD)
    assert led.run()["membership"]["missing"] == {"cold": "it was away, and has not come since"}
    led.back(COLD)
    model = (led.state / "models/global/trained.safetensors").read_bytes()
    summary = led.run(deliver=True)
    assert {n: site["rounds_taken_part"] for n, site in summary["membership"]["evaluated"].items()} == {
        "warm": 1, "cold": 0, "both": 1,
    }  # fmt: skip
    assert (led.state / "models/global/trained.safetensors").read_bytes() == model
    assert (tmp_path / "cold" / "run" / "models" / "personal").is_dir()
    up = {name: site["up"] for name, site in summary["federation"].items()}
    assert up["warm"] > up["cold"]  # what came before the restart counts, too


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "was killed"])
def test_a_site_that_comes_late_takes_part_from_then_on(tmp_path: Path, killed: bool) -> None:
    led = Federated(tmp_path, rounds=6)
    led.away(COLD)

    def kill_in_round_3(event: Event) -> None:
        if isinstance(event, RunProgress) and event.round == 2:
            raise Killed

    def return_in_round_4(event: Event) -> None:
        if isinstance(event, RunProgress) and event.round == 3:
            led.back(COLD)
            time.sleep(4 * INTERVAL)  # who is here is asked no more often than that

    if killed:
        with pytest.raises(Killed):
            led.run(kill_in_round_3)
    summary = led.run(return_in_round_4)
    lines = [json.loads(line) for line in (led.state / "metrics.jsonl").read_text().splitlines()]
    rounds = [sorted(line["loss"]) for line in lines if line["event"] == "round"]
    assert len(rounds) == 6
    assert rounds[:2] == [["both", "warm"]] * 2
    assert rounds[-2:] == [sorted(SITES_OF)] * 2
    assert set(summary["membership"]["evaluated"]) == set(SITES_OF)


def test_results_of_another_model_do_not_count(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    first = led.run_without_cold_at_the_end()
    final = json.loads((led.state / "final.json").read_text())
    ((digest, part),) = final.items()
    part["sites"]["cold"] = {"results": {"global": {"accuracy": 0.125}, "personal": {"accuracy": 0.125}}, "reason": ""}
    (led.state / "final.json").write_text(json.dumps({"another": part}))
    again = led.run()
    assert "cold" not in again["global_seen"]
    assert {key: again[key] for key in TABLE} == {key: first[key] for key in TABLE}
    assert "final.json has results of another final model, which do not count: cold" in again["notes"]
    assert set(json.loads((led.state / "final.json").read_text())) == {digest, "another"}


def test_a_result_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "final.json"
    FinalResults(path, 3, "a").add({"warm": {"global": {"accuracy": 0.5}}}, {"warm": "", "cold": "it is silent"})
    again = FinalResults(path, 3, "a")
    again.add({"warm": {"global": {"accuracy": 0.25}}, "cold": {"global": {"accuracy": 1.0}}}, {"warm": "away"})
    read = FinalResults(path, 3, "a")
    assert read.of("warm") == {"global": {"accuracy": 0.5}}
    assert read.of("cold") == {"global": {"accuracy": 1.0}}
    assert (read.reason("warm"), read.reason("cold")) == ("", "")
    assert FinalResults(path, 3, "b").of_other_models == ["cold", "warm"]


@pytest.mark.timeout(30)
def test_a_restart_does_not_wait_for_who_is_missing(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    led.run_without_cold_at_the_end()
    assert led.run()["membership"]["missing"].keys() == {"cold"}


def test_nothing_is_delivered_without_a_finished_run(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    refuses("must hold a finished run for --deliver", led.run, deliver=True)
    assert not led.state.exists()


def test_a_delivering_server_ends_when_nobody_comes(tmp_path: Path) -> None:
    led = Federated(tmp_path)
    before = led.run_without_cold_at_the_end()
    assert led.run(deliver=True)["personal"] == before["personal"]
    assert sum(" means over 2 of 3 sites" in text for text in led.said) == 2  # each connection is served once
    led.back(COLD)
    led.run(deliver=True)
    assert led.run(deliver=True)["membership"]["missing"] == {}  # at once, whoever is there


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    recipe = recipe_of("fedavg", "run.rounds=1").to_toml()
    provision(tmp_path / "made", Federation(("warm", "cold"), "localhost", 1, recipe))
    return tmp_path / "made" / "sites" / "warm"


def once(kit: Path, *more: str) -> int:
    arguments = [
        "client", str(kit / "recipe.toml"), "--site", "warm", "--server", "127.0.0.1:1", "--insecure", "--once",
        "--key", str(kit / "key"), "--private", str(kit / "private"), *more,
    ]  # fmt: skip
    return confed(*arguments)


@pytest.mark.timeout(30)
def test_a_site_with_once_ends_without_a_server(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert once(kit, "--patience", "0.1") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no connection to 127.0.0.1:1 for 0.1 s: the run may be over; `confed server --deliver` hands" in said


def test_a_site_with_once_ends_where_it_cannot_take_part(
    kit: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(self: SuperNode, app: Any, stop: Any, patience: float) -> str:
        transport = FlowerTransport(LoopbackGrid({0: app}))
        sent = transport.send(0, HELLO, Request("a/hello/0", "", HELLO, 0, 1, 0).to_bytes(), seal(Message()), 10.0)
        assert sent is not None
        assert transport.receive(sent) is not None
        assert stop.is_set()
        return ""

    monkeypatch.setattr(SuperNode, "serve", serve)
    assert once(kit) == 1
    assert "cannot take part: the protocol must be the same or one apart" in " ".join(capsys.readouterr().err.split())


def test_a_site_without_a_model_is_told_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from confed.deployment.site import open_site
    from confed.engines.remote.protocol import GOODBYE

    said: list[str] = []
    ended: list[bool] = []
    site = open_site(
        recipe_of("fedavg", "run.rounds=1"), "warm", tmp_path, lambda event: said.append(str(event)),
        over=lambda: ended.append(True),
    )  # fmt: skip
    site.handle(Request("a/goodbye", "warm", GOODBYE, 0, 1, 0).to_bytes(), seal(Message()))
    assert any("no final model was handed to this site: `confed server --deliver`" in text for text in said)
    assert ended
