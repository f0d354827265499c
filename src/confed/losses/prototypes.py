"""Class prototypes, the mean representation of each class: made, leaned on, and looked up.

A prototype of zeros stands for a class of which nothing is known yet.
"""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional


def class_sums(
    features: Float[Tensor, "B D"], labels: Int[Tensor, "B"], classes: int
) -> tuple[Float64[Tensor, "{classes} D"], Float64[Tensor, "{classes}"]]:
    """Sums of the representations of each class, and how many there are; both add up over batches.

    Returns:
        Sums (C, D) and counts (C,), float64.

    Raises:
        ValueError: the numbers of examples differ.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"features must have shape (B, D) and labels (B,), got {tuple(features.shape)} and {tuple(labels.shape)}"
        )
    sums = features.new_zeros(classes, features.shape[1], dtype=torch.float64)
    sums.index_add_(0, labels, features.detach().double())
    return sums, torch.bincount(labels, minlength=classes).double()


def prototype_contrast(
    features: Float[Tensor, "B D"],
    prototypes: Float[Tensor, "C D"],
    labels: Int[Tensor, "B"],
    temperature: float = 0.07,
) -> Float[Tensor, ""]:
    """How much nearer representations are to other classes' prototypes than to their own class's.

    PmcmFL (Bao et al., 2023, arXiv 2312.13508) contrasts an example with the prototypes of the classes in its batch, as
    CLIP does; here with those of all classes of which there is one, so that an equal class is never a negative:

        -log( exp(cos(z, p_y) / tau) / sum over known c of exp(cos(z, p_c) / tau) )

    The mean over the examples whose class has a prototype, evaluated in at least single precision; 0 where there is no
    such example. Only ``features`` receive a gradient.

    Args:
        features: z, shape (B, D).
        prototypes: p, shape (C, D).
        labels: y, int64, shape (B,).
        temperature: tau > 0; the authors start from CLIP's 0.07.

    Raises:
        ValueError: a shape is wrong, or the temperature is not positive.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or prototypes.shape[1:] != features.shape[1:]:
        raise ValueError(
            "features, prototypes and labels must have shapes (B, D), (C, D) and (B,), got "
            f"{tuple(features.shape)}, {tuple(prototypes.shape)} and {tuple(labels.shape)}"
        )
    scores = _scores(features, prototypes.detach(), temperature)
    has_prototype = prototypes.detach().any(dim=1)[labels]
    losses = torch.logsumexp(scores, dim=1) - scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    # Where a class has no prototype its score is minus infinity: no value, and no gradient, may come from there.
    return (
        torch.where(has_prototype, losses, 0.0).sum() / has_prototype.sum().clamp(min=1)
        if bool(has_prototype.any())
        else features.sum() * 0
    )


def likeness(
    features: Float[Tensor, "B D"], prototypes: Float[Tensor, "C D"], temperature: float = 0.07
) -> Float[Tensor, "B C"]:
    """To which classes representations seem to belong: the softmax of cos(z, p_c) / tau over the known classes.

    Returns:
        Shape (B, C), rows with sum 1; all 0 where no class is known.

    A temperature that is not positive is a ValueError.
    """
    if not bool(prototypes.any()):
        return features.new_zeros(len(features), len(prototypes))
    return _scores(features, prototypes, temperature).softmax(dim=1)


def _scores(features: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """Scores cos(z, p_c) / tau, (B, C); minus infinity for unknown classes."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    precision = torch.promote_types(features.dtype, torch.float32)
    with torch.autocast(features.device.type, enabled=False):
        z = functional.normalize(features.to(precision), dim=1)
        scores = z @ functional.normalize(prototypes.to(precision), dim=1).T / temperature
    return scores.masked_fill(~prototypes.any(dim=1), -torch.inf)
