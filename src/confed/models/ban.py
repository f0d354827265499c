"""BAN: bilinear attention maps over all pairs of a word and a region.

Kim, Jun and Zhang, "Bilinear Attention Networks", NeurIPS 2018. With q_l the states of the words (GRU, padding
included), v_r the regions, G glimpses and the low rank 3 d of every bilinear form:

- ``A_g = softmax_(l,r)(p_g . (ReLU(W_q q_l) * ReLU(W_v v_r)) + b_g)``, regions of padding masked
- ``b_g = pool_3(sum_(l,r) A_g(l,r) ReLU(U_g q_l) * ReLU(V_g v_r))``, the sum over 3 neighbours, with the q so far
- ``q_l = q_l + P_g b_g`` for g = 1..G in turn
- ``f = dropout(ReLU(W sum_l q_l))``, which the weight-normalised answer head reads

All layers start with PyTorch's initial values; OpenVQA draws p_g and b_g of the maps from a standard normal
distribution.
"""

import torch
from torch import Tensor, nn

from confed.models.finetuning import Places
from confed.models.region_model import RegionModel, Sizes, State, WeightNormLinear, masked_softmax, region_variant

RANK = 3  # rank of the bilinear forms over the hidden features, K


class BAN(RegionModel):
    """BAN; see :class:`confed.models.region_model.RegionModel` for its batches.

    Args:
        sizes: those that every model of the family has.
        hidden: features of a word's state, d.
        glimpses: attention maps, G.
        features: what the answer head reads, D.
        dropout: dropout probability in front of the linear layers.
        classifier_dropout: dropout probability of the features and of the regions in the attention.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        hidden: int,
        glimpses: int,
        features: int,
        dropout: float,
        classifier_dropout: float,
    ) -> None:
        super().__init__(sizes, hidden, nn.GRU)
        self.maps = _Maps(sizes.region_width, hidden, glimpses, dropout, classifier_dropout)
        self.connections = nn.ModuleList([_Pair(sizes.region_width, hidden, dropout) for _ in range(glimpses)])
        self.projections = nn.ModuleList([WeightNormLinear(hidden, hidden) for _ in range(glimpses)])
        self.projection_dropout = nn.Dropout(dropout)
        self.joint = WeightNormLinear(hidden, features)
        self.joint_dropout = nn.Dropout(classifier_dropout)
        self.classifier = WeightNormLinear(features, sizes.answers)
        self.glimpses = glimpses

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and the regions' share of all maps (B, R)."""
        words = state.words
        maps = self.maps(words, state.regions, state.present)
        for g in range(self.glimpses):
            question, seen = self.connections[g](words, state.regions)
            pooled = (question * (maps[:, g] @ seen)).sum(1).unflatten(-1, (-1, RANK)).sum(-1)
            words = words + self.projections[g](self.projection_dropout(pooled)).unsqueeze(1)
        features = self.joint_dropout(torch.relu(self.joint(words.sum(1))))
        return features, maps.sum((1, 2)) / self.glimpses

    def places(self) -> Places:
        """What can be finetuned; its layers are weight-normalised, which LoRA does not change."""
        last = self.glimpses - 1
        return Places(heads=(self.answer_head,), top=(f"connections.{last}.", f"projections.{last}.", "joint."))


class _Pair(nn.Module):
    """Words and regions with ReLU in the space of the bilinear form, 3 d features."""

    def __init__(self, region_width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.words = WeightNormLinear(hidden, RANK * hidden)
        self.regions = WeightNormLinear(region_width, RANK * hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.words(self.dropout(words))), torch.relu(self.regions(self.dropout(regions)))


class _Maps(nn.Module):
    """The attention maps of all glimpses, (B, G, L, R), each of sum 1."""

    def __init__(self, region_width: int, hidden: int, glimpses: int, dropout: float, last_dropout: float) -> None:
        super().__init__()
        self.pair = _Pair(region_width, hidden, dropout)
        self.dropout = nn.Dropout(last_dropout)
        self.score = WeightNormLinear(RANK * hidden, glimpses)

    def forward(self, words: Tensor, regions: Tensor, present: Tensor) -> Tensor:
        question, seen = self.pair(words, regions)
        score = self.score
        glimpses = question.unsqueeze(1) * (score.weight_v * score.scale)[:, None, :]
        scores = glimpses @ self.dropout(seen).transpose(1, 2).unsqueeze(1) + score.bias[:, None, None]
        shown = present[:, None, None, :].expand_as(scores)
        return masked_softmax(scores.flatten(2), shown.flatten(2)).unflatten(2, scores.shape[2:])


ban_4 = region_variant(
    BAN, "ban_4", "BAN with 4 glimpses in OpenVQA's size: d = 1024, D = 2048, word embeddings of 300.",
    dropout=0.2, embedding=300, hidden=1024, glimpses=4, features=2048, classifier_dropout=0.5,
)  # fmt: skip
ban_8 = region_variant(
    BAN, "ban_8", "BAN with 8 glimpses, otherwise as :func:`ban_4`.",
    dropout=0.2, embedding=300, hidden=1024, glimpses=8, features=2048, classifier_dropout=0.5,
)  # fmt: skip
ban_mini = region_variant(
    BAN, "ban_mini",
    "A small BAN for the built-in pictures: d = 64, 2 glimpses, D = 256; arguments as :func:`ban_4`.",
    region_width=64, embedding=64, hidden=64, glimpses=2, features=256, classifier_dropout=0.1,
)  # fmt: skip
