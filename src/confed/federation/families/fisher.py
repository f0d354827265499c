"""Means weighted by diagonal Fisher information, value by value, in place of one weight per client.

Zhang, Gao, Chen, Li, Ma and Tresp, "FedNano: Toward lightweight federated tuning for pretrained multimodal large
language models", 2025 (arXiv 2506.14824), read from its abstract and its public reviews, which say that the server
merges the clients' adapters by their diagonal Fisher information; no code is published. The formulas are those of
Fisher merging, which it names: Matena and Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022.
Notation: theta_k the values of client k after its training, F_k the diagonal of its Fisher information there, w_k its
weight (1, or its number of training examples), products and quotients value by value:

    theta = (sum_k w_k F_k theta_k) / (sum_k w_k F_k)

    F_k = 1 / S  sum_s (d L(theta_k; x_s, y_s) / d theta)^2

over S training examples of the client, drawn anew in every round, with its task's loss in evaluation mode. That is the
empirical information: the gradients are those of the right answers, where the exact one takes answers that the model
draws.

What is ours: S, and that a value of F counts as at least 1e-12, so that values that nobody's loss depends on are plain
means. FedNano splits the network, so that the language model stays at the server; here clients hold all of it. Running
statistics and counters have no gradient and are plain means. F_k travels beside theta_k, so that a client sends twice
as much. A site that reports a large F decides the mean: the server cannot check it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from confed.federation.actions import Action
from confed.federation.algorithm import Algorithm, Protection, keeps_protections
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, matches_any
from confed.federation.ranges import AT_LEAST_ONE
from confed.federation.specs import Contrasting
from confed.federation.state import ServerState
from confed.federation.update_privacy import STATISTICS

FISHER = "fisher/"  # what precedes a tensor's name in a reply, for its Fisher information
FLOOR = 1e-12  # what a value of the Fisher information counts as, at least
CEILING = 1e290  # what it counts as, at most: of double precision, so that weighted sums over clients stay finite


@dataclass(frozen=True)
class FisherWeighted(Algorithm):
    """Base of the methods that finetune a part of a model, whose server may weigh values by Fisher information.

    Attributes:
        aggregation: the "mean" of the clients' values, or the mean weighted by their "fisher" information.
        fisher_examples: training examples S from which a client estimates it.
    """

    aggregation: Literal["mean", "fisher"] = field(default="mean", kw_only=True)
    fisher_examples: Annotated[int, AT_LEAST_ONE] = field(default=32, kw_only=True)

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of means that Fisher information weighs."""
        reasons = {
            "update_privacy": "sends squared gradients beside the update, and clipping bounds the update only",
            "robust": "gives every value the weight that its client reports, and a robust mean has no such weights",
            "record_privacy": "sends squared gradients of the client's examples, to which no noise is added",
            "secure_sum": "divides by a sum of weights that differ from value to value, so the server must see them",
        }
        if self.aggregation == "fisher":
            return f"algorithm.aggregation = 'fisher' {reasons[protection]}"
        return super().unsupported_reason(protection)

    @property
    def steps_alone(self) -> bool:
        """Not where squared gradients are taken after training."""
        return self.aggregation != "fisher" and super().steps_alone

    @property
    def updates_compressible(self) -> bool:
        """Not where squared gradients are sent beside the update."""
        return self.aggregation != "fisher" and super().updates_compressible

    @keeps_protections("robust", "secure_sum", "update_privacy", "record_privacy")
    def actions(self) -> dict[str, Action]:
        """The method's actions; the reply to ``fit`` has the information too, where the mean needs it."""
        offered = super().actions()
        if self.aggregation != "fisher":
            return offered

        def fit(client: Client, message: Message) -> Message:
            reply = offered["fit"](client, message)
            with self.sharing(client.model):
                names = informed(reply.tensors, self.traits.aggregates)
                information = diagonal_information(client, names, self.fisher_examples)
            shapes = {FISHER + name: tuple(map(slice, reply.tensors[name].shape)) for name in names}
            fisher_tensors = {
                name: information[name][shape].contiguous() for name, shape in shapes.items()
            }  # who sends a part tells of it
            return Message({**reply.tensors, **fisher_tensors}, reply.scalars)

        return {**offered, "fit": fit}

    def sharing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which the model answers with its shared values; as it is, by default."""
        return nullcontext()

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """One server's part of a round: ask every client of the cohort to ``fit``, then average."""
        if self.aggregation != "fisher":
            return (yield from super().round(server, cohort))
        messages = [self.broadcast(server, client) for client in cohort]
        expected = [{**m.tensors, **self.information_of(m.tensors)} for m in messages]
        replies = yield [Call(c, "fit", m, e) for c, m, e in zip(cohort, messages, expected, strict=True)]
        return self.aggregate(server, replies)

    def information_of(self, tensors: Params) -> dict[str, Tensor]:
        """What a reply with these tensors has of Fisher information: names, shapes and types."""
        return {FISHER + name: tensors[name] for name in informed(tensors, self.traits.aggregates)}

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The mean of the replies, weighted value by value where ``aggregation`` says so."""
        if self.aggregation != "fisher":
            return super().average(server, replies)
        mean = FisherMean(self.accumulator_dtype)

        def rest() -> Iterator[Reply]:
            for reply in replies:
                if reply.error is not None:
                    continue
                tensors = dict(reply.message.tensors)
                information = {n.removeprefix(FISHER): tensors.pop(n) for n in list(tensors) if n.startswith(FISHER)}
                mean.add({name: tensors.pop(name) for name in information}, information, self.weight(reply))
                yield replace(reply, message=Message(tensors, reply.message.scalars))

        return super().average(server, rest()) | mean.result(server.params)


class FisherMean:
    """Mean with a weight per value, streaming: equal inputs return exactly that input.

    Weights add up in double precision, so that those near single precision's largest number do not overflow.

    Args:
        dtype: precision of the accumulated values.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._means: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def add(self, params: Params, information: Params, weight: float) -> None:
        """Adds one update.

        Args:
            params: theta_k.
            information: F_k, of the same names and shapes.
            weight: w_k, positive.
        """
        for name, value in params.items():
            precision = weight * information[name].double().clamp(FLOOR, CEILING)
            if name not in self._means:
                self._means[name], self._totals[name] = value.detach().to(self._dtype, copy=True), precision
                continue
            self._totals[name] = self._totals[name] + precision
            share = (precision / self._totals[name]).to(self._dtype)
            self._means[name] = torch.lerp(self._means[name], value.to(self._dtype), share)

    def result(self, like: Params) -> dict[str, Tensor]:
        """The means of what was added, in the dtypes of ``like``."""
        return {name: mean.to(like[name].dtype) for name, mean in self._means.items()}


def informed(tensors: Params, left_out: Sequence[str] = ()) -> list[str]:
    """Names of tensors that have Fisher information: floating point, and no running statistics.

    Args:
        tensors: what a client sends.
        left_out: globs of tensors that only the server computes.
    """
    floating = [n for n, t in tensors.items() if t.is_floating_point() and not n.endswith(STATISTICS)]
    return [name for name in floating if not matches_any(name, left_out)]


def diagonal_information(client: Client, names: Sequence[str], examples: int) -> dict[str, Tensor]:
    """F_k at the values that the client's workspace holds, under the names of its reply.

    A task that compares the examples of a batch has no gradient of one example: its batches are those of training.

    Args:
        client: the client, after its training.
        names: of tensors; those without a gradient have no information.
        examples: S, at most.
    """
    model, device = client.model.eval(), next(client.model.parameters()).device
    learned = {name: client.tensors[name] for name in names if client.tensors[name].requires_grad}
    squares = {FISHER + name: torch.zeros_like(client.tensors[name]) for name in names}
    half = client.local.precision != "fp32"
    size = client.local.batch_size if isinstance(client.task, Contrasting) else 1
    batches = client.data.train(size, client.rng("Fisher information"))
    for count, batch in zip(range(-(-examples // size)), batches, strict=False):
        moved: Mapping[str, Tensor] = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            loss = client.task.loss(model(moved), moved)
        gradients: Any = torch.autograd.grad(loss, list(learned.values()), allow_unused=True) if learned else ()
        for name, gradient in zip(learned, gradients, strict=True):
            if gradient is not None:
                # a running mean, as a sum may overflow where the mean does not.
                largest = torch.finfo(gradient.dtype).max
                square = gradient.detach().square().clamp_max(largest)
                squares[FISHER + name] += square / (count + 1) - squares[FISHER + name] / (count + 1)
            else:
                squares[FISHER + name] *= count / (count + 1)
    return {name: mean.cpu() for name, mean in squares.items()}
