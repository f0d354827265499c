"""Server and site of neighbouring versions: one protocol apart goes, a setting that one does not know is no bar."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.engines.perform import Setup, Workspace
from confed.engines.remote import server as remote_server
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Fingerprint, fingerprint
from confed.federation.algorithm import Algorithm
from confed.system.release import PROTOCOL, VERSION
from confed.testing.toy import toy_setup
from memory_transport import Letters, remote_of, rounds


def next_fedavg(**settings: object) -> Algorithm:
    """FedAvg as a later version has it, with settings that this one does not know."""

    @dataclass(frozen=True)
    class FedAvgLater(FedAvg):
        off: float = field(default=0.0, kw_only=True)
        constant: float = field(default=0.5, kw_only=True)

    FedAvgLater.__name__ = "FedAvg"
    return FedAvgLater(**settings)  # pyright: ignore


def told(setup: Setup) -> Fingerprint:
    return fingerprint(setup, Workspace(setup.model()))


def problem(here: Setup, there: Setup) -> str:
    first, second = told(here), told(there)
    either = [
        one.differences(other.scalars(), "the server", "the site") or ""
        for one, other in ((first, second), (second, first))
    ]
    assert bool(either[0]) == bool(either[1]), "both sides must say the same"
    return either[0]


@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
def test_protocols_one_apart_go_together_and_others_do_not(step: int, tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path)
    site = letters.sites[1]
    site.fingerprint = replace(site.fingerprint, protocol=PROTOCOL + step, confed="9.9")
    remote = remote_of(letters)
    note = remote.sites.status["client-1"].note
    if abs(step) <= 1:
        assert "client-1" in remote.sites.lines
        assert site.problem is None
    else:
        assert f"the server has {PROTOCOL} (confed " in note
        assert f"the site has {PROTOCOL + step} (confed 9.9)" in note
        assert "\n" not in note
        assert "the protocol must be the same or one apart" in str(site.problem)


def test_a_server_of_protocol_3_refuses_a_site_of_protocol_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = Letters(toy_setup(FedAvg(), rounds=1), tmp_path)
    for site in letters.sites.values():
        site.fingerprint = replace(site.fingerprint, protocol=1)
    letters.sites[0].fingerprint = replace(letters.sites[0].fingerprint, protocol=2)
    monkeypatch.setattr(remote_server, "fingerprint", lambda *of: replace(fingerprint(*of), protocol=3, confed="9.9"))
    remote = remote_of(letters)
    assert "client-0" in remote.sites.lines
    assert "client-1" not in remote.sites.lines
    line = f"this site has 1 (confed {VERSION}), the server has 3 (confed 9.9); install the file that the coordinator"
    assert line in str(letters.sites[1].problem)
    assert "\n" not in str(letters.sites[1].problem)


def test_a_new_setting_with_its_default_is_no_bar(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=2)
    later = replace(setup, algorithm=next_fedavg())
    letters = Letters(setup, tmp_path)
    letters.setup = later
    before = rounds(setup, remote_of(Letters(setup, tmp_path / "before")))
    records = rounds(later, remote_of(letters))
    assert not any(record.errors for record in records)
    for name, server in before[-1].servers.items():
        now = records[-1].servers[name].params
        assert all(torch.equal(now[tensor], values) for tensor, values in server.params.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: replace(s, algorithm=next_fedavg(off=0.1)), "algorithm.off = none, the site has 0.1"),
        (lambda s: replace(s, algorithm=next_fedavg(constant=0.6)), "algorithm.constant = none, the site has 0.6"),
        (lambda s: replace(s, local=replace(s.local, lr=7.0)), "local.lr = "),
        (lambda s: replace(s, seed=s.seed + 1), "run.seed = 0, the site has 1"),
    ],
    ids=["a new one that is on", "a new one that is another", "one of both", "the seed"],
)
def test_a_setting_that_decides_is_named_with_both_values(change: Callable[[Setup], Setup], says: str) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    text = problem(setup, change(setup))
    assert text.startswith("the recipe")
    assert says in text


def test_a_default_that_another_version_changed_is_noticed() -> None:
    def with_default(constant: float) -> Setup:
        algorithm = next_fedavg()
        fields = type(algorithm).__dataclass_fields__
        fields["constant"].default = constant
        return replace(toy_setup(FedAvg()), algorithm=replace(algorithm, constant=constant))  # pyright: ignore

    assert not problem(with_default(0.5), with_default(0.5))
    assert "algorithm.constant = 0.5, the site has 0.25" in problem(with_default(0.5), with_default(0.25))


def test_the_state_of_a_site_is_found_after_an_update(tmp_path: Path) -> None:
    """Options that are off as by default do not rename the folder of a run; all others do."""
    setup = toy_setup(FedAvg(), rounds=1)
    later = toy_setup(replace(FedAvg()), rounds=1)
    assert told(setup).run == told(later).run
    settings = json.loads(told(setup).terms)
    with_off = {**settings, "algorithm.off": [0.0, True], "algorithm.list": [[], True]}
    assert replace(told(setup), terms=json.dumps(with_off)).run == told(setup).run
    for changed in ({"local.lr": [7.0, False]}, {"local.lr": [7.0, True]}, {"algorithm.off": [0.0, False]}):
        assert replace(told(setup), terms=json.dumps({**settings, **changed})).run != told(setup).run


def test_a_site_before_protocols_is_refused_in_a_line(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    site = Site(setup, client_named(setup, "client-0"), tmp_path)
    older = {"version": "0.2.0", "terms": "ab" * 16, "tensors": "cd" * 16, "values": "ef" * 16}
    text = site.fingerprint.differences(older, "the server", "the site") or ""
    assert text.endswith(
        "the site has none (confed an older version); install the file that the coordinator handed out"
    )
    assert "\n" not in text


@pytest.mark.parametrize("terms", ["", "[", "[]", "5", '{"local.lr": 3}', "[" * 10_000, '{"a\\u001b": [1, true]}'])
def test_terms_that_are_none_are_a_difference(terms: str) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    text = told(setup).differences({**told(setup).scalars(), "terms": terms}, "here", "there") or ""
    assert text.startswith("the recipe")
    assert text.isprintable()
