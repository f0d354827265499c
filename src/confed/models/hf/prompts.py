"""Prompts of generative vision-language models, and answers as tokens.

A prompt's token ids hold the *placeholder* of each of its pictures, such as ``<image>``. How many tokens a picture
becomes depends on its size; :meth:`Placeholder.put_in` puts them in when the picture is at hand.

A tokenizer of ``transformers`` turns the string ``<end_of_utterance>`` into the token that ends a turn, whoever wrote
it. Chat templates mix people's texts with control tokens of their own, so the two are told apart before the template is
filled in: :meth:`LiteralEncoder.mark` puts a private character in place of every control token that a text spells, and
:meth:`LiteralEncoder.ids` encodes what stands there as plain text.

Processors of ``transformers`` for pictures and texts, also where libraries for videos are missing.

Many processors have a part for videos, which needs torchvision, beside one for pictures, which does not. Videos are not
read here, so that part is left out; its settings are kept, so that a processor is saved whole. Of image processors with
two implementations the one on Pillow and NumPy is taken wherever there is one: its pixels are the same on all machines,
whether or not torchvision is installed.
"""

import json
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from confed.data.chat import Conversation, Said, asked, pictures_shown
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.inputs import processor_settings
from confed.models.pretrained import reading
from confed.models.tokenizer import Form

# Control tokens that people write in their texts --------------------------------------------------------------

_FIRST = 0xF0000  # first character that marks a control token: Unicode's supplementary private use area A


class LiteralEncoder:
    """Token ids of filled-in chat templates in which people's texts are text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control = sorted(added, key=len, reverse=True)  # the longest first, as one may begin like another
        self._numbers = set(added.values())
        self._spelled = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        self._split = re.compile(f"({self._spelled.pattern})")
        self._marks = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + max(len(self._control), 1) - 1)}]")

    def mark(self, text: str) -> str:
        """A person's text with a private character in place of each control token that it spells."""
        if private := self._marks.search(text):
            raise ValueError(f"its text has the private character U+{ord(private[0]):X}: leave it out")
        return self._spelled.sub(lambda match: chr(_FIRST + self._control.index(match[0])), text)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text whose marked control tokens are read as text, and all others as control tokens."""
        marked = self._marks.search(text)
        if marked is None:
            return self._encoded(text)
        parts = self._parts(text)
        # a tokenizer that treats the beginning of its input in a way of its own cannot read a text part by part.
        plain = [self._marks.sub("x", piece) for piece in parts]
        spelled = [self._encoded(self._unmarked(piece), literal=bool(self._marks.search(piece))) for piece in parts]
        loose = any(
            self._numbers & {*ids} for piece, ids in zip(parts, spelled, strict=True) if self._marks.search(piece)
        )
        if loose or list(chain.from_iterable(self._encoded(piece) for piece in plain)) != self._encoded("".join(plain)):
            raise ValueError(
                f"its text has {self._unmarked(marked[0])!r}, a control token of the model that its tokenizer cannot "
                "read as text: leave it out"
            )
        return list(chain.from_iterable(spelled))

    def _parts(self, text: str) -> list[str]:
        """A text, divided at control tokens into parts with marks, which have no control tokens, and parts without."""
        pieces = [piece for piece in self._split.split(text) if piece]
        grouped = groupby(pieces, key=lambda piece: piece if self._marks.search(piece) else "")
        return ["".join(group) for _, group in grouped]

    def _unmarked(self, text: str) -> str:
        return self._marks.sub(lambda match: self._control[ord(match[0]) - _FIRST], text)

    def _encoded(self, text: str, *, literal: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=literal)["input_ids"]


# Texts and pictures of a prompt as a processor of transformers writes them ------------------------------------

SAMPLE: Conversation = asked("q")
TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
"""What processors make of texts; everything else they make of pictures."""

_GREY = np.zeros((32, 48, 3), np.uint8)


class Placeholder:
    """Prompts by a chat template, and the tokens of a picture within them."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._expanded: dict[tuple[int, ...], list[int]] = {}
        self._literal = LiteralEncoder(processor.tokenizer)
        self.text = self._text()  # what the chat template writes for a picture
        # its token ids before the picture is known
        self.ids: list[int] = processor.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        if not self.text or not self.ids:
            raise ValueError(f"the chat template of {type(processor).__name__} writes nothing for a picture")

    @staticmethod
    def of(processor: Any) -> "Placeholder":
        """That of a processor with a chat template, or of one that writes its prompts itself."""
        return Placeholder(processor) if getattr(processor, "chat_template", None) else BarePlaceholder(processor)

    def _text(self) -> str:
        # What a second picture adds: templates may write a text behind a picture otherwise than one without.
        with_pictures, without = self.rendered((Said("user", (None, None, "q")),)), self.rendered(SAMPLE)
        start = next(
            (i for i, pair in enumerate(zip(with_pictures, without, strict=False)) if pair[0] != pair[1]), len(without)
        )
        return with_pictures[start : start + len(with_pictures) - len(without)]

    @property
    def settings(self) -> str:
        """Digest of those of the processor."""
        return processor_settings(self._processor)

    def processed(self, *pictures: np.ndarray) -> dict[str, Tensor]:
        """What the processor makes of the pictures of one prompt."""
        made = self._processor(
            text=[self.text * len(pictures)], images=[list(pictures)], add_special_tokens=False, return_tensors="pt"
        )
        return dict(made)

    def tokens(self, picture: np.ndarray) -> list[int]:
        """What stands for a picture in a prompt, ids; pictures of one size have the same."""
        if picture.shape not in self._expanded:
            self._expanded[picture.shape] = self._tokens(picture)
        return self._expanded[picture.shape]

    def _tokens(self, picture: np.ndarray) -> list[int]:
        return self.processed(picture)["input_ids"][0].tolist()

    def written(self, conversation: Conversation, answer: str | None = None) -> list[int]:
        """Token ids of a conversation with placeholders, with its answer or up to where that begins."""
        marked_answer = None if answer is None else self._literal.mark(answer)
        return self._literal.ids(self.rendered(self._marked(conversation), marked_answer))

    def adds_tokens(self, conversation: Conversation, text: str) -> bool:
        bare = self.rendered(self._marked(conversation))
        return len(self._literal.ids(bare + self._literal.mark(text))) > len(self._literal.ids(bare))

    def fault(self, conversation: Conversation) -> str:
        """What is wrong with our ids of a conversation, compared with those of the processor; empty if nothing is."""
        turns = to_chat_messages(conversation)
        contents = chain.from_iterable(turn["content"] for turn in turns)
        for piece in [piece for piece in contents if piece["type"] == "image"]:
            piece["image"] = _GREY
        read = self._processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
        ids, mask = left_padded([self.written(conversation)], padding(self._processor.tokenizer))
        ours, _ = self.put_in(ids, mask, _GREY, [pictures_shown(conversation)])
        theirs = list(map(int, read["input_ids"][0]))
        if ours[0].tolist() == theirs:
            return ""
        return (
            f"the prompts of {type(self._processor).__name__} cannot be split into text and picture: it gives "
            f"{len(theirs)} tokens where its parts give {ours.shape[1]}"
        )

    def places(self, ids: Sequence[int]) -> list[int]:
        """Where placeholders begin in a prompt."""
        positions: list[int] = []
        for start in range(len(ids) - len(self.ids) + 1):
            free = not positions or start >= positions[-1] + len(self.ids)
            if free and ids[start] == self.ids[0] and list(ids[start : start + len(self.ids)]) == self.ids:
                positions.append(start)
        return positions

    def put_in(
        self, text: Tensor, mask: Tensor, picture: np.ndarray, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Prompts with the tokens of pictures of one size in place of their placeholders."""
        tokens, width = self.tokens(picture), len(self.ids)
        rows: list[list[int]] = []
        for number, (ids, absent) in enumerate(zip(text.tolist(), (mask == 0).sum(1).tolist(), strict=True)):
            prompt_ids = ids[absent:]
            positions, count = self.places(prompt_ids), 1 if counts is None else counts[number]
            if len(positions) != count:
                raise ValueError(
                    f"a prompt lacks the placeholder {self.text!r} of its picture" if not positions else
                    f"a prompt has {len(positions)} placeholders {self.text!r} and {count} pictures"
                )  # fmt: skip
            for start in reversed(positions):
                prompt_ids[start : start + width] = tokens
            rows.append(prompt_ids)
        return left_padded(rows, padding(self._processor.tokenizer), text.device)

    def rendered(self, conversation: Conversation, answer: str | None = None) -> str:
        """A conversation as the chat template writes it, with its answer or up to where that begins."""
        from jinja2.exceptions import TemplateError

        turns = to_chat_messages(conversation if answer is None else (*conversation, Said("assistant", (answer,))))
        try:
            return self._processor.apply_chat_template(turns, add_generation_prompt=answer is None, tokenize=False)
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {type(self._processor).__name__} refuses the conversation: {error}"
            ) from error

    def _marked(self, conversation: Conversation) -> Conversation:
        """A conversation whose texts spell no control token."""
        items: list[Said] = []
        for role, parts in conversation:
            items.append(Said(role, tuple(None if piece is None else self._literal.mark(piece) for piece in parts)))
        return tuple(items)

    def _ids(self, text: str) -> list[int]:
        return self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]


class BarePlaceholder(Placeholder):
    """Prompts that a processor without chat template makes of one picture and one text.

    PaliGemma's is such a one: it writes the picture, a start, the text and a line's end (Beyer et al., "PaliGemma",
    2024, section 3.2.1). An answer follows as its tokens and the end of the text. A processor that joins picture and
    text and adds nothing is that of a model that was not trained on questions.
    """

    def _text(self) -> str:
        name, image = type(self._processor).__name__, str(getattr(self._processor, "image_token", "") or "")
        fault = ValueError(
            f"the processor {name} has no chat template; take an instruction-tuned model, or put a "
            "chat_template.jinja into its folder"
        )
        if not image:
            raise fault
        (self._image,) = self._ids(image)
        self._lead = image
        try:
            read = self._asked("q")
        except StopIteration:  # Florence-2's processor writes the picture's token itself
            self._lead = ""
            read = self._asked("q")
        if len([token for token in read if token != self._image]) <= len(self._ids("q")):
            raise fault
        return image

    def processed(self, *pictures: np.ndarray) -> dict[str, Tensor]:
        text = self._lead * len(pictures)
        # As arrays: PaliGemma's makes labels of token ids, which numpy warns of where they are tensors.
        made = self._processor(text=[text], images=[list(pictures)], return_tensors="np")
        return {key: torch.from_numpy(np.asarray(value)) for key, value in made.items()}

    def _tokens(self, picture: np.ndarray) -> list[int]:
        return [token for token in super()._tokens(picture) if token == self._image]

    def written(self, conversation: Conversation, answer: str | None = None) -> list[int]:
        turn = conversation[-1]
        if len(conversation) != 1 or turn.parts.count(None) != 1:
            raise ValueError(
                f"the processor {type(self._processor).__name__} has no chat template and reads one question about one "
                f"picture; this is of {len(conversation)} turns with {pictures_shown(conversation)} pictures"
            )
        text = " ".join(piece for piece in turn.parts if piece is not None)
        if self._literal.mark(text) != text:
            raise ValueError(
                "its text has a control token of the model, which a processor without chat template cannot read as "
                f"text: leave it out of {text[:80]!r}"
            )
        ids = self._asked(text)
        first, count = ids.index(self._image), ids.count(self._image)
        ids[first : first + count] = [self._image]
        return (
            ids
            if answer is None
            else [*ids, *self._literal.ids(self._literal.mark(answer)), self._processor.tokenizer.eos_token_id]
        )

    def adds_tokens(self, conversation: Conversation, text: str) -> bool:
        return bool(self._ids(text))

    def fault(self, conversation: Conversation) -> str:
        """Empty for a question about a picture: the ids are the processor's own."""
        try:
            self.written(conversation)
        except ValueError as error:
            return str(error)
        return ""

    def _asked(self, text: str) -> list[int]:
        return list(map(int, self._processor(text=[self._lead + text], images=[[_GREY]])["input_ids"][0]))


def padding(tokenizer: Any) -> int:
    pad_token = tokenizer.pad_token_id
    return int(pad_token if pad_token is not None else tokenizer.eos_token_id)


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None, width: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 (N, L), of rows of ids."""
    length = max((*map(len, rows), width), default=0)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], dtype=torch.int64, device=device)
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return ids.view(len(rows), length), torch.tensor(mask, dtype=torch.int64, device=device).view(len(rows), length)


def to_chat_messages(conversation: Conversation) -> list[dict[str, Any]]:
    result = []
    for role, parts in conversation:
        result.append(
            {"role": role, "content": [{"type": "image"} if p is None else {"type": "text", "text": p} for p in parts]}
        )
    return result


def typed_inputs(body: Any, placeholder: Placeholder) -> dict[str, bool]:
    """Inputs that tell kinds of tokens apart: True where these are the pictures', False where they are answers'."""
    made, parameters = placeholder.processed(_GREY), signature(body.model.forward).parameters
    names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in made and name in parameters]
    return {name: bool(made[name].any()) for name in names}


# Processors ----------------------------------------------------------------------------------------------------

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

    form: ClassVar[Form] = "chat"

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
