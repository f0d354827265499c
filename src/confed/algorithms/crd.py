"""CRD: contrastive representation distillation, as compared in FedVQA.

Tian, Krishnan and Isola, "Contrastive representation distillation", ICLR 2020, between the frozen global model
received this round (the teacher T) and the local model (the student S), as FedVQA compares it (Lao et al., ACM MM
2023). Two embeddings map the pooled features of S and T to unit vectors; a memory bank per side holds each example's
last embedding (mixed with momentum). A student embedding must tell its own example's entry in the teacher's bank
from those of n negatives, and the other way round:

    L = L_ce + lambda * (L_S + L_T),
    L_S = -log(P / (P + n P_n)) - sum over negatives of log(n P_n / (P' + n P_n)),    P_n = 1 / N

with P = exp(<bank entry, embedding> / tau) / Z, and Z fixed by the first batch. Embeddings and banks are a client's
own: they never travel. A client keeps 2 x N x 128 values of banks and one number per example, its label.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch, Task, single_label
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE
from confed.federation.structure import feature_width
from confed.federation.teacher import global_features
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.distillation import Embedding, MemoryBanks, draw_negatives

NEED = 'CRD takes negatives from other classes (algorithm.negatives_from = "other_classes")'
OTHERWISE = '; for other tasks there is negatives_from = "others"'

GROUP = "crd"  # where banks, normalisers and labels are in a client's state


@dataclass(frozen=True)
class CRD(Algorithm):
    """FedAvg whose clients contrast their features with those of the global model of the round.

    Attributes:
        lam: weight lambda of both sides; the authors use 0.8.
        negatives: the largest number of negatives per example, n (the authors' 16384 exceeds most clients' data);
            an example with fewer candidates takes all of them.
        negatives_from: candidates are the client's examples of "other_classes" (as in the authors' code), or all
            "others" (for tasks without single labels). An example without candidates adds nothing, so a client
            whose examples are all of one class trains as in FedAvg.
        width: embedding's width d; banks keep d values per example and side.
        temperature: tau.
        momentum: share of a bank's entry that an update keeps.
        start_round: first round, counted from 0, with the term; in round 0 there is nothing to preserve.
    """

    traits = Traits(
        label="CRD",
        group="distillation",
        private_beside=True,
        neutral={"lam": 0.0},
        search={"lam": (0.003, 0.03, 0.2, 0.8)},
    )
    lam: Annotated[float, NOT_NEGATIVE] = 0.8
    negatives: Annotated[int, AT_LEAST_ONE] = 4096
    negatives_from: Literal["other_classes", "others"] = "other_classes"
    width: Annotated[int, AT_LEAST_ONE] = 128
    temperature: Annotated[float, POSITIVE] = 0.07
    momentum: Annotated[float, BELOW_ONE] = 0.5
    start_round: Annotated[int, NOT_NEGATIVE] = 1

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method itself.

        Raises ``ValueError``: negatives are to come from other classes and the task has no single labels, or the model
        does not say which part is its answer head.
        """
        if self.negatives_from == "other_classes":
            single_label(task, NEED, OTHERWISE)
        feature_width(model, "CRD")
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The two embeddings, ``crd_student`` and ``crd_teacher``."""
        features = feature_width(model, "CRD")
        for side in ("student", "teacher"):
            model.add_module(f"crd_{side}", Embedding(features, self.width, rng))

    def rules(self, client: ClientInfo) -> Rules:
        """Embeddings are private."""
        return {"crd_*": Scope.PRIVATE, "*": Scope.SHARED}

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """FedAvg's local training; afterwards the memory banks go back to main memory."""
        reply = super().fit(client, message)
        if GROUP in client.state.tensors:
            client.state.tensors[GROUP] = {name: t.cpu() for name, t in client.state.tensors[GROUP].items()}
        return reply

    def objective(self, client: Client) -> Objective:
        """Task loss plus both sides' contrast."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        teacher_features = global_features(client)
        embed_student, embed_teacher = (client.model.get_submodule(f"crd_{side}") for side in ("student", "teacher"))
        banks, labels = self._memory(client)
        noise = client.rng("negatives")

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            features, index = teacher_features(batch), batch["index"]
            output = model(batch)
            student, teacher = embed_student(output.features), embed_teacher(features)
            chosen = draw_negatives(labels != labels[index].unsqueeze(1), self.negatives, noise)
            term = banks.loss(student, teacher, index, chosen)
            yield client.task.loss(output, batch) + self.lam * term
            banks.update(student, teacher, index)

        return losses

    def _memory(self, client: Client) -> tuple[MemoryBanks, Tensor]:
        """Copies of the client's banks, from now on its state, and its examples' classes (N,)."""
        device = next(iter(client.tensors.values())).device
        memory, count = client.state.tensors.get(GROUP), len(client.data)
        if memory is None:
            banks = MemoryBanks.new(count, self.width, client.rng("banks"))
            memory = {**banks.tensors(), "labels": self._classes(client)}
        if memory["rows"].shape[1] != count:
            raise ValueError(
                f"client {client.info.id!r} has {count} training examples and a memory of {memory['rows'].shape[1]}; "
                "CRD needs the same examples in every round"
            )
        banks = MemoryBanks.of(memory, device, self.temperature, self.momentum)
        client.state.tensors[GROUP] = {**banks.tensors(), "labels": memory["labels"]}
        return banks, memory["labels"].to(device)

    def _classes(self, client: Client) -> Tensor:
        """Each training example's class; with ``others`` every example is its own."""
        classes = torch.arange(len(client.data))
        if self.negatives_from == "others":
            return classes
        task = single_label(client.task, NEED, OTHERWISE)
        for batch in client.data.train(client.local.eval_batch_size, client.rng("labels")):
            classes[batch["index"]] = task.labels(batch).to(classes.device)
        return classes
