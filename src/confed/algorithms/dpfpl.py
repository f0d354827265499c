"""DP-FPL: a global prompt and a factorised local one, with differential privacy of every example.

Tran, Sun, Patterson and Milanova, "Privacy-preserving personalized federated prompt learning for multimodal large
language models", ICLR 2025 (arXiv 2501.13904); the projection is that of Yu et al., "Large scale private learning via
low-rank reparametrization", ICML 2021.

Notation: p_G (M, d) the shared context, p_L (M, d) a client's own; U (M, b) and V (b, d) with orthonormal columns and
rows, made anew for every step; R what is left of p_L; G_i example i's gradient of the loss with respect to the context.

    p_L = U V + R,    p_G + p_L                                     the client's context
    dp_G, dU, dV      clipped and noised means of G_i, G_i V^T, U^T G_i    (:mod:`confed.privacy.examples`)
    dp_L = dU V + U dV - U U^T dU V                                 G's projection, from what is noised already

p_G is averaged; p_L never leaves the client, and the global model is p_G alone. Nothing that is learned sees a gradient
without noise (R has none of its own), and losses are not sent: the guarantee of each example holds towards the server,
other clients and whoever is given a client's prompt.

**What the released code names.** Its ``--noise`` is epsilon: the standard deviation is sqrt(T ln(1 / delta)) / epsilon
times C / B, with T rounds. :meth:`DPFPL.claimed_epsilon` turns that formula round for the noise of a run, and
``summary.json`` has it beside the epsilon that holds. It does not hold: the code clips the mean of a batch, which one
example can move by 2 C and not by C / B, and T counts rounds where every batch draws noise.

Deviations: one clip for all three gradients, which are then one release, in place of one clip and one release each;
p_G's gradient is noised at the client, where the paper's server, which is trusted, noises the mean of the clients'
gradients (that takes an exchange of messages in every step); several steps between exchanges. The released code adds U
U^T dU V to the projection and divides gradients by 10, the number of its clients.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self, cast

import torch
from torch import Tensor, nn

from confed.federation.actions import action
from confed.federation.batches import rows
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import (
    CONTEXT,
    as_classifier,
    classes_of,
    learned_context,
    prompt_pass,
    scores_of,
)
from confed.federation.messages import Message
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output, Task
from confed.federation.ranges import AT_LEAST_ONE
from confed.federation.specs import Contrasting
from confed.federation.train import Objective, train
from confed.federation.traits import Traits
from confed.privacy import accountant
from confed.privacy.examples import ExamplePrivacy

LOCAL = "private_context"  # the module with the local prompt


@dataclass(frozen=True)
class DPFPL(Deploying):
    """Shared and local prompts, trained with noise on every example's gradient.

    Attributes:
        rank: b; of more than M all directions are kept.
        example_privacy: clipping and noise.
    """

    traits = Traits(
        label="DP-FPL",
        group="prompts",
        private_beside=True,
        made_for="prompts",
        neutral="every example's gradient is clipped",
        in_epochs=True,  # the accountant counts one step per epoch that reads an example
        search={"rank": (1, 2, 4)},
    )
    rank: Annotated[int, AT_LEAST_ONE] = 8
    example_privacy: ExamplePrivacy = field(default_factory=ExamplePrivacy)

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method."""
        learned_context(model, "DP-FPL")
        if isinstance(task, Contrasting):
            raise ValueError("DP-FPL clips the gradient of each example, and this task's loss compares examples")
        if self.example_privacy.noise > 0 and not accountant.available():
            raise ValueError(
                "algorithm.example_privacy.noise needs the library dp-accounting, which says what it is worth; install "
                "it with: pip install '.[privacy]' -c constraints.txt"
            )
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The local prompt, from N(0, 0.02)."""
        start = as_classifier(model).initial_context()
        local = nn.Module()
        local.vectors = nn.Parameter(0.02 * torch.randn(start.shape, generator=rng).to(start))
        model.add_module(LOCAL, local)

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the sum of both prompts."""
        return _Both(model)

    def rules(self, client: ClientInfo) -> Rules:
        """The local prompt is private, the context is shared."""
        return {f"{LOCAL}.*": Scope.PRIVATE, "*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """A local prompt of zeros: the global model has p_G alone."""
        return {f"{LOCAL}.vectors": torch.zeros_like(shared[CONTEXT])}

    def claimed_epsilon(self, rounds: int) -> Mapping[str, float]:
        """The epsilon that the paper's released code would name for this noise."""
        privacy = self.example_privacy
        named = math.sqrt(rounds * math.log(1 / privacy.delta)) / privacy.noise if privacy.noise else math.inf
        return {"released code of DP-FPL": named}

    def objective(self, client: Client) -> Objective:
        """A sum whose gradients are the noised ones; its value means nothing."""
        privacy = self.example_privacy
        noise = client.fixed_noise("noise on gradients", repeatable=privacy.repeatable)
        drawn, size = client.rng("factorisation"), min(client.local.batch_size, len(client.data))

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            shared, local = client.tensors[CONTEXT], client.tensors[f"{LOCAL}.vectors"]
            u, v = factors(local.detach(), self.rank, drawn)
            of_each = context_gradients(model, client.task, batch, shared.detach() + local.detach())
            towards, du, dv = privacy.release([of_each, of_each @ v.T, u.T @ of_each], size, noise)
            yield (towards * shared).sum() + (projected(du, dv, u, v) * local).sum()

        return losses

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Training with noise from the shared values received; no loss is sent."""
        client.load(message.tensors)
        if not client.state.tensors.get("private"):  # the zeros of the global model have no directions
            client.tensors[f"{LOCAL}.vectors"].data.copy_(client.initial[f"{LOCAL}.vectors"])
        train(client, self.objective(client))
        client.remember()
        return client.upload()

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """Refusal: fine-tuning would see gradients without noise."""
        raise ValueError(f"client {client.info.id!r} trains with noise only, and personalise has none")


def factors(prompt: Tensor, rank: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """U (M, b) with orthonormal columns and V (b, d) with orthonormal rows, by one step of power iteration.

    Args:
        prompt: (M, d).
        rank: b, at most M and d count.
        rng: of the start.
    """
    start = torch.randn(prompt.shape[1], min(rank, *prompt.shape), generator=rng).to(prompt)
    u = cast("Tensor", torch.linalg.qr(prompt @ start)[0])  # pyright: ignore[reportUnknownMemberType]
    v = cast("Tensor", torch.linalg.qr(prompt.T @ u)[0])  # pyright: ignore[reportUnknownMemberType]
    return u, v.T


def projected(du: Tensor, dv: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The projection of a gradient G, (M, d), from dU = G V^T and dV = U^T G."""
    return du @ v + u @ dv - u @ (u.T @ du) @ v


def context_gradients(model: nn.Module, task: Task, batch: Batch, context: Tensor) -> Tensor:
    """Gradient of each example's loss with respect to the context, (B, M, d).

    One pass of the text encoder forwards for the batch and one backwards per example.

    Args:
        model: a :class:`confed.federation.families.prompts.ClassifiesByTexts`.
        task: its loss is called for one example at a time.
        batch: B examples.
        context: (M, d).
    """
    reads, count = as_classifier(model), rows(batch)
    context = context.detach().requires_grad_()
    features = reads.image_features(batch)
    classes = classes_of(batch, reads.class_count).to(features.device)
    texts = reads.class_features(context, classes)
    client_texts = texts.detach().expand(count, -1, -1).clone().requires_grad_()
    scores = reads.similarity_scores(torch.einsum("bd,bkd->bk", features, client_texts))
    whole = scores_of(scores, classes, batch, reads.class_count)
    losses: list[Tensor] = []
    for i in range(count):
        losses.append(
            task.loss(Output(whole[i : i + 1], features[i : i + 1]), {name: t[i : i + 1] for name, t in batch.items()})
        )
    (towards,) = torch.autograd.grad(torch.stack(losses).sum(), client_texts)
    return torch.stack([torch.autograd.grad(texts, context, one, retain_graph=True)[0] for one in towards])


class _Both(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        both = self.model.get_parameter(CONTEXT) + self.model.get_parameter(f"{LOCAL}.vectors")
        return prompt_pass(self.model, batch, both).output
