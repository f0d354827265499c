"""Decoder network for captioning: the multimodal Transformer with next-token prediction.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", 2025: trained on texts, pictures
with captions and documents of both, tested on captions. All tokens of a sample go through one causal Transformer, the
text behind what it is about, and the state of a text's token scores the token that follows it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from confed.data.caption_batches import groups, text_masks
from confed.federation.protocols import Batch, Output
from confed.federation.specs import SearchesBeams
from confed.models.beam_search import beam_search
from confed.models.caption_tokenizer import END, NEVER, START
from confed.models.magneto import Encoder
from confed.models.modal_module import ModalEmbedding, ModalTransformer, Tokens, pool

__all__ = ["CaptionWriter"]


class CaptionWriter(ModalTransformer):
    """A causal Transformer over pictures and texts with a readout over the vocabulary.

    What comes out depends on the batch alone:

    * with ``text``: scores of the next token under teacher forcing, logits (M, V), at the M places of the batch where a
      next token is known, row after row;
    * without: the text that a beam search finds, logits int64 (B, max_length), from the start token to the end token
      and 0 behind it.

    Features (B, d_model) are the means of the last states of what was read. Batches are those of
    :mod:`confed.data.caption_tables`: documents have ``before_text`` and ``before_text_mask`` (B, P, L),
    ``before_shown`` (B, P) and ``before_image`` (B, P, 3, H, W) besides; mixed ones have up to three sets of keys.
    Positions are those within a picture or a text; the order of a document's turns shows in who sees whom.

    Args:
        embed: modality -> its embedding, with text among them.
        body: the Transformer W.
        vocab_size: number of token ids V.
        max_length: the most tokens of a text.

    Attributes:
        beams: width of the beam search, which the task sets.
        penalty: its power of the length.

    Raises:
        ValueError: there is no text among the modalities.
    """

    answer_head = "head"
    writes: ClassVar[str] = "captions"
    """Whether models write texts, which the captioning task needs."""

    def __init__(self, embed: Mapping[str, ModalEmbedding], body: Encoder, vocab_size: int, max_length: int) -> None:
        if "text" not in embed:
            raise ValueError(f"a model that writes must have text among its modalities, got {', '.join(embed)}")
        super().__init__(embed, body, vocab_size)
        self.max_length, self.beams, self.penalty = max_length, 5, 1.0

    def begin(self, task: Any) -> None:
        """Takes over how wide the task searches."""
        self.beams, self.penalty = (task.beams, task.length_penalty) if isinstance(task, SearchesBeams) else (5, 1.0)

    def forward(self, batch: Batch) -> Output:
        """See the class.

        Raises ``ValueError``: none of the model's modalities is in the batch, or a tensor is not as expected.
        """
        parts = groups(batch)
        if not any("text" in part for part in parts):
            sequence = self._sequence(batch)
            return Output(self._written(sequence), self._features(sequence, self._states(sequence)))
        scored: list[Tensor] = []
        features: list[Tensor] = []
        for part in parts:
            sequence = self._sequence(part)
            states = self._states(sequence)
            scored.append(states[self._known(part, sequence)])
            features.append(self._features(sequence, states))
        return Output(self.head(torch.cat(scored)), torch.cat(features))

    def write(self, batch: Batch, beams: int | None = None, penalty: float | None = None) -> Tensor:
        """The text that a beam search finds behind what a batch without ``text`` shows, int64 (B, max_length).

        Raises ``ValueError``: faults of the batch as in :meth:`forward`, or a width or a power out of range.

        Args:
            batch: pictures, or other inputs of the model.
            beams: width of the search; the model's by default.
            penalty: power of the length; the model's by default.
        """
        return self._written(self._sequence(batch), beams, penalty)

    def _sequence(self, batch: Batch) -> Tokens:
        """All tokens of a batch, those before a document's last turn first.

        Turns have spans of their own, named "before 0 image", "before 0 text" and so on.
        """
        if "before_text" not in batch:
            return self.tokens(batch)
        parts: list[tuple[str, Tensor, Tensor]] = []
        text, mask, shown = batch["before_text"], batch["before_text_mask"], batch["before_shown"]
        for turn in range(text.shape[1]):
            if "before_image" in batch and "image" in self.embed:
                states, _ = self.embed["image"]({"image": batch["before_image"][:, turn]})
                parts.append((f"before {turn} image", states, shown[:, turn, None].expand(states.shape[:2])))
            there = mask[:, turn] != 0
            # An absent text is read as one token of padding, of which nothing is seen.
            stand_in = there.long()
            stand_in[:, 0] = 1
            states, _ = self.embed["text"]({"text": text[:, turn], "text_mask": stand_in})
            parts.append((f"before {turn} text", states, there[:, : states.shape[1]]))
        last = self.tokens(batch)
        present = (
            last.states.new_ones(last.states.shape[:2], dtype=torch.bool) if last.present is None else last.present
        )
        parts += [(name, last.states[:, span], present[:, span]) for name, span in last.spans.items()]
        spans: dict[str, slice] = {}
        start = 0
        for name, states, _ in parts:
            spans[name] = slice(start, start := start + states.shape[1])
        return Tokens(torch.cat([s for _, s, _ in parts], 1), torch.cat([there for _, _, there in parts], 1), spans)

    def _states(self, sequence: Tokens) -> Tensor:
        return self.body(sequence.states, sequence.present, causal=True)

    @staticmethod
    def _known(batch: Batch, sequence: Tokens) -> Tensor:
        """At which tokens of a batch the next one of their text is known, bool (B, S)."""
        known = torch.zeros(sequence.states.shape[:2], dtype=torch.bool, device=sequence.states.device)
        for name, mask in text_masks(batch):
            if name in sequence.spans:
                span = sequence.spans[name]
                size = span.stop - span.start
                known[:, span.start : span.stop - 1] = mask[:, 1:size] != 0
        return known

    @staticmethod
    def _features(sequence: Tokens, states: Tensor) -> Tensor:
        """The mean over modalities of plain samples; of documents, the mean over tokens."""
        if any(name.startswith("before") for name in sequence.spans):
            return pool(Tokens(states, sequence.present, {"all": slice(0, states.shape[1])}))
        return pool(sequence._replace(states=states))

    def _written(self, sequence: Tokens, beams: int | None = None, penalty: float | None = None) -> Tensor:
        """Beam search behind a sequence.

        What each layer read stays, so that a step computes one token per text; keys and values are made of it anew.
        """
        beams = int(self.beams if beams is None else beams)
        rows, device = len(sequence.states), sequence.states.device
        read = self._layer_inputs(sequence)
        seen = None if sequence.present is None else sequence.present.repeat_interleave(beams, 0)[:, None, None, :]
        prefix = [states.repeat_interleave(beams, 0) for states in read]
        written: list[Tensor] = []

        def step(texts: Tensor, parents: Tensor | None) -> Tensor:
            if parents is not None:
                written[:] = [states[parents] for states in written]
            states, _ = self.embed["text"]({"text": texts, "text_mask": torch.ones_like(texts)})
            x = states[:, -1:]
            mask = None
            if seen is not None:
                own = torch.ones(len(texts), 1, 1, texts.shape[1], dtype=torch.bool, device=device)
                mask = torch.cat([seen, own], 3)
            for number, layer in enumerate(self.body.layers):
                if number == len(written):
                    written.append(x)
                else:
                    written[number] = torch.cat([written[number], x], 1)
                x = layer(x, context=torch.cat([prefix[number], written[number]], 1), mask=mask)
            return self.head(self.body.norm(x[:, 0]))

        found = beam_search(
            step,
            rows,
            start=START,
            end=END,
            beams=beams,
            longest=self.max_length,
            penalty=self.penalty if penalty is None else penalty,
            never=NEVER,
            device=device,
        )
        return found.tokens

    def _layer_inputs(self, sequence: Tokens) -> list[Tensor]:
        """What each layer reads of a sequence, (B, S, d_model) each."""
        size, device = sequence.states.shape[1], sequence.states.device
        mask = None
        if sequence.present is not None:
            earlier = torch.ones(size, size, dtype=torch.bool, device=device).tril()
            mask = (sequence.present[:, None, None, :] | torch.eye(size, dtype=torch.bool, device=device)) & earlier
        x, read = self.body.dropout(sequence.states), list[Tensor]()
        for layer in self.body.layers:
            read.append(x)
            x = layer(x, mask=mask, causal=mask is None)
        return read
