"""A method's own error while it handles one site's reply: that site is left out of the round, by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.server import Remote
from confed.engines.remote.update_bounds import Bounds
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.state import MemoryStore, ServerState
from confed.testing.toy import toy_setup
from hostile_reply import lead, lines_of
from led_recipe import recipe_of
from memory_transport import CLIENTS, QUICK, Letters, Without, rounds, same
from repository import SUPPORT


@dataclass(frozen=True)
class Fragile(FedAvg):
    """Its server cannot handle the second round's replies of some clients."""

    breaks: tuple[str, ...] = ("client-1",)

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        def checked() -> Iterable[Reply]:
            for reply in replies:
                if reply.error is None and server.round == 1 and reply.client.id in self.breaks:
                    raise KeyError("rate")
                yield reply

        return super().aggregate(server, checked())


@dataclass(frozen=True)
class Twice(Fragile):
    """Asks everybody for a second update of what came of the first."""

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        first = [Call(c, "fit", self.broadcast(server, c), expects=server.params) for c in cohort]
        mean = Algorithm.average(self, server, (yield first))
        again = ServerState(server.round, mean, clients=server.clients)
        second = [Call(c, "fit", self.broadcast(again, c), expects=again.params) for c in cohort]
        return self.aggregate(server, (yield second))


def led(setup: Setup, root: Path, bounds: Bounds | None = None) -> tuple[list[RoundRecord], Letters, Remote]:
    letters = Letters(setup, root)
    remote = Remote(setup, letters, timeouts=QUICK, bounds=bounds, spool=root / "spool")
    remote.sites.gather(CLIENTS, wait=5)
    simulation = Simulation(setup, MemoryStore(), remote)
    simulation.attempt = remote.attempt
    records = list(simulate(simulation, simulation.start(InProcess(setup).workspace)))
    assert not list((root / "spool").iterdir())
    return records, letters, remote


@pytest.mark.parametrize("bounds", [None, Bounds()], ids=["one by one", "bounded"])
def test_a_round_goes_on_without_the_site_that_broke_it(tmp_path: Path, bounds: Bounds | None) -> None:
    setup = toy_setup(Fragile(), rounds=3)
    records, letters, remote = led(setup, tmp_path, bounds)
    assert [set(record.errors) for record in records] == [set(), {"client-1"}, set()]
    said = records[1].errors["client-1"]
    assert "Fragile could not handle its reply to 'fit': KeyError: 'rate' (test_round_retry.py:" in said
    assert remote.sites.status["client-1"].note == said
    assert "client-1" not in records[1].losses
    assert "client-1" not in records[1].bytes_up
    # Nobody was asked twice, and neither books nor values hold anything of the first attempt.
    assert [kind for _, kind, _, _ in letters.sent].count("fit") == 9
    expected = rounds(toy_setup(FedAvg(), rounds=3), Without(setup, "client-1", 1))
    assert all(same(one.servers, other.servers) for one, other in zip(records, expected, strict=True))
    assert records[1].bytes_down == expected[1].bytes_down
    assert records[1].traffic == expected[1].traffic


def test_a_second_question_of_the_round_is_not_asked_again(tmp_path: Path) -> None:
    records, letters, _ = led(toy_setup(Twice(), rounds=2), tmp_path)
    assert [set(record.errors) for record in records] == [set(), {"client-1"}]
    assert [kind for _, kind, _, _ in letters.sent].count("fit") == 12


def test_an_error_at_every_reply_ends_the_run_with_its_text(tmp_path: Path) -> None:
    setup = toy_setup(Fragile(breaks=CLIENTS), rounds=2)
    with pytest.raises(RuntimeError, match=r"every client failed in round 2; client-0: Fragile could not .*KeyError"):
        led(setup, tmp_path)


def test_a_simulation_shows_a_methods_error_as_it_is() -> None:
    setup = toy_setup(Fragile(), rounds=2)
    with pytest.raises(KeyError, match="rate"):
        rounds(setup, InProcess(setup))


@dataclass(frozen=True)
class Session(Fragile):
    """Asks its clients in a session, which nobody can go back to the beginning of."""

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        calls = [Call(c, "fit", self.broadcast(server, c), expects=server.params, session=True) for c in cohort]
        return self.aggregate(server, (yield calls))


def test_without_a_second_attempt_the_run_ends_with_a_name(tmp_path: Path) -> None:
    says = "round 2 ended at the reply of 'client-1': Session could not handle its reply to 'fit': KeyError: 'rate'"
    with pytest.raises(RuntimeError, match=says) as caught:
        led(toy_setup(Session(), rounds=2), tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)


@dataclass(frozen=True)
class Fickle(Twice):
    """Asks for something else every time."""

    def broadcast(self, server: ServerState, client: ClientInfo) -> Message:
        message = super().broadcast(server, client)
        return Message(
            {name: t + torch.rand(()) if t.is_floating_point() else t for name, t in message.tensors.items()}
        )


def test_other_questions_are_not_answered_with_old_replies(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"round 2 ended at the reply of 'client-1'.* 'client-0' for something else"):
        led(toy_setup(Fickle(), rounds=2), tmp_path)


def test_the_servers_command_leaves_the_site_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    weigh = FedAvg.weight

    def weight(self: FedAvg, reply: Reply) -> float:
        return weigh(self, reply) / (reply.client.id != "cold")

    monkeypatch.setattr(FedAvg, "weight", weight)
    lead(recipe_of("fedavg", "run.rounds=2", "run.evaluate_every=0"), tmp_path, minimum=2)
    errors = [line["errors"] for line in lines_of(tmp_path, "round")]
    assert [set(found) for found in errors] == [{"cold"}] * 2
    assert "FedAvg could not handle its reply to 'fit': ZeroDivisionError" in errors[0]["cold"]
