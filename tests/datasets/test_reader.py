"""A dataset written as a reader: its options, their order, words and defaults, and what it shares out."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from confed import registry
from confed.cli.description import settings
from confed.data.examples import Examples, FederatedDataset, kind_made
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import build_table
from confed.data.options import Options
from confed.datasets.reader import Reading, reader


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of these tests are registered for them alone."""
    registry.datasets.names()
    registry.datasets.names()  # what is imported from here on would be forgotten
    monkeypatch.setattr(registry.datasets, "_entries", dict(registry.datasets._entries))


def squares() -> Callable[..., FederatedDataset]:
    @reader(
        "root partition * wanted unseen max_train seed", things="squares",
        partition=Literal["place", "iid"], max_train=5,
    )  # fmt: skip
    def squares(options: Options, wanted: Literal["all", "even"] = "all") -> Reading:
        """Squares by place.

        Options:
            root: where they are.
            wanted: which squares.
        """
        numbers = np.arange(0, 30, 2 if wanted == "even" else 1)
        names = [f"{options.folder.name}-{n}" for n in numbers]
        places = np.array([f"p{n % 3}" for n in numbers])
        roles = np.where(numbers % 5 == 4, "test", "train")
        pictures = np.zeros((len(numbers), 2, 2, 3), np.uint8)
        answers = [str(n % 2) for n in numbers]
        examples = Examples(
            pictures, np.arange(len(numbers)), ["odd?"] * len(names), answers, ["q"] * len(names), names
        )
        account = Account({"f": len(names)}, used={name: f"f, row {row}" for row, name in enumerate(names)})
        return Reading(Pool(examples, roles, places, {"place": places}), account, "not drawn", {"origin": "made"})

    return squares


def test_a_reader_names_its_options_with_words_and_defaults() -> None:
    made = squares()
    assert registry.datasets["squares"] is made
    assert str(inspect.signature(made)).replace("collections.abc.", "") == (
        "(root: pathlib.Path | str, partition: Literal['place', 'iid'] = 'place', *, "
        "wanted: Literal['all', 'even'] = 'all', unseen: Sequence[str] = (), max_train: int | None = 5, seed: int = 0)"
        " -> confed.data.examples.FederatedDataset"
    )
    assert {one.name: one.meaning for one in settings(made)} == {
        "root": "where they are.",
        "partition": "how what was read is shared out among clients.",
        "wanted": "which squares.",
        "unseen": "places that no client trains on.",
        "max_train": "most training squares per client.",
        "seed": "chooses training and validation squares; the test squares are the same for all seeds.",
    }
    assert inspect.getdoc(made).startswith("Squares by place.\n\nArgs:\n")  # type: ignore[union-attr]


def test_what_is_read_is_shared_out_by_the_options(tmp_path: Path) -> None:
    dataset = squares()(tmp_path / "sq", unseen=("p2",))
    assert {name: len(split.train) for name, split in dataset.clients.items()} == {"p0": 5, "p1": 5}
    assert list(dataset.unseen) == ["p2"]
    assert dataset.clients["p0"].train.names[0].startswith("sq-")
    assert dataset.account is not None
    assert dataset.account.counts == {"rows": 30, "used": 16, "left out": 14, "merged": 0}
    assert dataset.facts["account"].endswith("more)")
    assert len(squares()(tmp_path, "iid").clients) == 4
    assert squares()(tmp_path, wanted="even").account.counts["rows"] == 15  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"partition": "colour"}, ValueError, "partition must be one of place, iid, got 'colour'"),
        ({"wanted": "odd"}, ValueError, "wanted must be one of all, even, got 'odd'"),
        ({"unseen": ("p9",)}, ValueError, "unseen must be distinct names out of p0, p1, p2"),
        ({"max_train": 0}, ValueError, "data.max_train must be at least 1, got 0"),
        ({"max_train": True}, ValueError, "data.max_train must be a number, got true"),
        ({"seed": -1}, ValueError, "data.seed must not be negative, got -1"),
        ({"clients": 3}, TypeError, r"squares\(\) got an unexpected keyword argument 'clients'"),
    ],
)
def test_options_are_checked_before_files_are_read(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        squares()("nowhere", **given)


def test_labels_are_dealt_and_untrained_users_are_newcomers() -> None:
    @reader(
        "root partition * minimum validation seed",
        things="texts",
        kind="labels",
        partition=Literal["iid", "user"] | None,
    )
    def notes(options: Options) -> Reading:
        """Notes."""
        texts = [LabelRecord(Path("f"), n, f"n{n}", ("x",), text="note") for n in range(12)]
        users = np.array([f"u{n % 4}" for n in range(12)])
        roles = np.where((users == "u3") | (np.arange(12) > 9), "test", "train")
        examples = Examples.labelled(build_table(texts, ("x",))[""], None, np.arange(12))
        pool = Pool(examples, roles, keys={"user": users}, newcomers=("user",))
        chosen = Options(partition="user", validation=options.validation, seed=options.seed)
        return Reading(pool, None, "", {"asked for": str(options.partition)}, options=chosen)

    dataset = registry.datasets["notes"]("nowhere", validation=0.34)
    assert kind_made(notes) == "labels"
    assert dataset.facts["asked for"] == "None"
    assert {name: (len(s.train), len(s.validation)) for name, s in dataset.clients.items()} == {
        "u0": (2, 1), "u1": (2, 1), "u2": (1, 1),
    }  # fmt: skip
    assert {place: len(examples) for place, examples in dataset.unseen.items()} == {"newcomers": 3}
