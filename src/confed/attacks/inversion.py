r"""What a server can rebuild of pictures and questions from the activations that split learning sends it.

Notation: f the client's part of the model, x an input, v = f(x) (B, D) the activation that crosses the cut. The
attacker knows f (the auxiliary server or another client has it) and has data of the same kind as the victim's, but none
of theirs.

1. **A learned decoder** (:func:`fit_decoder`): a network trained on pairs (f(x), x) of the attacker's own data
   (Dosovitskiy and Brox, "Inverting visual representations with convolutional networks", CVPR 2016; for split learning
   He, Zhang and Lee, "Model inversion attacks against collaborative inference", ACSAC 2019, in their "black box"
   setting, which needs only to be able to run f).
2. **Search in the input** (:func:`searched`; Mahendran and Vedaldi, "Understanding deep image representations by
   inverting them", CVPR 2015; "white box" in He et al.): gradient steps that lower

       ||f(x) - v||^2 / ||v||^2 + lambda mean ((x - m) / s)^2,

   from the mean input m, with the spread s of the attacker's data. The question is taken as known, so this is an upper
   bound of what such a search finds of the picture.
3. **A probe for words** (:func:`fit_word_probe`): for every word of the vocabulary a logistic regression on v says
   whether the question contains it.

Every number is to be read beside that of an attacker who sees nothing: the mean input, and the most frequent words.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.protocols import Batch

HELD_OUT = 10  # every tenth example of the attacker's own decides when training stops


@dataclass(frozen=True)
class Reconstruction:
    """How near reconstructed inputs are to the true ones."""

    error: float  # mean squared error per value
    baseline: float  # that of the mean input of the attacker's data
    explained: float  # 1 - error / baseline: 1 is a perfect copy, 0 no better than the mean
    cosine: float  # mean cosine between a true and a reconstructed row (a region, or a whole picture)
    baseline_cosine: float  # that of the mean input
    examples: int


@dataclass(frozen=True)
class WordRecovery:
    """How many words of the questions are found."""

    recovered: float  # of a question with k distinct words, the share that is among the k most probable, on average
    baseline: float  # the same for the k words that are most frequent in the attacker's data
    examples: int


@dataclass(frozen=True)
class Decoder:
    """A network with one hidden layer from activations to inputs."""

    tensors: dict[str, Tensor]  # centre and scale of activations and inputs, and the two layers
    shape: tuple[int, ...]

    def __call__(self, v: Tensor) -> Tensor:
        """Inputs (B, ...) of activations (B, D)."""
        t = self.tensors
        out = _layers((v.float() - t["centre"]) / t["scale"], t) * t["spread"] + t["mean"]
        return out.reshape(len(v), *self.shape)


@dataclass(frozen=True)
class WordProbe:
    """A logistic regression for every word."""

    weight: Tensor
    bias: Tensor
    frequency: Tensor  # in which share of the attacker's questions each word is, (V,)

    def __call__(self, v: Tensor) -> Tensor:
        """Scores of all words (B, V) from activations (B, D)."""
        return F.linear(v.float(), self.weight, self.bias)


def fit_decoder(
    v: Tensor, x: Tensor, rng: torch.Generator, *, hidden: int = 256, epochs: int = 60, batch_size: int = 64
) -> Decoder:
    """Trains a decoder on the attacker's own pairs; of all epochs the one with the least error on held-out pairs."""
    if len(v) != len(x) or len(v) < 2 * HELD_OUT:
        raise ValueError(
            f"a decoder needs at least {2 * HELD_OUT} activations with their inputs, got {len(v)} and {len(x)}"
        )
    v, flat = v.detach().clone().float(), x.detach().clone().float().flatten(1)
    fixed = {"centre": v.mean(0), "scale": v.std(0).clamp_min(1e-6), "mean": flat.mean(0), "spread": flat.std()}
    fixed["spread"] = fixed["spread"].clamp_min(1e-6)
    inputs, targets = (v - fixed["centre"]) / fixed["scale"], (flat - fixed["mean"]) / fixed["spread"]
    held = torch.arange(len(v)) % HELD_OUT == 0
    fitting_rows = (~held).nonzero()[:, 0]
    with torch.inference_mode(False), torch.enable_grad():
        layers = _fresh(v.shape[1], hidden, flat.shape[1], rng)
        optimizer = torch.optim.AdamW(layers.values(), lr=2e-3, weight_decay=1e-2, fused=True)
        best, least = {n: t.detach().clone() for n, t in layers.items()}, math.inf
        for _ in range(epochs):
            for rows in fitting_rows[torch.randperm(len(fitting_rows), generator=rng)].split(batch_size):
                optimizer.zero_grad()
                F.mse_loss(_layers(inputs[rows], layers), targets[rows]).backward()  # pyright: ignore
                optimizer.step()
            with torch.no_grad():
                error = float(F.mse_loss(_layers(inputs[held], layers), targets[held]))
            if error < least:
                best, least = {n: t.detach().clone() for n, t in layers.items()}, error
    return Decoder({**fixed, **best}, tuple(x.shape[1:]))


def searched(
    known_layers: Callable[[Batch], Tensor],
    batch: Batch,
    target: Tensor,
    key: str,
    attacker_inputs: Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    prior: float = 1e-2,
) -> Tensor:
    """Searches for inputs whose activations are those that were seen; every example for itself."""
    attacker_inputs = attacker_inputs.detach().clone().float()
    mean, spread = mean_input(attacker_inputs), attacker_inputs.std(0).clamp_min(1e-6)
    low, high = attacker_inputs.amin(0), attacker_inputs.amax(0)
    present = (batch[key] != 0).any(-1, keepdim=True) if key == "regions" else torch.ones((), dtype=torch.bool)
    target = target.detach().clone().float()
    size = target.square().sum(1).clamp_min(1e-12)

    def inputs(z: Tensor) -> Tensor:
        return torch.clamp(mean + spread * z, low, high) * present

    with torch.inference_mode(False), torch.enable_grad():
        z = torch.zeros_like(batch[key], dtype=torch.float32).requires_grad_()
        best, least = inputs(z.detach()), torch.full((len(target),), math.inf)
        optimizer = torch.optim.Adam([z], lr=lr)
        for _ in range(steps + 1):
            x = inputs(z)
            fixed_columns = {name: column.clone() for name, column in batch.items() if name != key}
            far = (known_layers({**fixed_columns, key: x}).float() - target).square().sum(1) / size
            value = far + prior * z.square().flatten(1).mean(1)
            better = value.detach() < least
            least = torch.where(better, value.detach(), least)
            best = torch.where(better.reshape(-1, *[1] * (x.ndim - 1)), x.detach(), best)
            (z.grad,) = torch.autograd.grad(value.sum(), z)
            optimizer.step()
    return best


def fit_word_probe(v: Tensor, words: Tensor, *, decay: float = 1e-3, steps: int = 300, lr: float = 0.05) -> WordProbe:
    """Trains a logistic regression per word, from zero; nothing in it is random."""
    if len(v) != len(words) or not len(v):
        raise ValueError(f"a word probe needs as many questions as activations, got {len(words)} and {len(v)}")
    with torch.inference_mode(False), torch.enable_grad():
        v, words = v.detach().clone().float(), words.detach().clone().float()
        centre, scale = v.mean(0), v.std(0, correction=0).clamp_min(1e-6)
        inputs, frequency = (v - centre) / scale, words.mean(0)
        weight = torch.zeros(words.shape[1], v.shape[1]).requires_grad_()
        bias = torch.logit(frequency, eps=1e-4).requires_grad_()
        optimizer = torch.optim.Adam([weight, bias], lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            fit = F.binary_cross_entropy_with_logits(F.linear(inputs, weight, bias), words, reduction="sum")
            (fit / len(v) + decay * weight.square().sum()).backward()  # pyright: ignore
            optimizer.step()
    weight = weight.detach() / scale
    return WordProbe(weight, bias.detach() - weight @ centre, frequency)


def questions_as_sets(text: Tensor, mask: Tensor, vocabulary: int, special: Tensor) -> Tensor:
    """Which words each question has, float32 (N, V); special tokens are no words."""
    is_word = mask.bool() & ~torch.isin(text, special)
    sets = torch.zeros(len(text), vocabulary + 1)
    sets.scatter_(1, torch.where(is_word, text, vocabulary), 1.0)
    return sets[:, :vocabulary]


def mean_input(inputs: Tensor) -> Tensor:
    """The mean of inputs; of regions over those that are there, as rows that are all zero are padding."""
    if inputs.ndim != 3:
        return inputs.mean(0)
    count = (inputs != 0).any(-1, keepdim=True).sum(0)
    return inputs.sum(0) / count.clamp_min(1)


def judge(rebuilt: Tensor, truth: Tensor, mean: Tensor) -> Reconstruction:
    """Compares reconstructions with the truth and with the mean input."""
    if rebuilt.shape != truth.shape or not len(truth):
        raise ValueError(f"found and truth must have one shape, got {tuple(rebuilt.shape)} and {tuple(truth.shape)}")
    count, blind = len(truth), mean.expand_as(truth)
    if truth.ndim == 3:
        present = (truth != 0).any(-1)
        rebuilt, truth, blind = (x[present].double() for x in (rebuilt, truth, blind))
    else:
        rebuilt, truth, blind = (x.flatten(1).double() for x in (rebuilt, truth, blind))
    error, baseline = float((rebuilt - truth).square().mean()), float((blind - truth).square().mean())
    return Reconstruction(
        error=error,
        baseline=baseline,
        explained=1 - error / baseline if baseline > 0 else 0.0,
        cosine=float(F.cosine_similarity(rebuilt, truth, dim=1).mean()),
        baseline_cosine=float(F.cosine_similarity(blind, truth, dim=1).mean()),
        examples=count,
    )


def judge_words(scores: Tensor, words: Tensor, frequency: Tensor) -> WordRecovery:
    """Counts the words that are found."""
    count = words.sum(1).long()
    has_words = count > 0
    if not bool(has_words.any()):
        raise ValueError("no question has a word that the vocabulary knows")

    def share(guesses: Tensor) -> float:
        order = guesses[has_words].argsort(dim=1, descending=True, stable=True)
        first = torch.arange(order.shape[1]) < count[has_words][:, None]
        hits = (words[has_words].gather(1, order) * first).sum(1)
        return float((hits / count[has_words]).mean())

    return WordRecovery(share(scores), share(frequency.expand_as(scores)), int(has_words.sum()))


def _layers(v: Tensor, layers: dict[str, Tensor]) -> Tensor:
    return F.linear(torch.relu(F.linear(v, layers["w1"], layers["b1"])), layers["w2"], layers["b2"])


def _fresh(inputs: int, hidden: int, outputs: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Two layers, uniform within 1 / sqrt(inputs) of each."""
    shapes = {"w1": (hidden, inputs), "b1": (hidden,), "w2": (outputs, hidden), "b2": (outputs,)}
    fan = {"w1": inputs, "b1": inputs, "w2": hidden, "b2": hidden}
    return {
        name: ((2 * torch.rand(shape, generator=rng) - 1) * fan[name] ** -0.5).requires_grad_()
        for name, shape in shapes.items()
    }
