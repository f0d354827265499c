"""MOON: model-contrastive federated learning.

Li, He and Song, "Model-contrastive federated learning", CVPR 2021 (arXiv 2103.16257), Eqs. 3 and 4.

Notation: z the projected features of an example in the model being trained, z_glob in the model received this
round, z_prev in the client's own model at the end of the last round it took part in; tau the temperature:

    L = L_task + mu * mean of -log( e^(cos(z, z_glob) / tau) / (e^(cos(z, z_glob) / tau) + e^(cos(z, z_prev) / tau)) )

In a client's first round there is no previous model and the term is absent: with the positive alone it is log 1.
The server averages as FedAvg does, projection included.

The released code puts the classifier on the projection; here it stays on the features, so that all methods that are
compared have the same network, and the projection only serves the term.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.messages import Message
from confed.federation.params import Params
from confed.federation.protocols import Batch, Task
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.structure import feature_width, fresh_linear
from confed.federation.teacher import once_per_round, teacher
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.info_nce import model_contrastive

NAME, WIDTH = "projection", 256
PREVIOUS = "previous"  # the client's group of tensors that holds its model of the last round it took part in


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg with the model-contrastive term.

    Attributes:
        mu: weight of the term; the paper tries 0.1, 1, 5 and 10.
        temperature: tau.
        projection: contrast a projection of the features (D -> D, ReLU, D -> 256) that is trained and averaged with
            the model; otherwise the features themselves.
    """

    traits = Traits(label="MOON", neutral={"mu": 0.0}, search={"mu": (0.01, 0.1, 1.0, 5.0)})
    mu: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 0.5
    projection: bool = True

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Check that the width of the features can be read off the model's answer head.

        Raises ``ValueError``: there is a projection to make, and the model does not say where its answer head is.
        """
        if self.mu and self.projection:
            feature_width(model, "MOON")
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Addition of the projection."""
        if self.mu and self.projection:
            width = feature_width(model, "MOON")
            layers = fresh_linear(width, width, rng), nn.ReLU(), fresh_linear(width, WIDTH, rng)
            model.add_module(NAME, nn.Sequential(*layers))

    def objective(self, client: Client) -> Objective:
        """The task's loss plus the contrastive term (Eq. 4)."""
        previous = client.state.tensors.get(PREVIOUS)
        if self.mu == 0 or previous is None:
            return super().objective(client)
        project = client.model.get_submodule(NAME) if self.projection else nn.Identity()
        frozen = [_view(client.model, p, project) for p in (client.incoming, previous)]
        views = once_per_round(client, lambda batch: torch.stack([view(batch) for view in frozen], dim=1))

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            received, before = views(batch).unbind(dim=1)
            output = model(batch)
            term = model_contrastive(project(output.features), received, before, self.temperature)
            yield client.task.loss(output, batch) + self.mu * term

        return losses

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """FedAvg's local training, whose result is kept for the next round's contrast."""
        reply = super().fit(client, message)
        if self.mu:
            # The upload is a copy of what was trained: it is kept as it is, without another copy.
            client.state.tensors[PREVIOUS] = dict(reply.tensors)
        return reply


def _view(model: nn.Module, params: Params, project: nn.Module) -> Callable[[Batch], Tensor]:
    """A frozen network's projected features of a batch, (B, P), without gradients."""
    predict = teacher(model, params)
    prefix = f"{NAME}."
    device = next(model.parameters()).device
    view_params = {name.removeprefix(prefix): t.to(device) for name, t in params.items() if name.startswith(prefix)}

    def view(batch: Batch) -> Tensor:
        with torch.no_grad():
            return torch.func.functional_call(project, view_params, (predict(batch).features,))  # pyright: ignore

    return view
