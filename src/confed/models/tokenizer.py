"""Tokenizers: a word-level WordPiece that needs no download, and BERT's from a local copy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from confed.models.hub_names import hub_name

if TYPE_CHECKING:
    import tokenizers


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SUFFIXES = ("##s", "##es")
"""Pieces behind a known word, so that the plural of a known noun keeps the noun's embedding."""


@runtime_checkable
class KnowsWords(Protocol):
    """A tokenizer made of a list of words."""

    @property
    def words(self) -> Sequence[str]:
        """The words in the order of their ids, which come behind those of special tokens."""
        ...


@runtime_checkable
class CountsShortened(Protocol):
    """A tokenizer that can tell which texts it shortens."""

    max_length: int

    def shortened(self, texts: Sequence[str]) -> int:
        """How many of these texts have more than ``max_length`` tokens."""
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer that can list its tokens."""

    vocabulary: tuple[str, ...]


def known_words(tokenizer: object) -> tuple[str, ...]:
    """The words of a tokenizer made of a list of words; none of another."""
    return tuple(tokenizer.words) if isinstance(tokenizer, KnowsWords) else ()


Form = Literal["questions", "answers", "captions", "chat"]  # what a tokenizer reads, as exports state it


class FixedLength:
    """A tokenizer of the library whose sequences all have one length, the tokens that mark ends included."""

    form: ClassVar[Form] = "questions"
    closing: ClassVar[bool] = True  # whether a text ends in a token of its own

    def __init__(self, tokenizer: "tokenizers.Tokenizer", max_length: int, pad: str = "[PAD]") -> None:
        check_length(max_length)
        self._tokenizer, self.max_length = tokenizer, max_length
        tokenizer.enable_truncation(max_length)
        tokenizer.enable_padding(length=max_length, pad_id=tokenizer.token_to_id(pad), pad_token=pad)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding), both int64 of shape (N, max_length)."""
        encoded = self._tokenizer.encode_batch(list(texts))
        ids, mask = [row.ids for row in encoded], [row.attention_mask for row in encoded]
        shape = (len(encoded), self.max_length)
        return torch.tensor(ids, dtype=torch.int64).reshape(shape), torch.tensor(mask, dtype=torch.int64).reshape(shape)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size()

    def save(self, directory: Path | str) -> None:
        """Writes ``tokenizer.json``; :func:`bert_tokenizer` reads the folder."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / "tokenizer.json"))

    def shortened(self, texts: Sequence[str]) -> int:
        """How many of some texts are longer than ``max_length`` tokens and so lose their end."""
        return sum(bool(row.overflowing) for row in self._tokenizer.encode_batch(list(texts)))


class WordTokenizer(FixedLength):
    """WordPiece over a word list; implements :class:`confed.data.encode.Tokenizer`.

    Text is lower-cased, accents and punctuation are dropped, and words are split at white space. A known word
    is one token; a known word with a plural ending is two; anything else is ``[UNK]``. A text becomes
    ``[CLS] words [SEP]``, cut so that it never exceeds ``max_length``, and padded to exactly that.

    The ids are ``SPECIAL_TOKENS``, ``SUFFIXES``, then ``words`` in order without repetitions: two word lists
    with a common beginning give that beginning the same ids, which is what lets a model reuse its embeddings.
    """

    def __init__(self, words: Sequence[str], max_length: int = 16) -> None:
        import tokenizers
        from tokenizers import normalizers, pre_tokenizers

        self.words = tuple(dict.fromkeys(word.lower() for word in words))
        if not self.words:
            raise ValueError("words must name at least one word, got an empty list")
        self.vocabulary = tuple(dict.fromkeys(SPECIAL_TOKENS + SUFFIXES + self.words))
        # The stubs miss some constructors of the normalizers.
        steps: list[Any] = [
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[^\w\s]|_"), " "),
        ]
        vocabulary = {token: index for index, token in enumerate(self.vocabulary)}
        pieces = _word_piece(vocabulary, normalizers.Sequence(steps), pre_tokenizers.Whitespace())
        super().__init__(pieces, max_length)

    def save(self, directory: Path | str) -> None:
        """Writes the two files of a tokenizer folder, for :meth:`load` and for ``AutoTokenizer``."""
        super().save(directory)
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.max_length,
            **dict(zip(names, SPECIAL_TOKENS, strict=True)),
        }
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path | str) -> "WordTokenizer":
        """A tokenizer written by :meth:`save`."""
        file = Path(directory) / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"expected a tokenizer at {file}, found no such file")
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
        skip = {*SPECIAL_TOKENS, *SUFFIXES}
        return cls([word for word, _ in vocabulary if word not in skip], content["truncation"]["max_length"])


class BertTokenizer(FixedLength):
    """BERT's uncased WordPiece; implements :class:`confed.data.encode.Tokenizer`."""


def check_length(max_length: int, unit: str = "word") -> None:
    """Check that a text has room for something between the tokens that mark its ends."""
    if max_length < 3:
        raise ValueError(f"model.max_length must be at least 3 ([CLS], a {unit}, [SEP]), got {max_length}")


def bert_tokenizer(source: Path | str, max_length: int = 40) -> BertTokenizer:
    """BERT's tokenizer from a vocabulary file, a folder, or a name on the Hugging Face hub."""
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers

    path = Path(source)
    if path.is_dir():
        candidates = [path / "tokenizer.json", path / "vocab.txt"]
        files = [candidate for candidate in candidates if candidate.is_file()]
        if not files:
            raise ValueError(f"expected tokenizer.json or vocab.txt in {path}, found neither")
        path = files[0]
    if not path.is_file():
        name = hub_name(str(source), short=True)
        if name is None:
            raise ValueError(f"expected a vocabulary file, a folder or a hub name, got {str(source)!r}")
        try:
            fetched = tokenizers.Tokenizer.from_pretrained(name)
        except Exception as error:  # the library raises bare ones
            raise ValueError(
                f"the vocabulary {name!r} is a name on the Hugging Face hub and could not be fetched from there; name "
                f"a folder or a file that you have, with model.vocabulary or model.pretrained: {error}"
            ) from error
        return BertTokenizer(fetched, max_length)
    if path.suffix == ".json":
        return BertTokenizer(tokenizers.Tokenizer.from_file(str(path)), max_length)
    vocabulary = {word: index for index, word in enumerate(path.read_text(encoding="utf-8").splitlines())}
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise ValueError(f"the vocabulary {path} must contain BERT's special tokens, it lacks {', '.join(missing)}")
    tokenizer = _word_piece(vocabulary, normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer())
    return BertTokenizer(tokenizer, max_length)


def _word_piece(vocabulary: dict[str, int], normalizer: Any, pre_tokenizer: Any) -> "tokenizers.Tokenizer":
    """WordPiece of texts ``[CLS] words [SEP]``."""
    import tokenizers

    model: Any = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    )
    return tokenizer
