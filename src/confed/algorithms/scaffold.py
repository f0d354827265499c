"""SCAFFOLD: control variates against client drift.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1.

Notation: w the weights received, theta the local weights, c_k client k's control variate and c the mean of all K
clients' (all zero at first), eta_s the learning rate of local step s, S the cohort. Client k minimises

    L_task(theta) + <theta - w, c - c_k>        (so that its gradient is g - c_k + c)

and its variate becomes

    option I:   the gradient of L_task at w over all its examples
    option II:  c_k - c + (w - theta) / sum of eta_s.

The server, with the paper's global rate 1 and means that are not weighted by N_k:

    w <- mean over S of theta_k,    c <- c + (|S| / K) mean over S of the change of c_k.

Messages carry c down and the change of c_k up, twice FedAvg's bytes both ways, as in the paper.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from confed.federation.algorithm import keeps_protections
from confed.federation.batches import to_device, training_batches
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.drift import Corrected
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Scope
from confed.federation.state import ServerState
from confed.federation.train import LocalTraining, TaskLoss, Train, travelled
from confed.federation.traits import Traits

VARIATE = "variate"  # a client's c_k in its state, and the sum of all c_k among the server's slots
PREFIX = "variate/"  # what the names of c, and of the change of c_k, begin with in a message


@dataclass(frozen=True)
class Scaffold(Corrected):
    """FedAvg with control variates.

    Option II reads the mean gradient off the distance travelled, which holds for SGD without momentum only. With
    AdamW that distance says nothing about the size of the gradient, while the variates are added to gradients:
    option I fits every optimiser, and costs one more pass over the client's examples per round. No client may leave
    the federation: the server's sum would hold its c_k for good, and be divided by a smaller K.

    Attributes:
        variate: "gradient" (option I), "steps" (option II), or "auto": option II where clients train by SGD without
            momentum, else option I. Gradients of option I are taken in eval mode, without dropout.
        statistics: names of the model's buffers, which are averaged and have no variate; read off the model.
    """

    traits = Traits(
        steps_alone=True,
        unbatchable_reason="",
        label="SCAFFOLD",
        clients_may_leave=False,
        clients_may_lack_modalities=False,
        changes=(f"{PREFIX}*",),
        synchronous="its control variates belong to the model that all clients of a round begin with",
        neutral="its variates cannot be switched off, and its means are not weighted",
    )
    slot: ClassVar[str] = VARIATE
    variate: Literal["auto", "gradient", "steps"] = "auto"

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """FedAvg's round with c beside the weights."""
        clients = server.clients or len(cohort)
        variate = {PREFIX + n: total / clients for n, total in server.slots[VARIATE].items()}
        messages = [Message({**self.broadcast(server, client).tensors, **variate}) for client in cohort]
        replies = yield [Call(c, "fit", m, expects=m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def weight(self, reply: Reply) -> float:
        """Every client counts the same."""
        return 1.0

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of the cohort, and the sum of the variates with the cohort's changes."""
        answered = 0

        def noted() -> Iterator[Reply]:
            nonlocal answered
            for reply in replies:
                answered += reply.error is None
                yield reply

        totals = server.slots[VARIATE]
        unchanged = {PREFIX + n: torch.zeros_like(total) for n, total in totals.items()}
        mean = self.average(replace(server, params={**server.params, **unchanged}), noted())
        variates = {n: total + answered * mean.pop(PREFIX + n) for n, total in totals.items()}
        return replace(server, round=server.round + 1, params=mean, slots={**server.slots, VARIATE: variates})

    # Client ------------------------------------------------------------------------------------------------

    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Local training with the corrected gradient; the reply has the weights and the change of c_k.

        Raises:
            ValueError: the model's buffers are unknown because :meth:`configure` was not called.
        """
        shared = {n: t for n, t in message.tensors.items() if not n.startswith(PREFIX)}
        everyone = {n.removeprefix(PREFIX): t for n, t in message.tensors.items() if n.startswith(PREFIX)}
        client.load(shared)
        trained = {n for n in client.names(Scope.SHARED) if client.tensors[n].requires_grad}
        if trained != set(everyone):
            raise ValueError("SCAFFOLD does not know this model's buffers; call configure(model, task) before the run")
        local = client.local
        by_steps = self.variate == "steps" or (
            self.variate == "auto" and local.optimizer == "sgd" and not local.momentum
        )
        client_variate = client.state.tensors.get(VARIATE) or {n: torch.zeros_like(c) for n, c in everyone.items()}
        new = client_variate if by_steps else _gradient(client, list(everyone))
        loss = yield Train(self._corrected(client, {n: c - client_variate[n] for n, c in everyone.items()}))
        client.remember()
        reply = client.upload(loss=loss)
        length = travelled(client)
        if by_steps and length > 0:
            new = {n: client_variate[n] - c + (shared[n] - reply.tensors[n]) / length for n, c in everyone.items()}
        client.state.tensors[VARIATE] = new
        return Message({**reply.tensors, **{PREFIX + n: c - client_variate[n] for n, c in new.items()}}, reply.scalars)

    def _corrected(self, client: Client, correction: Params) -> TaskLoss:
        """The task's loss plus <theta - w, c - c_k>."""
        pairs = [(client.tensors[n], c.to(client.tensors[n].device)) for n, c in correction.items()]
        # <w, c - c_k> is a constant: without it the loss that is logged would begin anywhere.
        start = sum(float((client.incoming[n] * c).sum()) for n, c in correction.items())

        def corrected(loss: Tensor) -> Tensor:
            return loss + torch.stack([(p * c).sum() for p, c in pairs]).sum() - start

        return TaskLoss(client.task, corrected)


def _gradient(client: Client, names: Sequence[str]) -> dict[str, Tensor]:
    """The gradient of the task's loss over all training examples at the workspace's values, in main memory."""
    parameters = [client.tensors[n] for n in names]
    device = parameters[0].device
    total = [torch.zeros_like(p, requires_grad=False) for p in parameters]
    client.model.eval()
    half = client.local.precision == "bf16"
    for cpu_batch in training_batches(client, "variate"):
        batch = to_device(cpu_batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = client.task.loss(client.model(batch), batch)
        share = len(batch["index"]) / len(client.data)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        torch._foreach_add_(total, gradients, alpha=share)  # pyright: ignore
    return {n: t.to("cpu", copy=True) for n, t in zip(names, total, strict=True)}
