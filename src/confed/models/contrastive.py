"""Contrastive backbone wrapper: similarities between question representations and answer texts.

Sun and Ochiai, "Bidirectional contrastive split learning for visual question answering", AAAI 2024, figure 4. The
backbone without its output layer (MHA) and a network over the answer's words (APN) are followed by two adapters into
one space of S dimensions: the nonlinear head adapter (NHA) and the linear tail adapter (LTA).

    v_MHA = backbone(picture, question)         (B, D)
    v_APN = max over words of ReLU(W w + b)     (B, H)      w: a word's embedding, or zeros after the last word
    v_NHA = BatchNorm(W_2 ReLU(W_1 v_MHA + b_1) + b_2)      (B, S)
    u_LTA = W_3 v_APN + b_3                     (B, S)

The answer is the one whose u_LTA is the most similar to v_NHA. In the paper S = 256 and H = 512.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from confed.data.glove import say_missing
from confed.federation.params import named_tensors
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import check_value
from confed.federation.specs import Attends, TaskAware, frozen_names, model_spec
from confed.federation.structure import adapter_bank, feature_width
from confed.losses.info_nce import Similarity, similarities
from confed.models.heads import COUNT
from confed.models.layers import uniform_linear


def answer_words(answer: str) -> tuple[str, ...]:
    """The words of an answer in lower case, without punctuation; of an answer without words, what it has.

    Example:
        >>> answer_words("Yes, it's a T-shirt")
        ('yes', 'it', 's', 'a', 't', 'shirt')
    """
    text = answer.lower()
    return tuple(re.findall(r"[^\W_]+", text)) or tuple(text.split()) or (text,)


class AnswerProjection(nn.Module):
    """APN: an answer's words, each through one layer, and the maximum over the words."""

    tokens: Tensor

    def __init__(
        self,
        answers: Sequence[str],
        *,
        words: int,
        hidden: int,
        masked: bool,
        table: Tensor | None,
        width: int,
        unknown: float = 0.0,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if not answers:
            raise ValueError("answers must name at least one answer, got none")
        for name, value in (("answer_words", words), ("hidden", hidden), ("embedding", width)):
            check_value(value, COUNT, name)
        self.masked, self.learned = masked, table is None
        vocabulary = self.vocabulary(answers, words)
        rows = torch.randn(len(vocabulary), width, generator=rng) if table is None else table.float()
        if len(rows) != len(vocabulary):
            raise ValueError(f"the table of words must have {len(vocabulary)} rows, got {len(rows)}")
        self.embedding = nn.Embedding.from_pretrained(rows, freeze=table is not None)
        self.project = uniform_linear(rows.shape[1], hidden, rng)
        # The positions of an answer's words in the vocabulary, -1 after the last one. What everybody knows is no
        # part of a model's state.
        row_of = {word: row for row, word in enumerate(vocabulary)}
        spelt: list[list[int]] = []
        for answer in answers:
            spelt.append([row_of[word] for word in answer_words(answer)[:words]])
        # One position after the longest answer represents all further ones, which are the same to a maximum.
        positions = min(words, max(map(len, spelt)) + 1)
        tokens = torch.tensor([row + [-1] * (positions - len(row)) for row in spelt], dtype=torch.int64)
        self.register_buffer("tokens", tokens, persistent=False)
        has_embedding = (rows[tokens].abs().sum(dim=2) * (tokens >= 0)).sum(dim=1) > 0
        lost = [answer for answer, any_known in zip(answers, has_embedding.tolist(), strict=True) if not any_known]
        text = f"{len(answers) - len(lost):,} of {len(answers):,} answers have a word with a vector"
        say_missing(text, lost, len(answers), unknown, "task.glove_missing")

    @staticmethod
    def vocabulary(answers: Sequence[str], words: int) -> tuple[str, ...]:
        """The distinct words of the answers' first ``words`` words, in order of appearance."""
        return tuple(dict.fromkeys(chain.from_iterable(answer_words(answer)[:words] for answer in answers)))

    def forward(self, label: Tensor) -> Tensor:
        """v_APN, (B, H), of the answers with these labels, int64 (B,); equal answers have exactly equal rows."""
        # A matrix product may round equal rows differently, so each distinct answer goes through once.
        distinct, row_of = torch.unique(label, return_inverse=True)
        tokens = self.tokens[distinct]
        is_token = (tokens >= 0).unsqueeze(2)
        return self._longest(torch.relu(self.project(self.embedding(tokens.clamp_min(0)) * is_token)), is_token)[row_of]

    def all_answers(self) -> Tensor:
        """v_APN of all C answers in order, (C, H): each word goes through the layer once."""
        blank = self.embedding.weight.new_zeros(1, self.embedding.embedding_dim)
        hidden = torch.relu(self.project(torch.cat([self.embedding.weight, blank])))
        # The position -1 is the last row, the one of zeros.
        return self._longest(hidden[self.tokens], (self.tokens >= 0).unsqueeze(2))

    def _longest(self, hidden: Tensor, is_token: Tensor) -> Tensor:
        """The maximum over positions; an activation is never below 0, so 0 at a position takes it out."""
        return (hidden * is_token if self.masked else hidden).amax(dim=1)


class NonlinearHeadAdapter(nn.Module):
    """NHA: two layers with a ReLU between them, then batch normalisation."""

    def __init__(self, inputs: int, hidden: int, width: int, batch_norm: bool, rng: torch.Generator) -> None:
        super().__init__()
        self.first = uniform_linear(inputs, hidden, rng)
        self.second = uniform_linear(hidden, width, rng)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """v_NHA, (B, S), of features (B, D)."""
        return self.norm(self.second(torch.relu(self.first(features))))


class _Seat(nn.Module):
    """Where a backbone had its answer head: hands the features on, or to a function for the time of one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[Tensor], Tensor] | None = None

    def forward(self, features: Tensor) -> Tensor:
        """The features, or what the function makes of them."""
        return features if self.then is None else self.then(features)


@runtime_checkable
class _EmbedsTokens(Protocol):
    """A backbone that gives its embeddings of the question's tokens."""

    def get_input_embeddings(self) -> nn.Module: ...


class ContrastiveAnswerer(nn.Module):
    """A backbone with NHA in the place of its answer head, beside APN and LTA.

    In training mode, for batches with ``label``, the logits are the similarities within the batch, (B, B): example i's
    v_NHA with the u_LTA of example j's answer. Otherwise they are those with all answers, (B, C), in which case
    u_LTA carries no gradient. Similarities are taken before the temperature.
    """

    # who holds which submodules in split learning
    split_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {"client": ("mha", "apn"), "server": ("nha", "lta")}

    def __init__(
        self,
        backbone: nn.Module,
        answers: Sequence[str],
        *,
        similarity: Similarity = "cosine",
        eval_similarity: Similarity = "cosine",
        temperature: float = 0.07,
        width: int = 256,
        hidden: int = 512,
        words: int = 8,
        masked: bool = True,
        glove: Path | str | None = None,
        glove_missing: float = 0.0,
        embedding: int = 300,
        batch_norm: bool = True,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        check_value(width, COUNT, "width")
        others = [head for head in model_spec(backbone).heads_of_tasks if head != "answers"]
        if others:
            raise ValueError(f"contrastive answers have no heads for other tasks, the model has {', '.join(others)}")
        self.similarity: Similarity = similarity
        self.eval_similarity: Similarity = eval_similarity
        self.temperature = temperature
        features = _width_below_the_head(backbone)
        self.mha = backbone
        self._seat = cast("str", backbone.answer_head)
        backbone.set_submodule(self._seat, _Seat())
        table = None if glove is None else _glove(glove, AnswerProjection.vocabulary(answers, words))
        # the answer projection network
        self.apn = AnswerProjection(
            answers,
            words=words,
            hidden=hidden,
            masked=masked,
            table=table,
            width=embedding,
            unknown=glove_missing,
            rng=rng,
        )
        self.nha = NonlinearHeadAdapter(features, hidden, width, batch_norm, rng)  # the nonlinear head adapter
        self.lta = uniform_linear(hidden, width, rng)  # the linear tail adapter
        self._known: tuple[list[Tensor], Tensor] | None = None

    # What others ask of a model -----------------------------------------------------------------------------

    @property
    def frozen(self) -> set[str]:
        """Names of the tensors that are not trained: the backbone's, and embeddings that were given."""
        frozen_parts = {f"mha.{name}" for name in frozen_names(self.mha)} & set(named_tensors(self))
        return frozen_parts if self.apn.learned else frozen_parts | {"apn.embedding.weight"}

    @property
    def adapters(self) -> Any:
        """The backbone's bank of adapters, where it has one."""
        return _given(adapter_bank(self.mha), self.mha, "adapters")

    @property
    def attention(self) -> Callable[[Batch], Tensor]:
        """The backbone's account of where it looked, where it gives one; of the answer by similarity."""
        _given(self.mha if isinstance(self.mha, Attends) else None, self.mha, "attention")
        return self._attention

    @property
    def get_input_embeddings(self) -> Callable[[], nn.Module]:
        """The backbone's function that gives the embeddings of the question's tokens, where it has one."""
        embeds = self.mha if isinstance(self.mha, _EmbedsTokens) else None
        return _given(embeds, self.mha, "get_input_embeddings").get_input_embeddings

    def begin(self, task: Any) -> None:
        """Tells the backbone whose turn it is, where it wants to know."""
        if isinstance(self.mha, TaskAware):
            self.mha.begin(task)

    # Computation --------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Output:
        """Similarities, (B, B) in training mode with ``label`` and else (B, C), and v_NHA, (B, S)."""
        v = self.nha(self.mha(batch).features)
        if self.training and "label" in batch:
            return Output(similarities(v, self.lta(self.apn(batch["label"])), self.similarity), v)
        return Output(similarities(v, self.answers(), self.eval_similarity), v)

    def cut(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a client sends in split learning: v_MHA (B, D) and v_APN (B, H)."""
        return self.mha(batch).features, self.apn(batch["label"])

    def project(self, v_mha: Tensor, v_apn: Tensor) -> tuple[Tensor, Tensor]:
        """What the server makes of it: v_NHA and u_LTA, both (B, S)."""
        return self.nha(v_mha), self.lta(v_apn)

    def answers(self) -> Tensor:
        """u_LTA of all C answers, (C, S), in single precision and without a gradient.

        Kept until a tensor of APN or LTA has other values. Values are compared, not their version counters: those
        miss writes through ``.data``, and other tensors may stand in for the parameters for one call
        (``torch.func.functional_call``). The comparison reads each value once, a backbone's pass much more.
        """
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            now = [*self.apn.state_dict(keep_vars=True).values(), *self.lta.state_dict(keep_vars=True).values()]
            if self._known is None or not all(map(_equal, self._known[0], now)):
                self._known = [tensor.detach().clone() for tensor in now], self.lta(self.apn.all_answers()).float()
            return self._known[1]

    @property
    def _device(self) -> torch.device:
        return self.apn.embedding.weight.device

    def _attention(self, batch: Batch) -> Tensor:
        # Where a backbone explains its answer by gradients, they must be those of this model's answer.
        answers = self.answers()
        seat = cast("_Seat", self.mha.get_submodule(self._seat))

        def scores(features: Tensor) -> Tensor:
            return similarities(self.nha(features), answers, self.eval_similarity) / self.temperature

        seat.then = scores
        try:
            return cast(Attends, self.mha).attention(batch)
        finally:
            seat.then = None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same in device, dtype, shape and values."""
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


Given = TypeVar("Given")


def _given(value: Given | None, model: nn.Module, name: str) -> Given:
    if value is None:
        raise AttributeError(f"{type(model).__name__} has no {name}")
    return value


def _width_below_the_head(model: nn.Module) -> int:
    """D of what the answer head reads."""
    name = model_spec(model).answer_head
    if name is not None:
        # A weight-normalised layer has its matrix in parts, but is a linear layer still.
        linear = next((m for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)), None)
        if linear is not None:
            return linear.in_features
    return feature_width(model, "the contrastive task")


def _glove(path: Path | str, words: Sequence[str]) -> Tensor:
    from confed.data.glove import load_glove

    return load_glove(path, words)
