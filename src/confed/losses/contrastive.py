"""Contrast between models: the same example seen by three networks, or one pair in two modalities by two of them."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

ROWS = 1024
"""Pairs that are scored against all others at once."""


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

    Returns:
        A scalar.

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
