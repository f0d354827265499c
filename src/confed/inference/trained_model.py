"""A trained model with everything that turns a picture and a question into answers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confed.data.encode import Tokenizer
from confed.data.examples import channels_first
from confed.data.intake.opening import PictureSource, read_picture
from confed.data.pictures import Fit, resize
from confed.federation.protocols import Batch, Output
from confed.federation.specs import model_spec

_STRANGE = ("ꙮ", "𐍈")
"""Letters that no vocabulary has: their token is the one for unknown words."""


def unknown_words(tokenizer: Any, words: Iterable[str]) -> list[str]:
    """Those of some words that a tokenizer reads as unknown, each once; none of one that reads bytes."""
    distinct = list(dict.fromkeys(words))
    if not distinct:
        return []
    ids, _ = tokenizer([_STRANGE[0], " ".join(_STRANGE), _STRANGE[1], *distinct])
    once, twice, other, *rows = ids.tolist()
    if once != other:
        return []
    unknown = {token for token in once if twice.count(token) > once.count(token)}  # not those around every text
    return [word for word, row in zip(distinct, rows, strict=True) if unknown & {*row}]


@dataclass(frozen=True)
class TrainedModel:
    """A model with everything that turns a picture and a question into answers.

    Attributes:
        model: the network, in evaluation mode.
        tokenizer: what it reads questions with.
        answers: an answer's text by its label.
        image_size: pixels per side of the pictures that it was trained on.
        head: the head that answers: "answers"; "nlvr2", which judges a statement about two pictures; "entailment",
            which judges one about a picture; "choice", which chooses among texts that come with the question.
        encoder: for a network that reads regions, what makes them from a picture, empty if unknown; else None.
        fit: how a picture becomes a square.
    """

    model: nn.Module
    tokenizer: Tokenizer
    answers: tuple[str, ...]
    image_size: int
    head: str = "answers"
    encoder: str | None = None
    fit: Fit = "squeeze"

    def __call__(self, batch: Batch) -> Output:
        """The network on a batch, without gradients; its docstring says what batches hold."""
        with torch.inference_mode():
            return self.model(batch)

    def ask(
        self,
        image: PictureSource,
        question: str,
        top: int = 3,
        *,
        image2: PictureSource | None = None,
        choices: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The most probable answers to a question about a picture."""
        _check_question(question, self.head, image2, choices)
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        text, mask = self.tokenizer([question])
        batch = {**self.seen(image), "text": text, "text_mask": mask}
        if image2 is not None:
            batch["image2"] = self._picture(image2)
        offered = self.answers
        if choices:
            offered = tuple(choices)
            texts, masks = self.tokenizer([f"{question} {choice}" for choice in choices])
            batch |= {"choices": texts[None], "choices_mask": masks[None]}
        # A head may give more scores than this client has answers: as many as the client with the most needs.
        # Similarities are no logits: the temperature that the model was trained with makes them some.
        temperature = model_spec(self.model).temperature
        output = self(batch)
        if not output.logits.is_floating_point():  # written freely
            decoder: Any = self.tokenizer
            return {"answers": [{"answer": decoder.decode(output.logits)[0].strip()}], "unknown_words": []}
        scores = (output.logits[0, : len(offered)].float() / temperature).softmax(0)
        best = scores.topk(min(top, len(offered)))
        return {
            "answers": [
                {"answer": offered[int(label)], "probability": round(float(p), 6)}
                for p, label in zip(best.values, best.indices, strict=True)
            ],
            "unknown_words": self.unknown_words(" ".join([question, *choices])),
        }

    def unknown_words(self, question: str) -> list[str]:
        """The words of a question that the tokenizer turns into its token for unknown words."""
        if model_spec(self.model).converses:  # its tokens are of any text
            return []
        return unknown_words(self.tokenizer, re.findall(r"[^\W_]+", question))

    def seen(self, file: PictureSource) -> dict[str, Tensor]:
        """What the network reads of a picture: itself, or its regions."""
        if self.encoder is None:
            return {"image": self._picture(file)}
        from confed.models.grid_features import regions_of

        features, boxes = regions_of(read_picture(file), self.encoder)[np.zeros(1, dtype=np.int64)]
        return {"regions": torch.from_numpy(features), "boxes": torch.from_numpy(boxes)}

    def _picture(self, file: PictureSource) -> Tensor:
        table = channels_first(resize(read_picture(file), self.image_size, self.fit)[None])
        assert isinstance(table, Tensor)
        return table


def _check_question(question: str, head: str, image2: object, choices: Sequence[str]) -> None:
    """Checks that a question comes with the inputs that the head reads."""
    if not question.strip():
        raise ValueError(f"question must contain at least a word, got {question!r}")
    if (head == "nlvr2") != (image2 is not None):
        raise ValueError(
            "this model judges statements about two pictures: give a second one (--picture2)"
            if head == "nlvr2"
            else f"this model reads one picture (its head is {head!r}): leave the second one out"
        )
    if head == "choice" and len(choices) < 2:
        raise ValueError(f"this model chooses among texts: give at least two (--choice, repeated), got {len(choices)}")
    if head != "choice" and choices:
        raise ValueError(f"this model has a fixed answer set (its head is {head!r}): leave the choices out")
