"""The contract of datasets: those that come with confed keep it, and every check catches what it is for."""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

import confed
from confed.data.dataset_contract import DATASET_CHECKS
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.intake.account import Account
from confed.registry import datasets
from confed.testing import ContractViolation, check_dataset

DRAWN = ("modalities", "scene_captions", "scene_descriptions", "scenes", "six_styles")
SMALL = {"train": 6, "validation": 4, "test": 4}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_datasets_keep_the_contract(name: str) -> None:
    parameters = signature(datasets[name]).parameters
    sizes = {key: value for key, value in SMALL.items() if key in parameters}
    assert check_dataset(datasets[name], **sizes) == [(check, "passed") for check in DATASET_CHECKS]


def dataset(first: int = 0, again: int = 100) -> FederatedDataset:
    """Two clients with three pictures each; ``first`` and ``again`` are where pictures for training and tests begin."""

    def draw(place: str, numbers: range) -> Examples:
        pictures = np.stack([np.random.default_rng([number]).integers(0, 255, (4, 4, 3)) for number in numbers])
        count = len(numbers)
        texts = [["what is it?"] * count, ["yes"] * count, ["thing"] * count]
        return Examples(pictures.astype(np.uint8), np.arange(count), *texts, [f"{place}-{n}" for n in range(count)])

    clients: dict[str, Split] = {}
    for number, name in enumerate(("a", "b")):
        start = 10 * number
        clients[name] = Split(
            draw(f"{name}/train", range(first + start, first + start + 3)),
            draw(f"{name}/val", range(first + start + 3, first + start + 5)),
            draw(f"{name}/test", range(again + start, again + start + 3)),
        )
    return FederatedDataset(
        "made", ("yes", "no"), clients, {"away": draw("away", range(500, 502))}, ("what", "is", "it")
    )


def made(seed: int = 0) -> FederatedDataset:
    """A dataset.

    Args:
        seed: decides nothing.
    """
    return dataset()


def changed(change: Callable[[FederatedDataset, int], Any], **further: Any) -> Callable[..., Any]:
    """The function with another result."""

    def build(seed: int = 0) -> Any:
        return change(dataset(), seed)

    build.__doc__ = made.__doc__
    return build


def with_tests(data: FederatedDataset, **changes: Any) -> FederatedDataset:
    """The dataset whose unseen place has other examples."""
    return replace(data, unseen={"away": replace(data.unseen["away"], **changes)})


CALLS: list[int] = []


def counting(data: FederatedDataset, seed: int) -> FederatedDataset:
    CALLS.append(seed)
    return with_tests(data, questions=[f"number {len(CALLS)}?"] * 2)


def drawing(data: FederatedDataset, seed: int) -> FederatedDataset:
    np.random.rand()
    return data


def undescribed(seed: int = 0) -> FederatedDataset:
    """A dataset."""
    return dataset()


def from_files(root: str = "", seed: int = 0) -> FederatedDataset:
    """A dataset.

    Args:
        root: folder.
        seed: decides nothing.
    """
    account = Account(rows={"a.csv": 5}, used={"a/train-0": "a.csv, row 1"})
    return replace(dataset(), account=account if root else None)


CASES: dict[str, list[tuple[Callable[..., Any], str]]] = {
    DATASET_CHECKS[0]: [(undescribed, "does not say what seed means")],
    DATASET_CHECKS[1]: [(changed(lambda data, seed: 3), "must return a FederatedDataset, got int")],
    DATASET_CHECKS[2]: [
        (changed(lambda data, seed: replace(data, clients={" a": data.clients["a"]})), "calls a client or place ' a'")
    ],
    DATASET_CHECKS[3]: [
        (
            changed(
                lambda data, seed: replace(
                    data, clients={"a": replace(data.clients["a"], train=data.clients["a"].train.take([]))}
                )
            ),
            "has no client with a training example",
        )
    ],
    DATASET_CHECKS[4]: [
        (changed(lambda data, seed: with_tests(data, names=["x", "x"])), "names two test examples of away 'x'")
    ],
    DATASET_CHECKS[5]: [
        (
            changed(lambda data, seed: with_tests(data, answers=["yes", "blue"])),
            "answers a test example of away with 'blue'",
        )
    ],
    DATASET_CHECKS[6]: [(changed(counting), "gives other examples when it is called again")],
    DATASET_CHECKS[7]: [
        (
            changed(lambda data, seed: with_tests(data, questions=[f"number {seed}?"] * 2)),
            "has other test examples for another seed",
        )
    ],
    DATASET_CHECKS[8]: [(changed(drawing), "draws from a generator that all of the process share")],
    DATASET_CHECKS[9]: [
        (
            changed(lambda data, seed: dataset(again=2)),
            "shows a picture in the test of a that a trains or validates on",
        ),
        (changed(lambda data, seed: dataset(first=500)), "in the test of away that a trains"),
    ],
    DATASET_CHECKS[10]: [(from_files, "does not say what became of their rows")],
}


@pytest.mark.parametrize(
    ("check", "build", "message"),
    [(check, *case) for check in DATASET_CHECKS for case in CASES[check]],
    ids=lambda value: value if isinstance(value, str) and value in DATASET_CHECKS else "",
)
def test_every_check_catches_what_it_is_for(check: str, build: Callable[..., Any], message: str) -> None:
    with pytest.raises(ContractViolation, match=f"^{check}: the dataset .*{message}"):
        check_dataset(build)


def test_a_sound_dataset_passes_and_an_account_must_add_up() -> None:
    assert confed.check_dataset(made)[0] == ("options are described", "passed")
    with pytest.raises(ContractViolation, match=r"has an account that does not add up: a\.csv: 5 rows = 1 used"):
        check_dataset(from_files, root="here")
    with pytest.raises(ContractViolation, match="needs root: give it, as a recipe would"):
        check_dataset(datasets["easy_vqa"])
