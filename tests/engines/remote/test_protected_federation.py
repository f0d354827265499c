"""Protections across machines: noise, a site's privacy record, secure aggregation, medians."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.client import Journal, Site, client_named
from confed.engines.remote.protocol import GOODBYE, Answer, Limits, Request, open_body, seal
from confed.engines.remote.server import Remote
from confed.federation.algorithm import keeps_protections
from confed.federation.messages import Message
from confed.federation.randomness import normal
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import ORDERS, sampled_epsilon
from confed.privacy.cut import CutPrivacy
from confed.testing.toy import toy_clients, toy_setup
from hostile_reply import Tamper, with_tensors
from memory_transport import CLIENTS, PATIENT, Letters, fit, remote_of, rounds, same

NOISY = UpdatePrivacy(clip=0.5, noise=4.0)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact(multiplier: float, times: int, delta: float) -> float:
    """Epsilon of composed Gaussian mechanisms by Balle and Wang's formula (2018, theorem 8), without the library."""
    mu = 2 * math.sqrt(times) / multiplier  # a replaced client moves the sum by two norms

    def excess(epsilon: float) -> float:
        low = norm.logcdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + low) - delta)

    return float(brentq(excess, 0, 500))  # type: ignore[arg-type]


# Noise --------------------------------------------------------------------------------------------------------------


def test_noise_of_the_system_is_normal() -> None:
    one, other = (normal((300, 100), None, torch.float64) for _ in range(2))
    assert not torch.equal(one, other)
    assert float(one.mean().abs()) < 0.03
    assert abs(float(one.std()) - 1) < 0.02
    assert float(one.abs().max()) < 9
    assert normal((0, 3), None).shape == (0, 3)
    assert normal((), None).ndim == 0
    # Why: of a seed of 64 bits torch reads 32.
    near, far = (torch.randn(20, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32))
    assert torch.equal(near, far)


def test_noise_at_a_site_is_no_function_of_the_seed(tmp_path: Path) -> None:
    for number, method in enumerate(
        (FedAvg(update_privacy=NOISY), SplitLearning(privacy=CutPrivacy(clip=1.0, noise=0.5)))
    ):
        setup = toy_setup(method, rounds=1, noisy=False)
        once, again = (
            rounds(setup, remote_of(Letters(setup, tmp_path / f"{number}-{name}"), PATIENT))[0].servers for name in "ab"
        )
        assert not same(once, again)
        assert not same(once, rounds(setup, InProcess(setup))[0].servers)
        assert same(rounds(setup, InProcess(setup))[0].servers, rounds(setup, InProcess(setup))[0].servers)


def test_a_site_takes_no_value_of_extreme_scale(tmp_path: Path) -> None:
    """A server chooses what sites train from, and values that swallow an update in their rounding say much of it."""
    setup = toy_setup(FedAvg(), rounds=1, noisy=False)
    site = Site(setup, client_named(setup, "client-0"), tmp_path)
    request = fit(setup)
    shared = dict(Workspace(setup.model()).initial)
    huge = {**shared, "head.bias": torch.full_like(shared["head.bias"], -1e9)}
    reply = site.handle(request[0], seal(Message(huge)))
    assert "'head.bias' holds values from -1e+09 to -1e+09, and 1.05e+06 is the most" in str(
        Answer.from_bytes(reply[0], Limits()).error
    )
    assert Answer.from_bytes(site.handle(*request)[0], Limits()).error is None


# The site's book ----------------------------------------------------------------------------------------------------


def test_a_site_writes_down_what_its_updates_cost(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(update_privacy=NOISY), rounds=3, noisy=False)
    records = rounds(setup, remote_of(Letters(setup, tmp_path), PATIENT))
    assert not any(record.errors for record in records)
    for name in CLIENTS:
        book = lines(tmp_path / name / "privacy.jsonl")
        assert [line["round"] for line in book] == [1, 2, 3]
        for times, line in enumerate(book, start=1):
            assert line["epsilon"] == pytest.approx(exact(4.0, times, 1e-5), rel=1e-6)
    # Another recipe on the same examples costs on top, with its own multiplier.
    other = toy_setup(FedAvg(update_privacy=replace(NOISY, noise=8.0)), rounds=1, noisy=False)
    rounds(other, remote_of(Letters(other, tmp_path), PATIENT))
    last = lines(tmp_path / "client-0" / "privacy.jsonl")[-1]
    # 3 of 4 and 1 of 8 weigh as much as 13 of 8.
    assert last["epsilon"] == pytest.approx(exact(8.0, 13, 1e-5), rel=1e-6)


def test_a_site_stops_at_its_limit_and_the_others_go_on(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(update_privacy=NOISY), rounds=3, noisy=False)
    letters = Letters(setup, tmp_path)
    limit = exact(4.0, 2, 1e-5) * 1.0001
    letters.sites[1] = Site(setup, client_named(setup, "client-1"), tmp_path / "client-1", limit=limit)
    records = rounds(setup, remote_of(letters, PATIENT))
    assert [set(record.errors) for record in records] == [set(), set(), {"client-1"}]
    assert "this site's limit of privacy is reached: epsilon" in records[2].errors["client-1"]
    # Nor does a new process forget.
    again = Site(setup, client_named(setup, "client-1"), tmp_path / "client-1", limit=limit)
    with pytest.raises(ValueError, match="limit of privacy is reached"):
        again.journal.check(NOISY)
    with pytest.raises(ValueError, match="needs a recipe whose clients add noise"):
        Site(toy_setup(FedAvg()), client_named(setup, "client-1"), tmp_path / "x", limit=1.0)
    with pytest.raises(ValueError, match="must be positive and finite, got 0"):
        Journal(tmp_path, "run", 0.0)


@pytest.mark.parametrize("method", [FedAvg(), FedAvg(update_privacy=replace(NOISY, at="server")), SplitLearning()])
def test_what_left_without_noise_of_the_site_stays_in_its_book(tmp_path: Path, method: FedAvg) -> None:
    setup = toy_setup(method, rounds=2, noisy=False)
    rounds(setup, remote_of(Letters(setup, tmp_path), PATIENT))
    book = lines(tmp_path / "client-0" / "privacy.jsonl")
    assert {line["round"]: (line["noise"], line["epsilon"]) for line in book} == {1: (0.0, None), 2: (0.0, None)}
    assert len({(line["round"], line["action"]) for line in book}) == len(
        book
    )  # once a round, however often it is asked
    noised = toy_setup(FedAvg(update_privacy=NOISY), rounds=1, noisy=False)
    with pytest.raises(ValueError, match="a limit of epsilon cannot hold: round 1 of the recipe"):
        Site(noised, client_named(noised, "client-0"), tmp_path / "client-0", limit=8.0)
    site = Site(noised, client_named(noised, "client-0"), tmp_path / "client-0")
    assert site.journal.epsilon(NOISY) == math.inf
    site.handle(*fit(noised))
    assert lines(tmp_path / "client-0" / "privacy.jsonl")[-1]["epsilon"] is None


def test_a_repeated_request_costs_nothing_and_a_new_one_does(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(update_privacy=NOISY), rounds=3, noisy=False)
    site = Site(setup, client_named(setup, "client-0"), tmp_path)
    first, second = site.handle(*fit(setup)), site.handle(*fit(setup))
    assert first[1] == second[1]
    assert len(lines(tmp_path / "privacy.jsonl")) == 1
    site.handle(*fit(setup, round=1))
    third = site.handle(*fit(setup))  # the server was killed, and is back in the first round
    assert third[1] != first[1]
    assert len(lines(tmp_path / "privacy.jsonl")) == 3
    # Killed while it wrote: nothing had been sent.
    with (tmp_path / "privacy.jsonl").open("a") as file:
        file.write('{"noise": 4.')
    assert Journal(tmp_path, "run").epsilon(NOISY) == pytest.approx(exact(4.0, 3, 1e-5), rel=1e-6)
    assert len(lines(tmp_path / "privacy.jsonl")) == 3
    (tmp_path / "privacy.jsonl").write_text("x\n" + (tmp_path / "privacy.jsonl").read_text())
    with pytest.raises(ValueError, match="is damaged"):
        Journal(tmp_path, "run")


def test_amplification_by_sampling_is_that_of_the_theorem() -> None:
    """Wang, Balle and Kasiviswanathan 2019, theorem 27, in integer orders, with Canonne et al.'s conversion (2020)."""
    noise, cohort, present, times, delta = 3.0, 2, 40, 20, 1e-5
    share = cohort / present

    def rho(order: float) -> float:
        return order * 2 / noise**2  # of sensitivity 2

    def amplified(order: int) -> float:
        terms = share**2 * math.comb(order, 2) * min(4 * math.expm1(rho(2)), 2 * math.exp(rho(2)))
        terms += sum(2 * share**j * math.comb(order, j) * math.exp((j - 1) * rho(j)) for j in range(3, order + 1))
        return math.log1p(terms) / (order - 1)

    found = min(
        times * amplified(a) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in {int(order) for order in ORDERS if order == int(order) and 1 < order < 24}
    )
    # The library knows a somewhat tighter form of the same theorem, and orders between these.
    assert 0.8 * found < sampled_epsilon(noise, {(cohort, present): times}, delta) <= found * (1 + 1e-9)


# Secure sums and medians --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [FedAvg(secure_sum=SecureSum()), FedAvg(robust=RobustMean("median"))], ids=["sum", "median"]
)
def test_protected_rounds_are_those_of_the_simulator(tmp_path: Path, method: FedAvg) -> None:
    setup = toy_setup(method, rounds=2)
    records = rounds(setup, remote_of(Letters(setup, tmp_path), PATIENT))
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


def test_a_site_killed_in_a_secure_sum_goes_on_with_its_keys(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=2)
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters, PATIENT)
    killed: list[str] = []

    def kill(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind in ("secure_shares", "fit", "secure_unmask") and kind not in killed:
            killed.append(kind)
            letters.sites[1] = letters.site("client-1")
            letters.since[1] = f"after {kind}"
            return None  # type: ignore[return-value]  # the reply never left
        return head, body

    letters.tamper[1] = kill
    records = rounds(setup, remote)
    assert killed == ["secure_shares", "fit", "secure_unmask"]
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


def test_a_server_cannot_have_a_site_take_a_step_of_a_sum_twice(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = Letters(setup, tmp_path)
    site = letters.sites[0]
    site.store.scrub = lambda *_, **__: None  # type: ignore[method-assign]  # killed before it removed the secrets
    rounds(setup, remote_of(letters, PATIENT))
    sent = {kind: (head, body) for to, kind, head, body in letters.sent if to == 0}

    def back(kind: str, **changes: object) -> str | None:
        """The site is sent back to the state before a step, which is asked for once more with another content."""
        head, body = sent[kind]
        message = open_body(body, Limits(), {}, frozenset())
        scalars = {**message.scalars, **changes}
        reply = site.handle(head, seal(Message(message.tensors, scalars)))  # type: ignore[arg-type]
        return Answer.from_bytes(reply[0], Limits()).error

    survivors = json.dumps(["client-0", "client-1"])
    assert "the same secret is not used twice" in str(back("secure_unmask", survivors=survivors))
    assert back("secure_unmask") is None  # what was asked then is answered again
    # A step further back: masks of the same keys on another update.
    other = Letters(setup, tmp_path / "other")
    remote = remote_of(other, PATIENT)

    def stop(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == "fit":
            raise InterruptedError
        return head, body

    other.tamper[0] = stop
    with pytest.raises(InterruptedError):
        rounds(setup, remote)
    head, body = next((h, b) for to, kind, h, b in other.sent if (to, kind) == (0, "fit"))
    message = open_body(body, Limits(), {}, frozenset())
    moved = {n: t + 1 if t.is_floating_point() else t for n, t in message.tensors.items()}
    reply = other.sites[0].handle(head, seal(Message(moved, message.scalars)))
    assert "the same secret is not used twice" in str(Answer.from_bytes(reply[0], Limits()).error)


def test_a_weight_of_the_servers_choice_is_refused(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = Letters(setup, tmp_path)

    class Heavy(FedAvg):
        @keeps_protections("secure_sum")
        def weight(self, reply: object) -> float:
            return 1000.0

    remote = remote_of(letters, PATIENT)
    setup = replace(setup, algorithm=Heavy(secure_sum=SecureSum()))
    remote._setup = setup  # type: ignore[attr-defined]  # a server whose code is another
    with pytest.raises(RuntimeError, match=r"client-\d' has the weight \d+\.0, and is asked for 1000"):
        rounds(setup, remote)


def changed(name: str, value: int) -> Tamper:
    """A reply in which all bytes of a tensor are others."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            tensors[name].view(torch.uint8).flatten()[:] = value

    return with_tensors(change)


def test_a_public_key_that_is_none_leaves_its_client_out(tmp_path: Path) -> None:
    """Zeros are a point of small order: whoever seals a share for it fails, and so would everybody."""
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), clients=toy_clients(sizes=(12, 12, 12, 12)), rounds=1)
    letters = Letters(setup, tmp_path, (*CLIENTS, "client-3"))
    letters.tamper[3] = changed("mask", 0)
    remote = remote_of(letters, PATIENT)
    remote.sites.gather((*CLIENTS, "client-3"), wait=5)
    with pytest.warns(UserWarning, match="'client-3' is left out of secure aggregation: its keys are none"):
        (record,) = rounds(setup, remote)
    assert all(torch.isfinite(t.float()).all() for t in record.servers["main"].params.values())


@pytest.mark.parametrize("name", ["shares", "secure sum/0"])
def test_a_spoiled_sum_is_noticed_and_never_averaged(tmp_path: Path, name: str) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = changed(name, 7)
    with pytest.raises((RuntimeError, ValueError), match=r"is spoiled|do not belong together|no shares of one secret"):
        rounds(setup, remote_of(letters, PATIENT))


def test_no_answer_to_the_last_step_leaves_its_client_out(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum(colluders=0)), rounds=1)
    letters = Letters(setup, tmp_path)

    def empty(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        return (head, seal(Message({}, {"index": "[]"}))) if kind == "secure_unmask" else (head, body)

    letters.tamper[1] = empty
    (record,) = rounds(setup, remote_of(letters, PATIENT))  # two of three are enough
    honest: Mapping[str, object] = rounds(setup, InProcess(setup))[0].servers
    assert same(record.servers, honest)  # type: ignore[arg-type]


def four(root: Path, rounds: int) -> tuple[Setup, Letters, Remote]:
    """Four members of a secure aggregation, which goes on without one of them."""
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), clients=toy_clients(sizes=(12, 12, 12, 12)), rounds=rounds)
    letters = Letters(setup, root, (*CLIENTS, "client-3"))
    remote = remote_of(letters, PATIENT)
    remote.sites.gather((*CLIENTS, "client-3"), wait=5)
    return setup, letters, remote


def kept_of_sums(letters: Letters) -> dict[str, list[str]]:
    """Site -> versions of its state in which keys, seeds or parcels of a secure aggregation are."""
    found: dict[str, list[str]] = {}
    for number, site in letters.sites.items():
        paths = sorted(site.store.root.glob("*.states"))
        assert paths
        found[f"client-{number}"] = [path.stem for path in paths if b"secure sum" in path.read_bytes()]
    return found


def test_secrets_of_a_finished_sum_are_gone_from_all_states(tmp_path: Path) -> None:
    setup, letters, remote = four(tmp_path, rounds=2)
    counts: list[int] = []

    def look(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == "secure_unmask":
            counts.append(len(kept_of_sums(letters)["client-0"]))
        return head, body

    letters.tamper[0] = look
    # The third fails in the middle of the first round: what it has of that sum goes when the next one begins.
    lost: list[str] = []

    def fail(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == "fit" and not lost:
            lost.append(kind)
            return b"", b""
        return head, body

    letters.tamper[2] = fail
    rounds(setup, remote)
    assert lost
    assert counts == [0, 0]
    assert kept_of_sums(letters) == {f"client-{number}": [] for number in range(4)}


def test_secrets_of_an_unfinished_sum_go_with_the_run(tmp_path: Path) -> None:
    setup, letters, remote = four(tmp_path, rounds=1)
    letters.tamper[2] = lambda kind, head, body: (b"", b"") if kind == "fit" else (head, body)
    rounds(setup, remote)
    assert kept_of_sums(letters)["client-2"]
    letters.sites[2].handle(Request("bye", "client-2", GOODBYE, 0, 1, 0).to_bytes(), seal(Message()))
    assert kept_of_sums(letters)["client-2"] == []
