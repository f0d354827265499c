"""A site's policy for evaluations: what a server that asks for as many as it likes is told."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.engines.local import Simulation
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits, Request, open_body, seal, version_of
from confed.federation.messages import Message
from confed.federation.params import Params
from confed.federation.state import ClientState, MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.testing.toy import toy_setup
from memory_transport import PATIENT, Letters, remote_of, rounds

NOISY = UpdatePrivacy(clip=0.5, noise=4.0)


def opened(setup: Setup, root: Path, evaluations: str | None = None, limit: float | None = None) -> Site:
    policy = None if evaluations is None else EvaluationPolicy.parse(evaluations)
    return Site(setup, client_named(setup, "client-0"), root, evaluations=policy, limit=limit)


def asked(site: Site, setup: Setup, answer: int = 0, number: int = 0, limit: int = 0) -> tuple[str | None, Message]:
    """The reply to an evaluation of a model that gives one answer always."""
    shared: dict[str, Tensor] = {n: t.clone() for n, t in Workspace(setup.model()).initial.items()}
    shared["head.weight"].zero_()
    shared["head.bias"] = torch.nn.functional.one_hot(torch.tensor(answer), 3).float() * 50
    request = Request(f"{number}", "client-0", "evaluate", number, version_of(number, 0), version_of(number, 0) - 1)
    told = seal(Message(shared, {"split": "test", "limit": limit}))
    head, body = site.handle(request.to_bytes(), told)
    return Answer.from_bytes(head, Limits()).error, open_body(body, Limits(), {}, frozenset())


def counts(site: Site, setup: Setup, start: int = 0) -> list[tuple[str | None, object]]:
    """What the three models of the oracle are told: how many test examples have each answer."""
    replies = [asked(site, setup, answer, start + answer) for answer in range(3)]
    return [(error, message.scalars.get("global:accuracy:sum")) for error, message in replies]


def truth(setup: Setup) -> list[float]:
    (batch,) = setup.data("client-0").test(100)
    return torch.bincount(batch["label"], minlength=3).double().tolist()


# The oracle -----------------------------------------------------------------------------------------------------


def test_constant_models_count_answers_unless_a_site_objects(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    exact = truth(setup)
    assert [count for _, count in counts(opened(setup, tmp_path / "open"), setup)] == exact
    noised = counts(opened(setup, tmp_path / "noise", "noise=8"), setup)
    assert not any(error for error, _ in noised)
    assert [count for _, count in noised] != exact
    off = counts(opened(setup, tmp_path / "off", "off"), setup)
    assert off == [("ValueError: this site answers no evaluations", None)] * 3


def test_a_spent_limit_refuses_exact_evaluations(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(update_privacy=NOISY), rounds=12, noisy=False)
    site = opened(setup, tmp_path, limit=epsilon_of(4.0 / 2) * 1.0001)
    assert [count for _, count in counts(site, setup)] == truth(setup)
    shared = Message(dict(Workspace(setup.model()).initial))
    fit = Request("fit", "client-0", "fit", 3, version_of(3, 0), version_of(3, 0) - 1)
    assert Answer.from_bytes(site.handle(fit.to_bytes(), seal(shared))[0], Limits()).error is None
    for error, count in counts(site, setup, start=4):
        assert count is None
        assert str(error).startswith("ValueError: this site's limit of privacy is spent: epsilon")
    # Who says "exact" takes it upon himself; who takes noise has no room for it either.
    assert [count for _, count in counts(opened(setup, tmp_path, "exact", limit=0.001), setup, 7)] == truth(setup)
    noised = counts(opened(setup, tmp_path, "noise=8", limit=epsilon_of(2.0) * 1.0001), setup, 10)
    assert all("and with one more evaluation" in str(error) for error, _ in noised)


# What a refused evaluation leaves -------------------------------------------------------------------------------


def final(site: Site, tensors: dict[str, Tensor], base: int, round: int) -> str | None:
    request = Request(f"{base}", "client-0", "evaluate", round, version_of(round, 0), base)
    head, _ = site.handle(request.to_bytes(), seal(Message(tensors, {"split": "test", "limit": 0})))
    return Answer.from_bytes(head, Limits()).error


@pytest.mark.parametrize("policy", ["off", "exact,in_all=0"])
def test_a_refused_evaluation_changes_nothing_at_the_site(tmp_path: Path, policy: str) -> None:
    setup, kept, said = toy_setup(FedAvg(), rounds=3, noisy=False), list[tuple[object, ...]](), list[str]()

    def keep(shared: Params, state: ClientState) -> str:
        kept.append((sorted(shared), state.scalars.get("age")))
        if len(kept) == 2:
            raise RuntimeError("the disk is in a mood")
        return "run"

    info = client_named(setup, "client-0")
    site = Site(
        setup, info, tmp_path, evaluations=EvaluationPolicy.parse(policy), final=keep,
        progress=lambda event: said.append(event.text),
    )  # fmt: skip
    for version in (1000000, 4000000):
        site.store.begin(version)
        site.store.save("client-0", ClientState(scalars={"age": version}))
    shared = {n: t.clone() for n, t in Workspace(setup.model()).initial.items()}
    for tensors, base, round in (({}, 0, 5), (shared, 0, 2), ({}, 4000000, 5), (shared, 4000000, 4)):
        assert "this site answers" in str(final(site, tensors, base, round))
        assert site.store.newest("client-0") == 4000000
    assert kept == []
    assert any("must hold all tensors that this site receives" in line for line in said)
    assert "this site answers" in str(final(site, shared, 3999999, 5))
    assert kept == [(sorted(shared), 1000000)]
    assert "this site answers" in str(final(site, shared, 4000000, 5))
    assert kept[1] == (sorted(shared), 4000000)
    assert said.count("the final models could not be kept: the disk is in a mood") == 1
    assert site.store.newest("client-0") == 4000000


def test_rounds_beyond_the_end_give_no_further_evaluations(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=3, noisy=False)
    site = opened(setup, tmp_path, "exact,per_round=1")
    assert asked(site, setup, number=5)[0] is None
    for number in (6, 1000, 1001):
        error, message = asked(site, setup, number=number)
        assert error == f"Refused: the round must be at most 5 in a run of 3, got {number}"
        assert not message.scalars


# Noise ----------------------------------------------------------------------------------------------------------


def epsilon_of(multiplier: float, delta: float = 1e-5) -> float:
    """Of a Gaussian mechanism, by Balle and Wang's formula (2018, theorem 8), without the library."""
    mean = 1 / multiplier

    def excess(epsilon: float) -> float:
        low = norm.logcdf(-mean / 2 - epsilon / mean)
        return float(norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon + low) - delta)

    return float(brentq(excess, 0, 500))  # type: ignore[arg-type]


def test_noised_evaluations_and_updates_cost_as_one_mechanism(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(update_privacy=NOISY), noisy=False)
    site = opened(setup, tmp_path, "noise=3")
    assert not any(error for error, _ in counts(site, setup))
    book = [json.loads(line) for line in (tmp_path / "privacy.jsonl").read_text().splitlines()]
    assert [line["action"] for line in book] == ["evaluate"] * 3
    for times, line in enumerate(book, start=1):  # sums move by 1, the noise is 3
        assert line["epsilon"] == pytest.approx(epsilon_of(3 / math.sqrt(times)), rel=1e-6)
    shared = Message(dict(Workspace(setup.model()).initial))
    fit = Request("fit", "client-0", "fit", 3, version_of(3, 0), version_of(3, 0) - 1)
    site.handle(fit.to_bytes(), seal(shared))
    last = json.loads((tmp_path / "privacy.jsonl").read_text().splitlines()[-1])
    # An update moves by 2 clips, its noise is 4 of them.
    assert last["epsilon"] == pytest.approx(epsilon_of((3 / 3**2 + 2**2 / 4**2) ** -0.5), rel=1e-6)
    # A new process knows all of it, and so does one with another recipe.
    again = opened(toy_setup(FedAvg(update_privacy=replace(NOISY, noise=8.0)), noisy=False), tmp_path)
    assert again.journal.epsilon(NOISY) == last["epsilon"]
    assert str(again.evaluations.policy) == "noise=3.0"


def test_noise_has_the_spread_of_all_sums_that_leave_together() -> None:
    scalars = {"global:accuracy:sum": 5e5, "global:accuracy:weight": 1e6, "global:loss:sum": 7.0}
    scalars |= {"global:loss:weight": 1e6, "global:accuracy/colour:sum": 3.0, "global:accuracy/colour:weight": 9.0}
    scalars |= {"personal:accuracy:sum": 5e5, "personal:accuracy:weight": 1e6}
    message = Message({"global:positives": torch.ones(3)}, scalars)
    policy = EvaluationPolicy.parse("noise=2")
    found = [policy.release(message) for _ in range(2000)]
    assert not any(reply.tensors for reply in found)
    names = {"global:accuracy:sum", "global:accuracy:weight", "personal:accuracy:sum", "personal:accuracy:weight"}
    assert all(reply.scalars.keys() == names for reply in found)
    drawn = [float(reply.scalars[f"{view}:accuracy:sum"]) - 5e5 for reply in found for view in ("global", "personal")]
    assert stats.kstest(drawn, "norm", args=(0, 2 * math.sqrt(2))).pvalue > 1e-4
    # What is left is a sum of so many values in [0, 1] again.
    few = Message({}, {"global:accuracy:sum": 1.0, "global:accuracy:weight": 2.0})
    cut = [float(EvaluationPolicy.parse("noise=50").release(few).scalars["global:accuracy:sum"]) for _ in range(50)]
    assert set(cut) <= {0.0, 2.0} | {value for value in cut if 0 < value < 2}
    with pytest.raises(ValueError, match="which is defined for accuracy, vqa_accuracy"):
        policy.release(Message({}, {"global:loss:sum": 1.0, "global:loss:weight": 2.0}))


def in_one_round(site: Site, setup: Setup, times: int = 60) -> list[str | None]:
    """Errors of evaluations of different models, all in one round."""
    shared = dict(Workspace(setup.model()).initial)
    errors: list[str | None] = []
    for number in range(times):
        model = {**shared, "head.bias": torch.full_like(shared["head.bias"], float(number))}
        request = Request(f"{number}", "client-0", "evaluate", 1, version_of(1, number), version_of(1, 0) - 1)
        head, _ = site.handle(request.to_bytes(), seal(Message(model, {"split": "test", "limit": 0})))
        errors.append(Answer.from_bytes(head, Limits()).error)
    return errors


def test_one_model_a_round_is_evaluated_by_default(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    usual = in_one_round(opened(setup, tmp_path / "usual"), setup)
    assert usual[0] is None
    assert set(usual[1:]) == {"ValueError: this site answers 1 evaluations in a round, and has answered 1"}
    assert in_one_round(opened(setup, tmp_path / "five", "exact,per_round=5"), setup).count(None) == 5
    # A round that is done again asks for the same model again, of a new process, too.
    again = opened(setup, tmp_path / "usual")
    assert [error is None for error in in_one_round(again, setup, 3)] == [True, False, False]


def test_noised_answers_count_one_by_one_also_of_the_same_model(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    site = opened(setup, tmp_path, "noise=8,per_round=2")
    errors: list[str | None] = []
    for number in range(3):  # other versions, so that no answer comes from memory
        shared = Message(dict(Workspace(setup.model()).initial), {"split": "test", "limit": 0})
        request = Request("x", "client-0", "evaluate", 1, version_of(1, number), version_of(1, 0) - 1)
        errors.append(Answer.from_bytes(site.handle(request.to_bytes(), seal(shared))[0], Limits()).error)
    assert errors[:2] == [None, None]
    assert errors[2] == "ValueError: this site answers 2 evaluations in a round, and has answered 2"


# Numbers --------------------------------------------------------------------------------------------------------


def test_evaluations_are_counted_over_starts_without_repeats(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    site = opened(setup, tmp_path, "exact,per_round=1,in_all=2")
    assert asked(site, setup, number=0)[0] is None
    assert asked(site, setup, number=0)[0] is None  # from its memory, as the reply may be lost
    error, _ = asked(site, setup, answer=1, number=0)
    assert error == "ValueError: this site answers 1 evaluations in a round, and has answered 1"
    again = opened(setup, tmp_path)
    assert asked(again, setup, number=1)[0] is None
    error, _ = asked(again, setup, number=2)
    assert error == "ValueError: this site answers 2 evaluations in all, and has answered 2"


def test_sums_over_few_examples_stay(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    count = int(sum(truth(setup)))
    for least, works in ((count, True), (count + 1, False)):
        error, message = asked(opened(setup, tmp_path / f"{least}", f"exact,least={least}"), setup)
        assert (error is None) == works
        assert bool(message.scalars) == works
    assert error == f"ValueError: this site tells no sums over fewer than {count + 1} examples, got {count}"
    parts = {"global:accuracy:sum": 6.0, "global:accuracy:weight": 9.0, "global:accuracy/colour:sum": 2.0}
    for number, weight in (("0", 5.0), ("1", 2.0)):  # bins of one metric, which is wrong without one of them
        bins = {f"global:calibration/{number}/correct:sum": 1.0, f"global:calibration/{number}/correct:weight": weight}
        parts |= bins
    message = Message({"global:positives": torch.ones(3)}, {**parts, "global:accuracy/colour:weight": 3.0})
    released = EvaluationPolicy(least=4).release(message)
    assert len(EvaluationPolicy(least=2).release(message).scalars) == len(message.scalars)
    assert released.scalars == {"global:accuracy:sum": 6.0, "global:accuracy:weight": 9.0}
    assert not released.tensors


def test_a_server_goes_on_without_sites_that_answer_none(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1, noisy=False)
    letters = Letters(setup, tmp_path)
    letters.sites[0] = opened(setup, tmp_path / "client-0", "off")
    remote = remote_of(letters, PATIENT)
    (record,) = rounds(setup, remote)
    assert not record.errors
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    found = simulation.evaluate(record.servers, 1, split="test")
    assert set(found["global"]) == {"client-1", "client-2"}
    assert simulation.unanswered == {"client-0": "ValueError: this site answers no evaluations"}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("exact", "exact"),
        ("off", "off"),
        ("noise=8, per_round=1", "noise=8.0"),
        ("exact,per_round=60", "exact,per_round=60"),
        ("least=50", "default,least=50"),
        ("exact,in_all=0,least=2", "exact,in_all=0,least=2"),
    ],
)
def test_a_policy_is_what_its_text_says(text: str, kept: str) -> None:
    policy = EvaluationPolicy.parse(text)
    assert str(policy) == kept
    assert EvaluationPolicy.parse(kept) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none", "must be default, exact, off or noise=NUMBER, .* got 'none'"),
        ("noise", "got 'noise' in"),
        ("noise=x", "got 'noise=x' in"),
        ("noise=-1", "noise must be a positive finite multiplier, got -1"),
        ("noise=inf", "noise must be a positive finite multiplier, got inf"),
        ("exact,off", "'off' says again what"),
        ("per_round=-1", "per_round must not be negative, got -1"),
        ("least=0", "least must be at least 1, got 0"),
        ("", "got '' in ''"),
    ],
)
def test_a_policy_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EvaluationPolicy.parse(text)


def test_a_kept_policy_that_was_damaged_is_named(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), noisy=False)
    opened(setup, tmp_path, "off")
    (tmp_path / "evaluations.txt").write_text("of")
    with pytest.raises(ValueError, match=r"evaluations\.txt must hold this site's policy for evaluations: "):
        opened(setup, tmp_path)


def test_a_flare_sites_settings_keep_a_policy(tmp_path: Path) -> None:
    from confed.deployment.flare.job import SiteSettings, read_settings, write_settings

    (tmp_path / "local").mkdir()
    write_settings(SiteSettings(evaluations="off"), tmp_path)
    assert read_settings(SiteSettings, tmp_path).evaluations == "off"


def test_the_command_line_and_a_flower_app_hand_a_policy_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    import confed.deployment.flower_app
    from confed.cli.app import app
    from confed.deployment.authority import make_key
    from confed.deployment.policy import SitePolicy

    given: list[tuple[object, object]] = []

    def opening(*_: object, policy: SitePolicy, **__: object) -> Site:
        given.append((policy.client_epsilon, policy.evaluations))
        raise ValueError("enough")

    monkeypatch.setattr("confed.deployment.flower.open_site", opening)
    make_key(tmp_path / "key")
    line = ["client", "fedvqa_scenes", "--site", "sports", "--insecure", "--key", str(tmp_path / "key")]
    CliRunner().invoke(app, [*line, "--evaluations", "noise=8", "--epsilon", "4"])
    monkeypatch.setattr("confed.deployment.flower_app.open_site", opening)
    monkeypatch.setattr("confed.deployment.flower_app.site_recipe", lambda *_, **__: None)
    monkeypatch.setattr("confed.deployment.flower_app.client_app", lambda site, *_: site)
    _, site = confed.deployment.flower_app.apps(tmp_path)
    config = {"site": "a", "private": str(tmp_path), "evaluations": "off", "epsilon": 2}
    with pytest.raises(ValueError, match="enough"):
        site(SimpleNamespace(node_config=config))  # type: ignore[arg-type,call-arg,misc]
    assert given == [(4.0, "noise=8"), (2.0, "off")]
