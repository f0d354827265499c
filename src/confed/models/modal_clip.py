"""CLIP image encoder as a picture tokenizer, of which only the last block is trained.

Cao, Sun and Yu (2025) read pictures with CLIP ViT-L/14 (Radford et al., "Learning Transferable Visual Models From
Natural Language Supervision", ICML 2021) and freeze all but its last layer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.protocols import Batch
from confed.federation.stages import KeptStates, Stage, run_stages
from confed.models.modal_segments import Segmenter, Segments
from confed.models.pretrained import published, seeded

if TYPE_CHECKING:
    from transformers import CLIPVisionModel


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class ClipPatches(Segmenter):
    """The states of all patches, 256 of 1,024 features in ViT-L/14, without class token.

    "Features of width 1,024" are the states after the last block, not CLIP's joint space (768); they go through the
    encoder's last normalisation. All is frozen but the last block and that normalisation. uint8 pictures of any size
    are resized (bicubic) and normalised as CLIP's; floats must have its size and are taken as they are.
    """

    frozen_features: KeptStates | None = None

    def __init__(self, encoder: "CLIPVisionModel") -> None:
        config: Any = encoder.config
        self.size: int = config.image_size
        super().__init__(config.hidden_size, (config.image_size // config.patch_size) ** 2)
        self.clip: Any = getattr(encoder, "vision_model", encoder).train()
        for name, parameter in self.clip.named_parameters():
            last = f"encoder.layers.{config.num_hidden_layers - 1}."
            parameter.requires_grad_(name.startswith((last, "post_layernorm.")))

    def forward(self, batch: Batch) -> Segments:
        """The states of the patches of ``image``; see :class:`confed.models.modal_segments.Segmenter`."""
        return run_stages(self, batch, 2)

    @property
    def stages(self) -> Sequence[Stage]:
        """CLIP below its last block, and the last block."""
        below = tuple(f"clip.encoder.layers.{i}." for i in range(len(self.clip.encoder.layers) - 1))
        first = Stage("CLIP below its last block", ("image",), ("clip.embeddings.", "clip.pre_layrnorm.", *below))
        return first, Stage("last block", (), ("",))

    @property
    def stage_variant(self) -> str:
        """None but one."""
        return ""

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`; the state after the first stage is (B, 1 + P, d)."""
        blocks = self.clip.encoder.layers
        if first == 0 and last > 0:
            with torch.no_grad():
                state = self.clip.pre_layrnorm(self.clip.embeddings(self.pixels(batch)))
                for block in blocks[:-1]:
                    state = block(state, None)
        return Segments(self.clip.post_layernorm(blocks[-1](state, None)[:, 1:])) if last == 2 else state

    def pixels(self, batch: Batch) -> Tensor:
        """What CLIP reads of ``image``, float (B, 3, S, S)."""
        image = batch["image"] if "image" in batch else torch.empty(0)
        side = "H, W" if not image.is_floating_point() else f"{self.size}, {self.size}"
        if (
            image.ndim != 4
            or image.shape[1] != 3
            or (image.is_floating_point() and set(image.shape[2:]) != {self.size})
        ):
            raise ValueError(f"image must have shape (B, 3, {side}), got {tuple(image.shape)}")
        if image.is_floating_point():
            return image
        x = image.float() / 255
        if set(image.shape[2:]) != {self.size}:
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
        return (x - mean) / std


def clip_encoder(pretrained: Path | str | None, seed: int) -> "CLIPVisionModel":
    """A CLIP image encoder.

    Raises ``ValueError``: there is no such checkpoint, or it is one of another model.
    """
    from transformers import CLIPVisionConfig, CLIPVisionModel

    if pretrained is not None:
        return published(CLIPVisionModel, pretrained, seed)
    large = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=224,
        patch_size=14,
        projection_dim=768,
    )
    return seeded(seed, lambda: CLIPVisionModel(large))
