"""Values of recipes: ranges, NaN and infinity, keys without an effect, files in other encodings."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest

from confed.algorithms.fedprox import FedProx
from confed.data.options import DrawnOptions, Options
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local, Schedule
from confed.federation.ranges import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    _hints,  # pyright: ignore[reportPrivateUsage]
    _meaning,  # pyright: ignore[reportPrivateUsage]
    check_fields,
)
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.robust_mean import RobustMean
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.update_privacy import UpdatePrivacy
from confed.models.finetuning import Finetuning
from confed.recipes.recipe import load_recipe
from confed.recipes.run_section import Asynchronous, KeptFeatures, RunSection
from confed.registry import algorithms
from confed.runs.build import warn_of_ignored
from confed.system import format as formats
from confed.tasks.chat import Chat
from confed.tasks.generation import Generation
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from confed.unlearning.exact import Approximation
from refusals import refuses


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.clip=-1", "local.clip must be positive, got -1.0"),
        ("local.clip=0", "local.clip must be positive, got 0.0"),
        ("local.lr=inf", "local.lr: Input should be a finite number; got inf"),
        ("local.weight_decay=-50", "local.weight_decay must not be negative, got -50.0"),
        ("local.momentum=2", "local.momentum must lie in [0, 1), got 2.0"),
        ("local.schedule.warmup=7", "local.schedule.warmup must lie in [0, 1], got 7.0"),
        ("local.schedule.warmup=-1", "local.schedule.warmup must lie in [0, 1], got -1.0"),
        ("local.schedule.stairs=-4", "local.schedule.stairs must not be negative, got -4"),
        ("local.schedule.milestones=[5]", "local.schedule.milestones must lie in [0, 1], got (5.0,)"),
        ("local.schedule.decay=-3", "local.schedule.decay must lie in (0, 1], got -3.0"),
        ("local.betas=[1.5,0.9]", "local.betas must lie in [0, 1), got (1.5, 0.9)"),
        ("local.epochs=true", "local.epochs must be a number, got true"),
        ("algorithm.lam=nan", "algorithm.lam: Input should be a finite number; got nan"),
        ("algorithm.lam=-1", "algorithm.lam must not be negative, got -1.0"),
        ("study.lr=[0]", "study.lr must be positive, got (0.0,)"),
        ("study.lr=[0.1,true]", "study.lr.1 must be a number, got true"),
        ("run.rounds=true", "run.rounds must be a number, got true"),
        ("run.cohort=2.5", "run.cohort must be a whole number of clients, or a share below 1, got 2.5"),
        ("run.checkpoint_seconds=-1", "run.checkpoint_seconds must not be negative, got -1.0"),
        ("run.seed=99999999999999999999", "run.seed must lie in [-4.61169e+18, 4.61169e+18], got 99999999999999999999"),
        ("data.conflict=nan", "data.conflict: Input should be a finite number; got nan"),
        ("algorithm.server.tau=true", "algorithm.server.tau must be a number, got true"),
        ("algorithm.server.lr=inf", "algorithm.server.lr must be finite, got inf"),
        ('study.methods=["fedavg"', "'study.methods=[\"fedavg\"': not TOML: Unclosed array"),
        ('study.methods="fedavg', "'study.methods=\"fedavg': not TOML: "),
    ],
)
def test_a_value_out_of_its_range_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        load_recipe("fedvqa_scenes", [override])
    assert str(caught.value).startswith(message)


def test_python_is_told_what_a_recipe_is() -> None:
    for bad in (math.nan, math.inf, True, -1.0):
        refuses(r"^algorithm\.mu must ", FedProx, mu=bad)
        refuses(r"^local\.lr must ", Local, lr=bad)
    refuses(r"algorithm\.accumulator must be one of float32, float64, got 'half'", FedProx, accumulator="half")


Kind = Callable[..., Any]
SECTIONS: dict[Kind, dict[str, Any]] = {
    Approximation: {}, Asynchronous: {}, Chat: {"answers": 3}, Finetuning: {}, KeptFeatures: {}, Local: {},
    Options: {}, DrawnOptions: {}, RecordPrivacy: {"clip": 1.0}, RobustMean: {"rule": "clip"}, RunSection: {},
    Schedule: {}, ServerOptimizer: {}, UpdatePrivacy: {"clip": 1.0}, Generation: {"answers": 3},
    Multilabel: {"answers": 3}, VQA: {"answers": 3},
    **{algorithms[name]: {"rule": "clip"} if name == "robust" else {} for name in algorithms.names()},
}  # fmt: skip
"""What recipes set, and what must be given; tests/golden/interface says which ranges are declared."""


def beyond(allowed: Range) -> Iterator[float]:
    """The nearest values outside a range."""
    yield math.nan
    if allowed.low > -math.inf:
        yield allowed.low if allowed.above else allowed.low - 1
    if allowed.high < math.inf:
        yield allowed.high if allowed.below else allowed.high + 1


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_declared_range_and_choice_is_checked(kind: Kind) -> None:
    for name, hint in _hints(kind):
        allowed, options = _meaning(hint)
        if options:
            refuses(f"{name} must be ", kind, **{**SECTIONS[kind], name: "no such"})
        for value in beyond(allowed) if allowed else ():
            expected = "be a number" if math.isnan(value) else re.escape(str(allowed))
            refuses(f"{name} must {expected}, got {value}", kind, **{**SECTIONS[kind], name: value})


def test_fields_of_all_shapes() -> None:
    @dataclass(frozen=True)
    class Section:
        share: Annotated[float, BELOW_ONE] = 0.5
        pair: Annotated[tuple[float, ...], POSITIVE] = (1.0,)
        maybe: Annotated[float | None, NOT_NEGATIVE] = None
        word: Literal["a", "b"] | None = None
        either: int | Literal["all"] = 1
        switch: bool = False
        other: Algorithm | None = None

        def __post_init__(self) -> None:
            check_fields(self, "s")

    Section(0.0, (2.0, 3.0), 0.0, "a", "all", True, FedProx())
    for changes, message in {
        ("share", 1.0): "s.share must lie in [0, 1), got 1.0",
        ("pair", (1.0, 0.0)): "s.pair must be positive, got (1.0, 0.0)",
        ("maybe", -0.1): "s.maybe must not be negative, got -0.1",
        ("maybe", math.inf): "s.maybe must be finite, got inf",
        ("word", "c"): "s.word must be one of a, b, got 'c'",
        ("either", math.nan): "s.either must be a number, got nan",
    }.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
            Section(**{changes[0]: changes[1]})
        assert str(caught.value) == message
    assert str(Range(2)) == "be at least 2"
    assert str(Range(2, above=True)) == "be above 2"


def _materials(sizes: list[int], elsewhere: dict[str, int] | None = None) -> Any:
    tables = {f"c{n}": SimpleNamespace(tables=([0], [0], [0] * size)) for n, size in enumerate(sizes)}
    return SimpleNamespace(clients=tables, unseen={}, dataset=SimpleNamespace(elsewhere=elsewhere))


def test_what_has_no_effect_is_said() -> None:
    data = {"name": "scenes", "clients": 1}
    with pytest.warns(UserWarning, match=r"data\.clients = 1 has no effect: who the 4 clients are"):
        warn_of_ignored(data, RunSection(), _materials([1] * 4))
    data["clients"] = 4
    with pytest.warns(UserWarning, match=r"run\.cohort = 100 is more than the 4 clients there are: all take part"):
        warn_of_ignored(data, RunSection(cohort=100), _materials([1] * 4))
    with pytest.warns(UserWarning, match="there are no test examples"):
        warn_of_ignored(data, RunSection(), _materials([0] * 4))
    # Nothing is said of what counts: warnings are errors here.
    warn_of_ignored({**data, "clients": 3}, RunSection(cohort=2, without=("x",)), _materials([0, 1]))
    warn_of_ignored(data, RunSection(cohort=0.5), _materials([0] * 4, elsewhere={}))


def test_a_run_says_so_before_it_trains() -> None:
    from confed.runs.build import prepare

    small = ["data.train=8", "data.validation=4", "data.test=4", "model.name=vilt_tiny", "data.clients=1"]
    with pytest.warns(UserWarning, match=r"data\.clients = 1 has no effect"):
        prepare(load_recipe("fedvqa_scenes", small).method("fedavg"))


def test_recipes_are_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    text = '[algorithm]\nname = "fedavg"\n[model]\nname = "vilt_tiny"\n[task]\nname = "vqa"\n[data]\nname = "scenes"\n'
    (tmp_path / "mark.toml").write_text("# föderiert\n" + text, encoding="utf-8-sig")
    assert load_recipe(tmp_path / "mark.toml").sections["algorithm"]["name"] == "fedavg"
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "other.toml").write_text("# föderiert\n" + text, encoding=encoding)
        with pytest.raises(ValueError, match=r"other\.toml is not in UTF-8 \(byte \d+\); save it in that encoding"):
            load_recipe(tmp_path / "other.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ValueError, match=r"^algorithm\.name must be given, the name of one algorithm; there are"):
        load_recipe(tmp_path / "empty.toml")


def test_a_hint_is_given_once(capfd: pytest.CaptureFixture[str]) -> None:
    from confed.cli import main

    with pytest.raises(SystemExit):
        main(["rnu"])
    assert capfd.readouterr().err.count("Did you mean") == 1


def test_one_client_is_no_plural() -> None:
    assert [formats.counted(n, "client") for n in (0, 1, 2)] == ["0 clients", "1 client", "2 clients"]
