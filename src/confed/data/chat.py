"""Conversations about pictures: turns of text and picture parts, and how many pictures these show."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

Role = Literal["system", "user", "assistant"]


class Said(NamedTuple):
    """One turn of a conversation; its parts are texts, and None where the next of the example's pictures stands."""

    role: Role
    parts: tuple[str | None, ...]


Conversation = tuple[Said, ...]
"""What stands before an answer; the last turn is a user's."""


def asked(question: str) -> Conversation:
    """A conversation of one turn: a picture and a question about it."""
    return (Said("user", (None, question)),)


def pictures_shown(conversation: Sequence[Said]) -> int:
    """Number of picture parts."""
    result = 0
    for turn in conversation:
        for piece in turn.parts:
            result += piece is None
    return result


def transcript(conversation: Sequence[Said]) -> str:
    """A conversation for people to read; of one turn its texts alone."""
    spoken: list[str] = []
    for turn in conversation:
        spoken.append(" ".join("[picture]" if piece is None else piece for piece in turn.parts))
    if len(spoken) == 1:
        return " ".join(piece for piece in conversation[0].parts if piece) or spoken[0]
    return "\n".join(f"{turn.role}: {text}" for turn, text in zip(conversation, spoken, strict=True))


def check_turns(conversation: Sequence[Said]) -> None:
    """Check that users and assistants take turns, behind a system turn if there is one, and that nothing is empty."""
    spoken = conversation[1:] if conversation and conversation[0].role == "system" else conversation
    for number, turn in enumerate(spoken):
        wanted = "assistant" if number % 2 else "user"
        if turn.role != wanted:
            place = "the conversation begins with" if not number else f"turn {number + 1} is of"
            raise ValueError(f"expected user and assistant to take turns, the user first, and {place} the {turn.role}")
    for number, turn in enumerate(conversation):
        if not any(piece is None or piece.strip() for piece in turn.parts):
            raise ValueError(f"expected a text or a picture in every turn, and turn {number + 1} has none")
        if turn.role != "user" and None in turn.parts:
            raise ValueError(f"expected pictures in turns of the user, and turn {number + 1} is of the {turn.role}")


def answered(tokens: Tensor) -> Tensor:
    """True at the tokens of answers, which 0 stands behind; an answer may have tokens with the id 0 but at its end."""
    return (tokens != 0).long().flip(-1).cummax(-1).values.flip(-1).bool() if tokens.shape[-1] else tokens != 0


def trimmed(text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, without the columns that are padding in all of them."""
    start = int(mask.any(0).int().argmax()) if mask.numel() else 0
    return text[:, start:], mask[:, start:]
