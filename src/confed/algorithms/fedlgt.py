"""FedLGT: federated multi-label training with client-aware masked label embeddings.

Liu, Lin, Yang and Wang, "Language-guided Transformer for federated multi-label classification", AAAI 2024. Its model,
C-Tran (Lanchantin et al., CVPR 2021) with fixed text embeddings as label tokens (ULE), is :mod:`confed.models.ctran`;
this file is the other half, client-aware masked label embedding (CA-MLE).

Notation: y_c in {0, 1} a label; k_c its state: -1 unknown, 0 known absent, 1 known present; p_c the probability that
the global model as received gives label c with all labels unknown. Label-mask training draws a state for every label
(k_c = y_c for a random part of them, :func:`confed.losses.label_states.label_states`), tells the model the states and
takes the loss over unknown labels. CA-MLE changes the states first:

    k_c <- -1   where tau - eps <= p_c <= tau + eps,

so that a client spends itself on what the federation has not learnt yet. A known label may become unknown, never the
other way round. The server averages as FedAvg does.

Where paper and released code differ, ``preset`` chooses. The released code guides the first example of every batch
only, a sixteenth of the data at its batch size; ``paper`` guides all of them. The code's other departures are no
matters of the method and are set elsewhere: state embeddings swapped (``model.swap_states``), and clients drawn
uniformly where the paper draws them by their size (the sampling of ``[run]``). Not offered: the code's global model
guides in training mode, with dropout and moving statistics, until it is evaluated for the first time. Here it is
always in evaluation mode.

Label graph (the paper's future work). Where the model has one (``model.graph = true``), it is filled here. A client
counts, while it trains in the first round it takes part in, how many of its n examples carry both labels of every pair,
adds noise if asked to, and sends the counts divided by n, and n, in the graph's two tensors. The server's graph is the
mean over all clients that have been counted so far, weighted by n: every client counts once, even if it takes part
again, and before the first round ends the graph says that labels are independent. ``guidance = false`` has the graph
without CA-MLE.

What the noise hides: N(0, s^2) on each of a client's C (C + 1) / 2 counts, which the server sees once per run. If no
example has more than m labels, replacing one example by another moves the vector of counts by at most sqrt(m (m + 1))
in the Euclidean norm, which is the sensitivity of this one release; a client's n examples together move it by at most
n sqrt(C (C + 1) / 2). n itself is told, as in FedAvg, and the models that clients send are not noised: noise on the
counts gives no privacy guarantee for the run as a whole. Here it is a function of the run's seed, so that runs can be
repeated: a party that knows the seed can subtract it. Without noise a server sees how often each of a client's labels,
and each pair, occurs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, Protection, action, keeps_protections
from confed.federation.client import Client
from confed.federation.messages import Message, Reply
from confed.federation.params import Mean
from confed.federation.protocols import Batch, Task
from confed.federation.ranges import NOT_NEGATIVE, SHARE
from confed.federation.specs import model_spec, task_spec
from confed.federation.state import ServerState
from confed.federation.teacher import global_logits
from confed.federation.train import Objective, train
from confed.federation.traits import Traits
from confed.losses.label_states import UNKNOWN, uncertain

Preset = Literal["paper", "code"]

COUNTED = "label graph"  # the client's scalar that says that its labels are in the graph already


@dataclass(frozen=True)
class FedLGT(Algorithm):
    """FedAvg with CA-MLE, at the cost of one more pass over the examples per round, without gradients.

    Attributes:
        preset: "paper" or "code"; see above.
        tau: the probability at which a label is neither present nor absent.
        eps: how close to it the global model is unsure.
        guidance: whether the global model guides at all; without, FedAvg with label-mask training.
        first_sample_only: guide the first example of each batch only; default: the preset's.
        graph_noise: standard deviation s of the Gaussian noise on a client's counts for the model's label graph.
        graph: name of that graph; read off the model.
    """

    traits = Traits(
        label="FedLGT",
        sums=("*.examples",),
        made_for="states",
        neutral={"guidance": False},
        search={"eps": (0.01, 0.02, 0.05, 0.1)},
    )
    preset: Preset = "paper"
    tau: Annotated[float, SHARE] = 0.5
    eps: Annotated[float, NOT_NEGATIVE] = 0.02
    guidance: bool = True
    first_sample_only: bool | None = None
    graph_noise: Annotated[float, NOT_NEGATIVE] = 0.0
    graph: str = ""

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the model's label graph."""
        spec = model_spec(model)
        if self.guidance and not spec.reads_states:
            raise ValueError(
                f"FedLGT decides which labels a model is told, and {type(model).__name__} reads no label states: take "
                "a model that does (ctran, ctran_mini), or set algorithm.guidance to false"
            )
        if self.guidance and task_spec(task).known == 0:
            raise ValueError(_NOTHING_KNOWN.format("task.known is 0"))
        graph = spec.label_graph
        if self.graph_noise and not graph:
            raise ValueError(
                f"algorithm.graph_noise is noise on counts for a label graph, and {type(model).__name__} has none: set "
                f"model.graph to true, or algorithm.graph_noise to 0, got {self.graph_noise}"
            )
        if graph and not self.server.plain:
            raise ValueError(
                "a label graph is a mean, along which no optimiser may step: algorithm.server.optimizer must be 'none' "
                f"and algorithm.server.lr 1, got {self.server.optimizer!r} and {self.server.lr}"
            )
        return replace(self, graph=graph)

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection where there is a label graph, which is made of counts and no mean of updates."""
        if self.graph:
            return "its clients also send counts for the model's label graph; set model.graph to false"
        return super().unsupported_reason(protection)

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The weighted mean of the replies; of the label graph that over all clients counted so far."""
        if not self.graph:
            return super().average(server, replies)
        shares, examples = self._graph_tensors()
        counted, total = Mean(torch.float64), float(server.params[examples])
        if total:
            counted.add({shares: server.params[shares]}, total)

        def counting() -> Iterator[Reply]:
            nonlocal total
            for reply in replies:
                if reply.error is None:
                    # No client weighs more here than it does in the mean of the models.
                    new = min(float(reply.message.tensors[examples]), float(reply.client.num_examples))
                    if new > 0:
                        counted.add({shares: reply.message.tensors[shares]}, new)
                        total += new
                yield reply

        mean = super().average(server, counting())
        mean |= counted.result({shares: server.params[shares]})
        mean[examples] = torch.full_like(server.params[examples], total)
        return mean

    # Client ------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """The task's loss with the states that CA-MLE leaves.

        The objective raises ValueError for a batch without ``known``.
        """
        if not self.guidance:
            return super().objective(client)
        logits = global_logits(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            guided = self._guided(batch, logits)
            yield client.task.loss(model(guided), guided)

        return losses

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """FedAvg's local training; in its first round a client also counts its labels for the graph."""
        if not self.graph:
            return super().fit(client, message)
        client.load(message.tensors)
        objective = self.objective(client)
        counts = None if client.state.scalars.get(COUNTED) else _PairCounts(len(client.data))
        loss = train(client, objective if counts is None else counts.watching(objective))
        client.remember()
        reply = client.upload(loss=loss)
        shares, examples = self._graph_tensors()
        tensors = {**reply.tensors, examples: torch.zeros_like(reply.tensors[examples])}
        if counts is not None and counts.examples:
            noise = self.graph_noise * _symmetric(len(reply.tensors[shares]), client.rng("label graph"))
            tensors[shares] = (counts.pairs.cpu() + noise) / counts.examples
            tensors[examples] += counts.examples
            client.state.scalars[COUNTED] = True
        return replace(reply, tensors=tensors)

    def _guided(self, batch: Batch, logits: Callable[[Batch], Tensor]) -> Batch:
        """The batch with the states of which the global model is unsure set to unknown."""
        known_labels = batch.get("known")
        if known_labels is None:
            raise ValueError(_NOTHING_KNOWN.format(f"a training batch has {', '.join(sorted(batch))} only"))
        first = self.preset == "code" if self.first_sample_only is None else self.first_sample_only
        rows = 1 if first else len(known_labels)
        unmarked = {name: value[:rows] for name, value in batch.items() if name != "known"}
        # Half precision could not tell the ends of the interval from what is beside them.
        unsure = uncertain(logits(unmarked).float().sigmoid(), self.tau, self.eps)
        return {**batch, "known": torch.cat([known_labels[:rows].masked_fill(unsure, UNKNOWN), known_labels[rows:]])}

    def _graph_tensors(self) -> tuple[str, str]:
        """Names of the graph's shares of examples and of their number."""
        return f"{self.graph}.co_occurrence", f"{self.graph}.examples"


_NOTHING_KNOWN = (
    "FedLGT sets labels that are known in training back to unknown, so some must be known (batch['known']): {}; set "
    "task.known to the largest share of known labels (0.75 in the paper), or algorithm.guidance to false"
)


class _PairCounts:
    """Co-occurrence counts of labels, with each example counted once."""

    def __init__(self, total: int) -> None:
        self._seen = torch.zeros(total, dtype=torch.bool)
        self.pairs = torch.zeros(())
        self.examples = 0

    def watching(self, objective: Objective) -> Objective:
        """The same objective, which counts what it is asked about, so that no picture is read twice."""

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            self._count(batch)
            yield from objective(model, batch)

        return losses

    def _count(self, batch: Batch) -> None:
        index = batch["index"].cpu()
        new = ~self._seen[index]
        if not bool(new.any()):
            return
        self._seen[index] = True
        # Autocast would count in bfloat16, which ends at 256.
        with torch.autocast(batch["labels"].device.type, enabled=False):
            present = batch["labels"][new.to(batch["labels"].device)].float()
            self.pairs = self.pairs.to(present.device) + present.T @ present
        self.examples += int(new.sum())


def _symmetric(size: int, rng: torch.Generator) -> Tensor:
    """N(0, 1) on and above the diagonal, mirrored below it."""
    upper = torch.randn(size, size, generator=rng).triu()
    return upper + upper.triu(1).T
