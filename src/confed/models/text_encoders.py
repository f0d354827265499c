"""Text encoders for label embeddings: CLIP's, sentence encoders, and the built-in words."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.models.hub_names import hub_name
from confed.models.pretrained import weights_file
from confed.models.published import published, unread_because

__all__ = ["Encode", "clip_text_encoder", "mini_text_encoder", "sentence_encoder"]

Encode = Callable[[Sequence[str]], Tensor]
"""A text encoder: N texts to N vectors (N, d), not divided by their lengths."""


def clip_text_encoder(source: Path | str) -> Encode:
    """CLIP's text encoder with its projection.

    Raises ``ValueError``: there is no such checkpoint, or one of another model; when called, a text is too long.

    Args:
        source: a folder written by ``save_pretrained``, or a hub name such as ``"openai/clip-vit-base-patch16"``.
    """
    from transformers import CLIPTextModelWithProjection

    model = published(CLIPTextModelWithProjection, source, 0).eval()
    tokenizer, longest = _tokenizer(source), int(model.config.max_position_embeddings)

    def encode(texts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            output: Any = model(**_tokens(tokenizer, texts, longest))
        return output.text_embeds.float()

    return encode


def sentence_encoder(source: Path | str) -> Encode:
    """Any text encoder of ``transformers``: the mean of its last states over a text's tokens.

    Raises ``ValueError``: there is no such checkpoint; when called, a text is too long.

    Args:
        source: a folder written by ``save_pretrained``, or a hub name such as
            ``"sentence-transformers/all-MiniLM-L6-v2"``.
    """
    from transformers import AutoModel

    model: Any = published(AutoModel, source, 0)
    model.eval()
    longest = int(getattr(model.config, "max_position_embeddings", 512))
    tokenizer = _tokenizer(source)

    def encode(texts: Sequence[str]) -> Tensor:
        tokens = _tokens(tokenizer, texts, longest)
        with torch.no_grad():
            states: Tensor = model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        return (states * mask).sum(1) / mask.sum(1)

    return encode


def _tokenizer(source: Path | str) -> Any:
    from transformers import AutoTokenizer

    where = Path(source).expanduser()
    name = str(where) if where.is_dir() else hub_name(str(source), short=True)
    if name is None:
        raise ValueError(f"expected a folder with a tokenizer or a hub name, got {str(source)!r}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # pyright: ignore
    except (OSError, ValueError, KeyError) as error:  # the last of a damaged file
        raise ValueError(f"no tokenizer could be read from {str(source)!r}: {unread_because(error)}") from error


def _tokens(tokenizer: Any, texts: Sequence[str], longest: int) -> dict[str, Tensor]:
    # Cut texts would silently stand for fewer names than they list.
    tokens = dict(tokenizer(list(texts), padding=True, return_tensors="pt"))
    if tokens["input_ids"].shape[1] > longest:
        worst = max(range(len(texts)), key=lambda i: int(tokens["attention_mask"][i].sum()))
        used = int(tokens["attention_mask"][worst].sum())
        raise ValueError(
            f"a text must have at most {longest} tokens, {texts[worst][:80]!r} has {used}; list fewer fine names in it"
        )
    # A folder without a vocabulary gives a tokenizer that knows special tokens alone, and says nothing.
    known = ~torch.isin(tokens["input_ids"], torch.tensor(tokenizer.all_special_ids))
    if not bool(known.any(1).all()):
        text = texts[int((~known.any(1)).nonzero()[0, 0])]
        raise ValueError(f"the encoder's tokenizer must know a part of every text, it knows nothing of {text!r}")
    return tokens


def mini_text_encoder(pretrained: bool | Path | str = True) -> Encode:
    """The words of ``albef_mini`` as a text encoder, d = 64: offline, for the built-in benchmark.

    A text is the mean over the word embeddings of ``albef_mini``'s answer decoder, which also score answers, so that
    things which look alike lie near each other. Words that it does not know do not count; neither does their order.

    Raises ``ValueError``: the weights are missing; when called, it knows no word of a text.

    Args:
        pretrained: the packaged weights, or those of a file that ``confed pretrain`` wrote.
    """
    from safetensors.torch import load_file

    from confed.models.pretrained import describe
    from confed.models.tokenizer import SPECIAL_TOKENS, SUFFIXES, WordTokenizer

    file = weights_file("albef_mini", pretrained)
    tokenizer = WordTokenizer(describe(file)["words"], 64)
    tensors: Mapping[str, Tensor] = load_file(file)
    table = tensors["text_decoder.bert.embeddings.word_embeddings.weight"]

    def encode(texts: Sequence[str]) -> Tensor:
        ids, _ = tokenizer(texts)
        counts = (ids >= len(SPECIAL_TOKENS) + len(SUFFIXES)).unsqueeze(-1).float()
        known = counts.sum(1)
        if not bool(known.all()):
            text = texts[int((known == 0).nonzero()[0, 0])]
            raise ValueError(f"albef_mini must know a word of every label, it knows none of {text!r}")
        return (table[ids] * counts).sum(1) / known

    return encode
