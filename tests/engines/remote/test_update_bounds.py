"""Bounds on what one site counts across machines: golden values, a harmful update in a run, and the way back."""

import json
import math
from pathlib import Path

import pytest
import torch

from repository import SUPPORT

pytest.importorskip("flwr")

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.split_learning import SplitLearning
from confed.deployment.server import MEMBERS, LossCourse, _weight_bound, run_server
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.protocol import Limits, open_body, seal
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.engines.remote.update_bounds import Bounds, bounded_members, most_of, norm_of, scaled
from confed.federation.algorithm import Algorithm, Protection
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.secure_sum import SecureSum
from confed.results.folder import RunFolder
from confed.testing.toy import toy_setup
from hostile_reply import COLD, Tampering
from led_recipe import grid_of, recipe_of
from memory_transport import CLIENTS, QUICK, Letters, rounds, same


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))


class NoMean(FedAvg):
    """A method for which a part of an update has no meaning."""

    def unsupported_reason(self, protection: Protection) -> str:
        return "a part of an update is none" if protection == "robust" else super().unsupported_reason(protection)


def harmful(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Every value a million."""
    message = open_body(body, Limits(), {}, frozenset())
    wild = {n: torch.full_like(t, 1e6) if t.is_floating_point() else t for n, t in message.tensors.items()}
    return head, seal(Message(wild, message.scalars))


def test_norms_and_what_is_left_of_an_update() -> None:
    call = Call(ClientInfo("a", 1), "fit", Message({"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)}))
    reply = Message({"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9), "c/w": torch.tensor([12.0])})
    assert norm_of(call, reply, ("c/*",)) == 13.0  # (3, 4, 12)
    counted = Message({**reply.tensors, "read/w": torch.tensor([1e6])})
    assert norm_of(call, counted, ("c/*",)) == 13.0  # a number of examples is no update
    half = scaled(call, reply, ("c/*",), 0.5)
    assert half.tensors["w"].tolist() == [2.5, 3.0]
    assert half.tensors["c/w"].tolist() == [6.0]
    assert half.tensors["n"].item() == 9
    with pytest.raises(ValueError, match="nothing of that name"):
        scaled(call, reply, (), 0.5)
    assert most_of({"a": 1.0, "b": 2.0, "c": 1e9, "d": 3.0}, 10) == 20.0
    assert most_of({"a": 1.0, "b": 1e9}, 10) == math.inf
    assert most_of({"a": 0.0, "b": 0.0, "c": 1e9}, 10) == math.inf
    assert most_of({"a": 1.0, "b": 1.0, "c": 1e9}, 0) == math.inf
    for wrong in (0.5, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="factor of at least 1, or 0 for none"):
            Bounds(update=wrong)


def test_a_claim_of_very_many_examples_counts_as_several_sites() -> None:
    members = [ClientInfo(name, count) for name, count in (("a", 100), ("b", 120), ("c", 10**12))]
    found, said = bounded_members(members, 10)
    assert [member.num_examples for member in found] == [100, 120, 1200]
    assert said.keys() == {"c"}
    assert bounded_members(members, 0) == (members, {})
    assert [member.num_examples for member in bounded_members(members[1:], 10)[0]] == [120, 1200]  # of two the smaller
    assert bounded_members(members[2:], 10) == (members[2:], {})


def test_sites_that_go_by_their_own_number_of_examples_keep_it() -> None:
    bounds = Bounds(weight=5)
    assert _weight_bound(FedAvg(), bounds) == 5
    assert _weight_bound(FedAvg(secure_sum=SecureSum()), bounds) == 0
    assert _weight_bound(SplitLearning(), bounds) == 0
    assert _weight_bound(BiCSL(), bounds) == 0


def test_a_claim_is_bounded_in_the_mean_and_written_down_as_it_is(tmp_path: Path) -> None:
    recipe, file = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0"), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    RunFolder.create(tmp_path / "state", recipe.to_toml())
    claims = {"warm": 8, "cold": 800, "both": 8}  # as a run that goes on finds them
    lines = [{"id": name, "num_examples": count, "modalities": [], "head": ""} for name, count in claims.items()]
    (tmp_path / "state" / MEMBERS).write_text(json.dumps(lines))
    told: list[str] = []
    run_server(
        recipe, tmp_path / "state", FlowerTransport(grid_of(file, tmp_path)),
        timeouts=Timeouts(minimum=3, interval=0.01), progress=lambda event: told.append(getattr(event, "text", "")),
    )  # fmt: skip
    assert any("it has 800 examples, and counts as one with 80" in text for text in told)
    written = json.loads((tmp_path / "state" / MEMBERS).read_text())
    assert {line["id"]: line["num_examples"] for line in written} == claims


@pytest.mark.parametrize(
    ("method", "left"), [(FedAvg(), "scaled down"), (NoMean(), "left out")], ids=["plain", "not a mean"]
)
def test_an_update_that_goes_much_further_than_the_others_is_bounded(
    tmp_path: Path, method: Algorithm, left: str
) -> None:
    setup = toy_setup(method, rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = lambda kind, head, body: harmful(head, body)
    remote = Remote(setup, letters, timeouts=QUICK, bounds=Bounds())
    remote.sites.gather(CLIENTS, wait=5)
    (record,) = rounds(setup, remote)
    assert remote.shortened.keys() == {"client-1"}
    assert left in remote.shortened["client-1"]
    assert (set(record.errors) == {"client-1"}) == (left == "left out")
    assert max(t.abs().max().item() for t in record.servers["main"].params.values() if t.is_floating_point()) < 100
    honest = Letters(setup, tmp_path / "honest")
    plain, bounded = Remote(setup, honest, timeouts=QUICK), Remote(setup, honest, timeouts=QUICK, bounds=Bounds())
    for each in (plain, bounded):
        each.sites.gather(CLIENTS, wait=5)
    assert same(rounds(setup, plain)[0].servers, rounds(setup, bounded)[0].servers)
    assert not bounded.shortened


@pytest.mark.parametrize("factor", [10.0, 0.0])
def test_a_run_says_what_it_bounded_and_what_one_can_go_back_to(tmp_path: Path, factor: float) -> None:
    recipe, file = recipe_of("fedavg", "run.rounds=3", "run.evaluate_every=0"), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    told: list[str] = []
    honest = lambda head, body: (head, body)  # noqa: E731
    post = Tampering(FlowerTransport(grid_of(file, tmp_path)), COLD, {"fit": [honest, harmful]})
    try:
        summary = run_server(
            recipe, tmp_path / "state", post, timeouts=Timeouts(minimum=3, interval=0.01),
            bounds=Bounds(update=factor), progress=lambda event: told.append(getattr(event, "text", "")),
        )  # fmt: skip
    except RuntimeError as error:
        told.append(str(error))
        summary = {}
    lines = [json.loads(line) for line in (tmp_path / "state" / "metrics.jsonl").read_text().splitlines()]
    acted = [line for line in lines if line["event"] == "bound"]
    offers = [text for text in told if "the checkpoint of round 1 is kept" in text]
    if factor:
        assert [(line["round"], list(line["clients"])) for line in acted] == [(2, ["cold"])]
        assert any("bounded: cold: its update had the norm" in str(note) for note in summary["notes"])
        assert not offers
    else:
        assert not acted
        assert len(offers) == 1, told
        assert (tmp_path / "state" / "checkpoint" / "round-000001").is_dir()


def test_a_loss_that_breaks_is_told_from_one_that_varies() -> None:
    course = LossCourse()
    assert [course.jump({"a": loss, "b": loss}) for loss in (2.0, 2.5, 0.01, 3.0)] == [None] * 4
    assert course.jump({"a": 100.0, "b": 2.0}) == "the mean loss rose from 3 to 51"
    assert course.jump({"a": math.nan}) == "the mean loss rose from 3 to nan"
    assert course.jump({}) is None
    assert course.jump({"a": 3.5}) is None


def test_one_checkpoint_from_before_a_jump_is_kept_until_the_loss_falls_back() -> None:
    course, found = LossCourse(), list[int | None]()
    losses = {1: 2.0, 2: 2.0, 3: 2.0, 4: 100.0, 5: 90.0, 6: None, 7: 80.0, 8: 2.0, 9: 2.0, 10: 70.0}
    for round, loss in losses.items():
        kept = sorted({round - 2, round - 1, *([] if course.sound is None else [course.sound])} - {-1, 0})
        course.note({} if loss is None else {"a": loss}, round, kept)
        found.append(course.sound)
    assert found == [None, None, None, 2, 2, 2, 2, None, None, 8]
    early = LossCourse()
    assert early.note({"a": math.nan}, 1, []) == "the mean loss is nan"
    early.note({"a": math.nan}, 4, [1, 2, 3])
    assert early.sound is None  # none of these is from before
