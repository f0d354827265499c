"""ViLT in five variants, each with weights, tokenizer and finetuning options.

The model itself is :class:`confed.models.vilt.Vilt`.

Kim, Son and Kim, "ViLT: Vision-and-Language Transformer Without Convolution or Region Supervision", ICML
2021. The modules, and hence the checkpoint names, are those of ``transformers``. Its forward pass shuffles
the patches with the global random generator, in evaluation too; here the patches keep their order, which
changes no text output (attention does not depend on the order of the keys) and makes every output a function
of the batch.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import USUAL, Finetunable, Finetuning, Places, Trainable, finetune
from confed.models.heads import Heads, answer_head, check_heads, count, score, task_head, views
from confed.models.inputs import additive_mask, checked_image, patch_tokens
from confed.models.pretrained import States, load_into, mini_words, published, seeded, weights_file
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.models.variants import variant
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import ViltModel

# ViLT network: one Transformer over words and picture patches -------------------------------------------------


INPUTS = ("image", "image2", "text", "text_mask", "choices", "choices_mask")  # keys of a batch that the model reads


class Prefix(NamedTuple):
    """A batch after the part of the model that lies before the first adapter."""

    hidden: Tensor  # tokens, (B * views, S, d), the views of an example next to each other
    mask: Tensor  # additive attention mask, (B * views, 1, 1, S)
    views: int  # passes per example: 2 for pairs of pictures, K for K choices


class Vilt(Heads, Finetunable):
    """A ViLT body with an answer head, and heads for further tasks.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats, and ``text`` and ``text_mask``,
    int64 (B, L) with L up to the number of text positions. For the head "nlvr2" also ``image2``: each picture is
    read with the text in a separate pass, with its own token type. For the head "choice" instead of ``text``
    ``choices`` and ``choices_mask``, (B, K, L).
    """

    def __init__(
        self, body: "ViltModel", answers: int, rng: torch.Generator, image_size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if answers < 1:
            raise ValueError(f"answers must be at least 1, got {answers}")
        config: Any = body.config
        self.vilt = body.train()
        self.classifier = answer_head(config.hidden_size, answers, rng)
        self.heads = nn.ModuleDict()
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)
        self.patch: int = config.patch_size
        self.image_size: tuple[int, int] = image_size or (config.image_size, config.image_size)
        if self.image_size[0] % self.patch or self.image_size[1] % self.patch:
            raise ValueError(f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}")
        self.grid = (self.image_size[0] // self.patch, self.image_size[1] // self.patch)

    def add_heads(self, heads: Sequence[str], rng: torch.Generator) -> None:
        """Adds heads for further tasks; to be called when the body has its pretrained weights."""
        check_heads(heads)
        for head in heads:
            self.heads[head] = task_head(head, self.vilt.config.hidden_size, rng)
        if "nlvr2" in heads:
            _second_picture(self.vilt)

    def forward(self, batch: Batch) -> Output:
        """Scores of the answers, classes or choices (B, C), and the pooled representation (B, d).

        Of examples with several passes the representation is the mean over them.
        """
        return run_stages(self, batch, len(self._blocks) + 4)

    # The stages of a pass -----------------------------------------------------------------------------------

    @property
    def stages(self) -> Sequence[Stage]:
        """Embeddings, blocks, pooling, head; the first block ends where its adapter begins, which is a stage."""
        names, start = self.adapters.names, "vilt.encoder.layer."
        first = Stage("block 1 without adapter" if names else "block 1", (), (f"{start}0.",), without=names)
        blocks = [Stage(f"block {i + 1}", (), (f"{start}{i}.",)) for i in range(1, len(self._blocks))]
        return (
            Stage("embeddings", INPUTS, ("vilt.embeddings.", "prompts.")), first,
            Stage("adapter of block 1", (), (f"{start}0.",)), *blocks,
            Stage("pooling", (), ("vilt.layernorm.", "vilt.pooler.")), Stage("head", (), ("",)),
        )  # fmt: skip

    @property
    def stage_variant(self) -> str:
        return self.selected

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`; states are :class:`Prefix`, the last one an ``Output``."""
        blocks = self._blocks
        for number in range(first, last):
            if number == 0:
                count = views(self.selected, batch)  # checks the batch
                state = Prefix(*self._inputs(batch), count)
            elif number == 1:
                with self.adapters.using({}) if self.adapters.names else nullcontext():
                    state = state._replace(hidden=blocks[0](state.hidden, state.mask)[0])
            elif number == 2:
                if self.adapters.names:
                    state = state._replace(hidden=self.adapters.finish(self._first_place, state.hidden))
            elif number < len(blocks) + 2:
                state = state._replace(hidden=blocks[number - 2](state.hidden, state.mask)[0])
            elif number == len(blocks) + 2:
                state = state._replace(hidden=self.pool(state.hidden))
            else:
                head = self.get_submodule(self.heads_of_tasks[self.selected])
                state = score(head, self.selected, state.hidden, state.views)
        return state

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return ("vilt.embeddings.", "prompts.", *(("vilt.encoder.layer.0.",) if self.adapters.names else ()))

    def prefix(self, batch: Batch) -> Prefix:
        """What comes before the first adapter: the embeddings, and the first block up to its residual sum.

        Without adapters, the embeddings. ``suffix(prefix(batch))`` is the forward pass.
        """
        return run_stages(self, batch, self._before)

    def suffix(self, state: Prefix) -> Output:
        """The rest of the pass, from the first adapter on, with the adapters that are switched on."""
        return self.forward_stages(state, self._before, len(self._blocks) + 4, {})

    @property
    def _first_place(self) -> int:
        """Number of the place for adapters in the first block."""
        return 0

    @property
    def _before(self) -> int:
        """Number of stages before the first adapter."""
        return 2 if self.adapters.names else 1

    @staticmethod
    def repeat(state: Prefix, n: int) -> Prefix:
        """The whole batch n times, one after the other: for n blends of adapters in one pass."""
        return Prefix(state.hidden.repeat(n, 1, 1), state.mask.repeat(n, 1, 1, 1), state.views)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input of the first block, (B, S, d), and its additive attention mask; of choices, (B K, S, d).

        Positions are the first text token, the text prompt, the other text tokens, the picture's class token, the
        visual prompt, then the patches row by row.
        """
        image, text, text_mask = self._checked(batch)
        patches = self.patch_embeddings(image)
        if text.ndim == 3:
            patches = patches.repeat_interleave(text.shape[1], 0)
            text, text_mask = text.flatten(0, 1), text_mask.flatten(0, 1)
        return self._joined(patches, text, text_mask, 1)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._embed_pair(batch) if self.selected == "nlvr2" else self.embed(batch)

    @staticmethod
    def _through(blocks: Any, hidden: Tensor, mask: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden, mask)[0]
        return hidden

    def _score(self, hidden: Tensor, count: int) -> Output:
        head = self.get_submodule(self.heads_of_tasks[self.selected])
        return score(head, self.selected, self.pool(hidden), count)

    def _embed_pair(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As :meth:`embed`, (2 B, S, d): each example's first picture, then its second one."""
        texts = {key: batch[key] for key in ("text", "text_mask") if key in batch}
        inputs = [self._checked({**texts, "image": batch[key]}) for key in ("image", "image2")]
        parts = [
            self._joined(self.patch_embeddings(image), text, mask, 1 + i)
            for i, (image, text, mask) in enumerate(inputs)
        ]
        hidden, masks = zip(*parts, strict=True)
        return torch.stack(hidden, 1).flatten(0, 1), torch.stack(masks, 1).flatten(0, 1)

    def _joined(self, patches: Tensor, text: Tensor, text_mask: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        """Text and picture with their token types (the picture's is ``kind``) as one sequence, and its mask."""
        ones = torch.ones(patches.shape[:2], dtype=text_mask.dtype, device=text_mask.device)
        hidden, mask = self.vilt.embeddings(
            input_ids=text,
            attention_mask=text_mask,
            token_type_ids=None,
            pixel_values=None,
            pixel_mask=ones,
            inputs_embeds=None,
            image_embeds=patches,
            image_token_type_idx=kind,
        )
        if len(self.prompts):
            hidden, mask = self._prompted(hidden, mask, text.shape[1] + 1)
        return hidden, additive_mask(mask, hidden.dtype)

    def _prompted(self, hidden: Tensor, mask: Tensor, patches: int) -> tuple[Tensor, Tensor]:
        """Learned tokens after the first text token and before the patches, which begin at ``patches``.

        They have no position and no token type: the network that makes them can give them any offset.
        """
        words, picture = (
            self.prompts[kind]().to(hidden.dtype).expand(len(hidden), -1, -1) for kind in ("text", "visual")
        )
        ones = torch.ones(words.shape[:2], dtype=mask.dtype, device=mask.device)
        hidden = torch.cat([hidden[:, :1], words, hidden[:, 1:patches], picture, hidden[:, patches:]], 1)
        return hidden, torch.cat([mask[:, :1], ones, mask[:, 1:patches], ones, mask[:, patches:]], 1)

    def patch_embeddings(self, image: Tensor) -> Tensor:
        """Class token and patches with their positions added, (B, 1 + patches, d)."""
        embeddings = self.vilt.embeddings
        x = patch_tokens(image, embeddings.patch_embeddings.projection, embeddings.cls_token, self.grid)
        return embeddings.dropout(x + self._positions())

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled representation (B, d) of the last block's output."""
        pooler: Any = self.vilt.pooler
        return pooler(self.vilt.layernorm(hidden))

    def pretraining_states(self, batch: Batch) -> States:
        """What pre-training looks at: the scores, the patches after two blocks, the question after the second."""
        hidden, mask = self.embed(batch)
        after: list[Tensor] = []
        for block in self._blocks:
            hidden = block(hidden, mask)[0]
            after.append(hidden)
        patches = self.grid[0] * self.grid[1]
        return States(
            loss_logits=self.classifier(self.pool(hidden)),
            early=after[0][:, -patches:],
            late=after[1][:, -patches:],
            asked=after[1][:, : batch["text"].shape[1]],
            words=self._word_embeddings.weight,
        )

    def attention(self, batch: Batch) -> Tensor:
        """What the model looked at: how strongly the answer depends on each patch, at most 1.

        The squared gradient norm of the answer's log-probability with respect to the patch's embedding
        (Simonyan et al., "Deep Inside Convolutional Networks", ICLR 2014 workshop, section 3, per patch). On
        questions about one thing of the built-in benchmark, :func:`confed.models.vilt.vilt_mini` puts the largest
        value on that thing's patch in 98 cases of 100; attention weights are less telling, as several blocks mix
        the patches before they are read.
        """
        # Callers may evaluate in inference mode, whose tensors cannot take part in a backward pass: copies.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = {name: tensor.clone() for name, tensor in batch.items()}
            hidden, mask = self._inputs(inputs)
            hidden, mask, count = hidden.detach().requires_grad_(), mask.detach(), views(self.selected, inputs)
            output = self._score(self.vilt.encoder(hidden, mask)[0], count)
            best = output.logits.float().log_softmax(1).amax(1).sum()
            (gradient,) = torch.autograd.grad(best, hidden)
        relevance = gradient[:, -self.grid[0] * self.grid[1] :].float().square().sum(-1)
        relevance = relevance.reshape(-1, count, relevance.shape[1])
        relevance = relevance[:, 0] if self.selected == "nlvr2" else relevance.sum(1)
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

    def places(self, reduction: int = 16) -> Places:
        """What can be finetuned; adapters are after the residual sum of every feed-forward block."""
        width, last = self.vilt.config.hidden_size, len(self._blocks) - 1
        return Places(
            heads=tuple(self.heads_of_tasks.values()),
            top=(f"vilt.encoder.layer.{last}.", "vilt.layernorm.", "vilt.pooler."),
            hosts=[Host(block.output, width) for block in self._blocks],
            reduction=reduction,
            lora=("attention.query", "attention.value"),
            ia3=("attention.key", "attention.value"),
            ia3_inputs=tuple(f"vilt.encoder.layer.{i}.output.dense" for i in range(last + 1)),
            prompts={"text": width, "visual": width},
            prefix="the attention of ViLT in transformers takes no keys and values from outside; 'prompt' does work",
        )

    @property
    def _blocks(self) -> Any:
        return self.vilt.encoder.layer

    @property
    def _word_embeddings(self) -> Any:
        return self.vilt.get_input_embeddings()

    def _checked(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        model, several = type(self).__name__, self.selected == "choice"
        image = checked_image(batch, self.image_size, model)
        words, seen = ("choices", "choices_mask") if several else ("text", "text_mask")
        for key in (words, seen):
            if key not in batch:
                raise ValueError(f"a batch of {model} needs the key {key!r}, got {', '.join(sorted(batch))}")
        text, mask, longest = batch[words], batch[seen], self.vilt.config.max_position_embeddings
        if text.ndim != 2 + several or len(text) != len(image) or text.shape[-1] > longest:
            shape = f"({len(image)}, {'K, ' if several else ''}at most {longest})"
            raise ValueError(f"{words} must have shape {shape}, got {tuple(text.shape)}")
        if mask.shape != text.shape:
            raise ValueError(f"{seen} must have the shape of {words} {tuple(text.shape)}, got {tuple(mask.shape)}")
        return image, text, mask


def _second_picture(body: "ViltModel") -> None:
    """A token type for second pictures, with the values of the first pictures' (as ViLT's authors do)."""
    types = body.embeddings.token_type_embeddings
    if len(types.weight) == 2:
        wider = nn.Embedding.from_pretrained(torch.cat([types.weight, types.weight[1:]]).detach(), freeze=False)
        body.embeddings.token_type_embeddings = wider
        body.config.modality_type_vocab_size = 3


# ViLT in five variants, each with weights, tokenizer and finetuning options -----------------------------------


def mini_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mini`: its pre-training's words, then the unseen ones of ``words``.

    So a dataset's known words keep their trained embeddings, and its other words get rows of their own.
    """
    return WordTokenizer((*mini_words(), *words), max_length)


def mlm_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mlm_mini`: the words of its captions, then the unseen ones of ``words``.

    A dataset's words that captions have not, such as "what", get rows of their own, which are not trained yet.
    """
    return WordTokenizer((*mini_words("vilt_mlm_mini"), *words), max_length)


def b32_tokenizer(
    words: Sequence[str], path: Path | str = "dandelin/vilt-b32-mlm", max_length: int = 40
) -> BertTokenizer:
    """The tokenizer of :func:`vilt_b32`, BERT's; its vocabulary is fixed, so the dataset's words do not matter."""
    return bert_tokenizer(path, max_length)


def small(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    width: int = 32,
    layers: int = 2,
    attention_heads: int = 4,
    image_size: int = 64,
    patch: int = 16,
    max_length: int = 16,
    pretrained: bool | Path | str = False,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    weights: str = "vilt_mini",
    seed: int = 0,
) -> Vilt:
    """A ViLT of any size for small pictures.

    Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.

    Args:
        answers: the answers, or how many there are. A pre-trained head is loaded when they are given as strings and
            equal the pre-trained ones in order; otherwise the head starts fresh.
        vocab_size: number of token ids.
        width: features per token, d; the feed-forward blocks have 4 d.
        layers: Transformer blocks.
        attention_heads: must divide the width.
        image_size: pixels per side.
        patch: pixels per side of a patch.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``pretrain`` wrote.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        weights: whose packaged weights they are.
        seed: of all fresh values.
    """
    body = _body(
        seed, vocab_size=vocab_size, max_position_embeddings=max_length, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=attention_heads, intermediate_size=4 * width, image_size=image_size, patch_size=patch,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    model = Vilt(body, count(answers), rng)
    if pretrained:
        file = weights_file(weights, pretrained)
        load_into(model, file, answers=None if isinstance(answers, int) else tuple(answers))
    model.add_heads(heads, rng)
    finetune(model, trainable, peft, model.places(8), rng)
    return model


vilt_tiny = variant(
    small, "vilt_tiny", "A ViLT of a few thousand parameters, for tests.",
    "answers vocab_size width layers attention_heads image_size patch max_length dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=WordTokenizer),
)  # fmt: skip
vilt_mini = variant(
    small, "vilt_mini",
    "A ViLT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.\n\n"
    "3 blocks, d = 64, 4 heads, feed-forward 256, patches of 16. The weights that come with the package were made\n"
    "from nothing by :func:`confed.prepare.pretraining.pretrain`. Token ids must come from :func:`mini_tokenizer`,\n"
    "which puts the pre-trained words first; embeddings of further words and text positions start fresh.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mini_tokenizer), width=64, layers=3, pretrained=True,
)  # fmt: skip
vilt_mlm_mini = variant(
    small, "vilt_mlm_mini",
    "The ViLT of :func:`vilt_mini`, pretrained on captions alone: it has read no question and no answer.\n\n"
    "Its weights were made by masked words, picture-text matching and word-patch alignment\n"
    "(:mod:`confed.prepare.pretraining.captions`). Token ids must come from :func:`mlm_tokenizer`.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), width=64, layers=3, pretrained=True, weights="vilt_mlm_mini",
)  # fmt: skip
vilt_mlm_middle = variant(
    small, "vilt_mlm_middle",
    "The ViLT of :func:`vilt_mlm_mini` with four blocks, d = 128 and 0.8 million parameters.\n\n"
    "It comes without weights: ``confed pretrain vilt_mlm_middle --out FILE`` makes them, for ``pretrained``.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), width=128, layers=4, pretrained=False, weights="vilt_mlm_middle",
)  # fmt: skip


@register_model(spec=ModelSpec(tokenizer=b32_tokenizer))
def vilt_b32(
    answers: Sequence[str] | int,
    vocab_size: int = 30522,
    *,
    pretrained: Path | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    max_length: int = 40,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
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
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        seed: of all fresh values.

    Raises:
        ValueError: no checkpoint at the given path, one of another model, or its vocabulary has another size.
    """
    from transformers import ViltModel

    rng = torch.Generator().manual_seed(seed)
    options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        body = _body(seed, vocab_size=vocab_size, max_position_embeddings=max_length, **options)
    else:
        body = published(ViltModel, pretrained, seed, **options)
        if body.config.vocab_size != vocab_size:
            raise ValueError(
                f"the checkpoint {str(pretrained)!r} has {body.config.vocab_size} tokens, got {vocab_size}"
            )
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = Vilt(body, count(answers), rng, size)
    model.add_heads(heads, rng)
    finetune(model, trainable, peft, model.places(16), rng)
    return model


def _body(seed: int, **sizes: Any) -> "ViltModel":
    from transformers import ViltConfig, ViltModel

    return seeded(seed, lambda: ViltModel(ViltConfig(**sizes)))
