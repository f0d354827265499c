"""Conversations with a finished run's models about pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from confed.data.chat import Conversation, Said
from confed.data.examples import channels_first
from confed.data.pictures import PictureSource, read_picture, resize
from confed.inference.finished_run import FinishedRun

__all__ = ["Talk", "converses"]


def converses(run: FinishedRun) -> bool:
    """Whether a run's models write free answers."""
    return run.recipe.sections["task"]["name"] == "chat"


class Talk:
    """A conversation with a model: what was said before stands in the prompt of the next answer.

    Args:
        folder: a run folder, or a run that was read.
        images: pictures of any size: files, arrays or PIL pictures, shown with the first question in this
            order; may be none. They are squeezed to the shape of the training pictures.
        client: whose personal model answers; None for the global one.
        shared: with a client: the global values of what is shared, with the client's own private tensors.

    Attributes:
        turns: what was said so far.

    Raises:
        ValueError: the folder is not that of a finished run, it has no such model or one that holds no conversation,
            or a picture is missing or cannot be read.
    """

    def __init__(
        self,
        folder: Path | FinishedRun,
        images: Sequence[PictureSource],
        client: str | None = None,
        *,
        shared: bool = False,
    ) -> None:
        run = FinishedRun.of(folder)
        run.check(client, shared=shared)
        if not converses(run):
            raise ValueError(f"the models of {run.folder} hold no conversation: ask them one question (--question)")
        pictures = [read_picture(image) for image in images]  # before the data are made, which takes seconds
        run.load()
        self.model, self.turns = client or "global", tuple[Said, ...]()
        self._trained = run.model(client, shared=shared)
        self._task, self._tokenizer = run.task(client), run.tokenizer
        size = self._trained.image_size
        shown = [channels_first(resize(picture, size)[None]) for picture in pictures]
        self._pictures = torch.cat([p for p in shown if isinstance(p, torch.Tensor)]) if shown else None
        self._none = torch.zeros(1, 3, size, size, dtype=torch.uint8)

    def ask(self, question: str) -> str:
        """The model's answer, which becomes a part of the conversation.

        Raises:
            ValueError: the question is empty, or the prompt is too long.
        """
        if not question.strip():
            raise ValueError(f"question must contain at least a word, got {question!r}")
        count = 0 if self._pictures is None else len(self._pictures)
        first: tuple[None, ...] = () if self.turns else (None,) * count
        asked: Conversation = (*self.turns, Said("user", (*first, question.strip())))
        text, mask = self._tokenizer.padded([self._tokenizer.prompt(asked)])
        image = (self._none if self._pictures is None else self._pictures)[None]
        batch = {"image": image, "image_count": torch.tensor([count]), "text": text, "text_mask": mask}
        answer = self._task.texts(self._trained(batch))[0]
        self.turns = (*asked, Said("assistant", (answer or "…",)))
        return answer

    def asked(self, questions: Sequence[str]) -> dict[str, Any]:
        """Answers to questions, one after the other.

        Args:
            questions: in their order.

        Returns:
            ``model`` ("global" or the client), and ``turns``, each with ``question`` and ``answer``.
        """
        return {"model": self.model, "turns": [{"question": text, "answer": self.ask(text)} for text in questions]}
