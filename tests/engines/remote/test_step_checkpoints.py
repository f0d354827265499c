"""Sites that are killed in the middle of training: they go on from there, with the bits of a run without kills."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confed.algorithms.ditto import Ditto
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedper import FedPer
from confed.algorithms.fedprox import FedProx
from confed.algorithms.fedrep import FedRep
from confed.algorithms.moon import MOON
from confed.algorithms.scaffold import Scaffold
from confed.engines.local import InProcess
from confed.engines.remote import client
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.server import Remote
from confed.federation import step_checkpoints
from confed.federation.algorithm import Algorithm
from confed.federation.equivalence import follows_steps
from confed.federation.local import Local, Schedule
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.step_checkpoints import Position, TrainingCheckpoint, read_interval
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, PATIENT, Letters, rounds, same

LOCAL = Local(epochs=3, batch_size=4, lr=0.01)
OFTEN = "1 step"


class Killed(BaseException):
    """The end of a site's process."""


class Mortal(Letters):
    """A post to sites that are killed where a test says so, and started again."""

    every = OFTEN

    def site(self, name: str) -> Site:
        return Site(self.setup, client_named(self.setup, name), self.root / name, checkpoint=self.every)

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        try:
            return super().receive(sent)
        except Killed:
            to = self.sent[int(sent)][0]
            self.sites[to] = self.site(CLIENTS[to])
            self.since[to] += "'"
            return None


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], list[int]]:
    """Kills the process behind some steps; the steps that were done are counted."""

    save = TrainingCheckpoint.save_if_due

    def arrange(wanted: Callable[[int], bool]) -> list[int]:
        steps = [0]

        def saved(*given: object) -> None:
            save(*given)  # type: ignore[arg-type]
            steps[0] += 1
            if wanted(steps[0]):
                raise Killed

        monkeypatch.setattr(TrainingCheckpoint, "save_if_due", saved)
        return steps

    return arrange


def led(letters: Letters) -> Remote:
    remote = Remote(letters.setup, letters, timeouts=PATIENT)
    remote.sites.gather(CLIENTS, wait=5)
    return remote


@pytest.mark.parametrize(
    ("method", "local"),
    [
        (FedAvg(), LOCAL),
        (FedAvg(), replace(LOCAL, optimizer="sgd", momentum=0.9, schedule=Schedule("cosine"))),
        (FedAvg(), replace(LOCAL, optimizer="adamax", iterations=11, accumulate=2, clip=0.5)),
        (FedPer(), replace(LOCAL, optimizer="adam")),
        (FedProx(mu=0.1), LOCAL),
        (Scaffold(), replace(LOCAL, optimizer="sgd")),
        (Ditto(), LOCAL),
        (FedRep(), LOCAL),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Algorithm) else given.optimizer,
)
def test_training_goes_on_with_the_same_bits(tmp_path: Path, kills, method: Algorithm, local: Local) -> None:
    setup = toy_setup(method, rounds=2, local=local)
    here = rounds(setup, InProcess(setup))
    steps = kills(lambda step: step % 17 == 0)
    records = rounds(setup, led(letters := Mortal(setup, tmp_path)))
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, here[-1].servers)
    assert [record.losses for record in records] == [record.losses for record in here]
    once = kills(lambda step: False)
    rounds(setup, led(Mortal(setup, tmp_path / "undisturbed")))
    assert steps == once  # nothing was done twice
    assert sum(len(since) - 1 for since in letters.since.values()) == steps[0] // 17


def test_without_checkpoints_the_work_is_done_twice(tmp_path: Path, kills, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above counts is the mechanism's doing."""
    setup = toy_setup(FedAvg(), rounds=1, local=LOCAL)
    monkeypatch.setattr(TrainingCheckpoint, "position", lambda self, optimizer, device: Position(0, 0, torch.zeros(())))
    steps = kills(lambda step: step % 20 == 0)
    records = rounds(setup, led(Mortal(setup, tmp_path)))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert steps[0] > 40


def test_a_checkpoint_that_was_cut_is_left_out(tmp_path: Path, kills, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = toy_setup(FedAvg(), rounds=1, local=LOCAL)
    steps, write = kills(lambda step: step == 5), step_checkpoints.write_atomically
    monkeypatch.setattr(step_checkpoints, "write_atomically", lambda p, d, **more: write(p, d[: len(d) // 2], **more))
    records = rounds(setup, led(Mortal(setup, tmp_path)))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    once = kills(lambda step: False)
    rounds(setup, led(Mortal(setup, tmp_path / "undisturbed")))
    assert steps[0] == once[0] + 5


@pytest.mark.parametrize(("every", "lost"), [("4 steps", 3), ("0.000000001 s", 0)])
def test_a_kill_costs_at_most_the_steps_between(tmp_path: Path, kills, every: str, lost: int) -> None:
    setup = toy_setup(FedAvg(), rounds=1, local=LOCAL)
    steps, letters = kills(lambda step: step == 7), Mortal(setup, tmp_path)
    letters.every = every
    letters.sites = {number: letters.site(name) for number, name in enumerate(CLIENTS)}
    records = rounds(setup, led(letters))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    once = kills(lambda step: False)
    rounds(setup, led(Mortal(setup, tmp_path / "undisturbed")))
    assert steps[0] - once[0] == lost


@pytest.mark.parametrize("text", ["often", "-1", "5 days", "2.5 steps", "1e3"])
def test_an_interval_is_a_number_of_seconds_or_steps(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as '60 s', '5 min' or '500 steps', got"):
        read_interval(text)
    assert read_interval("5 min") == read_interval("300") == read_interval("300.0") == (300.0, 0)
    assert read_interval("500 steps") == (0.0, 500)


@pytest.mark.parametrize("method", [FedAvg(), FedPer()], ids=["FedAvg", "FedPer"])
def test_a_server_started_again_takes_the_work_of_its_sites(tmp_path: Path, kills, method: Algorithm) -> None:
    setup = toy_setup(method, rounds=2, local=LOCAL)
    steps, letters = kills(lambda step: False), Mortal(setup, tmp_path)
    killed, restarted = led(letters), led(letters)
    killed.begin(0, (0, 1))
    records = rounds(setup, killed)
    done = steps[0]
    restarted.begin(1, (0, 1))
    (again,) = rounds(setup, restarted, records[0].servers, start=1)
    assert steps[0] == done
    assert same(again.servers, records[-1].servers)


def test_a_checkpoint_is_of_one_request(tmp_path: Path, kills) -> None:
    setup = toy_setup(FedAvg(), rounds=1, local=LOCAL)
    letters, steps = Mortal(setup, tmp_path), kills(lambda step: step % 10 == 0)
    remote = led(letters)
    rounds(setup, remote)
    assert steps[0] > 10
    assert not any((tmp_path / name / "steps").exists() for name in CLIENTS)


def test_who_cannot_go_on_begins_anew() -> None:
    assert follows_steps(FedAvg(), LOCAL)
    assert not follows_steps(MOON(), LOCAL)  # keeps what frozen networks make of examples
    assert not follows_steps(FedAvg(record_privacy=RecordPrivacy(clip=1.0, noise=1.0)), LOCAL)
    assert not follows_steps(FedAvg(), replace(LOCAL, optimizer="adamw8bit"))


def test_a_site_writes_no_checkpoint_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(step_checkpoints, "write_atomically", lambda path, *_, **__: written.append(path))
    setup = toy_setup(FedAvg(), rounds=1, local=LOCAL)
    letters = Mortal(setup, tmp_path)
    letters.every = client.EVERY
    letters.sites = {number: letters.site(name) for number, name in enumerate(CLIENTS)}
    rounds(setup, led(letters))
    assert not written
