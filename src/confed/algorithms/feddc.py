"""FedDC: federated learning with local drift decoupling and correction.

Gao et al., "FedDC: federated learning with non-IID data via local drift decoupling and correction", CVPR 2022;
details (weights, where g is scaled) follow the authors' code.

Notation: w the weights received, theta the local weights, v_k = N_k / mean N with the mean over all registered
clients, alpha_k = alpha / v_k; h_k client k's drift, g_k its estimate of its own gradient, g the server's of all
clients' (all zero at first); S local steps of rate eta; K registered clients. Client k minimises

    L_task(theta) + (alpha_k / 2) ||theta - (w - h_k)||^2 + <theta - w, g / v_k - g_k>

and then, with Delta = theta - w,

    h_k <- h_k + Delta,    g_k <- g_k - g / v_k - Delta / (S eta),

and the server, with "change" the change of g_k,

    g <- g + (1 / K) sum over the cohort of v_k change_k
    w <- mean over the cohort of theta_k + (1 / K) sum over all k of h_k        (means not weighted by N_k).

The last term of the loss, the gradient correction, reads gradients off the distance travelled: that holds for plain
SGD, at a constant rate or under a schedule. S eta is computed as the sum of the rates of the round's own steps. The
authors keep the term under their schedule (0.998 a round) and divide by S times the rate of round 0, with S that of a
client of mean size; both are the same at a constant rate and equal sizes.

Paper and released code define the term for SGD with a rate eta and say nothing of other optimisers. After AdamW
Delta / (S eta) is the mean of normalised steps, of about the same size for every parameter whatever its gradient is,
and no estimate of a gradient, so ``correction = "auto"`` leaves the term out with AdamW, Adam, Adamax and momentum.
What remains is FedDyn's penalty and FedDyn's server: with equal alpha the two then are one method under two names, and
give the same numbers but for rounding. They differ with ``local.optimizer = "sgd"`` and ``local.momentum = 0``.

The server recomputes all changes from theta and the scalar v_k / (S eta): a client sends its weights only, where the
authors' code sends both. The authors clip gradients at norm 10, which is ``local.clip = 10``.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from confed.federation.algorithm import Protection, keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.drift import Corrected
from confed.federation.local import Local
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Mean, Params
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.reports import Number, Report
from confed.federation.state import ServerState
from confed.federation.train import LocalTraining, TaskLoss, Train, travelled
from confed.federation.traits import Traits
from confed.losses.proximal import half_squared_distance

DRIFT, GRADIENT = "drift", "gradient"
"""h_k and g_k in a client's state; among the server's slots the sum of all h_k, and K g."""
PREFIX = "gradient/"  # what the names of g begin with in a message
TOLERANCE = 10.0  # how many times the rate that the server reckons for a client the client's own may be


@dataclass(frozen=True)
class FedDC(Corrected):
    """FedAvg with drift decoupling and correction.

    The server sends v_k as the scalar ``share``. Its mean is that of all registered clients, as in the authors' code:
    over the cohort of a round v_k and alpha_k would change from round to round, K g would not be the sum of v_k g_k,
    and the optimum no fixed point. No client may leave the federation: the server's sums would hold its h_k and g_k
    for good, and be divided by a smaller K.

    Attributes:
        alpha: weight of the penalty.
        correction: the gradient correction: "on", "off", or "auto": on where clients train by SGD without momentum
            (whatever the schedule of its rate). "on" with another optimiser is possible, and has no theory behind it.
        statistics: names of the model's buffers, which are averaged and not corrected; read off the model.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 0.01
    correction: Literal["auto", "on", "off"] = "auto"
    traits = Traits(
        steps_alone=True,
        unbatchable_reason="",
        clients_may_leave=False,
        clients_may_lack_modalities=False,
        counts_examples=True,
        synchronous="its corrections h_k belong to the model that all clients of a round begin with",
        neutral="the server adds the mean of all h_k whatever alpha is, and its means are not weighted",
        search={"alpha": (0.001, 0.01, 0.1, 1.0)},
    )

    def unsupported_reason(self, protection: Protection) -> str:
        """With the gradient correction all but noise at the client: the server also weighs updates by their rates."""
        at_client = self.update_privacy is not None and self.update_privacy.at == "client"
        if self.correction == "off" or (protection == "update_privacy" and at_client):
            return super().unsupported_reason(protection)
        return f"its correction is no mean of updates; set algorithm.correction to 'off', got {self.correction!r}"

    @keeps_protections("update_privacy")
    def reports(self, action: str) -> Report:
        """Reported scalars: the loss, and the weight of a client's change in the gradient correction (0 without it)."""
        return {**super().reports(action), "rate": Number(0, 0 if self.correction == "off" else 1e12)}

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """FedAvg's round; clients also receive their share of the examples, and g where there is one."""
        clients = server.clients or len(cohort)
        extra = {PREFIX + n: g / clients for n, g in server.slots.get(GRADIENT, {}).items()}
        calls: list[Call] = []
        for client in cohort:
            shared = self.broadcast(server, client).tensors
            message = Message({**shared, **extra}, {"share": server.share(client)})
            calls.append(Call(client, "fit", message, expects=shared))
        replies = yield calls
        return self.aggregate(server, replies)

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def weight(self, reply: Reply) -> float:
        """Every client counts the same."""
        return 1.0

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of the cohort plus the mean drift; and the new g."""
        drifts = server.slots[DRIFT]
        travelled = Mean(self.accumulator_dtype)
        replied, answered, correcting, rates = 0, 0, 0, 0.0

        def noted() -> Iterator[Reply]:
            nonlocal replied, answered, correcting, rates
            for given in replies:
                reply, rate = self._rate(server, given)
                replied += 1
                answered += reply.error is None
                if rate > 0:
                    correcting, rates = correcting + 1, rates + rate
                    travelled.add({n: reply.message.tensors[n] for n in drifts}, rate)
                yield reply

        mean, before = self.average(server, noted()), server.params
        clients = server.clients or replied
        drift = {n: h + answered * (mean[n] - before[n]) for n, h in drifts.items()}
        slots: dict[str, Params] = {**server.slots, DRIFT: drift}
        if correcting:
            # The sum of v_k change_k, with v_k change_k = -g - rate_k (theta_k - w).
            old, to = server.slots.get(GRADIENT, {}), travelled.result({n: before[n] for n in drifts})
            total = {n: old.get(n, torch.zeros_like(h)) for n, h in drifts.items()}
            slots[GRADIENT] = {n: t - correcting * t / clients - rates * (to[n] - before[n]) for n, t in total.items()}
        params = mean | {n: mean[n] + h / clients for n, h in drift.items()}
        return replace(server, round=server.round + 1, params=params, slots=slots)

    def _rate(self, server: ServerState, reply: Reply) -> tuple[Reply, float]:
        """A reply and its v_k / (S eta), 0 without correction; without a sound rate the reply is a failed one."""
        if reply.error is not None:
            return reply, 0.0
        try:
            if self.correction == "off" and "rate" not in reply.message.scalars:
                return reply, 0.0
            rate = reply.message.positive("rate", zero=True)
            most = self._most(server, reply.client)
            if rate > most:
                raise ValueError(
                    f"the message's scalar 'rate' must be at most {most:.6g} in this round, got {rate:.6g}"
                )
        except ValueError as error:  # this client's fault alone
            return replace(reply, message=Message(), error=f"ValueError: {error}"), 0.0
        return reply, rate

    def _most(self, server: ServerState, client: ClientInfo) -> float:
        """The largest rate that a client may have: a multiple of its v_k / (S eta) as the server reckons it.

        What one client says here scales its part of g for good, and so may not be any number. It differs from what is
        reckoned where batches are not those of N_k examples. Infinity where the server does not know how clients train.
        """
        local = server.local
        if self.correction == "off" or (local is not None and not self._corrects(local)):
            return 0.0
        if local is None or not server.rounds:
            return math.inf
        steps = local.round_steps(max(1, local.steps(math.ceil(client.num_examples / local.batch_size))))
        # a step more or less matters where the rate of the first step of all is 0.
        lengths = [local.travelled(server.round, server.rounds, s) for s in (steps, steps + 1)]
        return max((TOLERANCE * server.share(client) / length for length in lengths if length > 0), default=0.0)

    def _corrects(self, local: Local) -> bool:
        return self.correction == "on" or (self.correction == "auto" and _plain(local))

    # Client ------------------------------------------------------------------------------------------------

    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Local training with penalty and correction, followed by updates of h_k and g_k."""
        shared = {n: t for n, t in message.tensors.items() if not n.startswith(PREFIX)}
        share = message.positive("share")
        client.load(shared)
        zeros = self.zeros(client)
        drift = client.state.tensors.get(DRIFT, zeros)
        correcting = self._corrects(client.local)
        client_gradient = client.state.tensors.get(GRADIENT, zeros)
        everyone = {n: message.tensors.get(PREFIX + n, z) / share for n, z in zeros.items()}
        pull = {n: everyone[n] - client_gradient[n] for n in zeros} if correcting else None
        loss = yield Train(self._corrected(client, drift, pull, self.alpha / share))
        client.remember()
        length = travelled(client) if correcting else 0.0
        per_distance = 1 / length if length > 0 else 0.0
        reply = client.upload(loss=loss, rate=share * per_distance)
        moved = {n: reply.tensors[n] - shared[n] for n in zeros}
        client.state.tensors[DRIFT] = {n: drift[n] + moved[n] for n in zeros}
        if per_distance:
            client.state.tensors[GRADIENT] = {
                n: client_gradient[n] - everyone[n] - per_distance * moved[n] for n in zeros
            }
        return reply

    def _corrected(self, client: Client, drift: Params, pull: Params | None, alpha: float) -> TaskLoss:
        """The task's loss plus (alpha / 2) ||theta - (w - h_k)||^2 plus, where given, <theta - w, pull>."""
        local = [client.tensors[n] for n in drift]
        anchor = [(client.incoming[n] - h).to(client.tensors[n].device) for n, h in drift.items()]
        slope = None if pull is None else [pull[n].to(client.tensors[n].device) for n in drift]
        # <w, pull> is a constant: without it the loss that is logged would begin anywhere.
        start = 0.0 if pull is None else sum(float((client.incoming[n] * p).sum()) for n, p in pull.items())

        def corrected(loss: Tensor) -> Tensor:
            if self.alpha:
                loss = loss + alpha * half_squared_distance(local, anchor)
            if slope is not None:
                loss = loss + torch.stack([(p * s).sum() for p, s in zip(local, slope, strict=True)]).sum() - start
            return loss

        return TaskLoss(client.task, corrected)


def _plain(local: Local) -> bool:
    """Whether steps travel the sum of their rates times the mean gradient."""
    return local.optimizer == "sgd" and not local.momentum
