"""Pretraining of ``smolvlm_mini``: a small Idefics3 with a byte-pair tokenizer of its own, which writes answers.

All questions about a picture are read in one pass: the picture's tokens once, then each question with its answer, and a
request for a caption. No question sees another one, and each one's positions start behind the picture, so that the
model learns what single questions would teach, for about half the computation.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.refusals import refuse
from confed.data.seeding import generator
from confed.federation.protocols import Batch
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer
from confed.models.pretrained import FACTS, States, seeded, write_weights

# Byte-pair tokenizer and folder of a mini that transformers reads ---------------------------------------------


def byte_pair_tokenizer(texts: Sequence[str], vocabulary: int, special: Sequence[str], after: Any = None) -> Any:
    """A byte-pair tokenizer that was trained on some texts; ``after`` puts tokens around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    # The space before a word belongs to its token, also before the first one, so that a word has one token everywhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    if after is not None:
        tokenizer.post_processor = after
    return tokenizer


def write_folder(folder: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes weights as ``transformers`` reads them, and how they were made."""
    write_weights(folder / "model.safetensors", weights, {"format": "pt"})
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


QUESTIONS = 4
"""Public questions about a picture."""
CAPTION = "Describe the picture."
"""The request that a caption answers."""

SPECIAL = ("<pad>", "<unk>", "<user>", "<assistant>", "<end_of_utterance>", "<image>", "<fake_token_around_image>",
           "<global-img>")  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIXELS, PATCH, WIDTH = 64, 16, 128
"""Side of a picture and of a patch, one for each cell of the public pictures; features per token."""
VOCABULARY = 1024
"""Most tokens; merges end when each word of the public texts is one."""
LAYER = 1
"""Decoder layer behind which the question's words are tagged, so that later layers can read what they stand for."""


def captions(tags: Any, seed: int) -> list[str]:
    """One caption of each public picture, put in one of the five ways of the captioning benchmark."""
    from confed.datasets.scene_captions import WAYS, tell
    from confed.datasets.scenes.graph import objects

    ways = generator(seed, "captions", "public").integers(len(WAYS), size=len(tags))
    return [tell(objects(tags, picture), WAYS[way]) for picture, way in enumerate(ways.tolist())]


def trained_processor(texts: Sequence[str]) -> Any:
    """The processor: a byte-pair tokenizer trained on some texts, pictures of 64 x 64 pixels, and a chat template."""
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pair_tokenizer(texts, VOCABULARY, SPECIAL), pad_token="<pad>", unk_token="<unk>",
        bos_token="<user>", eos_token="<end_of_utterance>", padding_side="left",
    )  # fmt: skip
    side = {"longest_edge": PIXELS}
    pictures = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    return Idefics3Processor(pictures, tokenizer, image_seq_len=(PIXELS // PATCH) ** 2, chat_template=TEMPLATE)


def word_ids(tokenizer: ChatTokenizer, words: Sequence[str]) -> Tensor:
    """Token ids of words, (n,)."""
    rows: list[list[int]] = [tokenizer.tokenizer(word)["input_ids"] for word in words]
    if several := [word for word, row in zip(words, rows, strict=True) if len(row) != 1]:
        refuse("public words", "one token each", found=f"several of {several[0]!r}")
    return torch.tensor(rows)[:, 0]


class ChatLearner(HuggingFaceVLM):
    """The untrained model, which learns from all questions about a picture at once."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int) -> None:
        from transformers import AutoModelForImageTextToText

        super().__init__(seeded(seed, lambda: AutoModelForImageTextToText.from_config(_config(tokenizer))), tokenizer)
        picture = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        self._before = [SPECIAL.index("<user>"), *tokenizer.placeholder.tokens(picture)]
        self._request = self._asked(tokenizer([CAPTION])[0][0].tolist())
        self._kept: dict[str, Tensor] = {}
        # Patches are tagged as the decoder reads them, so that words find them by their embeddings.
        self.body.model.connector.register_forward_hook(self._keep("early"))
        self.body.get_decoder().layers[LAYER].register_forward_hook(self._keep("asked"))

    def pretraining_states(self, batch: Batch) -> States:
        """The model's inside on a batch; see :class:`confed.models.pretrained.Pretrainable`."""
        ids, question_numbers, target, words = self._joined(batch)
        n, start = ids.shape[1], len(self._before)
        sees = (question_numbers[:, None] == 0) | (question_numbers[:, None] == question_numbers[:, :, None])
        sees &= torch.ones(n, n, dtype=torch.bool).tril()
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
        hidden = self.body.model(
            input_ids=ids, attention_mask=mask, position_ids=_positions(question_numbers, start),
            **self._pixels(batch["image"][::QUESTIONS]), use_cache=False,
        ).last_hidden_state  # fmt: skip
        told = question_numbers == QUESTIONS + 1
        loss = torch.stack([
            F.cross_entropy(self.body.get_output_embeddings()(hidden[here]), target[here])
            for here in ((target > 0) & ~told, (target > 0) & told)
        ]).sum()  # fmt: skip
        rows = torch.arange(len(words)) // QUESTIONS
        return States(
            answer_loss=loss, early=self._kept["early"], asked=self._kept["asked"][rows[:, None], words],
            words=self.body.get_input_embeddings().weight,
        )  # fmt: skip

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Writes weights and processor as ``transformers`` reads them, and how they were made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(folder)
        self.body.config.use_cache = True  # off while answers are learned; who writes with the model wants it
        self.body.config.save_pretrained(folder)
        self.body.config.use_cache = False
        self.body.generation_config.save_pretrained(folder)
        tied = set(self.body.all_tied_weights_keys)
        write_folder(folder, {n: value for n, value in self.body.state_dict().items() if n not in tied}, facts)

    def _joined(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens of pictures and questions in one row per picture."""
        ids: list[list[int]] = []
        parts: list[list[int]] = []
        targets: list[list[int]] = []
        questions, width = batch["text"].tolist(), batch["text"].shape[1]
        answers, told = batch["answer_tokens"].tolist(), batch["caption_tokens"].tolist()
        words = torch.zeros(len(questions), width, dtype=torch.int64)
        for first in range(0, len(questions), QUESTIONS):
            row, question_numbers, target = list(self._before), [0] * len(self._before), [0] * len(self._before)
            turns = [(self._asked(questions[first + i]), answers[first + i]) for i in range(QUESTIONS)]
            for number, (question, answer) in enumerate([*turns, (self._request, told[first])]):
                written = [token for token in answer[1:] if token]
                if number < QUESTIONS:
                    words[first + number, width - len(question) :] = torch.arange(len(row), len(row) + len(question))
                row += question + written[:-1]
                question_numbers += [number + 1] * (len(question) + len(written) - 1)
                target += [0] * (len(question) - 1) + written
            ids.append(row)
            parts.append(question_numbers)
            targets.append(target)
        return _padded(ids, 0), _padded(parts, -1), _padded(targets, 0), words

    @staticmethod
    def _asked(ids: list[int]) -> list[int]:
        """A prompt's ids behind its picture."""
        return ids[ids.index(SPECIAL.index("<image>")) + 1 :]

    @staticmethod
    def _pixels(images: Tensor) -> dict[str, Tensor]:
        """What the processor makes of pictures of 64 x 64 pixels, all at once."""
        seen = torch.ones(len(images), 1, *images.shape[2:], dtype=torch.int64)
        return {"pixel_values": images.float().div(127.5).sub(1)[:, None], "pixel_attention_mask": seen}

    def _keep(self, name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._kept[name] = output if isinstance(output, Tensor) else output[0]

        return keep


def _positions(question_numbers: Tensor, start: int) -> Tensor:
    """Positions of tokens, (M, n): questions start behind the picture, all at the same place."""
    place = torch.arange(question_numbers.shape[1]).expand_as(question_numbers)
    begins = torch.zeros_like(question_numbers)
    for number in range(1, QUESTIONS + 2):
        here = question_numbers == number
        begins = torch.where(here, here.int().argmax(1, keepdim=True) - start, begins)
    return place - begins


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def _config(tokenizer: ChatTokenizer) -> Any:
    from transformers import AutoConfig

    common = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    text = {
        **common, "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4,
        "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 1024, "pad_token_id": 0,
        "bos_token_id": SPECIAL.index("<user>"), "eos_token_id": SPECIAL.index("<end_of_utterance>"),
        "tie_word_embeddings": True, "initializer_range": 0.05,
    }  # fmt: skip
    vision = {**common, "num_hidden_layers": 2, "image_size": PIXELS, "patch_size": PATCH}
    return AutoConfig.for_model(
        "idefics3", text_config=text, vision_config=vision, scale_factor=1, image_token_id=SPECIAL.index("<image>"),
        tie_word_embeddings=True,
    )  # fmt: skip
