"""FedDPA: dual adapters, one global and one local, mixed with a weight per input.

Yang, Long, Shen, Jiang and Blumenstein, "Dual-personalizing adapter for federated foundation models", NeurIPS 2024
(arXiv 2403.19211), read from its abstract, its public summaries and its released code (Lydia-yang/FedDPA), not from the
paper's equations, which were not at hand. Notation: A_g the global adapter, which is averaged; A_l the client's own;
e(x) the pooled representation of an input. With a weight a of the local adapter, every place in the frozen backbone
returns

    y + (1 - a) A_g(y) + a A_l(y).

Training. ``schedule = "iterative"`` (FedDPA-T): in each round but the first a client trains A_l with a fixed a and A_g
frozen as received, then A_g alone from the same values, for as many epochs. ``schedule = "sequential"`` (FedDPA-F):
A_g is trained by plain federated averaging; after the last round each client starts its A_l from the final A_g and
trains it alone.

Inference (``get_weight`` of the released code): with S training examples x_s of the client and A_l alone switched on,

    a(x) = scale * mean over s of cos(e(x), e(x_s)),

the more local the more an input is like the client's own. What differs from the code: it draws new x_s for every input,
here a client keeps the representations of S drawn ones from its last training; its e is the last token's of a
language model; a negative mean counts as 0; a client without a trained A_l answers with A_g. Heads, which language
models do not have, are the client's own and learn in both trainings.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.algorithm import action, keeps_protections, weight_by_setting
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import Branches, chosen_adapter, fresh_adapter, held, one_shared, tensors_of
from confed.federation.families.fisher import FisherWeighted
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Rules, Scope, copy_into
from confed.federation.protocols import Batch, Output, Task
from confed.federation.ranges import AT_LEAST_ONE, SHARE
from confed.federation.specs import model_spec
from confed.federation.state import ServerState
from confed.federation.structure import NO_HEAD, adapters_of, private_head
from confed.federation.train import Objective, train
from confed.federation.traits import GlobalModel, Traits

LOCAL, EXAMPLES = "local", "feddpa_examples"
"""The client's own adapter A_l, and the module that holds the representations of its S examples."""


@dataclass(frozen=True)
class FedDPA(FisherWeighted):
    """FedAvg of one adapter, with a second, local adapter at every client.

    A round costs a client twice what plain averaging of adapters costs (iterative), or the same and one more training
    at the end (sequential).

    Attributes:
        schedule: "iterative" (FedDPA-T) or "sequential" (FedDPA-F).
        mix: a while A_l is trained (iterative).
        scale: the largest a at inference.
        examples: S, how many of its training examples a client compares inputs with.
        weighting: clients count as their training "examples" (the authors' FedAvg), or all the same ("uniform", as in
            FedDAT's comparison).
        adapter: name of the model's adapter that is averaged; its first one by default.
        head: names of the submodules that are private; the model's heads by default.
    """

    schedule: Literal["iterative", "sequential"] = "iterative"
    mix: Annotated[float, SHARE] = 0.5
    scale: Annotated[float, SHARE] = 0.5
    examples: Annotated[int, AT_LEAST_ONE] = 5
    weighting: Literal["uniform", "examples"] = "examples"
    adapter: str = ""
    head: tuple[str, ...] = ()

    traits = Traits(
        group="finetuning",
        aggregates=(f"{EXAMPLES}.*",),
        made_for="adapters",
        neutral="the head is never shared",
        search={"mix": (0.3, 0.5, 0.7), "scale": (0.3, 0.5, 1.0)},
    )

    # Before anything runs ----------------------------------------------------------------------------------

    @property
    def global_model(self) -> GlobalModel:
        """A_g, with each client's own head where the model has one."""
        return "alone" if self.head == NO_HEAD else "with own parts"

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the averaged adapter and the heads; a ``ValueError`` where the model does not tell them."""
        adapter = chosen_adapter(model, self.adapter, "FedDPA")
        return replace(self, adapter=adapter, head=private_head(model, self.head, "FedDPA", optional=True))

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The client's own adapter, ``local``, and room for the representations of its examples (zeros)."""
        adapters_of(model, "FedDPA").add(LOCAL, rng)
        # Heads that read several passes at once are wider than the others; the rest of a row stays zero.
        parts = private_head(model, self.head, "FedDPA", optional=True)
        # What writes its answers has no head; its features are as wide as what its adapters read.
        read = [".down.weight"] if parts == NO_HEAD else [f"{module_name}." for module_name in parts]
        matrices = ((f".{name}", p) for name, p in model.named_parameters() if p.ndim == 2)
        widths: list[int] = []
        for name, parameter in matrices:
            if any(place in name for place in read):
                widths.append(parameter.shape[1])
        width = max(widths)
        model.add_module(EXAMPLES, _Examples(self.examples, width))

    def rules(self, client: ClientInfo) -> Rules:
        """One adapter is shared, the rest that learns is private; a ``ValueError`` before :meth:`configure`."""
        return one_shared(self.adapter, (tensors_of(LOCAL), f"{EXAMPLES}.*"), self.head, "FedDPA")

    def sharing(self, model: nn.Module) -> AbstractContextManager[None]:
        """A_g alone."""
        return adapters_of(model, "FedDPA").using({self.adapter: 1.0})

    # Server ------------------------------------------------------------------------------------------------

    weight = weight_by_setting

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def finish(self, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        """The action ``localise`` at every client after the last round, in the sequential schedule."""
        if self.schedule == "sequential":
            for _ in (yield [Call(c, "localise", self.broadcast(server, c)) for c in clients]):
                pass
        return server

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Local training: the local adapter (iterative schedule, from the second round on), then the global one."""
        if "private" not in client.state.tensors:
            client.state.tensors["private"] = fresh_adapter(client, LOCAL)
        client.load(message.tensors)
        both = self.schedule == "iterative" and client.round > 0
        if both:
            with held(client, Scope.SHARED):
                blend = {self.adapter: 1 - self.mix, LOCAL: self.mix}
                train(client, self._with(client, blend), order="local")
        loss = train(client, self._with(client, {self.adapter: 1.0}))
        if both:
            self._remember_examples(client)
        client.remember()
        return client.upload(loss=loss)

    @action
    def localise(self, client: Client, message: Message) -> Message:
        """Training of the local adapter alone, from the global one's values; only the loss is sent."""
        client.load(message.tensors)
        start = {n.replace(f".{self.adapter}.", f".{LOCAL}."): value for n, value in client.incoming.items()}
        copy_into([client.tensors[n] for n in start], list(start.values()))
        with held(client, Scope.SHARED):
            loss = train(client, self._with(client, {LOCAL: 1.0}))
        self._remember_examples(client)
        client.remember()
        return Message({}, {"loss": loss})

    def _with(self, client: Client, blend: Mapping[str, float]) -> Objective:
        branches = Branches(client.model, "FedDPA")

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(branches.run(branches.begin(batch), blend), batch)

        return losses

    def _remember_examples(self, client: Client) -> None:
        """Storage of the representations of S random training examples (zeros if the client has fewer)."""
        memory = client.tensors[f"{EXAMPLES}.features"]
        batch = to_device(next(iter(client.data.train(self.examples, client.rng("examples")))), memory.device)
        client.model.eval()
        branches = Branches(client.model, "FedDPA")
        with torch.no_grad():
            features = branches.run(branches.begin(batch), {LOCAL: 1.0}).features
            memory.zero_()
            memory[: len(features), : features.shape[1]] = features

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model as a network that weighs its two adapters for each input: what a trained model answers with."""
        return _Weighing(model, self.adapter, self.scale)


class _Examples(nn.Module):
    """Stored representations of a client's examples."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        # A parameter without a gradient: private like a weight, so that it is stored and examined with the model.
        self.features = nn.Parameter(torch.zeros(count, width))

    def forward(self) -> Tensor:
        """The representations there are, shape (at most S, width)."""
        return self.features[self.features.any(dim=1)]


class _Weighing(nn.Module):
    """The model as a function that weighs its two adapters for each input."""

    def __init__(self, model: nn.Module, adapter: str, scale: float) -> None:
        super().__init__()
        self.model, self._adapter, self._scale = model, adapter, scale

    def forward(self, batch: Batch) -> Output:
        branches, examples = Branches(self.model, "FedDPA"), self.model.get_submodule(EXAMPLES)()
        state = branches.begin(batch)
        if not len(examples):
            return branches.run(state, {self._adapter: 1.0})
        features = branches.run(state, {LOCAL: 1.0}).features.to(examples.dtype)
        compared = examples[None, :, : features.shape[1]]
        likeness = functional.cosine_similarity(features[:, None], compared, dim=2).mean(1)
        weights = [float(a) for a in self._scale * likeness.clamp_min(0).cpu()]
        blends = [{self._adapter: 1 - a, LOCAL: a} for a in weights]
        if model_spec(self.model).writes == "answers":
            # Such a model splits a batch as it sees fit while it compares answers.
            rows: list[Any] = []
            for i in range(len(blends)):
                rows.append(branches.begin({name: t[i : i + 1] for name, t in batch.items()}))
            outputs = [branches.run(row, blend) for row, blend in zip(rows, blends, strict=True)]
            return Output(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))
        # One chunk per example: each has weights of its own.
        with branches.bank.using(*blends):
            return branches.rest(state)
