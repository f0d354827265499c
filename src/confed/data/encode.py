"""Examples of visual question answering as tensors, with the tokenizer of a backbone."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import Examples
from confed.data.picture_tables import StoredPictures, channels_first
from confed.data.regions import Regions
from confed.data.table import Table
from confed.data.targets import SoftTargets
from confed.federation.actions import OFFERED


class Tokenizer(Protocol):
    """Protocol of tokenizers of questions."""

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding), both int64 of shape (N, L)."""
        ...


def encode(
    examples: Examples,
    tokenizer: Tokenizer,
    answers: Sequence[str],
    types: Sequence[str],
    images: Tensor | StoredPictures | None = None,
    *,
    outside: bool = False,
    width: int = 0,
    regions: Regions | None = None,
) -> Table:
    """Examples as tensors."""
    label_of = {answer: label for label, answer in enumerate(answers)}
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if not outside and answer not in label_of:
            raise ValueError(
                f"example {name!r}: the answer {answer!r} is not in the vocabulary of {len(label_of)} answers"
            )
    text, mask = tokenizer(examples.questions)
    extra: dict[str, Tensor] = {}
    targets: SoftTargets | None = None
    if examples.annotations is not None:
        targets = SoftTargets.of(examples.annotations, answers, max(width, len(answers)))
    if examples.choices is not None:
        extra |= _choices(examples, tokenizer)
    if examples.offered is not None:
        extra[OFFERED] = _offered(examples, examples.offered, answers, max(width, len(answers)))
    type_of = {name: number for number, name in enumerate(types)}
    label = torch.tensor([label_of.get(a, -1) for a in examples.answers], dtype=torch.int64)
    if images is None and regions is None:
        images = channels_first(examples.images)
    return Table(
        images if regions is None else None,
        torch.from_numpy(np.asarray(examples.image_index, dtype=np.int64)),
        {
            "text": text,
            "text_mask": mask,
            "label": label,
            "type": torch.tensor([type_of[t] for t in examples.types], dtype=torch.int64),
            **({"answerable": label >= 0} if outside else {}),
            **extra,
        },
        regions,
        targets,
    )


def _offered(examples: Examples, offered: Sequence[str], answers: Sequence[str], width: int) -> Tensor:
    """Which of the classes each example is offered, bool (N, width)."""
    answer_set = set(answers)
    if strange := [name for name in offered if name not in answer_set]:
        raise ValueError(
            f"the class {strange[0]!r} is offered and is not in the vocabulary of {len(answer_set)} answers"
        )
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if answer not in offered:
            raise ValueError(f"example {name!r}: its class {answer!r} is not among the {len(offered)} that are offered")
    row = torch.tensor([answer in set(offered) for answer in answers] + [False] * (width - len(answers)))
    return row.expand(len(examples), -1).clone()


def _choices(examples: Examples, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Every question together with each text offered with it: ``choices`` and ``choices_mask``, (N, K, L)."""
    assert examples.choices is not None
    pairs = zip(examples.questions, examples.choices, strict=True)
    texts: list[str] = []
    for question, offered_answers in pairs:
        texts += [f"{question} {offered}" for offered in offered_answers]
    text, mask = tokenizer(texts)
    k = len(examples.choices[0]) if len(examples) else 0
    shape = (len(examples), k, text.shape[-1])
    return {"choices": text.reshape(shape), "choices_mask": mask.reshape(shape)}
