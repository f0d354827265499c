"""Split learning: the cut network learns as the whole one, sessions and fresh processes agree, clients may die."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.split_learning import SplitLearning
from confed.data.examples import TableData
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Call, Reply
from confed.federation.split import steps_of
from confed.federation.state import MemoryStore
from confed.federation.train import Local
from confed.federation.wire import size
from confed.toy import toy_clients, toy_contrastive_model, toy_contrastive_task, toy_setup

SGD = Local(epochs=2, batch_size=4, lr=0.1, optimizer="sgd", weight_decay=0.0)


class Recording(InProcess):
    """Remembers what was said."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.said: list[tuple[Call, Reply]] = []

    def __call__(self, calls: Any, store: Any, round: int) -> Iterator[Reply]:
        for call, reply in zip(calls, super().__call__(calls, store, round), strict=True):
            self.said.append((call, reply))
            yield reply


def run(setup: Setup, answerer: Any = None) -> list[RoundRecord]:
    answerer = InProcess(setup) if answerer is None else answerer
    with Simulation(setup, MemoryStore(), answerer) as simulation:
        workspace = answerer.workspace if isinstance(answerer, InProcess) else Workspace(setup.model())
        return list(simulate(simulation, simulation.start(workspace)))


def final(records: list[RoundRecord]) -> dict[str, Tensor]:
    return {n: t for server in records[-1].servers.values() for n, t in server.params.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def setup_of(algorithm: Algorithm, sizes: tuple[int, ...] = (12, 20, 16), **options: Any) -> Setup:
    options = {"noisy": False, "local": SGD, "rounds": 2, **options}
    return toy_setup(algorithm, clients=toy_clients(sizes=sizes), **options)


def batches_of(setup: Setup, client: str, round: int) -> Iterator[dict[str, Tensor]]:
    """The batches of a client's round in the documented order."""
    from confed.federation.randomness import generator

    for epoch in range(setup.local.epochs):
        rng = generator(setup.seed, round, client, f"order/{epoch}")
        yield from setup.population.data(client).train(setup.local.batch_size, rng)  # type: ignore[misc]


def test_one_client_of_bicsl_learns_as_the_whole_network() -> None:
    setup = setup_of(BiCSL(), sizes=(20,))
    got = final(run(setup))
    model, task = toy_contrastive_model(noisy=False), toy_contrastive_task(noisy=False)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for round in range(2):
        for batch in batches_of(setup, "client-0", round):
            optimizer.zero_grad()
            task.loss(model(batch), batch).backward()
            optimizer.step()
    for name, wanted in model.state_dict().items():
        if name in got:
            torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-6)
    assert {n.split(".")[0] for n in got} == {"mha", "apn", "nha", "lta"}


def test_one_client_of_split_learning_learns_as_the_whole_network() -> None:
    setup = setup_of(SplitLearning(hidden=5), sizes=(20,))
    got = final(run(setup))
    model = setup.model()
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for round in range(2):
        for batch in batches_of(setup, "client-0", round):
            optimizer.zero_grad()
            setup.task.loss(model(batch), batch).backward()
            optimizer.step()
    state = model.state_dict()
    assert "head.middle.0.weight" in got
    for name, value in got.items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)


def test_a_stale_gradient_is_that_of_the_weights_before_the_last_step() -> None:
    """An independent loop: a batch's gradients are those of its own forward pass, one step before they are applied."""
    setup = setup_of(BiCSL(staleness=1), sizes=(20,), rounds=1)
    got = final(run(setup))
    task = toy_contrastive_task(noisy=False)
    client, server = toy_contrastive_model(noisy=False), toy_contrastive_model(noisy=False)
    waiting: list[tuple[nn.Module, tuple[Tensor, Tensor]]] = []

    def settle() -> None:
        then, cut = waiting.pop(0)
        leaves = [t.detach().requires_grad_() for t in cut]
        for p in server.parameters():
            p.grad = None
        task.contrast(*server.project(*leaves)).backward()
        torch.autograd.backward(list(cut), [leaf.grad for leaf in leaves])
        with torch.no_grad():
            for part in ("nha", "lta"):
                for parameter in server.get_submodule(part).parameters():
                    parameter.sub_(0.1 * parameter.grad)
            for part in ("mha", "apn"):
                olds = then.get_submodule(part).parameters()
                for parameter, old in zip(client.get_submodule(part).parameters(), olds, strict=True):
                    if old.grad is not None:
                        parameter.sub_(0.1 * old.grad)

    for batch in batches_of(setup, "client-0", 0):
        if len(waiting) == 2:
            settle()
        then = copy.deepcopy(client)
        waiting.append((then, then.cut(batch)))
    while waiting:
        settle()
    for name, value in got.items():
        wanted = (client if name.startswith(("mha", "apn")) else server).state_dict()[name]
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", [BiCSL(), BiCSL(staleness=1), SplitLearning(hidden=5)])
def test_processes_give_the_bits_of_one_and_keep_their_sessions(algorithm: Algorithm) -> None:
    setup = setup_of(algorithm, noisy=True, local=replace(SGD, optimizer="adamw"))
    alone, beside = run(setup), run(setup, Workers(setup, 2))
    assert same(final(alone), final(beside))
    assert [r.losses for r in alone] == [r.losses for r in beside]
    assert alone[0].traffic == beside[0].traffic
    for records in (alone, beside):
        parties = {span.party for span in records[0].timeline}
        assert parties == {"client-0", "client-1", "client-2", "aux", "main"}
        assert all(span.end >= span.start >= 0 for span in records[0].timeline)
        assert not records[1].timeline


def test_bytes_of_a_step_are_those_of_the_arithmetic() -> None:
    """Up B (D + H) floats, down the same, and a safetensors header of less than 300 bytes beside them."""
    setup = setup_of(BiCSL(), sizes=(8, 8))
    recording = Recording(setup)
    run(setup, recording)
    hidden = toy_contrastive_model(noisy=False).apn.project.out_features
    floats = 4 * 4 * (8 + hidden)
    steps = [(size(c.message), size(r.message)) for c, r in recording.said if c.action == "step"]
    up = [u for _, u in steps if u > 300]
    down = [d for d, _ in steps if d > 300]
    assert len(up) == len(down) == 2 * 2 * 2 * 2  # clients, rounds, epochs, batches
    assert all(floats < value < floats + 300 for value in (*up, *down))


def test_main_is_told_activations_only_and_no_label() -> None:
    setup = setup_of(BiCSL())
    recording = Recording(setup)
    run(setup, recording)
    for call, reply in recording.said:
        if call.action == "step":
            assert set(reply.message.tensors) <= {"v_mha", "v_apn"}
            assert set(call.message.tensors) <= {"v_mha", "v_apn"}
            assert set(reply.message.scalars) == {"done"}
        else:
            assert all(name.startswith(("mha.", "apn.")) for m in (call.message, reply.message) for name in m.tensors)


class Dying(TableData):
    """Examples that fail at a batch of a round."""

    def __init__(self, data: TableData, epochs: tuple[int, ...], batch: int) -> None:
        super().__init__(*data.tables)
        self.epochs, self.at, self.asked = epochs, batch, 0

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        self.asked += 1
        for number, batch in enumerate(super().train(batch_size, rng)):
            if self.asked in self.epochs and number == self.at:
                raise OSError("the disk is gone")
            yield batch


@pytest.mark.parametrize("algorithm", [BiCSL(), BiCSL(staleness=1), SplitLearning(hidden=5)])
def test_a_client_that_dies_between_two_steps_is_left_out_and_comes_back(algorithm: Algorithm) -> None:
    clients = toy_clients()
    dying = {**clients, "client-1": Dying(clients["client-1"], (1,), 2)}
    records = run(toy_setup(algorithm, clients=dying, local=SGD, rounds=2, noisy=False))
    assert records[0].errors == {"client-1": "OSError: the disk is gone"}
    assert set(records[0].losses) == {"client-0", "client-2"}
    assert not records[1].errors
    assert set(records[1].losses) == set(clients)
    # In the round without it the others' mean is what they alone would have made of it.
    others = {name: data for name, data in clients.items() if name != "client-1"}
    alone = run(toy_setup(algorithm, clients=others, local=SGD, rounds=2, noisy=False))
    first = {n: t for s in records[0].servers.values() for n, t in s.params.items()}
    assert same(first, {n: t for s in alone[0].servers.values() for n, t in s.params.items()})


@pytest.mark.parametrize("algorithm", [BiCSL(), SplitLearning(hidden=5)])
def test_a_round_in_which_nobody_is_left_ends_the_run(algorithm: Algorithm) -> None:
    clients = {name: Dying(data, (1, 2, 3), 1) for name, data in toy_clients().items()}
    with pytest.raises(RuntimeError, match="no client is left in round 1; client-2: OSError: the disk is gone"):
        run(toy_setup(algorithm, clients=clients, local=SGD, rounds=2))


@pytest.mark.parametrize("algorithm", [BiCSL(), BiCSL(staleness=1), SplitLearning(hidden=5)])
def test_a_last_batch_of_one_example_is_left_out(algorithm: Algorithm) -> None:
    records = run(setup_of(algorithm, sizes=(9, 5, 8), noisy=True))
    assert not records[-1].errors
    assert all(math.isfinite(loss) for loss in records[-1].losses.values())


def test_steps_of_counts_batches_of_at_least_two() -> None:
    wanted = {(9, 4): 2, (8, 4): 2, (10, 4): 3, (1, 4): 0, (3, 4): 1, (5, 1): 0}
    for (examples, batch_size), steps in wanted.items():
        assert steps_of(examples, replace(SGD, epochs=1, batch_size=batch_size)) == steps
        assert steps_of(examples, replace(SGD, epochs=3, batch_size=batch_size)) == 3 * steps


def test_a_client_with_one_example_is_told_so() -> None:
    records = run(setup_of(BiCSL(), sizes=(8, 1, 8)))
    assert "needs at least two examples per batch, client 'client-1' has 1" in records[0].errors["client-1"]


def test_the_released_code_averages_the_backbone_only() -> None:
    setup = setup_of(BiCSL(preset="code"))
    recording = Recording(setup)
    records = run(setup, recording)
    sent = [(c.client.id, r.message.tensors) for c, r in recording.said if c.action == "send"]
    last = dict(sent[-3:])
    aux, main = records[-1].servers["aux"].params, records[-1].servers["main"]
    assert torch.equal(aux["apn.project.weight"], last["client-0"]["apn.project.weight"])
    assert not torch.equal(aux["apn.project.weight"], last["client-1"]["apn.project.weight"])
    mean = torch.stack([last[c]["mha.body.weight"] for c in last]).mean(0)
    torch.testing.assert_close(aux["mha.body.weight"], mean)
    assert torch.equal(main.params["lta.weight"], main.slots["lta of client-0"]["lta.weight"])
    assert not torch.equal(main.slots["lta of client-1"]["lta.weight"], main.slots["lta of client-0"]["lta.weight"])


def test_moments_survive_a_round_where_they_are_kept() -> None:
    local = replace(SGD, optimizer="adam", epochs=1, lr=0.01)
    kept, fresh = (final(run(setup_of(BiCSL(keep_moments=k), sizes=(16,), local=local))) for k in (True, False))
    model, task = toy_contrastive_model(noisy=False), toy_contrastive_task(noisy=False)
    model.train()
    setup = setup_of(BiCSL(), sizes=(16,), local=local)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for round in range(2):
        for batch in batches_of(setup, "client-0", round):
            optimizer.zero_grad()
            task.loss(model(batch), batch).backward()
            optimizer.step()
    wanted = model.state_dict()
    close = [torch.allclose(t, wanted[n], rtol=1e-3, atol=1e-4) for n, t in kept.items() if t.ndim > 1]
    assert all(close)
    assert not all(torch.allclose(t, wanted[n], rtol=1e-3, atol=1e-4) for n, t in fresh.items() if t.ndim > 1)


def test_schedules_with_stairs_and_milestones() -> None:
    local = Local(schedule="step", warmup=0.2, stairs=4, milestones=(0.5, 0.75), decay=0.2)
    factors = [local.factor(p) for p in (0.0, 0.04, 0.05, 0.1, 0.19, 0.2, 0.49, 0.5, 0.74, 0.75, 1.0)]
    assert factors == pytest.approx([0.25, 0.25, 0.5, 0.75, 1, 1, 1, 0.2, 0.2, 0.04, 0.04])
    assert Local(schedule="step", warmup=0.2).factor(0.1) == pytest.approx(0.5)


def test_equal_answers_are_masked_without_labels() -> None:
    """Main finds equal answers in the activations; the loss is that of a mask made of labels."""
    task = toy_contrastive_task(noisy=False, mask_same_answer=True)
    model = toy_contrastive_model(noisy=False)
    algorithm = BiCSL().suit(model, task)
    setup = replace(setup_of(BiCSL(), sizes=(12,)), algorithm=algorithm, task=task)
    records = run(setup)
    batch = next(iter(batches_of(setup, "client-0", 0)))
    label = batch["label"]
    mask = label[:, None] == label[None]
    fresh = toy_contrastive_model(noisy=False)
    wanted = task.contrast(*fresh.project(*fresh.cut(batch)), mask)
    assert torch.isfinite(wanted)
    assert not records[0].errors
    from confed.algorithms.bicsl import _same

    assert torch.equal(_same(fresh.cut(batch)[1]), mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "both"}, "algorithm.preset must be one of paper, code, got 'both'"),
        ({"staleness": 2}, "algorithm.staleness must be one of 0, 1, got 2"),
        ({"averaged": "none"}, "algorithm.averaged must be one of all, backbone, got 'none'"),
        ({"decorrelate": -1.0}, "algorithm.decorrelate must not be negative, got -1.0"),
    ],
)
def test_faulty_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BiCSL(**options)


def test_a_model_in_one_piece_is_refused_before_training() -> None:
    from confed.toy import ToyTask, toy_model

    with pytest.raises(ValueError, match=r"BiCSL needs task.name = 'contrastive', got 'ToyTask'"):
        BiCSL().suit(toy_model(), ToyTask())
    with pytest.raises(ValueError, match="split learning needs a model with one answer head"):
        SplitLearning().suit(toy_contrastive_model(), ToyTask())
