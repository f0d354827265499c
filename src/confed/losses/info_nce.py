"""InfoNCE between two representations of the same examples, with the other examples of a batch as negatives.

van den Oord, Li and Vinyals, "Representation learning with contrastive predictive coding", 2018; as used by Sun and
Ochiai, "Bidirectional contrastive split learning for visual question answering", AAAI 2024, Eq. 2. With similarities
s_ij = sim(v_i, u_j), B examples and temperature tau:

    L_i = -( s_ii / tau - log sum_{j in D_i} exp(s_ij / tau) )

D_i is every j except i ("exclude": the paper's Eq. 2; the loss may be negative and has no lower bound with raw dot
products) or every j ("include": cross-entropy over the rows, which the authors' released code computes). In both, pairs
of equal answers can be taken out of D_i; the positive itself never is.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional

ROWS = 1024  # pairs that are scored against all others at once


def model_contrastive(
    local: Float[Tensor, "B D"],
    received: Float[Tensor, "B D"],
    previous: Float[Tensor, "B D"],
    temperature: float = 0.5,
) -> Float[Tensor, ""]:
    """Model-contrastive loss: near to the global model's view of an example, away from one's own previous view.

    Li, He and Song, "Model-contrastive federated learning", CVPR 2021, Eq. 3, with z, z_glob and z_prev the three
    networks' representations of one example:

        -log( exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)) )

    The mean over the batch, evaluated in at least single precision. Only ``local`` receives a gradient.

    Args:
        local: z, shape (B, D).
        received: z_glob, shape (B, D).
        previous: z_prev, shape (B, D).
        temperature: tau > 0; the paper uses 0.5.

    Raises:
        ValueError: the shapes differ, or the temperature is not positive.
    """
    if local.ndim != 2 or local.shape != received.shape or local.shape != previous.shape:
        raise ValueError(
            "local, received and previous must have one shape (B, D), got "
            f"{tuple(local.shape)}, {tuple(received.shape)} and {tuple(previous.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    precision = torch.promote_types(local.dtype, torch.float32)
    z, near, far = local.to(precision), received.detach().to(precision), previous.detach().to(precision)
    gap = functional.cosine_similarity(z, far) - functional.cosine_similarity(z, near)
    # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a)).
    return functional.softplus(gap / temperature).mean()


def inter_modal(
    local: Float[Tensor, "B D"], others: Float[Tensor, "P D"], k: Int64[Tensor, "B"], temperature: float = 0.5
) -> Float[Tensor, ""]:
    """Inter-modal contrast: a pair's other modality, as another model sees it, told from those of all pairs.

    Yu et al., "Multimodal federated learning via contrastive representation ensemble" (CreamFL), ICLR 2023: the mean of
    -log softmax_j(z_b . y_j / tau)[k_b].

    Args:
        local: z, one modality of B pairs, unit length, (B, D).
        others: y, the other modality of all P pairs, (P, D).
        k: which pairs these are, int64 (B,).
        temperature: tau > 0.
    """
    return functional.cross_entropy(local @ others.to(local.dtype).T / temperature, k)


def match_scores(local: Float[Tensor, "P D"], others: Float[Tensor, "P D"]) -> Float[Tensor, "P"]:
    """Log-probability that each pair is found by one modality among the other modality of all pairs (CreamFL), (P,).

    Args:
        local: one modality of all pairs, as one model sees it, (P, D).
        others: the other modality, as another model does, (P, D).
    """
    parts: list[Tensor] = []
    for start in range(0, len(local), ROWS):
        logs = (local[start : start + ROWS] @ others.T).log_softmax(1)
        parts.append(logs.diagonal(start))
    return torch.cat(parts)


Denominator = Literal["exclude", "include"]  # whether the positive pair is among the terms of the denominator
Similarity = Literal["cosine", "dot"]  # dot product of the vectors scaled to length 1, or as they are
Reduction = Literal["sum", "mean", "none"]
"""Sum over the batch, mean over the examples that have a loss, or each example's own, (B,)."""


def similarities(
    v: Float[Tensor, "B S"], u: Float[Tensor, "N S"], similarity: Similarity = "cosine"
) -> Float[Tensor, "B N"]:
    """Similarity of every row of ``v`` with every row of ``u``, in at least single precision, under autocast as well.

    Raises:
        ValueError: the widths differ, or an unknown similarity.
    """
    if v.ndim != 2 or u.ndim != 2 or v.shape[1] != u.shape[1]:
        raise ValueError(f"v and u must have shapes (B, S) and (N, S), got {tuple(v.shape)} and {tuple(u.shape)}")
    _among("similarity", similarity, Similarity)
    precision = torch.promote_types(torch.promote_types(v.dtype, u.dtype), torch.float32)
    # Autocast would take the product in half precision; divided by 0.07, its rounding errors are large.
    with torch.autocast(v.device.type, enabled=False):
        v, u = v.to(precision), u.to(precision)
        if similarity == "cosine":
            v, u = functional.normalize(v, dim=1), functional.normalize(u, dim=1)
        return v @ u.T


def same_answers(labels: Shaped[Tensor, "B"]) -> Bool[Tensor, "B B"]:
    """Which pairs of examples have the same answer, bool, shape (B, B), of labels (B,)."""
    return labels.unsqueeze(0) == labels.unsqueeze(1)


def info_nce(
    v: Float[Tensor, "B S"],
    u: Float[Tensor, "B S"],
    *,
    temperature: float = 0.07,
    denominator: Denominator = "exclude",
    similarity: Similarity = "cosine",
    reduction: Reduction = "sum",
    same: Bool[Tensor, "B B"] | None = None,
    symmetric: bool = False,
) -> Float[Tensor, ""] | Float[Tensor, "B"]:
    """InfoNCE of B positive pairs (v_i, u_i); see the module for the equation.

    Args:
        v: anchors, shape (B, S).
        u: their positives and each other's negatives, shape (B, S).
        temperature: tau > 0.
        denominator: "exclude" or "include" the positive.
        similarity: "cosine" or "dot".
        reduction: "sum", "mean" or "none".
        same: pairs that are no negatives, bool, shape (B, B), such as :func:`same_answers`; its diagonal does not
            matter. An example whose negatives are all taken out has, with "exclude", no loss: it adds 0 to the sum and
            does not count in the mean. With "include" its loss is 0 by the equation, and it counts.
        symmetric: the mean of the loss and of the one with the roles of v and u exchanged.

    Returns:
        A scalar, or (B,) for "none".

    Different shapes, an unknown option, and a batch of one without a denominator ("exclude") are a ValueError.
    """
    contrast = Contrast(temperature, denominator, similarity, reduction, same is not None, symmetric)
    return contrast(v, u, same)


@dataclass(frozen=True)
class Contrast:
    """InfoNCE with its options fixed; see :func:`info_nce`.

    Attributes:
        temperature: tau.
        denominator: "exclude" or "include" the positive.
        similarity: "cosine" or "dot".
        reduction: "sum", "mean" or "none".
        mask_same_answer: whether pairs of equal answers are no negatives.
        symmetric: whether both directions are averaged.

    Raises:
        ValueError: the temperature is not positive, or an option is unknown.
    """

    temperature: float = 0.07
    denominator: Denominator = "exclude"
    similarity: Similarity = "cosine"
    reduction: Reduction = "sum"
    mask_same_answer: bool = False
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        _among("denominator", self.denominator, Denominator)
        _among("similarity", self.similarity, Similarity)
        _among("reduction", self.reduction, Reduction)

    def __call__(
        self, v: Float[Tensor, "B S"], u: Float[Tensor, "B S"], same: Bool[Tensor, "B B"] | None = None
    ) -> Float[Tensor, ""] | Float[Tensor, "B"]:
        """The loss of positive pairs (v_i, u_i).

        Args:
            v: shape (B, S).
            u: shape (B, S).
            same: bool, shape (B, B); read with ``mask_same_answer`` only, which needs it.

        Raises:
            ValueError: as :func:`info_nce`, or ``same`` is missing.
        """
        if v.ndim != 2 or v.shape != u.shape:
            raise ValueError(f"v and u must have one shape (B, S), got {tuple(v.shape)} and {tuple(u.shape)}")
        return self.of(similarities(v, u, self.similarity), same)

    def of(
        self, scores: Float[Tensor, "B B"], same: Bool[Tensor, "B B"] | None = None
    ) -> Float[Tensor, ""] | Float[Tensor, "B"]:
        """The loss from similarities that are known already.

        Args:
            scores: s_ij before the temperature, shape (B, B), the positives on the diagonal.
            same: as for calls.

        Raises:
            ValueError: as for calls.
        """
        count = len(scores)
        if scores.ndim != 2 or scores.shape[1] != count or not count:
            raise ValueError(f"similarities must have shape (B, B) with B >= 1, got {tuple(scores.shape)}")
        if count == 1 and self.denominator == "exclude":
            raise ValueError(
                "denominator 'exclude' needs at least two examples in a batch, got a batch of one: it has no negatives"
            )
        if self.mask_same_answer and same is None:
            raise ValueError("mask_same_answer needs to know which answers are the same, got same = None")
        if same is not None and same.shape != scores.shape:
            raise ValueError(f"same must have shape {tuple(scores.shape)}, got {tuple(same.shape)}")
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / self.temperature
        positive = torch.eye(count, dtype=torch.bool, device=scores.device)
        dropped = torch.zeros_like(positive)
        if self.mask_same_answer and same is not None:
            dropped = same & ~positive
        if self.denominator == "exclude":
            dropped = dropped | positive
        losses, counted = self._rows(scores, dropped)
        if self.symmetric:
            other, backward_dropped = self._rows(scores.T, dropped.T)
            losses, counted = (losses + other) / 2, counted | backward_dropped
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / counted.sum().clamp_min(1)

    @staticmethod
    def _rows(scores: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's loss, (B,), 0 where nothing is left in the denominator; and whether something is left."""
        counted = ~dropped.all(dim=1)
        # An empty row keeps its terms, so that neither its value nor its gradient is infinite before it is dropped.
        negatives = scores.masked_fill(dropped & counted.unsqueeze(1), -torch.inf)
        losses = negatives.logsumexp(dim=1) - scores.diagonal()
        return losses.where(counted, 0.0), counted


def _among(name: str, value: object, options: object) -> None:
    """Checks that a value is one of a literal's."""
    if value not in get_args(options):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(options)))}, got {value!r}")
