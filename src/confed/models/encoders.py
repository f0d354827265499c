"""Any picture encoder, with or without a text encoder, of ``transformers``: pretrained towers under one small head.

What most people have is no vision-language model but an encoder: DINOv2, ConvNeXt, SigLIP's picture tower, the ResNet
of their hospital, a BERT. The towers are read by name or from a folder; what is frozen of them is computed once per
example.

Fusions: ``linear`` and ``product`` read one vector per picture and text (their element-wise product is the fusion of
VQA's first baselines, Antol et al., ICCV 2015); ``attention`` is a small Transformer over the cells of the picture and
the tokens of the text. Own choice: vectors are normalised to zero mean and unit variance before the fusion, so that one
learning rate fits towers of any scale.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage
from confed.models.finetuning import Finetunable, Places
from confed.models.grid_features import colours_of, plane_of
from confed.models.heads import COUNT, answer_head, count
from confed.models.inputs import needed, picture_fit, picture_side
from confed.models.label_embeddings import tokenizer_of
from confed.models.layers import seeded_linear
from confed.models.passes import Chain, Step
from confed.models.pretrained import published, seeded
from confed.models.tokenizer import FixedLength, WordTokenizer
from confed.models.variants import variant

Fusion = Literal["linear", "product", "attention"]
TINY = "tiny:"
"""Begins the names of towers of a few thousand random parameters, ``tiny:resnet``, for trials without a download."""

_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_PATCHES = {**_BLOCKS, "image_size": 32, "patch_size": 8}
_TINY: Mapping[str, Mapping[str, Any]] = {
    "vit": _PATCHES,
    "dinov2": _PATCHES,
    "siglip_vision_model": _PATCHES,
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 32},
    "bert": _BLOCKS,
    "roberta": _BLOCKS,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
}
_TINY_PIXELS = 32


class Towers(NamedTuple):
    """What the towers make of a batch.

    Attributes:
        picture: one vector per picture (B, d), or its cells (B, n, d) for attention.
        text: one vector per text (B, e), or its tokens (B, L, e) for attention; (B, 0) without a text tower.
        mask: which tokens are no padding, (B, L) for attention, else (B, 0).
    """

    picture: Tensor
    text: Tensor
    mask: Tensor


class Encoders(Chain, Finetunable):
    """A picture tower, a text tower where there is one, a fusion, and an answer head.

    Batches have ``image``, uint8 (B, 3, H, W), and with a text tower ``text`` and ``text_mask``, int64 (B, L). Towers
    stay in evaluation mode where nothing in them learns, and their batch normalisation always does.
    """

    answer_head = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    def __init__(
        self, vision: nn.Module, text: nn.Module | None, fusion: Fusion, answers: int, width: int, layers: int,
        dropout: float, colours: tuple[Sequence[float], Sequence[float]], rng: torch.Generator,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vision, self.text, self.fusion_kind = vision, text, fusion
        self.mean, self.std = (tuple(map(float, values)) for values in colours)  # pyright: ignore
        sizes = [_width(tower) for tower in (vision, text) if tower is not None]
        self.dropout = nn.Dropout(dropout)
        if fusion == "linear":
            self.fusion = nn.ModuleList()
            self.classifier: nn.Module = seeded_linear(sum(sizes), answers, 0.01, rng)
            return
        self.fusion = nn.ModuleList(seeded_linear(size, width, 0.02, rng) for size in sizes)
        if fusion == "attention":
            seed = int(torch.randint(2**31, (1,), generator=rng))
            self.fusion.append(seeded(seed, lambda: _mixer(width, layers, dropout)))
        self.classifier = answer_head(width if fusion == "attention" or text is None else 3 * width, answers, rng)

    def steps(self) -> Sequence[Step]:
        """Towers, which can be kept while they are frozen, and the fusion with the head."""
        texts = ("text", "text_mask") if self.text is not None else ()
        return (
            (Stage("picture encoder", ("image",), ("vision.",)), self._seen),
            (Stage("text encoder", texts, ("text.",)), self._read),
            (Stage("fusion and head", (), ("",)), self._answered),
        )

    def train(self, mode: bool = True) -> "Encoders":
        """Training mode for what learns; frozen towers and all batch normalisation stay in evaluation mode."""
        super().train(mode)
        for tower in (self.vision, self.text):
            if tower is not None and not any(parameter.requires_grad for parameter in tower.parameters()):
                tower.eval()
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def _seen(self, state: Any, batch: Batch) -> Towers:
        (image,) = needed(batch, "Encoders", "image")
        mean, std = (image.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (self.mean, self.std))
        tower: Any = self.vision
        states = tower(pixel_values=(image.float() / 255 - mean) / std).last_hidden_state
        plane = plane_of(states, image.shape[-1] // _patch(tower))
        nothing = plane.new_zeros(len(plane), 0)
        if self.fusion_kind == "attention":
            return Towers(plane.flatten(2).transpose(1, 2).contiguous(), nothing, nothing)
        has_class_token = states.ndim == 3 and states.shape[1] > plane.shape[2] * plane.shape[3]
        return Towers(states[:, 0] if has_class_token else plane.mean((2, 3)), nothing, nothing)

    def _read(self, state: Towers, batch: Batch) -> Towers:
        if self.text is None:
            return state
        text, mask = needed(batch, "Encoders", "text", "text_mask")
        tokens = self.text(input_ids=text, attention_mask=mask).last_hidden_state
        if self.fusion_kind == "attention":
            return state._replace(text=tokens, mask=mask)
        seen = mask.unsqueeze(-1).to(tokens.dtype)
        return state._replace(text=(tokens * seen).sum(1) / seen.sum(1).clamp_min(1.0))

    def _answered(self, state: Towers, batch: Batch) -> Output:
        parts = [_normalised(state.picture), *([_normalised(state.text)] if self.text is not None else [])]
        if self.fusion_kind == "linear":
            features = self.dropout(torch.cat(parts, 1))
        elif self.fusion_kind == "product":
            vectors = [torch.tanh(project(part)) for project, part in zip(self.fusion, parts, strict=True)]
            if len(vectors) > 1:
                vectors.append(vectors[0] * vectors[1])
            features = self.dropout(torch.cat(vectors, 1))
        else:
            tokens = torch.cat([project(part) for project, part in zip(self.fusion, parts, strict=False)], 1)
            cells = state.mask.new_ones(state.picture.shape[:2])
            present = torch.cat([cells, state.mask], 1) if self.text is not None else cells
            mixed = self.fusion[-1](tokens, src_key_padding_mask=present == 0)
            weights = present.unsqueeze(-1).to(mixed.dtype)
            features = (mixed * weights).sum(1) / weights.sum(1)
        return Output(self.classifier(features), features)

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return ("vision.", "text.")

    @cached_property
    def _tops(self) -> tuple[str, ...]:
        """Names of the parameters from the last block of each tower on."""
        tops: list[str] = []
        for tower in ("vision", "text"):
            names = [name for name, _ in self.named_parameters() if name.startswith(f"{tower}.")]
            lists = [
                (n, m) for n, m in self.named_modules() if n.startswith(f"{tower}.") and isinstance(m, nn.ModuleList)
            ]
            if lists:
                blocks, module = max(lists, key=lambda item: len(item[1]))
                first = next(i for i, name in enumerate(names) if name.startswith(f"{blocks}.{len(module) - 1}."))
                tops += names[first:]
        return tuple(tops)

    def places(self) -> Places:
        """What can be finetuned: towers as a whole, from their last block on, or by LoRA on their linear layers."""
        linear = [n for n, m in self.named_modules() if isinstance(m, nn.Linear) and n.startswith(("vision.", "text."))]
        endings = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        return Places(("fusion", "classifier"), top=self._tops, lora=tuple(endings))


def _normalised(vectors: Tensor) -> Tensor:
    """Vectors of zero mean and unit variance each."""
    return F.layer_norm(vectors, vectors.shape[-1:])


def _mixer(width: int, layers: int, dropout: float) -> nn.Module:
    """A small Transformer."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 32), 4 * width, dropout, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _width(tower: Any) -> int:
    """Features per cell or token that a tower gives."""
    config = tower.config
    with torch.no_grad():
        if getattr(tower, "main_input_name", "pixel_values") == "pixel_values":
            pixels = getattr(config, "image_size", None) or _TINY_PIXELS
            states = tower(pixel_values=torch.zeros(1, 3, *((pixels, pixels) if isinstance(pixels, int) else pixels)))
            return states.last_hidden_state.shape[1 if states.last_hidden_state.ndim == 4 else 2]
        return tower(input_ids=torch.ones(1, 2, dtype=torch.int64)).last_hidden_state.shape[2]


def _patch(tower: Any) -> int:
    """Pixels per side of a patch; where there are none, so many that no grid of patches results."""
    patch = getattr(tower.config, "patch_size", None)
    return patch if isinstance(patch, int) else 1 << 30


def load_tower(name: str, reads: Literal["pictures", "texts"], seed: int, vocab_size: int = 0) -> nn.Module:
    """A tower with its published weights, float32, in evaluation mode; of a model of both, the one that reads these."""
    from transformers import AutoConfig, AutoModel

    key, part, option = {
        "pictures": ("pixel_values", "vision_model", "model.vision"),
        "texts": ("input_ids", "text_model", "model.text"),
    }[reads]
    if name.startswith(TINY):
        family = name.removeprefix(TINY)
        if family not in _TINY:
            raise ValueError(f"{option} must be a name, a folder or tiny: and one of {', '.join(_TINY)}, got {name!r}")
        sizes = {**_TINY[family], **({"vocab_size": vocab_size} if reads == "texts" else {})}
        whole: Any = seeded(seed, lambda: AutoModel.from_config(AutoConfig.for_model(family, **sizes)))
    else:
        whole = published(AutoModel, name, seed, dtype=torch.float32)
    tower = getattr(whole, part, whole)
    if getattr(tower, "main_input_name", key) != key:
        raise ValueError(f"{option} must read {reads}, and {name!r} reads {tower.main_input_name}")
    return tower.eval()


def encoder_tokenizer(words: Sequence[str], text: str = "", max_length: int = 32) -> FixedLength:
    """The tokenizer of the text tower; without one, or with a tiny one, of the dataset's words."""
    if not text or text.startswith(TINY):
        return WordTokenizer(words, max_length)
    tokenizer = tokenizer_of(text)
    if not tokenizer.is_fast:
        raise ValueError(f"model.text must have a tokenizer.json, {text!r} has a tokenizer of another kind")
    return FixedLength(tokenizer.backend_tokenizer, max_length, tokenizer.pad_token)


def _pair(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    vision: str = "google/mobilenet_v2_1.0_224",
    text: str = "",
    fusion: Fusion = "linear",
    width: COUNT = 256,
    layers: COUNT = 1,
    max_length: int = 32,
    dropout: float = 0.0,
    seed: int,
    rng: torch.Generator,
) -> Encoders:
    """A picture tower and perhaps a text tower.

    Options:
        vision: picture encoder: a name on the hub, a folder in the layout of ``transformers``, or "tiny:" and a family.
        text: text encoder, likewise; empty for classes and labels, where the question says nothing.
        fusion: "linear", one linear layer on the normalised vectors; "product", which also multiplies the two;
            "attention", a Transformer over cells of the picture and tokens.
        width: features of the fusion.
        layers: of the Transformer of "attention".
        max_length: tokens of a text.
        dropout: dropout probability of the fused features.
    """
    pictures = load_tower(vision, "pictures", seed)
    texts = load_tower(text, "texts", seed, vocab_size) if text else None
    return Encoders(pictures, texts, fusion, count(answers), width, layers, dropout, colours_of(vision), rng)


def _side(model: Mapping[str, Any]) -> int | None:
    return picture_side({"source": model.get("vision", "")})


def _fit(model: Mapping[str, Any]) -> str:
    return picture_fit({"source": model.get("vision", "")})


encoders = variant(
    _pair, "encoders",
    "Any picture encoder, with or without a text encoder, of ``transformers``, under a small head.\n\n"
    "Raises ``ValueError``: a tower cannot be read, or reads something else.",
    "answers vocab_size vision text fusion width layers max_length dropout trainable peft seed",
    spec=ModelSpec(tokenizer=encoder_tokenizer, picture_side=_side, picture_fit=_fit), trainable="head",
)  # fmt: skip
