"""MFB: factorised bilinear pooling of the question with itself attended and of the regions it points at.

Yu, Yu, Fan and Tao, "Multi-modal Factorized Bilinear Pooling with Co-Attention Learning for Visual Question
Answering", ICCV 2017. Pooling of x and y with k = 5 factors and O outputs:

- ``MFB(x, y) = norm(root(sum_k dropout(U x * V y)))``, ``root(z) = sign(z) sqrt(|z|)``, norm the L2 norm of an
  example, over all its regions at once

With q_l the states of the words (LSTM), v_r the regions, and two glimpses each, whose results are joined:

- ``q = [sum_l a_g(l) q_l]_g``, ``a = softmax_l(MLP(q_l))``
- ``v = [sum_r c_g(r) v_r]_g``, ``c = softmax_r(MLP(MFB(v_r, q)))``
- ``f = MFB(v, q)``, which the linear answer head reads

Padding is masked in both attentions, and padded regions are no part of the norm; OpenVQA masks neither, so that there
an example's scores change with its padding. Dropout is where OpenVQA has it: on the words' embeddings and states, the
regions, the MLPs and the products. The objective that belongs to it is "kl" of :class:`confed.tasks.vqa.VQA`.
"""

import torch
from torch import Tensor, nn

from confed.models.finetuning import Places
from confed.models.region_model import MLP, RegionModel, Sizes, State, masked_softmax, region_variant

FACTORS = 5  # factors of the bilinear pooling, k


class MFB(RegionModel):
    """MFB; see :class:`confed.models.region_model.RegionModel` for its batches.

    Args:
        sizes: those that every model of the family has.
        states: features of a word's state.
        hidden: width of the two attentions' MLPs.
        glimpses: of both attentions.
        features: outputs of the pooling, which the answer head reads, O = D.
        dropout: dropout probability.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        states: int,
        hidden: int,
        glimpses: int,
        features: int,
        dropout: float,
    ) -> None:
        super().__init__(sizes, states, nn.LSTM)
        self.dropout = nn.Dropout(dropout)
        self.word_scores = MLP(states, hidden, glimpses, dropout)
        self.region_fusion = _Fusion(sizes.region_width, glimpses * states, features, dropout)
        self.region_scores = MLP(features, hidden, glimpses, dropout)
        self.fusion = _Fusion(glimpses * sizes.region_width, glimpses * states, features, dropout)
        self.classifier = nn.Linear(features, sizes.answers)

    def embed(self, text: Tensor) -> Tensor:
        return self.dropout(self.embedding(text))

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and the mean of the glimpses' weights of the regions (B, R)."""
        words = self.dropout(state.words)
        asking = masked_softmax(self.word_scores(words).transpose(1, 2), state.is_word.unsqueeze(1))
        question = (asking @ words).flatten(1)
        regions = self.dropout(state.regions)
        fused = self.region_fusion(regions, question.unsqueeze(1), state.present.unsqueeze(-1))
        weights = masked_softmax(self.region_scores(fused).transpose(1, 2), state.present.unsqueeze(1))
        seen = (weights @ regions).flatten(1)
        return self.fusion(seen, question), weights.mean(1)

    def places(self) -> Places:
        return Places(heads=(self.answer_head,), top=("fusion.",), lora=("fusion.visual", "fusion.question"))


class _Fusion(nn.Module):
    """``MFB(x, y)`` of visual features x and a question y; see the module's equations."""

    def __init__(self, visual: int, question: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.visual = nn.Linear(visual, FACTORS * outputs)
        self.question = nn.Linear(question, FACTORS * outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor, present: Tensor | None = None) -> Tensor:
        """(B, ..., visual) and (B, ..., question) to (B, ..., outputs); zeros where ``present`` does not hold."""
        z = self.dropout(self.visual(x) * self.question(y)).unflatten(-1, (-1, FACTORS)).sum(-1)
        # The gradient of the root is infinite at 0, which dropout of all factors makes likely; ReLU's is 0 there.
        z = torch.relu(z).sqrt() - torch.relu(-z).sqrt()
        if present is not None:
            z = z.masked_fill(~present, 0.0)
        return nn.functional.normalize(z.flatten(1), dim=1).view_as(z)


mfb = region_variant(
    MFB, "mfb", "MFB as published: O = 1000, k = 5, 2 + 2 glimpses, LSTM of 1024, word embeddings of 300.",
    dropout=0.1, embedding=300, states=1024, hidden=512, glimpses=2, features=1000,
)  # fmt: skip
mfb_mini = region_variant(
    MFB, "mfb_mini", "A small MFB for the built-in pictures: O = 128, LSTM of 64; arguments as :func:`mfb`.",
    region_width=64, embedding=64, states=64, hidden=64, glimpses=2, features=128,
)  # fmt: skip
