"""Regularisers of learned prompts: they hold text features and scores near those of handwritten prompts."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def knowledge_guidance(texts: Float[Tensor, "K D"], handwritten: Float[Tensor, "K D"]) -> Float[Tensor, ""]:
    """Mean over classes of ||g(t_c) - g(t_c^hand)||^2.

    Yao, Zhang and Xu, "Visual-language prompt tuning with knowledge-guided context optimization" (KgCoOp), CVPR 2023.
    """
    return (texts - handwritten).square().sum(dim=1).mean()


def text_consistency(texts: Float[Tensor, "K D"], handwritten: Float[Tensor, "K D"]) -> Float[Tensor, ""]:
    """Mean over classes and features of |g(t_c) - g(t_c^hand)|.

    Khattak et al., "Self-regulating prompts: foundational model adaptation without forgetting" (PromptSRC), ICCV 2023,
    its loss SCL-text.

    Args:
        texts: features of learned prompts, unit length.
        handwritten: those of handwritten ones, in the paper an ensemble.
    """
    return F.l1_loss(texts, handwritten)


def score_consistency(scores: Float[Tensor, "B K"], handwritten: Float[Tensor, "B K"]) -> Float[Tensor, ""]:
    """Mean over examples of KL(softmax of handwritten prompts' scores || softmax of learned prompts' scores).

    PromptSRC's loss SCL-logits.
    """
    target = handwritten.detach().log_softmax(dim=1)
    return F.kl_div(scores.log_softmax(dim=1), target, reduction="batchmean", log_target=True)


def text_contrast(
    shared: Float[Tensor, "K D"], guide: Float[Tensor, "K D"], personal: Float[Tensor, "K D"], temperature: float
) -> Float[Tensor, ""]:
    """Contrast of global prompts with handwritten ones (near) and personal ones (far), mean over classes.

        - log e^(s(G, C) / tau) / (e^(s(G, C) / tau) + e^(s(G, i) / tau)),      s: cosine

    Cui et al., "Harmonizing generalization and personalization in federated prompt learning" (FedPGP), ICML 2024.

    Args:
        shared: features of the global prompt, G.
        guide: those of handwritten prompts, C.
        personal: those of the client's own prompt, i.
        temperature: tau.
    """
    near = F.cosine_similarity(shared, guide, dim=1)
    far = F.cosine_similarity(shared, personal, dim=1)
    pairs = torch.stack([near, far], dim=1) / temperature
    return -pairs.log_softmax(dim=1)[:, 0].mean()
