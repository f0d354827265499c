"""FedP³: preserving the global model's pairwise preferences among answers.

Source: FedVQA, section 8.3.3 ("FedP³: Pairwise Preference Preserving"). A *matchup* M(i, j) says how strongly
answer i is preferred to answer j. The student keeps the matchups of the frozen global model (the teacher),
but only among the N answers of each example that it is forgetting most.

Probabilities are meant where the paper writes p (its model maps to [0, 1]^|A|), and the scores that choose
answers carry no gradient. All arithmetic is in at least single precision, also under autocast.

Cheaper evaluations of all pairs are in :mod:`confed.losses.preference_approximate`.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]

__all__ = [
    "MATCHUPS",
    "Filter",
    "FiltersAnswers",
    "Matchup",
    "Reduction",
    "Space",
    "comparable",
    "forgotten",
    "matchup",
    "most_forgotten",
    "pairwise_preference",
    "reduced",
]

Filter = Literal["random", "p_s", "p_t", "diff", "gain"]
"""How answers are ranked for the forgotten-knowledge filter (the last five rows of Table 8.4)."""


@runtime_checkable
class FiltersAnswers(Protocol):
    """A method that compares only the answers that a filter ranks first."""

    @property
    def answer_filter(self) -> Filter | None:
        """The filter; None where all answers are compared, or random ones."""
        ...


Space = Literal["prob", "logit"]
"""What is compared in a matchup: probabilities (the paper) or raw logits (an ablation)."""

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
    "arctan": (
        lambda x: 0.5 + torch.atan(math.pi / 2 * x) / math.pi,
        lambda x, m: 0.5 / (1 + (math.pi / 2 * x) ** 2),
    ),
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

    Args:
        p: K values per example, shape (B, K).
        g: the sigmoid-like function.

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

    Returns:
        Scores without gradient, shape (B, C).

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

    Returns:
        Positions, int64, shape (B, N).

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
    for name, value, known in (("space", space, Space), ("reduction", reduction, Reduction), ("g", g, Matchup)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
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
