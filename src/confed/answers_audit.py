"""What the server of a finished BiCSL run could have learnt of one client's answers, with and without defences.

The rows are made again as the protocol makes them: with the weights that the run ended with, and in a first epoch from
the initial weights, in which the network learns from step to step. Training the whole network gives the weights that
split training gives; the order of the examples is not that of the run, and the rate is constant.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.attacked import Finding, Victim, expand, names_of, open_victim
from confed.attacks.answer_recovery import (
    Observed,
    Recovery,
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
from confed.federation.protocols import Batch
from confed.federation.randomness import generator, isolated
from confed.federation.train import make_optimizer
from confed.privacy.accountant import epsilon
from confed.privacy.cut import CutPrivacy
from confed.results import formats
from confed.results.runs import distinct_labels
from confed.results.writers import Cell, Column, Table

__all__ = ["DELTA", "NOISES", "Audited", "answers", "defences", "spent"]

NOISES = (0.03, 0.1, 0.3, 1.0)
"""Noise multipliers that audits try."""

DELTA = 1e-5

KNOWN = 50
"""Rows whose answers one of the attackers happens to know."""

COUNTING, FOLLOWING, CLUSTERING = "equal rows", "rows followed from step to step", "clusters of rows"
BY_FREQUENCY = "{} named by frequency"
BY_KNOWN = "{} named by {} known answers"
LOOKING_UP = "rows looked up, knowing APN"


@dataclass(frozen=True)
class Audited:
    """One attack on the rows of one run.

    Attributes:
        run: whose rows.
        when: "first epoch" or "last weights".
        defence: in words; "none".
        attack: in words.
        cost: epsilon of one released row, None where nothing is guaranteed or it could not be computed.
        recovery: what was found.
    """

    run: str
    when: str
    defence: str
    attack: str
    cost: float | None
    recovery: Recovery


def answers(
    folders: Sequence[Path],
    *,
    examples: int = 2000,
    client: str = "",
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Finding:
    """Audits what v_APN says of a client's answers.

    Args:
        folders: runs of split learning with contrastive answers, or studies of which those rows are taken.
        examples: training examples of the client.
        client: whose; "" for the first.
        seed: of their order, the noise and the clustering.
        tell: told about every step.

    Raises:
        ValueError: no such runs or client, or fewer than two examples.
    """
    if examples < 2:
        raise ValueError(f"examples must be at least 2, got {examples}")
    runs, notes = expand(folders)
    rows: list[Audited] = []
    names: dict[str, str] = {}
    for folder, name in zip(runs, names_of(runs), strict=True):
        victim = open_victim(folder, name=name)
        # In other methods the same network is whole at a client, and no row is sent.
        if not (victim.partly_known and hasattr(victim.model, "cut")):
            notes.append(f"left out: {folder}: {victim.label} sends no row per answer")
            continue
        tell(f"auditing {folder}")
        names[victim.name] = victim.label
        rows += _audit(victim, examples, client, seed)
    if not rows:
        raise ValueError("; ".join(notes))
    return _finding(rows, distinct_labels(names), notes)


def defences(clip: float, noises: Sequence[float] = NOISES) -> dict[str, CutPrivacy]:
    """The defences that audits try, by name: none, distinct answers, and noise.

    Args:
        clip: norm to which rows are clipped before they are noised.
        noises: noise multipliers.
    """
    noised = {f"noise {noise:g}": CutPrivacy(clip=clip, noise=noise) for noise in noises}
    return {"none": CutPrivacy(), "each answer once per batch": CutPrivacy(distinct=True), **noised}


def spent(privacy: CutPrivacy, releases: int = 1) -> float | None:
    """Epsilon at ``DELTA`` of that many noised rows per example; None without noise or without dp-accounting."""
    if privacy.noise == 0:
        return None
    try:
        return epsilon(privacy.noise, releases, DELTA)
    except ValueError:
        return None


def _audit(victim: Victim, examples: int, client: str, seed: int) -> list[Audited]:
    client = client or next(iter(victim.materials.clients))
    if client not in victim.materials.clients:
        raise ValueError(f"no client is called {client!r}; there are {', '.join(victim.materials.clients)}")
    whole = victim.materials.clients[client].tables[0]
    order = torch.randperm(len(whole), generator=generator(seed, 0, client, "audited examples"))[:examples]
    size = victim.setup.local.batch_size
    batches = [batch for batch in whole.batches(size, order) if len(batch["label"]) > 1]
    if not batches:
        raise ValueError(f"client {client!r} has fewer than two training examples to audit")
    public = _public(victim)
    known = _table(victim)
    own = getattr(victim.setup.algorithm, "privacy", CutPrivacy())
    tried = defences(float(known.norm(dim=1).median().clamp_min(1e-6))) if own.off else {"the run's": own}
    found: list[Audited] = []
    model: Any = victim.model
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"audit {name}")
        seen = observe(model.eval(), batches, privacy=privacy, rng=rng)
        cost = spent(privacy)
        for attack, guesses, groups, asked in _attacks(seen, known, privacy, public, seed):
            partition = None if groups is None else groups[asked]
            recovery = score(guesses[asked], seen.labels[asked], public, partition)
            found.append(Audited(victim.name, "last weights", name, attack, cost, recovery))
    if own.off:
        found.append(_first_epoch(victim, batches, public, seed))
    return found


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
    order = torch.randperm(len(groups), generator=generator(seed, 0, "", "known rows"))
    # At least half of the rows remain to be guessed.
    few, rest = order[: min(KNOWN, len(order) // 2)], order[min(KNOWN, len(order) // 2) :]
    every = order.sort().values
    return [
        (BY_FREQUENCY.format(name), by_frequency(groups, public), groups, every),
        (BY_KNOWN.format(name, len(few)), by_known(groups, few, seen.labels[few], public), groups, rest),
        (LOOKING_UP, looked_up(seen.v_apn, table, deviation, public), None, every),
    ]


def _first_epoch(victim: Victim, batches: Sequence[Batch], public: Tensor, seed: int) -> Audited:
    """The rows of the first epoch, in which APN learns after every step."""
    model: Any = victim.setup.model()
    frozen = set(getattr(model, "frozen", ()))
    learning = [p for name, p in model.named_parameters() if name not in frozen and p.requires_grad]
    optimizer = make_optimizer(learning, victim.setup.local)
    model.train()
    if hasattr(model, "begin"):
        model.begin(victim.task)

    def learn(batch: Batch) -> None:
        optimizer.zero_grad()
        victim.task.loss(model(batch), batch).backward()
        optimizer.step()

    with isolated(seed):
        seen = observe(model, batches, learn=learn)
    groups = followed_rows(seen.v_apn, seen.step)
    recovery = score(by_frequency(groups, public), seen.labels, public, groups)
    return Audited(victim.name, "first epoch", "none", BY_FREQUENCY.format(FOLLOWING), None, recovery)


def _public(victim: Victim) -> Tensor:
    """How often each answer is right in everybody's validation data: what somebody outside could know."""
    labels = torch.cat([data.tables[1].columns["label"] for data in victim.materials.clients.values()])
    return torch.bincount(labels[labels >= 0], minlength=len(victim.materials.dataset.answers))


def _table(victim: Victim) -> Tensor:
    """v_APN of all answers, (C, H), with the weights that the run ended with."""
    apn: Any = victim.model.get_submodule("apn")
    with torch.no_grad():
        return apn.all_answers().float().cpu()


def _clipped(table: Tensor, privacy: CutPrivacy) -> Tensor:
    return CutPrivacy(clip=privacy.clip).activations(table, torch.Generator())


def _finding(rows: Sequence[Audited], labels: dict[str, str], notes: Sequence[str]) -> Finding:
    columns = (
        Column("run", words=True), Column("weights", words=True), Column("defence", words=True),
        Column("ε per row"), Column("attack", words=True), Column("recovered", "answers, %", "%"),
        Column("majority", "answers, %", "%"), Column("chance", "answers, %", "%"), Column("agreement"),
        Column("groups"), Column("rows"),
    )  # fmt: skip
    lines = [
        (
            Cell(labels[row.run]), Cell(row.when), Cell(row.defence), _number(row.cost), Cell(row.attack),
            *(
                Cell(formats.percent(value), 100 * value)
                for value in (row.recovery.recovered, row.recovery.majority, row.recovery.chance)
            ),
            _number(row.recovery.agreement), Cell(str(row.recovery.groups or formats.MISSING)),
            Cell(str(row.recovery.examples), row.recovery.examples),
        )
        for row in rows
    ]  # fmt: skip
    table = Table(
        "Answers recovered from the rows v_APN",
        columns,
        (tuple(lines),),
        (
            "Recovered: share of the rows whose answer is named correctly. Majority: the same if the most frequent "
            "answer of the validation data is always named. Known answers are not counted. Agreement: adjusted "
            "Rand index of groups and answers, whatever the groups are called.",
            f"ε per row: of one release of one row at δ = {DELTA:g} where an example may be replaced by any other; an "
            "epoch releases two rows per example, and epochs add up.",
        ),
    )
    words = (
        "An honest-but-curious main server keeps to the protocol and looks at what it receives. It knows how frequent "
        "answers are elsewhere, taken from everybody's validation data; in some rows also the answers of "
        f"{KNOWN} rows (of half of them where there are fewer), or the weights of APN, which the auxiliary server or "
        "any client could tell it.",
        "What these attacks do not find may be found by better ones: only noise with its epsilon is a guarantee.",
        *notes,
    )
    values = {"kind": "answers", "delta": DELTA, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    return Finding("answers", "What the server learns of answers", words, (table,), values)


def _number(value: float | None) -> Cell:
    return Cell(formats.MISSING) if value is None else Cell(f"{value:.3g}", value)
