"""Outputs of frozen networks, as distillation and regularisers use them, computed once per example and round."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from confed.federation.batches import MIRRORED, versions
from confed.federation.params import Params
from confed.federation.protocols import Batch, DrawsAnew, Output

if TYPE_CHECKING:
    from confed.federation.client import Client


def teacher(model: nn.Module, params: Params) -> Callable[[Batch], Output]:
    """A frozen network without a second copy of it: other values run through the same modules.

    Args:
        model: the workspace.
        params: the teacher's values of the tensors in which it differs from the workspace.

    Returns:
        A function of a batch, in eval mode and without gradients.
    """
    device = next(model.parameters()).device
    frozen = {name: value.to(device) for name, value in params.items()}

    def predict(batch: Batch) -> Output:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return torch.func.functional_call(model, frozen, (batch,))  # pyright: ignore
        finally:
            model.train(training)

    return predict


def global_logits(client: "Client") -> Callable[[Batch], Tensor]:
    """Logits of the frozen global model of this round, as received.

    Where the client's data are deterministic each example is run through the teacher once per round, not once per
    epoch: the logits are kept in a table of N x C values, keyed by ``batch["index"]``; with mirrored pictures
    (``local.augment``) in one of 2 N rows, as either side has its own.

    Args:
        client: a client whose workspace :meth:`Client.load` has just filled.

    Returns:
        A function of a training batch, (B, C), without gradients.
    """
    predict = teacher(client.model, client.incoming)
    return once_per_round(client, lambda batch: predict(batch).logits)


def global_features(client: "Client") -> Callable[[Batch], Tensor]:
    """Features of the frozen global model of this round, (B, D); otherwise as :func:`global_logits`."""
    predict = teacher(client.model, client.incoming)
    return once_per_round(client, lambda batch: predict(batch).features)


def once_per_round(client: "Client", compute: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """What frozen networks make of a training batch, (B, ...), computed once per example and round.

    A batch with something that is drawn anew in every epoch, such as the states of labels in label-mask training, is
    computed every time. A method whose networks are not to see it takes it out of the batch before.

    Args:
        client: whose examples; where the data are not deterministic, or seen once only, nothing is kept. Tensors that
            are drawn anew are named by :class:`confed.federation.protocols.DrawsAnew`.
        compute: a function of a batch whose rows depend on their own example alone, without gradients.
    """
    if not client.data.deterministic or (client.local.epochs == 1 and not client.local.iterations):
        return compute
    table: list[Tensor] = []
    answered_rows = torch.zeros(versions(client) * len(client.data), dtype=torch.bool)
    drawn = client.data.drawn if isinstance(client.data, DrawsAnew) else ()

    def lookup(batch: Batch) -> Tensor:
        if any(name in batch for name in drawn):
            return compute(batch)
        rows = batch["index"].cpu()
        if MIRRORED in batch:
            rows = rows + len(client.data) * batch[MIRRORED].cpu()
        if table and bool(answered_rows[rows].all()):
            return table[0][rows.to(table[0].device)]
        values = compute(batch)
        if not table:
            table.append(values.new_zeros(len(answered_rows), *values.shape[1:]))
        table[0][rows.to(values.device)] = values
        answered_rows[rows] = True
        return values

    return lookup


def without_answers(batch: Batch) -> Batch:
    """A training batch as evaluations have it: a model that writes its answers then gives scores of a list of answers.

    Any other model's batch is returned as it is.
    """
    if "answer_tokens" not in batch:
        return batch
    return {name: tensor for name, tensor in batch.items() if name not in ("answer_tokens", "answer_weight")}
