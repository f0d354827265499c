"""A site's policy: what asks for more than a limit is refused with the limit's line, here and at the coordinator."""

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from confed.algorithms.fedavg import FedAvg
from confed.deployment.policy import PolicyGuard, SitePolicy, policy_of, read_policy
from confed.deployment.site import open_site
from confed.engines.perform import Workspace
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits, Request, open_body, seal, version_of
from confed.federation.messages import Message
from confed.release.limits import Release, read_limits
from confed.release.probe import Estimate
from confed.release.verdict import BEYOND, WITHIN, judge, verdict
from confed.testing.toy import toy_setup
from led_recipe import recipe_of
from refusals import refuses

NOISE = 'algorithm.update_privacy={clip=1.0, noise=1.0, at="client"}'
RECORDS = "algorithm.record_privacy={clip=1.0, noise=1.0}"


def policy_in(folder: Path, line: str) -> SitePolicy:
    (folder / "policy.toml").write_text(f"# what this site allows\n\n{line}  # by the board\n[release]\ncut = 0.3\n")
    return read_policy(folder / "policy.toml")


# Key -> a line that allows a recipe, one that does not, the recipe's overrides, and what the refusal says.
RECIPES = {
    "methods": ('methods = ["fedavg"]', 'methods = ["fedprox"]', [], "the recipe's method is fedavg"),
    "rounds": ("rounds = 2", "rounds = 1", [], "the recipe has 2 rounds"),
    "client_epsilon": (None, "client_epsilon = 8", [], "the recipe has no noise of clients"),
    "record_epsilon": ("record_epsilon = 100", "record_epsilon = 0.1", [RECORDS], "2 rounds cost a record here"),
}


@pytest.mark.parametrize("key", RECIPES)
def test_a_recipe_that_asks_for_more_is_refused_by_its_line(key: str, tmp_path: Path) -> None:
    enough, too_little, overrides, why = RECIPES[key]
    recipe = recipe_of("fedavg", *overrides)
    if enough is not None:
        open_site(recipe, "warm", tmp_path / "private", policy=policy_in(tmp_path, enough))
    with pytest.raises(ValueError, match=f"this site's policy, line 3, {key} = .*: {why}"):
        open_site(recipe, "warm", tmp_path / "other", policy=policy_in(tmp_path, too_little))


def test_noise_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no noise for records"):
        open_site(recipe_of("fedavg"), "warm", tmp_path / "private", policy=policy_in(tmp_path, "record_epsilon = 8"))
    policy = policy_in(tmp_path, "client_epsilon = 8")
    site = open_site(recipe_of("fedavg", NOISE), "warm", tmp_path / "other", policy=policy)
    assert "limit" not in str(site.problem)


def guarded(root: Path, policy: SitePolicy, clock: Callable[[], float] = time.time) -> Site:
    setup = toy_setup(FedAvg(), noisy=False)
    client, audit = client_named(setup, "client-0"), root / "audit.jsonl"
    guard = PolicyGuard(policy, audit, clock)
    return Site(setup, client, root, audit=audit, evaluations=policy.on_evaluations, guard=guard)


def ask(site: Site, action: str, number: int) -> tuple[str | None, Message]:
    tensors = dict(Workspace(toy_setup(FedAvg(), noisy=False).model()).initial)
    scalars: dict[str, str | int] = {"split": "test", "limit": 0} if action == "evaluate" else {}
    request = Request(f"{number}", "client-0", action, number, version_of(number, 0), version_of(number, 0) - 1)
    head, body = site.handle(request.to_bytes(), seal(Message(tensors, scalars)))
    return Answer.from_bytes(head, Limits()).error, open_body(body, Limits(), {}, frozenset())


def at(clock: str) -> float:
    return time.mktime(time.strptime(f"2026-11-27 {clock}", "%Y-%m-%d %H:%M"))


# Key -> a line that allows a round of training and an evaluation, one that does not, and what the coordinator reads.
REQUESTS = {
    "actions": ('actions = ["fit", "evaluate"]', 'actions = ["evaluate"]', "the server asks for fit"),
    "hours": ('hours = "11:00-13:00"', 'hours = "13:00-11:00"', "it is 12:00 here"),
    "bytes_per_day": ("bytes_per_day = 1000000", "bytes_per_day = 100", "0 were used today"),
}


@pytest.mark.parametrize("key", REQUESTS)
def test_a_request_for_more_is_refused_and_the_reason_travels(key: str, tmp_path: Path) -> None:
    enough, too_little, why = REQUESTS[key]
    noon = lambda: at("12:00")  # noqa: E731
    error, reply = ask(guarded(tmp_path / "a", policy_in(tmp_path, enough), noon), "fit", 0)
    assert error is None
    assert reply.tensors
    error, reply = ask(guarded(tmp_path / "b", policy_in(tmp_path, too_little), noon), "fit", 0)
    assert error is not None
    assert error.startswith(f"Refused: this site's policy, line 3, {key} = ")
    assert why in error
    assert not reply.tensors


def test_figures_over_too_few_examples_are_not_told(tmp_path: Path) -> None:
    assert ask(guarded(tmp_path / "a", policy_in(tmp_path, "least_examples = 2")), "evaluate", 0)[0] is None
    error, _ = ask(guarded(tmp_path / "b", policy_in(tmp_path, "least_examples = 10000")), "evaluate", 0)
    assert error is not None
    assert "fewer than 10000 examples" in error
    error, _ = ask(guarded(tmp_path / "c", policy_in(tmp_path, 'evaluations = "off"')), "evaluate", 0)
    assert error is not None
    assert "answers no evaluations" in error


def test_every_key_has_a_case_one_over_its_limit() -> None:
    keys = {field.name for field in fields(SitePolicy)} - {"file", "lines"}
    assert keys == {*RECIPES, *REQUESTS, "least_examples", "evaluations"}


@pytest.mark.parametrize("limit", [entry.name for entry in fields(Release)])
def test_a_model_one_over_each_limit_of_release_is_beyond_it(limit: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f"rounds = 2\n[release]\n{limit} = 1\n")
    assert read_policy(file).rounds == 2
    release, over = read_limits(file), -1 if limit == "least_members" else 1
    for value, sentence in ((1.0, WITHIN), (1.0 + over, BEYOND.format(limit.replace("_", " ")))):
        figures = judge([("probe", Estimate(limit, "a title", value, limit=limit))], release)
        assert verdict(figures, release, 0)[0] == sentence


def test_bytes_are_counted_over_restarts_and_anew_each_day(tmp_path: Path) -> None:
    policy = policy_in(tmp_path, "bytes_per_day = 1000000")
    root, day = tmp_path / "site", time.time()
    assert ask(guarded(root, policy), "fit", 0)[0] is None
    used = sum(len(line) > 0 for line in (root / "audit.jsonl").read_text().splitlines())
    assert used == 2
    again = PolicyGuard(policy, root / "audit.jsonl", lambda: day)
    refuses(r"bytes_per_day = 1000000: [1-9]\d+ were used today, and 999999 are asked", again.count, 999_999)
    PolicyGuard(policy, root / "audit.jsonl", lambda: day + 86400).count(999_999)


def test_a_command_line_narrows_a_policy_and_never_widens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert policy_of(None, 3.0, None) == SitePolicy(client_epsilon=3.0)
    policy_in(tmp_path, "client_epsilon = 8")
    assert policy_of(None, 3.0, "off").client_epsilon == 3.0
    refuses(r"line 3, client_epsilon = 8: --epsilon says 9", policy_of, None, 9.0, None)
    policy_in(tmp_path, 'evaluations = "noise=8"')
    refuses("--evaluations says exact", policy_of, None, None, "exact")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("rounds = 0", "rounds must be at least 1, got 0"),
        ("rounds = 1.5", "policy.rounds: Input should be a valid integer"),
        ("rounds = true", "policy.rounds must be a number, got true"),
        ('methods = "fedavg"', "policy.methods: Input should be a valid tuple"),
        ('hours = "8-17"', "hours must be like 20:00-06:00"),
        ("epsilon = 8", "unknown key policy.epsilon=8; did you mean 'record_epsilon'"),
        ('evaluations = "some"', "evaluations must be default, exact, off"),
        ("client_epsilon = -1", "client_epsilon must be positive"),
        ("= 3", "must be a site's policy in TOML"),
    ],
)
def test_a_policy_that_says_nothing_sound_is_refused(line: str, why: str, tmp_path: Path) -> None:
    refuses(why, policy_in, tmp_path, line)
