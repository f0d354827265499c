"""What an honest-but-curious server finds out about answers: one line per attack, and the page that shows them.

With and without defences. What is sent is made again as the protocol makes it: with the weights that the run ended
with, and in a first epoch from the initial weights, in which the network learns from step to step. Training the whole
network gives the weights that split training gives; the order of the examples is not that of the run, and the rate is
constant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from confed.analysis.victim import Finding, Victim, client_table, expand, number_cell, percent_cell, split_victims
from confed.attacks.answer_recovery import (
    Observed,
    Recovery,
    SentGradients,
    Split,
    by_frequency,
    by_known,
    equal_rows,
    expected_groups,
    followed_rows,
    k_means,
    looked_up,
    matched,
    observe,
    observe_gradients,
    score,
)
from confed.comparison.records import distinct_labels
from confed.federation.local import make_optimizer
from confed.federation.protocols import Batch
from confed.federation.randomness import generator, isolated
from confed.federation.specs import TaskAware, frozen_names
from confed.federation.structure import heads_of
from confed.privacy.accountant import epsilon
from confed.privacy.cut import CutPrivacy, cut_privacy
from confed.report.tables.table import Cell, Column, Table
from confed.system import format as formats
from confed.system.events import Progress, ignore

NOISES = (0.03, 0.1, 0.3, 1.0)  # noise multipliers that audits try
DELTA = 1e-5

KNOWN = 50  # rows whose answers one of the attackers happens to know
CLUSTERING = "clusters of rows"
BY_FREQUENCY = "{} named by frequency"
BY_KNOWN = "{} named by {} known answers"


@dataclass(frozen=True)
class Audited:
    """One attack on what one run sends."""

    run: str
    sent: str  # what was looked at: "v_APN" or "gradients"
    when: str  # "first epoch" or "last weights"
    defence: str
    attack: str
    cost: float | None  # epsilon of one released row, None where nothing is guaranteed or it could not be computed
    recovery: Recovery


def spent(noise: float, releases: int = 1) -> float | None:
    """Epsilon at ``DELTA`` of that many noised rows per example; None without noise or without dp-accounting."""
    if noise == 0:
        return None
    try:
        return epsilon(noise, releases, DELTA)
    except ValueError:
        return None


def batches_of(victim: Victim, examples: int, client: str, seed: int) -> list[Batch]:
    """The batches of a client's training examples, in a random order."""
    whole = client_table(victim, client)
    order = torch.randperm(len(whole), generator=generator(seed, 0, client, "audited examples"))[:examples]
    size = victim.setup.local.batch_size
    batches: list[Batch] = [batch for batch in whole.batches(size, order) if len(batch["label"]) > 1]
    if not batches:
        raise ValueError(f"client {client!r} has fewer than two training examples to audit")
    return batches


def known_rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The rows whose answers an attacker happens to know, and the others; at least half remain to be guessed."""
    order = torch.randperm(count, generator=generator(seed, 0, "", "known rows"))
    few = min(KNOWN, count // 2)
    return order[:few], order[few:]


def beginner(victim: Victim) -> tuple[Any, Callable[[Batch], None]]:
    """A run's whole network with its initial values, in training mode, and what takes a step with a batch."""
    model = victim.setup.model()
    frozen = frozen_names(model)
    learning = [p for name, p in model.named_parameters() if name not in frozen and p.requires_grad]
    optimizer = make_optimizer(learning, victim.setup.local)
    model.train()
    if isinstance(model, TaskAware):
        model.begin(victim.task)

    def learn(batch: Batch) -> None:
        optimizer.zero_grad()
        victim.task.loss(model(batch), batch).backward()
        optimizer.step()

    return model, learn


def public_answers(victim: Victim) -> Tensor:
    """Frequencies of right answers in all clients' validation data, as public knowledge, int64 (C,)."""
    labels = torch.cat([data.tables[1].columns["label"] for data in victim.run_data.clients.values()])
    return torch.bincount(labels[labels >= 0], minlength=len(victim.run_data.dataset.answers))


def finding_of(rows: Sequence[Audited], labels: Mapping[str, str], notes: Sequence[str]) -> Finding:
    """The audit as a page and as values."""
    columns = (
        Column("run", words=True), Column("sent", words=True), Column("weights", words=True),
        Column("defence", words=True), Column("ε per row"), Column("attack", words=True),
        Column("recovered", "answers, %", "%"), Column("majority", "answers, %", "%"),
        Column("chance", "answers, %", "%"), Column("agreement"), Column("groups"), Column("rows"),
    )  # fmt: skip
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        shares = (row.recovery.recovered, row.recovery.majority, row.recovery.chance)
        lines.append((
            Cell(labels[row.run]), Cell(row.sent), Cell(row.when), Cell(row.defence), number_cell(row.cost),
            Cell(row.attack), *map(percent_cell, shares),
            number_cell(row.recovery.agreement), Cell(str(row.recovery.groups or formats.MISSING)),
            Cell(str(row.recovery.examples), row.recovery.examples),
        ))  # fmt: skip
    table = Table(
        "Answers recovered from what the main server receives",
        columns,
        (tuple(lines),),
        (
            "Recovered: share of the rows whose answer is named correctly. Majority: the same if the most frequent "
            "answer of the validation data is always named. Known answers are not counted. Agreement: adjusted "
            "Rand index of groups and answers, whatever the groups are called.",
            "Sent: v_APN, the rows of answers in BiCSL; or in supervised split learning the gradients of what the "
            "client's last layers read, row by row.",
            f"ε per row: of one release of one row at δ = {DELTA:g} where an example may be replaced by any other; an "
            "epoch releases two rows per example, of pictures and questions and of these, and epochs add up. A row of "
            "gradients has one only where nothing in the loss but its own example decides about it.",
        ),
    )
    words = (
        "An honest-but-curious main server keeps to the protocol and looks at what it receives. It knows how frequent "
        "answers are in all clients' validation data; in some rows also the answers of "
        f"{KNOWN} rows (of half of them where there are fewer), or the weights of the client's part (APN, or the last "
        "layers), which the auxiliary server or any client could tell it.",
        "What these attacks do not find may be found by better ones: only noise with its epsilon is a guarantee.",
        *notes,
    )
    values = {"kind": "answers", "delta": DELTA, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    return Finding("answers", "What the server learns of answers", words, (table,), values)


MATCHING = "rows compared with every answer's, knowing the last layers"


def audit_gradients(victim: Victim, batches: Sequence[Batch], client: str, seed: int) -> list[Audited]:
    """Every attack on the gradients of some batches, with the weights of the end and in a first epoch.

    A run with a defence, for activations or gradients, is audited with that one only.
    """
    middle, top = _layers(victim.model)
    public, defence = public_answers(victim), cut_privacy(victim.setup.algorithm)
    victim.model.eval()
    plain = observe_gradients(victim.model, top, victim.task.loss, batches)
    clip = float(plain.rows.norm(dim=1).median().clamp_min(1e-12))
    tried = (
        {"none": CutPrivacy()}
        | {f"noise {noise:g}": CutPrivacy(gradient_clip=clip, gradient_noise=noise) for noise in NOISES}
        if defence.off
        else {"the run's": defence}
    )
    audited: list[Audited] = []
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"audit of gradients {name}")
        seen = observe_gradients(victim.model, top, victim.task.loss, batches, middle=middle, privacy=privacy, rng=rng)
        exact = {MATCHING: matched(seen, top, victim.task.loss, len(victim.run_data.dataset.answers))}
        attacks = named_groups(seen, clusters(seen.directions, public, seed), CLUSTERING, public, seed, exact)
        cost = spent(privacy.gradient_noise)
        for attack, recovery in attacks:
            audited.append(Audited(victim.name, "gradients", "last weights", name, attack, cost, recovery))
    if defence.off:
        model, learn = beginner(victim)
        _, top = _layers(model)
        with isolated(seed):
            seen = observe_gradients(model, top, victim.task.loss, batches, learn=learn)
        for attack, recovery in named_groups(seen, clusters(seen.directions, public, seed), CLUSTERING, public, seed):
            audited.append(Audited(victim.name, "gradients", "first epoch", "none", attack, None, recovery))
    return audited


def named_groups(
    seen: Observed | SentGradients,
    groups: Tensor,
    name: str,
    public: Tensor,
    seed: int,
    exact: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[tuple[str, Recovery]]:
    """Attacks and what each recovers: groups named by frequency and by known answers, and ``exact`` guesses (N,)."""
    few, rest = known_rows(len(groups), seed)
    guesses = by_known(groups, few, seen.labels[few], public)
    recovered = [
        (BY_FREQUENCY.format(name), score(by_frequency(groups, public), seen.labels, public, groups)),
        (BY_KNOWN.format(name, len(few)), score(guesses[rest], seen.labels[rest], public, groups[rest])),
    ]
    return recovered + [(attack, score(guesses, seen.labels, public)) for attack, guesses in exact.items()]


def clusters(rows: Tensor, public: Tensor, seed: int) -> Tensor:
    """As many clusters of rows as answers are expected, int64 (N,)."""
    return k_means(rows, expected_groups(public, len(rows)), generator(seed, 0, "", "clusters"))


def _layers(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The server's layers and the client's last ones, of the answer head which split learning has cut."""
    head = heads_of(model)["answers"]
    return model.get_submodule(f"{head}.middle"), model.get_submodule(f"{head}.top")


COUNTING, FOLLOWING = "equal rows", "rows followed from step to step"
LOOKING_UP = "rows looked up, knowing APN"


def answers(
    folders: Sequence[Path], *, examples: int = 2000, client: str = "", seed: int = 0, progress: Progress = ignore
) -> Finding:
    """Audits what a client's answers look like to the main server: in v_APN, or in the gradients that go up."""
    if examples < 2:
        raise ValueError(f"examples must be at least 2, got {examples}")
    runs, notes = expand(folders)
    rows: list[Audited] = []
    names: dict[str, str] = {}
    for victim in split_victims(runs, "no row per example", notes, progress):
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
    defence = cut_privacy(victim.setup.algorithm)
    tried = (
        defences(float(answer_table.norm(dim=1).median().clamp_min(1e-6))) if defence.off else {"the run's": defence}
    )
    audited: list[Audited] = []
    model: Any = victim.model
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"audit {name}")
        seen = observe(model.eval(), batches, privacy=privacy, rng=rng)
        cost = spent(privacy.noise)
        for attack, recovery in _attacks(seen, answer_table, privacy, public, seed):
            audited.append(Audited(victim.name, "v_APN", "last weights", name, attack, cost, recovery))
    if defence.off:
        audited.append(_first_epoch(victim, batches, public, seed))
    return audited


def _attacks(
    seen: Observed, answer_table: Tensor, privacy: CutPrivacy, public: Tensor, seed: int
) -> list[tuple[str, Recovery]]:
    """Every attack that applies, and what it recovers."""
    if privacy.noise > 0:
        groups, name = clusters(seen.v_apn, public, seed), CLUSTERING
        table = _clipped(answer_table, privacy)
    else:
        groups, name = equal_rows(seen.v_apn), COUNTING
        table = privacy.activations(answer_table, torch.Generator())
    deviation = privacy.noise * (privacy.clip or 0.0)
    exact = {LOOKING_UP: looked_up(seen.v_apn, table, deviation, public)}
    return named_groups(seen, groups, name, public, seed, exact)


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
