"""BUTD: the question weighs the regions, and the product of both answers.

Anderson et al., "Bottom-Up and Top-Down Attention for Image Captioning and Visual Question Answering", CVPR 2018, with
the variants of OpenVQA: ELU instead of gated tanh, weight normalisation with one length per matrix, an LSTM. With q the
last state of the words, behind padding as well, and v_r the regions:

- ``a = softmax_r(w ELU(W [W_v v_r; W_q q]))``
- ``j = ELU(W_1 q) * ELU(W_2 sum_r a_r v_r)``
- ``f = dropout(ReLU(W_3 j))``, which the weight-normalised answer head reads

Padded regions are **not** masked: the original gives them weight, too, so a batch with more padding has other scores.
"""

import torch
from torch import Tensor, nn

from confed.models.finetuning import Places
from confed.models.region_model import RegionModel, Sizes, State, WeightNormLinear, region_variant


class BUTD(RegionModel):
    """BUTD; see :class:`confed.models.region_model.RegionModel` for its batches.

    Args:
        sizes: those that every model of the family has.
        hidden: features of the joint representation.
        features: what the answer head reads, D.
        dropout: dropout probability in front of the attention's hidden layer.
        classifier_dropout: dropout probability of the features.
        gain: factor on the initial lengths of all weights. PyTorch's initial values are small for a product of two
            small answers: with few features of a region the model then learns from the question alone for long.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        hidden: int,
        features: int,
        dropout: float,
        classifier_dropout: float,
        gain: float = 1.0,
    ) -> None:
        super().__init__(sizes, hidden, nn.LSTM)
        self.attended_regions = WeightNormLinear(sizes.region_width, sizes.region_width)
        self.attending_question = WeightNormLinear(hidden, hidden)
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_hidden = WeightNormLinear(sizes.region_width + hidden, hidden)
        self.attention_score = WeightNormLinear(hidden, 1)
        self.question_net = WeightNormLinear(hidden, hidden)
        self.region_net = WeightNormLinear(sizes.region_width, hidden)
        self.joint = WeightNormLinear(hidden, features)
        self.joint_dropout = nn.Dropout(classifier_dropout)
        self.classifier = WeightNormLinear(features, sizes.answers)
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, WeightNormLinear):
                    layer.weight_g.mul_(gain)

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and the weights of the regions (B, R), padding included."""
        question, elu = state.words[:, -1], nn.functional.elu
        questions = self.attending_question(question).unsqueeze(1).expand(-1, state.regions.shape[1], -1)
        pairs = torch.cat([self.attended_regions(state.regions), questions], -1)
        scores = self.attention_score(elu(self.attention_hidden(self.attention_dropout(pairs)))).squeeze(-1)
        weights = scores.softmax(-1)
        seen = (weights.unsqueeze(1) @ state.regions).squeeze(1)
        joint = elu(self.question_net(question)) * elu(self.region_net(seen))
        return self.joint_dropout(torch.relu(self.joint(joint))), weights

    def places(self) -> Places:
        """What can be finetuned; its layers are weight-normalised, which LoRA does not change."""
        return Places(heads=(self.answer_head,), top=("question_net.", "region_net.", "joint."))


butd = region_variant(
    BUTD, "butd", "BUTD in OpenVQA's size: hidden 1024, D = 2048, word embeddings of 300.",
    dropout=0.2, embedding=300, hidden=1024, features=2048, classifier_dropout=0.5,
)  # fmt: skip
butd_mini = region_variant(
    BUTD, "butd_mini",
    "A small BUTD for the built-in pictures: hidden 128, D = 256; arguments as :func:`butd`.",
    region_width=64, embedding=64, hidden=128, features=256, classifier_dropout=0.1, gain=2.0,
)  # fmt: skip
