"""Magneto: Transformer layers with sub-LayerNorm and its initialisation, and plain pre-norm layers.

Wang et al., "Magneto: A Foundation Transformer", ICML 2023, as the library torchscale has it. Per layer

    x <- x + W_O LN(heads(LN(x))),    x <- x + W_2 LN(GELU(W_1 LN(x))),

and a last layer normalisation behind all layers. The inner two normalisations are what "sub-LN" adds to the ordinary
pre-norm layer. With N layers, the values of W_V, W_O, W_1 and W_2 start larger by gamma = sqrt(ln 2N).
"""

import math
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Block = Literal["magneto", "prenorm"]
"""Layers with sub-LayerNorm and scaled initial values; ordinary pre-norm layers with neither."""
MagnetoInit = Literal["torchscale", "paper"]
"""Initial values as the authors' library has them, or as the paper says."""


def magneto_gain(layers: int) -> float:
    """The factor gamma = sqrt(ln 2N) of an encoder, or of a decoder alone, with N layers (Magneto)."""
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    return math.sqrt(math.log(2 * layers))


class Attention(nn.Module):
    """Multi-head attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, inner_norm: bool = False) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"model.attention_heads must divide the width {width}, got {heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.inner_norm = nn.LayerNorm(width) if inner_norm else None
        self.out_proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """What the tokens ``x`` read in ``context``."""
        if context is None:
            query, key, value = self.qkv(x).chunk(3, -1)
        else:
            width, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            query = F.linear(x, weight[:width], bias[:width])
            key, value = F.linear(context, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        seen = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal).transpose(1, 2).flatten(2)
        return self.out_proj(seen if self.inner_norm is None else self.inner_norm(seen))


class EncoderLayer(nn.Module):
    """One pre-norm layer, with sub-LayerNorm or without."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, sub_norm: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, sub_norm)
        self.ffn_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.inner_norm = nn.LayerNorm(hidden) if sub_norm else None
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """The next states of the tokens, (B, S, d); arguments as :meth:`Attention.forward`.

        A ``context`` goes through the same normalisation as the tokens.
        """
        other = None if context is None else self.attention_norm(context)
        x = x + self.dropout(self.attention(self.attention_norm(x), other, mask, causal))
        inner = F.gelu(self.fc1(self.ffn_norm(x)))
        return x + self.dropout(self.fc2(inner if self.inner_norm is None else self.inner_norm(inner)))

    @torch.no_grad()
    def reset_parameters(self, gain: float, init: MagnetoInit = "torchscale") -> None:
        """Draws the initial values of all matrices and biases, from the current default generator.

        "torchscale": W_Q, W_K and W_V from Xavier's uniform distribution with gain 1/sqrt(2), W_O with gain 1 and no
        bias, all else as PyTorch has it; then W_V, W_O, W_1, W_2 *and their biases* are multiplied by gamma. "paper":
        from Xavier's normal distribution, with gain gamma for these four and 1 for W_Q and W_K; the paper says nothing
        of biases, which start at zero.
        """
        width = self.attention.out_proj.in_features
        out, inner = self.attention.out_proj, (self.fc1, self.fc2)
        value_bias = self.attention.qkv.bias[2 * width :]
        parts = self.attention.qkv.weight.split(width)
        if init == "paper":
            for part, scale in zip(parts, (1.0, 1.0, gain), strict=True):
                nn.init.xavier_normal_(part, scale)
            for layer in (out, *inner):
                nn.init.xavier_normal_(layer.weight, gain)
            for layer in (self.attention.qkv, out, *inner):
                nn.init.zeros_(layer.bias)
            return
        for layer in inner:
            layer.reset_parameters()
        # A fused matrix has the rows of three; the bound of a bias depends on the inputs alone.
        self.attention.qkv.reset_parameters()
        for part in parts:
            nn.init.xavier_uniform_(part, 1 / math.sqrt(2))
        nn.init.xavier_uniform_(out.weight)
        nn.init.zeros_(out.bias)
        for tensor in (
            parts[2],
            value_bias,
            *chain.from_iterable((layer.weight, layer.bias) for layer in (out, *inner)),
        ):
            tensor.mul_(gain)


class Encoder(nn.Module):
    """Layers in sequence, then a layer normalisation.

    With ``causal`` it is a decoder of text alone: nothing else differs, and gamma is the same.
    Initial values come from PyTorch's default generator; see :func:`confed.models.pretrained.seeded`.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        dropout: float = 0.0,
        *,
        block: Block = "magneto",
        magneto_init: MagnetoInit = "torchscale",
    ) -> None:
        super().__init__()
        for name, value in (("layers", layers), ("width", width), ("hidden", hidden)):
            if value < 1:
                raise ValueError(f"model.{name} must be at least 1, got {value}")
        for name, choice, among in (("block", block, Block), ("magneto_init", magneto_init, MagnetoInit)):
            if choice not in get_args(among):
                raise ValueError(f"model.{name} must be one of {', '.join(get_args(among))}, got {choice!r}")
        self.width = width
        self.dropout = nn.Dropout(dropout)
        sub_norm = block == "magneto"
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = EncoderLayer(width, heads, hidden, dropout, sub_norm)
            layer.reset_parameters(
                magneto_gain(layers) if sub_norm else 1.0, magneto_init if sub_norm else "torchscale"
            )
            self.layers.append(layer)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, present: Tensor | None = None, causal: bool = False) -> Tensor:
        """The last states of the tokens, (B, S, d)."""
        mask = None if present is None else present[:, None, None, :]
        if mask is not None and causal:
            size = x.shape[1]
            earlier = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
            # Padding in front of a row's first token looks at itself: a row of nothing would have no softmax.
            mask, causal = (mask | torch.eye(size, dtype=torch.bool, device=x.device)) & earlier, False
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask=mask, causal=causal)
        return self.norm(x)
