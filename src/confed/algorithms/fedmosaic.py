"""FedMosaic's RELA: for every client a mean of the others' LoRA factors, by how alike their gradients are.

Seo, Kim, Lee, Choi and Tuytelaars, "Co-LoRA: Collaborative model personalization on heterogeneous multi-modal clients",
ICLR 2026 (arXiv 2506.11024, there also "Not all clients are equal"). Read: its abstract, a published summary of the
section on the method, the README of the authors' repository (snumprlab/fedmosaic, MIT), and in public copies of their
code how the mean is taken and how gradients are compared; not the paper's equations. Here is RELA, the relevance-guided
aggregation, for clients that have the same model. Co-LoRA, the module for different ones, is not.

Notation: L_i = (A_i, B_i) the factors that client i trains in every layer, G_i = (A_G, B_G) those that it receives and
leaves as they are, b a number per layer that it learns and keeps, s the scale of LoRA, sigma the logistic function:

    W x + (1 - sigma(b)) s B_i A_i x + sigma(b) s B_G A_G x

    g_i = 1/2 (g_i of the round before + the mean gradient of this round's batches)

    G_i = sum over j != i of w_ij L_j,   w_i = softmax over j != i of cos(g~_i, g~_j) / tau

g~ is g sanitised at the client: a random choice of its values, the same for all clients, with Gaussian noise. A client
goes on from its own L_i; G_i begins as LoRA does, with a product of 0, and b with 0, one half each.

Paper, code and this file:

- The paper takes the gradients of the last layer of a small pretrained model that all clients freeze; the copies of the
  code, of the model's last down-projection. Here the model as the run began, which all clients have and none changes,
  is that model, and the gradient is that of B in one layer (``layer``, the last one with LoRA). B is 0 there, so it is
  the gradient of that layer's weight times the A that all have in common.
- tau = 0.5 and the half in g are the code's. The sizes of noise and choice were not to be found: here noise has 0.1
  times the root mean square of g's values, which is no differential privacy, as g has no bound.
- The code takes the cosine column by column and averages, the summary one cosine, as here.
- Only clients that have answered in some round are in the sums; the code takes those of the present round. Who has not
  answered yet gets their plain mean. Heads, which language models do not have, are the client's own.

The server keeps every client's factors and gradient: memory grows with the clients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.algorithm import Algorithm, Protection, action, uniform_weight
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.lora import factor_names, lora_layers
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Rules, Scope, copy_into, named_tensors
from confed.federation.protocols import Task
from confed.federation.randomness import generator, normal
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE
from confed.federation.specs import frozen_names
from confed.federation.state import ServerState
from confed.federation.structure import head_rules, private_head
from confed.federation.train import train
from confed.federation.traits import Traits

RECEIVED = ("received_A", "received_B")  # names, beside a layer's own factors, of those that a client receives
GATE, GRADIENT, OWN = "received_gate", "sanitised_gradient", "factors of "
"""The number b of a layer; g~ in a reply and the slot of all of them; the slots of the clients' factors."""


@dataclass(frozen=True)
class FedMosaic(Algorithm):
    """Personal LoRA beside a mean of the other clients' LoRA that is weighted for each client by relevance.

    A round costs a client what LoRA costs, one more pass through the received factors, and ``gradient_batches`` passes.

    Attributes:
        temperature: tau; the smaller, the more the most alike clients count.
        memory: share of the gradient of earlier rounds in g.
        noise: standard deviation of the noise, relative to the root mean square of g's values.
        repeatable: noise is a function of the run's seed, so that a run can be repeated, and who knows the seed can
            subtract it. False: the operating system draws it.
        dimensions: values of g that are sent, at most.
        gradient_batches: training batches that a round's gradient is taken of.
        layer: name of the layer with LoRA whose gradient is compared; the last one by default.
        head: names of the submodules that are private; the model's heads by default.
    """

    temperature: Annotated[float, POSITIVE] = 0.5
    memory: Annotated[float, SHARE] = 0.5
    noise: Annotated[float, NOT_NEGATIVE] = 0.1
    repeatable: bool = True
    dimensions: Annotated[int, AT_LEAST_ONE] = 1024
    gradient_batches: Annotated[int, AT_LEAST_ONE] = 4
    layer: str = ""
    head: tuple[str, ...] = ()

    traits = Traits(
        label="FedMosaic (RELA)",
        group="finetuning",
        has_global=False,
        has_personal=True,
        clients_may_leave=False,
        updates_compressible=False,
        aggregates=tuple(f"*.{name}" for name in RECEIVED),
        made_for="lora",
        neutral="the head and the mixture of factors are never shared",
        search={"temperature": (0.1, 0.5, 2.0)},
    )

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the heads, and of the layer whose gradient is compared."""
        layers = list(lora_layers([n for n in named_tensors(model) if n not in frozen_names(model)]))
        if not layers:
            raise ValueError(
                f"FedMosaic works on the factors of LoRA, and {type(model).__name__} trains none: set model.trainable "
                "to 'lora'"
            )
        if self.layer and self.layer not in layers:
            raise ValueError(f"algorithm.layer must be a layer with LoRA, such as {layers[-1]!r}, got {self.layer!r}")
        head = private_head(model, self.head, "FedMosaic", optional=True)
        return replace(self, layer=self.layer or layers[-1], head=head)

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Room for the received factors in every layer with LoRA, and the number that weighs them."""
        tensors = named_tensors(model)
        for target, names in lora_layers(tensors).items():
            layer: Any = model.get_submodule(target)
            for name, module_name in zip(RECEIVED, names, strict=True):
                layer.register_parameter(name, nn.Parameter(tensors[module_name].detach().clone()))
            layer.register_parameter(GATE, nn.Parameter(tensors[names[0]].new_zeros(1)))
            layer.register_forward_hook(_blend)

    def rules(self, client: ClientInfo) -> Rules:
        """Heads and gates are private, the rest of what is trained is shared."""
        return {**head_rules(self.head, "FedMosaic"), f"*.{GATE}": Scope.PRIVATE, "*": Scope.SHARED}

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection: no mean of all updates is taken."""
        return "every client is sent a mean of its own, of single clients' factors and by single clients' gradients"

    # Server ------------------------------------------------------------------------------------------------

    weight = uniform_weight

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round of the action ``fit``: every client is sent its G_i, and sends its L_i and g~_i."""
        # a client's own factors stay where they are; they are sent for evaluations only.
        messages: list[Message] = []
        for client in cohort:
            tensors = self.broadcast(server, client).tensors
            factors = {name for name, _ in factor_names(tensors)}
            messages.append(Message({name: tensor for name, tensor in tensors.items() if name not in factors}))
        expected = {name: tensor for name, tensor in server.params.items() if not name.endswith(RECEIVED)}
        compared = server.params[lora_layers(server.params)[self.layer][1]]
        expected[GRADIENT] = torch.zeros(min(self.dimensions, compared.numel()))
        replies = yield [Call(c, "fit", m, expected) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    def broadcast(self, server: ServerState, client: ClientInfo) -> Message:
        """Parameters of a client: its own factors as the server last saw them, and its mean of the others'."""
        tensors = {**super().broadcast(server, client).tensors, **server.slots.get(OWN + client.id, {})}
        others = sorted(name.removeprefix(OWN) for name in server.slots if name.startswith(OWN))
        others = [name for name in others if name != client.id]
        if not others:
            return Message(tensors)
        gradients = server.slots[GRADIENT]
        client_gradient = gradients.get(client.id)
        weights = relevance(client_gradient, torch.stack([gradients[name] for name in others]), self.temperature)
        for target, names in lora_layers(server.params).items():
            for received, name in zip(RECEIVED, names, strict=True):
                factors = torch.stack([server.slots[OWN + other][name].double() for other in others])
                mean = torch.einsum("k,kij->ij", weights, factors)
                tensors[f"{target}.{received}"] = mean.to(tensors[name].dtype)
        return Message(tensors)

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The server with what clients sent; what is neither factor nor gradient is averaged."""
        slots = dict(server.slots)
        gradients = dict(server.slots.get(GRADIENT, {}))

        def rest() -> Iterator[Reply]:
            for reply in replies:
                if reply.error is None:
                    tensors = dict(reply.message.tensors)
                    gradients[reply.client.id] = tensors.pop(GRADIENT)
                    slots[OWN + reply.client.id] = {name: tensors[name] for name, _ in factor_names(tensors)}
                    yield replace(reply, message=Message(tensors, reply.message.scalars))

        params = self.average(server, rest())
        return replace(server, round=server.round + 1, params=params, slots={**slots, GRADIENT: gradients})

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Local training of the client's own factors beside those received; both gradient and factors are sent."""
        gradient = self._gradient(client)
        names = [name for name in client.names(Scope.SHARED) if name not in message.tensors]
        personal: Params = client.state.tensors.get("personal", client.initial)
        client.load({**message.tensors, **{name: personal[name].cpu() for name in names}})
        loss = train(client, self.objective(client))
        client.keep_personal = True  # the next round goes on from there
        client.remember()
        sent = {n: t for n, t in client.values(Scope.SHARED).items() if not n.endswith(RECEIVED)}
        return Message({**sent, GRADIENT: self._sanitised(client, gradient)}, {"loss": loss})

    def _gradient(self, client: Client) -> Tensor:
        """g_i, flat: of the model as the run began, and of the rounds before."""
        copy_into([client.tensors[n] for n in client.initial], list(client.initial.values()))
        model = client.model.eval()
        tensor = client.tensors[lora_layers(client.tensors)[self.layer][1]]
        batches = client.data.train(client.local.batch_size, client.rng("relevance"))
        gradients: list[Tensor] = []
        for _, batch in zip(range(self.gradient_batches), batches, strict=False):
            device_batch = to_device(batch, tensor.device)
            gradients += torch.autograd.grad(client.task.loss(model(device_batch), device_batch), [tensor])
        mean = torch.stack(gradients).mean(0).flatten().float().cpu()
        before: Mapping[str, Tensor] = client.state.tensors.get("relevance", {})
        if before:
            mean = self.memory * before["gradient"] + (1 - self.memory) * mean
        client.state.tensors["relevance"] = {"gradient": mean}
        return mean

    def _sanitised(self, client: Client, gradient: Tensor) -> Tensor:
        """g~_i: the values that all clients send, with noise."""
        order = torch.randperm(len(gradient), generator=generator(client.seed, 0, "", "relevance"))
        chosen = gradient[order[: self.dimensions]]
        spread = self.noise * gradient.square().mean().sqrt()
        return chosen + spread * normal(chosen.shape, client.rng("relevance noise") if self.repeatable else None)


def relevance(gradient: Tensor | None, others: Tensor, temperature: float) -> Tensor:
    """Weights of other clients for one client: the softmax of cosines over the temperature.

    Args:
        gradient: its gradient (D,); None for equal weights.
        others: gradients (K, D).
        temperature: tau.

    Returns:
        Weights (K,) that sum to 1, in double precision.
    """
    if gradient is None:
        return torch.full((len(others),), 1 / len(others), dtype=torch.float64)
    cosines = functional.cosine_similarity(gradient.double().unsqueeze(0), others.double(), dim=1)
    return torch.softmax(cosines / temperature, dim=0)


def _blend(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A layer's output with a share sigma(b) of its own factors' part exchanged for that of the received ones."""
    ((name, scale),) = layer.scaling.items()
    a, b = layer.lora_A[name], layer.lora_B[name]
    x = inputs[0].to(a.weight.dtype)
    received = functional.linear(functional.linear(x, layer.received_A.detach()), layer.received_B.detach())
    change = torch.sigmoid(layer.received_gate) * scale * (received - b(a(x)))
    return output + change.to(output.dtype)
