"""Ditto: personal models beside the global one, with a proximal term towards it.

Li et al., "Ditto: fair and robust federated learning through personalization", ICML 2021, Algorithm 1.

Notation: w the weights received, theta the local weights that go back to the server, v the client's own model. The
federation is FedAvg. In every round in which it takes part, the client continues from its previous v (the first time
from w) with

    L_task(v) + (lambda / 2) ||v - w||^2.

This is a second training of the same length: a client computes twice as much as in FedAvg.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.client import Client
from confed.federation.messages import Message
from confed.federation.params import Params
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.train import LocalTraining, TaskLoss, Train
from confed.federation.traits import Traits
from confed.losses.proximal import half_squared_distance


@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg, and a personal model per client held near the global one.

    The personal model is what the method is about, so it is kept whether or not the run keeps personal models.

    Attributes:
        lam: weight lambda of the distance between the two; 0 makes v a local-only model that starts from the w of
            the client's first round.
    """

    lam: Annotated[float, NOT_NEGATIVE] = 0.1
    traits = Traits(
        steps_alone=True,
        unbatchable_reason="",
        group="personalisation",
        neutral={},
        search={"lam": (0.01, 0.1, 1.0, 10.0)},
    )

    @keeps_protections("record_privacy")
    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """FedAvg's local training, then the personal model's training.

        Where that diverges the client keeps the v it had before, if any, with a warning: its update of the shared
        model is sound and is sent.
        """
        before = client.state.tensors.get("personal")
        personal = message.tensors if before is None else before
        reply = yield from super().local_training(client, message)
        client.load(personal)
        yield Train(self._near(client, message.tensors), order="personal")
        client.keep_personal = True
        client.remember()
        # The engine checks what is sent; this model is not.
        trained = client.state.tensors.pop("personal")
        lost = [n for n, t in trained.items() if t.is_floating_point() and not torch.isfinite(t).all()]
        if lost:
            warnings.warn(
                f"Ditto's personal model of {client.info.id!r} diverged in round {client.round + 1}: {lost[0]!r} holds "
                f"a NaN or an infinity; the client {'has none yet' if before is None else 'keeps the one before'}",
                stacklevel=2,
            )
        personal_model = before if lost else trained
        if personal_model is not None:
            client.state.tensors["personal"] = personal_model
        return reply

    def _near(self, client: Client, received: Params) -> TaskLoss:
        """The task's loss plus (lambda / 2) ||v - w||^2 over the trained shared tensors."""
        names = [n for n in received if client.tensors[n].requires_grad]
        personal = [client.tensors[n] for n in names]
        anchor = [received[n].to(client.tensors[n].device) for n in names]

        def proximal(loss: Tensor) -> Tensor:
            return loss + self.lam * half_squared_distance(personal, anchor)

        return TaskLoss(client.task, proximal if self.lam else None)
