"""Compressed updates and models across machines: the simulator's bits, and what a site may not send."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.engines.local import InProcess
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.protocol import fingerprint
from confed.engines.remote.server import Remote
from confed.engines.remote.update_bounds import Bounds
from confed.federation.compression import PACKED_UPDATE, Compression
from confed.federation.wire import decode, encode
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, QUICK, Letters, remote_of, rounds, same

PACKED = {"uplink": Compression(8), "downlink": Compression(4, 0.5)}


def compressed(**options: Compression) -> Setup:
    return replace(toy_setup(FedAvg(), rounds=3), **(options or PACKED))


def test_sites_send_the_simulators_bits_and_bytes(tmp_path: Path):
    given = compressed()
    letters = Letters(given, tmp_path)
    remote, simulated = rounds(given, remote_of(letters)), rounds(given, InProcess(given))
    assert [record.errors for record in remote] == [{}, {}, {}]
    assert same(remote[-1].servers, simulated[-1].servers)
    plain = toy_setup(FedAvg(), rounds=3)
    assert not same(simulated[-1].servers, rounds(plain, InProcess(plain))[-1].servers)
    assert [record.bytes_up for record in remote] == [record.bytes_up for record in simulated]
    assert [record.bytes_down for record in remote] == [record.bytes_down for record in simulated]
    sent = [len(body) for to, kind, _, body in letters.sent if kind == "fit" and to == 0]
    assert sent == [record.bytes_down["client-0"] for record in remote]


def test_a_site_that_was_restarted_goes_on_with_equal_bits(tmp_path: Path):
    given = compressed()
    letters = Letters(given, tmp_path)
    remote = remote_of(letters)
    first = rounds(given, remote, stop=1)[-1]
    letters.sites = {number: letters.site(name) for number, name in enumerate(CLIENTS)}
    last = rounds(given, remote, first.servers, start=1)[-1]
    assert last.errors == {}
    assert same(last.servers, rounds(given, InProcess(given))[-1].servers)


def tampered(change: float) -> object:
    """A site's update with the scales of all blocks times a number, where replies have some."""

    def tamper(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        message = decode(body)
        if PACKED_UPDATE not in message.tensors:
            return head, body
        packed = (message.tensors[PACKED_UPDATE].view(torch.float32) * change).view(torch.uint8)
        return head, encode(replace(message, tensors={**message.tensors, PACKED_UPDATE: packed}))

    return tamper


def tampered_round(root: Path, change: float) -> tuple[dict[str, str], str]:
    given = compressed(uplink=Compression(32, 1 - 1e-9))  # values alone, without positions
    letters = Letters(given, root)
    letters.tamper[0] = tampered(change)  # type: ignore[assignment]
    remote = Remote(given, letters, timeouts=QUICK, bounds=Bounds())
    remote.sites.gather(CLIENTS, wait=5)
    record = rounds(given, remote, stop=1)[-1]
    return dict(record.errors), remote.shortened.get("client-0", "")


@pytest.mark.parametrize(
    ("change", "error", "shortened"),
    [
        (1.0, "", ""),
        (1e4, "", "it was scaled down to that"),
        (1e12, "is the most in this run", ""),
        (float("nan"), "finite values, got a NaN", ""),
    ],
)
def test_an_update_is_bounded_as_it_is_read(tmp_path: Path, change: float, error: str, shortened: str):
    errors, said = tampered_round(tmp_path, change)
    assert error in errors.get("client-0", "")
    assert bool(errors) == bool(error)
    assert shortened in said
    assert bool(said) == bool(shortened)


def test_a_site_that_sends_its_update_bare_is_refused(tmp_path: Path):
    letters = Letters(compressed(), tmp_path)

    def tamper(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        message = decode(body)
        if PACKED_UPDATE in message.tensors:
            message = replace(message, tensors=dict(InProcess(letters.setup).workspace.initial))
        return head, encode(message)

    letters.tamper[0] = tamper
    record = rounds(letters.setup, remote_of(letters), stop=1)[-1]
    assert "tensors missing: ['uplink/packed']" in record.errors["client-0"]


def test_server_and_site_must_agree_on_compression():
    given = compressed()
    others = [
        toy_setup(FedAvg(), rounds=3),
        replace(given, uplink=Compression(4)),
        replace(given, downlink=Compression()),
    ]
    for other in others:
        told = fingerprint(other, Workspace(other.model())).scalars()
        problem = fingerprint(given, Workspace(given.model())).differences(told, "this site", "the server")
        assert (problem or "").startswith("the recipe")
