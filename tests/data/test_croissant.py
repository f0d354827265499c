"""Croissant metadata: files with their digests, columns with their meaning, and the same examples read back.

The slow test needs the program `mlcroissant` of the package of that name, which brings rdflib, pandas and others and is
therefore in an environment of its own: CONFED_MLCROISSANT is its path.
"""

import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coloured_labels import colours_dataset
from command_line import confed
from confed.data.croissant import METADATA, write_croissant
from confed.data.examples import Examples, Split
from confed.datasets.chat_records import chat_records
from refusals import refuses
from toy_federation import squares

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "examples.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_files_have_their_digests_and_columns_their_sources(tmp_path: Path) -> None:
    files = write_croissant(squares(4, 2), tmp_path / "a", "a test")
    assert [path.name for path in files] == [METADATA, "examples.csv", "pictures.zip"]
    told = json.loads(files[0].read_text())
    for entry in told["distribution"][:2]:
        content = (tmp_path / "a" / entry["contentUrl"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["contentSize"] == f"{len(content)} B"
    columns = [field["source"]["extract"]["column"] for field in told["recordSet"][0]["field"]]
    assert columns == list(rows_of(tmp_path / "a")[0])
    (image,) = [field for field in told["recordSet"][0]["field"] if "references" in field]
    assert image["references"]["field"]["@id"] == told["recordSet"][1]["key"]["@id"] == "pictures/path"
    assert told["recordSet"][0]["key"] == {"@id": "examples/id"}
    again = write_croissant(squares(4, 2), tmp_path / "b", "a test")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]


def test_examples_and_pictures_are_those_of_the_dataset(tmp_path: Path) -> None:
    dataset = squares(4, 2)
    write_croissant(dataset, tmp_path / "a")
    rows = rows_of(tmp_path / "a")
    warm = [row for row in rows if (row["client"], row["split"]) == ("warm", "train")]
    train = dataset.clients["warm"].train
    assert [row["answer"] for row in warm] == list(train.answers)
    with zipfile.ZipFile(tmp_path / "a" / "pictures.zip") as archive:
        for number, row in enumerate(warm):
            picture = np.asarray(Image.open(io.BytesIO(archive.read(row["image"]))))
            assert np.array_equal(picture, np.asarray(train.images)[number])
    assert len(rows) == 3 * (4 + 2 + 2) + 2
    assert {row["split"] for row in rows if row["place"] == "everything"} == {"test"}


@pytest.mark.parametrize("text", ["two\rlines?", "two\nlines?", 'a "b", c\r\n?'])
def test_texts_of_several_lines_are_read_back_as_they_are(tmp_path: Path, text: str) -> None:
    dataset = squares(4, 2)
    split = dataset.clients["warm"]
    asked = replace(split.train, questions=[text, *split.train.questions[1:]])
    clients = {"warm": replace(split, train=asked)}
    write_croissant(replace(dataset, clients=clients, unseen={}), tmp_path / "a")
    rows = rows_of(tmp_path / "a")
    assert len(rows) == 4 + 2 + 2
    assert rows[0]["question"] == text


def test_unpacked_folder_is_a_dataset_again(tmp_path: Path) -> None:
    dataset = squares(4, 2)
    write_croissant(dataset, tmp_path / "a")
    shutil.unpack_archive(tmp_path / "a" / "pictures.zip", tmp_path / "a")
    read = chat_records(tmp_path / "a", "place", files=["examples.csv"], unseen=["everything"], image_size=64)
    assert list(read.unseen) == ["everything"]
    for name, split in dataset.clients.items():
        mine = read.clients[name].train
        assert sorted(mine.answers) == sorted(split.train.answers)
        wanted = sorted(picture.tobytes() for picture in np.asarray(split.train.images))
        assert sorted(np.asarray(mine.images[int(index)]).tobytes() for index in mine.image_index) == wanted


def test_labels_and_kinds_of_pictures(tmp_path: Path) -> None:
    dataset = colours_dataset()
    write_croissant(dataset, tmp_path / "a")
    rows = rows_of(tmp_path / "a")
    first = dataset.clients["u0"].train
    assert json.loads(rows[0]["labels"]) == list(first.labels.table.labels_of(int(first.image_index[0])))
    assert {row["type"] for row in rows} == {"pen", "ink"}
    assert "question" not in rows[0]


def test_pictures_that_examples_share_are_written_once(tmp_path: Path) -> None:
    dataset = squares(4, 2)
    shared = replace(dataset.clients["warm"].train, image_index=np.zeros(4, np.int64))
    clients = {"warm": replace(dataset.clients["warm"], train=shared)}
    write_croissant(replace(dataset, clients=clients, unseen={}), tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a" / "pictures.zip") as archive:
        assert len(archive.namelist()) == 1 + 2 + 2


def test_repeated_identifiers_are_no_key(tmp_path: Path) -> None:
    dataset = squares(4, 2)
    write_croissant(replace(dataset, unseen={"twice": dataset.clients["warm"].test}), tmp_path / "a")
    assert "key" not in json.loads((tmp_path / "a" / METADATA).read_text())["recordSet"][0]


def test_what_cannot_be_written_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from confed.data.picture_tables import NoPictures
    from confed.data.regions import HeldRegions

    dataset = squares(4, 2)

    def bare(part: Examples) -> Examples:
        count = len(part)
        regions = HeldRegions(np.zeros((count, 1, 2), np.float32), np.zeros((count, 1, 4), np.float32))
        return replace(part, images=NoPictures(count), regions=regions)

    split = dataset.clients["warm"]
    features = replace(dataset, clients={"warm": Split(*(bare(part) for part in split.roles.values()))})
    refuses("the examples of 'warm' have features in place of pictures", write_croissant, features, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert confed("data", "describe", "squares", "train=4", "test=2", "--croissant", tmp_path / "full") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "exists already; name a folder that does not" in line


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CONFED_MLCROISSANT"), reason="needs the program mlcroissant")
@pytest.mark.parametrize("labelled", [False, True])
def test_mlcroissant_validates_and_reads(tmp_path: Path, labelled: bool) -> None:
    write_croissant(colours_dataset() if labelled else squares(4, 2), tmp_path / "a")

    def program(*words: str) -> str:
        command = [os.environ["CONFED_MLCROISSANT"], *words, "--jsonld", METADATA]
        done = subprocess.run(command, cwd=tmp_path / "a", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "error" not in program("validate").lower()
    count = len(rows_of(tmp_path / "a"))
    read = program("load", "--record_set", "examples", "--num_records", "-1")
    assert read.count("'examples/id'") == count
    assert "PngImageFile" in program("load", "--record_set", "pictures", "--num_records", "1")
