"""Registered multi-label datasets from made-up files in the official formats, and what they refuse."""

import io
import json
import math
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from command_line import confed
from confed.api.progress import Display
from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, federate, label_floors
from confed.data.ml_files.coco import COCO_GROUPS, COCO_LABELS, COCO_SUPERCATEGORIES
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import build_table
from confed.data.options import Options
from confed.data.partitions import label_skew
from confed.data.preparation import step
from confed.datasets.flair import FLAIR_LABELS, flair, flair_fine_names, flair_hdf5_records, flair_relationship
from confed.datasets.object_labels import coco, voc
from confed.datasets.tagged_texts import TAGS, captions, tagged_texts
from confed.datasets.ucm import UCM_LABELS, ucm_labels
from confed.models.ctran import ctran_mini
from confed.models.label_embeddings import LabelEmbeddings, load_label_embeddings, save_label_embeddings
from confed.prepare.label_embeddings import label_names, write_label_embeddings
from confed.recipes.recipe import load_recipe
from confed.registry import datasets
from confed.results.folder import read_jsonl
from confed.runs.run import load_data, run
from reader_folders import coco_split, flair_folder, picture, voc_year
from refusals import refuses
from repository import ROOT

REAL = Path(os.environ.get("CONFED_DATA", ROOT.parent / "shared" / "data"))


def _shades(part: Examples) -> list[int]:
    """The first value of every example's picture."""
    return [int(part.images[int(row)][0, 0, 0]) for row in part.image_index]


def _rows(dataset: FederatedDataset, role: str) -> list[str]:
    return [name for split in dataset.clients.values() for name in getattr(split, role).names]


def _all_disjoint(dataset: FederatedDataset) -> None:
    names = [name for role in ("train", "validation", "test") for name in _rows(dataset, role)]
    assert len(names) == len(set(names))


# UC Merced ----------------------------------------------------------------------------------------------------------

SCENES = {"forest": "nature", "river": "water", "harbor": "water"}


@pytest.fixture
def ucm(tmp_path: Path) -> Path:
    rows = []
    for place, (use, scene) in enumerate(SCENES.items()):
        for number in range(10):
            name = f"{use}{number:02d}.png"
            picture(tmp_path / "images" / name, 20 * place + number)
            labels = ["trees", "water"] if scene == "water" and number % 2 else ["trees"]
            split = "val" if number == 7 else "test" if number > 7 else "train"
            rows.append({"image": name, "land_use": use, "scene": scene, "labels": labels, "split": split})
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_ucm_by_scene(ucm: Path) -> None:
    dataset = datasets["ucm_labels"](ucm, image_size=4)
    assert dataset.answers == UCM_LABELS
    assert list(dataset.clients) == ["nature", "water"]
    water = dataset.clients["water"]
    assert [len(part) for part in (water.train, water.validation, water.test)] == [14, 2, 4]
    assert list(water.train.names)[:2] == ["ucm-river00.png", "ucm-river01.png"]
    hot = water.train.labels.dense()
    assert hot[:, UCM_LABELS.index("trees")].all()
    assert hot[:, UCM_LABELS.index("water")].tolist() == [0, 1, 0, 1, 0, 1, 0] * 2
    # Row numbers are those of the picture table: shade 20 for river00, 21 for river01, ...
    assert _shades(water.train)[:3] == [20, 21, 22]
    assert water.train.types is not None
    assert set(water.train.types) == {"water"}
    held = ucm_labels(ucm, unseen=("water",), image_size=4)
    assert list(held.clients) == ["nature"]
    assert len(held.unseen["water"]) == 6  # validation and test pictures
    assert "6 elsewhere" in held.facts["counts"]
    with tarfile.open(ucm / "images.tar", "w") as tar:
        for file in (ucm / "images").iterdir():
            tar.add(file, file.name)
            file.unlink()
    packed = ucm_labels(ucm, image_size=4).clients["water"].train
    assert _shades(packed) == _shades(water.train)


@pytest.mark.parametrize(
    ("partition", "options"),
    [
        ("land_use", {}),
        ("iid", {"clients": 2}),
        ("dirichlet", {"clients": 2, "minimum": 4}),
        ("label_skew", {"clients": 2, "minimum": 2, "alpha": 5.0}),
        ("users", {"median": 5.0, "largest": 7}),
    ],
)
def test_every_ucm_partition_deals_every_picture_once(ucm: Path, partition: Any, options: dict[str, Any]) -> None:
    dataset = ucm_labels(ucm, partition, image_size=4, **options)
    _all_disjoint(dataset)
    sizes = {role: len(_rows(dataset, role)) for role in ("train", "validation", "test")}
    assert sizes == {"train": 21, "validation": 3, "test": 6}
    other = ucm_labels(ucm, partition, image_size=4, seed=1, **options)
    assert _rows(other, "test") == _rows(dataset, "test")
    if partition == "users":
        for name, split in dataset.clients.items():
            assert {SCENES[key[4:-6]] for key in split.train.names} == {name.rpartition("-")[0]}
            assert 1 <= len(split.train) <= 7


def test_unreadable_pictures_are_counted_or_refused(ucm: Path) -> None:
    (ucm / "images" / "forest00.png").write_bytes(b"no picture")
    refuses(r"1 of 30 pictures in .*images cannot be read, more than the share of 0.01", ucm_labels, ucm, image_size=4)
    with pytest.warns(UserWarning, match=r"1 of 30 pictures in .*images cannot be read and are left out; .*forest00"):
        dataset = ucm_labels(ucm, image_size=4, unreadable=0.05)
    assert dataset.facts["unreadable"] == "1 pictures left out: 'forest00.png'"
    nature = dataset.clients["nature"].train
    assert list(nature.names) == [f"ucm-forest{i:02d}.png" for i in range(1, 7)]
    assert _shades(nature) == [1, 2, 3, 4, 5, 6]


def test_ucm_refuses_strange_labels_and_options(ucm: Path, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"unseen": ("moon",)}, "unseen must be distinct names out of nature, water"),
        ({"partition": "quantity"}, "partition must be one of scene, land_use, users, iid, dirichlet, label_skew"),
        ({"max_train": 0}, "max_train must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"partition": "iid", "clients": 50}, "50 clients need more than the 21"),
    ]
    for options, message in refused:
        refuses(message, ucm_labels, ucm, image_size=4, **options)
    lines = (ucm / "labels.jsonl").read_text().replace('["trees"]', '["tree", "lawn"]')
    (ucm / "labels.jsonl").write_text(lines)
    refuses(r"2 labels are outside the 17 that are known: 'tree' \(20 times, first in", ucm_labels, ucm, image_size=4)
    refuses(r"expected labels\.jsonl and images\.tar or images/", ucm_labels, tmp_path / "elsewhere")


# COCO ---------------------------------------------------------------------------------------------------------------


def test_coco_has_a_central_test(tmp_path: Path) -> None:
    pictures = {key: ["dog", "person"] if key % 2 else ["cat"] for key in range(1, 13)}
    coco_split(tmp_path, "train2014", {**pictures, 13: []})
    coco_split(tmp_path, "val2014", {21: ["person"], 22: [], 23: ["cat"]})
    dataset = datasets["coco"](tmp_path, clients=3, validation=0.25, image_size=4)
    assert dataset.answers == COCO_LABELS
    assert dataset.coarse["dog"] == "animal"
    assert [(len(s.train), len(s.validation), len(s.test)) for s in dataset.clients.values()] == [(3, 1, 0)] * 3
    assert list(dataset.unseen) == ["test"]
    assert list(dataset.unseen["test"].names) == ["coco-21", "coco-23"]  # a picture without objects is left out
    _all_disjoint(dataset)
    train = dataset.clients["client-00"].train
    for row, name, shade in zip(train.image_index, train.names, _shades(train), strict=True):
        key = int(name.removeprefix("coco-"))
        assert shade == key
        expected = {"dog", "person"} if key % 2 else {"cat"}
        assert set(train.labels.table.labels_of(int(row))) == expected
    kept = coco(tmp_path, clients=2, unlabelled=True, image_size=4)
    assert len(_rows(kept, "train")) == 13
    assert len(kept.unseen["test"]) == 3
    groups = coco(tmp_path, clients=2, level="supercategory", test="", test_share=0.25, image_size=4)
    assert groups.answers == COCO_SUPERCATEGORIES
    assert not groups.coarse
    assert not groups.unseen
    assert (len(_rows(groups, "train")), len(_rows(groups, "test"))) == (8, 4)
    options: dict[str, Any] = {"clients": 2, "test": "", "test_share": 0.3, "validation": 0.3, "image_size": 4}
    one, two = coco(tmp_path, **options), coco(tmp_path, **options, seed=1)
    assert _rows(one, "test") == _rows(two, "test")  # whatever the seed
    assert _rows(one, "validation") != _rows(two, "validation")
    refuses("he objects of split 'val2017'", coco, tmp_path, clients=2, test="val2017", image_size=4)
    refuses(r"validation must lie in \[0, 1\), got 1.0", coco, tmp_path, clients=2, validation=1.0, image_size=4)


def test_categories_of_another_dataset_in_cocos_format(tmp_path: Path) -> None:
    coco_split(tmp_path, "train", {key: ["dog", "person"] if key % 2 else ["cat"] for key in range(1, 9)})
    file = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["categories"][2]["name"] = "wolf"
    content["categories"].insert(0, {"id": 99, "name": "rail car", "supercategory": "vehicle"})  # on no picture
    file.write_text(json.dumps(content))
    options: dict[str, Any] = {"train": "train", "test": "", "clients": 2, "image_size": 4}
    dataset = coco(tmp_path, categories="file", **options)
    assert dataset.answers == ("person", "cat", "wolf", "rail car")  # in the order of their ids
    assert dataset.coarse == {"person": "person", "cat": "animal", "wolf": "animal", "rail car": "vehicle"}
    groups = coco(tmp_path, categories="file", level="supercategory", **options)
    assert groups.answers == ("person", "animal", "vehicle")
    refuses(r"1 labels are outside the 80 that are known: 'wolf' \(4 times", coco, tmp_path, **options)
    refuses("categories must be one of coco80, file, got 'coco'", coco, tmp_path, categories="coco", **options)
    for category in content["categories"]:
        del category["supercategory"]
    file.write_text(json.dumps(content))
    assert not coco(tmp_path, categories="file", **options).coarse
    with pytest.raises(ValueError, match=r"train: expected a supercategory of every category.*none of 'person'"):
        coco(tmp_path, categories="file", level="supercategory", **options)
    content["categories"].append({"id": 100, "name": "wolf", "supercategory": "toy"})
    file.write_text(json.dumps(content))
    refuses("the category's name 'wolf' is that of row", coco, tmp_path, categories="file", **options)


def test_coco_mini_is_read(real_data: Path) -> None:
    folder = real_data / "coco_mini_train"
    if not (folder / "images.tar").is_file():
        pytest.skip("the photographs are not here")
    found = json.loads((folder / "instances_train2017_mini.json").read_text())
    assert {c["name"]: c["supercategory"] for c in found["categories"]} == COCO_GROUPS
    dataset = coco(
        folder, "dirichlet", train="train2017_mini", test="", level="supercategory", clients=5, alpha=1.0,
        validation=0.15, test_share=0.25, image_size=16,
    )  # fmt: skip
    listed = {f"coco-{r['image_id']}": r for r in map(json.loads, (folder / "labels.jsonl").read_text().splitlines())}
    names = [name for role in ("train", "validation", "test") for name in _rows(dataset, role)]
    assert sorted(names) == sorted(listed)
    for split in dataset.clients.values():
        for row, name in zip(split.test.image_index, split.test.names, strict=True):
            assert set(split.test.labels.table.labels_of(int(row))) == set(listed[name]["supercategories"])


# VOC ----------------------------------------------------------------------------------------------------------------


def test_voc_of_two_years(tmp_path: Path) -> None:
    voc_year(tmp_path, "VOC2007", "trainval", {f"00{i}": [("dog", 0), ("sofa", 1)] for i in range(4)})
    voc_year(tmp_path, "VOC2007", "test", {"100": [("cat", 0)]})
    voc_year(tmp_path, "VOC2012", "trainval", {f"00{i}": [("person", 0)] for i in range(4)})
    dataset = datasets["voc"](tmp_path, train=["VOC2007:trainval", "VOC2012:trainval"], clients=2, image_size=4)
    assert len(_rows(dataset, "train")) == 8
    assert list(dataset.unseen["test"].names) == ["VOC2007-100"]
    table = dataset.clients["client-00"].train.labels.table
    assert {name: table.labels_of(row) for row, name in enumerate(table.names)} == {
        **{f"VOC2007-00{i}": ("dog",) for i in range(4)},
        **{f"VOC2012-00{i}": ("person",) for i in range(4)},
    }
    own = voc(tmp_path, test=[], test_share=0.5, clients=2, image_size=4)
    assert [(len(s.train), len(s.test)) for s in own.clients.values()] == [(1, 1)] * 2
    refuses("got 4 in both, 'VOC2007-000' is one", voc, tmp_path, test=["VOC2007:trainval"], clients=2, image_size=4)
    with pytest.raises(
        ValueError, match=r"data.train: expected names of lists such as 'VOC2007:trainval', got .'VOC2007'"
    ):
        voc(tmp_path, train=["VOC2007"], clients=2, image_size=4)
    with pytest.raises(ValueError, match=r"data.train: expected names of lists .*VOC2007:\.\./trainval"):
        voc(tmp_path, train=["VOC2007:../trainval"], clients=2, image_size=4)


# FLAIR --------------------------------------------------------------------------------------------------------------

FINE = {"dog": "animal", "cat": "animal", "oak": "plant", "fern": "plant", "bread": "food"}


def _flair(root: Path, *, all_coarse: bool = False) -> Path:
    users = {
        "u0": ("train", [["dog", "oak"], ["dog"], ["fern"], ["cat"]]),
        "u1": ("train", [[]]),  # nothing on any picture
        "u2": ("train", [["oak"], ["dog"]]),
        "v0": ("val", [["bread"]]),
        "t0": ("test", [["bread", "oak"], []]),
    }
    by_user: dict[str, Any] = {}
    for user, (split, pictures) in users.items():
        by_user[user] = split, [(dict.fromkeys(FINE[name] for name in fine), fine) for fine in pictures]
    flair_folder(root, by_user)
    relationship = dict(FINE)
    if all_coarse:
        relationship |= {f"a {label}": label for label in FLAIR_LABELS if label not in FINE.values()}
    (root / "label_relationship.txt").write_text("\n".join(f"{f} -> {c}" for f, c in relationship.items()))
    return root


def test_flair_users_are_clients_made_when_asked_for(tmp_path: Path) -> None:
    dataset = datasets["flair"](_flair(tmp_path), image_size=4)
    assert dataset.answers == FLAIR_LABELS
    assert list(dataset.clients) == ["u0", "u1", "u2"]
    assert dataset.clients["u0"] is not dataset.clients["u0"]  # nothing is kept
    assert [len(dataset.clients[user].train) for user in dataset.clients] == [4, 1, 2]
    assert {place: len(part) for place, part in dataset.unseen.items()} == {"validation": 1, "test": 2}
    assert all(not len(split.validation) and not len(split.test) for split in dataset.clients.values())
    # The user without any label is a client like others, and is counted.
    assert dataset.clients["u1"].train.labels.dense().sum() == 0
    assert dataset.facts["users"] == "3 with 2 rows in the median, at most 4; 1 without any label"
    first = dataset.clients["u0"].train
    assert first.labels.table.labels_of(int(first.image_index[0])) == ("animal", "plant")


def test_flair_fine_labels_have_coarse_ones(tmp_path: Path) -> None:
    dataset = flair(_flair(tmp_path), level="fine", image_size=4)
    assert dataset.answers == ("bread", "cat", "dog", "fern", "oak")
    assert dataset.coarse == FINE
    test = dataset.unseen["test"]
    assert test.labels.dense().tolist() == [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_flair_holds_out_and_caps_as_its_sizes_say(tmp_path: Path) -> None:
    folder = _flair(tmp_path)
    tried: list[dict[str, Any]] = [{"validation": 0.5}, {"validation": 0.25}, {"max_train": 2}]
    for options in [*tried, {"validation": 0.5, "max_train": 1}]:
        dataset = flair(folder, image_size=4, **options)
        sizes = [len(split.train) for split in dataset.clients.values()]
        assert sizes == list(dataset.clients.sizes)  # type: ignore[attr-defined]
        _all_disjoint(dataset)
    half = flair(folder, validation=0.5, image_size=4)
    assert [(len(s.train), len(s.validation)) for s in half.clients.values()] == [(2, 2), (1, 0), (1, 1)]
    assert _rows(half, "train") == _rows(flair(folder, validation=0.5, image_size=4), "train")


def test_flair_from_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        for split, user, labels in (
            ("train", "a", ["food", ""]),
            ("train", "b", ["food|plant"]),
            ("test", "c", ["art"]),
        ):
            group = file.create_group(f"{split}/{user}")
            group["images"] = np.stack([np.full((4, 4, 3), ord(user) + i, np.uint8) for i in range(len(labels))])
            group["image_ids"] = [f"{user}{i}".encode() for i in range(len(labels))]
            group["labels"] = [label.encode() for label in labels]
            group["fine_grained_labels"] = [b"" for _ in labels]
    dataset = flair(tmp_path, image_size=4)
    assert [len(s.train) for s in dataset.clients.values()] == [2, 1]
    b = dataset.clients["b"].train
    assert b.labels.table.labels_of(int(b.image_index[0])) == ("food", "plant")
    assert _shades(b) == [ord("b")]


def test_faulty_flair_folders_are_refused(tmp_path: Path) -> None:
    folder = _flair(tmp_path)
    refuses(r"validation must lie in \[0, 1\), got 1.5", flair, folder, validation=1.5)
    text = (folder / "labels_and_metadata.json").read_text()
    (folder / "labels_and_metadata.json").write_text(text.replace('"animal"', '"beast"'))
    refuses(r"1 labels are outside the 17 that are known: 'beast' \(4 times, first in", flair, folder, image_size=4)
    (folder / "labels_and_metadata.json").write_text(text)
    for name in ("u00.jpg", "u20.jpg"):
        (folder / "small_images" / name).unlink()
    refuses(r"2 of 7 pictures in .*small_images cannot be read", flair, folder, image_size=4)
    with pytest.warns(UserWarning, match="2 of 7 pictures"):
        dataset = flair(folder, unreadable=0.3, image_size=4)
    assert [len(s.train) for s in dataset.clients.values()] == [3, 1, 1]
    refuses(r"expected labels_and_metadata\.json and small_images, or one HDF5 file", flair, folder / "small_images")


# Label embeddings ---------------------------------------------------------------------------------------------------


def test_fine_names_come_by_their_frequency_in_training(tmp_path: Path) -> None:
    refuses("expected a fine label of 'art', got none", flair_fine_names, _flair(tmp_path))
    names = flair_fine_names(_flair(tmp_path, all_coarse=True))
    assert names["animal"] == ("dog", "cat")  # 3 pictures and 1
    assert names["plant"] == ("oak", "fern")  # 2 training pictures and 1; a test picture does not count
    assert list(names) == list(FLAIR_LABELS)
    file = tmp_path / "labels_and_metadata.json"
    more = json.loads(file.read_text())
    again = [{**more[-1], "image_id": f"t9{i}", "fine_grained_labels": ["fern"]} for i in range(5)]
    file.write_text(json.dumps([*more, *again]))
    assert flair_fine_names(tmp_path) == names  # however often a test user has a fern


def test_embeddings_are_found_by_name_whatever_their_order(tmp_path: Path) -> None:
    shuffled = tuple(np.random.default_rng(0).permutation(UCM_LABELS).tolist())
    vectors = torch.randn(len(shuffled), 64)
    save_label_embeddings(LabelEmbeddings(shuffled, vectors, torch.ones(64), torch.zeros(64)), tmp_path / "e")
    model = ctran_mini(UCM_LABELS, embeddings=tmp_path / "e")
    for position, label in enumerate(UCM_LABELS):
        torch.testing.assert_close(model.tokens.labels[position], vectors[shuffled.index(label)])
    refuses("have no row for 'person', 'cat'", ctran_mini, ("person", "water", "cat"), embeddings=tmp_path / "e")
    refuses("must have the model's 32 features, got 64", load_label_embeddings, tmp_path / "e", UCM_LABELS, 32)


def test_another_width_keeps_inner_products() -> None:
    rows = torch.randn(7, 50, dtype=torch.float64).float()
    table = LabelEmbeddings(tuple("abcde"), rows[:5], rows[5], rows[6])
    for width in (7, 12, 64):
        turned = table.narrowed(width)
        assert turned.vectors.shape == (5, width)
        every = torch.cat([turned.vectors, turned.positive[None], turned.negative[None]])
        torch.testing.assert_close(every @ every.T, rows @ rows.T, rtol=1e-4, atol=1e-4)
    # Fewer dimensions: the sum of squares that is kept is that of the largest singular values.
    few = table.narrowed(3)
    kept = few.vectors.square().sum() + few.positive.square().sum() + few.negative.square().sum()
    lengths = np.linalg.svd(rows.numpy().astype(np.float64), compute_uv=False)
    assert float(kept) == pytest.approx((lengths[:3] ** 2).sum(), rel=1e-5)
    refuses("width must be at least 1, got 0", table.narrowed, 0)


def test_the_packaged_embeddings_are_those_of_the_command(tmp_path: Path) -> None:
    made = write_label_embeddings("captions", tmp_path / "e", encoder="mini")
    packaged = load_label_embeddings("tagged_texts", TAGS, 64)
    assert made.names == packaged.names == TAGS
    torch.testing.assert_close(made.vectors, packaged.vectors)
    torch.testing.assert_close(made.positive, packaged.positive)


def test_lists_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _flair(tmp_path, all_coarse=True)
    assert label_names("flair-fine", folder)[0][-1] == "oak"
    assert label_names("flair", folder)[1]["plant"] == ("oak", "fern")
    (tmp_path / "own.txt").write_text("one\n\ntwo words\n")
    assert label_names(str(tmp_path / "own.txt"))[0] == ("one", "two words")
    said: list[str] = []

    def encoder(source: str) -> Callable[[list[str]], torch.Tensor]:
        def encode(texts: list[str]) -> torch.Tensor:
            said.extend(texts)
            return torch.tensor([[len(t), sum(map(ord, t)) % 97, ord(t[-2])] for t in texts]).float()

        return encode

    monkeypatch.setattr("confed.prepare.label_embeddings.clip_text_encoder", encoder)
    table = write_label_embeddings("flair", tmp_path / "e", root=folder, coarse="concat")
    assert table.names == FLAIR_LABELS  # the dataset's own names, underscores and all
    assert "The photo contains dog,cat." in said
    assert "The photo contains a interior room." in said
    refused: list[tuple[dict[str, Any], str]] = [
        ({"labels": "elsewhere"}, "labels: expected one of flair, .* or a text file, got 'elsewhere'"),
        ({"labels": "flair-fine"}, "--root: expected the folder with label_relationship"),
        ({"labels": "voc", "coarse": "avg"}, "--root: expected .* for coarse = 'avg'"),
        (
            {"labels": "flair", "root": folder, "coarse": "avg", "encoder": "mini"},
            "the encoder mini: expected bare names",
        ),
    ]
    for options, message in refused:
        options["out"] = tmp_path / "f"
        refuses(message, write_label_embeddings, **options)


# Texts --------------------------------------------------------------------------------------------------------------


def test_captions_speak_of_their_tags() -> None:
    made = list(captions("test", 40, 0))
    assert [r.text for r in made] == [r.text for r in captions("test", 40, 0)]
    assert made[0].text != next(iter(captions("test", 1, 1))).text
    for record in made:
        assert set(record.labels) <= set(TAGS)
        for tag in TAGS:
            if f" {tag} " in f" {record.text} ":  # a tag's own word is said of nothing else
                assert tag in record.labels


def test_tagged_texts_built_in() -> None:
    options: dict[str, Any] = {"clients": 4, "train": 30, "validation": 5, "test": 10, "minimum": 5}
    one, two = tagged_texts(**options), tagged_texts(**options, seed=1)
    assert {role: len(_rows(one, role)) for role in ("train", "validation", "test")} == {
        "train": 120, "validation": 20, "test": 40,
    }  # fmt: skip
    for name in one.clients:
        a, b = one.clients[name].test, two.clients[name].test
        assert list(a.names) == list(b.names)
        assert [a.labels.table.texts[row] for row in a.image_index] == [
            b.labels.table.texts[row] for row in b.image_index
        ]  # type: ignore[index]
    assert one.clients["client-00"].train.labels.table.texts[0] != two.clients["client-00"].train.labels.table.texts[0]  # type: ignore[index]
    assert one.answers == TAGS
    assert {"there", "is", "crimson"} <= set(one.words)
    even = tagged_texts(None, "iid", **options)
    assert {len(split.train) for split in even.clients.values()} == {30}
    assert float(one.facts["skew"][:5]) > float(even.facts["skew"][:5]) + 0.05


def test_tagged_texts_of_a_folder(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {i}", "labels": ["x"] if i % 2 else ["y", "x"], "user": f"u{i % 3}", "image": f"{i // 2}.jpg"}
        for i in range(30)
    ]
    rows = [row | {"id": str(number)} for number, row in enumerate(rows)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = tagged_texts(tmp_path, "user")
    assert list(dataset.clients) == ["u0", "u1", "u2"]
    assert dataset.answers == ("x", "y")
    assert [(len(s.train), len(s.validation), len(s.test)) for s in dataset.clients.values()] == [(6, 2, 2)] * 3
    _all_disjoint(dataset)
    # What belongs to one picture stays together.
    dealt = tagged_texts(tmp_path, "iid", clients=3)
    for split in dealt.clients.values():
        for part in (split.train, split.validation, split.test):
            numbers = [int(name) // 2 for name in part.names]
            assert all(numbers.count(number) == 2 for number in numbers)
    (tmp_path / "labels.txt").write_text("y\n")
    refuses(r"1 labels are outside the 1 that are known: 'x' \(30 times", tagged_texts, tmp_path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"partition": "user"}, "data.root: expected a folder with texts.jsonl"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"train": 0}, "data.train must be at least 1"),
    ]
    for options, message in refused:
        refuses(message, tagged_texts, **options)


# Dealing ------------------------------------------------------------------------------------------------------------


def _pool(labels: list[str], roles: list[str]) -> Pool:
    records = [LabelRecord(Path("f"), i, f"r{i}", tuple(own.split()), text="t") for i, own in enumerate(labels)]
    table = build_table(records, ("a", "b"))[""]
    examples = Examples.labelled(table, None, np.arange(len(table)))
    return Pool(examples, np.array(roles), keys={"home": np.array(["h", "h", "k", "k", "k"])})


def test_facts_of_labels_equal_a_computation_by_hand() -> None:
    pool = _pool(["a", "a", "b", "a b", "b"], ["train", "train", "train", "test", "test"])
    clients, _ = federate(pool, Options(partition="home"))
    assert [list(split.train.names) for split in clients.values()] == [["r0", "r1"], ["r2"]]
    facts = label_floors(clients)
    assert facts["counts"] == "2 clients; 3 train, 0 validation, 2 test"
    assert facts["chance"].startswith("C-AP 0.750")  # a on 1 of 2, b on 2 of 2
    # Training labels: h has (1, 0), k has (0, 1), all have (2/3, 1/3): distances 1/3 and 2/3, weights 2 and 1.
    assert facts["skew"].startswith("0.444")
    with pytest.raises(ValueError, match="every row's role must be one of train, val, test, '', got 'dev'"):
        federate(_pool(["a"] * 5, ["train"] * 4 + ["dev"]), Options(partition="home"))
    with pytest.raises(ValueError, match="no training example is left to share out"):
        federate(_pool(["a"] * 5, ["test"] * 5), Options(partition="home"))


def test_products_of_preferences_by_hand() -> None:
    preferences = np.array([[0.9, 0.5], [0.1, 0.5]])
    rows = 4000
    offsets, values = np.arange(0, 2 * rows + 1, 2), np.tile([0, 1], rows)
    shares = {
        rule: len(label_skew(offsets, values, preferences, np.random.default_rng(0), rule=rule)["client-00"]) / rows
        for rule in ("mean", "product")
    }
    # (0.9 + 0.5) / 2 against 0.9 * 0.5 / (0.9 * 0.5 + 0.1 * 0.5); three standard deviations of 4,000 draws.
    assert shares["mean"] == pytest.approx(0.7, abs=0.022)
    assert shares["product"] == pytest.approx(0.9, abs=0.015)
    # A preference of zero for one label does not make a row that nobody may have.
    nobody = label_skew(offsets[:3], values[:4], np.array([[1.0, 0.0], [0.0, 1.0]]), np.random.default_rng(0), 0,
                        rule="product")  # fmt: skip
    assert sorted(np.concatenate(list(nobody.values())).tolist()) == [0, 1]


def test_examples_are_of_the_table(ucm: Path) -> None:
    part = ucm_labels(ucm, image_size=4).clients["nature"].test
    assert isinstance(part, Examples)
    assert list(part.take([1]).names) == [list(part.names)[1]]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click

USERS: dict[str, tuple[str, list[list[str]]]] = {
    "a": ("train", [["food", "plant"], ["food"], ["art"], []]),
    "b": ("train", [[], [], []]),  # nothing on any picture
    "c": ("train", [["plant"], ["music", "art"]]),
    "v": ("val", [["food"], ["art"]]),
    "t": ("test", [["food", "art"], ["plant"], []]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FLAIR with five users."""
    users: dict[str, Any] = {}
    for user, (split, pictures) in USERS.items():
        users[user] = split, [(labels, []) for labels in pictures]
    return flair_folder(tmp_path / "flair", users)


def _embeddings(file: Path, names: tuple[str, ...], width: int = 64) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    vectors = torch.randn(len(names), width, generator=rng)
    save_label_embeddings(LabelEmbeddings(names, vectors, torch.ones(width), -torch.ones(width)), file)
    return dict(zip(names, vectors, strict=True))


SMALL = (
    "model.name=ctran_mini", "model.pretrained=false", "data.image_size=64", "run.rounds=1", "run.cohort=3",
    "run.threads=1", "run.device=cpu", "local.precision=fp32", "local.epochs=1",
)  # fmt: skip


def test_the_published_recipe_runs_with_users_who_have_no_label(folder: Path, tmp_path: Path) -> None:
    _embeddings(tmp_path / "e.safetensors", FLAIR_LABELS[::-1])  # in another order: names are compared
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={tmp_path / 'e.safetensors'}")
    recipe = load_recipe("fedlgt_flair", given)
    summary = run(recipe.method("fedlgt"), tmp_path / "run")
    numbers = [value for value in _numbers(summary) if not math.isnan(value)]
    assert numbers
    assert all(map(math.isfinite, numbers))
    assert "nan" not in json.dumps(summary).lower()


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def test_a_run_refuses_embeddings_of_other_labels_or_width(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.safetensors"
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={file}")
    _embeddings(file, (*FLAIR_LABELS[:-1], "religions"))
    refuses(r"have no row for 'structure'", run, load_recipe("fedlgt_flair", given).method("fedlgt"), tmp_path / "one")
    _embeddings(file, FLAIR_LABELS, 512)
    with pytest.raises(ValueError, match="must have the model's 64 features, got 512"):
        run(load_recipe("fedlgt_flair", given).method("fedlgt"), tmp_path / "two")


@pytest.mark.filterwarnings("ignore:1 of . pictures")
def test_damaged_pictures_are_left_out_before_the_first_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)  # as if they did not fit into memory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _embeddings(tmp_path / "e.safetensors", FLAIR_LABELS)
    for name in ("a1", "t1"):
        file = folder / "small_images" / f"{name}.jpg"
        file.write_bytes(file.read_bytes()[:-100])
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={tmp_path / 'e.safetensors'}")
    with pytest.raises(ValueError, match=r"1 of 9 pictures in .* more than the share of 0\.01 .*a1\.jpg"):
        load_data(load_recipe("fedlgt_flair", given).method("fedlgt"))
    summary = run(load_recipe("fedlgt_flair", (*given, "data.unreadable=0.4")).method("fedlgt"), tmp_path / "run")
    assert summary["facts"]["unreadable"] == "1 pictures left out: 'a1.jpg'"
    assert summary["facts"]["test: unreadable"] == "1 pictures left out: 't1.jpg'"
    (line,) = (row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "errors" in row)
    assert not line["errors"]  # every user takes part
    trusting = load_recipe("fedlgt_flair", (*given, "data.check=present")).method("fedlgt")
    with pytest.raises(RuntimeError, match=r't1\.jpg.*; data\.check = "decoded" would leave it out'):
        run(trusting, tmp_path / "trusting")


@pytest.mark.filterwarnings("default")
def test_the_command_says_once_how_many_are_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "small_images" / "a1.jpg").write_bytes(b"no picture")
    steps = [f"checking the pictures in small_images: {n}" for n in (9, 2, 3)]
    for expected in (steps, []):  # the second time the verdict is known
        assert confed("data", "describe", "flair", f"root={folder}", "unreadable=0.2", "--json") == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["facts"]["unreadable"] == "1 pictures left out: 'a1.jpg'"
        (warning,) = (line for line in err.splitlines() if line not in expected)
        assert warning.startswith(
            f"warning: 1 of 9 pictures in {folder / 'small_images'} cannot be read and are left out"
        )
        assert [line for line in err.splitlines() if line != warning] == expected


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", ["run", "grid"])
def test_displays_show_the_first_look_at_pictures(tmp_path: Path, kind: str, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    display = Display(console, rounds=kind == "run")
    with display, step("checking the pictures in [there]", 40) as done:
        done(30)
        display._bars.refresh()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("30/40" in text) == terminal
    assert ("checking the pictures in [there]: 40\n" in text) != terminal
    with step("nobody is told", 1) as done:
        done(1)
    assert console.file.getvalue() == text  # type: ignore[attr-defined]


def test_flair_says_which_level_and_which_share(folder: Path) -> None:
    refuses("level must be one of coarse, fine, got 'finest'", flair, folder, level="finest")
    refuses("max_train must be at least 1, got 0", flair, folder, max_train=0)
    refuses("seed must not be negative, got -1", flair, folder, seed=-1)


def test_an_arrow_alone_divides_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "label_relationship.txt"
    file.write_text("salt, pepper -> food\npiano (grand) -> music\n(oak, plant)\n")
    assert flair_relationship(file) == {"salt, pepper": "food", "piano (grand)": "music", "oak": "plant"}
    for line in ("a -> b -> food", " -> food", "a ->"):
        file.write_text(line)
        refuses("row 1: expected 'fine label -> coarse label'", flair_relationship, file)


@pytest.mark.parametrize(("row", "column"), [(-1, 0), (0, -1), (2, 0), (0, 2)])
def test_pairs_outside_the_pictures_or_the_labels_are_refused(tmp_path: Path, row: int, column: int) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        for key in ("label_mapping", "fine_grained_label_mapping"):
            file[f"metadata/{key}"] = json.dumps({"art": 0, "food": 1})
        file["train/a/images"], file["train/a/image_ids"] = np.zeros((2, 4, 4, 3), np.uint8), np.array(["1", "2"], "S")
        for level in ("labels", "fine_grained_labels"):
            file[f"train/a/{level}_row"], file[f"train/a/{level}_col"] = np.array([0]), np.array([1])
    assert [record.labels for record in flair_hdf5_records(tmp_path / "f.hdf5")] == [("food",), ()]
    with h5py.File(tmp_path / "f.hdf5", "r+") as file:
        file["train/a/labels_row"][0], file["train/a/labels_col"][0] = row, column
    refuses("expected labels of 2 pictures and 2 labels, got others", list, flair_hdf5_records(tmp_path / "f.hdf5"))


def test_coco_never_tests_on_what_trains(tmp_path: Path) -> None:
    coco_split(tmp_path, "train2017", {key: ["dog"] for key in range(1, 7)})
    coco_split(tmp_path, "val2014", {key: ["dog"] for key in (6, 7, 8)})  # 2017 dealt the pictures of 2014 anew
    message = r"got 1 in both, 'coco-6' is one"
    refuses(message, coco, tmp_path, train="train2017", test="val2014", clients=2, image_size=4)
    refuses("got 3 in both", coco, tmp_path, train="val2014", test="val2014", clients=2, image_size=4)


@pytest.mark.filterwarnings("ignore:1 of . pictures")
def test_coco_and_voc_leave_out_damaged_pictures_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)
    coco_split(tmp_path, "train2014", {key: ["dog"] for key in range(1, 7)})
    file = tmp_path / "train2014" / f"{4:012d}.png"
    file.write_bytes(file.read_bytes()[:50])
    dataset = coco(tmp_path, test="", clients=1, unreadable=0.2, image_size=4)
    assert dataset.facts["unreadable"] == f"1 pictures left out: {file.name!r}"
    year = tmp_path / "VOC2007"
    voc_year(tmp_path, "VOC2007", "trainval", {key: [("dog", 0)] for key in "123"})
    (year / "JPEGImages" / "2.png").write_bytes(b"no picture")
    dataset = voc(tmp_path, test=(), clients=1, unreadable=0.4, image_size=4)
    assert dataset.facts["unreadable"] == "1 pictures left out: 'VOC2007/JPEGImages/2.png'"


def test_coco_and_voc_list_labels_outside_theirs(tmp_path: Path) -> None:
    coco_split(tmp_path, "train2014", {key: ["unicorn"] for key in (1, 2)})
    with pytest.raises(ValueError, match=r"1 labels are outside the 80 that are known: 'unicorn' \(2 times, first in"):
        coco(tmp_path, test="", clients=1, image_size=4)
    year = tmp_path / "VOC2007"
    voc_year(tmp_path, "VOC2007", "trainval", {"1": [("hydra", 0)]})
    with pytest.raises(ValueError, match=r"1 labels are outside the 20 that are known: 'hydra' \(1 times, first in"):
        voc(tmp_path, test=[], clients=1, image_size=4)
    voc_year(tmp_path, "VOC2007", "trainval", {"1": [("cat", 0)]})
    (year / "JPEGImages" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 1 pictures in .* cannot be read, more than the share of 0\.01"):
        voc(tmp_path, test=[], clients=1, image_size=4)


def _lines(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def _sizes(dataset: Any) -> dict[str, tuple[int, int, int]]:
    return {name: (len(s.train), len(s.validation), len(s.test)) for name, s in dataset.clients.items()}


def test_captions_have_only_the_splits_that_are_asked_for() -> None:
    options: dict[str, Any] = {"clients": 3, "train": 20, "minimum": 2}
    without = _sizes(tagged_texts(**options, validation=0, test=5))
    assert sum(train for train, _, _ in without.values()) == 60
    assert {validation for _, validation, _ in without.values()} == {0}
    untested = _sizes(tagged_texts(**options, validation=2, test=0))
    assert sum(train for train, _, _ in untested.values()) == 60
    assert {test for _, _, test in untested.values()} == {0}


def test_texts_of_people_who_do_not_train_are_a_place(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {i}", "labels": ["x"], "user": f"u{i % 4}", "split": ("train", "test")[i % 4 == 3 or i > 15]}
        for i in range(20)
    ]
    dataset = tagged_texts(_lines(tmp_path, rows), "user")
    assert list(dataset.clients) == ["u0", "u1", "u2"]
    assert {test for _, _, test in _sizes(dataset).values()} == {1}
    assert {place: list(part.names) for place, part in dataset.unseen.items()} == {
        "newcomers": ["3", "7", "11", "15", "19"]
    }
    assert "3 test and 5 elsewhere" in dataset.facts["counts"]
    assert not tagged_texts(tmp_path, "iid", clients=2).unseen


def test_a_row_without_a_text_is_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "labels": ["x"]}, {"image": "b.jpg", "labels": ["x"]}, {"image": "c.jpg", "labels": []}]
    refuses(r"texts\.jsonl, row 2: expected a text, got none \(2 such rows\)", tagged_texts, _lines(tmp_path, rows))


@pytest.mark.parametrize("partition", ["label_skew", "iid"])
def test_fewer_test_rows_than_clients_leave_some_without(tmp_path: Path, partition: Any) -> None:
    rows = [{"text": str(i), "labels": ["xy"[i % 2]], "split": "test" if i < 3 else "train"} for i in range(200)]
    sizes = _sizes(tagged_texts(_lines(tmp_path, rows), partition, clients=10, alpha=20.0, minimum=2))
    assert len(sizes) == 10
    assert sum(test for _, _, test in sizes.values()) == 3


def test_a_minimum_of_none_lets_clients_go_empty() -> None:
    offsets, values = np.array([0, 1, 2]), np.array([0, 0])
    owners = label_skew(offsets, values, np.full((5, 1), 0.2), np.random.default_rng(0), 0)
    assert sorted(np.concatenate(list(owners.values())).tolist()) == [0, 1]
    with pytest.raises(ValueError, match="5 clients need more than the 2 that are shared out"):
        label_skew(offsets, values, np.full((5, 1), 0.2), np.random.default_rng(0), 1)


def test_the_mini_encoder_refuses_what_it_does_not_have(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [{"template": "a {label}"}, {"width": 32}]
    for options in refused:
        with pytest.raises(ValueError, match="the encoder mini: expected bare names without a prompt, and 64 features"):
            write_label_embeddings("captions", tmp_path / "e", encoder="mini", **options)
    assert not (tmp_path / "e").exists()
