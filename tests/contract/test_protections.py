"""Protections: denied where a method has its own hooks, proved where it has them, and false declarations are caught."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from confed import Algorithm, Client, Message, Traits, action, check_algorithm, keeps_protections
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.fedkd import FedKD
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.modality_fill import ModalityFill
from confed.algorithms.robust import Robust
from confed.engines.buffered import unsupported_reason
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Reply
from confed.federation.params import Mean
from confed.federation.reports import Number, Report
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.federation.update_privacy import UpdatePrivacy
from confed.registry import algorithms
from confed.testing import CHECKS, ContractViolation, checks
from confed.testing.protections import CLIP, FAR, FARTHER, LIAR, PROTECTED, _Trial, lacks_protection
from confed.testing.toy import toy_setup
from refusals import refuses

CLIENT, SERVER, RECORDS, ROBUST, SUM = PROTECTED
EVERY = ("robust", "secure_sum", "update_privacy")
OPTIONS: dict[str, dict[str, Any]] = {check: {name: options} for check, (name, options) in PROTECTED.items()}


# Every method and every protection ------------------------------------------------------------------------------


@pytest.mark.parametrize("check", PROTECTED)
@pytest.mark.parametrize("name", algorithms.names())
def test_every_cell_is_proved_or_refused(name: str, check: str) -> None:
    # The contract's own tests run the checks that apply; here is what becomes of the other cells.
    method = algorithms[name]()
    reason = lacks_protection(method, check)
    assert (check in dict(checks(method))) == (not reason)
    if reason:
        with pytest.raises(ValueError, match="must be left out for") as refused:
            toy_setup(replace(method, **OPTIONS[check]))
        assert str(refused.value).endswith(reason)
        assert "\n" not in reason


SERVER_HOOKS = ("phases", "round", "broadcast", "actions", "weight", "average", "aggregate", "finish")


@pytest.mark.parametrize("name", algorithms.names())
def test_one_more_hook_of_its_own_loses_the_declaration(name: str) -> None:
    factory = type(algorithms[name]())
    for hook in (*SERVER_HOOKS, "reports"):

        def changed(self: Any, *args: Any, hook: str = hook) -> Any:
            return getattr(factory, hook)(self, *args)

        method = make_dataclass("Changed", [], bases=(factory,), namespace={hook: changed}, frozen=True)()
        for check in (SERVER, ROBUST, SUM) if hook in SERVER_HOOKS else ():
            assert lacks_protection(method, check), (hook, check)
        assert lacks_protection(method, CLIENT) or hook not in ("actions", "reports"), hook


VARIANTS = [
    FedAvg(server=ServerOptimizer("adam")),
    FedDC(correction="off"),
    FedKD(compress_download=True),
    FedLoRA(ranks={"client-0": 1}),
    FedLoRA(train="alternate"),
    ModalityFill(kind="zero"),
    Robust(norm=0.0),
]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda method: type(method).__name__)
def test_other_settings_keep_what_they_have(method: Algorithm) -> None:
    proved = [check for check in PROTECTED if not lacks_protection(method, check)]
    assert proved
    for check in proved:
        CHECKS[check](method)


def test_the_table_of_the_docs_is_what_methods_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protections.md").read_text(encoding="utf-8")
    rows = text.partition("| methods (with their defaults) |")[2].partition("\n\n")[0].splitlines()[2:]
    told: dict[str, list[str]] = {}
    for row in rows:
        names, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        told |= {name.strip("`"): cells for name in names.split(", ")}
    for name in algorithms.names():
        cells = ["no" if lacks_protection(algorithms[name](), check) else "yes" for check in PROTECTED]
        assert told.get(name, told["all others"]) == cells, name
    assert set(told) - {"all others"} <= set(algorithms.names())


# FedNova, written as a user would -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Normalised averaging (Wang et al., NeurIPS 2020): every update counts per local step."""

    traits = Traits(neutral="clients that make different numbers of steps are averaged otherwise")

    def reports(self, action: str) -> Report:
        return {**super().reports(action), "steps": Number(1, 1e6)}

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        directions, weights, effective = dict[str, Tensor](), 0.0, 0.0
        for reply in replies:
            if reply.error is not None:
                continue
            weight, steps = self.weight(reply), float(reply.message.scalars["steps"])
            weights, effective = weights + weight, effective + weight * steps
            for name, value in reply.message.tensors.items():
                if value.is_floating_point():
                    moved = (value - server.params[name]) * (weight / steps)
                    directions[name] = directions.get(name, torch.zeros_like(moved)) + moved
        scale = effective / weights**2 if weights else 0.0
        params = {n: t + scale * directions[n] if n in directions else t for n, t in server.params.items()}
        return replace(server, round=server.round + 1, params=params)

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        steps = client.local.steps(-(-len(client.data) // client.local.batch_size))
        return Message(reply.tensors, {**reply.scalars, "steps": float(steps)})


@dataclass(frozen=True)
class DeclaredFedNova(FedNova):
    @keeps_protections(*EVERY)
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        return super().aggregate(server, replies)


@pytest.mark.parametrize(
    ("options", "protection"),
    [
        ({"robust": RobustMean("median")}, "robust"),
        ({"update_privacy": UpdatePrivacy(1.0, at="server")}, "update_privacy"),
        ({"secure_sum": SecureSum()}, "secure_sum"),
    ],
)
def test_fednova_without_a_declaration_is_refused(options: dict[str, Any], protection: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.{protection} must be left out for FedNova") as refused:
        toy_setup(FedNova(**options))
    assert str(refused.value).endswith(
        "FedNova has its own aggregate, which may go round it; if not, write "
        f"@keeps_protections({protection!r}) above, and check_algorithm proves it"
    )


def test_fednova_keeps_all_else_of_the_contract() -> None:
    verdicts = dict(check_algorithm(FedNova()))
    assert verdicts["resumes exactly"] == "passed"
    assert all("has its own aggregate" in verdicts[check] for check in (SERVER, ROBUST, SUM))
    assert "has its own reports" in verdicts[CLIENT]
    assert "has its own aggregate" in unsupported_reason(FedNova())
    # With noise at the client the server may do what it likes, but numbers of steps leave without noise.
    refuses("FedNova has its own reports", toy_setup, FedNova(update_privacy=UpdatePrivacy(1.0)))


@pytest.mark.parametrize(
    ("check", "complaint"),
    [
        (SERVER, "an update far beyond the clip, with other scalars, moves server main"),
        (ROBUST, "one client whose values are farther out than all others' moves server main"),
        (SUM, "clients fail with it|a run with it ends with KeyError: 'steps'"),
    ],
)
def test_a_false_declaration_of_fednova_is_one_line(check: str, complaint: str) -> None:
    with pytest.raises(ContractViolation, match=complaint) as violation:
        CHECKS[check](DeclaredFedNova())
    start = f"{check}: DeclaredFedNova.aggregate must keep {PROTECTED[check][0]!r}, as declared, but "
    assert str(violation.value).startswith(start)
    assert "\n" not in str(violation.value)


def test_check_algorithm_itself_says_it() -> None:
    with pytest.raises(ContractViolation, match=r"DeclaredFedNova\.aggregate must keep"):
        check_algorithm(DeclaredFedNova())


# Methods that cheat, each in one way ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Algorithm):
    """Averages by itself, whatever is set."""

    @keeps_protections(*EVERY)
    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        mean = Mean()
        for reply in replies:
            mean.add(reply.message.tensors, self.weight(reply))
        return mean.result(server.params)


@dataclass(frozen=True)
class ClipsByItself(Algorithm):
    """Shortens updates in its own way, and does not look at ``robust``."""

    @keeps_protections("robust")
    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        return Algorithm.average(replace(self, robust=RobustMean("median")), server, replies)


@dataclass(frozen=True)
class Loudest(Algorithm):
    """Takes the largest values: a function that no order of clients changes."""

    @keeps_protections("update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        sent = [reply.message.tensors for reply in replies]
        params = {n: torch.stack([tensors[n] for tensors in sent]).amax(0) for n in server.params}
        return replace(server, round=server.round + 1, params=params)


@dataclass(frozen=True)
class KeepsReplies(Algorithm):
    """Keeps every client's reply beside the mean."""

    @keeps_protections(*EVERY)
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        slots: dict[str, Any] = {}

        def noted() -> Iterator[Reply]:
            for reply in replies:
                slots[reply.client.id] = dict(reply.message.tensors)
                yield reply

        return replace(super().aggregate(server, noted()), slots=slots)


@dataclass(frozen=True)
class WeighsByLoss(Algorithm):
    @keeps_protections(*EVERY)
    def weight(self, reply: Reply) -> float:
        return 1.0 + abs(float(reply.message.scalars["loss"]))


@dataclass(frozen=True)
class HalfWeights(Algorithm):
    @keeps_protections(*EVERY)
    def weight(self, reply: Reply) -> float:
        return 0.5


@dataclass(frozen=True)
class WeighsRobustly(Algorithm):
    """Multiplies the robust mean by what clients say of themselves."""

    @keeps_protections("robust")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        losses: list[float] = []

        def noted() -> Iterator[Reply]:
            for reply in replies:
                losses.append(float(reply.message.scalars["loss"]))
                yield reply

        after = super().aggregate(server, noted())
        return replace(after, params={n: t * max(losses) for n, t in after.params.items()})


@dataclass(frozen=True)
class AsksAgain(Algorithm):
    """Averages once more at the end, where nothing is protected."""

    @keeps_protections(*EVERY)
    def finish(self, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        messages = [self.broadcast(server, client) for client in clients]
        replies = yield [Call(c, "fit", m, m.tensors) for c, m in zip(clients, messages, strict=True)]
        mean = Mean()
        for reply in replies:
            mean.add(reply.message.tensors, 1.0)
        return replace(server, params=mean.result(server.params))


@dataclass(frozen=True)
class AsksAside(Algorithm):
    """Asks for an update by another name."""

    @keeps_protections(*EVERY)
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        messages = [self.broadcast(server, client) for client in cohort]
        replies = yield [Call(c, "aside", m, m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    @action
    def aside(self, client: Client, message: Message) -> Message:
        return self.fit(client, message)


@dataclass(frozen=True)
class Tells(Algorithm):
    """Tells a number of its examples."""

    @keeps_protections("update_privacy")
    def reports(self, action: str) -> Report:
        return {**super().reports(action), "mean": Number(-1e6, 1e6)}

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        batch = next(iter(client.data.train(4, client.rng("mean"))))
        return Message(reply.tensors, {**reply.scalars, "mean": float(batch["x"].mean())})


@pytest.mark.parametrize(
    ("method", "check", "complaint"),
    [
        (Plain(), SERVER, "Plain.average .* two updates that cancel"),
        (Plain(), ROBUST, "Plain.average .* one client whose values"),
        (ClipsByItself(), ROBUST, "the server is the same whatever the robust mean is"),
        (Loudest(), SERVER, "Loudest.aggregate .* two updates that cancel"),
        (KeepsReplies(), SERVER, "move server main, client-"),
        (KeepsReplies(), ROBUST, "moves server main, client-3"),
        (KeepsReplies(), SUM, "server main, client-. differs|differs"),
        (WeighsByLoss(), SUM, "WeighsByLoss.weight .* ends with KeyError|clients fail"),
        (HalfWeights(), SUM, "needs whole numbers of at least 1 as weights, got 0.5"),
        (WeighsRobustly(), ROBUST, "one client whose values"),
        (AsksAgain(), ROBUST, "AsksAgain.finish .* one client whose values"),
        (AsksAgain(), SERVER, "AsksAgain.finish .* an update far beyond the clip"),
        (AsksAgain(), SUM, "AsksAgain.finish"),
        (AsksAside(), SERVER, "AsksAside.round .* an update far beyond the clip"),
        (AsksAside(), SUM, "AsksAside.round"),
        (Tells(), CLIENT, "Tells.reports .* sent scalars of its examples without noise"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_methods_that_cheat_are_caught(method: Algorithm, check: str, complaint: str) -> None:
    assert not lacks_protection(method, check)
    with pytest.raises(ContractViolation, match=complaint):
        CHECKS[check](method)


@dataclass(frozen=True)
class Honest(Algorithm):
    """Own hooks of every kind, which use the mean alone."""

    @keeps_protections(*EVERY)
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        messages = [Message(self.broadcast(server, c).tensors, {"share": 0.5}) for c in cohort]
        replies = yield [Call(c, "fit", m, m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    @keeps_protections(*EVERY)
    def weight(self, reply: Reply) -> float:
        return 2.0

    @keeps_protections(*EVERY)
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        mean = self.average(server, replies)
        params = {n: torch.lerp(server.params[n], t, 0.7) if t.is_floating_point() else t for n, t in mean.items()}
        return replace(server, round=server.round + 1, params=params)


@pytest.mark.parametrize("check", PROTECTED)
def test_an_honest_method_passes(check: str) -> None:
    assert not lacks_protection(Honest(), check)
    CHECKS[check](Honest())


# The bounds themselves, on methods whose server takes the mean as it is -----------------------------------------

MEANS = ("fedavg", "fedper", "feddat", "fedlora", "fedlgt", "per_fedavg")


@pytest.mark.parametrize("name", MEANS)
def test_an_outlier_stays_within_the_range_of_the_honest(name: str) -> None:
    trial = _Trial(algorithms[name](), ROBUST)
    outcome = trial.outcome({LIAR: FARTHER})
    honest = [
        r.message.tensors for client, call, r in outcome.replies if call.action == "fit" and client != f"client-{LIAR}"
    ]
    plain = trial.servers({LIAR: FARTHER}, robust=None)
    for tensor_name, value in outcome.servers["main"].params.items():
        sent = torch.stack([tensors[tensor_name] for tensors in honest])
        assert (sent.amin(0) <= value).all()
        assert (value <= sent.amax(0)).all()
        if value.is_floating_point():
            assert (plain[f"server main: {tensor_name}"] > sent.amax(0) + 1e3).all()


@pytest.mark.parametrize("name", MEANS)
def test_one_client_moves_the_mean_by_what_is_accounted(name: str) -> None:
    """Of K = 5 clients one that is replaced by its opposite moves the mean by 2 C / K, noise switched off."""
    trial = _Trial(algorithms[name](), SERVER)
    one, other = (trial.servers({LIAR: way * FAR}) for way in (1, -1))
    moved = sum(float((one[n].double() - other[n].double()).square().sum()) for n in one) ** 0.5
    assert moved == pytest.approx(2 * CLIP / 5, rel=1e-4)
    assert moved <= 2 * CLIP / 5 * (1 + 1e-6)


def test_a_declaration_is_of_what_it_names() -> None:
    assert not lacks_protection(ClipsByItself(), ROBUST)
    assert "@keeps_protections('secure_sum') above" in lacks_protection(ClipsByItself(), SUM)
    assert "@keeps_protections('update_privacy') above" in lacks_protection(ClipsByItself(), SERVER)


def test_unknown_protections_are_refused() -> None:
    known = "update_privacy, robust, secure_sum, record_privacy"
    refuses(f"keeps_protections knows {known}, got 'median'", keeps_protections, "median")
