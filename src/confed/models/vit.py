"""ViT: picture classification with a Transformer over patches, without text.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021. FedDAT
(AAAI 2024, table 1) finetunes it on DomainNet. The modules, and hence the checkpoint names, are those of
``transformers``' ``ViTForImageClassification``.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import USUAL, Finetunable, Finetuning, Places, Trainable, finetune
from confed.models.heads import count
from confed.models.inputs import checked_image, patch_tokens
from confed.models.layers import seeded_linear
from confed.models.pretrained import States, load_into, published, seeded, weights_file
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import ViTModel


class Vit(Finetunable):
    """A ViT body with a linear classifier on its class token.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats; text is ignored.
    """

    answer_head = "classifier"
    """Name of the submodule that scores classes: what methods with a head of each client's own keep private."""

    def __init__(
        self, body: "ViTModel", answers: int, rng: torch.Generator, image_size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if answers < 1:
            raise ValueError(f"answers must be at least 1, got {answers}")
        config: Any = body.config
        self.vit = body.train()
        self.classifier = seeded_linear(config.hidden_size, answers, 0.02, rng)
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)
        self.patch: int = config.patch_size
        self.image_size: tuple[int, int] = image_size or (config.image_size, config.image_size)
        if self.image_size[0] % self.patch or self.image_size[1] % self.patch:
            raise ValueError(f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}")
        self.grid = (self.image_size[0] // self.patch, self.image_size[1] // self.patch)

    def places(self, reduction: int = 16) -> Places:
        """What can be finetuned; adapters are after the residual sum of every feed-forward block."""
        layers: Any = self.vit.layers
        width: int = self.vit.config.hidden_size
        return Places(
            heads=("classifier",),
            top=(f"vit.layers.{len(layers) - 1}.", "vit.layernorm."),
            hosts=[Host(layer, width) for layer in layers],
            reduction=reduction,
            lora=("attention.q_proj", "attention.v_proj"),
            ia3=("attention.k_proj", "attention.v_proj"),
            ia3_inputs=("mlp.fc2",),
            prompts={"image": width},
        )

    def forward(self, batch: Batch) -> Output:
        """Scores of the classes (B, C) and the class token's last state (B, d)."""
        return run_stages(self, batch, len(self._layers) + 4)

    @property
    def stages(self) -> Sequence[Stage]:
        """Embeddings, blocks, normalisation, head; the first block ends where its adapter begins, which is a stage."""
        names = self.adapters.names
        first = Stage("block 1 without adapter" if names else "block 1", (), ("vit.layers.0.",), without=names)
        blocks = [Stage(f"block {i + 1}", (), (f"vit.layers.{i}.",)) for i in range(1, len(self._layers))]
        return (
            Stage("embeddings", ("image",), ("vit.embeddings.", "prompts.")), first,
            Stage("adapter of block 1", (), ("vit.layers.0.",)),
            *blocks, Stage("normalisation", (), ("vit.layernorm.",)), Stage("head", (), ("",)),
        )  # fmt: skip

    stage_variant = ""  # there is one kind of pass

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`; states are (B, S, d), then (B, d), then an ``Output``."""
        layers = self._layers
        for number in range(first, last):
            if number == 0:
                state = self.embed(batch)
            elif number == 1:
                with self.adapters.using({}) if self.adapters.names else nullcontext():
                    state = layers[0](state, None)
            elif number == 2:
                state = self.adapters.finish(0, state) if self.adapters.names else state
            elif number < len(layers) + 2:
                state = layers[number - 2](state, None)
            elif number == len(layers) + 2:
                state = self.vit.layernorm(state[:, 0])
            else:
                state = Output(self.classifier(state), state)
        return state

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return ("vit.embeddings.", "prompts.", *(("vit.layers.0.",) if self.adapters.names else ()))

    def prefix(self, batch: Batch) -> Tensor:
        """What comes before the first adapter, (B, S, d): the embeddings, and the first block up to its residual sum.

        Without adapters, the embeddings. ``suffix(prefix(batch))`` is the forward pass.
        """
        return run_stages(self, batch, self._before)

    def suffix(self, state: Tensor) -> Output:
        """The rest of the pass, from the first adapter on, with the adapters that are switched on."""
        return self.forward_stages(state, self._before, len(self._layers) + 4, {})

    @property
    def _before(self) -> int:
        """Number of stages before the first adapter."""
        return 2 if self.adapters.names else 1

    @property
    def _layers(self) -> Any:
        return self.vit.layers

    @staticmethod
    def repeat(state: Tensor, n: int) -> Tensor:
        """The whole batch n times, one after the other: for n blends of adapters in one pass."""
        return state.repeat(n, 1, 1)

    def embed(self, batch: Batch) -> Tensor:
        """Input of the first block, (B, 1 + prompt tokens + patches, d).

        Positions are the class token, the prompt's tokens if there are any, then the patches row by row.
        """
        image, embeddings = checked_image(batch, self.image_size, type(self).__name__), self.vit.embeddings
        x = patch_tokens(image, embeddings.patch_embeddings.projection, embeddings.cls_token, self.grid)
        x = embeddings.dropout(x + embeddings.interpolate_pos_encoding(x, *self.image_size))
        if "image" in self.prompts:
            prompt = self.prompts["image"]()
            x = torch.cat([x[:, :1], prompt.to(x.dtype).expand(len(x), -1, -1), x[:, 1:]], dim=1)
        return x

    def pretraining_states(self, batch: Batch) -> States:
        """Scores of the classes; see :class:`confed.models.pretrained.States`."""
        return States(loss_logits=self(batch).logits)


@register_model
def vit_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    pretrained: bool | Path | str = True,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Vit:
    """A ViT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.

    4 blocks, d = 64, 4 heads, feed-forward 256, patches of 8. The weights that come with the package know the things
    of the built-in benchmark in none of the styles of :mod:`confed.datasets.six_styles`.

    Raises ``ValueError``: the weights file is missing, or an option is out of range.

    Args:
        answers: the classes, or how many there are. The pretrained head is loaded when they are given as strings and
            equal the pretrained ones in order; otherwise the head starts fresh.
        vocab_size: ignored, as no words are read.
        max_length: of the questions, which are ignored.
        pretrained: load the packaged weights, or those of a file that ``confed pretrain`` wrote.
        dropout: dropout probability of every block.
        trainable: which parameters learn.
        peft: how, where a few parameters are added.
        seed: of all fresh values.
    """
    from transformers import ViTConfig, ViTModel

    del vocab_size, max_length
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    body = seeded(seed, lambda: ViTModel(config, add_pooling_layer=False))
    rng = torch.Generator().manual_seed(seed)
    model = Vit(body, count(answers), rng)
    if pretrained:
        file = weights_file("vit_mini", pretrained)
        load_into(model, file, None if isinstance(answers, int) else tuple(answers))
    finetune(model, trainable, peft, model.places(8), rng)
    return model


@register_model
def vit_b16(
    answers: Sequence[str] | int,
    vocab_size: int = 0,
    *,
    pretrained: Path | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    max_length: int = 16,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Vit:
    """ViT-B/16 as published: 12 blocks, d = 768, 224 x 224 pixels.

    Raises ``ValueError``: no checkpoint at the given path, or an option is out of range.

    Args:
        answers: the classes, or how many there are.
        vocab_size: ignored, as no words are read.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as
            ``"google/vit-base-patch16-224-in21k"``; its configuration then decides all sizes, and its own classifier
            is left out. None: random weights.
        image_size: pixels per side or (H, W), multiples of 16; position embeddings are interpolated. Default: the
            configuration's.
        max_length: of the questions, which are ignored.
        dropout: dropout probability of every block.
        trainable: which parameters learn.
        peft: how, where a few parameters are added.
        seed: of all fresh values.
    """
    from transformers import ViTConfig, ViTModel

    del vocab_size, max_length
    rng = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        body = seeded(seed, lambda: ViTModel(ViTConfig(**options), add_pooling_layer=False))
    else:
        body = published(ViTModel, pretrained, seed, add_pooling_layer=False, **options)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = Vit(body, count(answers), rng, size)
    finetune(model, trainable, peft, model.places(16), rng)
    return model


# What is asked of a dataset's pictures is not read, but batches have it.
vit_mini.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
vit_b16.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
