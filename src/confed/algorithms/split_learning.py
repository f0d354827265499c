"""Supervised split learning for visual question answering: the baseline of BiCSL (its figure 2a).

Vepakomma, Gupta, Swedish and Raskar, "Split learning for health", 2018, the U-shaped configuration without label
sharing; several clients side by side and averaged as in Thapa et al., "SplitFed", AAAI 2022. Sun and Ochiai, AAAI
2024, section "Decentralized VQA": a network in three parts, f_c1 and f_c2 at the client, f_g at a server. For a batch:

    client:  h = f_c1(picture, question) (B, D)                      goes up
    server:  z = f_g(h) (B, D)                                       comes down
    client:  L = task loss of f_c2(z) and the labels; steps f_c2;    dL/dz goes up
    server:  steps f_g;                                              dL/dh comes down
    client:  steps f_c1

One batch takes two calls, and each party waits for the other: this is the one-directional way that BiCSL is compared
with. f_c1 is any model up to its answer head, f_c2 the answer head; f_g, which the paper leaves open, is two layers
with a ReLU between them, D -> ``hidden`` -> D. Two servers as in BiCSL: *main* holds f_g, a copy per client within a
round, and averages the copies; *aux* averages the clients' parts (every client counts 1/K).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self, cast

import torch
from torch import Tensor, nn

from confed.federation.algorithm import action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.split import MISFITS, Cut, Half, ServerPart, TwoServers, left_out, steps_of
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Mean, Rules, Scope
from confed.federation.protocols import Batch, Output, Task
from confed.federation.randomness import derive, isolated
from confed.federation.ranges import AT_LEAST_ONE
from confed.federation.specs import Contrasting, model_spec
from confed.federation.state import ServerState
from confed.federation.structure import feature_width, fresh_linear, heads_of
from confed.federation.traits import Traits
from confed.privacy.cut import CutPrivacy, refuse_mixing


class _Head(nn.Module):
    """The answer head with the server's layers in front of it; on a client they are left out while it trains."""

    def __init__(self, middle: nn.Module, top: nn.Module) -> None:
        super().__init__()
        self.middle, self.top = middle, top
        self.open = False

    def forward(self, features: Tensor) -> Tensor:
        # With the cut open, what the head would have read takes the place of the answers, and goes up.
        return features if self.open else self.top(self.middle(features))


@dataclass(frozen=True)
class SplitLearning(TwoServers):
    """Split learning with the labels and the last layer at the clients.

    Attributes:
        hidden: width of the layer between the server's two.
        privacy: clipping and noise on what goes up: activations, and the gradients of z.
        head: the answer head of the model; found by ``configure``.
    """

    hidden: Annotated[int, AT_LEAST_ONE] = 512
    privacy: CutPrivacy = field(default_factory=CutPrivacy)
    head: str = field(default="", init=False)
    modules: nn.Module | None = field(default=None, init=False, repr=False, compare=False)

    traits = Traits(
        label="Split learning",
        group="split",
        has_personal=False,
        in_sessions=True,
        splits=True,
        rows_up=2,
        gradients_up=True,
        neutral="no client ever holds the whole network",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy.distinct:
            raise ValueError("algorithm.privacy.distinct must be false: here no server sees anything of the answers")

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the answer head and the server's layers."""
        heads = heads_of(model)
        if set(heads) != {"answers"}:
            raise ValueError(
                f"split learning needs a model with one answer head, {type(model).__name__} has "
                f"{'those of ' + ', '.join(heads) if heads else 'none'}"
            )
        if isinstance(task, Contrasting) or model_spec(model).writes == "answers":
            raise ValueError("split learning needs a task whose loss is over answers: task.name = 'vqa'")
        if not self.server.plain:
            raise ValueError("the servers of split learning take the mean, so algorithm.server must be left as it is")
        refuse_mixing(self.privacy, model)
        width = feature_width(model, "Split learning")
        return self.told(
            head=heads["answers"], modules=nn.ModuleDict({"middle": _layers(width, self.hidden, torch.Generator())})
        )

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Insertion of the server's layers between the features and the answer head."""
        width = feature_width(model, "Split learning")
        top = model.get_submodule(self.head)
        model.set_submodule(self.head, _Head(_layers(width, self.hidden, rng), top))

    def rules(self, client: ClientInfo) -> Rules:
        """The layers in the middle are the main server's; the rest is the clients', averaged by the other server."""
        return {f"{self.head}.middle.*": Scope.SERVER, "*": Scope.SHARED}

    # Servers -----------------------------------------------------------------------------------------------

    def split(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which clients train batch by batch with ``main``, which then averages its layers."""
        parts = {c.id: self._part(server, c) for c in cohort}
        messages: dict[str, Message] = {c.id: Message() for c in cohort}
        active, finished = list(cohort), set[str]()
        last = ""
        while active:
            outputs: dict[str, tuple[Tensor, Tensor]] = {}
            replies = yield [Call(c, "step", messages[c.id], session=True) for c in active]
            going: list[ClientInfo] = []
            for reply in replies:
                if reply.error is None and reply.message.scalars.get("done"):
                    finished.add(reply.client.id)
                    continue
                out = self._through(parts[reply.client.id], reply)
                if isinstance(out, str):
                    last = f"; {reply.client.id}: {out}"
                else:
                    outputs[reply.client.id] = out
                    going.append(reply.client)
            active = list[ClientInfo]()
            if not going:
                break
            down = {name: Message({"z": z.detach()}) for name, (_, z) in outputs.items()}
            replies = yield [Call(c, "top", down[c.id], session=True) for c in going]
            for reply in replies:
                h, z = outputs[reply.client.id]
                problem = self._back(parts[reply.client.id], z, reply)
                if problem is not None:
                    last = f"; {reply.client.id}: {problem}"
                    continue
                messages[reply.client.id] = Message({"h": torch.zeros_like(h) if h.grad is None else h.grad})
                active.append(reply.client)
        sound = [c.id for c in cohort if c.id in finished and parts[c.id].finite()]
        if not sound:
            diverged = "; the layers of the others diverged, they hold a NaN or an infinity" if finished else ""
            raise RuntimeError(f"no client is left in round {server.round + 1}{last}{diverged}")
        mean = Mean(self.accumulator_dtype)
        for name in sound:
            mean.add({f"{self.head}.{n}": t for n, t in parts[name].values().items()}, 1.0)
        return replace(server, round=server.round + 1, params=mean.result(server.params))

    def _through(self, layers: ServerPart, reply: Reply) -> tuple[Tensor, Tensor] | str:
        """A client's activations, and what the layers in the middle make of them; or why there is nothing."""
        if reply.error is not None:
            return reply.error
        try:
            h = reply.message.tensors["h"].float().requires_grad_()
            return h, layers.modules["middle"](h)
        except MISFITS as error:
            return str(left_out(reply.client.id, error))

    def _back(self, layers: ServerPart, z: Tensor, reply: Reply) -> str | None:
        """A step along a client's gradients of z; why there is none, if so."""
        if reply.error is not None:
            return reply.error
        try:
            gradient = reply.message.tensors["z"].to(z)
            layers.step(lambda: torch.autograd.backward([z], [gradient]))
        except MISFITS as error:
            return str(left_out(reply.client.id, error))
        return None

    def _part(self, server: ServerState, client: ClientInfo) -> ServerPart:
        """A client's copy of the layers in the middle."""
        if self.modules is None or server.local is None:
            raise ValueError("SplitLearning does not know the model; call configure(model, task) before the run")
        params = {name.removeprefix(f"{self.head}."): tensor for name, tensor in server.params.items()}
        steps = steps_of(client.num_examples, server.local)
        return ServerPart(self.modules, params, server.local, server.round, max(server.rounds, 1), steps)

    # Client ------------------------------------------------------------------------------------------------

    @action
    def receive(self, client: Client, message: Message) -> Message:
        """Client action: reception of the averaged part before the first batch."""
        client.load(message.tensors)
        Half(client, self._bottom).keep(client)
        return Message()

    @action
    def step(self, client: Client, message: Message) -> Message:
        """Client action: update with the last batch's gradients; the reply has h of the next one, or ``done``."""
        half = Half.of(client, self._bottom)
        if message.tensors:
            half.learn(message.tensors, client)
        sent = half.advance(client)
        half.keep(client)
        return Message(sent, {"done": half.done})

    @action
    def top(self, client: Client, message: Message) -> Message:
        """Client action: the client's last layer on the server's z; the reply has dL/dz."""
        half = Half.of(client, self._bottom)
        step, batch = half.current
        z = message.tensors["z"].to(half.device).requires_grad_()
        with isolated(derive(client.seed, client.round, client.info.id, f"top/{step}")):
            loss = client.task.loss(Output(self._cut(client.model).top(z), z), batch)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        half.note(float(loss.detach()))
        gradient = torch.zeros_like(z) if z.grad is None else z.grad
        sent = self.privacy.gradients(gradient, client.fixed_noise(f"cut/z/{step}"))
        half.keep(client)
        return Message({"z": sent.cpu()})

    @action
    def send(self, client: Client, message: Message) -> Message:
        """Client action: upload of the trained part to the auxiliary server."""
        loss = Half.of(client, self._bottom).close(client)
        return client.upload(loss=loss)

    def _cut(self, model: nn.Module) -> _Head:
        return cast(_Head, model.get_submodule(self.head))

    def _bottom(self, client: Client, model: nn.Module, batch: Batch, step: int) -> Cut:
        """Activations h of a batch, as they are sent."""
        head = self._cut(model)
        head.open = True
        try:
            output: Output = model(batch)
        finally:
            head.open = False
        rng = client.fixed_noise(f"cut/h/{step}")
        return Cut({"h": self.privacy.activations(output.logits.float(), rng)})


def _layers(width: int, hidden: int, rng: torch.Generator) -> nn.Sequential:
    return nn.Sequential(fresh_linear(width, hidden, rng), nn.ReLU(), fresh_linear(hidden, width, rng))
