"""Clipping and noise on updates: what is released, for which methods, and what it costs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from confed.algorithms.fedadam import FedAdam
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.fedper import FedPer
from confed.algorithms.moon import MOON
from confed.algorithms.robust import Robust
from confed.algorithms.scaffold import Scaffold
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Params, Scope
from confed.federation.robust_mean import RobustMean
from confed.federation.state import ServerState
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import epsilon, sampled_epsilon
from confed.privacy.ledger import PrivacyLedger
from confed.privacy.protections import actions, check_layouts, protect
from confed.testing.toy import toy_model, toy_setup
from refusals import refuses
from toy_runs import Listener, simulated


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


START = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]]), "n": torch.tensor(5)}
SENT = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([[6.0]]), "n": torch.tensor(9)}  # moved by 3, 0 and 4


# What is released -------------------------------------------------------------------------------------------


def test_an_update_is_shortened_as_a_whole() -> None:
    released = UpdatePrivacy(clip=1.0).release(SENT, START, rng())
    torch.testing.assert_close(released["a"], torch.tensor([1.6, 1.0]))  # norm 5, so a fifth of 3 and of 4
    torch.testing.assert_close(released["b"], torch.tensor([[2.8]]))
    assert int(released["n"]) == 5  # counters tell nothing
    released = UpdatePrivacy(clip=5.1).release(SENT, START, rng())
    torch.testing.assert_close(released["a"], SENT["a"])


def test_or_every_tensor_by_itself_within_the_same_bound() -> None:
    released = UpdatePrivacy(clip=math.sqrt(2.0), norm="tensor").release(SENT, START, rng())
    torch.testing.assert_close(released["a"], torch.tensor([2.0, 1.0]))  # two tensors, so 1 each
    torch.testing.assert_close(released["b"], torch.tensor([[3.0]]))


@pytest.mark.parametrize("scale", [1.0, 1e3, 3e4, 1e6, 1e30])
@pytest.mark.parametrize("norm", ["update", "tensor"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rounding_lengthens_no_update(scale: float, norm: Any, kind: torch.dtype) -> None:
    """Where a unit in the last place is as large as a coordinate, rounding once at the end doubles a norm."""
    start = {"w": torch.linspace(1, 1.9, 4000).mul(scale).to(kind), "v": torch.full((30,), scale).to(kind)}
    moved = {n: torch.randn(t.shape, generator=rng(), dtype=torch.float64) for n, t in start.items()}
    sent = {n: (t.double() + moved[n]).to(kind) for n, t in start.items()}
    released = UpdatePrivacy(clip=0.125, norm=norm).release(sent, start, rng())
    length = math.sqrt(sum(float((t.double() - start[n].double()).square().sum()) for n, t in released.items()))
    assert length <= 0.125 * (1 + 1e-12)
    if scale == 1.0 and kind is torch.float32:  # where there is room for it, nothing but the length changes
        assert length > 0.1249
    # With noise, what is rounded has left already: the same noise on the same origin differs by the clipped update.
    loud = UpdatePrivacy(clip=0.125, noise=1e-300, norm=norm)
    exact = loud.release({n: t.double() for n, t in sent.items()}, {n: t.double() for n, t in start.items()}, rng())
    left = math.sqrt(sum(float((t - start[n].double()).square().sum()) for n, t in exact.items()))
    assert scale > 1e6 or left == pytest.approx(min(0.125, left), rel=1e-6)
    assert all(torch.equal(t, exact[n].to(kind)) for n, t in loud.release(sent, start, rng()).items())


def test_changes_are_clipped_towards_zero() -> None:
    sent = {"c/a": torch.tensor([3.0, 4.0])}
    released = UpdatePrivacy(clip=1.0).release(sent, {"c/a": torch.full((2,), 100.0)}, rng(), changes=("c/*",))
    torch.testing.assert_close(released["c/a"], torch.tensor([0.6, 0.8]))


def test_noise_has_the_stated_spread() -> None:
    start = {"w": torch.zeros(200, 100)}
    privacy = UpdatePrivacy(clip=0.5, noise=3.0)
    noise = privacy.release(start, start, rng())["w"]
    assert stats.kstest(noise.flatten().numpy(), "norm", args=(0, 1.5)).pvalue > 0.01
    shared = privacy.release(start, start, rng(1), among={"w": 9})["w"]
    assert stats.kstest(shared.flatten().numpy(), "norm", args=(0, 0.5)).pvalue > 0.01
    assert torch.equal(noise, privacy.release(start, start, rng())["w"])
    secret = [privacy.release(start, start, None)["w"] for _ in range(2)]
    assert not torch.equal(*secret)
    for drawn in secret:
        assert stats.kstest(drawn.flatten().numpy(), "norm", args=(0, 1.5)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be positive, got 0.0"),
        ({"clip": 1.0, "noise": -1.0}, "noise must not be negative, got -1.0"),
        ({"clip": 1.0, "delta": 1.0}, r"delta must lie in \(0, 1\), got 1.0"),
        ({"clip": 1.0, "at": "home"}, "at must be one of client, server, got 'home'"),
        ({"clip": 1.0, "norm": "layer"}, "norm must be one of update, tensor, got 'layer'"),
        ({"clip": 1.0, "adjacency": "add"}, "adjacency must be one of replace, zero-out, got 'add'"),
    ],
)
def test_faulty_options_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(rf"algorithm\.update_privacy\.{message}", UpdatePrivacy, **options)


# At the server ----------------------------------------------------------------------------------------------


def fits(sent: Sequence[Params | None], start: Params, sizes: Sequence[int]) -> tuple[list[Call], Exchange]:
    """Calls of ``fit`` and an exchange that answers with what is given, or with an error."""
    infos = [ClientInfo(f"c{i}", size) for i, size in enumerate(sizes)]
    calls = [Call(info, "fit", Message(start), expects=start) for info in infos]

    def exchange(asked: Sequence[Call]) -> Iterator[Reply]:
        for call, tensors in zip(asked, sent, strict=True):
            yield Reply(call.client, Message(tensors or {}, {"loss": 1.0}), None if tensors else "broken")

    return calls, exchange


def test_at_the_server_the_sum_has_a_fixed_divisor() -> None:
    start = {"w": torch.zeros(2)}
    sent = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 0.5])}, None, {"w": torch.tensor([1.0, 0.0])}]
    calls, exchange = fits(sent, start, sizes=(1000, 1, 10, 10))
    algorithm = FedAvg(update_privacy=UpdatePrivacy(clip=1.0, at="server"))
    replies = protect(algorithm, exchange, seed=0, round=0)(calls)
    mean = algorithm.average(ServerState(0, start), replies)["w"]
    # ([0.6, 0.8] + [0, 0.5] + nothing + [1, 0]) / 4, whatever the numbers of examples.
    torch.testing.assert_close(mean, torch.tensor([0.4, 0.325]))


def test_noise_at_the_server_is_one_gaussian_mechanism() -> None:
    start = {"w": torch.zeros(150, 100), "own": torch.zeros(150, 100)}
    sent: list[Params | None] = [dict(start), dict(start), None, {"w": start["w"]}]
    calls, exchange = fits(sent, start, sizes=(5, 1, 1, 1))
    calls[3] = replace(calls[3], message=Message({"w": start["w"]}), expects={"w": start["w"]})
    algorithm = FedAdam(update_privacy=UpdatePrivacy(clip=0.5, noise=2.0, at="server"))
    mean = algorithm.average(ServerState(0, start), protect(algorithm, exchange, seed=0, round=0)(calls))
    # z C / m, with m the clients that were asked for the tensor.
    assert stats.kstest(mean["w"].flatten().numpy(), "norm", args=(0, 1 / 4)).pvalue > 0.01
    assert stats.kstest(mean["own"].flatten().numpy(), "norm", args=(0, 1 / 3)).pvalue > 0.01


# In a federation --------------------------------------------------------------------------------------------


def federation(algorithm: Algorithm, **options: Any) -> tuple[dict[str, ServerState], list[tuple[Call, Reply]]]:
    setup = toy_setup(algorithm, noisy=False, rounds=2, **options)
    listener = Listener(setup)
    finished = simulated(setup, executor=listener, sound=True)
    return dict(finished.records[-1].servers), [(call, reply) for _, call, reply in listener.heard]


WORKING = [
    FedAvg(), FedAvgFT(), FedAdam(), FedPer(), MOON(), FedDyn(), Scaffold(), FedDC(), FedDAT(), FedLoRA(),
    Robust(rule="median"), FedAvg(robust=RobustMean("krum", malicious=0)),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", WORKING, ids=lambda a: type(a).__name__)
def test_what_any_method_sends_is_within_the_bound(algorithm: Algorithm) -> None:
    _, replies = federation(replace(algorithm, update_privacy=UpdatePrivacy(clip=0.01)))
    seen = 0
    for call, reply in replies:
        assert "loss" not in reply.message.scalars
        if call.action == "fit":
            moved = [
                t - (0 if n.startswith("variate/") else call.message.tensors[n])
                for n, t in reply.message.tensors.items()
                if t.is_floating_point()
            ]
            norm = math.sqrt(sum(float(d.double().square().sum()) for d in moved))
            assert 0.0099 < norm < 0.0101
            seen += 1
    assert seen == 6


def test_a_wide_bound_without_noise_changes_nothing_but_weights() -> None:
    plain, _ = federation(FedAvg())
    wide, _ = federation(FedAvg(update_privacy=UpdatePrivacy(clip=1e6)))
    for name, tensor in wide["main"].params.items():
        torch.testing.assert_close(tensor, plain["main"].params[name])


def test_noise_is_another_for_every_client_and_round() -> None:
    _, replies = federation(FedAvg(update_privacy=UpdatePrivacy(clip=1e-9, noise=1e9)))
    drawn = [
        (r.message.tensors["head.weight"] - c.message.tensors["head.weight"]) for c, r in replies if c.action == "fit"
    ]
    for i, one in enumerate(drawn):
        assert all(float((one - other).abs().max()) > 0.1 for other in drawn[:i])


def test_only_updates_may_leave() -> None:
    class Chatty(FedAvg):
        def personalise(self, client: Any, message: Message) -> Message:
            return Message({"secret": torch.ones(1)})

        personalise.__dict__["is_action"] = True

    offered = actions(Chatty(update_privacy=UpdatePrivacy(clip=1.0)))
    with pytest.raises(
        ValueError, match="the action 'personalise' would send secret, which is neither noised nor masked"
    ):
        offered["personalise"](None, Message())  # type: ignore[arg-type]


def test_at_the_server_what_is_no_mean_refuses() -> None:
    privacy = UpdatePrivacy(clip=1.0, at="server")
    with pytest.raises(ValueError, match=r"at must be 'client' together with algorithm\.robust\.rule = 'median'"):
        toy_setup(FedAvg(update_privacy=privacy, robust=RobustMean("median")))
    with pytest.raises(ValueError, match="must be left out for Robust FedAvg: its rule 'krum' is no mean"):
        toy_setup(Robust(rule="krum", update_privacy=privacy))
    refuses(r"set algorithm\.correction to 'off', got 'auto'", toy_setup, FedDC(update_privacy=privacy))
    federation(FedDC(update_privacy=privacy, correction="off"))


def test_noise_on_running_statistics_is_refused() -> None:
    def layouts(noisy: bool) -> list[Mapping[str, Scope]]:
        return [dict.fromkeys(toy_model(noisy=noisy).state_dict(), Scope.SHARED)]

    method = FedAvg(update_privacy=UpdatePrivacy(clip=1.0, noise=1.0))
    with pytest.raises(ValueError, match=r"running statistics are shared, such as 'norm\.running_mean', got 1\.0"):
        check_layouts(method, layouts(noisy=True))
    check_layouts(method, layouts(noisy=False))
    check_layouts(FedAvg(update_privacy=UpdatePrivacy(clip=1.0)), layouts(noisy=True))


# What it costs ----------------------------------------------------------------------------------------------


def always(client: str, round: int) -> bool:
    return True


def test_clients_pay_for_the_rounds_in_which_they_were_asked() -> None:
    pytest.importorskip("dp_accounting")
    ledger = PrivacyLedger(UpdatePrivacy(clip=1.0, noise=2.0), uniform=True, present=always)
    for round, asked in enumerate((["a", "b"], ["a", "c"], ["a", "b"]), start=1):
        ledger.add(round, asked, 4)
    assert not ledger.amplified
    assert [ledger.taken_part(name) for name in "abcd"] == [3, 2, 1, 0]
    # Three Gaussian mechanisms are one with a third of the variance; half the multiplier, as a client is replaced.
    assert ledger.epsilon("a") == pytest.approx(epsilon(2.0 / math.sqrt(3), 1, 1e-5), rel=1e-6)
    assert ledger.epsilon("d") == 0
    assert ledger.epsilon("b", 1) == ledger.epsilon("b", 2) == ledger.epsilon("c") < ledger.epsilon("b")
    ledger.add(3, ["c"], 4)  # the round was done again
    assert [ledger.taken_part(name) for name in "abc"] == [2, 1, 2]
    silent = PrivacyLedger(UpdatePrivacy(clip=1.0), uniform=True, present=always)
    silent.add(1, ["a"], 4)
    assert silent.epsilon("a") == math.inf


def test_amplification_is_claimed_where_it_holds_only() -> None:
    pytest.importorskip("dp_accounting")
    privacy = UpdatePrivacy(clip=1.0, noise=3.0, at="server")

    def ledger(privacy: UpdatePrivacy, uniform: bool = True) -> PrivacyLedger:
        made = PrivacyLedger(privacy, uniform, lambda client, round: client != "late" or round > 10)
        for round in range(1, 21):
            made.add(round, ["a", "b"], 40)
        return made

    found = ledger(privacy)
    assert found.amplified
    assert found.epsilon("a") == found.epsilon("never drawn") == sampled_epsilon(3.0, {(2, 40): 20}, 1e-5)
    assert found.epsilon("late") == sampled_epsilon(3.0, {(2, 40): 10}, 1e-5) < found.epsilon("a")
    full = epsilon(3.0, 20, 1e-5)
    assert found.epsilon("a") < full / 3
    for other in (
        ledger(privacy, uniform=False),
        ledger(replace(privacy, at="client")),
        ledger(replace(privacy, repeatable=False)),  # others know the seed, and so who was drawn
    ):
        assert not other.amplified
        assert other.epsilon("a") == full
        assert other.epsilon("never drawn") == 0
    kept = ledger(replace(privacy, adjacency="zero-out"))
    assert not kept.amplified
    assert kept.epsilon("a") == epsilon(3.0, 20, 1e-5, "zero-out")


def test_a_sample_of_everybody_amplifies_nothing() -> None:
    pytest.importorskip("dp_accounting")
    assert sampled_epsilon(2.0, {(4, 4): 3}, 1e-5) == epsilon(2.0, 3, 1e-5)
    # Of nearly whole cohorts the bound that counts on sampling is the looser one: 15.88 against 8.72.
    assert sampled_epsilon(5.0, {(9, 10): 20}, 1e-5) == epsilon(5.0, 20, 1e-5) == pytest.approx(8.72, abs=0.01)
    assert sampled_epsilon(5.0, {(1, 10): 20}, 1e-5) < 0.5 * epsilon(5.0, 20, 1e-5)
    assert sampled_epsilon(0.0, {(2, 4): 3}, 1e-5) == math.inf
    assert sampled_epsilon(2.0, {}, 1e-5) == 0
    refuses("between 1 and 4 clients, got 5", sampled_epsilon, 2.0, {(5, 4): 3}, 1e-5)
