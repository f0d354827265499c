"""Visual question answering by similarity between question representations and answer texts.

Sun and Ochiai, "Bidirectional contrastive split learning for visual question answering", AAAI 2024. The loss is
InfoNCE within a batch (:mod:`confed.losses.info_nce`), the model a backbone with two adapters
(:mod:`confed.models.contrastive`), into which this task turns any backbone. How the model is trained, split or whole,
is the method's matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, SHARE, check_fields
from confed.federation.reports import Number
from confed.losses.info_nce import Contrast, Denominator, Similarity, same_answers
from confed.models.contrastive import ContrastiveAnswerer
from confed.registry import register_task
from confed.tasks.vqa import VQA, Headline

Preset = Literal["paper", "code"]
"""The paper as written, or its authors' released code."""

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # The paper's equations have raw dot products; those of batch-normalised vectors, divided by 0.07, are in the
    # thousands. So vectors are scaled to length 1, as the released code's loss does, in evaluation as well.
    "paper": {
        "denominator": "exclude",
        "reduction": "sum",
        "similarity": "cosine",
        "eval_similarity": "cosine",
        # In the text answers are padded with vectors of zeros to eight words, and the maximum is over all eight.
        "masked": False,
    },
    "code": {
        "denominator": "include",
        "reduction": "mean",
        "similarity": "cosine",
        "eval_similarity": "dot",
        "masked": False,
    },
}


@register_task
@dataclass(frozen=True)
class Contrastive:
    """One answer out of C by similarity; implements :class:`confed.federation.protocols.Task`.

    Batches carry ``label`` (B,) int64 and may carry soft scores ``target`` (B, C), ``type`` (B,) and ``answerable``
    (B,), as those of :class:`confed.tasks.vqa.VQA`. The loss reads similarities within the batch, (B, B), which the
    model gives in training mode; all else reads those with all answers, (B, C).

    Args:
        answers: size C of the answer vocabulary.
        types: names of the question types; each gets a line of the accuracy.
        preset: "paper" or "code"; decides the options that are not given.
        temperature: tau of the loss.
        denominator: "exclude" or "include" the positive pair.
        similarity: "cosine" or "dot", in the loss.
        eval_similarity: "cosine" or "dot", with all answers.
        reduction: "sum" or "mean" over the batch.
        mask_same_answer: whether examples of a batch with the same answer are no negatives of each other.
        symmetric: whether the loss also tells an answer's question from the batch's others.
        width: dimensions S of the common space.
        hidden: width of the answer projection and of the layer in the head adapter.
        answer_words: words of an answer that count.
        masked: whether positions behind an answer's last word are left out of the maximum over words. Neither preset
            does: a vector of zeros gives ReLU(b), which can win.
        glove: a text file of GloVe vectors for the answers' words, frozen then.
        glove_missing: share of the answers that may have no word in that file; all of them are one answer to the
            model.
        embedding: width of the words' embeddings where they are learned.
        batch_norm: whether the head adapter ends with batch normalisation, as published.
        headline: the metric that heads results and is tested: "accuracy", the paper's strict ValAcc (also if empty), or
            "vqa_accuracy", the soft score, by which the released code evaluates.

    Raises:
        ValueError: an unknown preset or option, or a value outside its range.
    """

    answers: int
    types: tuple[str, ...] = ()
    preset: Preset = "paper"
    temperature: Annotated[float, POSITIVE] = 0.07
    denominator: Denominator | None = None
    similarity: Similarity | None = None
    eval_similarity: Similarity | None = None
    reduction: Literal["sum", "mean"] | None = None
    mask_same_answer: bool = False
    symmetric: bool = False
    width: Annotated[int, AT_LEAST_ONE] = 256
    hidden: Annotated[int, AT_LEAST_ONE] = 512
    answer_words: Annotated[int, AT_LEAST_ONE] = 8
    masked: bool | None = None
    glove: Path | None = None
    glove_missing: Annotated[float, SHARE] = 0.01
    embedding: Annotated[int, AT_LEAST_ONE] = 300
    batch_norm: bool = True
    headline: Headline = ""

    name: ClassVar[str] = "contrastive"
    head: ClassVar[str] = "answers"

    def __post_init__(self) -> None:
        check_fields(self, "task")
        _ = self._closed  # checks answers and types

    @property
    def metric(self) -> str:
        """The headline: by default strict accuracy, the paper's ValAcc."""
        return self.headline or "accuracy"

    @property
    def single_label(self) -> bool:
        """False: methods that distil a distribution over the answers cannot read similarities within a batch."""
        return False

    def option(self, name: str) -> Any:
        """An option's value: what was given, or the preset's."""
        given = getattr(self, name)
        return PRESETS[self.preset][name] if given is None else given

    @property
    def contrast(self) -> Contrast:
        """The loss within a batch, of v_NHA and u_LTA, both (B, S)."""
        return Contrast(
            self.temperature,
            self.option("denominator"),
            self.option("similarity"),
            self.option("reduction"),
            self.mask_same_answer,
            self.symmetric,
        )

    def wrap(self, model: nn.Module, answers: Sequence[str], rng: torch.Generator) -> ContrastiveAnswerer:
        """The backbone with what this task needs in the place of its answer head."""
        if len(answers) != self.answers:
            raise ValueError(f"the task has {self.answers} answers, got the texts of {len(answers)}")
        return ContrastiveAnswerer(
            model,
            answers,
            similarity=self.option("similarity"),
            eval_similarity=self.option("eval_similarity"),
            temperature=self.temperature,
            width=self.width,
            hidden=self.hidden,
            words=self.answer_words,
            masked=self.option("masked"),
            glove=self.glove,
            glove_missing=self.glove_missing,
            embedding=self.embedding,
            batch_norm=self.batch_norm,
            rng=rng,
        )

    def labels(self, batch: Batch) -> Tensor:
        """The right answers, int64, shape (B,).

        Raises ``ValueError``: the batch has no labels.
        """
        return self._closed.labels(batch)

    def same(self, batch: Batch) -> Tensor | None:
        """The pairs of a batch that are no negatives, bool, (B, B); None where all pairs are."""
        return same_answers(self.labels(batch)) if self.mask_same_answer else None

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """InfoNCE of similarities within the batch, a scalar: with the preset "paper" the sum over the batch."""
        size = len(self.labels(batch))
        if output.logits.shape != (size, size):
            raise ValueError(
                f"the contrastive loss reads similarities within the batch, ({size}, {size}), as the model gives them "
                f"in training mode; got {tuple(output.logits.shape)}"
            )
        return self.contrast.of(output.logits, self.same(batch))

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return self._closed.measures

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch, from similarities with all answers, (B, C).

        As :meth:`confed.tasks.vqa.VQA.tally`: ``accuracy`` is strict (the paper's ValAcc), ``vqa_accuracy`` the soft
        score where batches have ``target``, the headline also by type of question. ``loss`` and the confidence are
        those of a softmax over all C answers at the loss's temperature.

        Raises ``ValueError``: the logits do not have the shape (B, C), or a label or a type is outside its range.
        """
        return self._closed.tally(Output(output.logits.float() / self.temperature, output.features), batch)

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """1 where the most similar answer is the right one, else 0, or its soft score; float32, shape (B,).

        Raises ``ValueError``: the logits do not have the shape (B, C).
        """
        return self._closed.predictions(output, batch)

    @property
    def _closed(self) -> VQA:
        return VQA(self.answers, "ce", self.types, headline=self.headline)


def same_answer_share(labels: Tensor, batch_size: int, rng: torch.Generator) -> float:
    """Share of false negatives in one epoch: negatives with the same answer as their example."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    same = pairs = 0
    order = torch.randperm(len(labels), generator=rng)
    for batch in labels[order].split(batch_size) if len(labels) else ():
        counts = batch.unique(return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += len(batch) * (len(batch) - 1)
    return same / pairs if pairs else 0.0
