"""ViLT: one Transformer over words and picture patches, with an answer head.

Kim, Son and Kim, "ViLT: Vision-and-Language Transformer Without Convolution or Region Supervision", ICML
2021. The modules, and hence the checkpoint names, are those of ``transformers``. Its forward pass shuffles the
patches with the global random generator, in evaluation too; here the patches keep their order, which changes no
text output (attention does not depend on the order of the keys) and makes every output a function of the batch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.models.adapters import add_adapters
from confed.models.pretrained import MINI_WEIGHTS, load_into, mini_words
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import ViltConfig, ViltModel

__all__ = ["Trainable", "Vilt", "answer_head", "mini_tokenizer", "vilt_b32", "vilt_mini", "vilt_tiny"]

Trainable = Literal["all", "top", "head", "adapters"]
"""Which parameters learn: all; the last block, the pooler and the head; the head; adapters and the head."""

Factory = TypeVar("Factory", bound=Callable[..., Any])


def answer_head(width: int, answers: int, rng: torch.Generator) -> nn.Sequential:
    """The answer head of ViLT and FedVQA: Linear(d, 2d), LayerNorm, GELU, Linear(2d, C); weights N(0, 0.02).

    The names inside match ``ViltForQuestionAnswering``.
    """
    # skip_init: nn.Linear's own initialisation would draw from the global generator.
    layers = [
        nn.utils.skip_init(nn.Linear, width, 2 * width),
        nn.LayerNorm(2 * width),
        nn.GELU(),
        nn.utils.skip_init(nn.Linear, 2 * width, answers),
    ]
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, 0.02, generator=rng)
                layer.bias.zero_()
    return nn.Sequential(*layers)


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

    def __init__(
        self, body: "ViltModel", answers: int, rng: torch.Generator, image_size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if answers < 1:
            raise ValueError(f"answers must be at least 1, got {answers}")
        config = body.config
        self.vilt = body.train()
        self.classifier = answer_head(config.hidden_size, answers, rng)
        self.patch: int = config.patch_size
        self.image_size: tuple[int, int] = image_size or (config.image_size, config.image_size)
        if self.image_size[0] % self.patch or self.image_size[1] % self.patch:
            raise ValueError(
                f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}"
            )
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
        x = (
            image.reshape(-1, 3, rows, p, columns, p)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(-1, rows * columns, 3 * p * p)
        )
        x = F.linear(x, convolution.weight.flatten(1), convolution.bias)
        x = torch.cat([embeddings.cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        return embeddings.dropout(x + self._positions())

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled representation (B, d) of the last block's output."""
        return self.vilt.pooler(self.vilt.layernorm(hidden))

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor:
        """How much each patch weighed in the answer: attention rollout from the pooled token, at most 1.

        Attention maps are averaged over heads, mixed half and half with the identity for the residual path,
        and multiplied through the blocks (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL
        2020).

        Returns:
            Shape (B, rows, columns), one value per patch; each picture's largest value is 1.
        """
        hidden, mask = self.embed(batch)
        maps = self.vilt.encoder(hidden, mask, output_attentions=True).attentions
        relevance = torch.zeros(hidden.shape[:2], device=hidden.device)
        relevance[:, 0] = 1.0
        for attention in reversed(maps):
            mixed = torch.bmm(relevance[:, None], attention.float().mean(dim=1))[:, 0]
            relevance = 0.5 * relevance + 0.5 * mixed
        patches = relevance[:, -self.grid[0] * self.grid[1] :]
        patches = patches / patches.amax(dim=1, keepdim=True).clamp_min(torch.finfo(patches.dtype).tiny)
        return patches.reshape(-1, *self.grid)

    def _positions(self) -> Tensor:
        positions = self.vilt.embeddings.position_embeddings
        side = self.vilt.config.image_size // self.patch
        if self.grid == (side, side):
            return positions
        plane = positions[:, 1:].transpose(1, 2).reshape(1, -1, side, side)
        plane = F.interpolate(plane, size=self.grid, mode="bilinear", align_corners=True)
        return torch.cat([positions[:, :1], plane.flatten(2).transpose(1, 2)], dim=1)

    def _checked(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        for key in ("image", "text", "text_mask"):
            if key not in batch:
                raise ValueError(
                    f"a ViLT batch needs the key {key!r}, got {', '.join(sorted(batch)) or 'none'}"
                )
        image, text, mask = batch["image"], batch["text"], batch["text_mask"]
        expected = (3, *self.image_size)
        if image.ndim != 4 or tuple(image.shape[1:]) != expected:
            raise ValueError(
                f"image must have shape (B, {', '.join(map(str, expected))}), got {tuple(image.shape)}"
            )
        longest = self.vilt.config.max_position_embeddings
        if text.ndim != 2 or text.shape[0] != image.shape[0] or text.shape[1] > longest:
            raise ValueError(
                f"text must have shape ({image.shape[0]}, at most {longest}), got {tuple(text.shape)}"
            )
        if mask.shape != text.shape:
            raise ValueError(
                f"text_mask must have the shape of text {tuple(text.shape)}, got {tuple(mask.shape)}"
            )
        return image, text, mask


def mini_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mini`: its pre-training's words, then the unseen ones of ``words``.

    So a dataset's known words keep their trained embeddings, and its other words get rows of their own.
    """
    return WordTokenizer((*mini_words(), *words), max_length)


def _bert(
    words: Sequence[str], path: Path | str = "dandelin/vilt-b32-mlm", max_length: int = 40
) -> BertTokenizer:
    """BERT's tokenizer; its vocabulary is fixed, so the dataset's words do not matter."""
    del words
    return bert_tokenizer(path, max_length)


def _reads(tokenizer: Callable[..., Any]) -> Callable[[Factory], Factory]:
    """Decorator: says which tokenizer a model reads, for :func:`confed.models.create_tokenizer`."""

    def mark(factory: Factory) -> Factory:
        factory.tokenizer = tokenizer  # pyright: ignore[reportFunctionMemberAccess]
        return factory

    return mark


@register_model
@_reads(WordTokenizer)
def vilt_tiny(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    image_size: int = 64,
    patch: int = 16,
    max_length: int = 16,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    adapter_reduction: int | None = None,
    adapter_zero_up: bool = False,
    seed: int = 0,
) -> Vilt:
    """A ViLT of a few thousand parameters, for tests.

    Args:
        answers: the answers, or how many there are.
        vocab_size: number of token ids.
        width: features per token, d; the feed-forward blocks have 4 d.
        layers: Transformer blocks.
        heads: attention heads; must divide the width.
        image_size: pixels per side.
        patch: pixels per side of a patch.
        max_length: text positions.
        dropout: dropout probability of every block.
        trainable: which parameters learn.
        adapter_reduction: width over bottleneck of the adapters; default: 8 if they learn, else no adapters.
        adapter_zero_up: adapters start as the identity.
        seed: of the initial values.
    """
    config = _config(
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image_size,
        patch_size=patch,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    rng = torch.Generator().manual_seed(seed)
    model = Vilt(_body(config, seed), _count(answers), rng)
    reduction = _reduction(adapter_reduction, trainable, 8)
    return _prepare(model, trainable, reduction, adapter_zero_up, rng)


@register_model
@_reads(mini_tokenizer)
def vilt_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    pretrained: bool | Path | str = True,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    adapter_reduction: int | None = None,
    adapter_zero_up: bool = False,
    seed: int = 0,
) -> Vilt:
    """A ViLT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.

    3 blocks, d = 64, 4 heads, feed-forward 256, patches of 16. The weights that come with the package were
    made from nothing by :func:`confed.pretrain.pretrain`. Token ids must come from :func:`mini_tokenizer`,
    which puts the pre-trained words first; embeddings of further words and text positions start fresh.

    Args:
        answers: the answers, or how many there are. The pre-trained head is loaded when they are given as
            strings and equal the pre-trained ones in order; otherwise the head starts fresh.
        vocab_size: number of token ids.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``pretrain`` wrote.
        dropout: dropout probability of every block.
        trainable: which parameters learn.
        adapter_reduction: width over bottleneck of the adapters; default: 8 if they learn, else no adapters.
        adapter_zero_up: adapters start as the identity.
        seed: of all fresh values.

    Raises:
        ValueError: the vocabulary is smaller than the pre-trained one, or the weights file is missing.
    """
    config = _config(
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    rng = torch.Generator().manual_seed(seed)
    model = Vilt(_body(config, seed), _count(answers), rng)
    if pretrained:
        file = MINI_WEIGHTS if pretrained is True else Path(pretrained)
        load_into(model, file, answers=None if isinstance(answers, int) else tuple(answers))
    reduction = _reduction(adapter_reduction, trainable, 8)
    return _prepare(model, trainable, reduction, adapter_zero_up, rng)


@register_model
@_reads(_bert)
def vilt_b32(
    answers: Sequence[str] | int,
    vocab_size: int = 30522,
    *,
    pretrained: Path | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    max_length: int = 40,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    adapter_reduction: int | None = None,
    adapter_zero_up: bool = False,
    seed: int = 0,
) -> Vilt:
    """ViLT-B/32 as published: 12 blocks, d = 768, 384 x 384 pixels, 40 BERT tokens.

    Args:
        answers: the answers, or how many there are.
        vocab_size: number of token ids.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"dandelin/vilt-b32-mlm"``;
            its configuration then decides all sizes. None: random weights.
        image_size: pixels per side or (H, W), multiples of 32; position embeddings are interpolated. Default:
            the configuration's.
        max_length: text positions of a model with random weights.
        dropout: dropout probability of every block.
        trainable: which parameters learn.
        adapter_reduction: width over bottleneck of the adapters; default: 16 if they learn, else no adapters.
        adapter_zero_up: adapters start as the identity.
        seed: of all fresh values.

    Raises:
        ValueError: no checkpoint at the given path, or its vocabulary has another size.
    """
    rng = torch.Generator().manual_seed(seed)
    if pretrained is None:
        config = _config(
            vocab_size=vocab_size,
            max_position_embeddings=max_length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        body = _body(config, seed)
    else:
        body = _published(str(pretrained), dropout, seed)
        if body.config.vocab_size != vocab_size:
            raise ValueError(
                f"the checkpoint {str(pretrained)!r} has {body.config.vocab_size} tokens, got {vocab_size}"
            )
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = Vilt(body, _count(answers), rng, size)
    reduction = _reduction(adapter_reduction, trainable, 16)
    return _prepare(model, trainable, reduction, adapter_zero_up, rng)


def _count(answers: Sequence[str] | int) -> int:
    return answers if isinstance(answers, int) else len(answers)


def _reduction(asked: int | None, trainable: Trainable, usual: int) -> int | None:
    return usual if asked is None and trainable == "adapters" else asked


def _config(**options: Any) -> "ViltConfig":
    from transformers import ViltConfig

    return ViltConfig(**options)


def _seeded(seed: int, build: Callable[[], "ViltModel"]) -> "ViltModel":
    # transformers initialises from the global generator; it is seeded inside the fork and restored behind it.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return build()


def _body(config: "ViltConfig", seed: int) -> "ViltModel":
    from transformers import ViltModel

    return _seeded(seed, lambda: ViltModel(config))


def _published(source: str, dropout: float, seed: int) -> "ViltModel":
    from transformers import ViltModel

    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1
    path = Path(source).expanduser()
    if not path.is_dir() and (looks_local or path.exists()):
        raise ValueError(f"pretrained must be a folder with a ViLT checkpoint or a hub name, got {source!r}")
    options: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    where = str(path) if path.is_dir() else source
    try:
        return _seeded(seed, lambda: ViltModel.from_pretrained(where, **options))
    except OSError as error:
        raise ValueError(f"no ViLT checkpoint could be read from {source!r}: {error}") from error


def _prepare(
    model: Vilt,
    trainable: Trainable,
    reduction: int | None,
    zero_up: bool,
    rng: torch.Generator,
) -> Vilt:
    """Adds adapters where asked for and says which parameters learn."""
    if trainable not in get_args(Trainable):
        raise ValueError(f"trainable must be one of {', '.join(get_args(Trainable))}, got {trainable!r}")
    blocks: Any = model.vilt.encoder.layer
    if reduction is not None:
        add_adapters(
            [block.output for block in blocks],
            model.vilt.config.hidden_size,
            reduction,
            zero_up=zero_up,
            rng=rng,
        )
    learning: dict[Trainable, tuple[str, ...]] = {
        "all": ("",),
        "top": (f"vilt.encoder.layer.{len(blocks) - 1}.", "vilt.layernorm.", "vilt.pooler.", "classifier."),
        "head": ("classifier.",),
        "adapters": ("classifier.",),
    }
    for name, parameter in model.named_parameters():
        adapter = trainable == "adapters" and ".adapter." in name
        parameter.requires_grad_(adapter or name.startswith(learning[trainable]))
    return model
