"""Official files of multi-label pictures and texts: every reader, the table they become, and what is refused."""

import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.ml_files.coco import COCO_LABELS, COCO_SUPERCATEGORIES, coco_records
from confed.data.ml_files.integrity import cache_folder
from confed.data.ml_files.records import LabelRecord, line_records
from confed.data.ml_files.table import build_table
from confed.data.picture_files import Hdf5Pictures, NamedPictures, PictureFiles, open_pictures
from confed.data.preparation import shown
from confed.data.ragged import PackedTexts
from confed.datasets.flair import (
    FLAIR_LABELS,
    flair_fine_labels,
    flair_hdf5_records,
    flair_records,
    flair_relationship,
)
from confed.datasets.object_labels import voc_records
from confed.datasets.reader import drop_unreadable
from confed.datasets.ucm import UCM_LABELS, ucm_records
from reader_folders import write
from refusals import refuses


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where verdicts on pictures are kept; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home") / "cache"))
    return cache_folder()


def _record(row: int, labels: str, user: str = "", **more: Any) -> LabelRecord:
    return LabelRecord(Path("f"), row, f"r{row}", tuple(labels.split()), picture=f"r{row}.png", user=user, **more)


# COCO ---------------------------------------------------------------------------------------------------------------

INSTANCES = {
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 18, "iscrowd": 0, "segmentation": [[1.5, 2, 3]]},
        {"id": 2, "image_id": 7, "category_id": 1, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 18, "iscrowd": 0},
        {"id": 4, "image_id": 3, "category_id": 17, "iscrowd": 0},
    ],
    "info": {"year": 2017},
    "images": [{"id": i, "file_name": f"{i:012d}.jpg"} for i in (7, 5, 3)],
    "categories": [
        {"id": 18, "name": "dog", "supercategory": "animal"},
        {"id": 17, "name": "cat", "supercategory": "animal"},
        {"id": 1, "name": "person", "supercategory": "person"},
    ],
}


def test_coco_categories_groups_crowds_and_empty_pictures(tmp_path):
    file = write(tmp_path / "i.json", INSTANCES)
    assert [(r.name, r.picture, r.labels) for r in coco_records(file)] == [
        ("coco-7", "000000000007.jpg", ("person", "dog")),
        ("coco-5", "000000000005.jpg", ()),
        ("coco-3", "000000000003.jpg", ("cat",)),
    ]
    assert [r.labels for r in coco_records(file, level="supercategory")] == [("person", "animal"), (), ("animal",)]


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("images", {"id": 5, "file_name": "x.jpg"}, "row 4 of images: expected an id of its own, got that of row 2"),
        ("images", {"id": 6, "file_name": "../x.jpg"}, "without a way out of its folder"),
        ("annotations", {"id": 4, "image_id": 3, "category_id": 17}, "row 5: the id 4 is that of row 4"),
        ("annotations", {"id": 5, "image_id": 99, "category_id": 17}, "each picture described in the file, got 99"),
        ("annotations", {"id": 5, "image_id": 3, "category_id": 2}, "each category described in the file, got 2"),
        ("categories", {"id": 1, "name": "person"}, "row 4 of categories: expected an id of its own, got 1 again"),
    ],
)
def test_malformed_coco_files_are_refused(tmp_path, key, entry, message):
    file = write(tmp_path / "i.json", {**INSTANCES, key: [*INSTANCES[key], entry]})
    refuses(message, list, coco_records(file))


def test_coco_cut_off_or_without_a_list(tmp_path):
    content = json.dumps(INSTANCES)
    for cut in (40, 200, len(content) - 2):
        refuses(r"i\.json.*cut off", list, coco_records(write(tmp_path / "i.json", content[:cut])))
    with pytest.raises(ValueError, match="got no 'categories'"):
        list(coco_records(write(tmp_path / "i.json", {k: v for k, v in INSTANCES.items() if k != "categories"})))


def test_real_coco_agrees_with_its_label_lines(real_data, tmp_path):
    folder = real_data / "coco_mini_train"
    file = folder / "instances_train2017_mini.json"
    if not file.is_file():
        pytest.skip("no COCO pictures here")
    table = build_table(coco_records(file), COCO_LABELS)[""]
    lines = {row["image"]: row for row in map(json.loads, (folder / "labels.jsonl").read_text().splitlines())}
    assert len(table) == len(lines) == 175
    for row in range(len(table)):
        assert set(table.labels_of(row)) == set(lines[table.pictures[row]]["labels"])
    groups = build_table(coco_records(file, level="supercategory"), COCO_SUPERCATEGORIES)[""]
    assert all(
        set(groups.labels_of(row)) == set(lines[groups.pictures[row]]["supercategories"]) for row in range(len(groups))
    )
    kept, pictures = drop_unreadable(table, folder / "images.tar", 32)
    assert kept is table
    assert pictures[np.arange(3)].shape == (3, 32, 32, 3)


# VOC ----------------------------------------------------------------------------------------------------------------


def _voc(folder: Path, name: str, objects: list[tuple[str, int]]) -> None:
    inner = "".join(f"<object><name>{n}</name><difficult>{d}</difficult></object>" for n, d in objects)
    write(folder / "Annotations" / f"{name}.xml", f"<annotation><filename>{name}.jpg</filename>{inner}</annotation>")


def test_voc_leaves_difficult_objects_out(tmp_path):
    folder = tmp_path / "VOC2007"
    _voc(folder, "000001", [("cat", 0), ("sofa", 1), ("cat", 1)])
    _voc(folder, "000002", [])
    write(folder / "ImageSets/Main/train.txt", "000001\n000002\n\n")
    assert [(r.name, r.picture, r.labels, r.split) for r in voc_records(folder, "train")] == [
        ("VOC2007-000001", "000001.jpg", ("cat",), "train"),
        ("VOC2007-000002", "000002.jpg", (), "train"),
    ]
    for change, message in [
        ("<annotation><obj", r"000002\.xml: expected an XML file.*cut off"),
        ("<other/>", r"000002\.xml: expected an <annotation>, got <other>"),
        ("<annotation><object/></annotation>", "expected a name and difficult 0 or 1 of object 0"),
    ]:
        write(folder / "Annotations/000002.xml", change)
        refuses(message, list, voc_records(folder, "train"))
    write(folder / "ImageSets/Main/train.txt", "000001\n000001\n")
    refuses(r"row 2: the picture '000001' is that of row 1 already", list, voc_records(folder, "train"))
    refuses(r"Main/val\.txt does not exist", list, voc_records(folder, "val"))


def test_sample_of_voc_is_read(real_data):
    folder = real_data / "format_samples/voc/VOC2007"
    if not folder.is_dir():
        pytest.skip("no sample of VOC here")
    records = voc_records(folder, "trainval")
    assert next(records).labels == ("cat",)  # its sofa is difficult
    refuses(r"900002.xml does not exist; row 2 of", next, records)


# FLAIR --------------------------------------------------------------------------------------------------------------

FLAIR = [
    # user, image, coarse, fine, partition; one user's pictures need not stand together
    ("b@N00", "11", ["plant", "outdoor"], ["grass", "blue_sky"], "train"),
    ("a@N00", "12", [], [], "train"),
    ("b@N00", "13", ["food"], ["waffle"], "train"),
    ("c@N00", "14", ["food"], ["bread", "waffle"], "test"),
]


def _metadata(file: Path, rows: list = FLAIR) -> Path:
    keys = ("user_id", "image_id", "labels", "fine_grained_labels", "partition")
    return write(file, [dict(zip(keys, row, strict=True)) for row in rows])


def test_flair_users_stand_together(tmp_path):
    tables = build_table(flair_records(_metadata(tmp_path / "m.json")), FLAIR_LABELS)
    assert list(tables) == ["train", "test"]
    train = tables["train"]
    assert list(train.names) == ["11", "13", "12"]
    assert list(train.pictures) == ["11.jpg", "13.jpg", "12.jpg"]
    assert {user: rows.tolist() for user, rows in train.of_users().items()} == {"b@N00": [0, 1], "a@N00": [2]}
    assert [train.labels_of(row) for row in range(3)] == [("outdoor", "plant"), ("food",), ()]
    assert (train.rows_without_labels, train.users_without_labels) == (1, 1)
    expected = np.zeros((2, 17), dtype=np.float32)
    expected[1, [FLAIR_LABELS.index("outdoor"), FLAIR_LABELS.index("plant")]] = 1
    np.testing.assert_array_equal(train.targets([2, 0]), expected)
    assert "1 without any label" in train.facts()["users"]
    fine = build_table(flair_records(tmp_path / "m.json"), level="fine")["test"]
    assert fine.labels == ("blue_sky", "bread", "grass", "waffle")
    assert fine.labels_of(0) == ("bread", "waffle")


def test_relationships_of_flair_labels_are_read(tmp_path):
    file = write(tmp_path / "r.txt", "waffle -> food\n(grass, plant)\n\nblue_sky\toutdoor\n")
    assert flair_relationship(file) == {"waffle": "food", "grass": "plant", "blue_sky": "outdoor"}
    assert flair_fine_labels(file) == ("blue_sky", "grass", "waffle")
    for line, message in [
        ("waffle", "row 1: expected 'fine label -> coarse label'"),
        ("waffle -> foot", "row 1: expected one of the 17 coarse labels, got 'foot'"),
        ("waffle -> food\nwaffle -> art", "row 2: expected 'food', as before, for 'waffle'"),
    ]:
        refuses(message, flair_relationship, write(file, line))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*FLAIR, FLAIR[0]], "row 5: the image_id '11' is that of row 1"),
        ([*FLAIR, ("b@N00", "15", [], [], "val")], "expected the partition train, as before, for the user b@N00"),
        ([*FLAIR, ("d@N00", "15", [], [], "dev")], "expected the partition train, val or test, got 'dev'"),
        ([*FLAIR, ("d@N00", "15", "food", [], "val")], "row 5: expected a list of texts as 'labels'"),
        ([*FLAIR, ("d@N00", "a/../../b", ["food"], [], "val")], "without a way out"),
        ([*FLAIR, *(("d@N00", f"2{n}", [f"odd{n}"], [], "val") for n in range(7))],
         r"7 labels are outside the 17 that are known: 'odd0' \(1 times, first in .*row 5\).*'odd4'.* and 2 more$"),
    ],
)  # fmt: skip
def test_malformed_flair_metadata_are_refused(tmp_path, rows, message):
    refuses(message, build_table, flair_records(_metadata(tmp_path / "m.json", rows)), FLAIR_LABELS)


def test_sample_of_flair_is_read(real_data, tmp_path):
    file = real_data / "format_samples/flair/labels_and_metadata.json"
    if not file.is_file():
        pytest.skip("no sample of FLAIR here")
    tables = build_table(flair_records(file), FLAIR_LABELS)
    assert {split: len(table) for split, table in tables.items()} == {"train": 2, "val": 1, "test": 1}
    assert tables["train"].labels_of(0) == ("equipment", "structure")
    cut = write(tmp_path / "cut.json", file.read_text()[:-30])
    refuses(r"cut\.json, row 4: .*is it cut off", list, flair_records(cut))


@pytest.mark.parametrize("layout", ["joined", "pairs", "ungrouped"])
def test_flair_hdf5_says_what_the_metadata_says(tmp_path, layout):
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    pixels = {row[1]: rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for row in FLAIR}
    coarse, fine = (sorted({label for row in FLAIR for label in row[level]}) for level in (2, 3))
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        if layout == "pairs":
            for key, names in (("label_mapping", coarse), ("fine_grained_label_mapping", fine)):
                file[f"metadata/{key}"] = json.dumps({name: n for n, name in enumerate(names)})
        for user in dict.fromkeys(row[0] for row in FLAIR):
            own = [row for row in FLAIR if row[0] == user]
            base = f"{own[0][4]}/{user}"
            if layout == "ungrouped":
                for _, image, *levels, split in own:
                    file[f"{split}/{image}/image"], file[f"{split}/{image}/user_id"] = pixels[image], user
                    for key, labels in zip(("labels", "fine_grained_labels"), levels, strict=True):
                        file[f"{split}/{image}/{key}"] = "|".join(labels)
                continue
            file[f"{base}/images"] = np.stack([pixels[row[1]] for row in own])
            file[f"{base}/image_ids"] = np.array([row[1] for row in own], dtype="S")
            for level, key, names in ((2, "labels", coarse), (3, "fine_grained_labels", fine)):
                if layout == "joined":
                    file[f"{base}/{key}"] = np.array(["|".join(row[level]) for row in own], dtype="S")
                else:
                    pairs = [(n, names.index(label)) for n, row in enumerate(own) for label in row[level]]
                    file[f"{base}/{key}_row"] = np.array([p[0] for p in pairs], dtype=np.uint16)
                    file[f"{base}/{key}_col"] = np.array([p[1] for p in pairs], dtype=np.uint16)
    by_image = {record.name: record for record in flair_hdf5_records(tmp_path / "f.hdf5")}
    assert len(by_image) == len(FLAIR)
    for user, image, labels, fine_labels, split in FLAIR:
        record = by_image[image]
        assert (record.user, record.split) == (user, split)
        assert (set(record.labels), set(record.fine)) == (set(labels), set(fine_labels))
    train = build_table(by_image.values(), FLAIR_LABELS)["train"]
    kept, pictures = drop_unreadable(train, tmp_path / "f.hdf5", 8, check="present")
    assert kept is train
    np.testing.assert_array_equal(pictures[np.arange(3)], np.stack([pixels[name] for name in train.names]))
    np.testing.assert_array_equal(pictures[2], pixels[train.names[2]])


def test_damaged_hdf5_files_of_flair_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    damaged = tmp_path / "d.hdf5"
    damaged.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 50)
    refuses(r"d\.hdf5: expected a complete HDF5 file", list, flair_hdf5_records(damaged))
    with h5py.File(tmp_path / "e.hdf5", "w") as file:
        file["train/a/images"], file["train/a/image_ids"] = np.zeros((1, 4, 4, 3), np.uint8), np.array(["1"], "S")
    refuses(r"/train/a: expected labels, or labels_row, labels_col", list, flair_hdf5_records(tmp_path / "e.hdf5"))
    with pytest.raises(ValueError, match=r"expected the pictures train/b/images#0 \.\.\., got"):
        open_pictures(tmp_path / "e.hdf5", PackedTexts.of(["train/b/images#0"]), 4)[0]


# UC Merced and JSON lines -------------------------------------------------------------------------------------------


def test_real_ucm_labels_are_read(real_data):
    folder = real_data / "ucm_multilabel"
    if not folder.is_dir():
        pytest.skip("no aerial photographs here")
    assert list(UCM_LABELS) == json.loads((folder / "classes.json").read_text())["labels"]
    tables = build_table(ucm_records(folder), UCM_LABELS)
    assert {split: len(table) for split, table in tables.items()} == {"train": 1176, "val": 168, "test": 336}
    assert all(len(table.users) == 6 for table in tables.values())
    # The data set's own description: 3.3 labels a picture, 1 to 7.
    per_row = np.concatenate([table.present.lengths for table in tables.values()])
    assert (per_row.min(), per_row.max(), round(per_row.mean(), 1)) == (1, 7, 3.3)
    rows = {row["image"]: row for row in map(json.loads, (folder / "labels.jsonl").read_text().splitlines())}
    counted = [sum(label in row["labels"] for row in rows.values()) for label in UCM_LABELS]
    assert sum(table.counts() for table in tables.values()).tolist() == counted


def test_text_lines_and_what_they_must_hold(tmp_path):
    file = write(
        tmp_path / "t.jsonl",
        [
            {"text": "heavy rain", "labels": ["weather", "alert"], "user": "u", "split": "train"},
            {"text": "kein Öl", "labels": [], "id": "x", "user": "v", "split": "train"},
        ],
        lines=True,
    )
    table = build_table(line_records(file))["train"]
    assert table.texts is not None
    assert (list(table.names), list(table.texts)) == (["0", "x"], ["heavy rain", "kein Öl"])
    assert (table.labels, list(table.users), table.labels_of(0)) == (("alert", "weather"), ["u", "v"], table.labels)
    for row, message in [
        ({"labels": []}, "row 1: expected a picture or a text, got neither"),
        ({"text": "a"}, "row 1: expected a list of texts as 'labels', got None"),
        ({"text": "a", "labels": [" "]}, "expected the names of labels, got an empty one"),
        ({"text": "a", "labels": [], "user": [3]}, r"row 1: expected a text as 'user', got \[3\]"),
        ({"image": "/etc/x.png", "labels": []}, "without a way out of its folder"),
    ]:
        refuses(message, list, line_records(write(file, [row], lines=True)))
    twice = {"image": "a.png", "labels": []}
    refuses(r"row 2: the id 'a\.png' is that of row 1", list, line_records(write(file, [twice, twice], lines=True)))
    with pytest.raises(ValueError, match=r"row 2: expected one JSON object.*cut off"):
        list(line_records(write(file, json.dumps(twice) + '\n{"image": "b')))


# The table ----------------------------------------------------------------------------------------------------------


def test_packed_texts_are_a_sequence():
    words = ["", "a", "Ärger", "名"]
    packed = PackedTexts.of(words)
    assert list(packed) == words
    assert packed[-1] == "名"
    assert list(packed[1:3]) == words[1:3]
    assert list(packed.take(np.array([3, 0, 3]))) == ["名", "", "名"]
    with pytest.raises(IndexError):
        packed[4]
    assert list(PackedTexts.of([])) == []


def test_table_against_plain_lists():
    """Random rows; every array is compared with what lists and dictionaries say."""
    rng = np.random.default_rng(3)
    names = [f"l{n}" for n in range(9)]
    records = [
        _record(row, " ".join(rng.permutation(names)[: rng.integers(0, 4)]), f"u{rng.integers(0, 12)}")
        for row in range(60)
    ]
    table = build_table(records, names)[""]
    by_user: dict[str, list[LabelRecord]] = {}
    for record in records:
        by_user.setdefault(record.user, []).append(record)
    ordered = [record for own in by_user.values() for record in own]
    assert list(table.names) == [record.name for record in ordered]
    assert list(table.users) == list(by_user)
    np.testing.assert_array_equal(table.sizes, [len(own) for own in by_user.values()])
    hot = np.array([[name in record.labels for name in names] for record in ordered], dtype=np.float32)
    np.testing.assert_array_equal(table.targets(np.arange(60)), hot)
    np.testing.assert_array_equal(table.counts(), hot.sum(axis=0))
    assert table.users_without_labels == sum(not any(r.labels for r in own) for own in by_user.values())

    mask = rng.random(60) < 0.3
    kept = table.keep(mask)
    staying = [record for record, stays in zip(ordered, mask, strict=True) if stays]
    assert list(kept.names) == [record.name for record in staying]
    assert [kept.labels_of(row) for row in range(len(kept))] == [tuple(sorted(r.labels)) for r in staying]
    assert {user: [kept.names[row] for row in rows] for user, rows in kept.of_users().items()} == {
        user: [r.name for r in staying if r.user == user] for user in dict.fromkeys(r.user for r in staying)
    }

    turned = table.in_order((*reversed(names), "new"))
    np.testing.assert_array_equal(turned.targets(np.arange(60))[:, :9], hot[:, ::-1])
    assert (np.diff(turned.present.values)[np.diff(np.repeat(np.arange(60), turned.present.lengths)) == 0] > 0).all()


def test_tables_with_faulty_records_are_refused():
    refuses("at least one picture or text", build_table, [])
    refuses("the identifier 'r0' comes twice", build_table, [_record(0, "a"), _record(0, "b")])
    refuses("some rows have one and others do not", build_table, [_record(0, "a", "u"), _record(1, "b")])
    refuses("the names of labels must differ, got 'a'", build_table, [_record(0, "a")], ["a", "b", "a"])
    refuses("has no users", build_table([_record(0, "a")])[""].of_users)


# Pictures -----------------------------------------------------------------------------------------------------------


def _png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((6, 9, 3), shade, dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def _damaged(root: Path, packed: bool) -> Path:
    """Ten pictures, of which one is cut off, one is empty and one is missing."""
    files = {f"r{n}.png": _png(10 * n) for n in range(10)}
    files["r3.png"], files["r7.png"] = files["r3.png"][:50], b""
    del files["r8.png"]
    source = root / "p.tar" if packed else root / "p"
    if packed:
        with tarfile.open(source, "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        source.mkdir()
        for name, content in files.items():
            (source / name).write_bytes(content)
    return source


PACKED = pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
TEN = build_table([_record(n, "a", f"u{n // 2}") for n in range(10)])[""]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pictures that were decoded to see whether they can be."""
    names: list[str] = []
    fault = NamedPictures.fault

    def spy(pictures: NamedPictures, row: int) -> str:
        names.append(pictures.names[row])
        return fault(pictures, row)

    monkeypatch.setattr(NamedPictures, "fault", spy)
    return names


@PACKED
@pytest.mark.parametrize("hold", [0, 1 << 20], ids=["on disk", "in memory"])
def test_unreadable_pictures_are_left_out_up_to_a_share(tmp_path, packed, hold):
    source = _damaged(tmp_path, packed)
    with pytest.warns(UserWarning, match=r"^3 of 10 pictures in .* cannot be read and are left out; .*r3\.png"):
        kept, pictures = drop_unreadable(TEN, source, 4, at_most=0.3, hold=hold)
    assert isinstance(pictures, np.ndarray) == bool(hold)
    assert kept.unreadable == ("r3.png", "r7.png", "r8.png")
    assert "3 pictures left out: 'r3.png', 'r7.png', 'r8.png'" in kept.facts()["unreadable"]
    assert [int(picture[0, 0, 0]) for picture in pictures[np.arange(len(kept))]] == [0, 10, 20, 40, 50, 60, 90]
    assert list(kept.users) == ["u0", "u1", "u2", "u3", "u4"]
    assert pictures[np.array([], dtype=np.int64)].shape == (0, 4, 4, 3)
    with pytest.raises(ValueError, match=r"3 of 10 pictures in .* more than the share of 0\.2 .*r3\.png"):
        drop_unreadable(TEN, source, 4, at_most=0.2, hold=hold)
    refuses(r"expected .*nowhere, got none", open_pictures, tmp_path / "nowhere", TEN.pictures, 4)


@PACKED
def test_pictures_on_trust_say_what_would_have_left_them_out(tmp_path, packed, decoded):
    source = _damaged(tmp_path, packed)
    with pytest.warns(UserWarning, match=r"^2 of 10 pictures"):
        kept, pictures = drop_unreadable(TEN, source, 4, at_most=0.2, check="present")
    assert kept.unreadable == ("r7.png", "r8.png")
    assert not decoded
    for index in (3, np.array([2, 3])):
        with pytest.raises(ValueError, match=r'r3\.png.*; data\.check = "decoded" would leave it out$'):
            pictures[index]
    with pytest.warns(UserWarning, match=r"^3 of 10 pictures"):
        checked = drop_unreadable(TEN, source, 4, at_most=0.3)[1]
    assert isinstance(checked, NamedPictures)
    assert "could be read when" in checked.advice


@PACKED
@pytest.mark.filterwarnings("ignore:. of (10|5) pictures")
def test_a_verdict_is_remembered_until_a_picture_changes(tmp_path, packed, cache, decoded):
    source = _damaged(tmp_path, packed)
    first = drop_unreadable(TEN, source, 4, at_most=0.3)[0]
    assert sorted(decoded) == [f"r{n}.png" for n in range(10)]
    (file,) = cache.iterdir()
    bad = {"3": "r3.png", "7": "r7.png", "8": "r8.png"}
    assert json.loads(file.read_text()) == {"source": str(source), "pictures": 10, "unreadable": bad}
    decoded.clear()
    again = drop_unreadable(TEN, source, 8, at_most=0.3)[0]  # of another size: decoding is the same
    assert again.unreadable == first.unreadable
    assert sorted(decoded) == ["r3.png", "r7.png", "r8.png"]  # it may have been the disk that failed
    refuses("more than the share", drop_unreadable, TEN, source, 4, at_most=0.1)
    decoded.clear()
    drop_unreadable(TEN.keep(np.arange(10) < 5), source, 4, at_most=0.3)  # others of the same pictures
    assert len(decoded) == 5
    if packed:
        os.utime(source, ns=(1, 1))
    else:
        (source / "r3.png").write_bytes(_png(30))
    decoded.clear()
    assert len(drop_unreadable(TEN, source, 4, at_most=0.3)[0].unreadable) == 2 + packed
    assert len(decoded) == 10


@pytest.mark.filterwarnings("ignore:. of 10 pictures")
def test_pictures_that_can_be_read_again_are_no_longer_left_out(tmp_path, cache, decoded, monkeypatch):
    source = _damaged(tmp_path, packed=False)
    read = PictureFiles._read

    def away(pictures: PictureFiles, rows: list[int]) -> np.ndarray:
        if rows == [5]:
            raise ValueError("r5.png: the network is down")
        return read(pictures, rows)

    with monkeypatch.context() as patch:
        patch.setattr(PictureFiles, "_read", away)
        assert "r5.png" in drop_unreadable(TEN, source, 4, at_most=0.4)[0].unreadable
    for _ in range(2):
        decoded.clear()
        assert drop_unreadable(TEN, source, 4, at_most=0.3)[0].unreadable == ("r3.png", "r7.png", "r8.png")
    assert sorted(decoded) == ["r3.png", "r7.png", "r8.png"]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:. of 10 pictures")
@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "\0\xff", "[" * 100_000, '{"pictures": 10}', '{"pictures": 9, "unreadable": {}}',
        '{"pictures": 10, "unreadable": []}', '{"pictures": 10, "unreadable": {"x": "r3.png"}}',
        '{"pictures": 10, "unreadable": {"4": "r3.png"}}', '{"pictures": 10, "unreadable": {"12": "r3.png"}}',
    ],
)  # fmt: skip
def test_a_damaged_verdict_does_not_count(tmp_path, cache, decoded, content):
    source = _damaged(tmp_path, packed=False)
    drop_unreadable(TEN, source, 4, at_most=0.3)
    (file,) = cache.iterdir()
    sound = file.read_bytes()
    file.write_text(content, encoding="latin-1")
    decoded.clear()
    assert len(drop_unreadable(TEN, source, 4, at_most=0.3)[0].unreadable) == 3
    assert len(decoded) == 10
    assert [file.read_bytes() for file in cache.iterdir()] == [sound]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("home", ["a file in its place", "no home"])
def test_where_nothing_can_be_remembered_one_line_says_so(tmp_path, monkeypatch, home):
    source = _damaged(tmp_path, packed=False)
    if home == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _homeless)
    else:
        (tmp_path / "cache").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            drop_unreadable(TEN, source, 4, at_most=0.3)
        assert len(said) == 2
        assert "cannot be remembered, so the next run decodes all of them again" in str(said[0].message)
        assert "3 of 10 pictures" in str(said[1].message)


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_relative_cache_folder_does_not_count(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path.home() / ".cache" / "confed" / "pictures"


@pytest.mark.filterwarnings("ignore:. of 200 pictures")
def test_a_check_is_shown_and_stops_at_once(tmp_path, cache, monkeypatch):
    table = build_table([_record(n, "a") for n in range(200)])[""]
    for n in range(1, 200):
        (tmp_path / f"r{n}.png").write_bytes(_png(n))
    steps: list[tuple[str, int]] = []
    told: list[int] = []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Callable[[int], None]]:
        steps.append((what, total))
        yield told.append

    with shown(show):
        for _ in range(2):  # the second time nothing takes long
            drop_unreadable(table, tmp_path, 4)
    assert steps == [(f"checking the pictures in {tmp_path.name}", 200)]
    assert told == [64, 128, 192, 200]

    @contextmanager
    def stop(what: str, total: int) -> Iterator[Callable[[int], None]]:
        del what, total

        def raising(done: int) -> None:
            raise KeyboardInterrupt

        yield raising

    (tmp_path / "r0.png").write_bytes(_png(0))
    with shown(stop), pytest.raises(KeyboardInterrupt):
        drop_unreadable(table, tmp_path, 4)
    assert len(list(cache.iterdir())) == 1  # half a verdict is none


def test_arrays_of_an_hdf5_file_are_checked_too(tmp_path, cache, decoded):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file["r0.png"], file["r1.png"] = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)
    table = build_table([_record(n, "a") for n in range(3)])[""]
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"^2 of 3 pictures in .*f\.hdf5, r1\.png: expected a picture \(H, W, 3\)"):
            kept, pictures = drop_unreadable(table, tmp_path / "f.hdf5", 4, at_most=0.7)
        assert kept.unreadable == ("r1.png", "r2.png")
        assert isinstance(pictures, Hdf5Pictures)
    assert len(decoded) == 5  # all three, then those two again
    assert len(list(cache.iterdir())) == 1
