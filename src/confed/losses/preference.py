"""FedP³: preserving the global model's pairwise preferences among answers.

Source: FedVQA, section 8.3.3 ("FedP³: Pairwise Preference Preserving"). A *matchup* M(i, j) says how strongly
answer i is preferred to answer j. The student keeps the matchups of the frozen global model (the teacher),
but only among the N answers of each example that it is forgetting most.

Probabilities are meant where the paper writes p (its model maps to [0, 1]^|A|), and the scores that choose
answers carry no gradient. All arithmetic is in at least single precision, also under autocast.

Cheaper evaluations of all pairs are in :mod:`confed.losses.preference`.

FedVQA, section 8.3.3, compares all ordered pairs of C answers (Eq. 8.7), which costs O(C²), and its conclusion asks
for cheaper approximations. Notation: a = p_S and b = p_T of one example, d = b - a, g the sigmoid-like function of
Eq. (8.8), L = Σ_ij |g(b_i - b_j) - g(a_i - a_j)|.

**Sorting.** g is increasing, so the term of the pair (i, j) has the sign of (b_i - b_j) - (a_i - a_j) = d_i - d_j,
whatever g is. With the answers ranked by d the modulus disappears:

    L = 2 Σ_{d_j < d_i} [g(b_i - b_j) - g(a_i - a_j)].

Where g is an odd polynomial q plus 1/2, (a_i - a_j)^m is a sum of products a_i^l a_j^k, and the inner sum over j needs
prefix sums of a^k only. The whole costs O(C log C + D² C) for degree D, and for the linear g (D = 1, L = Σ_{i<j}
|d_i - d_j|) it is exact. For another g, q is its Chebyshev interpolation on [-1, 1], where differences of
probabilities lie. Every term |g(b_i - b_j) - g(a_i - a_j)| is at least min g' times |d_i - d_j| and its error at
most max |q' - g'| times that, so

    |L_q - L| <= L · max |q' - g'| / min g'        (both over [-1, 1]),

the bound that :func:`sorted_error` computes: 1e-4 for the logistic g with D = 11. With q linear this is
0 <= L_linear - L <= tanh²(m) L_linear for the logistic g, m the largest difference between two answers of a model.

**Sampling.** K ordered pairs i != j, drawn uniformly with replacement for each example:
C(C-1)/K times their sum has the expectation L and so has its gradient. Its relative standard deviation is the
coefficient of variation of the terms over sqrt(K); few answers have any probability, so it is large.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]

Filter = Literal["random", "p_s", "p_t", "diff", "gain"]
"""How answers are ranked for the forgotten-knowledge filter (the last five rows of Table 8.4)."""


@runtime_checkable
class FiltersAnswers(Protocol):
    """A method that compares only the answers that a filter ranks first."""

    @property
    def answer_filter(self) -> Filter | None:
        """The filter; None where all answers are compared, or random ones."""
        ...


Space = Literal["prob", "logit"]  # what is compared in a matchup: probabilities (the paper) or raw logits (an ablation)
Reduction = Literal["sum", "mean", "rows"]
"""Over the ordered pairs of one example: their sum (Eq. 8.14 as printed), their mean, or the mean over rows, of which
each holds the pairs of one answer with all others.

The sum over N answers has N (N - 1) terms that are not zero by definition, whatever the number C of answers there are.
It is divided by N² for the mean and by N for the mean over rows; so one weight lambda means the same for any N with
"mean" only.
"""

Matchup = Literal["logistic", "linear", "arctan", "erf"]
"""The sigmoid-like g of Eq. (8.8). All are odd about 1/2, with g(0) = 1/2 and slope g'(0) = 1/2:

- ``logistic``: 1 / (1 + exp(-2x)), the paper's;
- ``linear``: (1 + x) / 2, which every smooth choice approaches near 0;
- ``arctan``: 1/2 + arctan(πx/2) / π, with heavier tails;
- ``erf``: (1 + erf(√π x/2)) / 2, with lighter ones.
"""

MATCHUPS: dict[Matchup, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "logistic": (lambda x: torch.sigmoid(2 * x), lambda x, m: 2 * m * (1 - m)),
    "linear": (lambda x: (1 + x) / 2, lambda x, m: torch.full_like(x, 0.5)),
    "arctan": (lambda x: 0.5 + torch.atan(math.pi / 2 * x) / math.pi, lambda x, m: 0.5 / (1 + (math.pi / 2 * x) ** 2)),
    "erf": (
        lambda x: (1 + torch.erf(math.sqrt(math.pi) / 2 * x)) / 2,
        lambda x, m: 0.5 * torch.exp(-math.pi / 4 * x**2),
    ),
}
"""g -> its value at x, and its slope at x where the value is m."""

_LOWEST_LOG = -30.0
_LOWEST_ENTROPY = 1e-8
_PAIRS_AT_ONCE = 1 << 18  # 1 MiB of matchups in single precision, which fits a cache


def matchup(p: Float[Tensor, "B K"], g: Matchup = "logistic") -> Float[Tensor, "B K K"]:
    """Soft pairwise preferences, Eqs. (8.8) and (8.9).

    Returns:
        ``M[b, i, j] = g(p[b, i] - p[b, j])``, shape (B, K, K); ``M[b, i, j] + M[b, j, i]`` is 1.
    """
    return MATCHUPS[g][0](p.unsqueeze(2) - p.unsqueeze(1))


@torch.no_grad()
def forgotten(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    mode: Filter = "gain",
    generator: torch.Generator | None = None,
) -> Float[Tensor, "B C"]:
    """Raw scores of how much the student has forgotten of each answer; larger is more.

    With log p clamped to at least -30 and H = |Σ p log p| (Eq. 8.13) to at least 1e-8:

    - ``random``: uniform noise;
    - ``p_s``, ``p_t``: log p_S, log p_T;
    - ``diff``: log p_T - log p_S, Eq. (8.11);
    - ``gain``: log p_T - log(H_T / H_S) · log p_S, Eq. (8.12).

    The paper's r is the softmax of these scores over the answers. It is monotone, so it matters for display
    only and is not taken here. Where the student still equals the teacher, ``diff`` is zero everywhere and
    ``gain`` ranks by the teacher.

    Args:
        student_logits: shape (B, C).
        teacher_logits: shape (B, C).
        mode: which score.
        generator: the source of ``random`` scores; the other modes do not use it.

    Raises:
        ValueError: the shapes differ, the mode is unknown, or ``random`` has no generator.
    """
    _check_pair(student_logits, teacher_logits)
    if mode == "random":
        if generator is None:
            raise ValueError("mode 'random' needs a torch.Generator as generator, got None")
        noise = torch.rand(student_logits.shape, generator=generator, device=generator.device)
        return noise.to(student_logits.device)
    log_s, log_t = (
        torch.log_softmax(_precise(logits), dim=1).clamp(min=_LOWEST_LOG) for logits in (student_logits, teacher_logits)
    )
    match mode:
        case "p_s":
            return log_s
        case "p_t":
            return log_t
        case "diff":
            return log_t - log_s
        case "gain":
            h_s, h_t = (
                (log_p.exp() * log_p).sum(dim=1, keepdim=True).abs().clamp(min=_LOWEST_ENTROPY)
                for log_p in (log_s, log_t)
            )
            return log_t - (h_t / h_s).log() * log_s
        case _:
            raise ValueError(f"mode must be one of {', '.join(get_args(Filter))}, got {mode!r}")


def most_forgotten(scores: Float[Tensor, "B C"], n: int) -> Int64[Tensor, "B N"]:
    """The set S: positions of the N largest scores of each example, best first.

    Equal scores are taken in order of position, so that the choice is the same on every device.

    Args:
        scores: shape (B, C).
        n: how many answers to keep, 1 to C.

    Raises:
        ValueError: n is outside [1, C].
    """
    if not 1 <= n <= scores.shape[1]:
        raise ValueError(f"n must lie in [1, {scores.shape[1]}], the number of answers, got {n}")
    return scores.argsort(dim=1, descending=True, stable=True)[:, :n]


def pairwise_preference(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    selected: Int64[Tensor, "B N"] | None = None,
    space: Space = "prob",
    reduction: Reduction = "sum",
    g: Matchup = "logistic",
) -> Float[Tensor, "B"]:
    """Disagreement of student and teacher about which answers are preferred, per example.

    ``Σ_i Σ_j |M_T(i, j) - M_S(i, j)|`` over the ordered pairs of the selected answers, Eq. (8.14), or of all
    answers, Eq. (8.7). The diagonal contributes nothing and each unordered pair counts twice. Probabilities
    are normalised over all C answers before the selection. Only the student receives a gradient.

    Many pairs (all of a large vocabulary, or a large selection) are taken in blocks of rows and none is kept for
    the backward pass: memory stays bounded for thousands of answers. (Such a sum has no second derivative.)

    Args:
        student_logits: shape (B, C).
        teacher_logits: shape (B, C).
        selected: positions of the compared answers, int64, shape (B, N); None compares all.
        space: compare probabilities or logits.
        reduction: sum over the pairs, their mean (the sum divided by N², or by C²), or the mean over rows (divided by
            N, or by C).
        g: the sigmoid-like function.

    Returns:
        One value per example, shape (B,). The paper's loss is its mean over the batch.

    Raises:
        ValueError: the shapes do not match, or ``space``, ``reduction`` or ``g`` is unknown.
    """
    student, teacher = comparable(student_logits, teacher_logits, space, reduction, g)
    if selected is not None:
        if selected.ndim != 2 or len(selected) != len(student):
            raise ValueError(f"selected must have shape ({len(student)}, N), got {tuple(selected.shape)}")
        student, teacher = student.gather(1, selected), teacher.gather(1, selected)
        if student.numel() * student.shape[1] <= _PAIRS_AT_ONCE:
            return reduced((matchup(teacher, g) - matchup(student, g)).abs().sum(dim=(1, 2)), student, reduction)
    pairs = cast(Any, _AllPairs.apply)(student, teacher, g)  # pyright: ignore[reportUnknownMemberType]
    return reduced(cast(Tensor, pairs[0]), student, reduction)


def comparable(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    space: Space,
    reduction: Reduction,
    g: Matchup,
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
    """The values that matchups compare, (B, C) each; the teacher's carry no gradient.

    Raises:
        ValueError: the shapes do not match, or ``space``, ``reduction`` or ``g`` is unknown.
    """
    _check_pair(student_logits, teacher_logits)
    for name, value, choices in (("space", space, Space), ("reduction", reduction, Reduction), ("g", g, Matchup)):
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
    student, teacher = _precise(student_logits), _precise(teacher_logits.detach())
    return (student, teacher) if space == "logit" else (student.softmax(dim=1), teacher.softmax(dim=1))


def reduced(total: Float[Tensor, "B"], compared: Float[Tensor, "B K"], reduction: Reduction) -> Float[Tensor, "B"]:
    """Sums over the ordered pairs of the compared values (B, K), or their means over pairs or rows."""
    return total / compared.shape[1] ** {"sum": 0, "rows": 1, "mean": 2}[reduction]


class _AllPairs(torch.autograd.Function):
    """Sum over all ordered pairs, with its gradient taken on the way so that no matchups are kept.

    Since M(j, i) = 1 - M(i, j) in both models, row i and column i of the sum have the same slope in p_S(i):
    together 2 Σ_j sign(M_S - M_T) g'(p_S(i) - p_S(j)).
    """

    @staticmethod
    def forward(student: Tensor, teacher: Tensor, g: Matchup) -> tuple[Tensor, Tensor]:
        """Totals (B,) and their gradient (B, C), a block of rows at a time."""
        value, slope = MATCHUPS[g]
        total, gradient = student.new_zeros(len(student)), torch.zeros_like(student)
        rows = max(1, _PAIRS_AT_ONCE // max(1, student.numel()))
        for start in range(0, student.shape[1], rows):
            block = slice(start, start + rows)
            if g == "logistic":  # the paper's, in place: half the time
                m_s, m_t = (torch.sigmoid_(2 * (p[:, block, None] - p[:, None, :])) for p in (student, teacher))
                gap = m_t.neg_().add_(m_s)
                total += gap.abs().sum(dim=(1, 2))
                gradient[:, block] = 4 * gap.sign_().mul_(m_s).mul_(1 - m_s).sum(dim=2)
            else:
                x_s, x_t = (p[:, block, None] - p[:, None, :] for p in (student, teacher))
                m_s = value(x_s)
                gap = m_s - value(x_t)
                total += gap.abs().sum(dim=(1, 2))
                gradient[:, block] = 2 * gap.sign_().mul_(slope(x_s, m_s)).sum(dim=2)
        return total, gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keeps the gradient only."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scales the gradient; the teacher gets none."""
        (gradient,) = ctx.saved_tensors
        return grad_total.unsqueeze(1) * gradient, None, None


def _precise(x: Tensor) -> Tensor:
    """The tensor in single precision, or in double where it is double already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_pair(student_logits: Tensor, teacher_logits: Tensor) -> None:
    """Checks that both have one shape (B, C)."""
    if student_logits.shape != teacher_logits.shape or student_logits.ndim != 2:
        raise ValueError(
            "student_logits and teacher_logits must have one shape (B, C), got "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )


# All pairs of FedP³ without the quadratic cost: by sorting, and by sampling -----------------------------------

DEGREES: dict[Matchup, int] = {"logistic": 11, "linear": 1, "arctan": 21, "erf": 11}
"""Degree of the polynomial that stands in for g; the arctangent's poles are nearest, so it needs the highest."""

_EXACT: dict[Matchup, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "logistic": (lambda x: math.tanh(x) / 2, lambda x: 0.5 / math.cosh(x) ** 2),
    "linear": (lambda x: x / 2, lambda x: 0.5),
    "arctan": (lambda x: math.atan(math.pi / 2 * x) / math.pi, lambda x: 0.5 / (1 + (math.pi / 2 * x) ** 2)),
    "erf": (lambda x: math.erf(math.sqrt(math.pi) / 2 * x) / 2, lambda x: 0.5 * math.exp(-math.pi / 4 * x * x)),
}
"""g - 1/2 and its slope."""


def sorted_preference(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    space: Space = "prob",
    reduction: Reduction = "sum",
    g: Matchup = "logistic",
) -> Float[Tensor, "B"]:
    """All ordered pairs by sorting, in O(C log C): exact for the linear g, within :func:`sorted_error` for others.

    Arguments, result and gradient as :func:`confed.losses.preference.pairwise_preference` without a selection;
    computed in double precision.

    Raises:
        ValueError: as there; or ``space`` is "logit" and g is not linear (a polynomial needs a bounded range).
    """
    a, b = comparable(student_logits, teacher_logits, space, reduction, g)
    if space == "logit" and g != "linear":
        raise ValueError(f"sorted pairs of logits need g 'linear' (logits have no bounds), got {g!r}")
    a, b = a.double(), b.double()
    order = (b - a).detach().argsort(dim=1)
    a, b = a.gather(1, order), b.gather(1, order)
    ranked = (b - a).detach()
    # How many answers lie strictly below: equal ones must cancel, or a student that equals its teacher gets a slope.
    below = torch.searchsorted(ranked, ranked)
    weights = torch.tensor(_products(g), dtype=torch.float64, device=a.device)
    total = 2 * (_ranked_sum(b, below, weights) - _ranked_sum(a, below, weights))
    return reduced(total, a, reduction).to(torch.promote_types(student_logits.dtype, torch.float32))


def _ranked_sum(p: Tensor, below: Tensor, weights: Tensor) -> Tensor:
    """Σ_i Σ_{j < below_i} q(p_i - p_j), shape (B,): powers of p_i times prefix sums of powers of p_j."""
    powers = [torch.ones_like(p)]
    for _ in range(len(weights) - 1):
        powers.append(powers[-1] * p)
    stacked = torch.stack(powers, dim=1)  # (B, D + 1, C)
    sums = torch.nn.functional.pad(stacked.cumsum(dim=2), (1, 0))
    before = sums.gather(2, below.unsqueeze(1).expand_as(stacked))
    return ((weights.T @ stacked) * before).sum(dim=(1, 2))


@lru_cache
def _products(g: Matchup) -> tuple[tuple[float, ...], ...]:
    """W with q(x - y) = Σ_lk W[l][k] x^l y^k."""
    q = _polynomial(g)
    size = len(q)
    items: list[tuple[float, ...]] = []
    for row in range(size):
        filled = [(-1.0) ** k * math.comb(row + k, k) * q[row + k] for k in range(size - row)]
        items.append((*filled, *[0.0] * row))
    return tuple(items)


@lru_cache
def _polynomial(g: Matchup) -> tuple[float, ...]:
    """Coefficients of q, from that of x^0 on: Chebyshev interpolation of g - 1/2 on [-1, 1]."""
    degree, exact = DEGREES[g], _EXACT[g][0]
    nodes = 4 * (degree + 1)
    angles = [math.pi * (j + 0.5) / nodes for j in range(nodes)]
    result = [0.0] * (degree + 1)
    before, current = [1.0], [0.0, 1.0]  # T_0 and T_1 as powers of x
    for m in range(1, degree + 1):
        if m % 2:
            weight = 2 / nodes * math.fsum(exact(math.cos(t)) * math.cos(m * t) for t in angles)
            for power, value in enumerate(current):
                result[power] += weight * value
        following = [0.0, *(2 * value for value in current)]
        for power, value in enumerate(before):
            following[power] -= value
        before, current = current, following
    return tuple(result)


@lru_cache
def sorted_error(g: Matchup = "logistic") -> float:
    """Bound on the relative error of :func:`sorted_preference` on probabilities, rounding apart."""
    q, slope = _polynomial(g), _EXACT[g][1]
    derivative = [power * value for power, value in enumerate(q)][1:]
    grid = [j / 2000 for j in range(2001)]  # q' and g' are even
    exact = [slope(x) for x in grid]
    close: list[float | int] = []
    for x in grid:
        close.append(sum(value * x**power for power, value in enumerate(derivative)))
    return max(abs(a - b) for a, b in zip(exact, close, strict=True)) / min(exact)


def sampled_preference(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    samples: int,
    generator: torch.Generator,
    space: Space = "prob",
    reduction: Reduction = "sum",
    g: Matchup = "logistic",
) -> Float[Tensor, "B"]:
    """An unbiased estimate of the sum over all ordered pairs, and of its gradient, from ``samples`` pairs.

    Args:
        student_logits: shape (B, C), C at least 2.
        teacher_logits: shape (B, C).
        samples: pairs K drawn for each example, uniformly and with replacement.
        generator: draws the pairs.
        space: compare probabilities or logits.
        reduction: estimate the sum over the C² pairs, their mean, or the mean over C rows.
        g: the sigmoid-like function.

    Raises:
        ValueError: the shapes do not match, ``space``, ``reduction`` or ``g`` is unknown, or ``samples`` is not
            positive, or there is one answer only.
    """
    student, teacher = comparable(student_logits, teacher_logits, space, reduction, g)
    (size, answers), value = student.shape, MATCHUPS[g][0]
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if answers < 2:
        raise ValueError(f"sampled pairs need at least 2 answers, got {answers}")
    shape, device = (size, samples), generator.device
    first = torch.randint(answers, shape, generator=generator, device=device)
    # Skipping the first one's place draws the second uniformly from the others.
    second = torch.randint(answers - 1, shape, generator=generator, device=device)
    second += second >= first
    first, second = first.to(student.device), second.to(student.device)
    m_s, m_t = (value(p.gather(1, first) - p.gather(1, second)) for p in (student, teacher))
    total = (m_t - m_s).abs().sum(dim=1) * (answers * (answers - 1) / samples)
    return reduced(total, student, reduction)
