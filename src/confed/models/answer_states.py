"""States between the parts of models that write answers, and cross-attention to them."""

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Prefix", "Question", "attend"]


class Prefix(NamedTuple):
    """A batch after the part of the model that lies before the first adapter.

    Attributes:
        hidden: class token and patches, (B, 1 + P, d).
        text: the question's token ids, (B, L).
        mask: 1 for its tokens, 0 for padding, (B, L).
        tokens: tokens of the answers to learn, (B, K, T), or None.
        counted: which of them there are, bool (B, K); None where all are.
    """

    hidden: Tensor
    text: Tensor
    mask: Tensor
    tokens: Tensor | None
    counted: Tensor | None = None


class Question(NamedTuple):
    """What the decoder reads.

    Attributes:
        states: the question's tokens after they have seen the picture, shape (B, L, d).
        mask: added to attention scores: 0 for tokens, very low for padding, shape (B, 1, 1, L).
    """

    states: Tensor
    mask: Tensor


def attend(crossattention: Any, hidden: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
    """The cross-attention block of a BERT-like layer of ``transformers``, its residual sum and norm included.

    The library's own block drops the mask of what is attended to (5.23: ``BlipTextAttention`` does not hand it on), so
    that padding would be attended to as well; its parts are called one by one instead.

    Args:
        crossattention: the block.
        hidden: (B, T, d).
        states: what is attended to, (B, S, d').
        mask: added to attention scores, (B, 1, 1, S); None where everything counts.
    """
    context, _ = crossattention.self(hidden, encoder_hidden_states=states, encoder_attention_mask=mask)
    return crossattention.output(context, hidden)
