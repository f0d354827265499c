"""Equivalence of the ways of execution: what each makes of every field of local training and every hook of a method.

The reference is one client after the other in one process. A way of execution follows what is declared here and nothing
else: stacked training and asynchronous rounds read these tables before they begin. ``docs/equivalence.md`` is made from
them, and tests that are generated from the same dataclasses prove every cell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from confed.federation.algorithm import Algorithm
from confed.federation.compression import Compression
from confed.federation.evaluation import Evaluation
from confed.federation.local import Local

Result = Literal["equal bits", "within 1e-5", "one by one", "refused", "not asked"]
"""A cell. "one by one" has the reference's bits, as the way steps aside; "not asked" is no part of a round."""

WAYS: Mapping[str, str] = {
    "stacked": "`run.batch_clients` > 1: several clients in one pass",
    "workers": "`run.workers` > 1: forked processes; spawned ones make their setup as actors on Ray do",
    "Ray": '`run.engine = "ray"`',
    "buffered": "`run.async.buffer` = `run.cohort` = all clients, equal delays: asynchronous rounds with nothing late",
    "resumed": "a checkpoint after the first round, and another process",
    "kept features": '`run.features.keep = "auto"`: outputs of frozen layers kept',
}
"""Ways of execution, and the settings that choose them."""


@dataclass(frozen=True)
class Row:
    """Declared results of one field or hook; whatever is not said otherwise has equal bits."""

    stacked: Result = "within 1e-5"  # result of stacked training, for the values that it follows
    # the values that stacked training follows; None for all. Any other is trained one by one.
    stacks: tuple[Any, ...] | None = None
    buffered: Result = "equal bits"  # result of asynchronous rounds with nothing late
    packed: Result = "equal bits"  # result beside compressed updates or models, in every way of execution
    in_rounds: bool = True  # False where nothing that happens in a round depends on it
    reason: str = ""  # why a way steps aside or refuses, as the end of a sentence

    def result(self, way: str, value: Any = None) -> Result:
        """The cell of one way of execution, for one value of a field."""
        if way == "stacked" and self.stacks is not None and value not in self.stacks:
            return "one by one"
        if way == "buffered" and self.buffered != "equal bits":
            return self.buffered
        if not self.in_rounds:
            return "not asked"
        return self.stacked if way == "stacked" else "equal bits"


_PROTECTED = "each update is protected before it leaves its client"
_ROUNDED = "a last digit may decide which way a value is rounded"
_EVALUATES = Row(reason="own models are evaluated one by one, in the method's way")
_OUTSIDE = Row(in_rounds=False)

LOCAL: Mapping[str, Row] = {
    "epochs": Row(),
    "batch_size": Row(),
    "accumulate": Row(stacks=(1,), reason="gradients of several batches are not added up there"),
    "lr": Row(),
    "optimizer": Row(stacks=("sgd", "adam", "adamw"), reason="other optimisers have no stacked step"),
    "weight_decay": Row(),
    "betas": Row(),
    "momentum": Row(),
    "clip": Row(),
    "schedule": Row(),
    "augment": Row(),
    "precision": Row(stacks=("fp32",), reason="autocast is not tried there"),
    "eval_batch_size": Row(),
    "iterations": Row(),
}
"""Fields of :class:`confed.federation.local.Local`."""

OPTIONS: Mapping[str, Row] = {
    "accumulator": Row(),
    "server": Row(),
    "robust": Row(),
    "update_privacy": Row(stacks=(None,), buffered="refused", reason=_PROTECTED),
    "secure_sum": Row(stacks=(None,), buffered="refused", packed="refused", reason=_PROTECTED),
    "record_privacy": Row(stacks=(None,), reason="the gradient of each example is clipped"),
}
"""Fields of every method, :class:`confed.federation.algorithm.Algorithm`."""

RUN: Mapping[str, Row] = {
    "uplink": Row(stacks=(Compression(),), reason=_ROUNDED),
    "downlink": Row(
        stacks=(Compression(),), buffered="refused", reason=_ROUNDED + "; clients would begin with several"
    ),
}
"""Compression of what travels, :class:`confed.federation.compression.Compression`."""

HOOKS: Mapping[str, Row] = {
    "configure": Row(),
    "add_modules": Row(),
    "rules": Row(),
    "initial_private": Row(),
    "lr_factor": Row(),
    "init": Row(),
    "phases": Row(buffered="refused", reason="a late client is sent what the first part of a round asks for"),
    "round": Row(),
    "finish": Row(),
    "broadcast": Row(),
    "aggregate": Row(),
    "average": Row(),
    "weight": Row(),
    "accumulator_dtype": Row(),
    "objective": Row(),
    "local_training": Row(),
    "fit": Row(stacked="one by one", reason="stacked training takes the place of the plain action"),
    "personalise": Row(),
    "actions": Row(stacked="one by one", reason="stacked training takes the place of the plain actions"),
    "evaluate": _EVALUATES,
    "examine": Row(),
    "unsupported_reason": Row(in_rounds=False, buffered="refused", reason="a method without a robust mean has none"),
    "global_model": Row(),
    "deployed_model": _EVALUATES,
    "reports": _OUTSIDE,
    "search_space": _OUTSIDE,
    "effective_value": _OUTSIDE,
    "updates_compressible": _OUTSIDE,
    "steps_alone": _OUTSIDE,
    "title": _OUTSIDE,
    "own_hooks": _OUTSIDE,
    "told": _OUTSIDE,
}
"""Hooks of methods: public functions and properties of :class:`confed.federation.algorithm.Algorithm`."""


def hooks() -> list[str]:
    """Names of all that a method may override, in the order of the classes."""
    options = {field.name for field in fields(Algorithm)} | {"traits"}
    public = [name for name in {**vars(Algorithm), **vars(Evaluation)} if not name.startswith("_")]
    return [name for name in public if name not in options]


def overridden(algorithm: Algorithm) -> list[str]:
    """Names of the hooks that a method overrides."""
    return [name for name in hooks() if getattr(type(algorithm), name) is not getattr(Algorithm, name)]


def unbatchable_training(algorithm: Algorithm) -> str:
    """Why stacked training does not follow a method, as the end of a sentence; "" where it does."""
    title = type(algorithm).__name__
    if algorithm.traits.in_sessions:
        return f"{title} trains in sessions of many calls"
    reason = algorithm.traits.unbatchable_reason
    if reason is None and {"objective", "local_training"} & set(overridden(algorithm)):
        reason = "the method does not say that its objective is one loss per batch"
    if reason:
        return reason
    for name in overridden(algorithm):
        if name not in HOOKS:
            return f"{title} overrides {name!r}, which stacked training does not know"
        if name == "actions" and algorithm.actions()["fit"] == algorithm.fit:
            continue
        if HOOKS[name].stacked == "one by one":
            return f"{title} overrides {name!r}, and {HOOKS[name].reason}"
    return _unfollowed(algorithm, OPTIONS, "algorithm", [field.name for field in fields(Algorithm)])


def unbatchable_evaluation(algorithm: Algorithm) -> str:
    """Why models of several clients are not evaluated at once, as the end of a sentence; "" where they are."""
    for name in overridden(algorithm):
        if name == "actions" and algorithm.actions()["evaluate"] == algorithm.evaluate:
            continue
        if name not in HOOKS or name == "actions" or HOOKS[name] is _EVALUATES:
            return f"{type(algorithm).__name__} overrides {name!r}, and may evaluate in its own way"
    return ""


def unstacked_setting(local: Local, only: Sequence[str] | None = None) -> str:
    """Why stacked training does not follow settings of local training, as the end of a sentence; "" where it does."""
    names = [field.name for field in fields(local) if only is None or field.name in only or field.name not in LOCAL]
    return _unfollowed(local, LOCAL, "local", names)


def unstacked_run(setup: object) -> str:
    """Why stacked training does not follow how a run's messages travel, as the end of a sentence; "" where it does."""
    return _unfollowed(setup, RUN, "run", list(RUN))


def follows_steps(algorithm: Algorithm, local: Local) -> bool:
    """Whether a client's training can go on from its tensors, its optimiser and its position alone."""
    plain = not {"fit", "local_training", "objective"} & set(overridden(algorithm))
    # Noise on gradients is drawn anew, and moments of 8 bits lie in the buffers of a library.
    followed = algorithm.record_privacy is None and local.optimizer != "adamw8bit"
    return followed and (plain or algorithm.steps_alone)


def unbuffered_hook(algorithm: Algorithm) -> str:
    """Why asynchronous rounds do not follow a method's hooks, as the end of a sentence; "" where they do."""
    for name in overridden(algorithm):
        if name not in HOOKS:
            return f"it overrides {name!r}, which asynchronous rounds do not know"
        # What `unsupported_reason` says is for the engine to ask.
        if HOOKS[name].buffered == "refused" and HOOKS[name].in_rounds:
            return f"it overrides {name!r}, and {HOOKS[name].reason}"
    return ""


def _unfollowed(holder: object, rows: Mapping[str, Row], section: str, names: Sequence[str]) -> str:
    for name in names:
        value = getattr(holder, name)
        if name not in rows:
            return f"{section}.{name} is not known to stacked training"
        stacks = rows[name].stacks
        if stacks is not None and value not in stacks:
            which = (
                ""
                if stacks in ((None,), (Compression(),))
                else f"is {value!r}, stacked are {', '.join(map(repr, stacks))}: "
            )
            return f"{section}.{name} {which or 'is set: '}{rows[name].reason}"
    return ""
