"""Own conversations as a federation: clients, tests, shared pictures, several turns and pictures, faults."""

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.chat import Said
from confed.data.examples import Examples, FederatedDataset
from confed.data.readable import leave_out_unreadable
from confed.datasets.chat_records import chat_records


def write(folder: Path, entries: Sequence[dict[str, Any]], name: str = "chat.jsonl", pictures: int = 12) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, entries)))
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(exist_ok=True)
    for number in range(pictures):
        Image.fromarray(rng.integers(0, 256, (9, 8, 3), np.uint8)).save(folder / "images" / f"{number}.png")
    return folder


def plain(count: int = 24, **columns: Any) -> list[dict[str, Any]]:
    return [
        {
            "question": f"what is {n}?",
            "answer": ["cat", "dog"][n % 2],
            "image": f"{n // 2}.png",
            "client": "ab"[n % 4 > 1],
        }
        | {key: value(n) for key, value in columns.items()}
        for n in range(count)
    ]


CHAT = {
    "id": "long",
    "images": ["0.png", "1.png"],
    "client": "a",
    "messages": [
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "A dog."},
    ],
}


def parts(dataset: FederatedDataset) -> list[Examples]:
    return [part for split in dataset.clients.values() for part in (split.train, split.validation, split.test)]


def test_plain_questions_are_dealt_and_pictures_stay_together(tmp_path: Path) -> None:
    dataset = chat_records(write(tmp_path / "d", plain()), image_size=8, validation=0.3)
    assert list(dataset.clients) == ["a", "b"]
    assert dataset.kind == "answers"
    assert sum(map(len, parts(dataset))) == 24
    owners = [set(part.image_index.tolist()) for part in parts(dataset)]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 12
    again = chat_records(tmp_path / "d", image_size=8, validation=0.3, seed=5)
    for name, split in dataset.clients.items():
        assert again.clients[name].test.names == split.test.names
        assert split.test.names
        assert split.validation.names


def test_every_answer_is_an_example_with_what_came_before(tmp_path: Path) -> None:
    dataset = chat_records(write(tmp_path / "d", [*plain(), CHAT]), image_size=8, test_share=0, validation=0)
    assert dataset.kind == "conversations"
    train = dataset.clients["a"].train
    first, second = (train.names.index(f"long#{n}") for n in (0, 1))
    assert train.conversations is not None
    assert train.conversations[first] == (Said("user", (None, "What?")),)
    assert train.conversations[second] == (
        Said("user", (None, "What?")), Said("assistant", ("A cat.",)), Said("user", ("And", None, "?")),
    )  # fmt: skip
    assert (train.answers[second], train.questions[second]) == ("A dog.", "And ?")
    assert train.image_index.shape == (len(train), 2)
    assert train.image_index[first, 0] == train.image_index[second, 0] == train.image_index[first, 1]
    assert train.image_index[second, 1] != train.image_index[second, 0]
    last = chat_records(tmp_path / "d", image_size=8, turns="last", test_share=0, validation=0)
    assert sum(map(len, parts(last))) == 25


def test_files_named_after_splits_and_a_column_decide_roles(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", plain(20), "train.jsonl")
    write(folder, [{**entry, "id": f"t{n}"} for n, entry in enumerate(plain(4))], "test.jsonl")
    write(folder, [{**plain(1)[0], "image": "11.png", "split": "validation"}], "more.jsonl")
    dataset = chat_records(folder, image_size=8)
    assert sum(len(split.test) for split in dataset.clients.values()) == 4
    assert sum(len(split.train) for split in dataset.clients.values()) == 20
    assert sum(len(split.validation) for split in dataset.clients.values()) == 1


def test_places_can_be_unseen_and_dirichlet_skews_by_a_column(tmp_path: Path) -> None:
    entries = plain(24, place=lambda n: f"p{n // 2 % 3}", type=lambda n: f"t{n // 2 % 2}")
    folder = write(tmp_path / "d", entries)
    dataset = chat_records(folder, image_size=8, unseen=("p0",), validation=0)
    assert len(dataset.unseen["p0"]) == 8
    skewed = chat_records(folder, "dirichlet", clients=2, alpha=0.01, skew="type", image_size=8, validation=0)
    kinds = [set(split.train.types) for split in skewed.clients.values()]
    assert sorted(map(len, kinds)) != [2, 2]


def test_pictures_that_look_alike_have_one_client(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", plain())
    for number in range(12):
        rng = np.random.default_rng(number)
        noisy = rng.integers(0, 30, (9, 8, 3)) + (200 if number % 3 == 0 else 10)
        Image.fromarray(noisy.astype(np.uint8)).save(folder / "images" / f"{number}.png")
    dataset = chat_records(folder, "cluster", clients=2, image_size=8, validation=0)
    owned = [
        {*split.train.image_index.tolist(), *split.test.image_index.tolist()} for split in dataset.clients.values()
    ]
    assert sorted(owned, key=len) == [{0, 3, 6, 9}, {1, 2, 4, 5, 7, 8, 10, 11}]
    skewed = chat_records(folder, "dirichlet", clients=2, skew="cluster", alpha=0.01, image_size=8, validation=0)
    assert len(skewed.clients) == 2


def test_strangers_with_tests_alone_are_a_place(tmp_path: Path) -> None:
    entries = [*plain(), {**plain(1)[0], "client": "z", "image": "11.png", "split": "test"}]
    dataset = chat_records(write(tmp_path / "d", entries), image_size=8)
    assert len(dataset.unseen["newcomers"]) == 1


def test_unreadable_pictures_leave_out_all_that_show_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [*plain(), CHAT, {**CHAT, "id": "text", "images": [], "messages": [
        {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}])  # fmt: skip
    (folder / "images" / "1.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"1 of 12 pictures cannot be read and are left out with 3 examples"):
        dataset = leave_out_unreadable(chat_records(folder, image_size=8, unreadable=0.2, test_share=0, validation=0))
    names = [name for part in parts(dataset) for name in part.names]
    assert "long#0" in names  # shows the readable one alone
    assert "long#1" not in names
    assert "text" in names
    with pytest.raises(ValueError, match=r"more than the share of 0.01 that may be left out \(data.unreadable\)"):
        leave_out_unreadable(chat_records(folder, image_size=8))


FAULTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "none": ([], {}, "expected conversations, got none"),
    "pictures": ([{"question": "q", "answer": "a"}], {}, "expected pictures in the conversations, got none"),
    "place": (
        plain(2),
        {"partition": "place"},
        "expected a text as 'place' for the partition 'place', got no line",
    ),
    "split": ([{**plain(1)[0], "split": "dev"}], {}, "row 1: expected the split train, validation or test, got 'dev'"),
    "twice": ([{**plain(1)[0], "id": "x"}] * 2, {}, "row 2: expected an id of its own, got 'x'"),
    "skew": (plain(), {"partition": "dirichlet", "skew": "type"}, "must be one of answer, client"),
    "share": (plain(), {"test_share": 1.0}, "data.test_share must lie in [0, 1), got 1.0"),
}


@pytest.mark.parametrize(("entries", "options", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_chat_records_are_named(
    entries: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "d", entries)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=re.escape(message)):
        chat_records(folder, image_size=8, **options)


def test_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected files of conversations \(.jsonl or .json; .csv, .tsv or .parquet\) in .*, got none",
    ):
        chat_records(tmp_path)
