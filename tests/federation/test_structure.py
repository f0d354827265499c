"""Scopes and the streaming mean, heads of models, and hooks that had other names before."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.params import Mean, Scope, layout, pick
from confed.federation.structure import NO_HEAD, head_rules, private_head
from confed.testing.toy import ToyModel
from refusals import refuses


class Writer(nn.Module):
    """A model that writes its answers, without a head."""

    writes = "answers"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)


def test_a_model_that_writes_may_have_no_head() -> None:
    assert private_head(Writer(), (), "X", optional=True) == NO_HEAD
    assert private_head(Writer(), NO_HEAD, "X", optional=True) == NO_HEAD
    refuses("X keeps the answer head private, and this model does not say", private_head, Writer(), (), "X")
    toy = ToyModel(False, torch.Generator())
    assert private_head(toy, (), "X", optional=True) == ("head",)
    refuses("must name submodules with trained tensors, got 'tail'", private_head, toy, ("tail",), "X", optional=True)


def test_head_rules_want_a_configured_method() -> None:
    assert head_rules(("a", "b"), "X") == {"a.*": Scope.PRIVATE, "b.*": Scope.PRIVATE}
    assert head_rules(NO_HEAD, "X") == {}
    refuses(r"X does not know this model's head; call configure\(model, task\)", head_rules, (), "X")


S, P, F = Scope.SHARED, Scope.PRIVATE, Scope.FROZEN


def test_first_matching_rule_wins_and_frozen_overrides() -> None:
    scopes = layout(["head.w", "body.w", "stem.w"], {"head.*": P, "*": S}, frozen={"stem.w"})
    assert scopes == {"head.w": P, "body.w": S, "stem.w": F}


def test_names_and_rules_without_each_other_are_errors() -> None:
    refuses(r"no rule says where 'body\.w' lives", layout, ["body.w"], {"head.*": P})
    refuses(r"match no tensor: \['haed\.\*'\]", layout, ["head.w"], {"haed.*": P, "*": S})
    assert layout(["head.w"], {"haed.*": P, "*": S}, partial=True) == {"head.w": S}


def test_pick_shares_the_tensors() -> None:
    params = {"a": torch.zeros(2), "b": torch.ones(2)}
    picked = pick(params, {"a": S, "b": P}, P)
    assert list(picked) == ["b"]
    assert picked["b"] is params["b"]


def _mean(updates: list[tuple[dict[str, Tensor], float]], dtype: torch.dtype = torch.float32) -> Mean:
    mean = Mean(dtype)
    for params, weight in updates:
        mean.add(params, weight)
    return mean


def test_weighted_mean_by_hand() -> None:
    mean = _mean([({"w": torch.tensor([1.0, 2.0])}, 1), ({"w": torch.tensor([5.0, 6.0])}, 3)])
    assert torch.equal(mean.result({"w": torch.zeros(2)})["w"], torch.tensor([4.0, 5.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_agrees_with_float64_arithmetic(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    updates = [({"w": torch.randn(50, generator=rng)}, float(w)) for w in (3, 400, 27, 1)]
    wanted = sum(p["w"].double() * w for p, w in updates) / sum(w for _, w in updates)
    got = _mean(updates, dtype).result({"w": torch.zeros(50)})["w"]
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), wanted, atol=1e-6)


def test_equal_updates_are_a_fixed_point() -> None:
    value = torch.tensor([0.1, 0.7, 1e-8])
    got = _mean([({"w": value}, w) for w in (1, 2, 7, 0.3)]).result({"w": value})["w"]
    assert torch.equal(got, value)


def test_names_are_averaged_over_those_who_sent_them() -> None:
    mean = _mean([({"image": torch.tensor(2.0)}, 1), ({"text": torch.tensor(4.0)}, 5)])
    like = {"image": torch.tensor(0.0), "text": torch.tensor(0.0), "audio": torch.tensor(9.0)}
    assert {n: float(t) for n, t in mean.result(like).items()} == {"image": 2.0, "text": 4.0, "audio": 9.0}


def test_means_of_groups_average_to_the_mean_of_all() -> None:
    """What a tree of aggregators would compute: equal up to rounding where a name weighs what its senders weigh."""
    rng = torch.Generator().manual_seed(1)
    updates: list[tuple[dict[str, Tensor], float]] = []
    for number in range(100):
        sent = {"w": torch.randn(30, generator=rng), "n": torch.tensor(number)}
        sent |= {"image": torch.randn(30, generator=rng)} if number % 7 < 3 else {}
        updates.append((sent, float(torch.randint(1, 500, (), generator=rng))))
    like = updates[0][0]
    flat, tree, equal = _mean(updates).result(like), Mean(), Mean()
    for start in range(0, 100, 10):
        group = updates[start : start + 10]
        for name in like:
            senders = [({name: sent[name]}, weight) for sent, weight in group if name in sent]
            mean = {name: _mean(senders).result(like)[name]}
            tree.add(mean, sum(weight for _, weight in senders))
            equal.add(mean, 1.0)
    for name, value in tree.result(like).items():
        torch.testing.assert_close(value, flat[name], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(equal.result(like)["image"], flat["image"], atol=1e-2)


def test_counters_take_the_maximum() -> None:
    mean = _mean([({"n": torch.tensor(3)}, 1), ({"n": torch.tensor(8)}, 1), ({"n": torch.tensor(5)}, 9)])
    assert int(mean.result({"n": torch.tensor(0)})["n"]) == 8


def test_the_mean_owns_its_memory() -> None:
    first = torch.tensor([1.0])
    mean = _mean([({"w": first}, 1), ({"w": torch.tensor([3.0])}, 1)])
    assert float(first) == 1.0
    assert float(mean.result({"w": first})["w"]) == 2.0


def test_errors_name_what_came() -> None:
    refuses("must be positive, got 0", Mean().add, {"w": torch.zeros(1)}, 0)
    mean = _mean([({"w": torch.zeros(2)}, 1)])
    refuses(r"'w' must have shape \(2,\), got \(3,\)", mean.add, {"w": torch.zeros(3)}, 1)
    refuses(r"does not have: \['w'\]", mean.result, {})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("suit", "configure"),
        ("extend", "add_modules"),
        ("refuses", "unsupported_reason"),
        ("published", "with_public_data"),
    ],
)
def test_method_with_an_old_hook_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Mine.{old} is now called {new}: rename it")):
        type("Mine", (Algorithm,), {"__qualname__": "Mine", old: lambda self: None})


def test_hyper_parameter_may_have_the_name_of_an_old_hook() -> None:
    @dataclass(frozen=True)
    class Mine(Algorithm):
        extend: float = 2.0

    assert Mine().extend == 2.0
