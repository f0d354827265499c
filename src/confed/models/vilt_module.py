"""ViLT: one Transformer over words and picture patches, with an answer head.

Kim, Son and Kim, "ViLT: Vision-and-Language Transformer Without Convolution or Region Supervision", ICML
2021. The modules, and hence the checkpoint names, are those of ``transformers``. Its forward pass shuffles
the patches with the global random generator, in evaluation too; here the patches keep their order, which
changes no text output (attention does not depend on the order of the keys) and makes every output a function
of the batch.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.models.layers import seeded_linear

if TYPE_CHECKING:
    from transformers import ViltModel

__all__ = ["Vilt", "answer_head"]


def answer_head(width: int, answers: int, rng: torch.Generator) -> nn.Sequential:
    """The answer head of ViLT and FedVQA: Linear(d, 2d), LayerNorm, GELU, Linear(2d, C); weights N(0, 0.02).

    The names inside match ``ViltForQuestionAnswering``.
    """
    return nn.Sequential(
        seeded_linear(width, 2 * width, 0.02, rng),
        nn.LayerNorm(2 * width),
        nn.GELU(),
        seeded_linear(2 * width, answers, 0.02, rng),
    )


class Vilt(nn.Module):
    """A ViLT body with an answer head.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats, and ``text`` and ``text_mask``,
    int64 (B, L) with L up to the number of text positions.

    Args:
        body: the ``transformers`` model.
        answers: number of answers C.
        image_size: (H, W) in pixels if it differs from the body's own; position embeddings are interpolated.
        rng: where the head's initial values come from.

    Raises:
        ValueError: a picture size that is no multiple of the patch size.
    """

    answer_head = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    def __init__(
        self, body: "ViltModel", answers: int, rng: torch.Generator, image_size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if answers < 1:
            raise ValueError(f"answers must be at least 1, got {answers}")
        config: Any = body.config
        self.vilt = body.train()
        self.classifier = answer_head(config.hidden_size, answers, rng)
        self.patch: int = config.patch_size
        self.image_size: tuple[int, int] = image_size or (config.image_size, config.image_size)
        if self.image_size[0] % self.patch or self.image_size[1] % self.patch:
            raise ValueError(f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}")
        self.grid = (self.image_size[0] // self.patch, self.image_size[1] // self.patch)

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, and of the buffers, which are constants."""
        names = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return names | {name for name, _ in self.named_buffers()}

    def forward(self, batch: Batch) -> Output:
        """Scores of the answers (B, C) and the pooled representation (B, d).

        Raises:
            ValueError: a key is missing, or a tensor has another shape than the model reads.
        """
        hidden, mask = self.embed(batch)
        pooled = self.pool(self.vilt.encoder(hidden, mask)[0])
        return Output(self.classifier(pooled), pooled)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input of the first block, (B, L + 1 + patches, d), and its additive attention mask.

        Positions are the L text tokens, the picture's class token, then the patches row by row.
        """
        image, text, text_mask = self._checked(batch)
        patches = self.patch_embeddings(image)
        ones = torch.ones(patches.shape[:2], dtype=text_mask.dtype, device=text_mask.device)
        hidden, mask = self.vilt.embeddings(
            input_ids=text,
            attention_mask=text_mask,
            token_type_ids=None,
            pixel_values=None,
            pixel_mask=ones,
            inputs_embeds=None,
            image_embeds=patches,
        )
        # Plain arithmetic, because the library's mask builder looks at the data and so prevents vmap.
        lowest = torch.finfo(hidden.dtype).min
        return hidden, (mask[:, None, None, :] == 0).to(hidden.dtype) * lowest

    def patch_embeddings(self, image: Tensor) -> Tensor:
        """Class token and patches with their positions added, (B, 1 + patches, d)."""
        embeddings = self.vilt.embeddings
        convolution = embeddings.patch_embeddings.projection
        if not image.is_floating_point():
            image = image.to(convolution.weight.dtype).mul_(1 / 127.5).sub_(1.0)
        (rows, columns), p = self.grid, self.patch
        # The stride of the convolution is its kernel, so it is one matrix product over the unfolded patches.
        x = image.reshape(-1, 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(-1, rows * columns, 3 * p * p)
        x = F.linear(x, convolution.weight.flatten(1), convolution.bias)
        x = torch.cat([embeddings.cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        return embeddings.dropout(x + self._positions())

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled representation (B, d) of the last block's output."""
        pooler: Any = self.vilt.pooler
        return pooler(self.vilt.layernorm(hidden))

    def attention(self, batch: Batch) -> Tensor:
        """What the model looked at: how strongly the answer depends on each patch, at most 1.

        The squared gradient norm of the answer's log-probability with respect to the patch's embedding
        (Simonyan et al., "Deep Inside Convolutional Networks", ICLR 2014 workshop, section 3, per patch). On
        questions about one thing of the built-in benchmark, :func:`confed.models.vilt.vilt_mini` puts the largest
        value on that thing's patch in 98 cases of 100; attention weights are less telling, as several blocks mix
        the patches before they are read.

        Returns:
            Shape (B, rows, columns), one value per patch; each picture's largest value is 1.
        """
        # Callers may evaluate in inference mode, whose tensors cannot take part in a backward pass: copies.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = {name: tensor.clone() for name, tensor in batch.items()}
            hidden, mask = self.embed(inputs)
            hidden, mask = hidden.detach().requires_grad_(), mask.detach()
            logits = self.classifier(self.pool(self.vilt.encoder(hidden, mask)[0]))
            best = logits.float().log_softmax(1).amax(1).sum()
            (gradient,) = torch.autograd.grad(best, hidden)
        relevance = gradient[:, -self.grid[0] * self.grid[1] :].float().square().sum(-1)
        relevance = relevance / relevance.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return relevance.reshape(-1, *self.grid)

    def _positions(self) -> Tensor:
        positions = self.vilt.embeddings.position_embeddings
        side = math.isqrt(positions.shape[1] - 1)
        if self.grid == (side, side):
            return positions
        plane = positions[:, 1:].transpose(1, 2).reshape(1, -1, side, side)
        plane = F.interpolate(plane, size=self.grid, mode="bilinear", align_corners=True)
        return torch.cat([positions[:, :1], plane.flatten(2).transpose(1, 2)], dim=1)

    def _checked(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        for key in ("image", "text", "text_mask"):
            if key not in batch:
                raise ValueError(f"a ViLT batch needs the key {key!r}, got {', '.join(sorted(batch)) or 'none'}")
        image, text, mask = batch["image"], batch["text"], batch["text_mask"]
        expected = (3, *self.image_size)
        if image.ndim != 4 or tuple(image.shape[1:]) != expected:
            raise ValueError(f"image must have shape (B, {', '.join(map(str, expected))}), got {tuple(image.shape)}")
        longest = self.vilt.config.max_position_embeddings
        if text.ndim != 2 or text.shape[0] != image.shape[0] or text.shape[1] > longest:
            raise ValueError(f"text must have shape ({image.shape[0]}, at most {longest}), got {tuple(text.shape)}")
        if mask.shape != text.shape:
            raise ValueError(f"text_mask must have the shape of text {tuple(text.shape)}, got {tuple(mask.shape)}")
        return image, text, mask
