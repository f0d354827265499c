"""AFL: analytic federated learning, a ridge-regression head on frozen features in one round.

He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models", CVPR 2025 (arXiv
2405.16240). Nothing but a linear head is learned, and it has a closed form.

Notation: x_i the features of example i, (D,), with a 1 behind them where there is an intercept; y_i its targets, (C,):
one-hot, or -1 and 1 of several labels; N_k a client's examples, N those of all clients.

    a client sends     G_k = (1 / N_k) sum_i x_i x_i^T,    Q_k = (1 / N_k) sum_i x_i y_i^T
    the server takes   G = sum_k N_k G_k / N,              Q = sum_k N_k Q_k / N
    the head           W = (G + gamma I)^-1 Q,             gamma = ridge * tr(G) / D

G and Q are the second moments of the pooled examples, so that W is the same however the examples are divided among
clients, up to rounding in float64. (With ``update_privacy`` at the server clients count equally, whatever their N_k.)
The paper's clients send W_k and G_k + gamma_k I, from which its absolute aggregation law gets the same W; its gamma_0
for sums is N gamma here.

**What the moments tell.** G has the mean of a client's features and all their second moments; a column of Q is the
share of a class times the mean feature of its examples: of a class with one example, that example's features. Secure
aggregation (``secure_sum``) hides a client's moments behind the sum, and noise (``update_privacy``) bounds what they
tell; G is made positive semi-definite again after noise, which costs no privacy.

Deviations: the paper has no intercept and takes gamma = 0 at the end; moments are means, so that they fit into the
integers of secure aggregation and under one clip; scores are multiplied by a constant, as the losses in tables are
those of a softmax. Rounds after the first repeat it with their own clients, from whose moments alone the head then
comes: after some clients have left it is exactly that of the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self, cast

import torch
from torch import Tensor, nn

from confed.federation.actions import action, among_offered
from confed.federation.algorithm import Protection, keeps_protections
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output, SingleLabel, Task
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.specs import model_spec
from confed.federation.state import ServerState
from confed.federation.structure import HasFeatureShape, feature_width
from confed.federation.train import check_examples
from confed.federation.traits import Traits

HEAD = "analytic_head"  # the module that AFL adds to a model
GRAM, CROSS = "moments.gram", "moments.cross"  # the upper triangle of G_k, row by row, and Q_k, in messages
LARGEST_CONDITION = 1e12
"""Condition number of G + gamma I up to which the head has four correct digits at least in float64."""


@dataclass(frozen=True)
class AFL(Deploying):
    """Ridge regression on frozen features, exact for any partition of the examples.

    Attributes:
        ridge: gamma as a share of the mean of G's diagonal.
        intercept: whether scores have a constant; it is penalised as the other coefficients are.
        scale: what scores are multiplied by; predictions do not depend on it, probabilities do.
        shape: D, with the intercept, and C; set by :meth:`configure`.
    """

    traits = Traits(
        label="AFL",
        group="finetuning",
        has_personal=False,
        changes=("moments.*",),
        sums=("moments.*",),
        updates_compressible=False,
        neutral="clients send moments of features and no trained values",
        search={"ridge": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)},
        has_steps=False,
    )
    ridge: Annotated[float, NOT_NEGATIVE] = 1e-2
    intercept: bool = True
    scale: Annotated[float, POSITIVE] = 10.0
    shape: tuple[int, int] = field(default=(0, 0), init=False)

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the numbers of features and of classes."""
        features, classes = _sizes(model)
        return self.told(shape=(features + self.intercept, classes))

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The head, with zeros; no initial values are drawn."""
        features, classes = _sizes(model)
        head = nn.Linear(features, classes, device=next(model.parameters()).device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.add_module(HEAD, head)

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the analytic head in place of its own."""
        return _Analytic(model, self.scale)

    def unsupported_reason(self, protection: Protection) -> str:
        """A robust mean: it is no second moment of anything."""
        if protection == "robust":
            return "a median of second moments is no second moment"
        return super().unsupported_reason(protection)

    def rules(self, client: ClientInfo) -> Rules:
        """The head alone is shared; the backbone stays as it is."""
        return {f"{HEAD}.*": Scope.SHARED, "*": Scope.FROZEN}

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """float64 in any case: the solution amplifies rounding by the condition number."""
        return torch.float64

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round: collection of the clients' moments, and the head that follows from their mean."""
        width, classes = self.shape
        like = {
            GRAM: torch.zeros(width * (width + 1) // 2, dtype=torch.float64),
            CROSS: torch.zeros(width, classes, dtype=torch.float64),
        }
        messages = [self.broadcast(server, client) for client in cohort]
        replies = yield [Call(c, "fit", m, expects=like) for c, m in zip(cohort, messages, strict=True)]
        return self._solved(server, like, replies)

    def _solved(self, server: ServerState, like: Params, replies: Iterable[Reply]) -> ServerState:
        heard: list[Reply] = []

        def counted() -> Iterable[Reply]:
            for reply in replies:
                heard.append(reply)
                yield reply

        mean = self.average(replace(server, params=like), counted())
        if all(reply.error is not None for reply in heard):
            return replace(server, round=server.round + 1)
        solution = ridge_head(unpacked(mean[GRAM], self.shape[0]), mean[CROSS], self.ridge)
        weight, bias = f"{HEAD}.weight", f"{HEAD}.bias"
        rows = solution[:-1] if self.intercept else solution
        constant = solution[-1] if self.intercept else torch.zeros(self.shape[1], dtype=torch.float64)
        params = {
            **server.params,
            weight: rows.T.to(server.params[weight].dtype).contiguous(),
            bias: constant.to(server.params[bias].dtype),
        }
        return replace(server, round=server.round + 1, params=params, slots={"analytic": {"solution": solution}})

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """The moments of the client's training examples, and the loss of the head received; ValueError without any."""
        client.load(message.tensors)
        check_examples(client)
        device = next(client.model.parameters()).device
        client.model.eval()
        network, total = self.deployed_model(client.model), 0.0
        single = not isinstance(client.task, SingleLabel) or client.task.single_label
        outputs: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for batch in client.data.train(client.local.batch_size, client.rng("moments")):
                device_batch = to_device(batch, device)
                output: Output = network(device_batch)
                total += float(client.task.loss(output, device_batch)) * len(output.features)
                outputs.append(
                    (output.features.double().cpu(), targets(device_batch, self.shape[1], single=single).cpu())
                )
        features, wanted = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        gram, cross = moments(features, wanted, intercept=self.intercept)
        return Message({GRAM: packed(gram), CROSS: cross}, {"loss": total / len(features)})


# The mathematics ------------------------------------------------------------------------------------------------


def moments(features: Tensor, wanted: Tensor, *, intercept: bool) -> tuple[Tensor, Tensor]:
    """G_k, (D, D), and Q_k, (D, C), in float64.

    Args:
        features: (N, D), without the intercept.
        wanted: targets, (N, C).
        intercept: whether a 1 is put behind the features.
    """
    x = features.double()
    if intercept:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    return x.T @ x / len(x), x.T @ wanted.double() / len(x)


def ridge_head(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """W = (G + gamma I)^-1 Q, float64, (D, C).

    Args:
        gram: G, (D, D); negative eigenvalues, which noise makes, count as 0.
        cross: Q, (D, C).
        ridge: gamma as a share of the mean of G's diagonal.

    Raises:
        ValueError: G + gamma I is ill-conditioned: the message says how far, and which ridge to set.
    """
    values, vectors = cast("tuple[Tensor, Tensor]", torch.linalg.eigh((gram + gram.T) / 2))  # pyright: ignore[reportUnknownMemberType]
    values = values.clamp_min(0.0)
    level = float(values.mean())
    gamma = ridge * level
    low, high = float(values[0]) + gamma, float(values[-1]) + gamma
    if not low * LARGEST_CONDITION > high:
        enough = max(float(values[-1]), torch.finfo(torch.float64).tiny) / (level or 1.0) / (LARGEST_CONDITION / 100)
        raise ValueError(
            f"AFL: the Gram matrix of {len(gram)} features is ill-conditioned with algorithm.ridge = {ridge:g}: its "
            f"condition number is {high / low if low else float('inf'):.1e}, at most {LARGEST_CONDITION:.0e} can be "
            f"solved; set algorithm.ridge to at least {enough:.1e}"
        )
    return vectors @ ((vectors.T @ cross) / (values + gamma).unsqueeze(1))


def targets(batch: Batch, classes: int, *, single: bool = True) -> Tensor:
    """Targets of the regression, float64, (B, C): one-hot rows, soft scores, or -1 and 1 for each of several labels.

    Args:
        batch: with ``label`` (B,), ``target`` (B, C) or ``labels`` (B, C).
        classes: C.
        single: one answer is right; where several may be, soft scores come first.

    Raises:
        ValueError: the batch has none of these.
    """
    if "label" in batch and (single or "target" not in batch):
        return nn.functional.one_hot(batch["label"], classes).double()
    if "target" in batch:
        return batch["target"].double()
    if "labels" in batch:
        return 2 * batch["labels"].double() - 1
    raise ValueError(f"AFL regresses on batch['label'], ['target'] or ['labels'], got keys {sorted(batch)}")


def packed(gram: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix (D, D), row by row, (D (D + 1) / 2,)."""
    rows, columns = torch.triu_indices(len(gram), len(gram))
    return gram[rows, columns]


def unpacked(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix (D, D) of :func:`packed`."""
    rows, columns = torch.triu_indices(width, width)
    gram = triangle.new_zeros(width, width)
    gram[rows, columns] = triangle
    gram[columns, rows] = triangle
    return gram


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Numbers of features and of classes, as the model says or its own head has."""
    if isinstance(model, HasFeatureShape):
        return model.feature_shape
    features = feature_width(model, "AFL")
    head = model.get_submodule(cast("str", model_spec(model).answer_head))
    return features, next(p for p in reversed(list(head.parameters())) if p.ndim == 2).shape[0]


class _Analytic(nn.Module):
    """The model with the scores of the analytic head."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self._scale = model, scale

    def forward(self, batch: Batch) -> Output:
        features = self.model(batch).features
        head = self.model.get_submodule(HEAD)
        scores: Tensor = head(features.to(next(head.parameters()).dtype))
        return Output(among_offered(self._scale * scores, batch), features)
