"""Split learning: the cut network learns as the whole one, sessions and fresh processes agree, clients may die."""

import copy
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.split_learning import SplitLearning
from confed.data.examples import TableData
from confed.data.table import Table
from confed.datasets.scenes import ANSWERS
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.families.split import ServerPart, restored, steps_of, stored
from confed.federation.local import Local, Schedule
from confed.federation.messages import Message, Reply
from confed.federation.params import named_tensors
from confed.federation.randomness import derive, generator, isolated
from confed.federation.state import MemoryStore, ServerState
from confed.federation.wire import size
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun, TrainedModel
from confed.inference.load import load_exported
from confed.models.contrastive import AnswerProjection
from confed.recipes.recipe import load_recipe
from confed.runs import run as experiment
from confed.testing import trial
from confed.testing.toy import toy_clients, toy_contrastive_model, toy_contrastive_task, toy_model, toy_setup
from toy_runs import Listener, simulated

SGD = Local(epochs=2, batch_size=4, lr=0.1, optimizer="sgd", weight_decay=0.0)


def run(setup: Setup, executor: Any = None) -> list[RoundRecord]:
    executor = InProcess(setup) if executor is None else executor
    with Simulation(setup, MemoryStore(), executor) as simulation:
        workspace = executor.workspace if isinstance(executor, InProcess) else Workspace(setup.model())
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


def test_a_stale_gradient_is_of_the_weights_before() -> None:
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
    listener = Listener(setup)
    run(setup, listener)
    hidden = toy_contrastive_model(noisy=False).apn.project.out_features
    floats = 4 * 4 * (8 + hidden)
    steps = [(size(c.message), size(r.message)) for _, c, r in listener.heard if c.action == "step"]
    up = [u for _, u in steps if u > 300]
    down = [d for d, _ in steps if d > 300]
    assert len(up) == len(down) == 2 * 2 * 2 * 2  # clients, rounds, epochs, batches
    assert all(floats < value < floats + 300 for value in (*up, *down))


def test_main_is_told_activations_only_and_no_label() -> None:
    setup = setup_of(BiCSL())
    listener = Listener(setup)
    run(setup, listener)
    for _, call, reply in listener.heard:
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
def test_a_client_that_dies_is_left_out_and_comes_back(algorithm: Algorithm) -> None:
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
    listener = Listener(setup)
    records = run(setup, listener)
    sent = [(c.client.id, r.message.tensors) for _, c, r in listener.heard if c.action == "send"]
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
    schedule = Schedule("step", warmup=0.2, stairs=4, milestones=(0.5, 0.75), decay=0.2)
    factors = [schedule.factor(p) for p in (0.0, 0.04, 0.05, 0.1, 0.19, 0.2, 0.49, 0.5, 0.74, 0.75, 1.0)]
    assert factors == pytest.approx([0.25, 0.25, 0.5, 0.75, 1, 1, 1, 0.2, 0.2, 0.04, 0.04])
    assert Schedule("step", warmup=0.2).factor(0.1) == pytest.approx(0.5)


def test_equal_answers_are_masked_without_labels() -> None:
    """Main finds equal answers in the activations; the loss is that of a mask made of labels."""
    task = toy_contrastive_task(noisy=False, mask_same_answer=True)
    model = toy_contrastive_model(noisy=False)
    algorithm = BiCSL().configure(model, task)
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


# Sessions in the engines ------------------------------------------------------------------------------------------


def test_sampled_clients_leave_no_workspaces_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Workspace] = []
    twin = Workspace._twin
    monkeypatch.setattr(Workspace, "_twin", lambda self: made.append(twin(self)) or made[-1])
    setup = setup_of(BiCSL(), sizes=(8,) * 9, rounds=5)
    with Simulation(setup, MemoryStore(), cohort=2) as simulation:
        workspace = simulation.executor.workspace  # type: ignore[union-attr]
        asked = [set(r.losses) for r in simulate(simulation, simulation.start(workspace))]
    assert all(len(cohort) == 2 for cohort in asked)
    assert len(set.union(*asked)) > 4
    assert len(made) == 2
    assert not any(workspace.live for workspace in made)


def test_an_unfinished_session_ends_with_its_round() -> None:
    workspace = Workspace(toy_contrastive_model())
    for client in ("a", "b"):
        workspace.session(client, 0).live["half"] = client
    twins = {id(workspace.session(client, 0)) for client in ("a", "b")}
    again = workspace.session("c", 1)  # neither is asked again
    assert id(again) in twins
    assert not again.live
    assert workspace.idle("a")
    assert workspace.idle("b")


class Killed(TableData):
    """Examples whose reader's process is killed at a batch, once."""

    def __init__(self, data: TableData, marker: Path, batch: int) -> None:
        super().__init__(*data.tables)
        self.marker, self.at = marker, batch

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(super().train(batch_size, rng)):
            if number == self.at and not self.marker.exists():
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


@pytest.mark.parametrize("algorithm", [BiCSL(keep_moments=True), SplitLearning(hidden=5)])
def test_a_dead_process_takes_only_its_clients_out(algorithm: Algorithm, tmp_path: Path) -> None:
    clients = toy_clients()
    dying = {**clients, "client-1": Killed(clients["client-1"], tmp_path / "dead", 2)}
    setup = toy_setup(algorithm, clients=dying, local=SGD, rounds=2, noisy=False)
    records = run(setup, Workers(setup, 3))
    assert set(records[0].errors) == {"client-1"}
    assert "worker died with exit code -9" in records[0].errors["client-1"]
    assert not records[1].errors
    assert set(records[1].losses) == set(clients)
    others = {name: data for name, data in clients.items() if name != "client-1"}
    alone = run(toy_setup(algorithm, clients=others, local=SGD, rounds=2, noisy=False))
    assert same(final(records[:1]), final(alone[:1]))
    # What a failure in one process does is the same.
    in_one = run(toy_setup(algorithm, clients={**clients, "client-1": Dying(clients["client-1"], (1,), 2)},
                           local=SGD, rounds=2, noisy=False))  # fmt: skip
    assert same(final(records), final(in_one))


class Signing(TableData):
    """Examples that write down which process reads them."""

    def __init__(self, data: TableData, file: Path) -> None:
        super().__init__(*data.tables)
        self.file = file

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        self.file.write_text(f"{os.getpid()}")
        return super().train(batch_size, rng)


def test_sessions_are_spread_evenly_over_processes(tmp_path: Path) -> None:
    clients = {name: Signing(data, tmp_path / name) for name, data in toy_clients(sizes=(8,) * 6).items()}
    setup = toy_setup(BiCSL(), clients=clients, local=SGD, rounds=1, noisy=False)
    run(setup, Workers(setup, 3))
    assert sorted(Counter((tmp_path / name).read_text() for name in clients).values()) == [2, 2, 2]


def test_the_answer_heads_own_statistics_outlive_a_process() -> None:
    """With batch normalisation behind the server's layers, in a new process for every call as in a session."""
    algorithm = SplitLearning(hidden=5)

    def build() -> nn.Module:
        model = toy_model(noisy=True)
        model.head = nn.Sequential(model.head, nn.BatchNorm1d(3))
        return model

    setup = replace(setup_of(algorithm), build=build)
    setup = replace(setup, algorithm=algorithm.configure(build(), setup.task))
    kept = trial.run(setup)
    trial.same("statistics", kept, trial.run(setup, trial.Bytes))


# Optimisers and divergence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_moments_go_back_to_where_the_optimiser_keeps_them(fused: bool) -> None:
    """On another device the counter of steps lies beside the parameter if a step is one kernel, else in main memory."""
    here, there = torch.ones(3, requires_grad=True), torch.ones((), device="meta", requires_grad=True)
    taught = torch.optim.Adam([here])
    here.sum().backward()
    taught.step()
    moments = {k: v[0] if v.ndim else v for k, v in stored(taught, {"w": here}).items()}
    fresh = torch.optim.Adam([there])
    fresh.param_groups[0]["fused"] = fused
    restored(fresh, {"w": there}, moments)
    devices = {key: value.device.type for key, value in fresh.state[there].items()}
    assert devices == {"step": "meta" if fused else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def led(setup: Setup, scale: dict[str, float]) -> Any:
    """What main makes of one batch of each client whose activations are that much too large."""
    algorithm, model = setup.algorithm, toy_contrastive_model(noisy=False)
    cohort = [ClientInfo(name, 8) for name in scale]
    params = {n: t for n, t in named_tensors(model).items() if n.startswith(("nha", "lta"))}
    flow = dict(algorithm.phases())["main"](ServerState(0, params, rounds=1, local=setup.local), cohort)
    next(flow)
    batch = next(iter(toy_clients()["client-0"].train(8, torch.Generator())))
    v_mha, v_apn = (t.detach() for t in model.cut(batch))
    replies = [Reply(c, Message({"v_mha": v_mha * scale[c.id], "v_apn": v_apn}, {"done": False})) for c in cohort]
    flow.send(iter(replies))
    with pytest.raises(StopIteration) as stop:
        flow.send(iter([Reply(c, Message({}, {"done": True})) for c in cohort]))
    return stop.value.value.params


def test_adapters_that_diverge_in_a_last_step_are_not_averaged() -> None:
    setup = setup_of(BiCSL())
    alone, beside = led(setup, {"a": 1.0}), led(setup, {"a": 1.0, "b": 3e38})
    assert all(torch.isfinite(t).all() for t in alone.values())
    assert same(alone, beside)
    with pytest.raises(RuntimeError, match="no client is left in round 1; b: its adapters diverged"):
        led(setup, {"b": 3e38})


@pytest.mark.parametrize("algorithm", [BiCSL(), SplitLearning(hidden=5)])
def test_a_round_in_which_nobody_begins_says_why(algorithm: Algorithm) -> None:
    with pytest.raises(RuntimeError, match=r"could begin round 1; client-2.*at least two examples per batch"):
        run(setup_of(algorithm, local=replace(SGD, batch_size=1)))


# Models that are handed over ----------------------------------------------------------------------------------------

RECIPE = """
[model]
name = "vilt_tiny"
[data]
name = "scenes"
train = 8
validation = 8
test = 8
unseen = []
[local]
epochs = 1
batch_size = 4
lr = 0.02
[run]
rounds = 1
workers = 1
gallery = 0
evaluate_every = 0
"""


def exported(tmp_path: Path, rest: str) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE + rest)
    experiment.run(load_recipe(file), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "export")
    return tmp_path / "export"


def same_scores(tmp_path: Path, loaded: TrainedModel) -> None:
    run = FinishedRun(tmp_path / "run")
    run.load()
    batch = next(iter(run.setup.population.data(run.info(None).id).test(4)))
    assert torch.equal(loaded(batch).logits, run.model(None)(batch).logits)


def test_an_export_holds_the_servers_layers(tmp_path: Path) -> None:
    folder = exported(tmp_path, '[algorithm]\nname = "split_learning"\nhidden = 8\n[task]\nname = "vqa"\n')
    names = {name for file in (folder / "global").glob("*.safetensors") for name in load_file(file)}
    assert "classifier.middle.0.weight" in names
    same_scores(tmp_path, load_exported(folder))


def test_an_export_needs_no_word_vectors(tmp_path: Path) -> None:
    answers = AnswerProjection.vocabulary(ANSWERS, 8)
    (tmp_path / "glove.txt").write_text("".join(f"{word} {row} 1 -1\n" for row, word in enumerate(answers, 1)))
    task = f'name = "contrastive"\nwidth = 6\nhidden = 7\nglove = "{tmp_path / "glove.txt"}"\n'
    folder = exported(tmp_path, f'[algorithm]\nname = "bicsl"\n[task]\n{task}')
    (tmp_path / "glove.txt").rename(tmp_path / "away.txt")
    loaded: Any = load_exported(folder)
    assert loaded.model.apn.embedding.weight.shape[1] == 3
    (tmp_path / "away.txt").rename(tmp_path / "glove.txt")
    same_scores(tmp_path, loaded)


CLIENT, ROUNDS = "client-0", 3
LOCAL = Local(epochs=2, batch_size=4, lr=0.05, weight_decay=0.1, schedule=Schedule("cosine", warmup=0.25))


def trained(setup: Setup) -> dict[str, Tensor]:
    """What all servers hold after the last round."""
    records = simulated(setup, sound=True).records
    return {n: t for server in records[-1].servers.values() for n, t in server.params.items()}


def batches(setup: Setup, round: int) -> Iterator[dict[str, Tensor]]:
    data: Any = setup.population.data(CLIENT)
    for epoch in range(setup.local.epochs):
        yield from data.train(setup.local.batch_size, generator(setup.seed, round, CLIENT, f"order/{epoch}"))


def whole(setup: Setup, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    """One network in one place: an optimiser of every round, a warm-up and half a cosine over all steps."""
    model, local = setup.model(), setup.local
    model.train()
    steps = len(list(batches(setup, 0)))
    learned = [p for p in model.parameters() if p.requires_grad]
    for round in range(setup.rounds):
        groups = [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": local.weight_decay},
            {"params": [p for p in learned if p.ndim == 1], "weight_decay": 0.0},
        ]
        adam = local.optimizer == "adamw"
        optimizer = torch.optim.AdamW(groups, lr=local.lr) if adam else torch.optim.SGD(groups, lr=local.lr)
        for step, batch in enumerate(batches(setup, round)):
            part, rise = (round + step / steps) / setup.rounds, local.schedule.warmup
            falling = 0.5 * (1 + math.cos(math.pi * (part - rise) / (1 - rise))) if rise else 1.0
            for group in optimizer.param_groups:
                group["lr"] = local.lr * (part / rise if part < rise else falling)
            optimizer.zero_grad()
            with isolated(derive(setup.seed, round, CLIENT, f"forward/{step}")):
                loss(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def check(setup: Setup, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    got, wanted = trained(setup), whole(setup, loss)
    initial = setup.model().state_dict()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert any(not torch.equal(value, initial[name]) for name, value in got.items())
    return got


def test_bicsl_learns_as_the_whole_network() -> None:
    """BatchNorm behind the server's adapter and in the client's backbone, dropout in the backbone, and a cosine.

    By SGD: a bias in front of BatchNorm has no gradient but rounding, which AdamW would blow up to full steps.
    """
    local = replace(LOCAL, optimizer="sgd")
    setup = toy_setup(BiCSL(), clients=toy_clients(sizes=(18,)), local=local, rounds=ROUNDS)
    task = toy_contrastive_task()
    got = check(setup, lambda model, batch: task.loss(model(batch), batch))
    # The server's batch normalisation saw the batches: its statistics are neither 0 and 1 nor the first ones.
    assert float(got["nha.norm.running_mean"].abs().max()) > 1e-3
    assert int(got["nha.norm.num_batches_tracked"]) == ROUNDS * 2 * 5


def test_split_learning_learns_as_the_whole_network() -> None:
    setup = toy_setup(SplitLearning(hidden=5), clients=toy_clients(sizes=(18,)), local=LOCAL, rounds=ROUNDS)
    got = check(setup, lambda model, batch: setup.task.loss(model(batch), batch))
    assert "head.middle.0.weight" in got


def test_a_servers_layers_learn_in_training_mode() -> None:
    """BatchNorm normalises by the batch and dropout is on, whatever mode the given layers were in."""
    given = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    start = {name: value.detach().clone() for name, value in given.state_dict().items()}
    local = Local(lr=0.1, optimizer="sgd", weight_decay=0.0)
    part = ServerPart(given, start, local, round=0, rounds=1, steps=2)
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    twin.load_state_dict(start)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(3)
    for step in range(2):
        x = torch.randn(6, 3, generator=rng)
        with isolated(step):
            part.learn(part.modules(x).square().sum())
        with isolated(step):
            optimizer.zero_grad()
            twin(x).square().sum().backward()
            optimizer.step()
    for name, value in part.values().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    assert not given.training
    assert all(torch.equal(value, start[name]) for name, value in given.state_dict().items())


# Decorrelation ----------------------------------------------------------------------------------------------------


def pictured(sizes: tuple[int, ...] = (18,)) -> dict[str, TableData]:
    """Toy clients whose pictures differ, so that inputs and activations can depend on each other."""
    clients: dict[str, TableData] = {}
    for number, (name, data) in enumerate(toy_clients(sizes=sizes).items()):
        table = data.tables[0]
        rng = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (sizes[number], 3, 2, 2), generator=rng, dtype=torch.uint8)
        own = Table(images, torch.arange(sizes[number]), table.columns)
        clients[name] = TableData(own, own, own)
    return clients


def dependence(x: Tensor, z: Tensor) -> Tensor:
    """Distance correlation by its definition (Székely et al., 2007), differentiable."""

    def centred(rows: Tensor) -> Tensor:
        d = (rows[:, None] - rows[None]).square().sum(-1)
        d = torch.where(d > 0, d, torch.ones_like(d)).sqrt() * (d > 0)
        return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()

    a, b = centred(x.double()), centred(z.double())
    return ((a * b).mean() / ((a * a).mean() * (b * b).mean()).sqrt()).sqrt().float()


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_decorrelation_penalty_reaches_the_clients_part(staleness: int) -> None:
    """The client's layers follow the gradient of loss + weight x dCor(pictures, v_MHA), the server's the loss's."""
    algorithm: Algorithm = BiCSL(decorrelate=2.0, staleness=staleness)  # pyright: ignore[reportArgumentType]
    local = Local(epochs=1, batch_size=18, lr=0.05, optimizer="sgd", weight_decay=0.0)  # one step a round
    setup = toy_setup(algorithm, clients=pictured(), local=local, rounds=ROUNDS)
    task = toy_contrastive_task()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        v_mha, v_apn = model.cut(batch)
        return task.contrast(*model.project(v_mha, v_apn)) + 2.0 * dependence(batch["image"].flatten(1), v_mha)

    check(setup, loss)
    plain = toy_setup(BiCSL(), clients=pictured(), local=local, rounds=ROUNDS)
    assert not torch.allclose(trained(setup)["mha.body.weight"], trained(plain)["mha.body.weight"], atol=1e-3)
