"""Interface of models that classify by texts: learned context in front of class names, as prompt methods need it.

Radford et al., "Learning transferable visual models from natural language supervision", ICML 2021 (classes are texts);
Zhou et al., "Learning to prompt for vision-language models" (CoOp), IJCV 2022 (vectors in place of the words before a
class name).

Notation of prompt methods: f(x) a picture's features and g(t_c) those of class c's prompt, both of unit length;
t_c = [v_1 ... v_M, name_c] with learned vectors v, the *context*; tau the model's temperature:

    p(c | x) = softmax over c of f(x) g(t_c) / tau
"""

from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.actions import OFFERED, among_offered
from confed.federation.protocols import Batch, Output

CONTEXT = "context.vectors"  # name of the learned context, (M, d), in a model that has one


@runtime_checkable
class ClassifiesByTexts(Protocol):
    """A model of pictures and class names in one space of D features."""

    @property
    def class_count(self) -> int:
        """Number of classes C."""
        ...

    @property
    def context_shape(self) -> tuple[int, int]:
        """Context tokens M in front of a class name, and features d of a token; M is 0 without learned context."""
        ...

    def image_features(self, batch: Batch) -> Tensor:
        """f(x), unit length, (B, D)."""
        ...

    def patch_features(self, batch: Batch) -> Tensor:
        """Features of a picture's patches in the common space, unit length, (B, V, D)."""
        ...

    def class_features(self, context: Tensor, classes: Tensor) -> Tensor:
        """g(t_c) of some classes, unit length, (K, D): one pass of the text encoder.

        Args:
            context: in front of all names, (M, d), or of each one, (K, M, d).
            classes: positions of the classes, int64 (K,).
        """
        ...

    def handwritten_features(self, classes: Tensor) -> Tensor:
        """Features of the classes' prompts in plain words, unit length, without gradient, (K, D)."""
        ...

    def initial_context(self) -> Tensor:
        """The context that learning starts from, (M, d)."""
        ...

    def similarity_scores(self, similarities: Tensor) -> Tensor:
        """Scores of cosines: divided by the temperature, with the model's bias where it has one."""
        ...


class PromptPass(NamedTuple):
    """What one pass with some context gives."""

    output: Output  # scores of all classes, (B, C), and the pictures' features f(x), (B, D)
    texts: Tensor  # g(t_c) of the classes that the batch is offered, (K, D)
    classes: Tensor  # which these are, (K,)


def prompt_pass(model: nn.Module, batch: Batch, context: Tensor) -> PromptPass:
    """Scores of a batch with some context: one pass of the text encoder for all classes that are offered."""
    reads = as_classifier(model)
    features = reads.image_features(batch)
    classes = classes_of(batch, reads.class_count).to(features.device)
    texts = reads.class_features(context, classes)
    scores = reads.similarity_scores(features @ texts.T)
    return PromptPass(Output(scores_of(scores, classes, batch, reads.class_count), features), texts, classes)


def as_classifier(model: nn.Module) -> ClassifiesByTexts:
    """The model by its interface, where a method has checked that it has it."""
    return cast("ClassifiesByTexts", model)


def learned_context(model: nn.Module, method: str) -> ClassifiesByTexts:
    """The model as one with learned context.

    Raises:
        ValueError: it does not classify by texts, or learns no context.
    """
    if not isinstance(model, ClassifiesByTexts):
        raise ValueError(
            f"{method} learns prompts of class names, and {type(model).__name__} reads none: set model.name to 'clip'"
        )
    if model.context_shape[0] < 1 or CONTEXT not in dict(model.named_parameters()):
        raise ValueError(f"{method} learns the words before class names: set model.trainable to 'prompt'")
    return model


def classes_of(batch: Batch, count: int) -> Tensor:
    """Positions of the classes that any example of a batch is offered, all C without that column, int64 (K,)."""
    if OFFERED in batch:
        return batch[OFFERED].any(dim=0).nonzero()[:, 0]
    device = next(iter(batch.values())).device
    return torch.arange(count, device=device)


def scores_of(scores: Tensor, classes: Tensor, batch: Batch, count: int) -> Tensor:
    """Scores of all classes, (B, C), from those of some; the others cannot win."""
    if len(classes) == count:
        return among_offered(scores, batch)
    whole = scores.new_zeros(len(scores), count)
    return among_offered(whole.index_copy(1, classes, scores), batch)
