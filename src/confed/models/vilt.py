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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Places
from confed.models.heads import Heads, answer_head, check_heads, count, score, task_head, views
from confed.models.inputs import additive_mask, checked_image, checked_text, patch_tokens
from confed.models.passes import BlockChain, PatchGrid, Step
from confed.models.pretrained import States, body_of, mini_words
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import ViltModel

# ViLT network: one Transformer over words and picture patches -------------------------------------------------


INPUTS = ("image", "image2", "text", "text_mask", "choices", "choices_mask")  # keys of a batch that the model reads


class Tokens(NamedTuple):
    """Words and patches as one sequence."""

    hidden: Tensor  # (B * views, S, d), the views of an example next to each other
    mask: Tensor  # additive attention mask, (B * views, 1, 1, S)
    views: int  # passes per example: 2 for pairs of pictures, K for K choices


class Vilt(Heads, PatchGrid, BlockChain):
    """A ViLT body with an answer head, and heads for further tasks.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats, and ``text`` and ``text_mask``,
    int64 (B, L) with L up to the number of text positions. For the head "nlvr2" also ``image2``: each picture is
    read with the text in a separate pass, with its own token type. For the head "choice" instead of ``text``
    ``choices`` and ``choices_mask``, (B, K, L).

    Outputs are scores of the answers, classes or choices (B, C), and the pooled representation (B, d), of examples with
    several passes the mean over them. States are :class:`Tokens`.
    """

    embedding_names = ("vilt.embeddings.", "prompts.")
    blocks_name = "vilt.encoder.layer"

    def __init__(
        self, body: "ViltModel", answers: int, rng: torch.Generator, image_size: int | tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        config: Any = body.config
        self.vilt = body.train()
        self.classifier = answer_head(config.hidden_size, answers, rng)
        self.heads = nn.ModuleDict()
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)
        self.set_grid(config, image_size)

    def add_heads(self, heads: Sequence[str], rng: torch.Generator) -> None:
        """Adds heads for further tasks; to be called when the body has its pretrained weights."""
        check_heads(heads)
        for head in heads:
            self.heads[head] = task_head(head, self.vilt.config.hidden_size, rng)
        if "nlvr2" in heads:
            types = self.vilt.embeddings.token_type_embeddings
            if len(types.weight) == 2:
                wider = nn.Embedding.from_pretrained(torch.cat([types.weight, types.weight[1:]]).detach(), freeze=False)
                self.vilt.embeddings.token_type_embeddings = wider
                self.vilt.config.modality_type_vocab_size = 3

    # The steps of a pass ------------------------------------------------------------------------------------

    @property
    def stage_variant(self) -> str:
        return self.selected

    def steps(self) -> Sequence[Step]:
        """Embeddings, blocks, pooling, head."""
        pooling = Stage("pooling", (), ("vilt.layernorm.", "vilt.pooler."))
        return (
            *self.embedding_steps(),
            *self.block_steps(),
            (pooling, lambda state, _: state._replace(hidden=self.pool(state.hidden))),
            (Stage("head", (), ("",)), lambda state, _: self._score(state)),
        )

    def embedding_steps(self) -> Sequence[Step]:
        return ((Stage("embeddings", INPUTS, self.embedding_names), lambda _, batch: self.embed(batch)),)

    def advance(self, block: Any, state: Tokens) -> Tokens:
        return state._replace(hidden=block(state.hidden, state.mask)[0])

    def adapt(self, state: Tokens) -> Tokens:
        return state._replace(hidden=self.adapters.finish(self.first_place, state.hidden))

    def _score(self, pooled: Tokens) -> Output:
        head = self.get_submodule(self.heads_of_tasks[self.selected])
        return score(head, self.selected, pooled.hidden, pooled.views)

    def embed(self, batch: Batch) -> Tokens:
        """Input of the first block; of pairs each example's first picture, then its second one."""
        count = views(self.selected, batch)  # checks the batch
        if self.selected != "nlvr2":
            return Tokens(*self._embedded(batch, 1), count)
        pairs = [self._embedded(batch, 1), self._embedded({**batch, "image": batch["image2"]}, 2)]
        hidden, masks = (torch.stack(part, 1).flatten(0, 1) for part in zip(*pairs, strict=True))
        return Tokens(hidden, masks, count)

    def _embedded(self, batch: Batch, kind: int) -> tuple[Tensor, Tensor]:
        """Pictures with their texts, or with each of their choices, as sequences, and additive attention masks."""
        model, longest = type(self).__name__, self.vilt.config.max_position_embeddings
        image = checked_image(batch, self.image_size, model)
        keys = ("choices", "choices_mask") if self.selected == "choice" else ("text", "text_mask")
        text, text_mask = checked_text(batch, len(image), longest, model, keys)
        patches = self.patch_embeddings(image)
        if text.ndim == 3:
            patches = patches.repeat_interleave(text.shape[1], 0)
            text, text_mask = text.flatten(0, 1), text_mask.flatten(0, 1)
        return self._joined(patches, text, text_mask, kind)

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
        """Learned tokens after the first text token and before the patches, which begin at ``patches``."""
        words, picture = (
            self.prompts[kind]().to(hidden.dtype).expand(len(hidden), -1, -1) for kind in ("text", "visual")
        )
        ones = torch.ones(words.shape[:2], dtype=mask.dtype, device=mask.device)
        hidden = torch.cat([hidden[:, :1], words, hidden[:, 1:patches], picture, hidden[:, patches:]], 1)
        return hidden, torch.cat([mask[:, :1], ones, mask[:, 1:patches], ones, mask[:, patches:]], 1)

    def patch_embeddings(self, image: Tensor) -> Tensor:
        """Class token and patches with their positions added, (B, 1 + patches, d)."""
        embeddings = self.vilt.embeddings
        x = patch_tokens(image, embeddings.patch_embeddings.projection, embeddings.cls_token)
        return embeddings.dropout(x + self._positions())

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled representation (B, d) of the last block's output."""
        pooler: Any = self.vilt.pooler
        return pooler(self.vilt.layernorm(hidden))

    def pretraining_states(self, batch: Batch) -> States:
        """What pre-training looks at: the scores, the patches after two blocks, the question after the second."""
        hidden, mask, _ = self.embed(batch)
        after: list[Tensor] = []
        for block in self.blocks:
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
            hidden, mask, count = self.embed(inputs)
            hidden = hidden.detach().requires_grad_()
            pooled = self.pool(self.vilt.encoder(hidden, mask.detach())[0])
            output = self._score(Tokens(pooled, mask, count))
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

    def places(self) -> Places:
        """What can be finetuned; adapters are after the residual sum of every feed-forward block."""
        width, last = self.vilt.config.hidden_size, len(self.blocks) - 1
        return Places(
            heads=tuple(self.heads_of_tasks.values()),
            top=(f"vilt.encoder.layer.{last}.", "vilt.layernorm.", "vilt.pooler."),
            hosts=[Host(block.output, width) for block in self.blocks],
            lora=("attention.query", "attention.value"),
            ia3=("attention.key", "attention.value"),
            ia3_inputs=tuple(f"vilt.encoder.layer.{i}.output.dense" for i in range(last + 1)),
            prompts={"text": width, "visual": width},
            prefix="the attention of ViLT in transformers takes no keys and values from outside; 'prompt' does work",
        )

    @property
    def _word_embeddings(self) -> Any:
        return self.vilt.get_input_embeddings()


# ViLT in five variants, each with weights, tokenizer and finetuning options -----------------------------------


def mini_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mini`: its pre-training's words, then the unseen ones of ``words``."""
    return WordTokenizer((*mini_words(), *words), max_length)


def mlm_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mlm_mini`: the words of its captions, then the unseen ones of ``words``."""
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
    max_length: int,
    dropout: float,
    seed: int,
    rng: torch.Generator,
) -> Vilt:
    """A ViLT of any size for small pictures.

    Options:
        width: features per token, d; the feed-forward blocks have 4 d.
        layers: Transformer blocks.
        attention_heads: must divide the width.
        image_size: pixels per side.
        patch: pixels per side of a patch.
    """
    body = vilt_body(
        None, vocab_size, max_length, dropout, seed, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=attention_heads, intermediate_size=4 * width, image_size=image_size, patch_size=patch,
    )  # fmt: skip
    return Vilt(body, count(answers), rng)


PRETRAINED = {"pretrained": "load the packaged weights, or those of a file that ``pretrain`` wrote."}

vilt_tiny = variant(
    small, "vilt_tiny", "A ViLT of a few thousand parameters, for tests.",
    "answers vocab_size width layers attention_heads image_size patch max_length dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=WordTokenizer), reduction=8,
)  # fmt: skip
vilt_mini = variant(
    small, "vilt_mini",
    "A ViLT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.\n\n"
    "3 blocks, d = 64, 4 heads, feed-forward 256, patches of 16. The weights that come with the package were made\n"
    "from nothing by :func:`confed.prepare.pretraining.pretrain`. Token ids must come from :func:`mini_tokenizer`,\n"
    "which puts the pre-trained words first; embeddings of further words and text positions start fresh.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mini_tokenizer), described=PRETRAINED, reduction=8, width=64, layers=3,
)  # fmt: skip
vilt_mlm_mini = variant(
    small, "vilt_mlm_mini",
    "The ViLT of :func:`vilt_mini`, pretrained on captions alone: it has read no question and no answer.\n\n"
    "Its weights were made by masked words, picture-text matching and word-patch alignment\n"
    "(:mod:`confed.prepare.pretraining.captions`). Token ids must come from :func:`mlm_tokenizer`.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), described=PRETRAINED, reduction=8, width=64, layers=3,
)  # fmt: skip
vilt_mlm_middle = variant(
    small, "vilt_mlm_middle",
    "The ViLT of :func:`vilt_mlm_mini` with four blocks, d = 128 and 0.8 million parameters.\n\n"
    "It comes without weights: ``confed weights pretrain vilt_mlm_middle --out FILE`` makes them, for ``pretrained``.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), described=PRETRAINED, reduction=8, width=128, layers=4, pretrained=False,
)  # fmt: skip


def vilt_body(
    pretrained: Path | str | None, vocab_size: int, max_length: int, dropout: float, seed: int, **sizes: Any
) -> "ViltModel":
    """ViLT from a checkpoint, or with random weights."""
    from transformers import ViltConfig, ViltModel

    texts: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": max_length}
    body = body_of(ViltModel, ViltConfig, pretrained, seed, dropout, pooling=True, **texts, **sizes)
    check_vocabulary(body, pretrained, vocab_size)
    return body


def check_vocabulary(body: Any, source: Path | str | None, vocab_size: int) -> None:
    """Check that a checkpoint has as many token ids as its tokenizer."""
    if body.config.vocab_size != vocab_size:
        raise ValueError(f"the checkpoint {str(source)!r} has {body.config.vocab_size} tokens, got {vocab_size}")


def _b32(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    pretrained: Path | str | None,
    image_size: int | tuple[int, int] | None,
    max_length: int,
    dropout: float,
    seed: int,
    rng: torch.Generator,
) -> Vilt:
    """ViLT-B/32.

    Options:
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"dandelin/vilt-b32-mlm"``;
            its configuration then decides all sizes. None: random weights.
        image_size: pixels per side or (H, W), multiples of 32; position embeddings are interpolated. Default:
            the configuration's.
        max_length: text positions of a model with random weights.
    """
    body = vilt_body(pretrained, vocab_size, max_length, dropout, seed)
    return Vilt(body, count(answers), rng, image_size)


vilt_b32 = variant(
    _b32, "vilt_b32", "ViLT-B/32 as published: 12 blocks, d = 768, 384 x 384 pixels, 40 BERT tokens.",
    "answers vocab_size pretrained image_size max_length dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=b32_tokenizer), vocab_size=30522, pretrained=None, max_length=40,
)  # fmt: skip
