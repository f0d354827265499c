"""FedDPA's training and its weights at inference against computations by hand on the toy model."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddpa import FedDPA
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.params import Scope
from confed.testing.toy import toy_setup
from toy_runs import client_in, simulated

LOCAL = Local(epochs=1, batch_size=100, lr=0.3, optimizer="sgd", weight_decay=0.0)


def client_of(method: FedDPA, round: int = 0) -> tuple[FedDPA, Client, Message]:
    """A client (no BatchNorm, no dropout), and shared and private values that are far from small."""
    setup = toy_setup(method, local=LOCAL, noisy=False)
    client = client_in(setup, "client-0", round=round)
    rng = torch.Generator().manual_seed(3)
    draw = {n: 0.5 * torch.randn(client.tensors[n].shape, generator=rng) for n in client.initial}
    client.state.tensors["private"] = {n: draw[n] for n in client.names(Scope.PRIVATE)}
    assert isinstance(setup.algorithm, FedDPA)
    return setup.algorithm, client, Message({n: draw[n] for n in client.names(Scope.SHARED)})


def features(x: Tensor, values: Mapping[str, Tensor], local: Tensor | float, glob: Tensor | float) -> Tensor:
    """The toy model below its head, written out, with one weight per row for either adapter."""

    def both(y: Tensor, host: str) -> Tensor:
        total = y
        for name, weight in (("local", local), ("adapter", glob)):
            key = f"{host}.{name}"
            hidden = functional.gelu(y @ values[f"{key}.down.weight"].T + values[f"{key}.down.bias"])
            total = total + weight * (hidden @ values[f"{key}.up.weight"].T + values[f"{key}.up.bias"])
        return total

    hidden = both(x @ values["stem.weight"].T + values["stem.bias"], "norm")
    return both(torch.tanh(hidden) @ values["body.weight"].T + values["body.bias"], "body")


def logits(values: Mapping[str, Tensor], below: Tensor) -> Tensor:
    return torch.relu(below) @ values["head.weight"].T + values["head.bias"]


def step(x: Tensor, label: Tensor, values: dict[str, Tensor], names: list[str], local: float, glob: float) -> None:
    """One step of gradient descent for the named values."""
    for name in names:
        values[name] = values[name].detach().requires_grad_()
    loss = functional.cross_entropy(logits(values, features(x, values, local, glob)), label)
    gradients = torch.autograd.grad(loss, [values[n] for n in names])
    for name, gradient in zip(names, gradients, strict=True):
        values[name] = (values[name] - LOCAL.lr * gradient).detach()


def start(client: Client, message: Message) -> dict[str, Tensor]:
    values = {n: t.detach().clone() for n, t in client.model.state_dict().items()}
    return values | dict(message.tensors) | client.state.tensors["private"]


@pytest.mark.parametrize("round", [0, 1])
def test_a_round_by_hand(round: int) -> None:
    method, client, message = client_of(FedDPA(mix=0.3), round)
    values = start(client, message)
    kinds = {kind: [n for n in values if f".{kind}." in f".{n}"] for kind in ("adapter", "local", "head")}
    batch = next(iter(client.data.train(100, client.rng("order"))))
    if round > 0:
        step(batch["x"], batch["label"], values, kinds["local"] + kinds["head"], 0.3, 0.7)
    step(batch["x"], batch["label"], values, kinds["adapter"] + kinds["head"], 0.0, 1.0)
    sent = method.fit(client, message).tensors
    assert set(sent) == set(kinds["adapter"])
    private = client.state.tensors["private"]
    for name in kinds["adapter"] + kinds["local"] + kinds["head"]:
        torch.testing.assert_close({**sent, **private}[name], values[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(t.requires_grad for n, t in client.tensors.items() if n in client.initial and t.is_floating_point())
    if round > 0:
        memory = private["feddpa_examples.features"]
        x = next(iter(client.data.train(5, client.rng("examples"))))["x"]
        torch.testing.assert_close(memory, features(x, values, 1.0, 0.0), rtol=1e-4, atol=1e-5)


def test_weights_at_inference_by_hand() -> None:
    method, client, message = client_of(FedDPA(scale=0.8, examples=4))
    values = start(client, message)
    batch = next(iter(client.data.test(100)))
    kept = values["feddpa_examples.features"].numpy().astype(np.float64)
    own = features(batch["x"], values, 1.0, 0.0).numpy().astype(np.float64)
    cosines = own @ kept.T / np.linalg.norm(own, axis=1)[:, None] / np.linalg.norm(kept, axis=1)
    a = torch.tensor(0.8 * np.maximum(cosines.mean(1), 0), dtype=torch.float32)[:, None]
    assert 0 < int((a > 0).sum()) <= len(a)
    wanted = logits(values, features(batch["x"], values, a, 1 - a)).argmax(1)
    private = client.state.tensors["private"]
    examined = method.examine(client, Message({**message.tensors, **private}))
    assert torch.equal(examined.tensors["prediction"], wanted)
    reply = method.evaluate(client, Message(message.tensors, {"split": "test"}))
    assert reply.scalars["global:accuracy:sum"] == float((wanted == batch["label"]).sum())


def test_unlike_examples_weigh_nothing_at_inference() -> None:
    """Where the mean cosine is negative the weight is 0, not negative: the global adapter alone answers."""
    method, client, message = client_of(FedDPA(scale=0.8, examples=4))
    values = start(client, message)
    batch = next(iter(client.data.test(100)))
    own = features(batch["x"], values, 1.0, 0.0)
    direction = (own[0] - own[4]).repeat(4, 1)
    cosines = functional.cosine_similarity(own, direction[:1])
    assert (cosines < -0.1).any()
    assert (cosines > 0.1).any()
    model = client.model.eval()
    values |= {"feddpa_examples.features": direction}
    model.load_state_dict(values)
    a = (0.8 * cosines).clamp_min(0)[:, None]
    wanted = logits(values, features(batch["x"], values, a, 1 - a))
    with torch.no_grad():
        answered = method.deployed_model(model)({"x": batch["x"]}).logits
    torch.testing.assert_close(answered, wanted, rtol=1e-4, atol=1e-5)


def test_without_examples_the_global_adapter_answers() -> None:
    method, client, message = client_of(FedDPA())
    client.state.tensors["private"]["feddpa_examples.features"] = torch.zeros(5, 8)
    values = start(client, message)
    batch = next(iter(client.data.test(100)))
    wanted = logits(values, features(batch["x"], values, 0.0, 1.0)).argmax(1)
    examined = method.examine(client, Message({**message.tensors, **client.state.tensors["private"]}))
    assert torch.equal(examined.tensors["prediction"], wanted)


def test_sequential_makes_the_local_adapter_at_the_end() -> None:
    setup = toy_setup(FedDPA(schedule="sequential"), local=LOCAL, rounds=2, noisy=False)
    finished = simulated(setup)
    server, state = finished.params, finished.store.load("client-0").tensors["private"]
    assert state["feddpa_examples.features"].any(1).all()
    for name, value in server.items():
        local = state[name.replace(".adapter.", ".local.")]
        assert not torch.equal(local, value)
        # One epoch of one batch away from the global adapter, nowhere near an initial value of its own.
        assert float((local - value).abs().max()) < 0.5


@pytest.mark.parametrize(
    ("method", "weight"),
    [(FedDPA(), 7.0), (FedDPA(weighting="uniform"), 1.0), (FedDAT(), 1.0), (FedDAT(weighting="examples"), 7.0)],
    ids=repr,
)
def test_replies_weigh_by_their_examples_or_alike(method: Algorithm, weight: float) -> None:
    assert method.weight(Reply(ClientInfo("a", 7), Message())) == weight
