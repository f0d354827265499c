r"""Answers at the cut: what an honest-but-curious server learns of them from what split learning sends it.

**Rows of answers.** In bidirectional contrastive split learning (Sun and Ochiai, AAAI 2024) labels stay with clients,
but the main server receives v_APN = APN(answer), one row per example, and equal answers are equal rows:

1. Rows are *grouped*: exactly (:func:`equal_rows`); across steps, in which APN learns, by following each row to the
   nearest one (:func:`followed_rows`); noised ones by k-means (:func:`k_means`).
2. Groups are *named* by frequency (:func:`by_frequency`): the largest as the most frequent answer of a public
   distribution p, and so on, which of all one-to-one namings has the largest likelihood sum_g n_g log p_name(g)
   (Naveed, Kamara and Wright, "Inference attacks on property-preserving encrypted databases", CCS 2015); or by a few
   answers that the server happens to know (:func:`by_known`).
3. A server that knows APN, as the auxiliary server does, *looks up* every row (:func:`looked_up`).

**Gradients of supervised split learning.** Where the last layers and the labels are the client's, it sends dL/dz up, a
row per example. With a linear last layer W and cross-entropy this is (softmax(W z + b) - e_y) W / B, whose direction is
mostly that of -W_y: rows of one answer lie together (Li et al., "Label leakage and protection in two-party split
learning", ICLR 2022). A server that knows the last layers tries every answer instead (:func:`matched`).

What is sent is made again as the protocol makes it, with the weights that the run ended with, and in a first epoch from
the initial ones; the order of the examples is not that of the run, and the rate is constant.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.analysis.case import TRAIN, VALIDATION, Case
from confed.federation.local import make_optimizer
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import generator, isolated
from confed.federation.specs import TaskAware, frozen_names
from confed.federation.structure import heads_of
from confed.privacy.accountant import epsilon
from confed.privacy.cut import CutPrivacy, cut_privacy
from confed.release.probe import Estimate, Finding, Probe

EXAMPLES = 500
NOISES = (0.03, 0.1, 0.3, 1.0)  # noise multipliers that are tried where the run has none
DELTA = 1e-5
KNOWN = 50  # rows whose answers one of the attackers happens to know
UNPROTECTED = CutPrivacy()
NONE, OWN, FIRST = "no defence", "the run's defence", "first epoch"
CLUSTERING, COUNTING, FOLLOWING = "clusters of rows", "equal rows", "rows followed from step to step"
BY_FREQUENCY, BY_KNOWN = "{} named by frequency", "{} named by {} known answers"
MATCHING = "rows compared with every answer's, knowing the last layers"
LOOKING_UP = "rows looked up, knowing APN"

Loss = Callable[[Output, Batch], Tensor]  # a task's training loss


@dataclass(frozen=True)
class SentGradients:
    """What went up in some steps, what the server had sent down before, and the truth to judge attacks by."""

    rows: Tensor  # dL/dz as sent, (N, D)
    z: Tensor  # what the client's last layers read, made by the server, (N, D)
    labels: Tensor  # the answers, int64 (N,); the server does not see them

    @property
    def directions(self) -> Tensor:
        """The rows scaled to length 1, (N, D); rows of zeros stay zero."""
        return functional.normalize(self.rows, dim=1)


def observe_gradients(
    model: nn.Module,
    top: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    middle: nn.Module | None = None,
    privacy: CutPrivacy = UNPROTECTED,
    rng: torch.Generator | None = None,
    learn: Callable[[Batch], None] | None = None,
) -> SentGradients:
    """Records the gradients, with what noise they have, that a client sends up while it goes through its batches."""
    rng = torch.Generator().manual_seed(0) if rng is None else rng
    read: list[Tensor] = []

    def release(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (privacy.activations(inputs[0], rng),)

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        read.append(inputs[0].detach().requires_grad_())
        return (read[-1],)

    sent: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in batches:
        handles = [top.register_forward_pre_hook(keep)]
        if middle is not None:
            handles.append(middle.register_forward_pre_hook(release))
        try:
            with torch.enable_grad():
                value = loss(model(batch), batch)
        finally:
            for handle in handles:
                handle.remove()
        z = read.pop()
        (gradient,) = torch.autograd.grad(value, z)
        sent.append((privacy.gradients(gradient, rng).cpu(), z.detach().cpu(), batch["label"].cpu()))
        if learn is not None:
            learn(batch)
    return SentGradients(*(torch.cat(column) for column in zip(*sent, strict=True)))


def matched(seen: SentGradients, top: nn.Module, loss: Loss, answers: int) -> Tensor:
    """For a server that knows the last layers: argmax_c cos(row, dL(top(z), c)/dz), whatever the clipping."""
    best = torch.full((len(seen.rows),), -torch.inf)
    guesses = torch.zeros(len(seen.rows), dtype=torch.int64)
    for answer in range(answers):
        z = seen.z.clone().requires_grad_()
        with torch.enable_grad():
            value = loss(Output(top(z), z), {"label": torch.full((len(z),), answer)})
        (gradient,) = torch.autograd.grad(value, z)
        cosine = functional.cosine_similarity(seen.rows, gradient, dim=1)
        closer = cosine > best
        best[closer], guesses[closer] = cosine[closer], answer
    return guesses


CLUSTERING_STEPS = 100


@runtime_checkable
class Split(Protocol):
    """A model that is cut in two, such as :class:`confed.models.contrastive.ContrastiveAnswerer`."""

    def cut(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """v_MHA (B, D) and v_APN (B, H)."""
        ...


@dataclass(frozen=True)
class Observed:
    """What went up in some steps, and the truth to judge attacks by."""

    v_apn: Tensor
    step: Tensor  # the number of the step that a row belongs to, int64 (N,)
    labels: Tensor  # the answers, int64 (N,); the server does not see them


@dataclass(frozen=True)
class Recovery:
    """How much of the answers an attack has found."""

    recovered: float  # share of the examples whose answer is named correctly
    majority: float  # share that always naming the most frequent answer of the public distribution would have
    groups: int  # how many groups there were; 0 where rows were looked up one by one
    # how well groups agree with answers whatever their names: the adjusted Rand index, 1 for the same partition, 0 on
    # average for a random one
    agreement: float
    examples: int  # number of rows, N


def observe(
    model: Split,
    batches: Iterable[Batch],
    *,
    privacy: CutPrivacy = UNPROTECTED,
    rng: torch.Generator | None = None,
    learn: Callable[[Batch], None] | None = None,
) -> Observed:
    """Records what a client sends up while it goes through its batches."""
    rng = torch.Generator().manual_seed(0) if rng is None else rng
    sent: list[tuple[Tensor, Tensor, Tensor]] = []
    for step, whole in enumerate(batches):
        sent_rows = privacy.rows(whole["label"])
        if sent_rows is not None and len(sent_rows) < 2:
            continue  # without negatives nothing is sent
        batch = whole if sent_rows is None else {name: column[sent_rows] for name, column in whole.items()}
        with torch.no_grad():
            _, v_apn = (privacy.activations(v, rng).cpu() for v in model.cut(batch))
        labels = batch["label"].cpu()
        sent.append((v_apn, torch.full_like(labels, step), labels))
        if learn is not None:
            learn(batch)
    return Observed(*(torch.cat(column) for column in zip(*sent, strict=True)))


def equal_rows(rows: Tensor) -> Tensor:
    """Groups of rows that are equal bit by bit: the number of each row's group, int64 (N,)."""
    return rows.unique(dim=0, return_inverse=True)[1]


def followed_rows(rows: Tensor, step: Tensor, reach: float = 0.5) -> Tensor:
    """Groups of rows that are equal within a step and near each other from step to step, int64 (N,).

    The distinct rows of a step are assigned one-to-one to the groups known so far, whose place is the row last seen,
    with the smallest sum of distances. A row that is further away than ``reach`` times its distance to its nearest
    other row of the same step begins a new group: all rows of a step come from the same weights, so these are
    distances between different answers.
    """
    from scipy.optimize import linear_sum_assignment

    groups = torch.full((len(rows),), -1, dtype=torch.int64)
    places = rows.new_zeros(0, rows.shape[1])
    limits = rows.new_zeros(0)
    for number in step.unique():
        here = (step == number).nonzero()[:, 0]
        distinct, inverse = rows[here].unique(dim=0, return_inverse=True)
        apart = _distances(distinct, distinct).fill_diagonal_(torch.inf).amin(dim=1)
        name = torch.full((len(distinct),), -1, dtype=torch.int64)
        limit = reach * apart
        if len(places):
            far = _distances(distinct, places)
            # a row alone in its step says nothing about distances: the limits seen before are used.
            limit = torch.where(limit.isinf(), limits[far.argmin(dim=1)], limit)
            for row, group in zip(*linear_sum_assignment(far.numpy()), strict=True):
                if far[row, group] <= limit[row]:
                    name[row] = int(group)
        new = (name < 0).nonzero()[:, 0]
        name[new] = len(places) + torch.arange(len(new))
        places = torch.cat([places, distinct[new]])
        limits = torch.cat([limits, limit[new]])
        places[name], limits[name] = distinct, limit
        groups[here] = name[inverse]
    return groups


def k_means(rows: Tensor, groups: int, rng: torch.Generator, restarts: int = 4) -> Tensor:
    """Groups of rows around their nearest centre, the best of several starts of k-means++, int64 (N,)."""
    from scipy.cluster.vq import kmeans2

    data, groups = rows.double().numpy(), min(groups, len(rows.unique(dim=0)))
    best, least = torch.zeros(len(rows), dtype=torch.int64), float("inf")
    for _ in range(restarts if groups > 1 else 0):
        start = np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a group may become empty
            centres, nearest = kmeans2(data, groups, iter=CLUSTERING_STEPS, minit="++", seed=start)  # pyright: ignore
        spread = float(np.square(data - centres[nearest]).sum())
        if spread < least:
            best, least = torch.from_numpy(nearest).long(), spread
    return best


def expected_groups(public: Tensor, rows: int) -> int:
    """How many distinct answers that many rows have on average, at least 1: sum_c 1 - (1 - p_c)^rows."""
    p = public.double() / public.double().sum().clamp_min(1e-300)
    return max(1, round(float((1 - (1 - p) ** rows).sum())))


def by_frequency(groups: Tensor, public: Tensor) -> Tensor:
    """Names of groups by their rank in size, the smallest as the most frequent answer: a label per row, int64 (N,)."""
    sizes = torch.bincount(groups)
    order = sizes.argsort(descending=True, stable=True)
    answers = public.argsort(descending=True, stable=True)
    names = torch.full_like(sizes, int(answers[0]))
    both = min(len(order), len(answers))
    names[order[:both]] = answers[:both]
    return names[groups]


def by_known(groups: Tensor, rows: Tensor, labels: Tensor, public: Tensor) -> Tensor:
    """Names of groups by the most frequent of their known answers, the rest by rank in size: int64 (N,)."""
    votes = torch.zeros(int(groups.max()) + 1, len(public), dtype=torch.int64)
    votes.index_put_((groups[rows], labels), torch.ones_like(labels), accumulate=True)
    named = votes.sum(1) > 0
    names = votes.argmax(1)
    left = public.clone().double()
    left[names[named]] = -1  # after all answers that are not assigned yet
    rest = ~named[groups]
    guesses = names[groups]
    guesses[rest] = by_frequency(groups[rest], left)
    return guesses


def looked_up(rows: Tensor, table: Tensor, noise: float = 0.0, public: Tensor | None = None) -> Tensor:
    """The most probable answer of every row for a server that knows the rows of all answers, int64 (N,).

    With noise of standard deviation s: argmin_c ||row - table_c||^2 / (2 s^2) - log p_c; without, the nearest row.
    """
    cost = _distances(rows, table).square()
    if noise > 0 and public is not None:
        p = (public.float() + 1.0) / (public.sum() + len(public))
        cost = cost - 2 * noise**2 * p.log()
    return cost.argmin(dim=1)


def score(guesses: Tensor, labels: Tensor, public: Tensor, groups: Tensor | None = None) -> Recovery:
    partition = guesses if groups is None else groups
    return Recovery(
        recovered=float((guesses == labels).double().mean()),
        majority=float((labels == int(public.argmax())).double().mean()),
        groups=0 if groups is None else len(groups.unique()),
        agreement=agreement(partition, labels),
        examples=len(labels),
    )


def agreement(groups: Tensor, labels: Tensor) -> float:
    """The adjusted Rand index of two partitions of N rows (Hubert and Arabie, 1985); 1 where both are trivial alike.

    Of all pairs of rows: how many are together in both, beyond what random partitions with the same sizes have.
    """
    _, a = groups.unique(return_inverse=True)
    _, b = labels.unique(return_inverse=True)
    width = int(b.max()) + 1

    def pairs(counts: Tensor) -> float:
        return float((counts.double() * (counts.double() - 1) / 2).sum())

    both, ones, others = pairs((a * width + b).bincount()), pairs(a.bincount()), pairs(b.bincount())
    total = len(groups) * (len(groups) - 1) / 2
    if total == 0:
        return 1.0
    expected, most = ones * others / total, (ones + others) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Euclidean distances, (N, M), without the cancellation of the product form."""
    return torch.cdist(rows.float(), others.float(), compute_mode="donot_use_mm_for_euclid_dist")


# The probe -------------------------------------------------------------------------------------------------


def batches_of(case: Case, site: str) -> list[Batch]:
    """The batches of a site's training records, in a random order, at most :data:`EXAMPLES`."""
    table = case.table(site, TRAIN)
    order = torch.randperm(len(table), generator=generator(case.setup.seed, 0, site, "audited examples"))[:EXAMPLES]
    return [batch for batch in table.batches(case.setup.local.batch_size, order) if len(batch["label"]) > 1]


def known_rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The rows whose answers an attacker happens to know, and the others; at least half remain to be guessed."""
    order = torch.randperm(count, generator=generator(seed, 0, "", "known rows"))
    few = min(KNOWN, count // 2)
    return order[:few], order[few:]


def beginner(case: Case) -> tuple[Any, Callable[[Batch], None]]:
    """A run's whole network with its initial values, in training mode, and what takes a step with a batch."""
    model, task = case.setup.model(), case.setup.task
    frozen = frozen_names(model)
    learning = [p for name, p in model.named_parameters() if name not in frozen and p.requires_grad]
    optimizer = make_optimizer(learning, case.setup.local)
    model.train()
    if isinstance(model, TaskAware):
        model.begin(task)

    def learn(batch: Batch) -> None:
        optimizer.zero_grad()
        task.loss(model(batch), batch).backward()
        optimizer.step()

    return model, learn


def public_answers(case: Case) -> Tensor:
    """Frequencies of right answers in all sites' validation records, as public knowledge, int64 (C,)."""
    labels = torch.cat([case.table(site, VALIDATION).columns["label"] for site in case.sites])
    return torch.bincount(labels[labels >= 0], minlength=case.classes)


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


def defences(clip: float, noises: Sequence[float] = NOISES) -> dict[str, CutPrivacy]:
    """Defences to try, by name: none, distinct answers, and noise."""
    noised = {f"noise {noise:g}": CutPrivacy(clip=clip, noise=noise) for noise in noises}
    return {NONE: UNPROTECTED, "each answer once per batch": CutPrivacy(distinct=True), **noised}


def _attacks(
    seen: Observed, answer_table: Tensor, privacy: CutPrivacy, public: Tensor, seed: int
) -> list[tuple[str, Recovery]]:
    """Every attack that applies, and what it recovers."""
    if privacy.noise > 0:
        groups, name = clusters(seen.v_apn, public, seed), CLUSTERING
        table = CutPrivacy(clip=privacy.clip).activations(answer_table, torch.Generator())
    else:
        groups, name = equal_rows(seen.v_apn), COUNTING
        table = privacy.activations(answer_table, torch.Generator())
    deviation = privacy.noise * (privacy.clip or 0.0)
    exact = {LOOKING_UP: looked_up(seen.v_apn, table, deviation, public)}
    return named_groups(seen, groups, name, public, seed, exact)


def _table(case: Case) -> Tensor:
    """v_APN of all answers, (C, H), with the weights that the run ended with."""
    apn: Any = case.workspace.model.get_submodule("apn")
    with torch.no_grad():
        return apn.all_answers().float().cpu()


Attacks = Sequence[tuple[str, Recovery]]
"""What was tried, and what each recovers."""


def audit_gradients(case: Case, batches: Sequence[Batch], site: str) -> Iterator[tuple[str, Attacks]]:
    """Defence and every attack on the gradients of some batches; a run with a defence is audited with that one only."""
    model: Any = case.workspace.model
    (middle, top), seed, task = _layers(model), case.setup.seed, case.setup.task
    public, defence = public_answers(case), cut_privacy(case.algorithm)
    plain = observe_gradients(model, top, task.loss, batches)
    clip = float(plain.rows.norm(dim=1).median().clamp_min(1e-12))
    tried = {OWN: defence}
    if defence.off:
        tried = {NONE: UNPROTECTED}
        tried |= {f"noise {noise:g}": CutPrivacy(gradient_clip=clip, gradient_noise=noise) for noise in NOISES}
    for name, privacy in tried.items():
        rng = generator(seed, 0, site, f"audit of gradients {name}")
        seen = observe_gradients(model, top, task.loss, batches, middle=middle, privacy=privacy, rng=rng)
        exact = {MATCHING: matched(seen, top, task.loss, case.classes)}
        groups = clusters(seen.directions, public, seed)
        yield with_cost(name, privacy.gradient_noise), named_groups(seen, groups, CLUSTERING, public, seed, exact)
    if defence.off:
        beginning, learn = beginner(case)
        with isolated(seed):
            seen = observe_gradients(beginning, _layers(beginning)[1], task.loss, batches, learn=learn)
        yield FIRST, named_groups(seen, clusters(seen.directions, public, seed), CLUSTERING, public, seed)


def audit_rows(case: Case, batches: Sequence[Batch], site: str) -> Iterator[tuple[str, Attacks]]:
    """Defence and every attack on v_APN of some batches; a run with a defence is audited with that one only."""
    model: Any = case.workspace.model
    public, answer_table, seed = public_answers(case), _table(case), case.setup.seed
    defence = cut_privacy(case.algorithm)
    tried = {OWN: defence}
    if defence.off:
        tried = defences(float(answer_table.norm(dim=1).median().clamp_min(1e-6)))
    for name, privacy in tried.items():
        seen = observe(model, batches, privacy=privacy, rng=generator(seed, 0, site, f"audit {name}"))
        yield with_cost(name, privacy.noise), _attacks(seen, answer_table, privacy, public, seed)
    if defence.off:
        beginning, learn = beginner(case)
        with isolated(seed):
            seen = observe(beginning, batches, learn=learn)
        groups = followed_rows(seen.v_apn, seen.step)
        recovery = score(by_frequency(groups, public), seen.labels, public, groups)
        yield FIRST, [(BY_FREQUENCY.format(FOLLOWING), recovery)]


def with_cost(defence: str, noise: float) -> str:
    """A defence with the epsilon of one release of one row, where an example may be replaced by any other."""
    if noise == 0:
        return defence
    try:
        return f"{defence}, ε {epsilon(noise, 1, DELTA):.3g} per row"
    except ValueError:  # without dp-accounting
        return defence


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    site = case.sites[0]
    case.load(case.released, site)
    case.workspace.model.eval()
    batches = batches_of(case, site)
    measures: list[Estimate] = []
    split = isinstance(case.workspace.model, Split)
    for defence, attacks in (audit_rows if split else audit_gradients)(case, batches, site):
        limit = "cut" if defence.startswith((NONE, OWN, FIRST)) else ""
        for attack, recovery in attacks:
            gained, title = recovery.recovered - recovery.majority, f"answers above the majority: {attack}, {defence}"
            measures.append(Estimate("cut_answers", title, gained, None, None, 0.0, None, recovery.examples, limit))
        grouped = attacks[0][1]
        if limit:
            title = f"agreement of groups with answers: {attacks[0][0]}, {defence}"
            measures.append(Estimate("agreement", title, grouped.agreement, chance=0.0, count=grouped.groups))
    words = (
        "The main server keeps to the protocol and looks at what it receives: "
        + ("v_APN, the rows of answers." if split else "gradients of what the client's last layers read, row by row.")
        + f" It knows how frequent answers are in all sites' validation records; in some rows also {KNOWN} answers (of "
        "half of the rows where there are fewer), or the weights of the client's part.",
        "Agreement: adjusted Rand index of groups and answers, whatever the groups are called; counted are groups. "
        "Rows without the run's defences show what others would do; of noise ε is of one release of one row.",
    )
    return Finding(measures, words)


def _excluded(case: Case) -> str:
    if not case.algorithm.traits.splits:
        return f"{case.algorithm.title} has no cut"
    return "" if batches_of(case, case.sites[0]) else "the first site has fewer than two training records"


PROBE = Probe(
    "answers", "Answers at the cut",
    "Is the main server, which keeps to the protocol and looks at what it receives; it knows the client's part.",
    _excluded, lambda case: 60.0, _look,
)  # fmt: skip
