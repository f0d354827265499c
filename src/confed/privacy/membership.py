r"""Membership inference by loss: was an example among those that a model was trained on?

Yeom, Giacomelli, Fredrikson and Jha (2018), "Privacy risk in machine learning: analyzing the connection to
overfitting", adversary 2: a model's loss tends to be smaller on the examples it was trained on, so the attack says
"member" where the loss lies below a threshold. Over all thresholds its quality is the area under the ROC curve,

    AUC = P(loss(member) < loss(other)) + 1/2 P(loss(member) = loss(other)),

the probability that a random member has a smaller loss than a random other example. It is 1/2 where the losses say
nothing, and it is the Mann-Whitney statistic divided by the number of pairs. The attack sees losses only; stronger
attacks exist, so a low AUC is no guarantee.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from confed.federation.protocols import Batch, Forward, Output, Task


def example_losses(predict: Forward, task: Task, batches: Iterable[Batch]) -> Tensor:
    """The task's loss of every example by itself, float64, shape (N,)."""
    losses: list[Tensor] = []
    for given in batches:
        # Models that write answers score candidates then, of members and of others alike.
        batch = {name: tensor for name, tensor in given.items() if name not in ("answer_tokens", "answer_weight")}
        output = predict(batch)
        answerable = batch.get("answerable")
        for row in range(len(output.logits)):
            if answerable is not None and not answerable[row]:
                continue
            one = slice(row, row + 1)
            alone = Output(output.logits[one], output.features[one])
            losses.append(task.loss(alone, {name: column[one] for name, column in batch.items()}).double().cpu())
    return torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64)


def attack_auc(members: Tensor, others: Tensor) -> float:
    """Area under the ROC curve of the loss-threshold attack, exact, ties counted half."""
    for name, losses in (("members", members), ("others", others)):
        if losses.ndim != 1 or not len(losses):
            raise ValueError(f"{name} must be losses of shape (N,), at least one, got shape {tuple(losses.shape)}")
        if not losses.isfinite().all():
            raise ValueError(f"{name} must be finite, got {losses[~losses.isfinite()][0].item()}")
    return auc_of(-members.double().numpy(), -others.double().numpy())


def auc_of(members: np.ndarray, others: np.ndarray) -> float:
    """Area under the ROC curve of scores that are larger for members, ties counted half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, "left")
    level = np.searchsorted(ordered, members, "right") - below
    return float((below + level / 2).mean() / len(others))
