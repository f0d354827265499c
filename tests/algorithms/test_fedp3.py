"""FedP³ and ST: every switch does what the equations say, against plain NumPy loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from confed.algorithms.fedp3 import FedP3
from confed.algorithms.st import ST
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.testing.toy import ToyTask, toy_setup
from toy_runs import client_in


def _student(round: int = 1) -> Client:
    client = client_in(toy_setup(FedP3(), noisy=False), round=round)
    client.load(client.initial)
    return client


def _moved(client: Client) -> dict[str, torch.Tensor]:
    """Moves the student away from its teacher, and gives one batch."""
    with torch.no_grad():
        client.tensors["head.weight"].add_(torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    return next(iter(client.data.train(8, client.rng("order/0"))))


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def _by_hand(student: np.ndarray, teacher: np.ndarray, method: FedP3) -> float:
    """Eqs. 8.7 to 8.14 for one example, written as loops."""
    p_s, p_t = _softmax(student), _softmax(teacher)
    entropy = [float((p * np.log(p)).sum()) for p in (p_t, p_s)]
    scores = {
        "p_t": p_t,
        "p_s": p_s,
        "diff": np.log(p_t) - np.log(p_s),
        "gain": np.log(p_t) - np.log(entropy[0] / entropy[1]) * np.log(p_s),
    }
    chosen = range(3) if method.pairs != "filtered" else np.argsort(-scores[method.filter])[: method.top_n]
    values_s, values_t = (p_s, p_t) if method.space == "prob" else (student, teacher)
    total = 0.0
    for i, j in itertools.product(chosen, chosen):
        total += abs(G[method.g](values_t[i] - values_t[j]) - G[method.g](values_s[i] - values_s[j]))
    return total / len(chosen) ** 2 if method.reduction == "mean" else total


SWITCHES = [
    FedP3(top_n=2),
    FedP3(top_n=2, filter="diff"),
    FedP3(top_n=2, filter="p_t"),
    FedP3(top_n=2, filter="p_s"),
    FedP3(top_n=20),
    FedP3(pairs="all"),
    FedP3(top_n=2, space="logit"),
    FedP3(pairs="all", space="logit", reduction="mean"),
    FedP3(top_n=2, reduction="mean"),
    FedP3(top_n=2, lam=0.25),
    FedP3(top_n=2, g="linear"),
    FedP3(pairs="all", g="erf"),
    FedP3(pairs="sorted", g="linear"),
    FedP3(pairs="sorted", g="arctan"),
    FedP3(pairs="sorted"),
    FedP3(pairs="sorted", g="linear", space="logit", reduction="mean"),
]
G = {
    "logistic": lambda x: 1 / (1 + np.exp(-2 * x)),
    "linear": lambda x: (1 + x) / 2,
    "arctan": lambda x: 0.5 + np.arctan(np.pi * x / 2) / np.pi,
    "erf": lambda x: 0.5 + math.erf(np.sqrt(np.pi) * x / 2) / 2,
}


@pytest.mark.parametrize("method", SWITCHES, ids=repr)
def test_the_loss_is_the_papers(method: FedP3) -> None:
    client = _student()
    losses = method.objective(client)
    batch = _moved(client)
    with torch.no_grad():
        teacher = torch.func.functional_call(client.model, dict(client.incoming), (batch,)).logits.double().numpy()
        output = client.model(batch)
        student = output.logits.double().numpy()
        wanted = float(ToyTask().loss(output, batch))
    wanted += method.lam * np.mean([_by_hand(s, t, method) for s, t in zip(student, teacher, strict=True)])
    (loss,) = losses(client.model, batch)
    assert loss.item() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("method", [FedP3(top_n=2, filter="random"), FedP3(pairs="sampled", samples=1)], ids=repr)
def test_what_is_random_is_a_function_of_seed_round_and_client(method: FedP3) -> None:
    values = []
    for _ in range(2):
        client = _student()
        losses = method.objective(client)
        batch = _moved(client)
        (loss,) = losses(client.model, batch)
        values.append(loss.item())
    assert values[0] == values[1]


def test_the_kl_row_is_hintons() -> None:
    client = _student()
    method = ST(lam=0.5, temperature=2.0)
    losses = method.objective(client)
    batch = _moved(client)
    with torch.no_grad():
        teacher = torch.func.functional_call(client.model, dict(client.incoming), (batch,)).logits.double().numpy()
        output = client.model(batch)
        wanted = float(ToyTask().loss(output, batch))
    divergences = []
    for s, t in zip(output.logits.double().numpy(), teacher, strict=True):
        p_t, p_s = _softmax(t / 2), _softmax(s / 2)
        divergences.append(4 * (p_t * np.log(p_t / p_s)).sum())
    (loss,) = losses(client.model, batch)
    assert loss.item() == pytest.approx(wanted + 0.5 * np.mean(divergences), abs=1e-5)


@pytest.mark.parametrize("method", [FedP3(), ST()])
def test_the_term_begins_at_its_round(method: Algorithm) -> None:
    client = _student(0)
    losses = method.objective(client)
    batch = _moved(client)
    with torch.no_grad():
        wanted = float(ToyTask().loss(client.model(batch), batch))
    (loss,) = losses(client.model, batch)
    assert loss.item() == pytest.approx(wanted)
