"""Robust means as an option of every method that takes means."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from confed.algorithms.fedadam import FedAdam
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedprox import FedProx
from confed.algorithms.robust import Robust
from confed.algorithms.scaffold import Scaffold
from confed.engines.local import InProcess
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message, Reply
from confed.federation.params import Params
from confed.federation.robust_mean import RobustMean
from confed.federation.state import ServerState
from confed.recipes.recipe import load_recipe
from confed.testing.toy import toy_clients, toy_setup
from refusals import refuses
from toy_runs import simulated


def drawn(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(2, 3, generator=rng), "b": torch.randn(4, generator=rng)} for _ in range(count)]


def flat(update: Params) -> np.ndarray[Any, Any]:
    return np.concatenate([update[name].double().numpy().ravel() for name in sorted(update)])


def mean_of(
    rule: RobustMean, updates: Sequence[Params], start: Params, weights: Sequence[float] | None = None
) -> Params:
    given = list(zip(updates, weights or [1.0] * len(updates), strict=True))
    return rule.of(given, start, precision=torch.float64)


def scores(points: Sequence[np.ndarray[Any, Any]], near: int) -> list[float]:
    """Krum's, by the definition: the least sum over all choices of so many others."""
    found: list[float] = []
    for i, x in enumerate(points):
        others = [((x - y) ** 2).sum() for j, y in enumerate(points) if j != i]
        found.append(min(sum(chosen) for chosen in combinations(others, near)))
    return found


def test_multi_krum_is_the_mean_of_the_best() -> None:
    updates, start = drawn(7, seed=2), drawn(1, seed=9)[0]
    updates[4] = {name: value + 30 for name, value in updates[4].items()}
    points = [flat(update) for update in updates]
    order = np.argsort(scores(points, 7 - 2 - 2))
    for selected, count in ((None, 5), (1, 1), (3, 3)):
        found = flat(mean_of(RobustMean("multi_krum", malicious=2, selected=selected), updates, start))
        np.testing.assert_allclose(found, np.mean([points[i] for i in order[:count]], axis=0), rtol=1e-6)
    one = mean_of(RobustMean("krum", malicious=2), updates, start)
    np.testing.assert_array_equal(flat(one), points[int(order[0])])


def test_every_rule_is_what_its_paper_says() -> None:
    updates, start = drawn(5, seed=1), drawn(1, seed=8)[0]
    table, origin = np.stack([flat(update) for update in updates]), flat(start)
    np.testing.assert_allclose(flat(mean_of(RobustMean("median"), updates, start)), np.median(table, 0), rtol=1e-6)
    trimmed = mean_of(RobustMean("trimmed", malicious=1), updates, start)
    np.testing.assert_allclose(flat(trimmed), stats.trim_mean(table, 0.2), rtol=1e-5)
    moved, weights = table - origin, np.array([1.0, 2, 3, 4, 5])
    short = moved * np.minimum(1, 2.0 / np.sqrt((moved**2).sum(1, keepdims=True)))
    bounded = mean_of(RobustMean("clip", norm=2.0), updates, start, weights.tolist())
    np.testing.assert_allclose(flat(bounded), origin + weights @ short / 15, rtol=1e-5)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "multi_krum"])
def test_who_did_not_send_a_tensor_does_not_count_for_it(rule: Any) -> None:
    updates, start = drawn(6, seed=3), drawn(1, seed=7)[0]
    mean = RobustMean(rule, malicious=1)
    partly = [{"b": u["b"]} if k in (0, 5) else u for k, u in enumerate(updates)]
    found = mean_of(mean, partly, start)
    assert torch.equal(found["a"], mean_of(mean, [{"a": u["a"]} for u in updates[1:5]], {"a": start["a"]})["a"])
    assert torch.equal(found["b"], mean_of(mean, [{"b": u["b"]} for u in updates], {"b": start["b"]})["b"])
    # Of a tensor that too few sent (for the median: nobody) the server's values stay.
    few = mean_of(mean, [u if k < mean.needed - 1 else {"b": u["b"]} for k, u in enumerate(updates)], start)
    assert few["a"] is start["a"]
    refuses(r"names the model does not have: \['z'\]", mean_of, mean, [{**u, "z": u["b"]} for u in updates], start)


def test_a_federation_that_is_too_small_is_told_so() -> None:
    server = ServerState(0, drawn(1)[0], clients=3)
    replies = [Reply(ClientInfo(str(i), 5), Message(update)) for i, update in enumerate(drawn(3))]
    with pytest.raises(
        ValueError, match="the robust mean 'multi_krum' with malicious = 1 needs at least 5 clients, got 3"
    ):
        FedAvg(robust=RobustMean("multi_krum", selected=5)).average(server, replies)


# In methods ---------------------------------------------------------------------------------------------------


class Liar(InProcess):
    """One client sends nonsense."""

    def __call__(self, calls: Any, store: Any, round: int) -> Any:
        for reply in super().__call__(calls, store, round):
            if reply.client.id != "client-1" or not reply.message.tensors:
                yield reply
                continue
            lies = {
                n: torch.full_like(t, 50.0) if t.is_floating_point() else t for n, t in reply.message.tensors.items()
            }
            yield replace(reply, message=Message(lies, reply.message.scalars))


def final(algorithm: Algorithm, liar: bool = False) -> Mapping[str, Tensor]:
    setup = toy_setup(algorithm, clients=toy_clients(sizes=(12, 20, 16, 12, 12)), rounds=1, noisy=False)
    return simulated(setup, executor=(Liar if liar else InProcess)(setup)).states[1].params


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(), FedAdam(), FedDyn(), Scaffold(), FedDC(correction="off")],
    ids=lambda a: type(a).__name__,
)
def test_one_liar_moves_the_mean_and_no_robust_one(algorithm: Algorithm) -> None:
    honest, start = final(algorithm), toy_setup(algorithm, noisy=False).model().state_dict()
    way = max(float((t - start[n]).abs().max()) for n, t in honest.items() if t.is_floating_point())

    def off(rule: RobustMean | None) -> float:
        found = final(replace(algorithm, robust=rule), liar=True)
        return max(float((t - honest[n]).abs().max()) for n, t in found.items() if t.is_floating_point())

    assert isinstance(algorithm, FedAdam) or off(None) > 5 * way  # Adam's steps have one length, true or false
    for rule in ("median", "trimmed", "krum", "multi_krum"):
        assert off(RobustMean(rule)) <= 2 * way
    if not isinstance(algorithm, FedAdam):
        assert off(RobustMean("clip", norm=0.1)) <= 2 * way


def test_the_method_robust_is_fedavg_with_the_option() -> None:
    for rule in ("median", "krum"):
        one, other = final(Robust(rule=rule)), final(FedAvg(robust=RobustMean(rule)))  # type: ignore[arg-type]
        assert all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "mode"}, "rule must be one of clip, median, trimmed, krum, multi_krum, got 'mode'"),
        ({"rule": "clip", "norm": 0.0}, "norm must be positive, got 0.0"),
        ({"rule": "krum", "malicious": -1}, "malicious must not be negative, got -1"),
        ({"rule": "multi_krum", "selected": 0}, "selected must be at least 1, got 0"),
    ],
)
def test_faulty_rules_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(rf"algorithm\.robust\.{message}", RobustMean, **options)


def test_a_recipe_chooses_protections_and_writes_them_down() -> None:
    more = ["study.methods=[]", "algorithm.name=fedprox"]
    recipe = load_recipe("fedvqa_scenes", [*more, "algorithm.robust.rule=trimmed", "algorithm.update_privacy.clip=2.0"])
    method = recipe.construct("algorithm")
    assert method.robust == RobustMean("trimmed")
    assert method.update_privacy.clip == 2
    assert "[algorithm.robust]" in recipe.to_toml()
    assert "robust" not in load_recipe("fedvqa_scenes", more).to_toml()
    for key, message in (
        ("robust.rule=mode", r"algorithm\.robust"),
        ("robust.roole=median", r"algorithm\.robust"),
        ("update_privacy.noise=1.0", r"algorithm\.update_privacy"),
        ("secure_sum.bits=7", r"algorithm\.secure_sum"),
    ):
        refuses(message, load_recipe, "fedvqa_scenes", [*more, f"algorithm.{key}"])
