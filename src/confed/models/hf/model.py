"""Wrapper of generative vision-language models of ``transformers``.

The library's model is not taken apart: it reads what its own processor makes of a picture and a prompt. What a family
packs into one axis (all pictures of a batch, or the patches of all of them) is kept example by example, first dimension
B, with as many pictures as the example with the most, and joined where the library's model is called.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from confed.data.chat import answered, trimmed
from confed.federation.protocols import Batch, Output
from confed.federation.specs import HasCandidates, WritesAnswers, Writing
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank
from confed.models.hf.attention import choose_attention
from confed.models.hf.candidates import (
    SCORES_AT_ONCE,
    CandidateTree,
    candidate_trees,
    first_position_behind,
    reads_trees,
    repeated_states,
    tree_likelihoods,
    tree_states,
)
from confed.models.hf.device_map import check_spreadable, gpus, moved, spread
from confed.models.hf.parts import LibraryParts
from confed.models.hf.picture_states import BESIDE, PictureStates, check_count, encoded
from confed.models.hf.pictures import Pictures
from confed.models.hf.placeholder import typed_inputs
from confed.models.hf.prompts import ChatTokenizer
from confed.models.hf.soft_prompt import LearnedTokens, with_learned
from confed.models.hf.text_search import search

__all__ = ["Asked", "HuggingFaceVLM", "Pictures"]

_TOKENS = 2**14
"""Tokens of candidates that are read at once, where each has its own copy of the prompt."""
_NODES = 256
"""Tokens of candidates that are read at once behind one prompt."""


class Asked(NamedTuple):
    """Prompts with their pictures, before the first layer.

    Attributes:
        ids: prompts with the tokens of their pictures, padded on the left, int64 (B, L).
        mask: 1 for tokens, int64 (B, L).
        pictures: what the processor made of each example's pictures, each (B, P, ...).
        tokens: tokens of the answers to learn, (B, K, T), or None.
        shown: which of the P pictures each example has, bool (B, P).
        counted: which answers there are, bool (B, K); None where all are.
        seen: what the picture encoder made of the pictures, where its outputs are kept; ``pictures`` are few then.
    """

    ids: Tensor
    mask: Tensor
    pictures: Mapping[str, Tensor]
    tokens: Tensor | None
    shown: Tensor
    counted: Tensor | None = None
    seen: PictureStates | None = None


class HuggingFaceVLM(LibraryParts):
    """An image-text-to-text model of ``transformers`` that writes answers, or chooses among given ones by likelihood.

    Batches have ``image``, uint8 (B, 3, H, W), or of several pictures (B, P, 3, H, W) with ``image_count`` (B,), and
    ``text`` and ``text_mask``, int64 (B, L), prompts of :class:`confed.models.hf.prompts.ChatTokenizer`. Training
    batches have ``answer_tokens`` too, (B, T), or (B, K, T) with ``answer_weight`` (B, K); what comes out is as in
    :class:`confed.models.answer_ranking.GenerativeAnswerer`: token scores (R, T - 1, V) of training batches,
    log-likelihoods of the candidates (B, C) of all others. Where the task says how answers are written, these are
    texts instead, int64 (B, max_new_tokens), padded behind their end. Features are the last layer's state of the
    prompt's last token, (B, d).

    Args:
        body: the library's model.
        tokenizer: its prompts.
        checkpointing: recompute activations of the backward pass instead of keeping them.

    Attributes:
        mixed: whether what does not learn is bf16, so that passes run under autocast.
        is_loaded_in_4bit: whether linear layers are quantised to 4 bits; the library ``peft`` asks.
        is_loaded_in_8bit: whether they are quantised to 8 bits.
        device_map: "auto" for a base that is spread over the GPUs that there are, "one" for one device.
        exact: whether passes on a GPU repeat to the bit.
        learned_tokens: those before prompts, where the kind of finetuning is "prompt".
    """

    writes = "answers"
    converses = True
    mixed = False
    is_loaded_in_4bit = False
    is_loaded_in_8bit = False
    device_map: Literal["one", "auto"] = "one"
    exact: bool = True

    def __init__(self, body: nn.Module, tokenizer: ChatTokenizer, checkpointing: bool = False) -> None:
        super().__init__()
        self.body: Any = body
        self.tokenizer, self.pictures = tokenizer, Pictures(tokenizer.placeholder)
        self.prompts, self.adapters = nn.ModuleDict(), AdapterBank((), 1)
        self._candidates: Tensor | None = None
        self._trees: tuple[CandidateTree, ...] | None = None
        self._writing: Writing | None = None
        self._main: torch.device | None = None
        self._typed = typed_inputs(body, tokenizer.placeholder)
        self.learned_tokens: LearnedTokens | None = None
        self._checkpointing = checkpointing
        if checkpointing:
            self.body.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.body.config.use_cache = False
        self.train()

    def place(self, device: str) -> None:
        """See :class:`confed.federation.specs.PlacesItself`.

        A base that cannot be spread as ``device_map`` says is a ValueError.
        """
        if torch.device(device).type == "cuda":
            choose_attention(exact=self.exact)
        if self.device_map == "auto":
            check_spreadable(self, self.body)
        several = gpus(device) if self.device_map == "auto" else []
        if len(several) < 2:
            self.to(device)
        else:
            self._main = spread(self, self.body, several)

    # Passes -------------------------------------------------------------------------------------------------------

    def begin(self, task: Any) -> None:
        """Takes over how answers are written, or which there are to choose from: ``candidates``, int64 (C, T)."""
        self._candidates = task.candidates if isinstance(task, HasCandidates) else None
        self._trees = None
        self._writing = task.writing if isinstance(task, WritesAnswers) else None

    def forward(self, batch: Batch) -> Output:
        """Scores and features; see the class.

        Raises ``ValueError``: a key is missing, or there are no candidates.
        """
        return self.suffix(self.prefix(batch))

    def prefix(self, batch: Batch) -> Asked:
        """Prompts with the tokens of their pictures, and what the processor makes of these.

        Raises:
            ValueError: a key is missing or has another shape.
        """
        for key in ("image", "text", "text_mask"):
            if key not in batch:
                raise ValueError(f"a batch of the model 'hf' needs the key {key!r}, got {', '.join(sorted(batch))}")
        image, count = self._shown(batch)
        ids, mask = trimmed(batch["text"], batch["text_mask"])
        if len(image):
            first = image[0, 0].cpu().permute(1, 2, 0).contiguous().numpy()
            ids, mask = self.tokenizer.placeholder.put_in(ids, mask, first, count.tolist())
            if self.learned_tokens is not None:
                ids, mask = with_learned(ids, mask, self.learned_tokens.tokens, self.learned_tokens.vocabulary)
        tokens, counted = batch.get("answer_tokens"), None
        if tokens is not None and tokens.ndim == 3:
            counted = batch["answer_weight"] > 0
        if tokens is not None and tokens.ndim == 2:
            tokens = tokens[:, None]
        shown = torch.arange(image.shape[1], device=count.device) < count[:, None]
        # Examples with different numbers of pictures have no features of one shape.
        alike = self.frozen_features is not None and bool(shown.any()) and bool(shown.all())
        seen = run_stages(self, batch, 1) if alike else None
        pictures = self.pictures(image, None if seen is None else BESIDE)
        return Asked(ids, mask, pictures, tokens, shown, counted, seen)

    @staticmethod
    def _shown(batch: Batch) -> tuple[Tensor, Tensor]:
        """Pictures (B, P, 3, H, W), and how many each example has, (B,)."""
        image, count = batch["image"], batch.get("image_count")
        if image.dtype != torch.uint8 or image.ndim != 4 + (count is not None):
            shape = "(B, 3, H, W)" if count is None else "(B, P, 3, H, W)"
            raise ValueError(f"image must be uint8 of shape {shape}, got {image.dtype} {tuple(image.shape)}")
        if count is None:
            return image[:, None], image.new_ones(len(image), dtype=torch.int64)
        return image, count

    @property
    def stages(self) -> Sequence[Stage]:
        """The picture encoder with the connector, and the language part."""
        later = (f"{self.part('language')}.", "prompts.")
        own = [n for n in self.state_dict(keep_vars=True) if not n.startswith(later) and not self.is_head(n)]
        return (
            Stage("picture encoder and connector", ("image", "image_count"), tuple(own)),
            Stage("language part", (), ("",)),
        )

    @property
    def stage_variant(self) -> str:
        """The settings by which inputs are made of pictures."""
        return self.tokenizer.placeholder.settings

    def through(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`; the state after the first stage is a :class:`PictureStates`.

        Of examples that have all P pictures.
        """
        if first == 0 and last > 0:
            image, _ = self._shown(batch)
            shown = image.new_ones(image.shape[:2], dtype=torch.bool)
            with self._precision(image.device):
                state = encoded(self.body, self._own(self.pictures.joined(self.pictures(image), shown)), len(image))
        return self.suffix(self.prefix(batch)._replace(seen=state)) if last == 2 else state

    def suffix(self, state: Asked) -> Output:
        """The library's model, with the adapters that are switched on."""
        home = state.ids.device
        if self._main is not None:
            state = Asked(*(moved(part, self._main) for part in state))
        output = self._answer(state)
        return Output(output.logits.to(home), output.features.to(home))

    def _answer(self, state: Asked) -> Output:
        with self._precision(state.ids.device):
            if state.tokens is not None:
                return self._token_scores(state, state.tokens)
            return self.rank(state) if self._writing is None else self.write(state, self._writing)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # What learns is fp32 and adds to the states of a bf16 base, as peft's own training has it.
        return torch.autocast(device.type, torch.bfloat16) if self.mixed else nullcontext()

    def _token_scores(self, state: Asked, tokens: Tensor) -> Output:
        """Scores of the answers' tokens, (R, T - 1, V), and features (B, d)."""
        b, k, t = tokens.shape
        rows = torch.arange(b, device=state.ids.device).repeat_interleave(k)
        answers = tokens.flatten(0, 1)
        if state.counted is not None:
            there = state.counted.flatten()
            rows, answers = rows[there], answers[there]
            t = max(int(answered(answers).sum(1).max()), 2) if len(answers) else 2
            answers = answers[:, :t]
        hidden = self._hidden(state, rows, answers)
        length = state.ids.shape[1]
        first = torch.zeros(b, dtype=torch.int64, device=rows.device).scatter_reduce(
            0, rows, torch.arange(len(rows), device=rows.device), "amin", include_self=False
        )
        return Output(self._scores(hidden[:, length - 1 : length + t - 2]), hidden[first, length - 1])

    @staticmethod
    def repeat(state: Asked, n: int) -> Asked:
        """The whole batch n times, one after the other: for n blends of adapters in one pass."""

        def more(part: Tensor) -> Tensor:
            return part.repeat(n, *[1] * (part.ndim - 1))

        return Asked(
            more(state.ids), more(state.mask), {key: more(value) for key, value in state.pictures.items()},
            None if state.tokens is None else more(state.tokens), more(state.shown),
            None if state.counted is None else more(state.counted),
            None if state.seen is None else state.seen._replace(features=more(state.seen.features)),
        )  # fmt: skip

    def rank(self, state: Asked) -> Output:
        """Log-likelihoods of the candidates, (B, C), the prompt computed once for all of them.

        Raises:
            ValueError: no candidates were set by :meth:`begin`.
        """
        if self._candidates is None:
            raise ValueError("the model 'hf' chooses among given answers and got none: task.name must be 'generation'")
        # Layers that are recomputed keep no cache, and some families count positions on several axes.
        if (self.training and self._checkpointing) or hasattr(self.body.model, "get_rope_index"):
            return self._rank_whole(state, self._candidates.to(state.ids.device))
        answers = self._candidates.to(state.ids.device)[:, 1:]
        base = self.body.model
        read = self._inputs(state.ids, state.mask, state.pictures, state.shown, seen=state.seen)
        with first_position_behind(self.body.get_decoder(), state.ids.shape[1]) as start:
            begun = base(**read, use_cache=True, return_dict=True)
        last = begun.last_hidden_state[:, -1:]
        first = self._scores(last)[:, 0].float().log_softmax(-1)
        likelihood = first[:, answers[:, 0]]
        if answers.shape[1] > 1:
            likelihood = likelihood + self._continued(state, begun.past_key_values, answers, start())
        return Output(likelihood, last[:, 0])

    def _rank_whole(self, state: Asked, candidates: Tensor) -> Output:
        """As :meth:`rank`, with a prompt of its own before each candidate."""
        b, c = len(state.ids), len(candidates)
        found = self._token_scores(state, candidates.expand(b, -1, -1))
        target = candidates[:, 1:].repeat(b, 1)
        scores = found.logits.float().log_softmax(-1).gather(2, target[..., None])[..., 0]
        return Output((scores * answered(target)).sum(1).view(b, c), found.features)

    def _continued(self, state: Asked, cache: Any, answers: Tensor, start: int) -> Tensor:
        """Log-likelihood of all but the first token of c answers given the cached prompts, (B, c).

        Args:
            state: the prompts.
            cache: their keys and values.
            answers: tokens.
            start: position of an answer's first token.
        """
        (b, length), (c, t) = state.ids.shape, answers.shape
        decoder, embed = self.body.get_decoder(), self.body.get_input_embeddings()
        if reads_trees(decoder, cache, length + t - 1):
            if self._trees is None:
                self._trees = candidate_trees(answers, _NODES)
            likelihood = torch.zeros(b, c, device=answers.device)
            for tree in (tree.to(answers.device) for tree in self._trees if len(tree.tokens)):
                hidden = tree_states(decoder, embed, cache, state.mask, tree, start)
                found = tree_likelihoods(hidden, tree, self._scores, self.tokenizer.vocab_size)
                likelihood = likelihood.index_add(1, tree.rows, found)
            return likelihood
        at_once = max(_TOKENS // max(b * (t - 1), 1), 1)
        parts: list[Tensor] = []
        for own in answers.split(at_once):
            hidden = repeated_states(decoder, embed, cache, state.mask, own, start)
            parts.append(self._copied_likelihoods(hidden, own.repeat(b, 1)[:, 1:]).view(b, len(own)))
        return torch.cat(parts, 1)

    def _copied_likelihoods(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-likelihoods of answers' tokens by the states before them, (R,), a part of the rows at a time."""
        at_once = max(SCORES_AT_ONCE // (self.tokenizer.vocab_size * target.shape[1]), 1)
        found = [
            self._scores(states).float().log_softmax(-1).gather(2, own[..., None])[..., 0]
            for states, own in zip(hidden.split(at_once), target.split(at_once), strict=True)
        ]
        return (torch.cat(found) * answered(target)).sum(1)

    def write(self, state: Asked, how: Writing) -> Output:
        """The most probable texts that a search finds behind prompts, int64 (B, max_new_tokens), and features.

        Args:
            state: prompts.
            how: length and width of the search.
        """
        read = self._inputs(state.ids, state.mask, state.pictures, state.shown, seen=state.seen)
        return Output(*search(self.body, read, self.tokenizer, how))

    def check_pictures(self, image: Tensor) -> None:
        """Check that a picture has as many tokens in a prompt as the picture encoder gives features.

        Raises ``ValueError``: the numbers differ.

        Args:
            image: uint8, shape (3, H, W); pictures of one size have the same number.
        """
        placed = self.tokenizer.placeholder.tokens(image.cpu().permute(1, 2, 0).contiguous().numpy())
        tokens = placed.count(self._picture_token)
        device = next(self.body.parameters()).device
        shown = torch.ones(1, 1, dtype=torch.bool, device=device)
        inputs = self.pictures.joined(self.pictures(image[None, None].to(device)), shown)
        training = self.training
        self.eval()  # what was checked is trained afterwards: no statistics of batches may change
        with torch.no_grad():
            check_count(self.body, self._own(inputs), tokens, (image.shape[1], image.shape[2]))
        self.train(training)

    def _hidden(self, state: Asked, rows: Tensor, answers: Tensor) -> Tensor:
        """Last layer's states of prompts and answers, (R, L + T - 1, d); answers without their start and last token."""
        read = answers[:, 1:-1]
        ids = torch.cat([state.ids[rows], read], 1)
        mask = torch.cat([state.mask[rows], answered(answers)[:, 1:-1].long()], 1)
        pictures = {key: value[rows] for key, value in state.pictures.items()}
        seen = None if state.seen is None else state.seen.of(rows)
        inputs = self._inputs(ids, mask, pictures, state.shown[rows], read.shape[1], seen)
        return self.body.model(**inputs, return_dict=True).last_hidden_state

    def _inputs(
        self, ids: Tensor, mask: Tensor, pictures: Mapping[str, Tensor], shown: Tensor, answers: int = 0,
        seen: PictureStates | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What the library's model reads; the last ``answers`` of the ids are an answer's."""
        own: dict[str, Any] = self._own(self.pictures.joined(pictures, shown))
        if seen is not None:
            own["mm_encoder_outputs"] = seen.outputs()
        behind = torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - answers
        kinds = {True: (ids == self._picture_token).long(), False: behind.long().expand_as(ids)}
        typed = {name: kinds[pictures_marked] for name, pictures_marked in self._typed.items()}
        return {"input_ids": ids, "attention_mask": mask, **own, **typed}

    def _own(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the picture encoder in its precision."""
        dtype = self.body.dtype
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}

    @property
    def _picture_token(self) -> int:
        config = self.body.config
        return int(getattr(config, "image_token_id", None) or config.image_token_index)

    def _scores(self, hidden: Tensor) -> Tensor:
        return self.body.get_output_embeddings()(hidden)
