"""Mirrored training pictures: seeded by example, none in evaluations, and apart in what a teacher keeps."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Workspace
from confed.federation.batches import MIRRORED, training_batches
from confed.federation.client import Client
from confed.federation.families.split import _batches
from confed.federation.local import Local
from confed.federation.protocols import Batch
from confed.federation.state import ClientState
from confed.federation.teacher import once_per_round
from confed.federation.train import train
from confed.recipes.recipe import load_recipe
from confed.testing.toy import ToyTask, toy_clients, toy_setup

N = 40


def pictures() -> TableData:
    """Every picture has its number in its left column and zeros elsewhere."""
    images = torch.zeros(N, 3, 2, 4, dtype=torch.uint8)
    images[:, :, :, 0] = torch.arange(1, N + 1, dtype=torch.uint8).view(-1, 1, 1)
    old = toy_clients(sizes=(N,))["client-0"].tables[0]
    table = Table(images, torch.arange(N), old.columns)
    return TableData(table, table, table)


def client(data: object, round: int = 0, name: str = "client-1", seed: int = 0, **local: object) -> Client:
    settings = Local(**{"epochs": 2, "batch_size": 7, "augment": "flip", **local})  # pyright: ignore
    setup = toy_setup(FedAvg(), local=settings)
    workspace = Workspace(setup.build())
    info = replace(setup.population.info(1), id=name)
    made = Client(
        info, data, workspace.model, workspace.tensors, ToyTask(), settings, ClientState(),  # pyright: ignore
        workspace.scopes(FedAvg(), info), workspace.initial, round, 3, seed=seed,
    )  # fmt: skip
    made.load({name: value.clone() for name, value in workspace.initial.items()})
    return made


def turned(who: Client, purpose: str = "order/0") -> Tensor:
    """Which examples are mirrored in an epoch, in the examples' order, as their pixels say."""
    found = torch.zeros(N, dtype=torch.bool)
    for batch in training_batches(who, purpose):
        left, right = batch["image"][:, 0, 0, 0], batch["image"][:, 0, 0, 3]
        assert torch.equal((left + right).long(), batch["index"] + 1)  # either way it is the example's picture
        assert torch.equal(batch[MIRRORED], left == 0)
        found[batch["index"]] = left == 0
    return found


def test_a_draw_is_a_function_of_its_seed_and_example() -> None:
    data = pictures()
    first = turned(client(data))
    assert 0.25 < first.float().mean() < 0.75
    assert torch.equal(first, turned(client(data)))
    assert torch.equal(first, turned(client(data, batch_size=N)))  # whatever the batches are
    others = [client(data, round=1), client(data, name="client-2"), client(data, seed=1)]
    assert all(not torch.equal(first, turned(other)) for other in others)
    assert not torch.equal(first, turned(client(data), "order/1"))


def test_off_by_default_and_never_in_evaluations() -> None:
    data = pictures()
    assert Local().augment == "none"
    for batch in training_batches(client(data, augment="none"), "order/0"):
        assert MIRRORED not in batch
        assert (batch["image"][:, 0, 0, 0] > 0).all()
    for batch in (*data.validation(7), *data.test(7)):
        assert (batch["image"][:, 0, 0, 0] > 0).all()


def test_training_and_split_learning_see_the_same_pictures() -> None:
    seen: list[Batch] = []

    def objective(model: torch.nn.Module, batch: Batch) -> Iterator[Tensor]:
        seen.append(batch)
        yield model(batch).logits.square().mean()

    who = client(pictures())
    train(who, objective)
    assert torch.equal(torch.cat([b[MIRRORED] for b in seen[: len(seen) // 2]]).sum(), turned(who).sum())
    for whole, split in zip(seen, _batches(who, 0), strict=True):
        assert torch.equal(whole["image"], split["image"])


def test_what_a_teacher_keeps_is_of_the_side_that_is_seen() -> None:
    who, calls = client(pictures(), epochs=6), list[int]()

    def compute(batch: Batch) -> Tensor:
        calls.append(len(batch["index"]))
        return batch["image"][:, 0, 0].float()

    kept = once_per_round(who, compute)
    for epoch in range(6):
        for batch in training_batches(who, f"order/{epoch}"):
            assert torch.equal(kept(batch), batch["image"][:, 0, 0].float())
    assert sum(calls) < 6 * N  # something was looked up
    plain = once_per_round(client(pictures(), augment="none"), compute)
    calls.clear()
    for epoch in range(6):
        for batch in training_batches(client(pictures(), augment="none"), f"order/{epoch}"):
            plain(batch)
    assert sum(calls) == N


def test_pictures_with_computed_columns_stay_as_they_are() -> None:
    data = pictures()
    data.fixed = True  # pyright: ignore[reportAttributeAccessIssue]
    assert all(MIRRORED not in batch for batch in training_batches(client(data), "order/0"))


def test_regions_are_not_mirrored() -> None:
    class WithRegions(TableData):
        def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
            return ({**batch, "regions": torch.zeros(len(batch["index"]), 1, 1)} for batch in super().train(7, rng))

    with pytest.raises(ValueError, match=r'local\.augment must be "none" for a model that reads regions'):
        next(iter(training_batches(client(WithRegions(*pictures().tables)), "order/0")))


@pytest.mark.parametrize("name", ["fedlgt_flair", "fedlgt_flair_fine", "fedlgt_coco", "fedlgt_voc"])
def test_recipes_of_the_released_code_mirror(name: str) -> None:
    recipe = load_recipe(name, ["data.root=somewhere"])
    assert {recipe.method(row).local.augment for row in recipe.table or recipe.methods} == {"flip"}
    with pytest.raises(ValueError, match=r"local\.augment"):
        load_recipe(name, ["data.root=somewhere", "local.augment=rotate"])
