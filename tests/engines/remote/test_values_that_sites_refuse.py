"""A server takes, averages and keeps nothing that its own sites would refuse, with two sites and after a restart."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedbn import FedBN
from confed.algorithms.split_learning import SplitLearning
from confed.deployment.server import MEMBERS, LossCourse, _weight_bound
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.server import Remote
from confed.engines.remote.update_bounds import Bounds, NormHistory, bounded_members, most_of, norm_of, scaled
from confed.federation.algorithm import Algorithm, Protection
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.params import Params
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore, ServerState
from confed.privacy.protections import ValueBound
from confed.registry import algorithms
from confed.results.folder import RunFolder
from confed.testing.toy import toy_clients, toy_setup
from hostile_reply import harmful, honest, lead, lines_of, with_values
from led_recipe import recipe_of
from memory_transport import CLIENTS, QUICK, Letters, rounds, same

TWO = ("client-0", "client-1")
Change = Callable[[torch.Tensor], torch.Tensor]


def one_value(tensor: torch.Tensor, value: float = 1e38) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def below_the_bound(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 0.9e6)


def of_two(method: Algorithm, rounds: int = 3) -> Setup:
    clients = toy_clients(kind=method.traits.made_for)
    return toy_setup(
        method, clients={name: clients[name] for name in TWO}, rounds=rounds, noisy=isinstance(method, FedBN)
    )


class Hostile(Letters):
    """Two sites, of which one changes what it sends from some call on."""

    def __init__(self, setup: Setup, root: Path, change: Change, after: int = 0, bad: int = 1) -> None:
        super().__init__(setup, root, TWO)
        self.calls = 0

        def tamper(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
            if kind == "evaluate":
                return head, body
            self.calls += 1
            return with_values(change)(kind, head, body) if self.calls > after else (head, body)

        self.tamper[bad] = tamper

    def remote(self, memory: Path | None = None) -> Remote:
        remote = Remote(self.setup, self, timeouts=QUICK, bounds=Bounds(), memory=memory)
        remote.sites.gather(TWO, wait=5)
        return remote


def led(setup: Setup, remote: Remote, start: int = 0, stop: int = 99) -> list[RoundRecord]:
    simulation = Simulation(setup, MemoryStore(), remote)
    simulation.attempt, simulation.check = remote.attempt, remote.check
    servers = simulation.start(InProcess(setup).workspace)
    remote.begin(start, (0,))
    records: list[RoundRecord] = []
    for record in simulate(simulation, servers, start):
        remote.remember()
        records.append(record)
        if record.round == stop:
            break
    return records


def largest(params: Params) -> float:
    floating = [t for t in params.values() if t.is_floating_point() and t.numel()]
    return max((float(t.abs().max()) for t in floating), default=0.0)


@pytest.mark.parametrize("name", algorithms.names())
@pytest.mark.parametrize("change", [one_value, below_the_bound], ids=["huge", "below"])
def test_no_method_keeps_what_a_site_would_refuse(tmp_path: Path, name: str, change: Change) -> None:
    method = algorithms[name]()
    if method.traits.centralised or not method.traits.communicates:
        pytest.skip("nothing is sent")
    setup = of_two(method, rounds=2)
    letters = Hostile(setup, tmp_path, change)
    remote = letters.remote()
    bound = ValueBound.of(InProcess(setup).workspace.tensors.values(), setup.algorithm.traits.sums)
    records, ended = list[RoundRecord](), ""
    try:
        records = led(setup, remote)
    except RuntimeError as error:
        ended = str(error)
    assert "\n" not in ended
    assert not ended or name not in ("fedkd", "fedmosaic")  # which send what is no new value of what they received
    assert bool(records) or "every site refuses" in ended or "client-1" in ended
    for record in records:
        for state in record.servers.values():
            assert bound.problem(state.params) is None
        assert not {e for e in record.errors.values() if "is the most in this run" in e} or set(record.errors) == {
            "client-1"
        }
    assert max((largest(s.params) for record in records for s in record.servers.values()), default=0.0) < 1e3


def test_a_site_with_one_huge_value_leaves_the_other_sound(tmp_path: Path) -> None:
    setup = of_two(FedAvg())
    remote = Hostile(setup, tmp_path, one_value, after=1).remote()
    records = led(setup, remote)
    assert [set(record.errors) for record in records] == [set(), {"client-1"}, {"client-1"}]
    said = records[1].errors["client-1"]
    assert "update refused" in said
    assert "1e+38" in said
    assert "is the most in this run" in said
    assert largest(records[-1].servers["main"].params) < 10


def test_of_two_sites_one_that_goes_far_is_left_out(tmp_path: Path) -> None:
    setup = of_two(FedAvg(), rounds=4)
    letters = Hostile(setup, tmp_path / "sites", below_the_bound, after=2)
    records = led(setup, letters.remote(tmp_path), stop=2)
    assert not any(record.errors for record in records)
    stored = json.loads((tmp_path / "norms.json").read_text())
    assert {(action, site, round) for action, site, round, _ in stored["sizes"]} == {
        ("fit", name, round) for name in TWO for round in (0, 1)
    }
    remote = letters.remote(tmp_path)  # a new process
    again = led(setup, remote, start=2)
    assert [set(record.errors) for record in again] == [{"client-1"}, {"client-1"}]
    assert "as the smaller ones of all sites so far" in again[0].errors["client-1"]
    assert largest(again[-1].servers["main"].params) < 10


def test_two_honest_sites_have_the_same_bits_as_without_bounds(tmp_path: Path) -> None:
    setup = of_two(FedAvg())
    runs: list[list[RoundRecord]] = []
    for number, bounds in enumerate((None, Bounds())):
        letters = Letters(setup, tmp_path / f"{number}", TWO)
        remote = Remote(setup, letters, timeouts=QUICK, bounds=bounds)
        remote.sites.gather(TWO, wait=5)
        runs.append(led(setup, remote))
    assert same(runs[0][-1].servers, runs[1][-1].servers)
    assert not runs[1][-1].errors


def call_of(name: str, examples: int = 10, session: bool = False) -> Call:
    return Call(
        ClientInfo(name, examples), "step" if session else "fit", Message({"w": torch.ones(4)}), session=session
    )


def test_a_site_cannot_grow_beyond_what_the_other_one_sends() -> None:
    history = NormHistory()
    history.meet([call_of("a"), call_of("b")])
    sent: list[float] = []
    for round in range(50):
        sizes = {"a": 1.0, "b": 1e9}
        most = history.most(call_of("b"), sizes, 10)
        history.note("fit", "a", round, 1.0)
        history.note("fit", "b", round, 0.9 * most)
        sent.append(0.9 * most)
    assert sent == [pytest.approx(9.0)] * 50


def test_more_examples_allow_a_longer_update() -> None:
    history = NormHistory()
    history.meet([call_of("a", 10), call_of("b", 40)])
    assert history.most(call_of("b", 40), {"a": 1.0, "b": 1e9}, 10) == 40.0
    assert history.most(call_of("a", 10), {"a": 1e9, "b": 1.0}, 10) == 10.0
    # A tenth of the norm of what was sent, 2, passes in any case.
    assert history.most(call_of("a", 10), {"a": 1e9, "b": 1e-9}, 10) == pytest.approx(0.2)
    assert history.most(call_of("a", 10), {"a": 1e9, "b": 0.0}, 10) == math.inf


def test_sizes_survive_a_server_and_rounds_done_again_do_not(tmp_path: Path) -> None:
    history = NormHistory(tmp_path / "norms.json")
    for round in range(4):
        for name in ("a", "b"):
            history.note("fit", name, round, float(round + 1))
    history.save()
    again = NormHistory(tmp_path / "norms.json")
    again.begin(2)
    again.save()
    assert {entry[2] for entry in json.loads((tmp_path / "norms.json").read_text())["sizes"]} == {0, 1}
    (tmp_path / "norms.json").write_text('{"examples": 3}')
    with pytest.raises(ValueError, match=r"norms\.json must hold the sizes of sites' updates as JSON"):
        again.begin(2)


@pytest.mark.parametrize("bad", [0, 1])  # also the one whose reply is read first
def test_activations_of_another_scale_leave_their_site_out(tmp_path: Path, bad: int) -> None:
    setup = of_two(SplitLearning(), rounds=1)
    remote = Hostile(setup, tmp_path, lambda tensor: tensor * 1e4, bad=bad).remote()
    records = led(setup, remote)
    assert "held values up to" in remote.shortened[f"client-{bad}"]
    assert set(records[0].errors) == {f"client-{bad}"}
    assert max(largest(state.params) for state in records[0].servers.values()) < 10


def test_the_very_first_activations_are_compared(tmp_path: Path) -> None:
    setup = of_two(SplitLearning(), rounds=1)
    replies: list[int] = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        replies.append(hostile.calls)
        return tensor * (1e4 if hostile.calls == replies[0] else 1.0)

    hostile = Hostile(setup, tmp_path, change, bad=0)
    records = led(setup, hostile.remote())
    assert set(records[0].errors) == {"client-0"}
    assert set(replies) == {replies[0]}  # it was not asked again


def test_a_new_model_that_sites_would_refuse_is_not_kept(tmp_path: Path) -> None:
    setup = of_two(FedAvg())
    remote = Letters(setup, tmp_path, TWO)
    state = ServerState(3, {"w": torch.tensor([2e6])}, {"moments": {"w": torch.tensor([1.0])}})
    check = Remote(setup, remote, timeouts=QUICK).check
    with pytest.raises(
        RuntimeError, match=r"parameters after round 3 'w' holds values from 2e\+06 .* every site refuses"
    ):
        check("main", state)
    check("main", ServerState(3, {"w": torch.tensor([0.9e6])}))
    with pytest.raises(RuntimeError, match="NaN or an infinity"):
        check("main", ServerState(3, {"w": torch.tensor([math.nan])}))


def test_sums_over_examples_have_a_wider_bound() -> None:
    bound = ValueBound.of([torch.tensor([3.0]), torch.tensor([1, 2])], ("moments.*",))
    assert bound.most == 3e6
    assert (
        bound.problem({"w": torch.tensor([-3e6]), "moments.gram": torch.tensor([3e9]), "n": torch.tensor(10**12)})
        is None
    )
    for tensors in ({"w": -3.1e6}, {"w": math.nan}, {"w": -math.inf}, {"moments.gram": 1e38}):
        assert bound.problem({name: torch.tensor([0.0, value]) for name, value in tensors.items()}) is not None


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_run_with_two_sites_ends_or_goes_on_in_one_line(tmp_path: Path, minimum: int) -> None:
    recipe, tamper = recipe_of("fedavg", "run.rounds=3", "run.evaluate_every=0"), with_values(one_value)
    said: list[str] = []

    def start() -> None:
        try:
            lead(recipe, tmp_path, {"fit": [honest, tamper, tamper]}, minimum, names=("warm", "cold"))
        except RuntimeError as error:
            said.append(str(error))

    start()
    errors = [line["errors"] for line in lines_of(tmp_path, "round")]
    if minimum == 2:
        (line,) = said
        assert "round 2 needs 2 usable replies and can have 1 at most; cold: ValueError: update refused" in line
        assert "\n" not in line
        start()  # from the checkpoint: the same, in one line, and the checkpoint is as sound
        assert len(said) == 2
    else:
        assert not said
        assert [set(error) for error in errors] == [set(), {"cold"}, {"cold"}]
    assert (
        sorted(path.name for path in (tmp_path / "state" / "checkpoint").glob("round-*"))[0] == "round-000001"
        or minimum == 1
    )


# Bounds on updates ------------------------------------------------------------------------------------------------


class NoMean(FedAvg):
    """A method for which a part of an update has no meaning."""

    def unsupported_reason(self, protection: Protection) -> str:
        return "a part of an update is none" if protection == "robust" else super().unsupported_reason(protection)


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


def test_a_claim_is_bounded_in_the_mean_and_kept_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0")
    RunFolder.create(tmp_path / "state", recipe.to_toml())
    claims = {"warm": 8, "cold": 800, "both": 8}  # as a run that goes on finds them
    lines = [{"id": name, "num_examples": count, "modalities": [], "head": ""} for name, count in claims.items()]
    (tmp_path / "state" / MEMBERS).write_text(json.dumps(lines))
    told: list[str] = []
    lead(recipe, tmp_path, progress=lambda event: told.append(getattr(event, "text", "")))
    assert any("it has 800 examples, and counts as one with 80" in text for text in told)
    written = json.loads((tmp_path / "state" / MEMBERS).read_text())
    assert {line["id"]: line["num_examples"] for line in written} == claims


@pytest.mark.parametrize(
    ("method", "left"), [(FedAvg(), "scaled down"), (NoMean(), "left out")], ids=["plain", "not a mean"]
)
def test_an_update_that_goes_much_further_is_bounded(tmp_path: Path, method: Algorithm, left: str) -> None:
    setup = toy_setup(method, rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = harmful
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
    recipe, told = recipe_of("fedavg", "run.rounds=3", "run.evaluate_every=0"), list[str]()
    try:
        summary = lead(
            recipe, tmp_path, {"fit": [honest, harmful]}, bounds=Bounds(update=factor),
            progress=lambda event: told.append(getattr(event, "text", "")),
        )  # fmt: skip
    except RuntimeError as error:
        told.append(str(error))
        summary = {}
    acted = lines_of(tmp_path, "bound")
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


def test_one_checkpoint_from_before_a_jump_is_kept() -> None:
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
