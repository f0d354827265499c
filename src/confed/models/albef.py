"""ALBEF in two sizes, each with its weights, its tokenizer and a choice of what learns.

The model itself is :class:`confed.models.albef.Albef`.

Li et al., "Align before Fuse: Vision and Language Representation Learning with Momentum Distillation", NeurIPS 2021,
sections 3.1 and 4 (visual question answering). The parts are those of ``transformers``: ViT, BERT's embeddings, and
BLIP's BERT-like layers, which alone may look at another sequence without being part of a decoder. Momentum
distillation is left out; FedDAT trains ALBEF without it as well.

The published ones are those of its code: a ViT in the style of ``timm`` (``visual_encoder``), and BERT with
cross-attention (``text_encoder``, in a visual question answering checkpoint also ``text_decoder``). A pre-training
checkpoint has no decoder: ALBEF starts it from the question encoder's layers that look at the picture, its embeddings
and its language-model head, and so does :func:`rename_albef`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.specs import ModelSpec
from confed.models.answer_ranking import GenerativeAnswerer
from confed.models.caption_tokenizer import AnswerTokenizer, words_of
from confed.models.pretrained import check_fit, describe, mini_words, packaged, read_tensors, weights_file
from confed.models.tokenizer import WordTokenizer, bert_tokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import ViTModel

# ALBEF: a picture encoder -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlbefConfig:
    """Sizes of an ALBEF; the defaults are the published ones."""

    vocab_size: int = 30522  # number of token ids, V
    width: int = 768  # features per token, d; feed-forward blocks have 4 d
    heads: int = 12
    image_size: int = 384
    patch: int = 16  # pixels per side of a patch
    visual_layers: int = 12  # blocks of the picture encoder
    text_layers: int = 12  # blocks of the question encoder
    fusion: int = 6  # its first block that looks at the picture
    decoder_layers: int = 6  # blocks of the decoder, at most as many as look at the picture
    positions: int = 512
    dropout: float = 0.0  # dropout probability of every block
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # of each colour channel
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)  # of each colour channel

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads ({self.heads}), got {self.width}")
        if self.image_size % self.patch:
            raise ValueError(f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}")
        if not 1 <= self.decoder_layers <= self.text_layers - self.fusion:
            raise ValueError(
                f"decoder_layers must lie in 1..{self.text_layers - self.fusion}, the question encoder's layers that "
                f"look at the picture, got {self.decoder_layers}"
            )


class Albef(GenerativeAnswerer):
    """ALBEF for visual question answering; see :class:`confed.models.answer_ranking.GenerativeAnswerer`.

    Fresh weights are N(0, 0.02), as BERT's, where d = 768; narrower models get ``0.02 sqrt(768 / d)``, so that their
    layers add as much to their residual sums and learn as early. Biases are zero. The decoder starts with the values
    of the question encoder's last layers and of its embeddings.
    """

    embedding_names = ("visual_encoder.embeddings.",)
    blocks_name, norm_name = "visual_encoder.layers", "visual_encoder.layernorm"
    lora = ("attention.q_proj", "attention.v_proj", "attention.self.query", "attention.self.value")
    ia3 = ("attention.k_proj", "attention.v_proj", "attention.self.key", "attention.self.value")
    visual_encoder: "ViTModel"

    def __init__(self, config: AlbefConfig, rng: torch.Generator, k: int = 128) -> None:
        super().__init__(config.image_size, config.mean, config.std, k)
        self.config = config
        # Constructors draw from the global generator before _initialise does it from ours.
        with torch.random.fork_rng(devices=[]):
            self.visual_encoder = _vision(config)
            self.text_encoder = _Bert(config, [i >= config.fusion for i in range(config.text_layers)])
            self.text_decoder = _Decoder(config)
        _initialise(self, 0.02 * math.sqrt(768 / config.width), rng)
        self.text_decoder.bert.embeddings.load_state_dict(self.text_encoder.embeddings.state_dict())
        layers: Any = self.text_encoder.encoder.layer
        last = layers[-self.config.decoder_layers :]
        self.text_decoder.bert.encoder.layer.load_state_dict(last.state_dict())
        self.train()


class _Bert(nn.Module):
    """BERT's embeddings and layers of which some look at another sequence; named as in ``transformers``."""

    def __init__(self, config: AlbefConfig, looking: list[bool]) -> None:
        super().__init__()
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertEmbeddings
        from transformers.models.blip.configuration_blip import BlipTextConfig
        from transformers.models.blip.modeling_blip_text import BlipTextLayer

        sizes: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.width,
            "num_attention_heads": config.heads,
            "intermediate_size": 4 * config.width,
            "max_position_embeddings": config.positions,
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": config.dropout,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        self.embeddings = BertEmbeddings(BertConfig(**sizes))
        sizes |= {"encoder_hidden_size": config.width, "sep_token_id": None}
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(
            BlipTextLayer(BlipTextConfig(**sizes, is_decoder=looks), i) for i, looks in enumerate(looking)
        )


class _Decoder(nn.Module):
    """A language model: :class:`_Bert`, and a head whose output matrix is that of the word embeddings."""

    def __init__(self, config: AlbefConfig) -> None:
        super().__init__()
        from transformers.models.blip.configuration_blip import BlipTextConfig
        from transformers.models.blip.modeling_blip_text import BlipTextPredictionHeadTransform

        self.bert = _Bert(config, [True] * config.decoder_layers)
        self.cls = nn.Module()
        self.cls.predictions = nn.Module()
        self.cls.predictions.transform = BlipTextPredictionHeadTransform(
            BlipTextConfig(hidden_size=config.width, hidden_act="gelu", layer_norm_eps=1e-12)
        )
        self.cls.predictions.bias = nn.Parameter(torch.zeros(config.vocab_size))


def _vision(config: AlbefConfig) -> "ViTModel":
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=config.width,
            num_hidden_layers=config.visual_layers,
            num_attention_heads=config.heads,
            intermediate_size=4 * config.width,
            image_size=config.image_size,
            patch_size=config.patch,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            layer_norm_eps=1e-6,
        ),
        add_pooling_layer=False,
    )


def _initialise(model: nn.Module, std: float, rng: torch.Generator) -> None:
    """Matrices, embeddings and tokens from N(0, std), biases 0, normalisations 1 and 0."""
    norms: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for p in module.parameters():
                norms.add(id(p))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif id(parameter) in norms:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=rng)


# From the tensor names of ALBEF's published checkpoints to ours -----------------------------------------------

_UNUSED = re.compile(
    r"(visual_encoder|text_encoder|text_decoder|vision_proj|text_proj)_m\..*"  # momentum copies
    r"|(vision_proj|text_proj|itm_head|combined_proj)\..*|temp|(image|text|idx)_queue|queue_ptr"  # pre-training's heads
    r"|text_(en|de)coder\.(bert\.)?pooler\..*"  # which nothing reads
    r"|text_(en|de)coder\.(bert\.)?cls\.predictions\.decoder\.(weight|bias)"  # the embeddings' and the head's own
    r"|.*\.position_ids"
)
_OURS = (
    (r"visual_encoder\.cls_token", r"visual_encoder.embeddings.cls_token"),
    (r"visual_encoder\.pos_embed", r"visual_encoder.embeddings.position_embeddings"),
    (r"visual_encoder\.patch_embed\.proj\.(\w+)", r"visual_encoder.embeddings.patch_embeddings.projection.\1"),
    (r"visual_encoder\.norm\.(\w+)", r"visual_encoder.layernorm.\1"),
    (r"visual_encoder\.blocks\.(\d+)\.norm1\.(\w+)", r"visual_encoder.layers.\1.layernorm_before.\2"),
    (r"visual_encoder\.blocks\.(\d+)\.norm2\.(\w+)", r"visual_encoder.layers.\1.layernorm_after.\2"),
    (r"visual_encoder\.blocks\.(\d+)\.attn\.proj\.(\w+)", r"visual_encoder.layers.\1.attention.o_proj.\2"),
    (r"visual_encoder\.blocks\.(\d+)\.mlp\.(fc[12])\.(\w+)", r"visual_encoder.layers.\1.mlp.\2.\3"),
    (r"text_encoder\.(?:bert\.)?((?:embeddings|encoder\.layer)\..*)", r"text_encoder.\1"),
    (r"text_decoder\.(?:bert\.)?((?:embeddings|encoder\.layer)\..*)", r"text_decoder.bert.\1"),
    (r"text_(?:en|de)coder\.(?:bert\.)?(cls\.predictions\.(?:transform\..*|bias))", r"text_decoder.\1"),
)
"""Names of published tensors -> ours, but for the fused matrices of the picture encoder's attention."""
_QKV = re.compile(r"visual_encoder\.blocks\.(\d+)\.attn\.qkv\.(weight|bias)")
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.*)")


def rename_albef(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published checkpoint's tensors under our names; momentum copies and pre-training's other heads are left out."""
    renamed: dict[str, Tensor] = {}
    unknown: list[str] = []
    for full, tensor in state.items():
        name = full.removeprefix("module.")
        if _UNUSED.fullmatch(name):
            continue
        ours = _renamed(name, tensor)
        renamed |= ours
        unknown += [] if ours else [full]
    if unknown:
        more = f" (and {len(unknown) - 3} more)" if len(unknown) > 3 else ""
        raise ValueError(f"no ALBEF has tensors called {', '.join(unknown[:3])}{more}")
    if not any(name.startswith("text_decoder.bert.") for name in renamed):
        renamed |= _decoder_of(renamed)
    return renamed


def sizes_of(tensors: Mapping[str, Tensor], heads: int | None = None) -> AlbefConfig:
    embeddings = "visual_encoder.embeddings"
    needed = (
        f"{embeddings}.patch_embeddings.projection.weight",
        f"{embeddings}.position_embeddings",
        "text_encoder.embeddings.word_embeddings.weight",
        "text_encoder.embeddings.position_embeddings.weight",
    )
    for name in needed:
        if name not in tensors:
            raise ValueError(f"the checkpoint has no tensor for {name}")
    patches, positions, words, places = (tensors[name] for name in needed)
    width, patch = patches.shape[0], patches.shape[-1]
    layers = {
        encoder_name: _count(tensors, f"{encoder_name}.")
        for encoder_name in ("visual_encoder.layers", "text_encoder.encoder.layer", "text_decoder.bert.encoder.layer")
    }
    return AlbefConfig(
        vocab_size=words.shape[0],
        width=width,
        heads=heads or max(1, width // 64),
        image_size=math.isqrt(positions.shape[1] - 1) * patch,
        patch=patch,
        visual_layers=layers["visual_encoder.layers"],
        text_layers=layers["text_encoder.encoder.layer"],
        fusion=_fusion(tensors),
        decoder_layers=layers["text_decoder.bert.encoder.layer"],
        positions=places.shape[0],
    )


def _renamed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A published tensor under our name, or names; nothing where it has none."""
    if fused := _QKV.fullmatch(name):
        layer, kind = fused.groups()
        matrices = zip("qkv", tensor.chunk(3), strict=True)
        return {f"visual_encoder.layers.{layer}.attention.{letter}_proj.{kind}": value for letter, value in matrices}
    for pattern, ours in _OURS:
        if match := re.fullmatch(pattern, name):
            return {match.expand(ours): tensor}
    return {}


def _decoder_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder that ALBEF starts from its question encoder."""
    fusion, decoder = _fusion(tensors), dict[str, Tensor]()
    for full, tensor in tensors.items():
        encoder_name, _, name = full.partition(".")
        layer = _LAYER.fullmatch(name)
        if encoder_name != "text_encoder" or (layer is not None and int(layer[1]) < fusion):
            continue
        decoder["text_decoder.bert." + (f"encoder.layer.{int(layer[1]) - fusion}.{layer[2]}" if layer else name)] = (
            tensor
        )
    return decoder


def _fusion(tensors: Mapping[str, Tensor]) -> int:
    looking = [m[1] for n in tensors if (m := re.match(r"text_encoder\.encoder\.layer\.(\d+)\.crossattention\.", n))]
    if not looking:
        raise ValueError("the checkpoint's text_encoder has no layer with cross-attention; it is no ALBEF")
    return min(map(int, looking))


def _count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Layers whose names begin so; 0 if none does."""
    return 1 + max((int(n[len(prefix) :].partition(".")[0]) for n in tensors if n.startswith(prefix)), default=-1)


# ALBEF in two sizes, each with its weights --------------------------------------------------------------------


MINI = AlbefConfig(
    width=64, heads=4, image_size=64, visual_layers=2, text_layers=3, fusion=1, decoder_layers=2, positions=16,
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
)  # fmt: skip


def mini_answer_tokenizer(
    words: Sequence[str], answers: Sequence[str] = (), max_length: int = 16, *, model: str = "albef_mini"
) -> AnswerTokenizer:
    """The tokenizer of a mini that writes answers: its pre-training's words, then new ones of questions and answers."""
    trained_words = tuple(describe(weights_file(model))["words"]) if packaged(model) else mini_words()
    return AnswerTokenizer(WordTokenizer((*trained_words, *words, *words_of(answers)), max_length))


def _bert(
    words: Sequence[str],
    answers: Sequence[str] = (),
    vocabulary: Path | str = "bert-base-uncased",
    max_length: int = 40,
) -> AnswerTokenizer:
    """BERT's tokenizer, questions without closing token as ALBEF reads them; its vocabulary is fixed."""
    return AnswerTokenizer(bert_tokenizer(vocabulary, max_length), closing=False)


def _mini(vocab_size: int, *, max_length: int, k: int = 128, dropout: float, rng: torch.Generator) -> Albef:
    return Albef(dataclasses.replace(MINI, vocab_size=vocab_size, positions=max_length, dropout=dropout), rng, k)


def _full(
    vocab_size: int,
    *,
    pretrained: Path | str | None,
    vocabulary: Path | str = "bert-base-uncased",
    image_size: int = 384,
    k: int = 128,
    dropout: float,
    rng: torch.Generator,
) -> Albef:
    """ALBEF of the published size.

    Options:
        pretrained: the .safetensors file that ``confed weights convert albef`` wrote; the ``.config.json`` beside it
            decides all sizes but the picture's. None: random weights.
        vocabulary: BERT's: ``vocab.txt``, a folder, or a hub name; read by the tokenizer.
        image_size: pixels per side, a multiple of 16; position embeddings are interpolated.
    """
    if pretrained is None:
        return Albef(AlbefConfig(vocab_size=vocab_size, image_size=image_size, dropout=dropout), rng, k)
    return _published(Path(pretrained), vocab_size, image_size, dropout, rng, k)


DESCRIBED = {
    "answers": "not used: answers are texts, the task says which there are.",
    "k": "candidate answers that are compared by their whole text; the others are left out after the first token.",
    "trainable": "which parameters learn beside the language-model head.",
}

albef_mini = variant(
    _mini, "albef_mini",
    "An ALBEF for 64 x 64 pictures with half a million parameters, small enough to learn on one CPU core.\n\n"
    "d = 64, 4 heads, patches of 16; 2 visual blocks, 3 for the question of which the last 2 look at the picture, 2 in"
    "\nthe decoder. Token ids must come from :func:`mini_answer_tokenizer`. Needs ``task.name = \"generation\"``.\n\n"
    "Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.",
    "answers vocab_size max_length pretrained k dropout trainable peft seed",
    spec=ModelSpec(tokenizer=mini_answer_tokenizer), described=DESCRIBED, reduction=8,
)  # fmt: skip
albef = variant(
    _full, "albef",
    "ALBEF as published: ViT-B/16, BERT-base with fusion from its layer 6 on, 6 decoder layers.\n\n"
    "Needs ``task.name = \"generation\"``. FedDAT compares k = 64 of 100 answers.\n\n"
    "Raises ``ValueError``: no checkpoint at the given path, or its vocabulary has another size.",
    "answers vocab_size pretrained vocabulary image_size max_length k dropout trainable peft seed",
    spec=ModelSpec(tokenizer=_bert),
    described={**DESCRIBED, "max_length": "text positions of a question; read by the tokenizer."},
    vocab_size=30522, pretrained=None, max_length=40,
)  # fmt: skip


def _published(file: Path, vocab_size: int, image_size: int, dropout: float, rng: torch.Generator, k: int) -> Albef:
    beside = file.with_name(f"{file.stem}.config.json")
    for needed in (file, beside):
        if not needed.is_file():
            raise ValueError(f"expected a file that `confed weights convert albef` wrote at {needed}, found none")
    sizes = json.loads(beside.read_text(encoding="utf-8"))
    if sizes["vocab_size"] != vocab_size:
        raise ValueError(f"the checkpoint {file} has {sizes['vocab_size']} tokens, got {vocab_size}")
    sizes |= {name: tuple(sizes[name]) for name in ("mean", "std")}
    config = AlbefConfig(**{**sizes, "image_size": image_size, "dropout": dropout})
    model, tensors = Albef(config, rng, k), read_tensors(file)
    name = "visual_encoder.embeddings.position_embeddings"
    tensors[name] = resized_positions(tensors[name], image_size // config.patch)
    fit(model, tensors, str(file))
    return model


def resized_positions(positions: Tensor, side: int) -> Tensor:
    """Position embeddings (1, 1 + P, d) for ``side`` x ``side`` patches: bicubic, as in ALBEF's code."""
    before = math.isqrt(positions.shape[1] - 1)
    if before == side:
        return positions
    plane = positions[:, 1:].transpose(1, 2).reshape(1, -1, before, before)
    plane = F.interpolate(plane, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], plane.flatten(2).transpose(1, 2)], dim=1)


def fit(model: torch.nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Fills a model with tensors of exactly its names and shapes; one on the meta device is only compared with them."""
    state: Mapping[str, Any] = model.state_dict()
    check_fit(state, tensors, state, f"{source} is not a checkpoint of this {type(model).__name__}")
    if not any(value.is_meta for value in state.values()):
        model.load_state_dict(dict(tensors))
