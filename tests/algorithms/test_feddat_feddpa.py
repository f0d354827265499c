"""FedDAT and FedDPA on adapters against computations by hand on the toy model, and the invariants of their papers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddpa import FedDPA
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import Branches, fresh_adapter, held
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.params import Scope
from confed.losses.distillation import divergence
from confed.models.vilt import vilt_tiny
from confed.testing.toy import ToyModel, ToyTask, toy_clients, toy_model, toy_setup
from refusals import refuses
from toy_runs import client_in, simulated

S = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, -0.5, 1.5, 0.0]])
T = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 2.0, 1.0]])
SGD = Local(epochs=1, batch_size=100, lr=0.3, optimizer="sgd", weight_decay=0.0)
Values = dict[str, Tensor]


def client_of(
    method: FedDAT, local: Local = SGD, round: int = 0, rounds: int = 4, name: str = "client-0", seed: int = 0
) -> tuple[Setup, Client]:
    """A client of the toy federation (no BatchNorm, no dropout) and the run it is in."""
    setup = toy_setup(method, local=local, rounds=rounds, noisy=False, seed=seed)
    return setup, client_in(setup, name, round=round)


def received(client: Client, seed: int = 3) -> Message:
    """Shared values, far from small."""
    rng = torch.Generator().manual_seed(seed)
    return Message({n: 0.5 * torch.randn(client.tensors[n].shape, generator=rng) for n in client.names(Scope.SHARED)})


def adapter(x: Tensor, values: Mapping[str, Tensor], place: str, name: str) -> Tensor:
    key = f"{place}.{name}"
    hidden = functional.gelu(x @ values[f"{key}.down.weight"].T + values[f"{key}.down.bias"])
    return hidden @ values[f"{key}.up.weight"].T + values[f"{key}.up.bias"]


def by_hand(x: Tensor, values: Mapping[str, Tensor], blend: Mapping[str, float]) -> Tensor:
    """The toy model's logits, written out."""
    hidden = x @ values["stem.weight"].T + values["stem.bias"]
    hidden = hidden + sum(w * adapter(hidden, values, "norm", n) for n, w in blend.items())
    hidden = torch.tanh(hidden) @ values["body.weight"].T + values["body.bias"]
    hidden = hidden + sum(w * adapter(hidden, values, "body", n) for n, w in blend.items())
    return torch.relu(hidden) @ values["head.weight"].T + values["head.bias"]


def kl(start: Tensor, end: Tensor, temperature: float) -> Tensor:
    """T² times the mean over the batch of sum p log(p / q)."""
    p, q = (torch.softmax(z / temperature, 1) for z in (start, end))
    return temperature**2 * (p * (p / q).log()).sum(1).mean()


def step(loss: Tensor, values: Values, lr: float) -> Values:
    """One step of gradient descent for every value that the loss depends on."""
    learning = [n for n, v in values.items() if v.requires_grad]
    gradients = torch.autograd.grad(loss, [values[n] for n in learning], allow_unused=True)
    stepped = {n: (values[n] - lr * g).detach() for n, g in zip(learning, gradients, strict=True) if g is not None}
    return {n: stepped.get(n, v.detach()).clone() for n, v in values.items()}


def learn(values: Values) -> Values:
    fixed = (".anchor.", "stem.", "body.weight", "body.bias")
    return {n: v.requires_grad_(not any(part in f".{n}" for part in fixed)) for n, v in values.items()}


def expected(
    method: FedDAT, client: Client, message: Message, own: Values, settings: tuple[float, float, float]
) -> Values:
    """A fit on one full batch by hand; ``settings`` are the weight of the divergence, T and the divisor."""
    weight, temperature, divisor = settings
    values = {n: t.detach().clone() for n, t in client.model.state_dict().items()}
    values |= message.tensors | own
    values |= {n.replace(".adapter.", ".anchor."): t.clone() for n, t in message.tensors.items()}
    teaching = {"dual": {"anchor": 0.5, "local": 0.5}, "local": {"local": 1.0}, "frozen": {"anchor": 1.0}}
    blends = {"s": {"adapter": 1.0}, "t": teaching[method.teacher]}
    weights = {"s": weight, "t": weight if method.mutual else 0.0}
    batch = next(iter(client.data.train(100, client.rng("order/0"))))
    values = learn(values)
    constant = {"each": "", "shared": "t", "teacher": "s"}[method.head_steps]

    def logits_of(name: str) -> Tensor:
        heads = {n: v.detach() for n, v in values.items() if n.startswith("head.")}
        return by_hand(batch["x"], {**values, **(heads if name == constant else {})}, blends[name])

    z = {name: logits_of(name) for name in blends}

    def loss(name: str, logits: Tensor) -> Tensor:
        teacher = z["t" if name == "s" else "s"].detach()
        pair = (teacher, logits) if method.direction == "teacher_student" else (logits, teacher)
        return (functional.cross_entropy(logits, batch["label"]) + weights[name] * kl(*pair, temperature)) / divisor

    if method.updates == "simultaneous":
        return step(loss("s", z["s"]) + loss("t", z["t"]), values, client.local.lr)
    first, second = ("s", "t") if method.order == "shared_first" else ("t", "s")
    values = learn(step(loss(first, z[first]), values, client.local.lr))
    return step(loss(second, logits_of(second)), values, client.local.lr)


RAMPED = math.exp(-5 * 0.25)  # round 1 of 4: half of the two rounds of the ramp-up


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, (RAMPED, 1.0, 1.0)),
        ({"preset": "code"}, (1.0, 3.0, 2.0)),
        ({"preset": "code", "updates": "simultaneous"}, (1.0, 3.0, 2.0)),
        ({"preset": "code", "order": "teacher_first"}, (1.0, 3.0, 2.0)),
        ({"preset": "code", "teacher": "local"}, (1.0, 3.0, 2.0)),
        ({"preset": "code", "teacher": "frozen"}, (1.0, 3.0, 2.0)),
        ({"alpha": 2.0, "ramp": 0, "mutual": False, "temperature": 1.5}, (2.0, 1.5, 1.0)),
        ({"direction": "student_teacher", "ramp": 0}, (1.0, 1.0, 1.0)),
        ({"head_steps": "shared"}, (RAMPED, 1.0, 1.0)),
        ({"head_steps": "teacher"}, (RAMPED, 1.0, 1.0)),
        ({"head_steps": "shared", "order": "teacher_first", "preset": "code"}, (1.0, 3.0, 2.0)),
        ({"head_steps": "teacher", "order": "teacher_first", "preset": "code"}, (1.0, 3.0, 2.0)),
        ({"head_steps": "shared", "updates": "simultaneous", "preset": "code"}, (1.0, 3.0, 2.0)),
        ({"head_steps": "teacher", "updates": "simultaneous", "preset": "code"}, (1.0, 3.0, 2.0)),
        ({"head_steps": "teacher", "teacher": "frozen", "preset": "code"}, (1.0, 3.0, 2.0)),
    ],
)
def test_a_fit_by_hand(options: Mapping[str, Any], settings: tuple[float, float, float]) -> None:
    setup, client = client_of(FedDAT(**options), round=1)
    method = setup.algorithm
    assert isinstance(method, FedDAT)
    rng = torch.Generator().manual_seed(5)
    own = {n: 0.5 * torch.randn(client.tensors[n].shape, generator=rng) for n in client.names(Scope.PRIVATE)}
    client.state.tensors["private"] = dict(own)
    message = received(client)
    wanted = expected(method, client, message, own, settings)
    sent = method.fit(client, message).tensors
    assert set(sent) == {n for n in wanted if ".adapter." in n}
    private = client.state.tensors["private"]
    assert set(private) == set(own)
    for name, tensor in {**sent, **private}.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(tensor, {**message.tensors, **own}[name])


@pytest.mark.usefixtures("faulty_arguments")
def test_divergence_of_masked_classes_and_bad_input() -> None:
    hidden = torch.tensor([0.0, 0.0, 0.0, -torch.inf])
    for direction in ("teacher_student", "student_teacher"):
        student = S.clone().requires_grad_()
        divergence(student + hidden, T + hidden, 1.0, direction).backward()  # pyright: ignore
        assert student.grad is not None
        assert torch.isfinite(student.grad).all()
        assert not student.grad[:, 3].any()
    refuses(r"one shape \(B, \.\.\., C\), got \(2, 4\) and \(2, 3\)", divergence, S, T[:, :3])
    refuses("direction must be one of teacher_student, student_teacher, got 'both'", divergence, S, T, 1.0, "both")
    for direction in ("teacher_student", "student_teacher"):
        refuses("temperature must be positive, got 0", divergence, S, T, 0.0, direction)


def test_ramp_up_has_its_golden_values_for_any_number_of_rounds() -> None:
    golden = [0.006738, 0.060055, 0.286505, 0.731616, 1.0, 1.0]
    assert [FedDAT().ramp_up(t, 8) for t in range(6)] == pytest.approx(golden, abs=1e-6)
    assert [FedDAT(ramp=4).ramp_up(t, 100) for t in range(6)] == pytest.approx(golden, abs=1e-6)
    assert FedDAT(preset="code").ramp_up(0, 8) == FedDAT(ramp=0).ramp_up(0, 8) == 1.0
    assert FedDAT(preset="code", ramp=4).ramp_up(0, 8) < 0.01


@pytest.mark.parametrize("head_steps", ["each", "shared", "teacher"])
@pytest.mark.parametrize("order", ["shared_first", "teacher_first"])
def test_each_step_moves_what_it_says_and_nothing_else(order: Any, head_steps: Any) -> None:
    setup, client = client_of(FedDAT(order=order, ramp=0, head_steps=head_steps))
    client.load(received(client).tensors)
    losses = setup.algorithm.objective(client)
    learning = [t for n, t in client.tensors.items() if client.scopes[n] in (Scope.SHARED, Scope.PRIVATE)]
    optimizer = torch.optim.AdamW(learning, lr=0.1, weight_decay=0.1)
    for _ in range(2):  # momentum and decay act from the second batch on
        moved: list[set[str]] = []
        batch = next(iter(client.data.train(4, client.rng("order"))))
        for loss in losses(client.model, batch):
            before = {n: t.detach().clone() for n, t in client.model.state_dict().items()}
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # pyright: ignore
            optimizer.step()
            changed = {n for n, t in client.model.state_dict().items() if not torch.equal(t, before[n])}
            moved.append({n.split(".")[1] if n.count(".") > 1 else n.split(".")[0] for n in changed})
        wanted = [{"adapter", "head"}, {"local", "head"}]
        if head_steps != "each":
            wanted[head_steps == "shared"].remove("head")
        assert moved == (wanted if order == "shared_first" else wanted[::-1])


@pytest.mark.parametrize("updates", ["sequential", "simultaneous"])
def test_the_teacher_is_what_was_received_and_stays(updates: Any) -> None:
    setup, client = client_of(FedDAT(updates=updates), Local(epochs=2, batch_size=4, lr=0.1))
    message = received(client)
    reply = setup.algorithm.actions()["fit"](client, message)
    state = client.model.state_dict()
    for name, tensor in message.tensors.items():
        assert torch.equal(state[name.replace(".adapter.", ".anchor.")], tensor)
        assert not torch.equal(reply.tensors[name], tensor)
    assert reply.tensors.keys() == message.tensors.keys()
    kept = {n for group in client.state.tensors.values() for n in group}
    assert not any("anchor" in name for name in (*kept, *client.tensors, *client.scopes))


def test_equal_adapters_make_the_teacher_the_single_adapter() -> None:
    model = toy_model(noisy=False, adapters=True)
    for name in ("local", "anchor"):
        model.adapters.add(name, torch.Generator().manual_seed(1))
    values = model.state_dict()
    for name, tensor in values.items():
        for slot in (".local.", ".anchor."):
            if slot in name:
                tensor.copy_(values[name.replace(slot, ".adapter.")])
    branches = Branches(model, "test", ToyTask())
    batch = {"x": torch.randn(5, 6, generator=torch.Generator().manual_seed(2))}
    teacher, single = branches.together(batch, {"anchor": 0.5, "local": 0.5}, {"adapter": 1.0})
    torch.testing.assert_close(teacher.logits, single.logits)
    torch.testing.assert_close(teacher.features, single.features)
    torch.testing.assert_close(single.logits, by_hand(batch["x"], values, {"adapter": 1.0}))


def test_local_adapters_start_from_values_of_their_own() -> None:
    starts = [fresh_adapter(client_of(FedDAT(), name=name)[1], "local") for name in ("client-0", "client-1")]
    client = client_of(FedDAT())[1]
    for name, tensor in starts[0].items():
        if name.endswith("bias"):
            assert not tensor.any()
            continue
        assert not torch.equal(tensor, starts[1][name])
        assert torch.equal(tensor, fresh_adapter(client, "local")[name])
        assert not torch.equal(tensor, client.initial[name])
    again = [client_of(FedDAT(local_init="same"), name=name)[1] for name in ("client-0", "client-1")]
    for c in again:
        c.load(received(c).tensors)
    first, second = (c.values(Scope.PRIVATE) for c in again)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    ("inference", "blend"),
    [("shared", {"adapter": 1.0}), ("local", {"local": 1.0}), ("both", {"adapter": 0.5, "local": 0.5})],
)
def test_inference_uses_the_adapters_that_the_option_names(inference: Any, blend: Mapping[str, float]) -> None:
    setup, client = client_of(FedDAT(inference=inference))
    message = received(client)
    rng = torch.Generator().manual_seed(5)
    own = {n: torch.randn(client.tensors[n].shape, generator=rng) for n in client.names(Scope.PRIVATE)}
    client.state.tensors["private"] = own
    reply = setup.algorithm.actions()["evaluate"](client, Message(message.tensors, {"split": "test"}))
    values = {**client.model.state_dict(), **message.tensors, **own}
    batch = next(iter(client.data.test(100)))
    right = (by_hand(batch["x"], values, blend).argmax(1) == batch["label"]).sum()
    assert reply.scalars["global:accuracy:sum"] == float(right)
    examined = setup.algorithm.actions()["examine"](client, Message({**message.tensors, **own}))
    assert float(examined.tensors["correct"].sum()) == float(right)


@pytest.mark.parametrize("trick", [True, False])
def test_shared_parts_change_nothing(monkeypatch: pytest.MonkeyPatch, trick: bool) -> None:
    model = vilt_tiny(5, 20, trainable="adapters")
    model.adapters.add("local", torch.Generator().manual_seed(1))
    monkeypatch.setattr(type(model), "prefix_is_frozen", property(lambda _: trick))
    rng = torch.Generator().manual_seed(0)
    batch = {
        "image": torch.randint(0, 256, (3, 3, 64, 64), generator=rng, dtype=torch.uint8),
        "text": torch.randint(1, 20, (3, 7), generator=rng),
        "text_mask": torch.ones(3, 7, dtype=torch.int64),
    }
    branches = Branches(model, "test", ToyTask())
    assert branches.split == trick
    blends = ({"adapter": 1.0}, {"adapter": 0.5, "local": 0.5})
    state = branches.begin(batch)
    for blend, together in zip(blends, branches.together(state, *blends), strict=True):
        with model.adapters.using(blend):
            alone = model(batch)
        output, again = branches.answered(state, blend)
        assert again is not None
        for other in (together, output, again()):
            torch.testing.assert_close(other.logits, alone.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other.features, alone.features, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.classifier[3].bias += 1
    torch.testing.assert_close(again().logits, output.logits + 1)


class Doubling(ToyModel):
    """Does more with its features than to hand them to its head."""

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        output = super().forward(batch)
        return output._replace(logits=2 * output.logits)


def test_a_model_that_cannot_answer_again_runs_again() -> None:
    setup, client = client_of(FedDAT(preset="code"))
    message = received(client)
    plain = setup.algorithm.actions()["fit"](client, message)
    _, client = client_of(FedDAT(preset="code"))
    client.model.__class__ = Doubling
    assert Branches(client.model, "test", ToyTask()).answered({"x": torch.ones(2, 6)}, {"adapter": 1.0})[1] is None
    doubled = setup.algorithm.actions()["fit"](client, message)
    assert all(torch.isfinite(t).all() for t in doubled.tensors.values())
    assert plain.scalars["loss"] != doubled.scalars["loss"]


def test_half_precision_trains_all_that_learns() -> None:
    setup, client = client_of(FedDAT(ramp=0), Local(epochs=1, batch_size=4, lr=0.1, precision="bf16"))
    message = received(client)
    sent = setup.algorithm.actions()["fit"](client, message).tensors
    after = {**sent, **client.state.tensors["private"]}
    start = {**message.tensors, **{n: client.initial[n] for n in client.names(Scope.PRIVATE)}}
    assert all(not torch.equal(after[n], start[n]) for n in after)


def test_held_tensors_learn_again_afterwards() -> None:
    _, client = client_of(FedDAT())
    shared = [client.tensors[n] for n in client.names(Scope.SHARED)]
    with held(client, Scope.SHARED):
        assert not any(t.requires_grad for t in shared)
    assert all(t.requires_grad for t in shared)


def test_rules_need_the_model() -> None:
    refuses("call configure", FedDAT().rules, toy_setup(FedDAT(), clients=toy_clients()).population.info(0))


LOCAL = Local(epochs=1, batch_size=100, lr=0.3, optimizer="sgd", weight_decay=0.0)


def dpa_client_of(method: FedDPA, round: int = 0) -> tuple[FedDPA, Client, Message]:
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


def dpa_step(x: Tensor, label: Tensor, values: dict[str, Tensor], names: list[str], local: float, glob: float) -> None:
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
    method, client, message = dpa_client_of(FedDPA(mix=0.3), round)
    values = start(client, message)
    kinds = {kind: [n for n in values if f".{kind}." in f".{n}"] for kind in ("adapter", "local", "head")}
    batch = next(iter(client.data.train(100, client.rng("order"))))
    if round > 0:
        dpa_step(batch["x"], batch["label"], values, kinds["local"] + kinds["head"], 0.3, 0.7)
    dpa_step(batch["x"], batch["label"], values, kinds["adapter"] + kinds["head"], 0.0, 1.0)
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
    method, client, message = dpa_client_of(FedDPA(scale=0.8, examples=4))
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
    method, client, message = dpa_client_of(FedDPA(scale=0.8, examples=4))
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
    method, client, message = dpa_client_of(FedDPA())
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
