"""What an honest-but-curious server finds out about answers: one line per attack, and the page that shows them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from confed.analysis.victim import Finding, Victim
from confed.attacks.answer_recovery import Recovery
from confed.federation.optimizer import make_optimizer
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.federation.specs import TaskAware, frozen_names
from confed.privacy.accountant import epsilon
from confed.report.tables.table import Cell, Column, Table
from confed.system import format as formats

NOISES = (0.03, 0.1, 0.3, 1.0)
"""Noise multipliers that audits try."""

DELTA = 1e-5

KNOWN = 50
"""Rows whose answers one of the attackers happens to know."""

CLUSTERING = "clusters of rows"
BY_FREQUENCY = "{} named by frequency"
BY_KNOWN = "{} named by {} known answers"


@dataclass(frozen=True)
class Audited:
    """One attack on what one run sends.

    Attributes:
        sent: what was looked at: "v_APN" or "gradients".
        when: "first epoch" or "last weights".
        cost: epsilon of one released row, None where nothing is guaranteed or it could not be computed.
    """

    run: str
    sent: str
    when: str
    defence: str
    attack: str
    cost: float | None
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
    if client not in victim.run_data.clients:
        raise ValueError(f"no client is called {client!r}; there are {', '.join(victim.run_data.clients)}")
    whole = victim.run_data.clients[client].tables[0]
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
    lines = [
        (
            Cell(labels[row.run]), Cell(row.sent), Cell(row.when), Cell(row.defence), _number(row.cost),
            Cell(row.attack),
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


def _number(value: float | None) -> Cell:
    return Cell(formats.MISSING) if value is None else Cell(f"{value:.3g}", value)
