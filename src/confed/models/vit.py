"""ViT: picture classification with a Transformer over patches, without text.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021. FedDAT
(AAAI 2024, table 1) finetunes it on DomainNet. The modules, and hence the checkpoint names, are those of
``transformers``' ``ViTForImageClassification``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Places
from confed.models.heads import count
from confed.models.inputs import checked_image, patch_tokens
from confed.models.layers import seeded_linear
from confed.models.passes import BlockChain, PatchGrid, Step
from confed.models.pretrained import States, body_of
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import ViTModel


class Vit(PatchGrid, BlockChain):
    """A ViT body with a linear classifier on its class token.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats; text is ignored. Outputs are scores of the
    classes (B, C) and the class token's last state (B, d); states are (B, S, d), then (B, d).
    """

    answer_head = "classifier"
    """Name of the submodule that scores classes: what methods with a head of each client's own keep private."""
    embedding_names = ("vit.embeddings.", "prompts.")
    blocks_name = "vit.layers"

    def __init__(
        self, body: "ViTModel", answers: int, rng: torch.Generator, image_size: int | tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        config: Any = body.config
        self.vit = body.train()
        self.classifier = seeded_linear(config.hidden_size, answers, 0.02, rng)
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)
        self.set_grid(config, image_size)

    def places(self) -> Places:
        """What can be finetuned; adapters are after the residual sum of every feed-forward block."""
        width: int = self.vit.config.hidden_size
        return Places(
            heads=("classifier",),
            top=(f"vit.layers.{len(self.blocks) - 1}.", "vit.layernorm."),
            hosts=[Host(layer, width) for layer in self.blocks],
            lora=("attention.q_proj", "attention.v_proj"),
            ia3=("attention.k_proj", "attention.v_proj"),
            ia3_inputs=("mlp.fc2",),
            prompts={"image": width},
        )

    def steps(self) -> Sequence[Step]:
        """Embeddings, blocks, normalisation, head."""
        return (
            (Stage("embeddings", ("image",), self.embedding_names), lambda _, batch: self.embed(batch)),
            *self.block_steps(),
            (Stage("normalisation", (), ("vit.layernorm.",)), lambda state, _: self.vit.layernorm(state[:, 0])),
            (Stage("head", (), ("",)), lambda state, _: Output(self.classifier(state), state)),
        )

    def advance(self, block: Any, state: Tensor) -> Tensor:
        return block(state, None)

    def embed(self, batch: Batch) -> Tensor:
        """Input of the first block, (B, 1 + prompt tokens + patches, d)."""
        image, embeddings = checked_image(batch, self.image_size, type(self).__name__), self.vit.embeddings
        x = patch_tokens(image, embeddings.patch_embeddings.projection, embeddings.cls_token)
        x = embeddings.dropout(x + embeddings.interpolate_pos_encoding(x, *self.image_size))
        if "image" in self.prompts:
            prompt = self.prompts["image"]()
            x = torch.cat([x[:, :1], prompt.to(x.dtype).expand(len(x), -1, -1), x[:, 1:]], dim=1)
        return x

    def pretraining_states(self, batch: Batch) -> States:
        """Scores of the classes; see :class:`confed.models.pretrained.States`."""
        return States(loss_logits=self(batch).logits)


def _mini(answers: Sequence[str] | int, *, dropout: float, seed: int, rng: torch.Generator) -> Vit:
    from transformers import ViTConfig, ViTModel

    body = body_of(
        ViTModel, ViTConfig, None, seed, dropout, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, image_size=64, patch_size=8,
    )  # fmt: skip
    return Vit(body, count(answers), rng)


def _b16(
    answers: Sequence[str] | int,
    *,
    pretrained: Path | str | None,
    image_size: int | tuple[int, int] | None,
    dropout: float,
    seed: int,
    rng: torch.Generator,
) -> Vit:
    """ViT-B/16.

    Options:
        pretrained: a folder written by ``save_pretrained`` or a hub name such as
            ``"google/vit-base-patch16-224-in21k"``; its configuration then decides all sizes, and its own classifier
            is left out. None: random weights.
        image_size: pixels per side or (H, W), multiples of 16; position embeddings are interpolated. Default: the
            configuration's.
    """
    from transformers import ViTConfig, ViTModel

    return Vit(body_of(ViTModel, ViTConfig, pretrained, seed, dropout), count(answers), rng, image_size)


# What is asked of a dataset's pictures is not read, but batches have it.
SPEC = ModelSpec(tokenizer=WordTokenizer)
DESCRIBED = {
    "max_length": "of the questions, which are ignored.", "trainable": "which parameters learn.",
    "peft": "how, where a few parameters are added.",
}  # fmt: skip

vit_mini = variant(
    _mini, "vit_mini",
    "A ViT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.\n\n"
    "4 blocks, d = 64, 4 heads, feed-forward 256, patches of 8. The weights that come with the package know the things"
    "\nof the built-in benchmark in none of the styles of :mod:`confed.datasets.six_styles`.\n\n"
    "Raises ``ValueError``: the weights file is missing, or an option is out of range.",
    "answers vocab_size max_length pretrained dropout trainable peft seed",
    spec=SPEC, described=DESCRIBED, reduction=8,
)  # fmt: skip
vit_b16 = variant(
    _b16, "vit_b16",
    "ViT-B/16 as published: 12 blocks, d = 768, 224 x 224 pixels.\n\n"
    "Raises ``ValueError``: no checkpoint at the given path, or an option is out of range.",
    "answers vocab_size pretrained image_size max_length dropout trainable peft seed",
    spec=SPEC, described=DESCRIBED, vocab_size=0, pretrained=None,
)  # fmt: skip
