"""Data sets of the library datasets as a federation: mapped columns, splits, pictures, faults."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.datasets.hub import hub
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from refusals import refuses

library: Any = pytest.importorskip("datasets")


def picture(number: int) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (9, 8, 3), np.uint8))


def rows(count: int) -> dict[str, list[Any]]:
    return {
        "img": [picture(n // 2) for n in range(count)],
        "query": [f"what is {n}?" for n in range(count)],
        "label": [n % 2 for n in range(count)],
        "hospital": ["ab"[n // 2 % 2] for n in range(count)],
    }


def written(folder: Path, **splits: int) -> str:
    features = library.Features(
        {
            "img": library.Image(),
            "query": library.Value("string"),
            "label": library.ClassLabel(names=["cat", "dog"]),
            "hospital": library.Value("string"),
        }
    )
    made = {name: library.Dataset.from_dict(rows(count), features=features) for name, count in splits.items()}
    library.DatasetDict(made).save_to_disk(str(folder / "set"))
    return str(folder / "set")


COLUMNS = {"image": "img", "question": "query", "answer": "label", "client": "hospital"}


def test_mapped_columns_and_splits_make_a_federation(tmp_path: Path) -> None:
    dataset = hub(written(tmp_path, train=24, test=8), columns=COLUMNS, image_size=8, validation=0.2)
    assert list(dataset.clients) == ["a", "b"]
    assert dataset.answers == ("cat", "dog")  # classes by their names
    assert dataset.kind == "answers"
    split = dataset.clients["a"]
    assert len(split.test) == 4
    assert len(split.train) + len(split.validation) == 12
    assert split.train.images.shape == (12, 8, 8, 3)  # equal pictures once
    first = split.train.names.index("train/0") if "train/0" in split.train.names else None
    if first is not None:
        shown = np.asarray(picture(0).resize((8, 8), Image.Resampling.BILINEAR))
        assert np.abs(split.train.images[split.train.image_index[first]].astype(int) - shown).mean() < 40


def test_partition_by_dirichlet_over_a_column_and_a_limit(tmp_path: Path) -> None:
    source = written(tmp_path, train=80)
    dataset = hub(source, "dirichlet", columns=COLUMNS, clients=2, skew="client", image_size=8, most=60, validation=0)
    assert len(dataset.clients) == 2
    total = sum(len(split.train) + len(split.test) for split in dataset.clients.values())
    assert total == 60


def test_recipe_maps_columns(tmp_path: Path) -> None:
    source = written(tmp_path, train=24)
    (tmp_path / "own.toml").write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "hf"\nsource = "tiny:llava"\n[task]\nname = "chat"\n[data]\n'
        f'name = "hub"\nsource = "{source}"\nimage_size = 16\nvalidation = 0.2\n'
        'columns = {image = "img", question = "query", answer = "label", client = "hospital"}\n[run]\nrounds = 1\n'
    )
    _, data = prepare(load_recipe(tmp_path / "own.toml"))
    assert list(data.clients) == ["a", "b"]


def test_lists_of_pictures_and_conversations_are_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image> and <image>?"}, {"role": "assistant", "content": "no"}]
    features = library.Features(
        {
            "images": library.List(library.Image()),
            "messages": library.List({"role": library.Value("string"), "content": library.Value("string")}),
        }
    )
    given = {"images": [[picture(n), picture(n + 1)] for n in range(6)], "messages": [turns] * 6}
    library.Dataset.from_dict(given, features=features).save_to_disk(str(tmp_path / "set"))
    dataset = hub(str(tmp_path / "set"), clients=1, image_size=8, validation=0)
    assert dataset.kind == "conversations"
    train = next(iter(dataset.clients.values())).train
    assert (train.image_index[:, 1] != train.image_index[:, 0]).all()


def test_paths_of_pictures_are_read_below_the_folder_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    picture(0).save(outside)
    for folder, path, number in (("a", str(outside), 0), ("b", "../outside.png", 0), ("c", "inside.png", 5)):
        set_folder = tmp_path / folder
        given = {"image": [path] + ["inside.png"] * 5, "question": ["q"] * 6, "answer": ["a"] * 6}
        library.Dataset.from_dict(given).save_to_disk(str(set_folder))
        picture(1).save(set_folder / "inside.png")
        if not number:
            with pytest.raises(ValueError, match=r"1 of 2 pictures of .* cannot be read, more than the share"):
                hub(str(set_folder), clients=1, image_size=8, validation=0, test_share=0)
        else:
            dataset = hub(str(set_folder), clients=1, image_size=8, validation=0, test_share=0)
            assert len(next(iter(dataset.clients.values())).train) == 6


def test_pictures_that_cannot_be_read_are_left_out_and_said(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(0).save(buffer, format="PNG")
    images = [{"bytes": buffer.getvalue() if n else b"none", "path": None} for n in range(6)]
    given = {"image": images, "question": ["q"] * 6, "answer": ["a"] * 6}
    features = library.Features(
        {"image": library.Image(), "question": library.Value("string"), "answer": library.Value("string")}
    )
    library.Dataset.from_dict(given, features=features).save_to_disk(str(tmp_path / "set"))
    with pytest.warns(UserWarning, match=r"1 of 2 pictures of .* cannot be read and are left out with 1 conversations"):
        dataset = hub(str(tmp_path / "set"), clients=1, image_size=8, validation=0, test_share=0, unreadable=0.5)
    assert len(next(iter(dataset.clients.values())).train) == 5
    with pytest.raises(ValueError, match=r"more than the share of 0.01 that may be left out \(data.unreadable\)"):
        hub(str(tmp_path / "set"), clients=1, image_size=8)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "column": (
        {"columns": {"image": "photo"}},
        "split 'train': expected the column 'photo' that data.columns names, got img, query",
    ),
    "meaning": ({"columns": {"picture": "img"}}, "data.columns maps to must be one of image, images, question"),
    "split": ({"splits": ["dev"]}, "must be distinct names out of train, got ['dev']"),
    "most": ({"most": 0}, "data.most must be at least 1, got 0"),
    "nothing mapped": (
        {},
        "split 'train': expected columns image, question and answer, or messages, conversations, or prompt",
    ),
}


@pytest.mark.parametrize(("options", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_columns_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    refuses(re.escape(message), hub, written(tmp_path, train=4), image_size=8, **options)


def test_no_data_set_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("expected a data set that can be read", hub, str(tmp_path), image_size=8)
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses(r"needs the package datasets: pip install '.\[hub\]' -c constraints.txt", hub, "owner/name")
