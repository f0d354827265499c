"""Prompts of generative vision-language models, and answers as tokens.

A prompt's token ids hold a placeholder for each of its pictures (:mod:`confed.models.hf.placeholder`). That these give
the ids that the processor gives is checked when the tokenizer is made.

Processors of ``transformers`` for pictures and texts, also where libraries for videos are missing.

Many processors have a part for videos, which needs torchvision, beside one for pictures, which does not. Videos are not
read here, so that part is left out; its settings are kept, so that a processor is saved whole. Of image processors with
two implementations the one on Pillow and NumPy is taken wherever there is one: its pixels are the same on all machines,
whether or not torchvision is installed.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from confed.data.chat import Conversation, Said, asked, pictures_shown
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.hf.placeholder import SAMPLE, Placeholder, left_padded, padding
from confed.models.pretrained import reading

EXTRA = "install confed with the extra 'vlm'"  # what to do where a library is missing that a processor needs
VIDEOS = "video_preprocessor_config.json"  # file of the settings of a processor's part for videos
_PARTS = {"image_processor", "tokenizer", "video_processor"}
_LIBRARIES = ("torchvision", "num2words", "torchcodec", "timm", "librosa", "mistral_common", "sentencepiece")


def without_videos(kind: type) -> Any:
    """A kind of processor of the same name without its part for videos; ``kind`` itself where there is none."""
    parts: list[str] = kind.get_attributes()  # type: ignore[attr-defined]
    if "video_processor" not in parts:
        return kind
    others = [name for name in parts if name != "video_processor"]
    # SmolVLM's asks its part for videos how many frames to take, also where there are none.
    nothing = SimpleNamespace(num_frames=None, fps=None)
    overrides = {
        "get_attributes": classmethod(lambda _: list(others)),
        "video_processor": nothing,
        "video_settings": {},
    }
    return type(kind.__name__, (kind,), overrides)


def check_torchvision() -> None:
    """Check that torchvision, if it is installed, fits torch; a fault is a ValueError."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"the torchvision that is installed does not fit torch {torch.__version__} ({_line(error)}): install both "
            "from the same index, or remove torchvision"
        ) from error


def read_processor(where: str, source: str, revision: str = "") -> Any:
    """The processor of a folder or hub name, ``source`` to the user; a ``ValueError`` says what is missing."""
    from transformers import AutoProcessor

    options = {"revision": revision} if revision else {}
    try:
        with reading(source, "processor"):
            kind = _kind(where, options)
            if kind is not None:
                processor = _read(kind, where, options)
            else:
                processor = AutoProcessor.from_pretrained(where, trust_remote_code=False, **options)
    except (ImportError, ValueError) as error:
        cause = error.__cause__ or error  # what the library said, not cut
        lacking = "torchvision" in str(cause) and find_spec("torchvision") is None
        if isinstance(cause, ImportError) or lacking:
            raise ValueError(missing(source, cause)) from error
        raise
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise ValueError(f"{source!r} has no processor of pictures and texts, only a {type(processor).__name__}")
    return processor


def _kind(where: str, options: dict[str, Any]) -> Any:
    """The processor's class, if its parts are an image processor, a tokenizer and perhaps one for videos; else None."""
    import transformers
    from transformers import AutoConfig, ProcessorMixin
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    settings, _ = ProcessorMixin.get_processor_dict(where, **options)
    name = settings.get("processor_class")
    if name is None:
        try:
            name = PROCESSOR_MAPPING_NAMES.get(
                AutoConfig.from_pretrained(where, trust_remote_code=False, **options).model_type
            )
        except (OSError, ValueError, KeyError):  # what is wrong with it the library says itself
            return None
    kind: Any = getattr(transformers, str(name), None)
    if kind is None or not (isinstance(kind, type) and issubclass(kind, ProcessorMixin)):
        return None
    parts = set(kind.get_attributes())
    return kind if {"image_processor", "tokenizer"} <= parts <= _PARTS else None


def _read(kind: Any, where: str, options: dict[str, Any]) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    processor_kind = without_videos(kind)
    if processor_kind is not kind:
        processor_kind.video_settings = get_video_processor_config(where, **options)
    read = {
        "image_processor": AutoImageProcessor.from_pretrained(where, backend="pil", trust_remote_code=False, **options),
        "tokenizer": AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options),
    }
    settings, _ = processor_kind.get_processor_dict(where, **options)
    # SmolVLM's asks for the part for videos, though it may be None.
    return processor_kind.from_args_and_dict([read.get(name) for name in kind.get_attributes()], settings)


def missing(source: str, error: BaseException) -> str:
    """One line that names the library that a processor needs, and what to do."""
    text = _line(error)
    name = next((library for library in _LIBRARIES if library in text.lower()), None)
    what = f"the library {name}" if name else "a library"
    return f"the processor of {source!r} needs {what}, which is not installed: {EXTRA}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class ChatTokenizer(AnswerTokenizer):
    """Conversations as prompts that end where the answer begins, and answers as tokens; a question is one turn.

    Prompts are padded on the left, so that an answer follows its prompt directly. Control tokens that somebody spells
    in a text, such as ``<end_of_utterance>`` or a picture's placeholder, are read as text.
    """

    def __init__(self, processor: Any, max_length: int = 256) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.placeholder = Placeholder.of(processor)
        self._max_length, self.closing = max_length, True
        if fault := self.placeholder.fault(asked("What is in the picture?")):
            raise ValueError(fault)
        several = (Said("user", (None, "This?", None)), Said("assistant", ("Yes.",)), Said("user", (None, "?")))
        self._several = self.placeholder.fault(several)  # no matter as long as nobody has several turns or pictures

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer, without its pictures'."""
        return self._max_length

    @property
    def words(self) -> tuple[str, ...]:
        """Empty: the vocabulary is the model's."""
        return ()

    @property
    def pad(self) -> int:
        return padding(self.tokenizer)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding on the left) of prompts, both int64 of shape (N, L)."""
        return left_padded([self.prompt(asked(text)) for text in texts], self.pad)

    def padded(self, rows: Sequence[Sequence[int]], width: int = 0) -> tuple[Tensor, Tensor]:
        """Ids and mask of prompts, padded on the left to the longest or to a width."""
        return left_padded(rows, self.pad, width=width)

    def shortened(self, texts: Sequence[str]) -> int:
        """0: a question that is too long is an error, nothing is cut."""
        return 0

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation up to where the answer begins, with a placeholder for each of its pictures."""
        count = pictures_shown(conversation)
        if self._several and (count > 1 or len(conversation) > 1):
            raise ValueError(self._several)
        ids = self.placeholder.written(conversation)
        self._check_length(len(ids))
        places = len(self.placeholder.places(ids))
        if places != count:
            raise ValueError(
                f"its prompt has {places} placeholders {self.placeholder.text!r} for {count} "
                f"picture{'' if count == 1 else 's'}: leave the placeholder out of the texts"
            )
        return ids

    def learned(self, conversation: Conversation, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """A prompt up to where its answers begin to differ from it, and the ids of each answer behind that.

        What is learned is what an answer adds: the ids of prompt and answer behind their common beginning with those of
        the prompt alone. The rule does not depend on the template.
        """
        prompt = self.prompt(conversation)
        whole = [self.placeholder.written(conversation, answer) for answer in answers]
        common = len(prompt)
        for text, ids in zip(answers, whole, strict=True):
            common_length = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
            if len(ids) <= common_length or not text.strip() or not self.placeholder.adds_tokens(conversation, text):
                raise ValueError(f"the answer {text!r} adds no token to its prompt")
            if ids[-1] == 0:
                raise ValueError(f"the answer {text!r} ends in the token with id 0, which marks padding here")
            self._check_length(len(ids))
            common = min(common, common_length)
        return prompt[:common], [ids[common:] for ids in whole]

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Token ids of answers, int64, shape (C, T): a start, the answer, the end of the turn, and 0 behind it."""
        rows, seen = list[list[int]](), dict[tuple[int, ...], str]()
        for text in texts:
            prompt, (added,) = self.learned(SAMPLE, [text])
            other = seen.setdefault(tuple(added), text)
            if other != text:
                raise ValueError(f"the answers {other!r} and {text!r} have the same tokens, nothing tells them apart")
            rows.append([prompt[-1], *added])
        length = max(map(len, rows), default=0)
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64).view(-1, length)

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of token ids, int64 (B, L)."""
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def save(self, directory: Path | str) -> None:
        """Writes the processor's folder, with the settings of its part for videos, which the library asks for."""
        self.processor.save_pretrained(directory)
        if settings := getattr(self.processor, "video_settings", None):
            (Path(directory) / VIDEOS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path | str, max_length: int = 256) -> "ChatTokenizer":
        """The tokenizer of a folder that :meth:`save` wrote."""
        return cls(read_processor(str(directory), str(directory)), max_length)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise ValueError(
                f"it has {tokens} tokens without its pictures', more than model.max_length = {self.max_length}: raise "
                "it, or leave the example out; nothing is cut"
            )
