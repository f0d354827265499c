"""Tokenizers of captions: words of a list, or the pieces of a SentencePiece model.

Token ids begin with those of :data:`confed.models.tokenizer.SPECIAL_TOKENS` in both: a text is ``[CLS] tokens [SEP]``,
and 0 stands behind its end.
"""

import json
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from confed.federation.reading import faults_of
from confed.models.tokenizer import SPECIAL_TOKENS, SUFFIXES, BertTokenizer, Form, WordTokenizer, check_length

# Tokens of answers, for models that write their answers instead of choosing -----------------------------------


class AnswerTokenizer:
    """A question tokenizer that also reads answers; implements :class:`confed.data.encode.Tokenizer`.

    An answer becomes ``[CLS] words [SEP]``, and 0 (the id of ``[PAD]`` in BERT and in our word tokenizer) behind it:
    the first token starts the decoder, the second is its end.
    """

    form: ClassVar[Form] = "answers"

    def __init__(self, questions: WordTokenizer | BertTokenizer, closing: bool = True) -> None:
        self.questions, self.closing = questions, closing

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.questions.vocab_size

    @property
    def max_length(self) -> int:
        """L, the positions of a question."""
        return self.questions.max_length

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary's words in order; empty where it is BERT's."""
        return self.questions.words if isinstance(self.questions, WordTokenizer) else ()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding) of questions, both int64 of shape (N, L)."""
        ids, mask = self.questions(texts)
        if self.closing:
            return ids, mask
        # The last token of every text is the closing one.
        mask = mask * (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True) - 1)
        return ids * mask, mask

    def shortened(self, texts: Sequence[str]) -> int:
        """How many of some questions are longer than L tokens and so lose their end."""
        return self.questions.shortened(texts)

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Token ids of answers, int64, shape (C, T): T tokens of the longest, 0 after the end of shorter ones."""
        ids, mask = self.questions(texts)
        ids = (ids * mask)[:, : int(mask.sum(1).max()) if len(mask) else 0]
        seen: dict[tuple[int, ...], str] = {}
        for text, row in zip(texts, ids.tolist(), strict=True):
            other = seen.setdefault(tuple(row), text)
            if other != text:
                raise ValueError(f"the answers {other!r} and {text!r} have the same tokens, nothing tells them apart")
        return ids

    def save(self, directory: Path | str) -> None:
        """Writes the tokenizer's folder; see :meth:`confed.models.tokenizer.WordTokenizer.save`."""
        self.questions.save(directory)


def words_of(answers: Sequence[str]) -> tuple[str, ...]:
    """The words of answers in order, without repetitions: what a word tokenizer must know to write them."""
    return tuple(dict.fromkeys(chain.from_iterable(re.findall(r"[^\W_]+", answer.lower()) for answer in answers)))


# Tokenizers of captions: words of a list ----------------------------------------------------------------------

START, END = SPECIAL_TOKENS.index("[CLS]"), SPECIAL_TOKENS.index("[SEP]")
NEVER = tuple(SPECIAL_TOKENS.index(name) for name in ("[PAD]", "[UNK]", "[CLS]", "[MASK]"))
"""Tokens that are in no text which a model writes."""

PIECES = "pieces.model"  # file of a saved SentencePiece model
_SHOWN = 60  # characters of a text that a message quotes


class WrittenWords:
    """Words of a list as tokens, both ways; implements :class:`confed.data.encode.Tokenizer`."""

    form: ClassVar[Form] = "captions"
    closing: ClassVar[bool] = True

    def __init__(self, words: Sequence[str], max_length: int = 24) -> None:
        # Room for one token more shows which texts are too long.
        self._words = WordTokenizer(words, max_length + 1)
        check_length(max_length)
        self.max_length, self.vocab_size, self.words = max_length, self._words.vocab_size, self._words.words

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding), both int64 of shape (N, max_length)."""
        ids, mask = self._words(texts)
        _refuse_long(texts, mask.sum(1), self.max_length)
        return ids[:, : self.max_length], mask[:, : self.max_length]

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of token ids, int64 (N, L), up to the end token; special tokens are left out."""
        return [self._text(_behind_start(row)) for row in tokens.tolist()]

    def _text(self, row: Sequence[int]) -> str:
        words: list[str] = []
        for number in row:
            word = self._words.vocabulary[number]
            if word in SUFFIXES and words:
                words[-1] += word.removeprefix("##")
            elif word not in (*SUFFIXES, *SPECIAL_TOKENS):
                words.append(word)
        return " ".join(words)

    def save(self, directory: Path | str) -> None:
        """Writes the tokenizer's folder; see :meth:`confed.models.tokenizer.WordTokenizer.save`."""
        self._words.save(directory)

    @classmethod
    def load(cls, directory: Path | str, max_length: int = 24) -> "WrittenWords":
        """The tokenizer of a folder that :meth:`save` wrote; another one is a ValueError."""
        file = Path(directory) / "tokenizer.json"
        with faults_of(file, "a tokenizer of words"):
            vocabulary = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
            words = sorted(vocabulary, key=vocabulary.__getitem__)
        return cls(words[len(SPECIAL_TOKENS) + len(SUFFIXES) :], max_length)


class Pieces:
    """Pieces of words by SentencePiece (Kudo and Richardson, EMNLP 2018), both ways.

    The model's piece i has the token id ``len(SPECIAL_TOKENS) + i``; an unknown piece is ``[UNK]``.
    """

    form: ClassVar[Form] = "captions"
    closing: ClassVar[bool] = True

    def __init__(self, file: Path | str, max_length: int = 24) -> None:
        path = Path(file)
        if not path.is_file():
            raise ValueError(f"model.pieces must be a SentencePiece model file, found none at {path}")
        check_length(max_length, "piece")
        self._content = path.read_bytes()
        self._model: Any = _sentencepiece().SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(self._content)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} must be a SentencePiece model file: {error}") from error
        self.max_length, self.words = max_length, ()
        self.vocab_size = len(SPECIAL_TOKENS) + int(self._model.GetPieceSize())

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding), both int64 of shape (N, max_length)."""
        unknown, shift = int(self._model.unk_id()), len(SPECIAL_TOKENS)
        rows: list[list[int]] = []
        for pieces in self._model.EncodeAsIds(list(texts)):
            tokens = [shift + piece if piece != unknown else SPECIAL_TOKENS.index("[UNK]") for piece in pieces]
            rows.append([START, *tokens, END])
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        _refuse_long(texts, lengths, self.max_length)
        ids = torch.zeros(len(rows), self.max_length, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        return ids, (torch.arange(self.max_length) < lengths.unsqueeze(1)).long()

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of token ids, int64 (N, L), up to the end token; special tokens are left out."""
        shift = len(SPECIAL_TOKENS)
        result: list[str] = []
        for row in tokens.tolist():
            result.append(
                str(self._model.DecodeIds([number - shift for number in _behind_start(row) if number >= shift]))
            )
        return result

    def save(self, directory: Path | str) -> None:
        """Writes :data:`PIECES`, which is this tokenizer's file again."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / PIECES).write_bytes(self._content)


def caption_tokenizer(
    words: Sequence[str], max_length: int = 24, pieces: Path | str | None = None
) -> WrittenWords | Pieces:
    """Pieces where there is a model file of them, else the dataset's words."""
    return WrittenWords(words or ("nothing",), max_length) if pieces is None else Pieces(pieces, max_length)


def saved_tokenizer(directory: Path, max_length: int) -> WrittenWords | Pieces:
    """The tokenizer of captions that was saved into a folder."""
    pieces = directory / PIECES
    return Pieces(pieces, max_length) if pieces.is_file() else WrittenWords.load(directory, max_length)


def train_pieces(texts: Iterable[str], file: Path, size: int) -> int:
    """Trains a SentencePiece model (byte pairs) and writes it."""
    library = _sentencepiece()
    given = iter(texts)
    first = next(given, None)
    if first is None:
        raise ValueError("pieces are learned from texts, got none")

    def everything() -> Iterable[str]:
        yield first
        yield from given

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("wb") as stream:
            library.SentencePieceTrainer.Train(
                sentence_iterator=iter(everything()), model_writer=stream, vocab_size=size, model_type="bpe",
                normalization_rule_name="nmt_nfkc_cf", character_coverage=1.0, input_sentence_size=1_000_000,
                num_threads=1, minloglevel=2,
            )  # fmt: skip
    except RuntimeError as error:
        file.unlink(missing_ok=True)
        raise ValueError(f"no SentencePiece model of {size} pieces can be made of these texts: {error}") from error
    model = library.SentencePieceProcessor()
    model.LoadFromSerializedProto(file.read_bytes())
    return int(model.GetPieceSize())


def _behind_start(row: Sequence[int]) -> list[int]:
    """The ids of a text without its start token, what is behind its end, and padding."""
    stop = row.index(END) if END in row else len(row)
    return [number for number in row[:stop] if number not in (0, START)]


def _refuse_long(texts: Sequence[str], lengths: Tensor, most: int) -> None:
    for text, length in zip(texts, lengths.tolist(), strict=True):
        if length > most:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise ValueError(
                f"a text must have at most {most} tokens (model.max_length; its first and last one count), this one "
                f"has more: {shown!r}"
            )


def _sentencepiece() -> Any:
    try:
        return import_module("sentencepiece")
    except ImportError as error:
        raise ValueError(
            "pieces of words need the package sentencepiece: pip install '.[captions]' -c constraints.txt"
        ) from error
