"""Multimodal Transformers for captioning in three sizes, with next-token prediction.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", 2025: trained on texts, pictures
with captions and documents of both, tested on captions. All tokens of a sample go through one causal Transformer, the
text behind what it is about, and the state of a text's token scores the token that follows it.

The search of ``transformers`` steers models that are classes of that library; this one needs a function alone. Both
rank finished texts by log p(text) / length^penalty.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from confed.data.caption_batches import groups, text_masks
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import NOT_NEGATIVE, check_value
from confed.federation.specs import ModelSpec, SearchesBeams
from confed.models.caption_tokenizer import END, NEVER, START, caption_tokenizer
from confed.models.heads import COUNT
from confed.models.modal_segments import checked_modalities
from confed.models.modal_transformer import (
    Encoder,
    ModalEmbedding,
    ModalTransformer,
    Tokens,
    causal_mask,
    in_sequence,
    modal_options,
    modal_parts,
    picture_tokens,
    pool,
    read,
    segmenter,
)
from confed.models.pretrained import seeded
from confed.models.variants import variant

# Batched beam search for models that write texts token by token -----------------------------------------------

Step = Callable[[Tensor, Tensor | None], Tensor]
"""Scores of every token's successor, float (B K, V): of the texts so far, int64 (B K, t), and the rows that they
continue, int64 (B K,), or None in the first step."""


class Written(NamedTuple):
    tokens: Tensor  # from the start token to the end token, 0 behind it, int64 (B, longest)
    scores: Tensor  # log p(text) / length^penalty, float32 (B,)


def beam_search(
    step: Step,
    rows: int,
    *,
    start: int,
    end: int,
    beams: int = 5,
    longest: int = 24,
    penalty: float = 1.0,
    never: Sequence[int] = (),
    device: torch.device | None = None,
) -> Written:
    """The best finished text of each of B rows.

    In every step each of K unfinished texts of a row is continued with all V tokens; the K best that do not end go on,
    and the best that ended is kept. A row is done when no continuation of its texts can become better than that.
    """
    check_value(beams, COUNT, "beams")
    if longest < 3:
        raise ValueError(f"a written text needs room for 3 tokens at least (start, a word, end), got {longest}")
    check_value(penalty, Annotated[float, NOT_NEGATIVE], "length_penalty")
    texts = torch.full((rows * beams, 1), start, dtype=torch.int64, device=device)
    # Of equal beginnings one counts.
    alive = torch.full((rows, beams), -torch.inf, device=device)
    alive[:, 0] = 0.0
    nothing = torch.zeros(rows, longest, dtype=torch.int64, device=device)
    best = Written(nothing, torch.full((rows,), -torch.inf, device=device))
    first = torch.arange(rows, device=device).unsqueeze(1) * beams
    parents: Tensor | None = None
    for length in range(1, longest):
        surprise = step(texts, parents).float().log_softmax(-1)
        if never:
            surprise[:, list(never)] = -torch.inf
        total = alive.unsqueeze(2) + surprise.view(rows, beams, -1)  # (B, K, V)
        if length > 1:  # an empty text is none
            best = _better(best, texts.view(rows, beams, -1), total[:, :, end] / length**penalty, end)
        if length == longest - 1:
            break
        total[:, :, end] = -torch.inf
        alive, flat = total.flatten(1).topk(beams, dim=1)
        vocabulary = total.shape[2]
        parents = (first + flat // vocabulary).flatten()
        texts = torch.cat([texts[parents], (flat % vocabulary).view(-1, 1)], dim=1)
        # Log-probabilities only fall, and the longest text divides them by most.
        if bool((alive.amax(1) / (longest - 1) ** penalty <= best.scores).all()):
            break
    return best


def _better(best: Written, texts: Tensor, scores: Tensor, end: int) -> Written:
    """The best finished texts so far."""
    value, which = scores.max(dim=1)
    tokens = torch.zeros_like(best.tokens)
    size = texts.shape[2]
    tokens[:, :size] = texts[torch.arange(len(texts), device=texts.device), which]
    tokens[:, size] = end
    now = value > best.scores
    return Written(torch.where(now[:, None], tokens, best.tokens), torch.where(now, value, best.scores))


# Decoder network for captioning -------------------------------------------------------------------------------


class CaptionWriter(ModalTransformer):
    """A causal Transformer over pictures and texts with a readout over the vocabulary.

    What comes out depends on the batch alone:

    * with ``text``: scores of the next token under teacher forcing, logits (M, V), at the M places of the batch where a
      next token is known, row after row;
    * without: the text that a beam search finds, logits int64 (B, max_length), from the start token to the end token
      and 0 behind it.

    Features (B, d_model) are the means of the last states of what was read. Batches are those of
    :mod:`confed.data.table`: documents have ``before_text`` and ``before_text_mask`` (B, P, L),
    ``before_shown`` (B, P) and ``before_image`` (B, P, 3, H, W) besides; mixed ones have up to three sets of keys.
    Positions are those within a picture or a text; the order of a document's turns shows in who sees whom.

    Attributes:
        beams: width of the beam search, which the task sets.
        penalty: its power of the length.
    """

    answer_head = "head"
    writes: ClassVar[str] = "captions"  # whether models write texts, which the captioning task needs

    def __init__(self, embed: Mapping[str, ModalEmbedding], body: Encoder, vocab_size: int, max_length: int) -> None:
        if "text" not in embed:
            raise ValueError(f"a model that writes must have text among its modalities, got {', '.join(embed)}")
        super().__init__(embed, body, vocab_size)
        self.max_length, self.beams, self.penalty = max_length, 5, 1.0

    def begin(self, task: Any) -> None:
        """Takes over how wide the task searches."""
        self.beams, self.penalty = (task.beams, task.length_penalty) if isinstance(task, SearchesBeams) else (5, 1.0)

    def forward(self, batch: Batch) -> Output:
        """See the class."""
        parts = groups(batch)
        if not any("text" in group for group in parts):
            sequence = self._sequence(batch)
            return Output(self._written(sequence), self._features(sequence, self._states(sequence)))
        scored: list[Tensor] = []
        features: list[Tensor] = []
        for group in parts:
            sequence = self._sequence(group)
            states = self._states(sequence)
            scored.append(states[self._known(group, sequence)])
            features.append(self._features(sequence, states))
        return Output(self.head(torch.cat(scored)), torch.cat(features))

    def write(self, batch: Batch, beams: int | None = None, penalty: float | None = None) -> Tensor:
        """The text that a beam search finds behind what a batch without ``text`` shows, int64 (B, max_length)."""
        return self._written(self._sequence(batch), beams, penalty)

    def _sequence(self, batch: Batch) -> Tokens:
        """All tokens of a batch, those before a document's last turn first."""
        if "before_text" not in batch:
            return self.tokens(batch)
        parts: dict[str, tuple[Tensor, Tensor | None]] = {}
        text, mask, shown = batch["before_text"], batch["before_text_mask"], batch["before_shown"]
        for turn in range(text.shape[1]):
            if "before_image" in batch and "image" in self.embed:
                states, _ = self.embed["image"]({"image": batch["before_image"][:, turn]})
                parts[f"before {turn} image"] = states, shown[:, turn, None].expand(states.shape[:2])
            is_token = mask[:, turn] != 0
            # An absent text is read as one token of padding, of which nothing is seen.
            stand_in = is_token.long()
            stand_in[:, 0] = 1
            states, _ = self.embed["text"]({"text": text[:, turn], "text_mask": stand_in})
            parts[f"before {turn} text"] = states, is_token[:, : states.shape[1]]
        return in_sequence(parts | read(self.embed, batch))

    def _states(self, sequence: Tokens) -> Tensor:
        return self.body(sequence.states, sequence.present, causal=True)

    @staticmethod
    def _known(batch: Batch, sequence: Tokens) -> Tensor:
        """At which tokens of a batch the next one of their text is known, bool (B, S)."""
        has_next = torch.zeros(sequence.states.shape[:2], dtype=torch.bool, device=sequence.states.device)
        for name, mask in text_masks(batch):
            if name in sequence.spans:
                span = sequence.spans[name]
                size = span.stop - span.start
                has_next[:, span.start : span.stop - 1] = mask[:, 1:size] != 0
        return has_next

    @staticmethod
    def _features(sequence: Tokens, states: Tensor) -> Tensor:
        """The mean over modalities of plain samples; of documents, the mean over tokens."""
        if any(name.startswith("before") for name in sequence.spans):
            return pool(Tokens(states, sequence.present, {"all": slice(0, states.shape[1])}))
        return pool(sequence._replace(states=states))

    def _written(self, sequence: Tokens, beams: int | None = None, penalty: float | None = None) -> Tensor:
        """Beam search behind a sequence; what each layer read stays, so that a step computes one token per text."""
        beams = int(self.beams if beams is None else beams)
        rows, device = len(sequence.states), sequence.states.device
        seen = None if sequence.present is None else sequence.present.repeat_interleave(beams, 0)[:, None, None, :]
        prefix = [states.repeat_interleave(beams, 0) for states in self._layer_inputs(sequence)]
        written: list[Tensor] = []

        def step(texts: Tensor, parents: Tensor | None) -> Tensor:
            if parents is not None:
                written[:] = [states[parents] for states in written]
            states, _ = self.embed["text"]({"text": texts, "text_mask": torch.ones_like(texts)})
            x = states[:, -1:]
            mask = None
            if seen is not None:
                text_mask = torch.ones(len(texts), 1, 1, texts.shape[1], dtype=torch.bool, device=device)
                mask = torch.cat([seen, text_mask], 3)
            for number, layer in enumerate(self.body.layers):
                if number == len(written):
                    written.append(x)
                else:
                    written[number] = torch.cat([written[number], x], 1)
                x = layer(x, context=torch.cat([prefix[number], written[number]], 1), mask=mask)
            return self.head(self.body.norm(x[:, 0]))

        return beam_search(
            step, rows, start=START, end=END, beams=beams, longest=self.max_length,
            penalty=self.penalty if penalty is None else penalty, never=NEVER, device=device,
        ).tokens  # fmt: skip

    def _layer_inputs(self, sequence: Tokens) -> list[Tensor]:
        """What each layer reads of a sequence, (B, S, d_model) each."""
        present = sequence.present
        mask = None if present is None else causal_mask(present[:, None, None, :])
        x, inputs = self.body.dropout(sequence.states), list[Tensor]()
        for layer in self.body.layers:
            inputs.append(x)
            x = layer(x, mask=mask, causal=mask is None)
        return inputs


# Three sizes ------------------------------------------------------------------------------------------------


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text"),
    max_length: int = 24,
    clip: bool = False,
    pretrained: Path | str | None = None,
    pieces: Path | str | None = None,
    seed: int = 0,
    **parts: Any,
) -> CaptionWriter:
    """A model with its initial values.

    Options:
        modalities: what it reads: "text", and "image" or none beside it.
        max_length: the most tokens of a text; a longer one is an error.
        pieces: a SentencePiece model file for the tokenizer, as in the paper; None: the dataset's words.
    """
    names = checked_modalities(modalities)
    if "text" not in names or not {*names} <= {"image", "text"}:
        raise ValueError(f"model.modalities of a model that writes are text and image, or text, got {list(modalities)}")
    pictures = picture_tokens(modalities, clip, pretrained, seed)

    def build() -> CaptionWriter:
        embed, body = modal_parts(names, vocab_size, pictures, max_length=max_length, **parts)
        return CaptionWriter(embed, body, vocab_size, max_length)

    return seeded(seed, build)


def _tokenizer_of_the_paper(words: Sequence[str], max_length: int = 64, pieces: Path | str | None = None) -> Any:
    """As :func:`confed.models.caption_tokenizer.caption_tokenizer`, of the paper's size."""
    return caption_tokenizer(words, max_length, pieces)


SOURCES = (modal_parts, segmenter, modal_options)

caption_transformer_tiny = variant(
    assemble, "caption_transformer_tiny",
    "A Transformer that writes, of a few thousand parameters, for tests: one layer, d_model = 16 of which d_v = 4.",
    "answers vocab_size modalities picture_size max_length pieces seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer), picture_size=(64, 64),
    word_width=16, layers=1, attention_heads=2, hidden=32, width=16, vector_width=4,
)  # fmt: skip
caption_transformer_mini = variant(
    assemble, "caption_transformer_mini",
    "A Transformer that writes short texts about small pictures, made for one CPU core.",
    "answers vocab_size modalities picture_size patch pieces word_width word_vectors max_length width vector_width "
    "vector positions layers attention_heads hidden block magneto_init dropout seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer), picture_size=(64, 64), width=96, hidden=192,
)  # fmt: skip
caption_transformer = variant(
    assemble, "caption_transformer",
    "The paper's size: 12 Magneto layers, d_model = 2,048, 16 heads, feed-forward 4,096, pictures by CLIP ViT-L/14.",
    "answers vocab_size pretrained modalities pieces word_width word_vectors max_length vector_width vector positions "
    "block magneto_init dropout seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=_tokenizer_of_the_paper), clip=True, word_width=1024, max_length=64,
    width=2048, vector_width=64, layers=12, attention_heads=16, hidden=4096, dropout=0.1,
)  # fmt: skip
