"""Examples on a device: the CPU stands in for one, with a function of the test's own that moves tensors there."""

import gc
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.data import table as table_module
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines import executor as executor_module
from confed.engines.executor import InProcess, added_up, keep_data
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.engines.perform import client_of
from confed.federation.batches import training_batches
from confed.federation.device_tables import DeviceCounts, DeviceTables, on_device
from confed.federation.local import Local
from confed.federation.messages import Call, Message
from confed.federation.state import ClientState, MemoryStore
from confed.models import create_model
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from confed.runs.run import run
from confed.tasks.vqa import VQA

ANSWERS = ("a", "b", "c")
CPU = torch.device("cpu")


class Mover:
    """Copies tensors, with a pixel changed, so that it shows where a batch comes from, and remembers them."""

    def __init__(self, mark: bool = False) -> None:
        self.moved, self.mark = list[Tensor](), mark

    def __call__(self, tensor: Tensor) -> Tensor:
        self.moved.append(tensor)
        copy = tensor.clone()
        if self.mark and tensor.dtype == torch.uint8:
            copy.view(-1)[0] += 1
        return copy


def table(count: int, images: Tensor) -> Table:
    rng = torch.Generator().manual_seed(count)
    columns = {
        "text": torch.randint(1, 9, (count, 4), generator=rng),
        "text_mask": torch.ones(count, 4, dtype=torch.int64),
        "label": torch.randint(0, 3, (count,), generator=rng),
    }
    return Table(images, torch.randint(0, len(images), (count,), generator=rng), columns)


def pictures(count: int = 6) -> Tensor:
    return torch.randint(0, 256, (count, 3, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def federation(**options: Any) -> Setup:
    shared = pictures()
    data = {f"{n}": TableData(table(6 + n, shared), table(3, shared), table(0, shared)) for n in range(3)}
    build = partial(create_model, "vilt_tiny", answers=ANSWERS, vocab_size=9, width=16, layers=1, trainable="head")
    return Setup(
        FedAvg(), Members(data), VQA(len(ANSWERS)), Local(epochs=2, batch_size=4, lr=0.01), build, 2, **options
    )


def test_a_shared_table_is_moved_to_the_device_once() -> None:
    shared, mover = pictures(), Mover(mark=True)
    tables = DeviceTables(CPU, 10**9, mover)
    clients = [TableData(table(5, shared), table(2, shared), table(1, shared)) for _ in range(3)]
    marked = shared.clone()
    marked.view(-1)[0] += 1
    for client in 2 * clients:
        there = on_device(client, tables)
        for number, batches in enumerate((there.train(2, torch.Generator()), there.validation(2), there.test(2))):
            for batch in batches:
                assert torch.equal(batch["image"], marked[client.tables[number].image_index[batch["index"]]])
        assert all(own.images is shared for own in client.tables)
    assert sum(t is shared for t in mover.moved) == 1
    assert len(mover.moved) == len({id(t) for t in mover.moved})
    assert tables.counts == DeviceCounts(sum(t.nbytes for t in mover.moved), 0)


def test_the_budget_is_kept_and_what_has_no_room_stays() -> None:
    shared, mover = pictures(), Mover()
    tables = DeviceTables(CPU, shared.nbytes - 1, mover)
    client = TableData(table(5, shared), table(2, shared), table(0, shared))
    there = on_device(client, tables)
    assert not any(t is shared for t in mover.moved)
    assert mover.moved
    assert tables.counts.held == sum(t.nbytes for t in mover.moved) < shared.nbytes
    assert tables.counts.left == shared.nbytes
    got, expected = (list(d.train(2, torch.Generator().manual_seed(1))) for d in (there, client))
    for one, other in zip(got, expected, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_copies_go_with_tables_that_nobody_holds() -> None:
    tables = DeviceTables(CPU, 100, lambda tensor: tensor.clone())
    first, second = torch.zeros(20), torch.ones(20)
    assert tables(first) is not first
    assert tables(second) is second
    assert tables.counts == DeviceCounts(80, 80)
    del first
    gc.collect()
    assert tables.counts == DeviceCounts(0, 80)
    assert torch.equal(tables(second), second)
    assert tables(second) is not second
    assert tables.counts == DeviceCounts(80, 0)
    for _ in range(50):  # new tensors in the place of old ones are no old ones
        value = torch.full((10,), float(torch.rand(())))
        assert torch.equal(tables(value), value)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_run_has_the_same_numbers(at_once: int) -> None:
    found = list[dict[str, Tensor]]()
    mover = Mover()
    for kept in (False, True):
        setup = federation(batch_clients=at_once)
        workspace = Workspace(setup.model())
        workspace.examples = DeviceTables(CPU, 10**9, mover) if kept else None
        executor = InProcess(setup, workspace)
        simulation = Simulation(setup, MemoryStore(), executor)
        servers = simulation.start(workspace)
        for record in simulate(simulation, servers):
            servers = record.servers
            simulation.evaluate(servers, record.round, split="validation")
        found.append(dict(servers["main"].params))
        assert executor.device_data.held == (sum(t.nbytes for t in mover.moved) if kept else 0)
    assert len(mover.moved) == len({id(t) for t in mover.moved}) > 3
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_mirrored_pictures_are_those_of_the_host() -> None:
    setup = federation()
    workspace = Workspace(setup.model())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    call = Call(setup.population.info(0), "fit", Message(dict(simulation.start(workspace)["main"].params)))
    flipped = replace(setup, local=replace(setup.local, augment="flip"))
    batches = list[list[Any]]()
    for tables in (None, DeviceTables(CPU, 10**9, Mover())):
        workspace.examples = tables
        client = client_of(flipped, workspace, call, ClientState(), 0)
        batches.append(list(training_batches(client, "order/0")))
    for one, other in zip(*batches, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_only_other_devices_than_the_cpu_hold_examples() -> None:
    setup = federation(device_data=1000)
    workspace = Workspace(setup.model())
    keep_data(setup, workspace)
    assert workspace.examples is None
    assert executor_module.counts_of(setup, workspace).reason == "run.device is 'cpu'"
    workspace.device = "cuda:1"
    keep_data(setup, workspace, processes=4)
    assert workspace.examples is not None
    assert (workspace.examples.device, workspace.examples.budget) == (torch.device("cuda:1"), 250)
    keep_data(replace(setup, device_data=0), other := Workspace(setup.model()))
    assert other.examples is None
    assert added_up([DeviceCounts(3, 1), DeviceCounts(4, 0)]) == DeviceCounts(7, 1)


def test_the_summary_says_what_became_of_device_data(tmp_path: Path) -> None:
    recipe = load_recipe(
        "fedvqa_scenes",
        ["study.methods=[]", "data.train=6", "data.validation=2", "data.test=2", "local.epochs=1", "run.rounds=1",
         "model.name=vilt_tiny", "model.width=16", "model.layers=1", "run.workers=1", "run.device_data=0.5",
         "run.controls=none", "run.gallery=0", "data.unseen=[]"],
    )  # fmt: skip
    assert prepare(recipe)[0].device_data == 500_000_000
    run(recipe, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["device_data"] == {"reason": "run.device is 'cpu'"}
    with pytest.raises(ValueError, match=r"run\.device_data"):
        load_recipe("fedvqa_scenes", ["run.device_data=-1"]).run  # noqa: B018


@pytest.mark.parametrize("block_bytes", [1, 200, 2**20], ids=["a batch", "some batches", "all"])
def test_blocks_of_batches_are_the_batches(block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    calls = list[int]()
    monkeypatch.setattr(table_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(table_module, "gathered", lambda column, rows: (calls.append(len(rows)), column[rows])[1])
    columns = {"x": torch.arange(66.0).view(22, 3), "label": torch.arange(22)}
    whole, order = Table(None, torch.arange(22), columns), torch.randperm(22)
    batches = list(whole.row_batches(order, 4, object()))
    assert [len(batch.rows) for batch in batches] == [4, 4, 4, 4, 4, 2]
    for batch, rows in zip(batches, order.split(4), strict=True):
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            "x": columns["x"][rows].tolist(), "label": rows.tolist(), "index": rows.tolist()
        }  # fmt: skip
    assert sorted(calls) == sorted(2 * {1: [4] * 5 + [2], 200: [16, 6], 2**20: [22]}[block_bytes])
