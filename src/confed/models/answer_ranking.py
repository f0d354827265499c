"""Models that write an answer word by word, and choose among given answers by likelihood.

Li et al., "Align before Fuse: Vision and Language Representation Learning with Momentum Distillation", NeurIPS 2021
(ALBEF), section 4; Li et al., "BLIP", ICML 2022, took it over. With the question's fused states q, the decoder gives
the probability of an answer a = (a_1 ... a_T):

    log p(a | q) = sum_t log p(a_t | a_<t, q)

Training (teacher forcing) maximises it for the right answer, or for each of several that people gave. To answer, the k
candidates with the most probable first token are compared by log p(a | q). (ALBEF's released code adds the first
token's log-probability a second time; the formula above is used here.)

Picture and question are encoded once, however many answers are read, and all answers to a question share its
cross-attention keys and values: the decoder runs self-attention on rows of single answers, (B K, T, d), and everything
else on rows of questions, (B, K T, d).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.federation.ranges import check_value
from confed.federation.specs import HasCandidates
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Places
from confed.models.heads import COUNT
from confed.models.inputs import additive_mask, checked_image, checked_text
from confed.models.passes import BlockChain, Step
from confed.models.pretrained import States

# States between the parts of models that write answers --------------------------------------------------------


class Question(NamedTuple):
    states: Tensor  # the question's tokens after they have seen the picture, shape (B, L, d)
    mask: Tensor  # added to attention scores: 0 for tokens, very low for padding, shape (B, 1, 1, L)


def attend(crossattention: Any, hidden: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
    """The cross-attention block of a BERT-like layer of ``transformers``, its residual sum and norm included.

    The library's own block drops the mask of what is attended to (5.23: ``BlipTextAttention`` does not hand it on), so
    that padding would be attended to as well; its parts are called one by one instead.
    """
    context, _ = crossattention.self(hidden, encoder_hidden_states=states, encoder_attention_mask=mask)
    return crossattention.output(context, hidden)


# Questions and answers in a batch: checks of their shapes -----------------------------------------------------


def check_answers(tokens: Tensor, weight: Tensor | None, rows: int) -> None:
    """Check of the shapes of a batch's answers."""
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


def checked_answers(batch: Batch, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """A batch's answers to learn and which of them there are, as :func:`trimmed` has them; None where none are."""
    tokens = batch.get("answer_tokens")
    if tokens is not None:
        check_answers(tokens, batch.get("answer_weight"), rows)
    return trimmed(tokens, batch["answer_weight"] > 0 if tokens is not None and tokens.ndim == 3 else None)


def trimmed(tokens: Tensor | None, counted: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Answers (B, K, T) without what is padding in the whole batch, and which there are, None where all are."""
    if tokens is None or counted is None:
        return (None if tokens is None else tokens[:, None]), None
    slots = _last(counted.any(0), 1)
    longest = _last(((tokens != 0) & counted[..., None]).flatten(0, 1).any(0), 2)
    tokens, counted = tokens[:, :slots, :longest], counted[:, :slots]
    return tokens, None if bool(counted.all()) else counted


def _last(used: Tensor, least: int) -> int:
    """How many columns reach up to the last one that is used, at least so many."""
    positions = used.nonzero()
    return max(int(positions[-1]) + 1 if len(positions) else 0, least)


# Models that write an answer word by word ---------------------------------------------------------------------

OUTSIDE = -1e4
"""Added to the score of candidates whose first token is not among the k most probable: finite, and below all others."""
_CHUNK = 2**24  # vocabulary scores held at once while candidates are compared: 64 MiB in single precision
_TOKENS = 2**15
"""Tokens of candidates that the decoder reads at once: 96 MiB per layer's output at d = 768 in single precision."""


class GenerativeAnswerer(BlockChain):
    """A picture encoder, a question encoder that looks at the picture, and a decoder that writes the answer.

    Batches have ``image``, uint8 (B, 3, H, W) or already normalised floats, and ``text`` and ``text_mask``, int64
    (B, L). Training batches have ``answer_tokens`` too, int64 (B, T): the right answer from its start token to its
    end token, 0 behind it. Where people gave several answers, ``answer_tokens`` is (B, K, T) and ``answer_weight``,
    float (B, K), is positive where there is an answer. What comes out depends on the batch alone:

    * with ``answer_tokens``: the decoder's token scores under teacher forcing, (B, T - 1, V), where position t scores
      token t + 1; with several answers (R, T' - 1, V) for the R answers that there are, question after question, T' the
      tokens of the longest of them;
    * without: one score per candidate, (B, C), its log-likelihood (see the module's text; the candidates beyond the
      best k by first token get :data:`OUTSIDE` plus their first token's log-probability).

    Features are the state of the question's first token, (B, d), in both cases.

    A subclass has ``text_encoder``, with ``embeddings`` and ``encoder.layer``, of which a layer with ``crossattention``
    looks at the picture, and ``text_decoder``, laid out as ``transformers`` lays out its BERT-like language models:
    ``bert`` with ``embeddings`` and ``encoder.layer``, and ``cls.predictions`` with ``transform`` and ``bias``; the
    output matrix is that of the word embeddings. Its picture encoder is where ``embedding_names``, ``blocks_name`` and
    ``norm_name`` say. States are those of the picture, (B, 1 + P, d), then a :class:`Question`, then an ``Output``.
    """

    answer_head = "text_decoder.cls"  # the language-model head: what FedDAT's released ALBEF keeps on each client
    writes = "answers"  # answers are texts, so clients with different answers can share all of the model
    norm_name: ClassVar[str]  # the normalisation behind the blocks of the picture encoder, pre-norm
    lora: ClassVar[tuple[str, ...]]  # the usual layers of LoRA and IA3, as their names end
    ia3: ClassVar[tuple[str, ...]]
    text_encoder: Any
    text_decoder: Any

    def __init__(
        self,
        image_size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        k: int = 128,
        start: int | None = None,
    ) -> None:
        super().__init__()
        check_value(k, COUNT, "k")
        self.image_size, self.mean, self.std, self.k, self.start = image_size, mean, std, k, start
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)
        self._candidates: Tensor | None = None

    def visual_embedding(self, pixels: Tensor) -> Tensor:
        """Class token and patches with their positions, (B, 1 + P, d), of normalised pictures."""
        return self.get_submodule(self.embedding_names[0].rstrip("."))(pixels)

    @property
    def visual_norm(self) -> Any:
        return self.get_submodule(self.norm_name)

    def places(self) -> Places:
        """What can be finetuned.

        Adapters are where FedDAT's released code has them: in the picture encoder after the residual sum of every
        block, in the question encoder and the decoder inside the last normalisation of every block. LoRA and IA3 change
        self-attention, and IA3 every second feed-forward layer's input. Prompts are visual only and come after the
        picture encoder.
        """
        outputs: list[str] = []
        for stack in ("text_encoder.encoder.layer", "text_decoder.bert.encoder.layer"):
            outputs += [f"{stack}.{number}.output" for number in range(len(self.get_submodule(stack)))]  # pyright: ignore
        norms: list[Any] = [self.get_submodule(f"{name}.LayerNorm") for name in outputs]
        visual = int(self.visual_norm.normalized_shape[0])
        return Places(
            heads=(self.answer_head,),
            top=(f"{outputs[-1].removesuffix('output')}",),
            hosts=[
                *(Host(block, visual) for block in self.blocks),
                *(Host(norm, norm.normalized_shape[0], after_norm=True) for norm in norms),
            ],
            lora=self.lora,
            ia3=self.ia3,
            ia3_inputs=("mlp.fc2", *(f"{name}.dense" for name in outputs)),
            prompts={"visual": visual},
            prefix="its attention takes no keys and values from outside; 'prompt' does work",
        )

    # Passes -------------------------------------------------------------------------------------------------

    def begin(self, task: Any) -> None:
        """Takes over the answers to choose from: the task's ``candidates``, int64 (C, T), where it has them."""
        self._candidates = task.candidates if isinstance(task, HasCandidates) else None

    def forward(self, batch: Batch) -> Output:
        """Scores and features; see the class."""
        return self._answers(run_stages(self, batch, len(self.steps()) - 1), batch)

    # The steps of a pass ------------------------------------------------------------------------------------

    def steps(self) -> Sequence[Step]:
        """The picture encoder block by block, the question, the answers."""
        question = ("text_encoder.", "prompts.")
        return (
            (Stage("picture embedding", ("image",), self.embedding_names), lambda _, batch: self._picture(batch)),
            *self.block_steps("picture block"),
            (Stage("picture", (), (f"{self.norm_name}.",)), lambda state, _: self.visual_norm(state)),
            (Stage("question", ("text", "text_mask"), question), self._question),
            (Stage("answers", (), ("",)), self._answers),
        )

    def advance(self, block: Any, state: Tensor) -> Tensor:
        return block(state)

    def _picture(self, batch: Batch) -> Tensor:
        image = checked_image(batch, (self.image_size, self.image_size), type(self).__name__)
        return self.visual_embedding(self._normalised(image))

    def _question(self, state: Tensor, batch: Batch) -> Question:
        return self.fuse(self._prompted(state), *self._text(batch, len(state)))

    def _answers(self, state: Question, batch: Batch) -> Output:
        below = self._below_head(state, batch)
        return Output(self.rank(state), state.states[:, 0]) if below is None else self.answer(below)

    def below_head(self, state: tuple[Any, Batch]) -> Output | None:
        """:meth:`suffix` up to the language-model head, (R, T - 1, d); None of a batch without ``answer_tokens``."""
        question = self.forward_stages(state[0], self.before, len(self.steps()) - 1, state[1])
        return self._below_head(question, state[1])

    def _below_head(self, question: Question, batch: Batch) -> Output | None:
        tokens, counted = checked_answers(batch, len(question.states))
        if tokens is None:
            return None
        return Output(self.decode(question, tokens[..., :-1], counted), question.states[:, 0])

    def answer(self, below: Output) -> Output:
        """What the head makes of :meth:`below_head`: ``suffix(state)`` is ``answer(below_head(state))``."""
        return Output(self.token_scores(below.logits), below.features)

    def pretraining_states(self, batch: Batch) -> States:
        """The model's inside on a batch with ``answer_tokens``, one answer each."""
        seen = [self._picture(batch)]
        text, mask = self._text(batch, len(seen[0]))
        tokens = batch.get("answer_tokens")
        if tokens is None or tokens.ndim == 3:
            came = "none" if tokens is None else f"shape {tuple(tokens.shape)}"
            raise ValueError(f"pre-training needs batch['answer_tokens'] of shape (B, T), got {came}")
        for block in self.blocks:
            seen.append(block(seen[-1]))
        question = self.fuse(self._prompted(self.visual_norm(seen[-1])), text, mask)
        logits = self.token_scores(self.decode(question, tokens[:, None, :-1]))
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=0, reduction="sum") / len(tokens)
        return States(
            answer_loss=loss,
            early=seen[1][:, 1:],
            late=seen[2][:, 1:] if len(seen) > 2 else None,
            asked=question.states,
            words=self.text_encoder.embeddings.word_embeddings.weight,
        )

    # Parts of a pass ----------------------------------------------------------------------------------------

    def fuse(self, picture: Tensor, text: Tensor, text_mask: Tensor) -> Question:
        """The question's states after they have looked at the picture's, (B, S, d)."""
        encoder = self.text_encoder
        hidden: Tensor = encoder.embeddings(input_ids=text)
        mask = additive_mask(text_mask, hidden.dtype)
        for layer in encoder.encoder.layer:
            hidden, _ = layer.attention(hidden, attention_mask=mask)
            if hasattr(layer, "crossattention"):
                hidden = attend(layer.crossattention, hidden, picture, None)
            hidden = layer.feed_forward_chunk(hidden)
        return Question(hidden, mask)

    def decode(self, question: Question, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
        """The decoder's states on up to K texts per question, each read from left to right."""
        b, k, t = tokens.shape
        places = None if counted is None else counted.flatten().nonzero()[:, 0]
        if self.start is not None:
            tokens = torch.cat([torch.full_like(tokens[..., :1], self.start), tokens[..., 1:]], dim=-1)
        bert = self.text_decoder.bert
        read = tokens.reshape(b * k, t)
        hidden: Tensor = bert.embeddings(input_ids=read if places is None else read[places])
        lowest = torch.finfo(hidden.dtype).min
        # Padding is behind an answer's end, so that reading from left to right leaves it out.
        causal = torch.full((t, t), lowest, dtype=hidden.dtype, device=hidden.device).triu(1)
        for layer in bert.encoder.layer:
            hidden, _ = layer.attention(hidden, attention_mask=causal)
            if places is not None:
                hidden = hidden.new_zeros(b * k, t, hidden.shape[-1]).index_copy(0, places, hidden)
            wide = attend(layer.crossattention, hidden.reshape(b, k * t, -1), question.states, question.mask)
            if places is not None:
                wide = wide.reshape(b * k, t, -1)[places]
            hidden = layer.feed_forward_chunk(wide).reshape(-1, t, wide.shape[-1])
        return hidden

    def token_scores(self, hidden: Tensor) -> Tensor:
        """Scores of all V token ids, (..., V), from decoder states (..., d)."""
        head = self.text_decoder.cls.predictions
        return F.linear(head.transform(hidden), self.text_decoder.bert.embeddings.word_embeddings.weight, head.bias)

    def rank(self, question: Question) -> Tensor:
        """One score per candidate, (B, C); see the class."""
        if self._candidates is None:
            raise ValueError(
                f"{type(self).__name__} chooses among given answers and got none: task.name must be 'generation'"
            )
        b, candidates = len(question.states), self._candidates.to(question.states.device)
        if len(candidates) <= self.k:
            return self.likelihood(question, candidates.expand(b, -1, -1))
        begun = self.decode(question, candidates[:1, :1].expand(b, 1, 1))[:, 0]
        first = self.token_scores(begun).float().log_softmax(-1)[:, candidates[:, 1]]
        # Candidates often begin with the same token: of equal ones the earlier, on every machine.
        best = first.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
        return (first + OUTSIDE).scatter(1, best, self.likelihood(question, candidates[best]))

    def likelihood(self, question: Question, tokens: Tensor) -> Tensor:
        """Log-likelihood log p(a | q), (B, K), of K texts per question, (B, K, T)."""
        size = max(1, _TOKENS // tokens[0].numel()) if len(tokens) else 1
        parts = zip(question.states.split(size), question.mask.split(size), tokens.split(size), strict=True)
        return torch.cat([self._likelihood(Question(states, mask), some) for states, mask, some in parts])

    def _likelihood(self, question: Question, tokens: Tensor) -> Tensor:
        hidden = self.decode(question, tokens[..., :-1])
        target = tokens[..., 1:]
        hidden = hidden.reshape(*target.shape, -1)
        counted = target != 0
        rows, ids = hidden[counted], target[counted]
        size = max(1, _CHUNK // self.text_decoder.bert.embeddings.word_embeddings.num_embeddings)
        parts = [
            F.cross_entropy(self.token_scores(some).float(), wanted, reduction="none")
            for some, wanted in zip(rows.split(size), ids.split(size), strict=True)
        ]
        surprise = torch.zeros(target.shape, dtype=torch.float32, device=hidden.device)
        return -surprise.masked_scatter(counted, torch.cat(parts)).sum(-1)

    def _normalised(self, image: Tensor) -> Tensor:
        if image.is_floating_point():
            return image
        # Numbers, not tensors: those would be copied to the device at every step.
        channels = zip(image.float().unbind(1), self.mean, self.std, strict=True)
        pixels = torch.stack([(channel / 255 - mean) / std for channel, mean, std in channels], 1)
        return pixels.to(next(self.parameters()).dtype)

    def _prompted(self, picture: Tensor) -> Tensor:
        """The picture as the question looks at it: visual prompts between class token and patches, as in FedDAT."""
        if not len(self.prompts):
            return picture
        learned = self.prompts["visual"]().to(picture.dtype).expand(len(picture), -1, -1)
        return torch.cat([picture[:, :1], learned, picture[:, 1:]], 1)

    def _text(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        longest = self.text_encoder.embeddings.position_embeddings.num_embeddings
        return checked_text(batch, rows, longest, type(self).__name__)
