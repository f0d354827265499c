"""Recall at k of retrieval: whether a relevant item is among the k with the highest scores."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def ranks_of_relevant(scores: Float[Tensor, "Q N"], relevant: Bool[Tensor, "Q N"]) -> Float[Tensor, "Q"]:
    """Rank of each query's best relevant item, from 1; a query's recall at k is whether this is at most k.

    Irrelevant items with an equal score are in front of it, so that a model that tells nothing apart finds nothing.
    """
    best = scores.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
    ahead = ((scores >= best) & ~relevant).sum(1).to(scores.dtype)
    return (ahead + 1).masked_fill(~relevant.any(1), torch.inf)
