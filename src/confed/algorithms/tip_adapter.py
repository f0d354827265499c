"""Tip-Adapter: classification by handwritten prompts and a cache of training features, without training.

Zhang et al., "Tip-Adapter: Training-free adaption of CLIP for few-shot classification", ECCV 2022 (arXiv 2207.09519).

Notation: f a picture's features and h_c those of class c's handwritten prompt, of unit length; F_c the cached keys of
class c, features of training pictures of unit length; tau the model's temperature.

    score of c = f h_c / tau + alpha * sum over k in F_c of exp(-beta (1 - f k))

**Federated.** A client's cache never leaves it: single features tell much about their pictures. What travels are sums
of features by class, s_kc = (1 / N_k) sum of f over the client's examples of class c, of N_k in all. Their mean
weighted by N_k is that of all examples pooled, however they are divided. The direction of its row c, the class's mean
feature, is one key of every cache. The global model has these keys alone (a nearest class mean, beside the texts)
after one round; a client's own model has its pictures as further keys, and the common ones from its second round on.
Row c tells a class's mean feature, and of a class with one example that example's: secure aggregation
(``secure_sum``) hides it behind the sum.

Deviations: the paper's cache has all pictures of all parties. Of a class with more than ``shots`` pictures at a client
a random choice is kept. Its variant that trains the keys (Tip-Adapter-F) is not here.
"""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.actions import action
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import ClassifiesByTexts, as_classifier, classes_of, scores_of
from confed.federation.messages import Message
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output, Task, single_label
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from confed.federation.train import check_examples
from confed.federation.traits import Traits

CACHE = "cache"  # the module with sums and keys
SUMS, KEYS = f"{CACHE}.sums", f"{CACHE}.keys"
"""Sums of features by class, (C, D), and a client's own keys, (C, S, D), with zeros where there are fewer than S."""


@dataclass(frozen=True)
class TipAdapter(Deploying):
    """Handwritten prompts and a cache of features; nothing is trained.

    Attributes:
        alpha: weight of the cache.
        beta: how fast a key's vote falls with its distance.
        shots: S, pictures of a class that a client keeps.
    """

    traits = Traits(
        label="Tip-Adapter",
        group="prompts",
        private_beside=True,
        made_for="prompts",
        neutral="clients send sums of features and no trained values",
        search={"alpha": (1.0, 10.0, 100.0), "beta": (1.0, 5.5, 20.0)},
        has_steps=False,
    )
    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    beta: Annotated[float, POSITIVE] = 5.5
    shots: Annotated[int, AT_LEAST_ONE] = 16

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method; a ``ValueError`` where the model has no texts, or examples have several right answers."""
        if not isinstance(model, ClassifiesByTexts):
            raise ValueError(
                f"Tip-Adapter compares pictures with prompts of classes, and {type(model).__name__} reads none: set "
                "model.name to 'clip'"
            )
        single_label(task, "Tip-Adapter caches pictures by their class")
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """An empty cache; no initial values are drawn."""
        reads = as_classifier(model)
        like = reads.handwritten_features(torch.arange(1))
        cache = nn.Module()
        # Parameters, as a model's buffers are constants; none gets a gradient.
        cache.sums = nn.Parameter(like.new_zeros(reads.class_count, like.shape[1]))
        cache.keys = nn.Parameter(like.new_zeros(reads.class_count, self.shots, like.shape[1]))
        model.add_module(CACHE, cache)

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the votes of the cache beside its scores."""
        return _Voting(model, self)

    def rules(self, client: ClientInfo) -> Rules:
        """Sums are shared, keys are private; the model stays as it is."""
        return {SUMS: Scope.SHARED, KEYS: Scope.PRIVATE, "*": Scope.FROZEN}

    def initial_private(self, shared: Params) -> Params:
        """No keys of its own for the global model."""
        classes, width = shared[SUMS].shape
        return {KEYS: shared[SUMS].new_zeros(classes, self.shots, width)}

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """The cache of the client's training examples, which stays, and their sums by class, which are sent.

        A client without training examples is a ValueError.
        """
        client.load(message.tensors)
        check_examples(client)
        task = single_label(client.task, "Tip-Adapter caches pictures by their class")
        device, total = next(client.model.parameters()).device, 0.0
        client.model.eval()
        network = self.deployed_model(client.model)
        seen: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for batch in client.data.train(client.local.batch_size, client.rng("cache")):
                device_batch = to_device(batch, device)
                output: Output = network(device_batch)
                total += float(client.task.loss(output, device_batch)) * len(output.features)
                seen.append((output.features.cpu(), task.labels(device_batch).cpu()))
        features, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
        client.tensors[KEYS].data.copy_(cached(features, labels, len(message.tensors[SUMS]), self.shots))
        client.remember()
        belongs = functional.one_hot(labels, len(message.tensors[SUMS])).to(features.dtype)
        return Message({SUMS: belongs.T @ features / len(features)}, {"loss": total / len(features)})


def cached(features: Tensor, labels: Tensor, classes: int, shots: int) -> Tensor:
    """Keys by class, (C, S, D): the first S features of each, zeros behind them."""
    keys = features.new_zeros(classes, shots, features.shape[1])
    for label in range(classes):
        class_features = features[labels == label][:shots]
        keys[label, : len(class_features)] = class_features
    return keys


def votes(features: Tensor, keys: Tensor, beta: float) -> Tensor:
    """Sum over a class's keys of exp(-beta (1 - f k)), (B, K); keys of zeros have no vote."""
    near = torch.einsum("bd,ksd->bks", features, keys)
    filled = keys.square().sum(-1) > 0
    return ((beta * (near - 1)).exp() * filled).sum(-1)


class _Voting(nn.Module):
    def __init__(self, model: nn.Module, method: TipAdapter) -> None:
        super().__init__()
        self.model, self._method = model, method

    def forward(self, batch: Batch) -> Output:
        reads = as_classifier(self.model)
        features = reads.image_features(batch)
        classes = classes_of(batch, reads.class_count).to(features.device)
        scores = reads.similarity_scores(features @ reads.handwritten_features(classes).T)
        means = functional.normalize(self.model.get_parameter(SUMS)[classes], dim=1)
        keys = torch.cat([means.unsqueeze(1), self.model.get_parameter(KEYS)[classes]], dim=1)
        scores = scores + self._method.alpha * votes(features, keys, self._method.beta)
        return Output(scores_of(scores, classes, batch, reads.class_count), features)
