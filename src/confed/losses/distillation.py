"""Distillation of a teacher's soft answers, or of the likenesses it sees between examples, into a student.

Tian, Krishnan and Isola, "Contrastive representation distillation", ICLR 2020, with the estimator of Wu et al.,
"Unsupervised feature learning via non-parametric instance discrimination", CVPR 2018, as the authors' code has it.

Notation: v_S, v_T the embeddings of an example's student and teacher features, of length 1; N the number of training
examples; M_S, M_T the memory banks, one row per example and side; tau a temperature; n the number of negatives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

# Contrastive representation distillation (CRD): embeddings ----------------------------------------------------

EPSILON = 1e-7


class Embedding(nn.Module):
    """Features to points on the unit sphere: a linear map, then division by the L2 norm. Always in full precision.

    Args:
        features: width of what comes in, D.
        width: width of what comes out, d.
        rng: where initial values come from: uniform within ±1 / sqrt(D).
    """

    def __init__(self, features: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for values in (self.linear.weight, self.linear.bias):
                values.uniform_(-(features**-0.5), features**-0.5, generator=rng)

    def forward(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B d"]:
        """Embeddings (B, d) of features (B, D)."""
        with torch.autocast(features.device.type, enabled=False):
            return functional.normalize(self.linear(features.to(self.linear.weight.dtype)), dim=1)


def draw_negatives(candidates: Bool[Tensor, "B N"], most: int, rng: torch.Generator) -> Bool[Tensor, "B N"]:
    """For every anchor a uniform choice of its candidates, without repetition; all of them if they are few enough.

    Args:
        candidates: which examples may be an anchor's negatives, bool, shape (B, N).
        most: the largest number of negatives per anchor.
        rng: a CPU generator; advanced only where some anchor has more than ``most`` candidates.

    Returns:
        bool, shape (B, N); a row without candidates stays empty.

    Raises:
        ValueError: ``most`` is not positive.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1 negative per anchor, got {most}")
    if most >= candidates.shape[1] or int(candidates.sum(1).max()) <= most:
        return candidates
    lots = torch.rand(candidates.shape, generator=rng).to(candidates.device).masked_fill_(~candidates, 2.0)
    drawn = lots.topk(most, dim=1, largest=False, sorted=False).indices
    return torch.zeros_like(candidates).scatter_(1, drawn, True) & candidates


def contrast(
    positives: Float[Tensor, "*sides B"],
    others: Float[Tensor, "*sides B M"],
    chosen: Bool[Tensor, "B M"],
    examples: int,
) -> Float[Tensor, ""]:
    """Telling each anchor's positive from its n negatives, by noise-contrastive estimation.

    Per anchor, with P_n = 1 / N and eps = 1e-7,
    ``-log(P / (P + n P_n + eps)) - sum over negatives of log(n P_n / (P' + n P_n + eps))``; the mean over the batch,
    added up over sides. An anchor without negatives contributes 0.

    Args:
        positives: each anchor's normalised score P of its positive, positive numbers, shape (..., B), with one
            leading dimension for the sides, if any.
        others: normalised scores P' of other examples, positive numbers, shape (..., B, M).
        chosen: which of them are negatives, bool, shape (B, M).
        examples: N.
    """
    noise = chosen.sum(1).to(positives.dtype) / examples
    # -log(P / (P + c)) is log(1 + c / P), which needs fewer operations and loses no digits.
    right = ((noise + EPSILON) / positives).log1p() * (noise > 0)
    share = noise.masked_fill(noise == 0, 1.0).unsqueeze(1)
    wrong = ((others + EPSILON) / share).log1p() * chosen
    return (right.sum() + wrong.sum()) / positives.shape[-1]


@dataclass
class MemoryBanks:
    """What a client remembers of its examples' embeddings: d float32 values per example and side, and two numbers.

    :meth:`update` works in place; whoever keeps the tensors as a state passes copies (see :meth:`of`).
    """

    rows: Float[Tensor, "2 N d"]  # M_S and M_T, shape (2, N, d)
    # Z of scores against M_S and of scores against M_T, shape (2,); 0 until the first batch
    normalisers: Float[Tensor, "2"]
    temperature: float = 0.07  # tau
    momentum: float = 0.5  # share of a row that an update keeps

    @classmethod
    def new(cls, examples: int, width: int, rng: torch.Generator) -> "MemoryBanks":
        """Banks as before the first batch: uniform within ±1 / sqrt(d / 3), so that rows are about 1 long."""
        bound = (3 / width) ** 0.5
        return cls(torch.empty(2, examples, width).uniform_(-bound, bound, generator=rng), torch.zeros(2))

    @classmethod
    def of(
        cls, stored: Mapping[str, Tensor], device: torch.device, temperature: float, momentum: float
    ) -> "MemoryBanks":
        """Banks to work with on a device: copies of stored ones, which stay as they are."""
        rows, normalisers = (stored[name].to(device, copy=True) for name in ("rows", "normalisers"))
        return cls(rows, normalisers, temperature, momentum)

    def tensors(self) -> dict[str, Tensor]:
        """Both tensors by name, not copied."""
        return {"rows": self.rows, "normalisers": self.normalisers}

    def loss(
        self,
        student: Float[Tensor, "B d"],
        teacher: Float[Tensor, "B d"],
        index: Int[Tensor, "B"],
        chosen: Bool[Tensor, "B N"],
    ) -> Float[Tensor, ""]:
        """The student side's and the teacher side's loss, added.

        A student embedding is compared with the teacher's bank and the other way round:
        P = exp(<M_T[i], v_S> / tau) / Z_S, and likewise for the teacher. The first batch ever seen fixes
        Z = N times the mean of its scores. All N scores of an anchor are computed, since a product with the whole
        bank is faster and smaller (B x N values) than copying each anchor's negatives (B x n x d values).
        """
        examples = self.rows.shape[1]
        with torch.autocast(student.device.type, enabled=False):
            anchors = torch.stack([teacher, student]).float() / self.temperature  # the other side's rows await them
            products = anchors @ self.rows.transpose(1, 2)
            if not self.normalisers.any():
                trusted = products.detach().exp() * (chosen | functional.one_hot(index, examples).bool())
                self.normalisers.copy_(examples * trusted.sum((1, 2)) / (len(index) + chosen.sum()))
            scores = (products - self.normalisers.log().view(2, 1, 1)).exp()
            positives = scores.gather(2, index.view(1, -1, 1).expand(2, -1, 1)).squeeze(2)
            return contrast(positives, scores, chosen, examples)

    def update(self, student: Float[Tensor, "B d"], teacher: Float[Tensor, "B d"], index: Int[Tensor, "B"]) -> None:
        """Moves the batch's rows towards their new embeddings, back to length 1; in place, after the backward pass."""
        with torch.no_grad():
            new = torch.stack([student, teacher]).to(self.rows.dtype)
            mixed = torch.lerp(new, self.rows.index_select(1, index), self.momentum)
            self.rows.index_copy_(1, index, functional.normalize(mixed, dim=2))


# Distillation of a teacher's soft answers ---------------------------------------------------------------------


def knowledge_preserving(
    student_logits: Float[Tensor, "B C"], teacher_logits: Float[Tensor, "B C"], temperature: float = 2.0
) -> Float[Tensor, ""]:
    """Temperature-scaled KL divergence from the teacher's answers to the student's.

    ``T² · KL(p_T ‖ p_S)`` with both distributions softened by the temperature T: the sum over classes, the
    mean over the batch. FedVQA Eq. (8.4) with the temperature and its square from Hinton et al., "Distilling
    the knowledge in a neural network" (2015). The divergence is evaluated in at least single precision. Only
    the student receives a gradient.

    Args:
        student_logits: shape (B, C).
        teacher_logits: shape (B, C); a class masked with minus infinity contributes nothing.
        temperature: T > 0; the ST row of FedVQA uses 2.

    Raises:
        ValueError: the shapes differ, or the temperature is not positive.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.ndim != 2:
        raise ValueError(
            "student_logits and teacher_logits must have one shape (B, C), got "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    precision = torch.promote_types(student_logits.dtype, torch.float32)
    log_student = torch.log_softmax(student_logits.to(precision) / temperature, dim=1)
    log_teacher = torch.log_softmax(teacher_logits.detach().to(precision) / temperature, dim=1)
    teacher = log_teacher.exp()
    # 0 · log 0 counts as 0, also where the student gives the class no probability either.
    gap = (log_teacher - log_student).masked_fill(teacher == 0, 0.0)
    return temperature**2 * (teacher * gap).sum(dim=1).mean()


def decoupled(
    student_logits: Float[Tensor, "B C"],
    teacher_logits: Float[Tensor, "B C"],
    labels: Int[Tensor, "B"],
    temperature: float = 4.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The two parts into which the divergence of distillation falls: about the right class, and about the others.

    Zhao et al., "Decoupled knowledge distillation", CVPR 2022, Eqs. 5 to 7. With p softened by the temperature T
    and t the right class: TCKD = T² · KL of the two-way distributions (p(t), 1 - p(t)), and NCKD = T² · KL of the
    distributions over the classes other than t, each renormalised to 1. The means over the batch. (At T = 1 plain
    distillation is TCKD + (1 - p_T(t)) · NCKD, per example.) Only the student receives a gradient.

    Args:
        student_logits: shape (B, C), C at least 2.
        teacher_logits: shape (B, C).
        labels: each example's right class t, int64, shape (B,).
        temperature: T > 0; the authors use 4 on CIFAR-100 and 1 on ImageNet.

    Raises:
        ValueError: a shape is wrong, or the temperature is not positive.
    """
    if student_logits.ndim != 2 or student_logits.shape[1] < 2 or labels.shape != student_logits.shape[:1]:
        raise ValueError(
            "logits must have shape (B, C) with C of at least 2 and labels (B,), got "
            f"{tuple(student_logits.shape)} and {tuple(labels.shape)}"
        )
    right = functional.one_hot(labels, student_logits.shape[1]).bool()
    pairs: list[Tensor] = []
    rest: list[Tensor] = []
    for raw in (student_logits, teacher_logits.detach()):
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        others = logits.masked_fill(right, -torch.inf)
        # As logits at T = 1, these two have the softmax (p(t), 1 - p(t)).
        target = (logits / temperature).gather(1, labels.unsqueeze(1))
        pairs.append(torch.cat([target, (others / temperature).logsumexp(1, keepdim=True)], dim=1))
        rest.append(others)
    nckd = knowledge_preserving(rest[0], rest[1], temperature)
    return temperature**2 * knowledge_preserving(pairs[0], pairs[1], 1.0), nckd


def similarity_preserving(
    student_features: Float[Tensor, "B ..."], teacher_features: Float[Tensor, "B ..."]
) -> Float[Tensor, ""]:
    """How differently student and teacher see which examples of a batch are alike.

    Tung and Mori, "Similarity-preserving knowledge distillation", ICCV 2019, Eqs. 1 to 4: with G = F Fᵀ, the
    inner products of all pairs of the batch, each row of G divided by its L2 norm, the loss is
    ‖G_T - G_S‖² / B² (squared Frobenius norm). Evaluated in at least single precision, also under autocast. Only
    the student receives a gradient.

    Returns:
        A scalar; 0 for a batch of one.

    Raises:
        ValueError: the numbers of examples differ.
    """
    if len(student_features) != len(teacher_features) or min(student_features.ndim, teacher_features.ndim) < 2:
        raise ValueError(
            "student_features and teacher_features must have shapes (B, ...) with one B, got "
            f"{tuple(student_features.shape)} and {tuple(teacher_features.shape)}"
        )
    with torch.autocast(student_features.device.type, enabled=False):
        student, teacher = _likenesses(student_features), _likenesses(teacher_features.detach())
        return (teacher - student).square().sum() / len(student) ** 2


def _likenesses(features: Tensor) -> Tensor:
    flat = features.flatten(1).to(torch.promote_types(features.dtype, torch.float32))
    return functional.normalize(flat @ flat.T, dim=1)


# Distillation between two networks that learn from each other -------------------------------------------------

Direction = Literal["teacher_student", "student_teacher"]
"""KL(teacher ‖ student), which all of the teacher's answers pull at; or KL(student ‖ teacher), which pulls the student
to the answers it believes in already."""


AT_ONCE = 2**22  # logits that are compared at once, 16 MiB in single precision


def divergence(
    student_logits: Float[Tensor, "B *positions C"],
    teacher_logits: Float[Tensor, "B *positions C"],
    temperature: float = 1.0,
    direction: Direction = "teacher_student",
    where: Bool[Tensor, "B *positions"] | None = None,
    at_once: int = AT_ONCE,
) -> Float[Tensor, ""]:
    """T² · KL between two softened distributions over the last dimension; only the student receives a gradient.

    For logits (B, C) the mean over the batch. For logits of sequences (B, L, C) the sum over positions and the mean
    over the batch, as FedDAT's released ``kl_loss`` does with token logits.

    Logits of a large vocabulary are compared a part of the positions at a time, and the gradient is computed with them,
    so that beside the logits there is one more tensor of their size, the student's gradient. It has no second
    derivative then.

    Args:
        student_logits: shape (B, ..., C).
        teacher_logits: the same shape; a class with minus infinity contributes nothing.
        temperature: T > 0.
        direction: which distribution the divergence starts from.
        where: positions that count, shape (B, ...); all by default.
        at_once: logits that are compared at once.

    Returns:
        A scalar, in at least single precision.

    Raises:
        ValueError: the shapes differ or have fewer than two dimensions, the temperature is not positive, or the
            direction is unknown.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.ndim < 2:
        raise ValueError(
            "student_logits and teacher_logits must have one shape (B, ..., C), got "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )
    if where is not None and where.shape != student_logits.shape[:-1]:
        raise ValueError(
            f"where must have the logits' shape without classes, {tuple(student_logits.shape[:-1])}, got "
            f"{tuple(where.shape)}"
        )
    if direction not in get_args(Direction):
        raise ValueError(f"direction must be one of {', '.join(get_args(Direction))}, got {direction!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    count, classes = len(student_logits), student_logits.shape[-1]
    student, teacher = student_logits.flatten(0, -2), teacher_logits.detach().flatten(0, -2)
    if student.numel() > at_once:
        rows = torch.arange(len(student), device=student.device) if where is None else where.flatten().nonzero()[:, 0]
        parts: Any = torch.split(rows, max(at_once // max(classes, 1), 1))
        in_parts: Any = _InParts
        loss: Tensor = in_parts.apply(student, teacher, temperature, direction, parts)
        return loss / max(count, 1)
    if where is not None:
        student, teacher = student[where.flatten()], teacher[where.flatten()]
    positions = len(student) / max(count, 1)
    return positions * _mean(student, teacher, temperature, direction) if len(student) else student.sum()


def _mean(student: Tensor, teacher: Tensor, temperature: float, direction: Direction) -> Tensor:
    """The mean over rows (N, C)."""
    if direction == "teacher_student":
        return knowledge_preserving(student, teacher, temperature)
    precision = torch.promote_types(student.dtype, torch.float32)
    log_student = torch.log_softmax(student.to(precision) / temperature, dim=1)
    log_teacher = torch.log_softmax(teacher.to(precision) / temperature, dim=1)
    # 0 · log 0 counts as 0, also where the teacher gives the class no probability either.
    nothing = torch.isneginf(log_student)
    gap = log_student.masked_fill(nothing, 0.0) - log_teacher.masked_fill(nothing, 0.0)
    return temperature**2 * (log_student.exp() * gap).sum(dim=1).mean()


class _InParts(torch.autograd.Function):
    """The sum of the divergences of rows, a part of them at a time, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, direction: Direction, parts: tuple[Tensor, ...]
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(student.dtype, torch.float32), device=student.device)
        gradient = torch.zeros_like(student) if ctx.needs_input_grad[0] else None
        for rows in parts:
            if not len(rows):
                continue
            with torch.enable_grad():
                rows_of_student = student[rows].requires_grad_(gradient is not None)
                loss = len(rows) * _mean(rows_of_student, teacher[rows], temperature, direction)
            if gradient is not None:
                gradient[rows] = torch.autograd.grad(loss, rows_of_student)[0]
            total += loss.detach()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient, ctx.gradient = ctx.gradient, None  # scaled where it is, so a second call has none
        if gradient is None:
            raise RuntimeError("a divergence in parts has its gradient taken once; call divergence again")
        return gradient.mul_(outer[0].to(gradient.dtype)), None, None, None, None
