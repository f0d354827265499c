"""FedDyn: dynamic regularisation that aligns local and global optima.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, Algorithm 1; the scale of h_k and the
weights alpha_k follow the authors' code.

Notation: w the weights received, theta the local weights, N_k the number of client k's examples, alpha_k =
alpha / (N_k / mean N) with the mean over all registered clients, h_k the sum of all moves theta - w that client k has
made (zero before its first). Client k minimises

    L_task(theta) + (alpha_k / 2) ||theta - w||^2 + alpha_k <theta, h_k>

which is, but for a constant, L_task(theta) + (alpha_k / 2) ||theta - (w - h_k)||^2, the form computed here (the norm
is squared). Then h_k grows by theta - w, and with S the cohort and K the number of registered clients

    w <- (1 / |S|) sum over k in S of theta_k + (1 / K) sum over all k of h_k.

Both means are plain, not weighted by N_k. The server knows theta and w, hence every increment of h_k: a client sends
its weights and nothing else. The authors clip gradients at norm 10, which is ``local.clip = 10``.

FedDC without its gradient correction, which it leaves out under AdamW, is this method (but for rounding).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from confed.federation.algorithm import keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.drift import Corrected
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params
from confed.federation.ranges import POSITIVE
from confed.federation.state import ServerState
from confed.federation.train import LocalTraining, TaskLoss, Train
from confed.federation.traits import Traits
from confed.losses.proximal import half_squared_distance

DRIFT = "drift"  # a client's h_k in its state, and the sum of all h_k among the server's slots


@dataclass(frozen=True)
class FedDyn(Corrected):
    """FedAvg with a dynamic regulariser.

    The server sends N_k / mean N as the scalar ``share``. The mean is that of all registered clients, as in the
    authors' code: over the cohort of a round alpha_k would change from round to round, and with it the point at which
    gradient and alpha_k h_k cancel. No client may leave the federation: the server's sum would hold its h_k for good,
    and be divided by a smaller K.

    Attributes:
        alpha: weight of the regulariser.
        statistics: names of the model's buffers, which are averaged and have no h_k; read off the model.
    """

    alpha: Annotated[float, POSITIVE] = 0.01
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

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """FedAvg's round; each client is also told its share of the examples."""
        messages = [Message(self.broadcast(server, c).tensors, {"share": server.share(c)}) for c in cohort]
        replies = yield [Call(c, "fit", m, expects=m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def weight(self, reply: Reply) -> float:
        """Every client counts the same."""
        return 1.0

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of the cohort plus the mean of all clients' h_k."""
        answered: list[bool] = []

        def noted() -> Iterator[Reply]:
            for reply in replies:
                answered.append(reply.error is None)
                yield reply

        mean = self.average(server, noted())
        # The sum over the cohort of theta - w; clients that did not answer kept their old h_k.
        drift = {n: h + sum(answered) * (mean[n] - server.params[n]) for n, h in server.slots[DRIFT].items()}
        clients = server.clients or len(answered)
        params = mean | {n: mean[n] + h / clients for n, h in drift.items()}
        return replace(server, round=server.round + 1, params=params, slots={**server.slots, DRIFT: drift})

    # Client ------------------------------------------------------------------------------------------------

    @keeps_protections("record_privacy")
    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Local training with the regulariser, followed by the update of h_k."""
        client.load(message.tensors)
        drift = client.state.tensors.get(DRIFT) or self.zeros(client)
        loss = yield Train(self._regularised(client, drift, self.alpha / message.positive("share")))
        client.remember()
        reply = client.upload(loss=loss)
        client.state.tensors[DRIFT] = {n: h + reply.tensors[n] - message.tensors[n] for n, h in drift.items()}
        return reply

    def _regularised(self, client: Client, drift: Params, alpha: float) -> TaskLoss:
        """The task's loss plus (alpha / 2) ||theta - (w - h_k)||^2."""
        local = [client.tensors[n] for n in drift]
        anchor = [(client.incoming[n] - h).to(client.tensors[n].device) for n, h in drift.items()]
        return TaskLoss(client.task, lambda loss: loss + alpha * half_squared_distance(local, anchor))
