"""What a site or a server with bad intentions sends, beyond what does not look like an update: it ends nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedper import FedPer
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess, Simulation
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import (
    GOODBYE,
    Answer,
    Limits,
    Refused,
    Request,
    fingerprint,
    open_body,
    seal,
    version_of,
)
from confed.engines.remote.server import Remote
from confed.federation.messages import Message
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, QUICK, Letters, Tamper, Without, remote_of, rounds, same


def reply_with(**scalars: object) -> Tamper:
    """A reply whose scalars are these in place of its own."""

    def tamper(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        message = open_body(body, Limits(), {}, frozenset())
        return head, seal(Message(message.tensors, {**message.scalars, **scalars}))  # type: ignore[arg-type]

    return tamper


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("a lot", "the scalar 'loss' of 'fit' must be a number, got 'a lot'"),
        (True, "the scalar 'loss' of 'fit' must be a number"),
        (10**400, "the scalar 'loss' must be a number of 64 bits"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, loss: object, says: str) -> None:
    setup = toy_setup(FedPer(), rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = reply_with(loss=loss)
    (record,) = rounds(setup, remote_of(letters))
    assert record.errors.keys() == {"client-1"}
    assert says in record.errors["client-1"]
    assert same(record.servers, rounds(setup, Without(setup, "client-1", 0))[0].servers)


@pytest.mark.parametrize(
    "scalars", [{"global:accuracy:sum": "1"}, {"global:x:sum": 1.0}, {"global:accuracy:weight": False}]
)
def test_an_evaluation_that_is_none_is_left_out(tmp_path: Path, scalars: dict[str, object]) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path)

    remote = Remote(setup, letters, timeouts=QUICK)
    remote.sites.gather(CLIENTS, wait=5)
    letters.tamper[2] = reply_with(**scalars)
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    found = simulation.evaluate(simulation.start(InProcess(setup).workspace), 0, split="test")
    assert set(found["global"]) == {"client-0", "client-1"}
    note = remote.sites.status["client-2"].note
    assert "must be a number" in note or "came without its weight" in note


def grown(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Activations that do not fit the server's layers."""
    message = open_body(body, Limits(), {}, frozenset())
    wide = {name: torch.cat([t, t], dim=-1) for name, t in message.tensors.items()}
    return head, seal(Message(wide, message.scalars))


def renamed(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    message = open_body(body, Limits(), {}, frozenset())
    return head, seal(Message({f"other/{name}": t for name, t in message.tensors.items()}, message.scalars))


@pytest.mark.parametrize("method", [SplitLearning(), BiCSL(), BiCSL(staleness=1)], ids=["split", "bicsl", "stale"])
@pytest.mark.parametrize("tamper", [grown, renamed])
def test_activations_that_do_not_fit_leave_their_client_out(tmp_path: Path, method: FedAvg, tamper: Tamper) -> None:
    setup = toy_setup(method, rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[0] = lambda kind, head, body: tamper(kind, head, body) if kind == "step" else (head, body)
    with pytest.warns(UserWarning, match="'client-0' is left out of the round: what it sent does not fit"):
        (record,) = rounds(setup, remote_of(letters))
    assert all(torch.isfinite(t.float()).all() for state in record.servers.values() for t in state.params.values())


def test_a_site_that_never_comes_to_an_end_is_left_out(tmp_path: Path) -> None:
    setup = toy_setup(SplitLearning(), rounds=1)
    letters = Letters(setup, tmp_path)
    first: list[bytes] = []

    def endless(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == "step":
            first.append(body)
            return head, first[0]  # its first batch, over and over
        if kind == "top" and Answer.from_bytes(head, Limits()).error is not None:
            z = torch.zeros_like(open_body(letters.sent[-1][3], Limits(), {}, frozenset()).tensors["z"])
            return Answer(Answer.from_bytes(head, Limits()).id, None, False, 0.0).to_bytes(), seal(Message({"z": z}))
        return head, body

    letters.tamper[0] = endless
    with pytest.warns(UserWarning, match="more than the [0-9]+ batches that its examples make"):
        rounds(setup, remote_of(letters))


def test_a_header_that_names_a_tensor_twice_is_refused() -> None:
    entry = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    with pytest.raises(Refused):
        open_body(len(text).to_bytes(8, "little") + text + bytes(4), Limits(), {}, frozenset())


# What a site tells, and what it does not ----------------------------------------------------------------------------


def asked(site: Site, action: str, message: Message | None = None, round: int = 0) -> Answer:
    request = Request("id", site.client.id, action, round, version_of(round, 0), version_of(round, 0) - 1)
    return Answer.from_bytes(site.handle(request.to_bytes(), seal(message or Message()))[0], Limits())


class Unreadable:
    """Examples whose files are named after people."""

    deterministic = True

    def __len__(self) -> int:
        return 12

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[object]:
        raise FileNotFoundError(2, "No such file or directory", "/wards/7/jane-roe.png")
        yield

    def validation(self, batch_size: int) -> Iterator[object]:
        yield from ()

    test = validation


def test_errors_name_no_files_to_the_server_and_all_of_them_at_home(tmp_path: Path) -> None:
    clients = {"client-0": Unreadable()}
    setup, said = toy_setup(FedAvg(), clients=clients), list[str]()  # type: ignore[arg-type]
    site = Site(setup, client_named(setup, "client-0"), tmp_path, progress=lambda event: said.append(event.text))
    shared = Message(dict(Workspace(setup.model()).initial))
    error = str(asked(site, "fit", shared).error)
    assert error == "FileNotFoundError: [Errno 2] No such file or directory"
    assert "jane-roe" in said[-1]


def test_a_site_reads_in_which_round_it_is_asked_what(tmp_path: Path) -> None:
    setup, said = toy_setup(FedAvg(), rounds=3), list[str]()
    site = Site(setup, client_named(setup, "client-0"), tmp_path, progress=lambda event: said.append(event.text))
    shared = Message(dict(Workspace(setup.model()).initial), {"split": "test", "limit": 0})
    for action, round in (("fit", 0), ("evaluate", 1), ("evaluate", 5)):
        asked(site, action, shared, round)
    assert said == ["round 1: fit", "after round 1: evaluate", "the end: evaluate"]


def test_what_another_party_wrote_cannot_move_the_cursor(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg())
    told = {**fingerprint(setup, Workspace(setup.model())).scalars(), "version": "1\x1b[2J\n"}
    text = fingerprint(setup, Workspace(setup.model())).differences(told, "here", "there")
    assert text is not None
    assert text.isprintable()
    assert Answer.from_bytes(Answer("a", "x\x1b[31m\ny", False, 0.0).to_bytes(), Limits()).error == "x [31m y"


def test_a_reply_from_memory_is_never_one_to_another_recipe(tmp_path: Path) -> None:
    """Same request, same folder, another step size: the old reply must not go out."""

    def replies(setup: Setup) -> bytes:
        site = Site(setup, client_named(setup, "client-0"), tmp_path)
        request = Request("id", "client-0", "fit", 0, version_of(0, 0), version_of(0, 0) - 1)
        return site.handle(request.to_bytes(), seal(Message(dict(Workspace(setup.model()).initial))))[1]

    from dataclasses import replace

    setup = replace(toy_setup(FedAvg()), keep_personal=False)
    other = replace(setup, local=replace(setup.local, lr=setup.local.lr / 2))
    assert replies(setup) == replies(setup) != replies(other)


def test_the_end_of_a_run_is_told_to_every_site(tmp_path: Path) -> None:
    setup, over = toy_setup(FedAvg(), rounds=1), list[str]()
    letters = Letters(setup, tmp_path)
    site = letters.sites[0]
    letters.sites[0] = Site(
        setup,
        site.client,
        tmp_path / "again",
        over=lambda: over.append("over"),
        progress=lambda event: over.append(event.text),
    )
    remote = remote_of(letters)
    del letters.since[2]
    remote.sites.look(always=True)
    remote.sites.farewell(1.0)
    assert over[-2:] == ["the run is over; the personal model stays here", "over"]
    assert [to for to, kind, _, _ in letters.sent if kind == GOODBYE] == [0, 1]


def test_replies_wait_in_the_folder_given_and_nothing_of_a_killed_process_stays(tmp_path: Path) -> None:
    setup, spool = toy_setup(FedAvg(), rounds=1), tmp_path / "spool"
    (spool / "old").mkdir(parents=True)
    letters = Letters(setup, tmp_path)
    remote = Remote(setup, letters, timeouts=QUICK, spool=spool)
    assert list(spool.iterdir()) == []
    remote.sites.gather(CLIENTS, wait=5)
    seen: list[int] = []
    take = remote._take_in  # type: ignore[attr-defined]

    def noted(*given: object) -> None:
        take(*given)  # type: ignore[arg-type]
        seen.append(len([path for path in spool.rglob("*") if path.is_file()]))

    remote._take_in = noted  # type: ignore[attr-defined, method-assign]
    rounds(setup, remote)
    assert max(seen) >= 1
    remote.close()
    assert not spool.exists()


def test_a_site_that_comes_after_the_run_began_is_told_when_it_takes_part(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path)
    late = letters.since.pop(2)
    remote = Remote(setup, letters, timeouts=QUICK)
    remote.sites.gather(CLIENTS, wait=0.02)
    remote.sites.members = frozenset({"client-0", "client-1"})
    letters.since[2] = late
    remote.sites.look(always=True)
    remote.sites.look(always=True)
    assert "takes part when the server is started again" in remote.sites.status["client-2"].note
    assert json.dumps(remote.sites.status["client-0"].note) == '""'
