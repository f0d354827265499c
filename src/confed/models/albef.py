"""ALBEF in two sizes, each with its weights, its tokenizer and a choice of what learns.

The model itself is :class:`confed.models.albef_module.Albef`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.models.albef_module import Albef, AlbefConfig
from confed.models.answer_tokenizer import AnswerTokenizer, words_of
from confed.models.finetuning import USUAL, Finetuning, Trainable, finetune
from confed.models.pretrained import describe, load_into, mini_words, packaged, weights_file
from confed.models.tokenizer import WordTokenizer, bert_tokenizer
from confed.registry import register_model

__all__ = ["Albef", "albef", "albef_mini", "fit", "mini_answer_tokenizer", "resized_positions"]

MINI = AlbefConfig(
    width=64, heads=4, image_size=64, visual_layers=2, text_layers=3, fusion=1, decoder_layers=2, positions=16,
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
)  # fmt: skip


def mini_answer_tokenizer(
    words: Sequence[str], answers: Sequence[str] = (), max_length: int = 16, *, model: str = "albef_mini"
) -> AnswerTokenizer:
    """The tokenizer of a mini that writes answers: its pre-training's words, then new ones of questions and answers.

    Args:
        words: of questions.
        answers: the answers that there are.
        max_length: text positions.
        model: whose packaged weights say which words come first; without weights, those of ``vilt_mini``.
    """
    known = tuple(describe(weights_file(model))["words"]) if packaged(model) else mini_words()
    return AnswerTokenizer(WordTokenizer((*known, *words, *words_of(answers)), max_length))


def _bert(
    words: Sequence[str],
    answers: Sequence[str] = (),
    vocabulary: Path | str = "bert-base-uncased",
    max_length: int = 40,
) -> AnswerTokenizer:
    """BERT's tokenizer, questions without closing token as ALBEF reads them; its vocabulary is fixed."""
    del words, answers
    return AnswerTokenizer(bert_tokenizer(vocabulary, max_length), closing=False)


@register_model
def albef_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    pretrained: bool | Path | str = True,
    k: int = 128,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Albef:
    """An ALBEF for 64 x 64 pictures with half a million parameters, small enough to learn on one CPU core.

    d = 64, 4 heads, patches of 16; 2 visual blocks, 3 for the question of which the last 2 look at the picture, 2 in
    the decoder. Token ids must come from :func:`mini_answer_tokenizer`. Needs ``task.name = "generation"``.

    Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.

    Args:
        answers: not used: answers are texts, the task says which there are.
        vocab_size: number of token ids.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``confed pretrain`` wrote.
        k: candidate answers that are compared by their whole text; the others are left out after the first token.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the language-model head.
        peft: options of that finetuning.
        seed: of all fresh values.
    """
    del answers
    rng = torch.Generator().manual_seed(seed)
    config = dataclasses.replace(MINI, vocab_size=vocab_size, positions=max_length, dropout=dropout)
    model = Albef(config, rng, k)
    if pretrained:
        file = weights_file("albef_mini", pretrained)
        load_into(model, file, None, head=None, growing=("cls.predictions.bias",))
    finetune(model, trainable, peft, model.places(8), rng)
    return model


@register_model
def albef(
    answers: Sequence[str] | int,
    vocab_size: int = 30522,
    *,
    pretrained: Path | str | None = None,
    vocabulary: Path | str = "bert-base-uncased",
    image_size: int = 384,
    max_length: int = 40,
    k: int = 128,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Albef:
    """ALBEF as published: ViT-B/16, BERT-base with fusion from its layer 6 on, 6 decoder layers.

    Needs ``task.name = "generation"``. FedDAT compares k = 64 of 100 answers.

    Raises ``ValueError``: no checkpoint at the given path, or its vocabulary has another size.

    Args:
        answers: not used: answers are texts, the task says which there are.
        vocab_size: number of token ids.
        pretrained: the .safetensors file that ``confed convert albef`` wrote; the ``.config.json`` beside it decides
            all sizes but the picture's. None: random weights.
        vocabulary: BERT's: ``vocab.txt``, a folder, or a hub name; read by the tokenizer.
        image_size: pixels per side, a multiple of 16; position embeddings are interpolated.
        max_length: text positions of a question; read by the tokenizer.
        k: candidate answers that are compared by their whole text; the others are left out after the first token.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the language-model head.
        peft: options of that finetuning.
        seed: of all fresh values.
    """
    del answers, vocabulary, max_length
    rng = torch.Generator().manual_seed(seed)
    if pretrained is None:
        model = Albef(AlbefConfig(vocab_size=vocab_size, image_size=image_size, dropout=dropout), rng, k)
    else:
        model = _published(Path(pretrained), vocab_size, image_size, dropout, rng, k)
    finetune(model, trainable, peft, model.places(16), rng)
    return model


albef_mini.tokenizer = mini_answer_tokenizer  # pyright: ignore[reportFunctionMemberAccess]
albef.tokenizer = _bert  # pyright: ignore[reportFunctionMemberAccess]


def _published(file: Path, vocab_size: int, image_size: int, dropout: float, rng: torch.Generator, k: int) -> Albef:
    from safetensors.torch import load_file

    beside = file.with_name(f"{file.stem}.config.json")
    for needed in (file, beside):
        if not needed.is_file():
            raise ValueError(f"expected a file that `confed convert albef` wrote at {needed}, found none")
    sizes = json.loads(beside.read_text(encoding="utf-8"))
    if sizes["vocab_size"] != vocab_size:
        raise ValueError(f"the checkpoint {file} has {sizes['vocab_size']} tokens, got {vocab_size}")
    sizes |= {name: tuple(sizes[name]) for name in ("mean", "std")}
    config = AlbefConfig(**{**sizes, "image_size": image_size, "dropout": dropout})
    model, tensors = Albef(config, rng, k), load_file(file)
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
    """Fills a model with tensors of exactly its names and shapes; one on the meta device is only compared with them.

    Raises:
        ValueError: names are missing or unknown, or shapes differ; names the first few.
    """
    state: Mapping[str, Any] = model.state_dict()
    faults = [f"{name} is missing" for name in state if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in state]
    faults += [
        f"{name} has shape {tuple(tensor.shape)}, expected {tuple(state[name].shape)}"
        for name, tensor in tensors.items()
        if name in state and tensor.shape != state[name].shape
    ]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ValueError(f"{source} is not a checkpoint of this {type(model).__name__}: {'; '.join(faults[:3])}{more}")
    if not any(value.is_meta for value in state.values()):
        model.load_state_dict(dict(tensors))
