"""Data frames and data sets of the library datasets given as data in Python."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import confed
from command_line import Patch, refused
from confed.datasets.chat_records import chat_records

pandas: Any = pytest.importorskip("pandas")
library: Any = pytest.importorskip("datasets")

COUNT = 16


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8))


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


def columns(pictures: list[Any]) -> dict[str, list[Any]]:
    return {
        "image": pictures,
        "question": [f"what is {n}?" for n in range(COUNT)],
        "answer": ["cat" if n % 4 < 2 else "dog" for n in range(COUNT)],
        "client": ["ab"[n % 2] for n in range(COUNT)],
        "split": ["test" if n >= 12 else "train" for n in range(COUNT)],
    }


def read(data: Any, **keys: Any) -> Any:
    recipe = confed.Recipe(data={"name": data, "image_size": 8, "validation": 0, **keys}, model="vilt_tiny")
    return recipe.construct("data")


def contents(data: Any) -> dict[str, list[Any]]:
    """Client and role -> questions with their pictures."""
    return {
        f"{client} {role}": sorted(
            (question, part.images[part.image_index[row]].tobytes())
            for part in [getattr(split, role)]
            for row, question in enumerate(part.questions)
        )
        for client, split in data.clients.items()
        for role in ("train", "test")
    }


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, list[Any]]:
    """What the reader of files makes of the same rows."""
    for n in range(COUNT):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    pandas.DataFrame(columns([f"{n}.png" for n in range(COUNT)])).to_csv(tmp_path / "all.csv", index=False)
    return contents(chat_records(tmp_path, image_size=8, validation=0))


@pytest.mark.parametrize("kind", ["paths", "relative", "pil", "bytes", "dicts"])
def test_a_data_frame_is_read_as_a_file_is(
    kind: str, expected: dict[str, list[Any]], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "paths": [tmp_path / f"{n}.png" for n in range(COUNT)],
        "relative": [f"{n}.png" for n in range(COUNT)],
        "pil": [picture(n) for n in range(COUNT)],
        "bytes": [png(n) for n in range(COUNT)],
        "dicts": [{"bytes": png(n), "path": None} for n in range(COUNT)],
    }[kind]
    assert contents(read(pandas.DataFrame(columns(given)))) == expected
    assert [len(rows) for rows in expected.values()] == [6, 2, 6, 2]


def test_datasets_and_their_splits_are_read_as_a_file_is(expected: dict[str, list[Any]]) -> None:
    whole = library.Dataset.from_dict(columns([picture(n) for n in range(COUNT)]))
    whole = whole.cast_column("image", library.Image())
    assert contents(read(whole)) == expected
    bare = whole.remove_columns("split")
    splits = library.DatasetDict(train=bare.select(range(12)), test=bare.select(range(12, COUNT)))
    assert contents(read(splits)) == expected


@pytest.mark.parametrize("missing", [np.nan, pandas.NA, pandas.NaT])
def test_columns_of_a_frame_are_mapped_or_refused_by_name(missing: object) -> None:
    frame = pandas.DataFrame(columns([png(n) for n in range(COUNT)]))
    renamed = frame.rename(columns={"question": "query", "client": "hospital"})
    mapped = read(renamed, columns={"question": "query", "client": "hospital"})
    assert contents(mapped) == contents(read(frame))
    with refused(r"^DataFrame.*question and answer.*got image, query, answer, hospital, split"):
        read(renamed)
    frame = frame.astype(object)
    frame.loc[3, "answer"] = missing
    assert "16 rows = 15 used + 1 left out (no answer: row 4)" in read(frame).facts["account"]


def test_a_run_of_a_frame_names_it_and_goes_on_with_it_alone(tmp_path: Path) -> None:
    frame = pandas.DataFrame(columns([picture(n) for n in range(COUNT)]))
    settings: dict[str, Any] = {"method": "fedavg", "rounds": 1, "model": "vilt_tiny", "progress": False}
    run = confed.run("fedvqa_scenes", data={"name": frame, "image_size": 64}, folder=tmp_path / "run", **settings)
    assert run.clients == ("a", "b")
    assert run.recipe.sections["data"]["name"].startswith("session:DataFrame@")
    again = confed.run(
        "fedvqa_scenes", data={"name": frame.copy(), "image_size": 64}, folder=tmp_path / "run", **settings
    )
    assert again.folder == run.folder
    other = frame.assign(answer="cow")
    with refused("data"):
        confed.run("fedvqa_scenes", data={"name": other, "image_size": 64}, folder=tmp_path / "run", **settings)
