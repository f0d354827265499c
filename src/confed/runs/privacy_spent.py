"""Privacy ledger of a run: the epsilon spent by noise on updates, round by round."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from confed.engines.local import Participation, Setup
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import poisson_epsilon
from confed.privacy.ledger import PrivacyLedger
from confed.recipes.run_section import RunSection
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY, PRIVACY_SHOWN


def ledger_of(algorithm: Algorithm, run: RunSection, history: Sequence[Mapping[str, Any]]) -> PrivacyLedger | None:
    """A run's ledger as its history has it; None where updates are not noised."""
    privacy = algorithm.update_privacy
    if privacy is None or not privacy.noise > 0:
        return None
    ledger = PrivacyLedger(privacy, run.sampling == "uniform", Participation(run.joins, run.leaves).holds)
    for line in history:
        if PRIVACY in line:
            ledger.add(line["round"], line[PRIVACY]["asked"], line[PRIVACY]["present"])
    return ledger


def line_of(ledger: PrivacyLedger, round: int, cohort: Sequence[str], present: int) -> dict[str, Any]:
    """Ledger entry of a round, and its field in the history: the clients asked, with the epsilon of each so far."""
    ledger.add(round, cohort, present)
    epsilon = {name: ledger.epsilon(name) for name in cohort}
    return {PRIVACY: {"asked": list(cohort), "present": present, "epsilon": epsilon}}


def summary_of(ledger: PrivacyLedger, clients: Sequence[str], rounds: int) -> dict[str, Any]:
    """The field of ``summary.json``: the guarantee in numbers and words, client by client and round by round."""
    privacy = ledger.privacy
    spent: dict[str, list[float]] = {}
    for name in clients:
        spent[name] = [ledger.epsilon(name, round) for round in _shown(rounds)]
    return {
        PRIVACY: {
            "at": privacy.at, "clip": privacy.clip, "noise": privacy.noise, "delta": privacy.delta,
            "adjacency": privacy.adjacency, "amplified": ledger.amplified,
            "epsilon": {name: ledger.epsilon(name) for name in clients},
            "rounds": {name: ledger.taken_part(name) for name in clients},
            "after": _shown(rounds), "so_far": spent, "guarantee": _guarantee(privacy, ledger.amplified),
        }
    }  # fmt: skip


def record_cost(privacy: RecordPrivacy, local: Local, examples: int, rounds: int) -> tuple[int, float]:
    """Steps of local training in so many rounds, and the epsilon that they cost each of a client's records."""
    rate = min(1.0, local.batch_size * local.accumulate / examples)
    steps = rounds * local.round_steps(local.steps(math.ceil(examples / local.batch_size)))
    return steps, poisson_epsilon(privacy.noise, rate, steps, privacy.delta)


def spent_on_records(
    setup: Setup, privacy: RecordPrivacy, asked: Mapping[str, Mapping[str, int]], clients: Sequence[str]
) -> dict[str, Any]:
    """The field of ``summary.json`` of noise on the gradients of records: the ledger of each client's records."""
    rounds = Counter(chain.from_iterable(asked.values()))
    examples = {info.id: info.num_examples for info in map(setup.population.info, range(len(setup.population)))}
    steps: dict[str, int] = {}
    epsilon: dict[str, float] = {}
    for name in clients:
        steps[name], epsilon[name] = record_cost(privacy, setup.local, examples[name], rounds[name])
    seed = " Samples and noise are functions of the run's seed, which has to stay secret." if privacy.repeatable else ""
    return {
        EXAMPLE_PRIVACY: {
            "clip": privacy.clip, "noise": privacy.noise, "delta": privacy.delta, "adjacency": "add or remove",
            "steps": steps, "epsilon": epsilon, "claimed": {},
            "guarantee": (
                f"ε at δ = {privacy.delta:g} of one record that is added or removed, towards everybody who sees what "
                f"its client sends or its models (clip {privacy.clip:g}, noise multiplier {privacy.noise:g}); every "
                "step samples each record with a probability of its own, which who does not know the samples gains "
                "from. Numbers of examples and evaluations are not covered, nor are personal models, which stay at "
                f"home. Not a guarantee of the client with all its data.{seed}"
            ),
        }
    }  # fmt: skip


def _shown(rounds: int) -> list[int]:
    """At most eight rounds, the last among them."""
    count = min(rounds, PRIVACY_SHOWN)
    return sorted({math.ceil((i + 1) * rounds / count) for i in range(count)})


def _guarantee(privacy: UpdatePrivacy, amplified: bool) -> str:
    """The guarantee in a sentence or two, with what it leaves out."""
    where = (
        "Clients clip and noise their updates themselves, so it holds towards the server and everybody else"
        if privacy.at == "client"
        else "The server clips updates and noises their sum, so it holds towards those who see its models, and the "
        "server is trusted"
    )
    unit = "is replaced by another client" if privacy.adjacency == "replace" else "sends updates of zero instead"
    sampled = (
        "It counts that cohorts were drawn uniformly, towards those who do not know who was drawn."
        if amplified
        else "Nothing is gained by sampling clients."
    )
    seed = (
        " The noise is a function of the run's seed: it has to stay secret, or update_privacy.repeatable be false."
        if privacy.repeatable
        else ""
    )
    return (
        f"ε at δ = {privacy.delta:g} of all that a client sends in training, where the client with all its data {unit} "
        f"(clip {privacy.clip:g}, noise multiplier {privacy.noise:g}). {where}. {sampled} Numbers of examples and "
        f"evaluations are not covered, nor are personal models, which stay at home.{seed}"
    )
