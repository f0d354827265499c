"""Dual encoders of ``transformers`` as classifiers: pictures against class names, learned context, or a linear head.

Radford et al., "Learning transferable visual models from natural language supervision", ICML 2021; Zhou et al., CoOp,
IJCV 2022. The library's own towers compute everything. Its text models take no embeddings in place of tokens, so
learned context goes through a hook on their embedding module, which replaces the rows of some positions: positions,
masks and pooling are the library's.

Lu et al., "FedCLIP: Fast generalization and personalization for CLIP in federated learning", IEEE Data Engineering
Bulletin 2023 (arXiv 2302.13485): attention over features. Gao et al., "CLIP-Adapter: Better vision-language models with
feature adapters", IJCV 2024 (arXiv 2110.04544): a bottleneck, mixed with the features as they were. Both learn these
layers alone, federated by whichever method.

Nothing of ``transformers`` is imported before a model is made.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.actions import among_offered
from confed.federation.families.prompts import classes_of, scores_of
from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.encoders import embed_names, load_tower, mean_name
from confed.models.finetuning import Places, Trainable
from confed.models.hf.prompts import read_processor
from confed.models.hf.tiny import CLIP_IMAGES, PATCH, PIXELS, SIGLIP_IMAGES, SQUARE, byte_tokens, images_of
from confed.models.inputs import needed, picture_fit, picture_side, processor_settings
from confed.models.label_embeddings import tokenizer_of
from confed.models.layers import seeded_linear
from confed.models.passes import SplitChain, Step
from confed.models.pretrained import place_of, read_whole, reading, seeded
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant


def plain_names(answers: Sequence[str] | int) -> tuple[str, ...]:
    """Class names as they stand in prompts: underscores are spaces."""
    if isinstance(answers, int):
        raise ValueError(f"the model 'clip' reads the names of classes, got only their number, {answers}")
    names = tuple(" ".join(name.replace("_", " ").split()) for name in answers)
    if not names or not all(names):
        raise ValueError(f"class names must not be empty, got {', '.join(map(repr, names)) or 'none'}")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"class names must differ in prompts, where underscores are spaces, got {doubles[0]!r} twice")
    return names


class ClassTexts:
    """Prompts of C classes as token ids."""

    def __init__(self, tokenizer: Any, names: Sequence[str], length: int, whole: bool) -> None:
        self.names, self._tokenizer, self._length, self._whole = tuple(names), tokenizer, length, whole
        first = self._rows(["x"])[0][0]
        begins = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
        self.start = int(first in begins)  # position of the first token behind what begins every text

    def words(self, text: str) -> list[int]:
        """Tokens of some words alone, without what begins and ends a text."""
        return self._rows([text])[0][self.start : -1]

    def plain(self, template: str) -> tuple[Tensor, Tensor]:
        """Ids and mask of handwritten prompts, int64 (C, L)."""
        if template.count("{}") != 1:
            raise ValueError(f"a template must have {{}} once, where the class name goes, got {template!r}")
        return self._padded([template.format(name) for name in self.names], 0)

    def with_room(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of "name.", with places for context behind what begins a text, int64 (C, L)."""
        return self._padded([f"{name}." for name in self.names], tokens)

    def _padded(self, texts: Sequence[str], room: int) -> tuple[Tensor, Tensor]:
        rows = self._rows(texts)
        rows = [[*row[: self.start], *[row[self.start]] * room, *row[self.start :]] for row in rows]
        longest = max(map(len, rows))
        if longest > self._length:
            name, row = max(zip(self.names, rows, strict=True), key=lambda pair: len(pair[1]))
            raise ValueError(
                f"the text encoder reads at most {self._length} tokens, and the prompt of class {name!r} has "
                f"{len(row)}, {room} of them learned: shorten the name, model.template or model.context"
            )
        width = self._length if self._whole else longest
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return ids, mask

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(row) for row in self._tokenizer(list(texts))["input_ids"]]


# Pictures as a dual encoder's processor prepares them ---------------------------------------------------------

KEPT = 256 * 2**20  # bytes of prepared pictures or of features that are kept; beyond these the oldest are made again


class PictureInputs:
    """What a processor makes of pictures, or what a function makes of that, kept up to a number of bytes."""

    def __init__(self, image_processor: Any, kept: int = KEPT) -> None:
        self._images, self._budget, self._bytes = image_processor, kept, 0
        self._kept: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()

    @property
    def bytes_kept(self) -> int:
        return self._bytes

    @property
    def settings(self) -> str:
        """Digest of those of the processor."""
        return processor_settings(self._images)

    def prepared(self, images: Tensor) -> dict[str, Tensor]:
        """Inputs of the library's picture tower, each (B, ...)."""
        rows = list(images.cpu().permute(0, 2, 3, 1).contiguous().numpy())
        made: Mapping[str, Tensor] = self._images(rows, return_tensors="pt")
        return {name: value.to(images.device) for name, value in made.items()}

    def kept(self, images: Tensor, kind: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function makes of each picture, (B, ...), computed once per picture."""
        pixels = images.cpu().contiguous().numpy()
        keys = [blake2b(p.tobytes() + bytes(f"{p.shape} {kind}", "ascii"), digest_size=16).digest() for p in pixels]
        missing = list(dict.fromkeys(i for i, key in enumerate(keys) if key not in self._kept))
        fresh: dict[bytes, Tensor] = {}
        if missing:
            with torch.no_grad():
                made = make(images[torch.tensor(missing, device=images.device)]).detach()
            fresh = {keys[i]: row.clone() for i, row in zip(missing, made, strict=True)}
        rows = [fresh[key] if key in fresh else self._kept[key][0] for key in keys]
        for key, row in fresh.items():
            self._keep(key, row)
        return torch.stack(rows).to(images.device)

    def _keep(self, key: bytes, row: Tensor) -> None:
        if row.nbytes > self._budget:
            return
        self._kept[key] = (row,)
        self._bytes += row.nbytes
        while self._bytes > self._budget:
            self._bytes -= self._kept.popitem(last=False)[1][0].nbytes


# Adapters on a dual encoder's picture features ----------------------------------------------------------------


class AttentionAdapter(nn.Module):
    """FedCLIP's attention: softmax(W_2 tanh(W_1 f)) times f, scaled to unit length.

    Features are multiplied by sqrt(D) in front of W_1: the paper's have not been scaled to unit length there.
    """

    def __init__(self, features: int, rng: torch.Generator) -> None:
        super().__init__()
        self.hidden = seeded_linear(features, features, features**-0.5, rng)
        self.output = seeded_linear(features, features, features**-0.5, rng)

    def forward(self, features: Tensor) -> Tensor:
        """Features of unit length, (B, D), of such features."""
        scaled = features * features.shape[1] ** 0.5
        weights = self.output(self.hidden(scaled).tanh()).softmax(dim=1)
        return F.normalize(weights * features, dim=1)


class BottleneckAdapter(nn.Module):
    """CLIP-Adapter: a share of relu(W_2 relu(W_1 f)) and the rest of f, scaled to unit length."""

    def __init__(self, features: int, reduction: int, share: float, rng: torch.Generator) -> None:
        super().__init__()
        width = max(1, features // reduction)
        self.down = seeded_linear(features, width, features**-0.5, rng)
        self.up = seeded_linear(width, features, width**-0.5, rng)
        self.down.register_parameter("bias", None)
        self.up.register_parameter("bias", None)
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        """Features of unit length, (B, D), of such features."""
        adapted = self.up(self.down(features).relu()).relu()
        return F.normalize(self.share * adapted + (1 - self.share) * features, dim=1)


# Dual encoder of transformers as a classifier: pictures against class names -----------------------------------

Head = Literal["text", "linear", "attention", "adapter"]
"""What scores classes: their texts, a linear layer on the picture's features, or texts behind FedCLIP's attention or
CLIP-Adapter's bottleneck on the picture's features."""

REDUCTION, SHARE = 4, 0.2  # CLIP-Adapter's


class Context(nn.Module):
    """Learned vectors in front of class names."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors.detach().clone())


class DualEncoder(SplitChain):
    """A CLIP, SigLIP, SigLIP 2, MetaCLIP 2 or AltCLIP over C class names.

    Batches have ``image``, uint8 (B, 3, H, W) of any size: the processor resizes them. Texts of batches are ignored.
    """

    picture_names: ClassVar[tuple[str, ...]] = ("body.vision_model.", "body.visual_projection.")  # of tensors, begin so

    def __init__(
        self,
        body: Any,
        processor: Any,
        names: Sequence[str],
        *,
        templates: Sequence[str],
        context: str | int | None,
        head: Head,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        self.body = body.train()
        self.adapters = AdapterBank((), 1)
        self.prompts = nn.ModuleDict()
        self._whole = "siglip" in body.config.model_type
        self._pictures = PictureInputs(processor.image_processor)
        length = _length(body.config.text_config, processor.tokenizer)
        self._texts = ClassTexts(processor.tokenizer, names, length, self._whole)
        self._inserted: Tensor | None = None
        self._embedding.register_forward_hook(self._insert)
        self._plain = [self._texts.plain(template) for template in templates]
        self._handwritten: Tensor | None = None
        self._latest: tuple[Tensor, Tensor, Tensor] | None = None
        self.context = None if context is None else Context(self._start(context, rng))
        tokens = 0 if self.context is None else len(self.context.vectors)
        self._ids, self._mask = self._texts.with_room(tokens)
        self.classifier: nn.Linear | None = None
        self.answer_head: str | None = None
        if head == "linear":
            self.classifier = nn.Linear(self.feature_shape[0], len(names))
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)
            self.answer_head = "classifier"
        self.picture_adapter: nn.Module | None = None
        if head == "attention":
            self.picture_adapter = AttentionAdapter(self.feature_shape[0], rng)
        elif head == "adapter":
            self.picture_adapter = BottleneckAdapter(self.feature_shape[0], REDUCTION, SHARE, rng)

    # What there is ------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The class names as prompts have them."""
        return self._texts.names

    @property
    def _embedding(self) -> nn.Module:
        # No attribute: a module with two names would have its weights trained and sent twice.
        return self.body.text_model.get_input_embeddings()

    @property
    def class_count(self) -> int:
        return len(self.names)

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Numbers of features D and of classes C."""
        projection = getattr(self.body, "text_projection", None)  # SigLIP's text model has a head of its own
        width = projection.out_features if projection is not None else self.body.text_model.head.out_features
        return width, self.class_count

    @property
    def context_shape(self) -> tuple[int, int]:
        width: int = self.body.config.text_config.hidden_size
        return (0 if self.context is None else len(self.context.vectors)), width

    def places(self) -> Places:
        """What can be finetuned: adapters are in the picture tower, LoRA in the attention of both."""
        vision: Any = self.body.vision_model
        layers = vision.encoder.layers
        width: int = self.body.config.vision_config.hidden_size
        heads = tuple(n for n in ("context", "classifier", "picture_adapter") if getattr(self, n) is not None)
        return Places(
            heads=heads,
            top=(f"body.vision_model.encoder.layers.{len(layers) - 1}.", "body.vision_model.post_layernorm."),
            hosts=[Host(layer, width) for layer in layers],
            reduction=8,
            lora=("self_attn.q_proj", "self_attn.v_proj"),
            ia3=("self_attn.k_proj", "self_attn.v_proj"),
            ia3_inputs=("mlp.fc2",),
            has_prompt=self.context is not None,
        )

    # The pass -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Output:
        """Scores of the classes (B, C) and the picture's features, unit length, (B, D)."""
        return self._scored(self.image_features(batch), batch)

    def steps(self) -> Sequence[Step]:
        """Features of the pictures (B, D), and what scores them."""
        first = Stage("features of pictures", ("image",), self.picture_names)
        return (
            (first, lambda _, batch: self._seen(batch, "features", lambda images: self._image(images)[0])),
            (Stage("scores", (), ("",)), self._scored),
        )

    @property
    def before(self) -> int:
        """None: adapters are in the picture tower."""
        return 0

    @property
    def stage_variant(self) -> str:
        """The settings by which inputs are made of pictures."""
        return self._pictures.settings

    def _scored(self, features: Tensor, batch: Batch) -> Output:
        """One text pass for all classes that the batch is offered, or the linear head."""
        if self.classifier is not None:
            return Output(among_offered(self.classifier(features) * self.body.logit_scale.exp(), batch), features)
        if self.picture_adapter is not None:
            features = self.picture_adapter(features)
        classes = classes_of(batch, self.class_count).to(features.device)
        if self.context is not None:
            texts = self._remembered(self.context.vectors, classes)
        else:
            texts = self.handwritten_features(classes)
        scores = self.similarity_scores(features @ texts.T)
        return Output(scores_of(scores, classes, batch, self.class_count), features)

    def similarity_scores(self, similarities: Tensor) -> Tensor:
        scores = similarities * self.body.logit_scale.exp()
        return scores + self.body.logit_bias if self._whole else scores

    # Pictures -----------------------------------------------------------------------------------------------

    def image_features(self, batch: Batch) -> Tensor:
        """f(x), unit length, (B, D): computed once per picture where nothing in the picture tower learns."""
        return run_stages(self, batch, 1)

    def patch_features(self, batch: Batch) -> Tensor:
        """Features of patches in the common space, unit length, (B, V, D); kept as :meth:`image_features`."""
        if self._whole:
            raise ValueError(
                f"features of patches are in the common space for CLIP and its kind, and {type(self.body).__name__} "
                "pools them by attention: set model.source to a CLIP"
            )
        return self._seen(batch, "patches", lambda images: self._image(images)[1])

    def prepared_pictures(self, images: Tensor) -> Tensor:
        """See :class:`confed.federation.specs.PreparesPictures`."""
        return self._pictures.prepared(images)["pixel_values"]

    def _seen(self, batch: Batch, kind: str, make: Any) -> Tensor:
        (images,) = needed(batch, "DualEncoder", "image")
        if images.is_floating_point():  # as :meth:`prepared_pictures` makes them
            return make(images)
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
            raise ValueError(f"image must be uint8 of shape (B, 3, H, W), got {images.dtype} {tuple(images.shape)}")
        if not self._vision_is_frozen:
            return make(images)
        if not len(images):
            return make(images.new_zeros(1, 3, 8, 8))[:0]
        device = next(self.parameters()).device
        return self._pictures.kept(images, kind, make).to(device)

    @property
    def _vision_is_frozen(self) -> bool:
        return not any(p.requires_grad for n, p in self.named_parameters() if n.startswith(self.picture_names))

    def _image(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled features (B, D), and those of patches (B, V, D) of CLIP and its kind, all of unit length."""
        inputs = {"pixel_values": images} if images.is_floating_point() else self._pictures.prepared(images)
        device = next(self.parameters()).device
        was = self.body.training
        if self._vision_is_frozen:
            self.body.eval()
        features = self.body.get_image_features(**{name: value.to(device) for name, value in inputs.items()})
        self.body.train(was)
        pooled = F.normalize(features.pooler_output, dim=-1)
        if self._whole:
            return pooled, pooled.unsqueeze(1)
        states = self.body.vision_model.post_layernorm(features.last_hidden_state[:, 1:])
        return pooled, F.normalize(self.body.visual_projection(states), dim=-1)

    # Texts --------------------------------------------------------------------------------------------------

    def class_features(self, context: Tensor, classes: Tensor) -> Tensor:
        ids, mask = self._ids[classes.cpu()], self._mask[classes.cpu()]
        with self._inserting(context if context.ndim == 3 else context.expand(len(ids), -1, -1)):
            return self._encoded(ids, mask)

    def handwritten_features(self, classes: Tensor) -> Tensor:
        """See :class:`confed.federation.families.prompts.ClassifiesByTexts`."""
        frozen = not any(p.requires_grad for n, p in self.named_parameters() if n.startswith("body.text_"))
        if not frozen:
            return self._ensemble(classes.cpu())
        if self._handwritten is None:
            with torch.no_grad():
                self._handwritten = self._ensemble(torch.arange(self.class_count))
        self._handwritten = self._handwritten.to(classes.device)
        return self._handwritten[classes]

    def initial_context(self) -> Tensor:
        if self.context is None:
            raise ValueError("the model learns no context: set model.trainable to 'prompt'")
        return self.context.vectors.detach().clone()

    def _remembered(self, context: Tensor, classes: Tensor) -> Tensor:
        """Class features; without gradients the latest ones, where context and classes are the same again."""
        if torch.is_grad_enabled():
            return self.class_features(context, classes)
        latest = self._latest
        same = latest is not None and torch.equal(latest[0], context) and torch.equal(latest[1], classes)
        if latest is None or not same:
            latest = (context.detach().clone(), classes.clone(), self.class_features(context, classes))
            self._latest = latest
        return latest[2]

    def _ensemble(self, classes: Tensor) -> Tensor:
        each = [self._encoded(ids[classes], mask[classes]) for ids, mask in self._plain]
        return each[0] if len(each) == 1 else F.normalize(torch.stack(each).mean(0), dim=-1)

    def _encoded(self, ids: Tensor, mask: Tensor) -> Tensor:
        device = next(self.parameters()).device
        options = {} if self._whole else {"attention_mask": mask.to(device)}
        was = self.body.text_model.training
        self.body.text_model.eval()
        features = self.body.get_text_features(input_ids=ids.to(device), **options)
        self.body.text_model.train(was)
        return F.normalize(features.pooler_output, dim=-1)

    @contextmanager
    def _inserting(self, context: Tensor) -> Iterator[None]:
        self._inserted = context
        try:
            yield
        finally:
            self._inserted = None

    def _insert(self, _module: nn.Module, _inputs: Any, rows: Tensor) -> Tensor | None:
        """Token embeddings (K, L, d) with the context in its places."""
        if self._inserted is None:
            return None
        begin, length = self._texts.start, self._inserted.shape[1]
        return torch.cat([rows[:, :begin], self._inserted.to(rows.dtype), rows[:, begin + length :]], dim=1)

    def _start(self, context: str | int, rng: torch.Generator) -> Tensor:
        """Initial context: embeddings of words, or N(0, 0.02) as in CoOp."""
        weight = self._embedding.get_parameter("weight").detach()
        if isinstance(context, int):
            if context < 1:
                raise ValueError(f"model.context must be words, or at least 1 vector, got {context}")
            return 0.02 * torch.randn(context, weight.shape[1], generator=rng)
        ids = self._texts.words(context)
        if not ids or not context.strip():
            raise ValueError(f"model.context must be words, or a number of vectors, got {context!r}")
        return weight[torch.tensor(ids)]


class NamedPair(nn.Module):
    """A classifier of pictures and a text encoder that have never met, with a dual encoder's interface.

    A picture's features are the embeddings of its likeliest classes' names, by their probabilities (ConSE, Norouzi et
    al., ICLR 2014), a text's the mean of its tokens' last states.
    """

    def __init__(self, classifier: Any, text_model: Any, class_names: Tensor) -> None:
        super().__init__()
        self.vision_model, self.text_model = classifier, text_model
        self.register_buffer("class_names", class_names)
        self.logit_scale = nn.Parameter(torch.tensor(20.0).log())
        self.config = SimpleNamespace(model_type="pair", text_config=text_model.config)

    def get_image_features(self, pixel_values: Tensor) -> Any:
        """Features (B, e) of prepared pictures."""
        names: Any = self.class_names
        return SimpleNamespace(pooler_output=mean_name(self.vision_model(pixel_values=pixel_values).logits, names))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Features (C, e) of texts."""
        states = self.text_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return SimpleNamespace(pooler_output=(states * mask).sum(1) / mask.sum(1))


class PairedEncoder(DualEncoder):
    """A classifier of pictures and a text encoder over C class names: what learns is the context or a head."""

    picture_names = ("body.vision_model.", "body.class_names")

    @property
    def feature_shape(self) -> tuple[int, int]:
        return self.body.class_names.shape[1], self.class_count

    def places(self) -> Places:
        heads = tuple(n for n in ("context", "classifier", "picture_adapter") if getattr(self, n) is not None)
        return Places(heads=heads, has_prompt=self.context is not None)

    def patch_features(self, batch: Batch) -> Tensor:
        raise ValueError("features of patches are in the common space for CLIP and its kind: leave model.text empty")

    def steps(self) -> Sequence[Step]:
        (first, encode), scores = super().steps()
        return (replace(first, alone=self._vision_is_frozen), encode), scores

    def _image(self, images: Tensor) -> tuple[Tensor, Tensor]:
        inputs = images if images.is_floating_point() else self.prepared_pictures(images)
        alone = self._vision_is_frozen and inputs.device.type == "cpu"  # faster, and the same bits in any batch
        was = self.body.training
        self.body.eval()
        each = [self.body.get_image_features(rows).pooler_output for rows in inputs.split(1 if alone else len(inputs))]
        self.body.train(was)
        pooled = F.normalize(torch.cat(each), dim=-1)
        return pooled, pooled.unsqueeze(1)


def _length(config: Any, tokenizer: Any) -> int:
    """Most tokens of a text; RoBERTa's positions begin behind the padding's."""
    offset = config.pad_token_id + 1 if "altclip" in config.model_type else 0
    return min(config.max_position_embeddings - offset, tokenizer.model_max_length)


# Small dual encoders of five families, with random weights: two layers of width 32, pictures of 32 x 32 pixels

CLIP_OPTIONS = {"size": {"shortest_edge": PIXELS}, "crop_size": SQUARE}
LENGTH = 64
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
VOCABULARY = 256 + len(SPECIAL)
COMMON: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT: Mapping[str, Any] = {
    **COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
VISION: Mapping[str, Any] = {**COMMON, "image_size": PIXELS, "patch_size": PATCH}


@dataclass(frozen=True)
class Family:
    """What a family's small model has beyond the common sizes."""

    images: str = CLIP_IMAGES  # module and class of what prepares its pictures, within ``transformers.models``
    image_options: Mapping[str, Any] = field(default_factory=lambda: CLIP_OPTIONS)  # keywords of that
    begins: bool = True  # whether texts begin with a token of their own
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of its configuration
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the text tower's
    vision: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the picture tower's


def tiny_encoder(family: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A family's small model with random weights, and its processor."""
    from transformers import AutoConfig, AutoModel

    if family not in FAMILIES:
        raise ValueError(f"model.source = 'tiny:{family}': there are {', '.join(f'tiny:{name}' for name in FAMILIES)}")
    made = FAMILIES[family]
    config = AutoConfig.for_model(
        family, text_config={**TEXT, **made.text}, vision_config={**VISION, **made.vision}, **made.config
    )
    images = images_of(made.images, made.image_options)
    processor = SimpleNamespace(image_processor=images, tokenizer=_tokenizer(made.begins))
    return seeded(seed, lambda: AutoModel.from_config(config)), processor


def _tokenizer(begins: bool) -> Any:
    """Bytes as tokens behind the special ones."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    made = byte_tokens(SPECIAL, prefix_space=True)
    ends = [(name, SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    form = "<bos> $A <eos>" if begins else "$A <eos>"
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>" if begins else None,
        eos_token="<eos>", padding_side="right", model_max_length=LENGTH,
    )  # fmt: skip


_SIGLIP_TEXT = {"bos_token_id": 1, "projection_size": 32}
FAMILIES: Mapping[str, Family] = {
    "clip": Family(config={"projection_dim": 24}),
    "siglip": Family(SIGLIP_IMAGES, {"size": SQUARE}, begins=False, text=_SIGLIP_TEXT),
    "siglip2": Family(
        "siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil",
        {"patch_size": PATCH, "max_num_patches": (PIXELS // PATCH) ** 2},
        begins=False, text=_SIGLIP_TEXT, vision={"num_patches": (PIXELS // PATCH) ** 2},
    ),
    "metaclip_2": Family(config={"projection_dim": 24}),
    "altclip": Family(
        config={"projection_dim": 24}, text={"project_dim": 32, "max_position_embeddings": LENGTH + 2},
    ),
}  # fmt: skip
"""Family (``model_type`` of ``transformers``) -> what its small model needs."""


# Dual encoders: from the hub, a folder, or small random ones ------------------------------------------------

TINY = "tiny:"
SOURCES = "a hub name owner/name, a folder, clip_mini, or tiny:FAMILY"


def _clip(
    answers: Sequence[str] | int,
    *,
    source: str = "clip_mini",
    text: str = "",
    revision: str = "",
    template: str = "a photo of a {}.",
    templates: tuple[str, ...] = (),
    context: str | int = "a photo of a",
    head: Head = "text",
    trainable: Trainable = "prompt",
    seed: int,
    rng: torch.Generator,
) -> DualEncoder:
    """A dual encoder.

    Options:
        answers: the class names.
        vocab_size: not used: the vocabulary is the model's.
        source: a hub name ("openai/clip-vit-base-patch16"), a folder written by ``save_pretrained`` with its processor,
            "clip_mini", which is in the package, or "tiny:FAMILY" for a small one with random weights, such as
            "tiny:siglip".
        text: a sentence encoder, a folder or a hub name, where ``source`` is a classifier of pictures whose classes
            have names: a picture is what its likeliest classes are called (ConSE), and is compared with the answers by
            their names; what learns is context or a head.
        revision: commit, tag or branch of the hub name.
        template: handwritten prompt, ``{}`` for the class name.
        templates: several of them, whose features are averaged, in place of ``template``.
        context: with ``trainable = "prompt"``: the words that learned vectors start from, or how many random ones.
        head: "text" scores classes by their prompts, "linear" by a linear layer on the picture's features; "attention"
            (FedCLIP) and "adapter" (CLIP-Adapter) put layers on the picture's features, which texts then score. Layers
            always learn.
        trainable: "prompt" learns context vectors and nothing else (CoOp); "head" nothing but the head's layers, if
            there are any; "lora", "ia3", "adapters", "bias", "top" and "all" a part of the towers, under handwritten
            prompts.
        max_length: of the questions, which are ignored.
    """
    learned = trainable == "prompt"
    if learned and head != "text":
        raise ValueError(f"model.trainable = 'prompt' has no effect with model.head = {head!r}: set it to 'head'")
    if text:
        body, processor, kind = *_pair(source, text, seed), PairedEncoder
    else:
        body, processor, kind = _body(source, revision, seed), _processor(source, revision), DualEncoder
    return kind(
        body, processor, plain_names(answers),
        templates=templates or (template,), context=context if learned else None, head=head, rng=rng,
    )  # fmt: skip


# What is asked of a dataset's pictures is not read, but batches have it.
clip = variant(
    _clip, "clip",
    "CLIP, SigLIP, SigLIP 2, MetaCLIP 2 or AltCLIP of ``transformers``; the classes are the answers of the data.",
    "answers vocab_size source text revision template templates context head trainable peft max_length seed",
    spec=ModelSpec(tokenizer=WordTokenizer, picture_side=picture_side, picture_fit=picture_fit), vocab_size=0,
)  # fmt: skip


def _pair(source: str, text: str, seed: int) -> tuple[NamedPair, Any]:
    """The two encoders as one body, and what prepares their inputs."""
    from transformers import AutoImageProcessor

    classifier = load_tower(source, "pictures", seed, classifies=True)
    with reading(source, "processor of pictures"):
        images = AutoImageProcessor.from_pretrained(place_of(source, SOURCES), use_fast=False, trust_remote_code=False)
    pair = NamedPair(classifier, load_tower(text, "texts", seed), embed_names(classifier, text))
    return pair, SimpleNamespace(image_processor=images, tokenizer=tokenizer_of(text))


@lru_cache(maxsize=2)
def _processor(source: str, revision: str) -> Any:
    if source.startswith(TINY):
        return tiny_encoder(source.removeprefix(TINY))[1]
    return read_processor(place_of(source, SOURCES), source, revision)


def _body(source: str, revision: str, seed: int) -> Any:
    """The library's model in fp32."""
    if source.startswith(TINY):
        return tiny_encoder(source.removeprefix(TINY), seed)[0]
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"revision": revision} if revision else {}
    with reading(source, "dual encoder"):
        kind = AutoConfig.from_pretrained(place_of(source, SOURCES), trust_remote_code=False, **options).model_type
        if kind not in FAMILIES:
            raise ValueError(f"it is of the kind {kind!r}, and dual encoders are {', '.join(FAMILIES)}")
    return read_whole(AutoModel, source, SOURCES, "dual encoder", dtype=torch.float32, **options)
