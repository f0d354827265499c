"""Epsilon of single examples where gradients are noised, beside what others would name for the same noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.engines.local import Setup
from confed.privacy.examples import ProtectsExamples
from confed.results.privacy_spent import EXAMPLES

__all__ = ["spent_on_examples"]


def spent_on_examples(setup: Setup, history: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, Any]:
    """The field of ``summary.json``; nothing for methods without such noise.

    Args:
        setup: the federation.
        history: the lines of rounds in ``metrics.jsonl``.
        clients: those that a summary lists.
    """
    method = setup.algorithm
    if not isinstance(method, ProtectsExamples) or not method.example_privacy.noise > 0:
        return {}
    privacy = method.example_privacy
    asked = {name: sum(name in line["bytes_down"] for line in history) for name in clients}
    epochs = {name: count * setup.local.epochs for name, count in asked.items()}
    seed = " The noise is a function of the run's seed, which has to stay secret." if privacy.repeatable else ""
    unit = "is replaced by another one" if privacy.adjacency == "replace" else "has a gradient of zero instead"
    return {
        EXAMPLES: {
            "clip": privacy.clip, "noise": privacy.noise, "delta": privacy.delta, "adjacency": privacy.adjacency,
            "steps": epochs,
            "epsilon": {name: privacy.epsilon(count) for name, count in epochs.items()},
            "claimed": dict(method.claimed_epsilon(setup.rounds)),
            "guarantee": (
                f"ε at δ = {privacy.delta:g} of one example that {unit}, towards everybody who sees what its client "
                f"sends or its models (clip {privacy.clip:g}, noise multiplier {privacy.noise:g}); every step that "
                "reads the example counts, one per epoch. Numbers of examples and evaluations are not covered. Not a "
                f"guarantee of the client with all its data.{seed}"
            ),
        }
    }  # fmt: skip
