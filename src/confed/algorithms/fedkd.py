"""FedKD: mutual distillation between a private mentor and a shared mentee whose updates are compressed.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 13, 2022
(arXiv 2108.13323); terms that the text leaves open follow the authors' code.

Notation: t the mentor (the paper's teacher), which never leaves its client; s the mentee (the student), whose
average is the global model; CE the task's loss, p answer probabilities at temperature 1, h pooled features:

    L_t = CE_t + (KL(p_s || p_t) + MSE(h_t, h_s)) / (CE_t + CE_s)
    L_s = CE_s + (KL(p_t || p_s) + MSE(h_t, h_s)) / (CE_t + CE_s)

Both are minimised together, by one optimiser. What a client sends is the mentee's change of this round, every matrix
as the fewest singular values that hold more than a share e(r) of its sum of squares, in round r of R (from 0):

    e(r) = e_start + (e_end - e_start) (r + 1) / R

The server takes the plain mean of the changes; the change of the global model is compressed in the same way for
clients that hold the model of the round before, and other clients receive the model whole.

In FedVQA's setting both networks have the task's backbone and the same initial values; the mentor is the client's
personal model. Attention maps are not distilled, as backbones do not expose them.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.algorithm import Algorithm, Protection, action, keeps_protections, uniform_weight
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import Range
from confed.federation.reports import Number, Report
from confed.federation.specs import frozen_names
from confed.federation.state import ServerState
from confed.federation.train import Objective, train
from confed.federation.traits import Traits
from confed.losses.low_rank import compress, restore

Reduction = Literal["element", "batch"]
"""The divergence's mean over all B x C elements (the authors' code) or over the B examples."""

MENTOR, UPDATE = "mentor", "update/"
HELD, HOLDERS, LAST = "held", "holders", "last_update"
"""On a client: the global model it was last given. On the server: who has that of last round; its change since."""

_SMALLEST = 1e-3
"""Lower bound of CE_t + CE_s as a divisor: a client that has learned its data by heart must not divide by 0."""


@dataclass(frozen=True)
class FedKD(Algorithm):
    """Mutual distillation with a private mentor, and compressed updates of the shared mentee.

    Attributes:
        energy_start: e_start, the share of a matrix's energy that is kept at the beginning.
        energy_end: e_end, the share in the last round; 1 keeps everything.
        detach: each network is a constant in the other's loss, and so are the divisors; otherwise gradients flow
            everywhere, as in the authors' code.
        reduction: the divergence's mean, over all elements or over the examples.
        compress_download: clients that hold last round's model receive its compressed change.
    """

    traits = Traits(
        steps_alone=True,
        label="FedKD",
        group="distillation",
        private_beside=True,
        synchronous="a client is sent the compressed change of the last round",
        changes=(f"{UPDATE}*",),
        updates_compressible=False,
        neutral="every client trains two networks at once, so it never becomes FedAvg",
        search={"detach": (False, True), "reduction": ("element", "batch")},
    )
    energy_start: Annotated[float, Range(0, 1, above=True)] = 0.95
    energy_end: Annotated[float, Range(0, 1, above=True)] = 0.98
    detach: bool = False
    reduction: Reduction = "element"
    compress_download: bool = True

    def energy(self, round: int, rounds: int) -> float:
        """Energy threshold e(r): share of a matrix's sum of squares to exceed in a round, counted from 0."""
        share = min((round + 1) / rounds, 1.0)
        low, high = sorted((float(self.energy_start), float(self.energy_end)))
        return min(max((1 - share) * self.energy_start + share * self.energy_end, low), high)

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Addition of the mentor, a copy of the model that shares its frozen parameters."""
        frozen = frozen_names(model)
        state = model.state_dict(keep_vars=True)
        mentor = copy.deepcopy(model, {id(t): t for name, t in state.items() if name in frozen})

        def hide(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
            # One tensor, one name: the backbone's.
            for name in frozen:
                state.pop(prefix + name, None)

        mentor.register_state_dict_post_hook(hide)  # pyright: ignore[reportUnknownMemberType]
        model.add_module(MENTOR, mentor)

    def unsupported_reason(self, protection: Protection) -> str:
        """Noise and masks: what is sent is compressed."""
        if protection == "robust":
            return super().unsupported_reason(protection)
        return "its clients send the factors of a compressed change, which can be neither clipped nor summed"

    def reports(self, action: str) -> Report:
        """Reported scalars: the loss, and the share of energy that a client's compressed change keeps, e(r)."""
        return {**super().reports(action), "energy": Number(*sorted((self.energy_start, self.energy_end)))}

    def rules(self, client: ClientInfo) -> Rules:
        """The mentor is private, the mentee shared."""
        return {f"{MENTOR}.*": Scope.PRIVATE, "*": Scope.SHARED}

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round with compressed changes: download, averaging of the clients' changes, and compression."""
        replies = yield [Call(client, "fit", self._download(server, client)) for client in cohort]
        heard: dict[str, float] = {}
        after = self.aggregate(server, self._read(server, replies, heard))
        if not self.compress_download:
            return after
        # The server does not know the length of the run; its clients do, and e(r) is the same for all of them.
        energy = max(heard.values(), default=self.energy_end)
        change = compress(_change(after.params, server.params), energy, UPDATE)
        # What clients will hold is what the server holds: the compressed change is the change.
        params = _moved(server.params, restore(change, server.params, UPDATE))
        holders = {name: torch.tensor(server.round) for name in heard}
        return replace(after, params=params, slots={**after.slots, LAST: change, HOLDERS: holders})

    weight = uniform_weight

    def _download(self, server: ServerState, client: ClientInfo) -> Message:
        """Last round's change for a client whose reply to it was used, the whole model for others."""
        full = self.broadcast(server, client).tensors
        if self.compress_download and client.id in server.slots.get(HOLDERS, {}):
            change = {n: t for n, t in server.slots[LAST].items() if n.removeprefix(UPDATE).partition("/")[0] in full}
            return Message(change, {"round": server.round, "base": server.round - 1})
        return Message(full, {"round": server.round})

    def _read(self, server: ServerState, replies: Iterable[Reply], heard: dict[str, float]) -> Iterator[Reply]:
        """Replies with the clients' models in place of compressed changes; unreadable ones become errors."""
        for reply in replies:
            if reply.error is not None:
                yield reply
                continue
            try:
                full = self.broadcast(server, reply.client).tensors  # it may take part in some of the tensors only
                moved = _moved(full, restore(reply.message.tensors, full, UPDATE))
                heard[reply.client.id] = self._checked(reply.message.scalars.get("energy"))
            except ValueError as error:
                warnings.warn(f"FedKD leaves out a reply of {reply.client.id!r}: {error}", stacklevel=2)
                yield replace(reply, message=Message(), error=f"ValueError: update refused: {error}")
            else:
                yield replace(reply, message=Message(moved, reply.message.scalars))

    def _checked(self, energy: object) -> float:
        """The share e(r) that a client reports."""
        low, high = sorted((self.energy_start, self.energy_end))
        if not isinstance(energy, float) or not low <= energy <= high:
            raise ValueError(f"energy must be a number from {low} to {high}, got {energy!r}")
        return energy

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Local training of mentor and mentee; the mentor stays as personal model, the mentee's change is sent."""
        received = self._receive(client, message)
        client.load(received)
        loss = train(client, self.objective(client))
        client.remember()
        if client.keep_personal:
            private = client.state.tensors["private"]
            client.state.tensors["personal"] = {name: private[f"{MENTOR}.{name}"] for name in received}
        energy = self.energy(client.round, client.rounds)
        update = compress(_change(client.values(Scope.SHARED), received), energy, UPDATE)
        return Message(update, {"loss": loss, "energy": energy})

    def _receive(self, client: Client, message: Message) -> Params:
        """The global model out of a download."""
        received = message.tensors
        if "base" in message.scalars:
            if client.state.scalars.get(HELD) != message.scalars["base"]:
                raise ValueError(
                    f"client {client.info.id!r}: the change since round {message.scalars['base']} came, but the model "
                    f"held is of round {client.state.scalars.get(HELD, 'none')}"
                )
            held = client.state.tensors[HELD]
            received = _moved(held, restore(received, held, UPDATE))
        if self.compress_download:
            client.state.tensors[HELD] = dict(received)
            client.state.scalars[HELD] = message.scalars["round"]
        return received

    def objective(self, client: Client) -> Objective:
        """Sum of both distillation losses, L_t + L_s."""
        mentor = client.model.get_submodule(MENTOR)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            taught, teaching = model(batch), mentor(batch)
            tasks = client.task.loss(teaching, batch), client.task.loss(taught, batch)
            loss_t, loss_s = mutual_losses(teaching, taught, *tasks, self.detach, self.reduction)
            yield loss_t + loss_s

        return losses


def mutual_losses(
    mentor: Output,
    mentee: Output,
    mentor_task: Tensor,
    mentee_task: Tensor,
    detach: bool = False,
    reduction: Reduction = "element",
) -> tuple[Tensor, Tensor]:
    """Adaptive mutual distillation: L_t and L_s of the module's docstring, in at least single precision.

    Args:
        mentor: the mentor's output, logits (B, C), of written answers (R, T, V), and features (B, D).
        mentee: the mentee's, of the same shapes.
        mentor_task: CE_t, a scalar.
        mentee_task: CE_s, a scalar.
        detach: see :class:`FedKD`.
        reduction: see :class:`FedKD`.
    """
    precision = torch.promote_types(mentor.logits.dtype, torch.float32)
    p_t, p_s = (functional.log_softmax(output.logits.to(precision), dim=-1) for output in (mentor, mentee))
    h_t, h_s = (output.features.to(precision) for output in (mentor, mentee))
    divisor = (mentor_task + mentee_task).clamp_min(_SMALLEST)
    count = p_t.numel() if reduction == "element" else len(p_t)

    def distil(scores: Tensor, own_features: Tensor, other: Tensor, other_features: Tensor) -> Tensor:
        by = divisor
        if detach:
            other, other_features, by = other.detach(), other_features.detach(), by.detach()
        divergence = functional.kl_div(scores, other, reduction="sum", log_target=True) / count
        return (divergence + functional.mse_loss(own_features, other_features)) / by

    return mentor_task + distil(p_t, h_t, p_s, h_s), mentee_task + distil(p_s, h_s, p_t, h_t)


def _change(after: Params, before: Params) -> dict[str, Tensor]:
    return {name: value - before[name] for name, value in after.items()}


def _moved(start: Params, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + change[name] for name, value in start.items()}
