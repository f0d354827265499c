"""Layers of the OpenVQA family of models on region features (MCAN, BUTD, BAN, MFB, MMNasNet).

Notation: B examples, d features inside the model.
"""

import torch
from torch import Tensor, nn

MASKED = -1e9
"""Score of what must not be attended to. It is finite: where all is masked, the weights are uniform and not NaN."""


class LayerNorm(nn.LayerNorm):
    """``a (x - mean) / (std + eps) + b`` with the unbiased standard deviation, unlike ``torch.nn.LayerNorm``.

    It derives from that one so that methods which look for normalisation layers find it.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)

    def forward(self, input: Tensor) -> Tensor:
        """The normalised features, same shape as ``input`` (..., d)."""
        centred = input - input.mean(-1, keepdim=True)
        # The gradient of this norm is 0 at 0; that of a root would be infinite.
        std = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) * (input.shape[-1] - 1) ** -0.5
        return torch.addcmul(self.bias, centred / (std + self.eps), self.weight)


class FullyConnected(nn.Module):
    """Linear, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.dropout(torch.relu(self.linear(x)))


class MLP(nn.Module):
    """A fully connected layer and a linear one."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.hidden = FullyConnected(inputs, hidden, dropout)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.output(self.hidden(x))


class WeightNormLinear(nn.Module):
    """A linear layer whose weight is ``g V / ||V||``, with one length g for the whole matrix.

    Salimans and Kingma, "Weight Normalization", NeurIPS 2016, with the norm over all entries. The layer starts as an
    ordinary one: g is the norm of V's initial values.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        start = nn.Linear(inputs, outputs)
        self.weight_g = nn.Parameter(start.weight.detach().square().sum().sqrt())
        self.weight_v = start.weight
        self.bias = start.bias

    @property
    def scale(self) -> Tensor:
        """``g / ||V||``."""
        return self.weight_g / self.weight_v.square().sum().sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return nn.functional.linear(x, self.weight_v * self.scale, self.bias)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with h heads, dropout on the weights, and four linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the attention heads must divide the width {width}, got {heads}")
        self.heads = heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor, present: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the positions of ``x`` read in ``context``."""
        query, key, value = (
            layer(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, states in ((self.query, x), (self.key, context), (self.value, context))
        )
        mask = torch.zeros_like(present, dtype=query.dtype).masked_fill(~present, MASKED)[:, None, None, :]
        seen = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if bias is None else mask + bias,
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return self.merge(seen.transpose(1, 2).flatten(2))


class AttFlat(nn.Module):
    """A sequence as one vector: an MLP scores the positions, and a linear layer reads their weighted sum."""

    def __init__(self, width: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.mlp = MLP(width, hidden, 1, dropout)
        self.merge = nn.Linear(width, outputs)

    def forward(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors (B, D) of the sequences (B, N, d), and the weights of their positions (B, N), of sum 1."""
        weights = masked_softmax(self.mlp(x).squeeze(-1), present)
        return self.merge((weights.unsqueeze(1) @ x).squeeze(1)), weights


def masked_softmax(scores: Tensor, present: Tensor) -> Tensor:
    """Softmax over the last dimension of ``scores`` where ``present`` holds; both (..., N)."""
    return scores.masked_fill(~present, MASKED).softmax(-1)


def box_geometry(boxes: Tensor, pixel: float = 0.0) -> Tensor:
    """How regions lie to each other: logarithms of distances and of sizes, relative to their own size.

    With centre (x, y), width w and height h of regions m and n: ``log(|x_m - x_n| / w_m)``,
    ``log(|y_m - y_n| / h_m)``, both ratios at least 1e-3, ``log(w_m / w_n)``, ``log(h_m / h_n)`` (Hu et al., "Relation
    Networks for Object Detection", CVPR 2018, Eq. 5, as MMNasNet uses them).

    Returns:
        Shape (B, R, R, 4).
    """
    low, high = boxes[..., :2], boxes[..., 2:]
    centre, size = (low + high) / 2, high - low
    size = size + pixel if pixel else size.clamp_min(1e-3)
    distance = (centre.unsqueeze(2) - centre.unsqueeze(1)).abs() / size.unsqueeze(2)
    ratio = size.unsqueeze(2) / size.unsqueeze(1)
    return torch.cat([distance.clamp_min(1e-3), ratio], -1).log()
