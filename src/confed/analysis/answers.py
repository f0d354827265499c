"""What the main server of a finished run of split learning could have learnt of one client's answers.

With and without defences. What is sent is made again as the protocol makes it: with the weights that the run ended
with, and in a first epoch from the initial weights, in which the network learns from step to step. Training the whole
network gives the weights that split training gives; the order of the examples is not that of the run, and the rate is
constant. Here are the rows v_APN of BiCSL; the gradients of supervised split learning are in
:mod:`confed.analysis.gradients`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.analysis.audit import (
    BY_FREQUENCY,
    BY_KNOWN,
    CLUSTERING,
    NOISES,
    Audited,
    batches_of,
    beginner,
    finding_of,
    known_rows,
    public_answers,
    spent,
)
from confed.analysis.gradients import audit_gradients
from confed.analysis.victim import Finding, Victim, expand, names_of, open_victim
from confed.attacks.answer_recovery import (
    Observed,
    Split,
    by_frequency,
    by_known,
    equal_rows,
    expected_groups,
    followed_rows,
    k_means,
    looked_up,
    observe,
    score,
)
from confed.comparison.records import distinct_labels
from confed.federation.protocols import Batch
from confed.federation.randomness import generator, isolated
from confed.privacy.cut import CutPrivacy, cut_privacy
from confed.system.events import Note, Progress, ignore

COUNTING, FOLLOWING = "equal rows", "rows followed from step to step"
LOOKING_UP = "rows looked up, knowing APN"


def answers(
    folders: Sequence[Path],
    *,
    examples: int = 2000,
    client: str = "",
    seed: int = 0,
    progress: Progress = ignore,
) -> Finding:
    """Audits what a client's answers look like to the main server: in v_APN, or in the gradients that go up."""
    if examples < 2:
        raise ValueError(f"examples must be at least 2, got {examples}")
    runs, notes = expand(folders)
    rows: list[Audited] = []
    names: dict[str, str] = {}
    for folder, name in zip(runs, names_of(runs), strict=True):
        victim = open_victim(folder, name=name)
        # In other methods the same network is whole at a client, and no row is sent.
        if not victim.partly_known:
            notes.append(f"left out: {folder}: {victim.label} sends no row per example")
            continue
        progress(Note(f"auditing {folder}"))
        names[victim.name] = victim.label
        whose = client or next(iter(victim.run_data.clients))
        batches = batches_of(victim, examples, whose, seed)
        rows += (_audit if isinstance(victim.model, Split) else audit_gradients)(victim, batches, whose, seed)
    if not rows:
        raise ValueError("; ".join(notes))
    return finding_of(rows, distinct_labels(names), notes)


def defences(clip: float, noises: Sequence[float] = NOISES) -> dict[str, CutPrivacy]:
    """The defences that audits try, by name: none, distinct answers, and noise."""
    noised = {f"noise {noise:g}": CutPrivacy(clip=clip, noise=noise) for noise in noises}
    return {"none": CutPrivacy(), "each answer once per batch": CutPrivacy(distinct=True), **noised}


def _audit(victim: Victim, batches: Sequence[Batch], client: str, seed: int) -> list[Audited]:
    """What v_APN gives away of these batches."""
    public = public_answers(victim)
    answer_table = _table(victim)
    own = cut_privacy(victim.setup.algorithm)
    tried = defences(float(answer_table.norm(dim=1).median().clamp_min(1e-6))) if own.off else {"the run's": own}
    audited: list[Audited] = []
    model: Any = victim.model
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"audit {name}")
        seen = observe(model.eval(), batches, privacy=privacy, rng=rng)
        cost = spent(privacy.noise)
        for attack, guesses, groups, asked in _attacks(seen, answer_table, privacy, public, seed):
            partition = None if groups is None else groups[asked]
            recovery = score(guesses[asked], seen.labels[asked], public, partition)
            audited.append(Audited(victim.name, "v_APN", "last weights", name, attack, cost, recovery))
    if own.off:
        audited.append(_first_epoch(victim, batches, public, seed))
    return audited


def _attacks(
    seen: Observed, known: Tensor, privacy: CutPrivacy, public: Tensor, seed: int
) -> list[tuple[str, Tensor, Tensor | None, Tensor]]:
    """Every attack that applies: its name, its guesses, the groups that it named, and the rows that it was asked."""
    if privacy.noise > 0:
        groups = k_means(seen.v_apn, expected_groups(public, len(seen.v_apn)), generator(seed, 0, "", "clusters"))
        name = CLUSTERING
    else:
        groups, name = equal_rows(seen.v_apn), COUNTING
    table = privacy.activations(known, torch.Generator()) if privacy.noise == 0 else _clipped(known, privacy)
    deviation = privacy.noise * (privacy.clip or 0.0)
    few, rest = known_rows(len(groups), seed)
    every = torch.arange(len(groups))
    return [
        (BY_FREQUENCY.format(name), by_frequency(groups, public), groups, every),
        (BY_KNOWN.format(name, len(few)), by_known(groups, few, seen.labels[few], public), groups, rest),
        (LOOKING_UP, looked_up(seen.v_apn, table, deviation, public), None, every),
    ]


def _first_epoch(victim: Victim, batches: Sequence[Batch], public: Tensor, seed: int) -> Audited:
    """The rows of the first epoch, in which APN learns after every step."""
    model, learn = beginner(victim)
    with isolated(seed):
        seen = observe(model, batches, learn=learn)
    groups = followed_rows(seen.v_apn, seen.step)
    recovery = score(by_frequency(groups, public), seen.labels, public, groups)
    return Audited(victim.name, "v_APN", "first epoch", "none", BY_FREQUENCY.format(FOLLOWING), None, recovery)


def _table(victim: Victim) -> Tensor:
    """v_APN of all answers, (C, H), with the weights that the run ended with."""
    apn: Any = victim.model.get_submodule("apn")
    with torch.no_grad():
        return apn.all_answers().float().cpu()


def _clipped(table: Tensor, privacy: CutPrivacy) -> Tensor:
    return CutPrivacy(clip=privacy.clip).activations(table, torch.Generator())
