"""VAuLT: ViLT on BERT's representations of the question.

Chochlakis, Srinivasan, Thomason and Narayanan, "VAuLT: Augmenting the Vision-and-Language Transformer for Sentiment
Classification on Social Media", 2022 (arXiv 2208.09021): BERT's last hidden states take the place of ViLT's word
embeddings. FedDAT (AAAI 2024) uses it with adapters in both. Everything after the word embeddings is
:class:`confed.models.vilt.Vilt`'s: the tasks, the heads, the batches.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from confed.federation.protocols import Batch
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage
from confed.models.adapters import Host
from confed.models.finetuning import Places
from confed.models.heads import count
from confed.models.inputs import additive_mask
from confed.models.passes import Step
from confed.models.pretrained import body_of
from confed.models.variants import variant
from confed.models.vilt import INPUTS, Tokens, Vilt, b32_tokenizer, check_vocabulary, mini_tokenizer, vilt_body

if TYPE_CHECKING:
    from transformers import BertModel, ViltModel


class Vault(Vilt):
    """A ViLT body that reads a BERT's output; see :class:`confed.models.vilt.Vilt` for batches and heads.

    ViLT's own word embeddings are dropped, and its text positions unless they are kept: nothing would read them.
    """

    def __init__(
        self,
        body: "ViltModel",
        language: "BertModel",
        answers: int,
        rng: torch.Generator,
        *,
        image_size: int | tuple[int, int] | None = None,
        text_positions: bool = False,
        language_frozen: bool = False,
    ) -> None:
        super().__init__(body, answers, rng, image_size)
        if language.config.hidden_size != body.config.hidden_size:
            raise ValueError(
                f"BERT must be as wide as ViLT ({body.config.hidden_size} features), got {language.config.hidden_size}"
            )
        self.language = language.train()
        self.language_frozen = language_frozen
        self.text_positions = text_positions
        text: Any = self.vilt.embeddings.text_embeddings
        del text.word_embeddings
        if not text_positions:
            del text.position_embeddings

    def places(self) -> Places:
        """What can be finetuned: ViLT's places, and BERT's in front of them unless it is frozen.

        BERT's adapters sit inside its last layer normalisation of every block, as FedDAT's released code has them.
        LoRA's usual layers are ViLT's alone, 0.59 million values as in FedDAT's table 2; the targets "query" and
        "value" are those of both.
        """
        places = super().places()
        if self.language_frozen:
            return replace(places, fixed=("language",))
        blocks = self._language_blocks
        width: int = self.language.config.hidden_size
        outputs = tuple(f"language.encoder.layer.{i}.output.dense" for i in range(len(blocks)))
        return replace(
            places,
            hosts=(*(Host(block.output.LayerNorm, width, after_norm=True) for block in blocks), *places.hosts),
            ia3=(*places.ia3, "self.key", "self.value"),
            ia3_inputs=(*places.ia3_inputs, *outputs),
        )

    def embedding_steps(self) -> Sequence[Step]:
        """As of ViLT, then BERT, which has the first adapters where it learns."""
        begin, embeddings = super().embed, ("language.embeddings.", "vilt.embeddings.")
        return (
            (Stage("embeddings", INPUTS, embeddings), lambda _, batch: begin(batch)),
            (Stage("BERT", (), ("language.", *self.embedding_names)), lambda state, _: self._read(state)),
        )

    @property
    def first_place(self) -> int:
        return 0 if self.language_frozen else len(self._language_blocks)

    @property
    def before(self) -> int:
        return super().before + 1 if self.language_frozen else 1

    def embed(self, batch: Batch) -> Tokens:
        """Input of ViLT's first block; see :meth:`confed.models.vilt.Vilt.embed`."""
        return self._read(super().embed(batch))

    @property
    def _language_blocks(self) -> Any:
        return self.language.encoder.layer

    @property
    def _word_embeddings(self) -> Any:
        return self.language.embeddings.word_embeddings

    def _joined(self, patches: Tensor, text: Tensor, text_mask: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        """BERT's embeddings of the text, and the picture with its token type, as one sequence; and its mask."""
        with self._gradients():
            words = self.language.embeddings(text)
        patches = patches + self.vilt.embeddings.token_type_embeddings.weight[kind]
        seen = torch.cat([text_mask, text_mask.new_ones(patches.shape[:2])], 1)
        return torch.cat([words, patches], 1), additive_mask(seen, patches.dtype)

    def _read(self, state: Tokens) -> Tokens:
        """From what :meth:`_joined` returns to the input of ViLT's first block."""
        hidden, mask, views = state
        length = hidden.shape[1] - 1 - self.grid[0] * self.grid[1]
        words, patches = hidden[:, :length], hidden[:, length:]
        with self._gradients():
            for block in self._language_blocks:
                words = block(words, mask[..., :length])
        embeddings = self.vilt.embeddings
        text: Any = embeddings.text_embeddings
        words = words + text.token_type_embeddings.weight[0]
        if self.text_positions:
            words = words + text.position_embeddings.weight[:length]
        words = text.dropout(text.LayerNorm(words)) + embeddings.token_type_embeddings.weight[0]
        hidden = torch.cat([words, patches], 1)
        if len(self.prompts):
            hidden, seen = self._prompted(hidden, (mask[:, 0, 0] == 0).long(), length)
            mask = additive_mask(seen, hidden.dtype)
        return Tokens(hidden, mask, views)

    def _gradients(self) -> Any:
        return torch.no_grad() if self.language_frozen else nullcontext()


def _mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int,
    text_positions: bool = False,
    language_frozen: bool = False,
    dropout: float,
    seed: int,
    rng: torch.Generator,
) -> Vault:
    """A small VAuLT.

    Options:
        text_positions: add ViLT's text positions to BERT's output; the packaged weights have none.
        language_frozen: BERT never learns and has no adapters.
    """
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    body = vilt_body(
        None, vocab_size, max_length, dropout, seed, num_hidden_layers=3, image_size=64, patch_size=16, **sizes
    )  # fmt: skip
    language = body_of(
        BertModel, BertConfig, None, seed, dropout, vocab_size=vocab_size, max_position_embeddings=max_length,
        num_hidden_layers=2, **sizes,
    )  # fmt: skip
    return Vault(body, language, count(answers), rng, text_positions=text_positions, language_frozen=language_frozen)


def _b32(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    pretrained: Path | str | None,
    language: Path | str | None = None,
    image_size: int | tuple[int, int] | None,
    max_length: int,
    text_positions: bool = False,
    language_frozen: bool = False,
    dropout: float,
    seed: int,
    rng: torch.Generator,
) -> Vault:
    """BERT-base below ViLT-B/32, from checkpoints or with random weights.

    Options:
        pretrained: ViLT, a folder written by ``save_pretrained`` or a hub name such as ``"dandelin/vilt-b32-mlm"``;
            its configuration then decides its sizes. None: random weights. The tokenizer is read from there.
        language: BERT, likewise, such as ``"google-bert/bert-base-uncased"``; it must have that tokenizer's vocabulary.
        image_size: pixels per side or (H, W), multiples of 32; position embeddings are interpolated. Default: the
            configuration's.
        max_length: text positions of a ViLT with random weights.
        text_positions: add ViLT's text positions to BERT's output, as FedDAT does.
        language_frozen: BERT never learns and has no adapters, as in FedDAT's released code.
    """
    from transformers import BertConfig, BertModel

    body = vilt_body(pretrained, vocab_size, max_length, dropout, seed)
    bert = body_of(BertModel, BertConfig, language, seed, dropout, vocab_size=vocab_size)
    check_vocabulary(bert, language, vocab_size)
    return Vault(
        body, bert, count(answers), rng, image_size=image_size, text_positions=text_positions,
        language_frozen=language_frozen,
    )  # fmt: skip


vault_mini = variant(
    _mini, "vault_mini",
    "A VAuLT for 64 x 64 pictures with 0.3 million parameters, small enough to learn on one CPU core.\n\n"
    "Two BERT blocks and the three of :func:`confed.models.vilt.vilt_mini`, d = 64, 4 heads, feed-forward 256. Token "
    "ids\nmust come from :func:`confed.models.vilt.mini_tokenizer`.\n\n"
    "Raises ``ValueError``: the vocabulary is smaller than the pretrained one, the weights file is missing, or an "
    "option\nis out of range.",
    "answers vocab_size max_length pretrained text_positions language_frozen dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mini_tokenizer), reduction=8,
)  # fmt: skip
vault_b32 = variant(
    _b32, "vault_b32",
    "BERT-base below ViLT-B/32, as published: 12 blocks each, d = 768, 384 x 384 pixels, 40 BERT tokens.\n\n"
    "Raises ``ValueError``: no checkpoint at a given path, one of another model or with another vocabulary, bodies of\n"
    "different widths, or an option that is out of range.",
    "answers vocab_size pretrained language image_size max_length text_positions language_frozen dropout trainable "
    "peft heads seed",
    spec=ModelSpec(tokenizer=b32_tokenizer), vocab_size=30522, pretrained=None, max_length=40,
)  # fmt: skip
