"""Questions and answers in a batch: checks of their shapes, and removal of what is padding in the whole batch."""

from torch import Tensor

from confed.federation.protocols import Batch

__all__ = ["check_answers", "checked_answers", "checked_question", "trimmed"]


def check_answers(tokens: Tensor, weight: Tensor | None, rows: int) -> None:
    """Check of the shapes of a batch's answers.

    Args:
        tokens: the answers, int64 (B, T), or (B, K, T) where there are several.
        weight: of several answers, (B, K); positive where there is an answer.
        rows: number of examples B.

    Raises:
        ValueError: the shapes differ from these.
    """
    if tokens.ndim not in (2, 3) or len(tokens) != rows or tokens.shape[-1] < 2:
        raise ValueError(
            f"answer_tokens must have shape ({rows}, at least 2), or ({rows}, K, at least 2) with several answers, "
            f"got {tuple(tokens.shape)}"
        )
    if tokens.ndim == 3 and (weight is None or weight.shape != tokens.shape[:2]):
        came = "none" if weight is None else f"shape {tuple(weight.shape)}"
        raise ValueError(
            f"several answers need batch['answer_weight'] of shape {tuple(tokens.shape[:2])}, positive where there is "
            f"an answer, got {came}"
        )


def checked_question(batch: Batch, rows: int, longest: int, model: str) -> tuple[Tensor, Tensor]:
    """A question's token ids and which of them are no padding, each (B, L).

    Args:
        batch: has them as ``text`` and ``text_mask``.
        rows: number of examples B.
        longest: the most tokens L.
        model: who reads them, for the message.

    Raises:
        ValueError: a key is missing or a tensor has another shape.
    """
    for key in ("text", "text_mask"):
        if key not in batch:
            raise ValueError(f"a batch of {model} needs the key {key!r}, got {', '.join(sorted(batch))}")
    text, mask = batch["text"], batch["text_mask"]
    if text.ndim != 2 or len(text) != rows or text.shape[1] > longest:
        raise ValueError(f"text must have shape ({rows}, at most {longest}), got {tuple(text.shape)}")
    if mask.shape != text.shape:
        raise ValueError(f"text_mask must have the shape of text {tuple(text.shape)}, got {tuple(mask.shape)}")
    return text, mask


def checked_answers(batch: Batch, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """A batch's answers to learn and which of them there are, as :func:`trimmed` has them; None where there are none.

    Raises ``ValueError``: see :func:`check_answers`.

    Args:
        batch: may have them as ``answer_tokens`` and ``answer_weight``.
        rows: number of examples B.
    """
    tokens = batch.get("answer_tokens")
    if tokens is not None:
        check_answers(tokens, batch.get("answer_weight"), rows)
    return trimmed(tokens, batch["answer_weight"] > 0 if tokens is not None and tokens.ndim == 3 else None)


def trimmed(tokens: Tensor | None, counted: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Answers (B, K, T) without what is padding in the whole batch, and which there are, None where all are.

    Single answers, (B, T) without ``counted``, become (B, 1, T).
    """
    if tokens is None or counted is None:
        return (None if tokens is None else tokens[:, None]), None
    slots = _last(counted.any(0), 1)
    longest = _last(((tokens != 0) & counted[..., None]).flatten(0, 1).any(0), 2)
    tokens, counted = tokens[:, :slots, :longest], counted[:, :slots]
    return tokens, None if bool(counted.all()) else counted


def _last(used: Tensor, least: int) -> int:
    """How many columns reach up to the last one that is used, at least so many."""
    found = used.nonzero()
    return max(int(found[-1]) + 1 if len(found) else 0, least)
