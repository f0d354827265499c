"""Journals that a disk cannot shorten: removed, cut and restored ones are noticed before the next update."""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.split_learning import SplitLearning
from confed.deployment.manifest import ACCEPTED
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.client import SERIALS, Site, client_named
from confed.engines.remote.journal_chains import KEY, KNOWN, SEEN, Countersignatures, JournalChains
from confed.engines.remote.protocol import Refused
from confed.engines.remote.server import Remote
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.cut import CutPrivacy
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, QUICK, Letters

NOISY = FedAvg(update_privacy=UpdatePrivacy(clip=0.5, noise=4.0))


class Audited(Letters):
    def site(self, name: str) -> Site:
        root = self.root / name
        return Site(self.setup, client_named(self.setup, name), root, audit=root / "audit.jsonl")

    def remote(self, memory: Path) -> Remote:
        remote = Remote(self.setup, self, timeouts=QUICK, memory=memory)
        remote.sites.gather(CLIENTS, wait=5)
        return remote


def led(setup: Setup, remote: Remote, start: int, stop: int) -> list[RoundRecord]:
    """Rounds with evaluations, after each of which the server signs."""
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    servers = simulation.start(InProcess(setup).workspace)
    remote.begin(start, (0,))
    records: list[RoundRecord] = []
    for record in simulate(simulation, servers, start):
        simulation.evaluate(record.servers, record.round, split="validation")
        remote.remember()
        records.append(record)
        if record.round == stop:
            break
    return records


def test_a_head_follows_from_all_entries(tmp_path: Path) -> None:
    lines = [b'{"a": 1}\n', b'{"b": 2}\n', b"torn"]
    (tmp_path / "privacy.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "noise.key").write_bytes(b"k" * 32)
    journals = JournalChains("a", tmp_path, ["privacy.jsonl", "audit.jsonl"], ["noise.key"], SERIALS)
    assert (tmp_path / "privacy.jsonl").read_bytes() == b"".join(lines[:2])  # nothing was sent of the third one
    first = blake2b(lines[0], digest_size=16).digest()
    second = blake2b(lines[1], digest_size=16, key=first).hexdigest()
    key = blake2b(b"k" * 32, digest_size=16).hexdigest()
    assert json.loads(journals.statement()) == {"privacy": [2, second], "noise": [1, key]}
    with (tmp_path / "privacy.jsonl").open("ab") as file:
        file.write(b"more\n")
    assert json.loads(journals.statement())["privacy"][0] == 3
    assert SERIALS == ACCEPTED


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n")


def rewrite(path: Path) -> None:
    """As many entries, of which the first one is another."""
    path.write_bytes(b"{}\n" + path.read_bytes().partition(b"\n")[2])


@pytest.mark.parametrize("journal", ["privacy.jsonl", "evaluations.jsonl", "audit.jsonl"])
@pytest.mark.parametrize("damage", [remove, cut, rewrite])
def test_a_shortened_book_stops_its_site_before_the_next_update(
    tmp_path: Path, journal: str, damage: Callable[[Path], None]
) -> None:
    setup = toy_setup(NOISY, rounds=4, noisy=False)
    letters = Audited(setup, tmp_path)
    remote = letters.remote(tmp_path / "server")
    led(setup, remote, 0, 3)
    root = tmp_path / "client-1"
    spent = len((root / "privacy.jsonl").read_text().splitlines())
    damage(root / journal)
    # In the running process, before anything is computed.
    (record,) = led(setup, remote, 3, 4)
    assert set(record.errors) == {"client-1"}
    said = f"the journal {journal.removesuffix('.jsonl')!r} was removed, cut or put back from an old copy"
    assert said in record.errors["client-1"]
    assert (
        "Put the newest copy of the private folder back; if it is lost, have the coordinator"
        in record.errors["client-1"]
    )
    left = (root / "privacy.jsonl").read_text().splitlines() if (root / "privacy.jsonl").is_file() else []
    assert len(left) <= spent
    # In a new one, from what the server signed, without the server.
    with pytest.raises(
        ValueError, match="was removed, cut or put back from an old copy: the server has signed"
    ) as refused:
        letters.site("client-1")
    assert "\n" not in str(refused.value)
    assert all(part in str(refused.value) for part in (said, SEEN, KNOWN))


@pytest.mark.parametrize("age", ["old copy", "nothing"])
def test_a_whole_disk_put_back_is_noticed_by_site_and_server(tmp_path: Path, age: str) -> None:
    setup = toy_setup(NOISY, rounds=4, noisy=False)
    letters = Audited(setup, tmp_path)
    remote, root = letters.remote(tmp_path / "server"), tmp_path / "client-1"
    led(setup, remote, 0, 1)
    shutil.copytree(root, tmp_path / "copy")
    led(setup, remote, 1, 2)
    shutil.rmtree(root)
    if age == "old copy":
        shutil.move(tmp_path / "copy", root)
    letters.sites[1] = letters.site("client-1")  # nothing at the site itself knows better
    (record,) = led(setup, remote, 2, 3)
    assert set(record.errors) == {"client-1"}
    assert "Refused" in record.errors["client-1"]
    # A server that was started again knows it at once.
    again = Remote(setup, letters, timeouts=QUICK, memory=tmp_path / "server")
    again.sites.gather(CLIENTS, wait=0.05)
    assert set(again.sites.lines) == {"client-0", "client-2"}
    note = " ".join(status.note for status in again.sites.status.values())
    assert "it was removed, cut or put back from an old copy" in note
    # The remedy: the coordinator takes the site out.
    known = json.loads((tmp_path / "server" / KNOWN).read_text())
    del known["client-1"]
    (tmp_path / "server" / KNOWN).write_text(json.dumps(known))
    (root / SEEN).unlink(missing_ok=True)
    letters.sites[1] = letters.site("client-1")
    (record,) = led(setup, letters.remote(tmp_path / "server"), 3, 4)
    assert not record.errors


def test_another_noise_key_is_noticed(tmp_path: Path) -> None:
    setup = toy_setup(SplitLearning(privacy=CutPrivacy(clip=1.0, noise=1.0)), rounds=2, noisy=False)
    letters = Audited(setup, tmp_path)
    led(setup, letters.remote(tmp_path / "server"), 0, 2)
    (key,) = (tmp_path / "client-1").glob("noise-*.key")
    key.write_bytes(os.urandom(32))
    with pytest.raises(ValueError, match=r"the journal 'noise-\w+' was removed.* the server has signed 1 entries"):
        letters.site("client-1")


def test_serial_numbers_of_manifests_only_rise(tmp_path: Path) -> None:
    def write(serial: int, digest: str) -> None:
        (tmp_path / SERIALS).write_text(json.dumps({"f" * 64: {"serial": serial, "digest": digest * 64}}))

    server = Countersignatures(None)
    write(3, "a")
    journals = JournalChains("a", tmp_path, [], [], SERIALS)
    server.note("a", journals.statement())
    server.sign()
    write(4, "b")
    journals.confirm(server.signed("a"))
    for serial, digest in ((2, "a"), (3, "c")):
        write(serial, digest)
        with pytest.raises(Refused, match=f"the server has signed 3 entries .* and here are {serial} with"):
            journals.confirm(server.signed("a"))
        with pytest.raises(Refused, match="had 3 entries with the head a"):
            server.note("a", journals.statement())


class Death(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_site_that_dies_at_any_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    setup = toy_setup(NOISY, rounds=30, noisy=False)
    letters = Audited(setup, tmp_path)
    real, writes, dies = getattr(os, call), [0], [0]

    def mortal(*given: object) -> object:
        writes[0] += 1
        if writes[0] == dies[0]:
            raise Death
        return real(*given)

    remote = letters.remote(tmp_path / "server")
    deaths, handle = 0, letters.sites[1].handle

    def handled(head: bytes, body: bytes) -> tuple[bytes, bytes]:
        nonlocal handle, deaths
        with monkeypatch.context() as patch:
            patch.setattr(os, call, mortal)
            writes[0], dies[0] = 0, dies[0] + 1
            try:
                return handle(head, body)
            except Death:
                deaths += 1
        with (tmp_path / "client-1" / "audit.jsonl").open("a") as file:
            file.write('{"time": 1, "wa')  # and in the middle of a line
        handle = letters.site("client-1").handle
        dies[0] = 10**9 if deaths == 12 else dies[0]
        return handle(head, body)

    letters.sites[1].handle = handled  # type: ignore[method-assign]
    for _ in range(6):
        dies[0] = 0
        records = led(setup, remote, 0, 3)
        assert not any(record.errors for record in records), records
    assert deaths > 3


def test_a_server_that_goes_back_knows_less_and_asks_again(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=4, noisy=False)
    letters = Audited(setup, tmp_path)
    server = tmp_path / "server"
    led(setup, letters.remote(server), 0, 1)
    shutil.copytree(server, tmp_path / "older")
    led(setup, letters.remote(server), 1, 2)
    shutil.rmtree(server)
    shutil.move(tmp_path / "older", server)
    letters.sites[1] = letters.site("client-1")
    newest = (tmp_path / "client-1" / SEEN).read_text()
    assert not any(record.errors for record in led(setup, letters.remote(server), 1, 3))
    assert (tmp_path / "client-1" / SEEN).read_text() != newest  # signed anew, and longer
    # Nor does one that has lost everything, its key included, find a site that refuses.
    shutil.rmtree(server)
    assert not any(record.errors for record in led(setup, letters.remote(server), 1, 2))
    assert (server / KEY).stat().st_mode & 0o777 == 0o600


def test_a_forged_or_older_signature_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "privacy.jsonl").write_text("{}\n")
    journals, server = JournalChains("a", tmp_path, ["privacy.jsonl"], [], SERIALS), Countersignatures(None)
    server.note("a", journals.statement())
    server.sign()
    first = server.signed("a")
    journals.confirm(first)
    with (tmp_path / "privacy.jsonl").open("a") as file:
        file.write("{}\n")
    server.note("a", journals.statement())
    server.sign()
    journals.confirm(server.signed("a"))
    journals.confirm(first)
    assert (tmp_path / SEEN).read_text() == server.signed("a")
    told = json.loads(server.signed("a"))
    forged = [{**told, "journals": {"privacy": [1, "0" * 32]}}, {**told, "key": "00" * 32}, [], {"journals": {}}, 3]
    for wrong in (*map(json.dumps, forged), "{", server.signed("a")[:-1]):
        with pytest.raises(Refused, match="the server's signature under the journals of 'a' is none"):
            journals.confirm(wrong)
    with pytest.raises(Refused, match="signature under the journals of 'b'"):
        JournalChains("b", tmp_path / "b", [], [], SERIALS).confirm(first)


@pytest.mark.parametrize(
    "told", [" ", "[]", "{", '{"a": 3}', '{"a": [0, "x"]}', '{"a": [true, "%s"]}' % ("0" * 32), '{"a": [1, "short"]}']
)
def test_a_statement_that_is_none_is_refused(told: str) -> None:
    with pytest.raises(Refused):
        Countersignatures(None).note("a", told)


def test_a_site_that_had_journals_cannot_say_nothing() -> None:
    server = Countersignatures(None)
    server.note("a", "")
    server.note("a", json.dumps({"audit.jsonl": [3, "0" * 32]}))
    with pytest.raises(Refused, match=r"of 'a' had 3 entries with the head 0+, and now has 0 with no head"):
        server.note("a", "")


def test_damaged_files_of_the_server_are_named(tmp_path: Path) -> None:
    Countersignatures(tmp_path)
    (tmp_path / KNOWN).write_text('{"a": "x"}')
    with pytest.raises(ValueError, match=r"journals\.json must hold signed heads of sites' journals"):
        Countersignatures(tmp_path)
    (tmp_path / KEY).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"journals\.key must hold the 32 bytes of this server's key, got 1"):
        Countersignatures(tmp_path)


def test_a_late_reply_goes_by_what_was_known_before() -> None:
    """On a bad line a site introduces itself again while a reply that it gave before is still fetched."""
    heads = Countersignatures(None)

    def told(length: int) -> str:
        return json.dumps({"audit": [length, f"{length:032x}"]})

    heads.note("a", told(3))
    asked = heads.known("a")
    heads.note("a", told(7))  # an introduction
    heads.note("a", told(5), asked)
    assert heads.known("a")["audit"][0] == 7
    for shorter, before in ((2, asked), (5, None)):
        with pytest.raises(Refused, match="removed, cut or put back"):
            heads.note("a", told(shorter), before)


def put_back(setup: Setup, root: Path) -> list[str]:
    """The sites of which a server says, when all processes begin again, that they know more than its folder."""
    said: list[str] = []
    letters, tell = Audited(setup, root), lambda event: said.append(getattr(event, "text", ""))
    remote = Remote(setup, letters, timeouts=QUICK, memory=root / "server", progress=tell)
    remote.sites.gather(CLIENTS, wait=5)
    remote.remember()
    return sorted(text.split(": ")[1].split()[0] for text in said if "was put back from an old copy" in text)


def test_a_run_folder_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    setup, memory = toy_setup(NOISY, rounds=3, noisy=False), tmp_path / "server"
    letters = Audited(setup, tmp_path)
    led(setup, letters.remote(memory), 0, 1)
    shutil.copytree(memory, tmp_path / "backup")
    remote = letters.remote(memory)
    led(setup, remote, 1, 2)
    remote.take_leave()  # which shows what was signed after the last round
    assert not put_back(setup, tmp_path)
    shutil.rmtree(memory)
    shutil.copytree(tmp_path / "backup", memory)
    assert put_back(setup, tmp_path) == sorted(CLIENTS)
    assert not put_back(setup, tmp_path), "it is told once"
    heads = Countersignatures(memory)
    for name in CLIENTS:  # what the sites kept counts again
        kept = json.loads((tmp_path / name / SEEN).read_text())["journals"]
        known = heads.known(name)
        assert all(known[journal][0] >= length for journal, (length, _) in kept.items())


def test_heads_of_another_server_say_nothing_of_this_one(tmp_path: Path) -> None:
    here, other = Countersignatures(tmp_path / "here"), Countersignatures(tmp_path / "other")
    other.note("a", json.dumps({"privacy": [5, "a" * 32]}))
    other.sign()
    assert not here.was_put_back("a", other.signed("a"))
    assert not here.was_put_back("a", "{")
    assert not here.was_put_back("b", other.signed("a"))
    assert not other.was_put_back("a", other.signed("a"))
    assert not here.known("a")
