"""Task heads of a vision-language backbone, on a pooled representation of d features.

ViLT (Kim, Son and Kim, ICML 2021) for answers and for pairs of pictures; CLiMB (Srinivasan et al., NeurIPS 2022)
for entailment and multiple choice.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.ranges import AT_LEAST_ONE, check_value
from confed.federation.specs import task_spec
from confed.models.inputs import check_shape, needed
from confed.models.layers import seeded_linear

CLASSES = {"nlvr2": 2, "entailment": 3, "choice": 1}
"""Head -> how many scores it gives: false and true; the three relations; one per choice."""


COUNT = Annotated[int, AT_LEAST_ONE]
"""Type of a number of things of which there is one at least, for :func:`confed.federation.ranges.check_value`."""


def check_divides(heads: int, width: int, where: str) -> None:
    """Check that attention heads, or the features of one, divide a width."""
    if heads < 1 or width % heads:
        raise ValueError(f"{where} must divide the width {width}, got {heads}")


def count(answers: Sequence[str] | int) -> int:
    """How many answers there are, given as texts or as their number: one at least."""
    number = answers if isinstance(answers, int) else len(answers)
    check_value(number, COUNT, "answers")
    return number


def answer_head(width: int, answers: int, rng: torch.Generator, pictures: int = 1) -> nn.Sequential:
    """The answer head of ViLT and FedVQA: Linear(n d, 2d), LayerNorm, GELU, Linear(2d, C); weights N(0, 0.02)."""
    return nn.Sequential(
        seeded_linear(pictures * width, 2 * width, 0.02, rng),
        nn.LayerNorm(2 * width),
        nn.GELU(),
        seeded_linear(2 * width, answers, 0.02, rng),
    )


def task_head(head: str, width: int, rng: torch.Generator) -> nn.Sequential:
    """The head of a task other than answering."""
    check_heads((head,))
    if head == "choice":
        return nn.Sequential(nn.Dropout(0.1), seeded_linear(width, 1, 0.02, rng))
    return answer_head(width, CLASSES[head], rng, 2 if head == "nlvr2" else 1)


def check_heads(heads: Sequence[str]) -> None:
    """Check that heads with these names exist."""
    for head in heads:
        if head not in CLASSES:
            raise ValueError(f"heads must be among {', '.join(CLASSES)}, got {head!r}")


def views(head: str, batch: Batch) -> int:
    """How many passes of the backbone an example needs: two pictures, K choices, or one."""
    needs = {"nlvr2": ("image2",), "choice": ("choices", "choices_mask")}.get(head, ())
    needed(batch, f"the head {head!r}", *needs)
    if head != "choice":
        return 2 if head == "nlvr2" else 1
    return check_shape(batch["choices"], "choices", "B", "K", "L").shape[1]


def score(module: nn.Module, head: str, pooled: Tensor, views: int) -> Output:
    """Scores (B, C), or (B, K) of K choices, from the pooled states of all passes; and their mean, (B, d)."""
    if views == 1 and head != "choice":
        return Output(module(pooled), pooled)
    several = pooled.reshape(-1, views, pooled.shape[-1])
    logits = module(several).squeeze(-1) if head == "choice" else module(several.flatten(1))
    return Output(logits, several.mean(1))


class Heads:
    """Mix-in of a backbone with an answer head ``classifier`` and heads of further tasks in ``heads``.

    Before it is used, :meth:`begin` may say whose turn it is; until then it answers.
    """

    answer_head = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    heads: nn.ModuleDict  # head as tasks call it -> network, without the answer head
    selected: str = "answers"  # the head that answers now

    @property
    def heads_of_tasks(self) -> Mapping[str, str]:
        """Head as tasks call it -> submodule."""
        return {"answers": self.answer_head} | {head: f"heads.{head}" for head in self.heads}

    def begin(self, task: Any) -> None:
        """Selects the head that answers a task (its attribute ``head``; answers, where it has none)."""
        head = task_spec(task).head
        if head not in self.heads_of_tasks:
            raise ValueError(
                f"{type(self).__name__} has the heads {', '.join(self.heads_of_tasks)}, the task needs {head!r}"
            )
        self.selected = head
