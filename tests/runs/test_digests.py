"""Digests of data: the same for the same examples, another for any change that a run could see."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coloured_labels import colours_dataset
from confed.data.examples import Examples, FederatedDataset
from confed.runs.digests import LOOKED_AT, data_digest
from toy_federation import squares


def with_train(change: Callable[[Examples], Examples]) -> FederatedDataset:
    dataset = squares(6, 4)
    warm = dataset.clients["warm"]
    return replace(dataset, clients={**dataset.clients, "warm": replace(warm, train=change(warm.train))})


def brighter(examples: Examples) -> Examples:
    images = np.array(examples.images)
    images[3, 5, 7, 1] ^= 1
    return replace(examples, images=images)


@pytest.mark.parametrize(
    "change",
    [
        brighter,
        lambda e: replace(e, answers=[e.answers[1], *e.answers[1:]]),
        lambda e: replace(e, questions=["which color is this?", *e.questions[1:]]),
        lambda e: replace(e, names=["other", *e.names[1:]]),
        lambda e: replace(e, image_index=e.image_index[::-1].copy()),
        lambda e: e.take([0, 1, 2]),
    ],
)
def test_any_change_of_examples_changes_the_digest(change: Callable[[Examples], Examples]) -> None:
    assert data_digest(with_train(change)) != data_digest(squares(6, 4)) == data_digest(squares(6, 4))


def test_who_has_examples_counts() -> None:
    dataset = squares(6, 4)
    order = dict(reversed(dataset.clients.items()))
    swapped = {name: replace(split, validation=split.test, test=split.validation) for name, split in order.items()}
    found = {data_digest(dataset), *(data_digest(replace(dataset, clients=c)) for c in (order, swapped))}
    assert len(found) == 3
    assert data_digest(replace(dataset, unseen={})) not in found


def test_labels_pictures_and_owners_count() -> None:
    dataset = colours_dataset()
    first = dataset.clients["u0"]
    darker = np.array(first.train.images)
    darker[0, 0, 0, 0] ^= 1
    parts = [dataset.clients, dict(list(dataset.clients.items())[1:]), {**dataset.clients, "u0": dataset.clients["u1"]}]
    parts.append({**dataset.clients, "u0": replace(first, train=replace(first.train, images=darker))})
    assert len({data_digest(replace(dataset, clients=clients)) for clients in parts}) == 4
    assert data_digest(dataset) == data_digest(colours_dataset())


class Files:
    """Pictures that are read when they are asked for."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, pictures: np.ndarray) -> None:
        self.pictures, self.shape, self.read = pictures, pictures.shape, 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        self.read += len(index)
        return self.pictures[index]


def test_some_pictures_of_files_are_looked_at() -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (1000, 2, 2, 3), dtype=np.uint8)

    def digest(content: np.ndarray) -> tuple[str, int]:
        files = Files(content)
        dataset = with_train(lambda e: replace(e, images=files))
        return data_digest(dataset), files.read

    before, read = digest(pictures)
    assert read == LOOKED_AT
    assert digest(pictures)[0] == before != digest(pictures ^ 1)[0]
