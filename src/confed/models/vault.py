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

from confed.federation.protocols import Batch, Output
from confed.federation.stages import Stage
from confed.models.adapters import Host
from confed.models.finetuning import USUAL, Finetuning, Places, Trainable, finetune
from confed.models.heads import count, views
from confed.models.inputs import additive_mask
from confed.models.pretrained import load_into, published, seeded, weights_file
from confed.models.vilt import Prefix, Vilt, b32_tokenizer, mini_tokenizer
from confed.registry import register_model

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
        image_size: tuple[int, int] | None = None,
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

    def places(self, reduction: int = 16) -> Places:
        """What can be finetuned: ViLT's places, and BERT's in front of them unless it is frozen.

        BERT's adapters sit inside its last layer normalisation of every block, as FedDAT's released code has them.
        LoRA's usual layers are ViLT's alone, 0.59 million values as in FedDAT's table 2; the targets "query" and
        "value" are those of both.
        """
        places = super().places(reduction)
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

    @property
    def stages(self) -> Sequence[Stage]:
        """As of ViLT; BERT belongs to the embeddings."""
        first, *others = super().stages
        return (replace(first, name="embeddings and BERT", tensors=(*first.tensors, "language.")), *others)

    @property
    def _first_place(self) -> int:
        return 0 if self.language_frozen else len(self._language_blocks)

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return super().prefix_names if self.language_frozen else ("language.embeddings.", "vilt.embeddings.")

    def prefix(self, batch: Batch) -> Prefix:
        """What comes before BERT's first block; where BERT is frozen, before ViLT's first adapter."""
        if self.language_frozen:
            return super().prefix(batch)
        count = views(self.selected, batch)
        hidden, mask = super()._embed_pair(batch) if self.selected == "nlvr2" else super().embed(batch)
        return Prefix(hidden, mask, count)

    def suffix(self, state: Prefix) -> Output:
        """The rest of the pass, with the adapters that are switched on."""
        if self.language_frozen:
            return super().suffix(state)
        hidden, mask = self._read(state.hidden, state.mask)
        return self._score(self._through(self._blocks, hidden, mask), state.views)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input of ViLT's first block, and its mask; see :meth:`confed.models.vilt.Vilt.embed`."""
        return self._read(*super().embed(batch))

    @property
    def _language_blocks(self) -> Any:
        return self.language.encoder.layer

    @property
    def _word_embeddings(self) -> Any:
        return self.language.embeddings.word_embeddings

    def _embed_pair(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._read(*super()._embed_pair(batch))

    def _joined(self, patches: Tensor, text: Tensor, text_mask: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        """BERT's embeddings of the text, and the picture with its token type, as one sequence; and its mask."""
        with self._gradients():
            words = self.language.embeddings(text)
        patches = patches + self.vilt.embeddings.token_type_embeddings.weight[kind]
        seen = torch.cat([text_mask, text_mask.new_ones(patches.shape[:2])], 1)
        return torch.cat([words, patches], 1), additive_mask(seen, patches.dtype)

    def _read(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """From what :meth:`_joined` returns to the input of ViLT's first block, and its mask."""
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
        return hidden, mask

    def _gradients(self) -> Any:
        return torch.no_grad() if self.language_frozen else nullcontext()


@register_model
def vault_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    pretrained: bool | Path | str = True,
    text_positions: bool = False,
    language_frozen: bool = False,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    seed: int = 0,
) -> Vault:
    """A VAuLT for 64 x 64 pictures with 0.3 million parameters, small enough to learn on one CPU core.

    Two BERT blocks and the three of :func:`confed.models.vilt.vilt_mini`, d = 64, 4 heads, feed-forward 256. Token ids
    must come from :func:`confed.models.vilt.mini_tokenizer`.

    Raises ``ValueError``: the vocabulary is smaller than the pretrained one, the weights file is missing, or an option
    is out of range.

    Args:
        answers: the answers, or how many there are. The pretrained head is loaded when they are given as strings and
            equal the pretrained ones in order; otherwise the head starts fresh.
        vocab_size: number of token ids.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``confed pretrain`` wrote.
        text_positions: add ViLT's text positions to BERT's output; the packaged weights have none.
        language_frozen: BERT never learns and has no adapters.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        seed: of all fresh values.
    """
    from transformers import BertConfig, BertModel, ViltConfig, ViltModel

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": max_length,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    body = seeded(seed, lambda: ViltModel(ViltConfig(num_hidden_layers=3, image_size=64, patch_size=16, **common)))
    language = seeded(seed, lambda: BertModel(BertConfig(num_hidden_layers=2, **common), add_pooling_layer=False))
    rng = torch.Generator().manual_seed(seed)
    model = Vault(body, language, count(answers), rng, text_positions=text_positions, language_frozen=language_frozen)
    if pretrained:
        file = weights_file("vault_mini", pretrained)
        load_into(model, file, None if isinstance(answers, int) else tuple(answers))
    return _finetuned(model, trainable, peft, heads, 8, rng)


@register_model
def vault_b32(
    answers: Sequence[str] | int,
    vocab_size: int = 30522,
    *,
    pretrained: Path | str | None = None,
    language: Path | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    max_length: int = 40,
    text_positions: bool = False,
    language_frozen: bool = False,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    seed: int = 0,
) -> Vault:
    """BERT-base below ViLT-B/32, as published: 12 blocks each, d = 768, 384 x 384 pixels, 40 BERT tokens.

    Raises ``ValueError``: no checkpoint at a given path, one of another model or with another vocabulary, bodies of
    different widths, or an option that is out of range.

    Args:
        answers: the answers, or how many there are.
        vocab_size: number of token ids.
        pretrained: ViLT, a folder written by ``save_pretrained`` or a hub name such as ``"dandelin/vilt-b32-mlm"``;
            its configuration then decides its sizes. None: random weights. The tokenizer is read from there.
        language: BERT, likewise, such as ``"google-bert/bert-base-uncased"``; it must have that tokenizer's vocabulary.
        image_size: pixels per side or (H, W), multiples of 32; position embeddings are interpolated. Default: the
            configuration's.
        max_length: text positions of a ViLT with random weights.
        text_positions: add ViLT's text positions to BERT's output, as FedDAT does.
        language_frozen: BERT never learns and has no adapters, as in FedDAT's released code.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        seed: of all fresh values.
    """
    rng = torch.Generator().manual_seed(seed)
    body, bert = _bodies(vocab_size, pretrained, language, max_length, dropout, seed)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = Vault(
        body, bert, count(answers), rng, image_size=size, text_positions=text_positions, language_frozen=language_frozen
    )
    return _finetuned(model, trainable, peft, heads, 16, rng)


def _bodies(
    vocab_size: int,
    pretrained: Path | str | None,
    language: Path | str | None,
    max_length: int,
    dropout: float,
    seed: int,
) -> "tuple[ViltModel, BertModel]":
    """ViLT and BERT of published sizes, from checkpoints or with random weights; see :func:`vault_b32`."""
    from transformers import BertConfig, BertModel, ViltConfig, ViltModel

    options: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        fresh = ViltConfig(vocab_size=vocab_size, max_position_embeddings=max_length, **options)
        body = seeded(seed, lambda: ViltModel(fresh))
    else:
        body = published(ViltModel, pretrained, seed, **options)
    if language is None:
        plain = BertConfig(vocab_size=vocab_size, **options)
        bert = seeded(seed, lambda: BertModel(plain, add_pooling_layer=False))
    else:
        bert = published(BertModel, language, seed, add_pooling_layer=False, **options)
    for source, module in ((pretrained, body), (language, bert)):
        if module.config.vocab_size != vocab_size:
            raise ValueError(f"the checkpoint {str(source)!r} has {module.config.vocab_size} tokens, got {vocab_size}")
    return body, bert


vault_mini.tokenizer = mini_tokenizer  # pyright: ignore[reportFunctionMemberAccess]
vault_b32.tokenizer = b32_tokenizer  # pyright: ignore[reportFunctionMemberAccess]


def _finetuned(
    model: Vault, trainable: Trainable, peft: Finetuning, heads: tuple[str, ...], reduction: int, rng: torch.Generator
) -> Vault:
    model.add_heads(heads, rng)
    finetune(model, trainable, peft, model.places(reduction), rng)
    return model
