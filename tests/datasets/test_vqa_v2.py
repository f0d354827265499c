"""VQA v2 at random clients, and region features in the layouts that they are published in."""

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from command_line import confed
from confed.data.picture_tables import NoPictures
from confed.data.region_files import RegionIndex, StoredRegions, image_number, read_layout, write_regions
from confed.data.vl_files.records import Record
from confed.data.vl_files.vqa import vqa_records
from confed.datasets.vqa_v2 import _label, vocabulary, vqa_v2  # pyright: ignore[reportPrivateUsage]
from confed.inference.ask import ask
from confed.models.grid_features import load_vision_encoder
from confed.prepare.region_features import Options, prepare
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

RNG = np.random.default_rng(7)
PICTURES = {"train2014": range(9, 49, 2), "val2014": range(10, 30, 2)}
EACH = 3
COMMON = ("yes", "no", "2", "red")


def answers_of(number: int) -> list[str]:
    """Ten annotators: seven give the main answer, two another, one a rare word of her own."""
    main = COMMON[number % 4]
    return [main] * 7 + [COMMON[(number + 1) % 4]] * 2 + [f"rare{number}"]


def official(root: Path, only: Mapping[str, Sequence[int]] = PICTURES, subtype: str | None = None) -> Path:
    """The four files; a question's number is its picture's, times ten, and a count."""
    root.mkdir(parents=True, exist_ok=True)
    kinds = {"yes": "yes/no", "no": "yes/no", "2": "number", "red": "other"}
    for split, pictures in only.items():
        keys = [(picture, 10 * picture + k) for picture in pictures for k in range(EACH)]
        head = {"info": {"version": "2.0"}, "data_subtype": subtype or split}
        questions = [{"image_id": p, "question_id": q, "question": f"Is this thing {q % 5}?"} for p, q in keys]
        annotations = [
            {
                "image_id": p, "question_id": q, "answer_type": kinds[COMMON[q % 4]],
                "multiple_choice_answer": COMMON[q % 4],
                "answers": [{"answer": a, "answer_id": i} for i, a in enumerate(answers_of(q))],
            }
            for p, q in keys
        ]  # fmt: skip
        (root / f"v2_OpenEnded_mscoco_{split}_questions.json").write_text(json.dumps({**head, "questions": questions}))
        (root / f"v2_mscoco_{split}_annotations.json").write_text(json.dumps({**head, "annotations": annotations}))
    return root


def regions_of(picture: int, count: int, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Features (R, W) and boxes in pixels of a picture of 40 x 80."""
    rng = np.random.default_rng(picture)
    corners = np.sort(rng.random((count, 2, 2)), axis=1)
    boxes = np.concatenate([corners[:, 0] * [80, 40], corners[:, 1] * [80, 40]], axis=1)
    return rng.normal(size=(count, width)).astype(np.float32), boxes.astype(np.float32)


def npz(folder: Path, counts: Mapping[int, int], *, turned: bool = False, width: int = 8, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for picture, count in counts.items():
        x, bbox = regions_of(picture, count, width)
        np.savez(
            folder / f"COCO_train2014_{picture:012d}.jpg.npz",
            x=x.T if turned else x, bbox=bbox, image_h=40, image_w=80, **more,
        )  # fmt: skip
    return folder


def everywhere(count: int = 4) -> dict[int, int]:
    return {picture: count for pictures in PICTURES.values() for picture in pictures}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return official(tmp_path / "vqa")


# Layouts


@pytest.mark.parametrize("turned", [False, True])
def test_a_file_per_picture(tmp_path: Path, turned: bool):
    folder = npz(tmp_path, {9: 4, 11: 3}, turned=turned)
    first, second = read_layout(folder)
    assert (first.image, first.count, first.width) == (9, 4, 8)
    assert (second.image, second.count, second.width) == (11, 3, 8)
    x, bbox = regions_of(11, 3)
    features, boxes = second.read()
    np.testing.assert_array_equal(features, x)
    np.testing.assert_allclose(boxes, bbox / [80, 40, 80, 40], atol=1e-6)


def test_arrays_without_boxes_are_cells_of_a_grid_or_see_all(tmp_path: Path):
    grid = RNG.normal(size=(8, 2, 3))
    np.save(tmp_path / "9.npy", grid)
    np.save(tmp_path / "10.npy", RNG.normal(size=(5, 8)))
    flat, cells = read_layout(tmp_path)
    features, boxes = cells.read()
    assert (cells.count, cells.width) == (6, 8)
    np.testing.assert_allclose(features[4], grid[:, 1, 1], atol=1e-6)
    np.testing.assert_allclose(boxes[4], [1 / 3, 1 / 2, 2 / 3, 1], atol=1e-6)
    assert flat.read()[1].tolist() == [[0, 0, 1, 1]] * 5


@pytest.mark.parametrize("fixed", [True, False])
def test_hdf5_features_have_fixed_or_varying_numbers_of_regions(tmp_path: Path, fixed: bool):
    h5py = pytest.importorskip("h5py")
    counts = {9: 4, 10: 4 if fixed else 2, 12: 4}
    parts = [regions_of(picture, count) for picture, count in counts.items()]
    stack = np.stack if fixed else np.concatenate
    with h5py.File(tmp_path / "train.hdf5", "w") as file:
        file["image_features"] = stack([features for features, _ in parts])
        boxes = stack([boxes for _, boxes in parts])
        if fixed:
            file["image_bb"], file["image_h"], file["image_w"] = boxes, [40] * 3, [80] * 3
            file["image_ids"] = list(counts)
        else:
            file["spatial_features"] = np.concatenate([boxes / [80, 40, 80, 40], np.zeros((10, 2))], axis=1)
            file["pos_boxes"] = [[0, 4], [4, 6], [6, 10]]
    if not fixed:
        (tmp_path / "train_imgid2idx.json").write_text(json.dumps({"12": 2, "9": 0, "10": 1}))
    found = list(read_layout(tmp_path / "train.hdf5"))
    assert [(part.image, part.count, part.width) for part in found] == [(p, c, 8) for p, c in counts.items()]
    features, boxes = found[1].read()
    np.testing.assert_array_equal(features, parts[1][0])
    np.testing.assert_allclose(boxes, parts[1][1] / [80, 40, 80, 40], atol=1e-6)


def test_numbers_beside_an_hdf5_file(tmp_path: Path):
    """Only the file's own JSON counts, and it must have every row once."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "train.hdf5", "w") as file:
        file["features"], file["boxes"] = np.zeros((2, 3, 4)), np.zeros((2, 3, 4))
    (tmp_path / "train36_imgid2idx.json").write_text(json.dumps({"1": 0, "2": 1}))
    refuses(r"'image_ids', or a JSON object train_imgid2idx\.json", list, read_layout(tmp_path / "train.hdf5"))
    own = tmp_path / "train_imgid2idx.json"
    own.write_text(json.dumps({"7": 1, "5": 0}))
    assert [part.image for part in read_layout(tmp_path / "train.hdf5")] == [5, 7]
    for content, message in (
        ({"7": 0, "5": 2}, r"train_imgid2idx\.json: expected the numbers of 2 pictures, each in a row of its own"),
        ({"7": 0, "x5": 1}, r"train_imgid2idx\.json: expected .* numbers of pictures"),
        ([5, 7], r"train_imgid2idx\.json: expected .* numbers of pictures"),
        ({"7": 0}, r"expected the numbers of 2 pictures, .*got 1"),
    ):
        own.write_text(json.dumps(content))
        refuses(message, list, read_layout(tmp_path / "train.hdf5"))


def test_faulty_hdf5_files_are_refused(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "three": ({"features": np.zeros((1, 3, 4)), "boxes": np.zeros((1, 3, 3))}, "boxes, of at least 4 numbers"),
        "ends": (
            {"features": np.zeros((5, 4)), "boxes": np.zeros((5, 4)), "pos_boxes": [[0, 6]]},
            r"row 0: expected regions among 0 to 5, got 0 to 6",
        ),
        "names": ({"features": np.zeros((1, 3, 4)), "boxes": np.zeros((1, 3, 4)), "image_ids": [b"a.jpg"]},
                  "numbers of pictures"),
    }  # fmt: skip
    for name, (arrays, message) in cases.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for key, values in ({"image_ids": [1]} | arrays).items():
                file[key] = values
        refuses(message, list, read_layout(tmp_path / f"{name}.h5"))


def test_sizes_of_pictures_may_be_arrays_of_one_number(tmp_path: Path):
    x, bbox = regions_of(9, 4)
    np.savez(tmp_path / "9.npz", x=x, bbox=bbox, image_h=np.array([40]), image_w=np.array([80]))
    np.testing.assert_allclose(next(iter(read_layout(tmp_path))).read()[1], bbox / [80, 40, 80, 40], atol=1e-6)


def test_hdf5_without_numbers_of_the_pictures(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"], file["boxes"] = np.zeros((2, 3, 4)), np.zeros((2, 3, 4))
    with pytest.raises(ValueError, match=r"'image_ids', or a JSON object a_imgid2idx\.json.*\.pkl file is not read"):
        list(read_layout(tmp_path / "a.h5"))
    (tmp_path / "b.h5").write_bytes(b"nothing")
    refuses(r"b\.h5: expected a complete HDF5 file", list, read_layout(tmp_path / "b.h5"))


def test_what_is_no_layout(tmp_path: Path):
    refuses(r"expected \.npz or \.npy files", list, read_layout(tmp_path))
    with pytest.raises(ValueError, match=r"a folder with \.npz or \.npy files, or a file \.h5 or \.hdf5, got"):
        list(read_layout(tmp_path / "features.tsv"))


def test_faulty_files_of_features(tmp_path: Path):
    x, bbox = regions_of(9, 4)
    sized = {"image_h": 40, "image_w": 80}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "keys": ({"y": x, "bbox": bbox}, "expected an array 'x' or 'features'"),
        "boxes": ({"x": x}, "expected an array 'bbox' or 'boxes'"),
        "shape": ({"x": x, "bbox": bbox[:3], **sized}, r"bbox' of shape \(R, 4\), got \(4, 8\) and \(3, 4\)"),
        "object": ({"x": np.array([{"a": 1}], dtype=object), "bbox": bbox}, "got Python objects"),
        "nan": ({"x": x * np.nan, "bbox": bbox, **sized}, "finite"),
        "size": ({"x": x, "bbox": bbox}, "boxes are in pixels .* picture's size is missing"),
        "outside": ({"x": x, "bbox": bbox * 2, **sized}, "boxes must lie inside the picture"),
    }
    for name, (arrays, message) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        np.savez(folder / "9.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            next(iter(read_layout(folder))).read()
    whole = npz(tmp_path / "cut", {9: 4}) / "COCO_train2014_000000000009.jpg.npz"
    whole.write_bytes(whole.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"expected a complete \.npz file"):
        next(iter(read_layout(tmp_path / "cut")))
    np.save(tmp_path / "9.npy", np.array([{"features": 1}], dtype=object))
    with pytest.raises(ValueError, match="got Python objects"):
        next(iter(read_layout(tmp_path)))
    (tmp_path / "9.npy").unlink()
    np.save(tmp_path / "left.npy", x)
    with pytest.raises(ValueError, match="files whose names end in the picture's number"):
        next(iter(read_layout(tmp_path)))


# One file


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_one_file_is_read_row_by_row_and_by_the_format_itself(tmp_path: Path, precision: str):
    rows = [(RNG.normal(size=(n, 6)).astype(np.float32), RNG.random((n, 4)).astype(np.float32)) for n in (3, 1, 2)]
    file = tmp_path / "regions.safetensors"
    write_regions(file, RegionIndex((5, 6, 9), 3, 6, "someone", 2), rows, precision)
    stored = StoredRegions(file)
    assert (stored.shape, stored.encoder, len(stored)) == ((3, 3, 6), "someone", 3)
    features, boxes = stored[np.array([2, 0, 2])]
    assert features.dtype == boxes.dtype == np.float32
    assert features.flags.writeable
    tolerance = 0 if precision == "float32" else 2e-3
    np.testing.assert_allclose(features[0, :2], rows[2][0], atol=tolerance)
    np.testing.assert_allclose(features[1], rows[0][0], atol=tolerance)
    assert not features[0, 2].any()
    np.testing.assert_array_equal(boxes[2, :2], rows[2][1])
    tensors = load_file(file)
    np.testing.assert_array_equal(tensors["features"][[2, 0, 2]].astype(np.float32), features)
    np.testing.assert_array_equal(tensors["boxes"][[2, 0, 2]], boxes)


def test_damaged_files_are_refused(tmp_path: Path):
    file, index = tmp_path / "regions.safetensors", RegionIndex((5, 6), 1, 2)
    rows = [(np.ones((1, 2)), np.zeros((1, 4)))] * 2
    refuses(r"regions\.json does not exist", StoredRegions, file)
    for given, message in ((rows[:1], "2 pictures, got 1"), ([*rows, rows[0]], "2 pictures, got more")):
        refuses(message, write_regions, file, index, given)
    with pytest.raises(ValueError, match="picture 6 is beyond float16"):
        write_regions(file, index, [rows[0], (np.full((1, 2), 1e6), np.zeros((1, 4)))])
    assert not any(tmp_path.iterdir()), "nothing half done is left"
    for shape in ((2, 2), (1, 1)):
        with pytest.raises(
            ValueError, match=rf"picture 5 must have at most 1 regions of 2 features, got \({shape[0]}, "
        ):
            write_regions(file, index, [(np.ones(shape), np.zeros((shape[0], 4)))] * 2)
    write_regions(file, index, rows)
    refuses("2 pictures, got 1", write_regions, file, index, rows[:1])
    assert len(StoredRegions(file)) == 2, "a failure leaves the old file as it was"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    refuses(r"expected a safetensors file of region features.*is it cut off\?", StoredRegions, file)
    file.write_bytes(b"\x05")
    refuses("expected a safetensors file of region features", StoredRegions, file)
    file.write_bytes(whole)
    beside = file.with_suffix(".json")
    content = json.loads(beside.read_text())
    beside.write_text(json.dumps({**content, "images": [5]}))
    refuses(r"features must have shape \(1, 1, 2\)", StoredRegions, file)
    beside.write_text(json.dumps({**content, "format": 2}))
    refuses("expected an index of region features", StoredRegions, file)
    beside.write_text("{}")
    refuses("expected an index of region features", StoredRegions, file)


# Preparing


def test_features_of_all_pictures_go_into_one_file(root: Path, tmp_path: Path):
    counts = everywhere() | {9: 2, 7777: 4}
    seen: list[str] = []
    found = prepare(
        root, [npz(tmp_path / "features", counts)], options=Options(precision="float32"),
        progress=lambda event: seen.append(event.step),
    )  # fmt: skip
    assert found == {
        "questions": {"train2014": 60, "val2014": 30}, "pictures": {"train2014": 20, "val2014": 10},
        "regions": 4, "width": 8, "padded": 1, "unused": 1, "file": str(root / "regions.safetensors"),
    }  # fmt: skip
    stored = StoredRegions(root / "regions.safetensors")
    assert stored.index.images == tuple(sorted(everywhere()))
    row = stored.index.images.index(9)
    features, boxes = stored[np.array([row, row + 1])]
    np.testing.assert_array_equal(features[0, :2], regions_of(9, 2)[0])
    assert not features[0, 2:].any()
    np.testing.assert_array_equal(features[1], regions_of(10, 4)[0])
    assert ((boxes >= 0) & (boxes <= 1)).all()


def test_a_folder_for_each_split_and_the_same_picture_twice(root: Path, tmp_path: Path):
    folders = [npz(tmp_path / split, dict.fromkeys(pictures, 4)) for split, pictures in PICTURES.items()]
    assert prepare(root, folders)["padded"] == 0
    with pytest.raises(ValueError, match=r"expected another picture, got 9, that of .*000009\.jpg\.npz already"):
        prepare(root, [*folders, npz(tmp_path / "more", {9: 4})])


def test_features_that_do_not_fit(root: Path, tmp_path: Path):
    some = {picture: count for picture, count in everywhere().items() if picture not in (9, 11)}
    with pytest.raises(ValueError, match="all 30 pictures that questions are about, got all but 2: 9, 11"):
        prepare(root, [npz(tmp_path / "some", some)])
    folder = npz(tmp_path / "all", everywhere())
    npz(folder, {11: 4}, width=6)
    refuses(r"0011\.jpg\.npz: expected 8 features per region, got 6", prepare, root, [folder])
    npz(folder, {11: 3})
    refuses(r"0011\.jpg\.npz: expected 4 regions, got 3", prepare, root, [folder], options=Options(regions=4))
    refuses("expected 2048 features per region, got 8", prepare, root, [folder], options=Options(width=2048))
    assert not (root / "regions.safetensors").exists()


def test_what_prepare_is_not_told(root: Path, tmp_path: Path):
    for arguments, message in (
        ({}, "expected either features or an encoder"),
        ({"features": [tmp_path], "encoder": "vit"}, "expected either features or an encoder"),
        ({"encoder": "vit"}, r"expected folders of pictures \(images\)"),
        ({"features": [tmp_path], "out": tmp_path / "regions.npz"}, r"out: expected a file \.safetensors"),
    ):
        refuses(message, prepare, root, **arguments)
    refuses("grid must be at least 1, got 0", Options, grid=0)


# Answers


def record(answer: str, *annotations: str) -> Record:
    return Record(
        Path("annotations.json"), 0, "question", ("picture",), "What?", answer, annotations=annotations or None
    )


def test_an_answer_counts_from_the_ninth_time_on():
    """The 3,129 answers in common use occur more than eight times."""
    records = [
        record(answer) for answer, times in (("a", 8), ("b", 9), ("c", 9), ("d", 10), ("", 20)) for _ in range(times)
    ]
    assert vocabulary(records, 9) == ("d", "b", "c")
    assert inspect.signature(vqa_v2).parameters["min_answers"].default == 9
    assert vocabulary(records, 8) == ("d", "b", "c", "a")


@pytest.mark.parametrize(
    ("annotations", "majority", "label"),
    [
        (["yes"] * 6 + ["no"] * 4, "yes", "yes"),
        (["rare"] * 6 + ["no"] * 3 + ["yes"], "rare", "no"),  # the majority answer is none of the vocabulary
        (["no"] * 5 + ["yes"] * 5, "yes", "yes"),  # among equals the majority answer of the file
        (["yes"] * 5 + ["no"] * 5, "no", "no"),
        (["rare"] * 4 + ["red"] * 3 + ["no"] * 3, "rare", "no"),  # among equals without it the alphabet
        (["no"] * 4 + ["red"] * 6, "no", "red"),  # what most gave, whatever the file calls the majority
        (["rare"] * 10, "rare", None),
        ([], "no", "no"),
        ([], "rare", None),
    ],
)
def test_the_label_of_a_question_with_several_answers(annotations: list[str], majority: str, label: str | None):
    assert _label(record(majority, *annotations), frozenset({"yes", "no", "red"})) == label


def test_annotation_files_of_the_wrong_split(root: Path):
    official(root, {"train2014": PICTURES["val2014"]}, subtype="val2014")
    refuses(r"train2014_questions\.json: expected the split 'train2014', got 'val2014'", prepare, root, [root])
    refuses("expected the split 'train2014', got 'val2014'", vqa_v2, root, images=("somewhere",))


def test_an_encoder_of_transformers_makes_features_of_pictures(root: Path, tmp_path: Path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=16, patch_size=4
    )
    with torch.random.fork_rng(devices=[]):
        ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    for split, pictures in PICTURES.items():
        (tmp_path / split).mkdir()
        for picture in pictures:
            pixels = RNG.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / f"COCO_{split}_{picture:012d}.png")
    folders = [tmp_path / split for split in PICTURES]
    found = prepare(root, images=folders, encoder=str(tmp_path / "vit"), options=Options(grid=2, precision="float32"))
    assert (found["regions"], found["width"]) == (4, 12)
    stored = StoredRegions(root / "regions.safetensors")
    picture = np.asarray(Image.open(tmp_path / "train2014" / "COCO_train2014_000000000009.png"))
    model = ViTModel.from_pretrained(tmp_path / "vit", add_pooling_layer=False).eval()
    with torch.no_grad():
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        states = model(pixel_values=pixels).last_hidden_state[0, 1:].reshape(4, 4, 12)
    expected = states.reshape(2, 2, 2, 2, 12).mean((1, 3)).reshape(4, 12)  # means over blocks of 2 x 2 patches
    features, boxes = stored[np.array([0])]
    np.testing.assert_allclose(features[0], expected.numpy(), atol=1e-5)
    assert boxes[0, 1].tolist() == [0.5, 0, 1, 0.5]
    # A finished run turns a new picture into regions with the same encoder.
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "mcan_s_mini"\n[task]\nname = "vqa"\n'
        f'[data]\nname = "vqa_v2"\nroot = "{root}"\nmin_answers = 9\nvalidation = 0.2\n'
        "[local]\nepochs = 1\nlr = 0.01\n[run]\nrounds = 1\nworkers = 1\ngallery = 1\n"
    )
    run(load_recipe(recipe), tmp_path / "run")
    answer = ask(tmp_path / "run", tmp_path / "train2014" / "COCO_train2014_000000000009.png", "is this thing 3?")
    assert answer["answers"][0]["answer"] in COMMON
    assert "image" not in json.loads((tmp_path / "run" / "gallery.json").read_text())[0]


def test_an_encoder_without_all_its_tensors_is_refused(tmp_path: Path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=16, patch_size=4
    )
    with torch.random.fork_rng(devices=[]):
        ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(r"not a checkpoint of this model: layernorm\.weight is missing", load_vision_encoder, str(tmp_path))
    with pytest.raises(ValueError, match=r"expected a folder with a model checkpoint or a hub name"):
        load_vision_encoder(str(tmp_path / "nowhere"))


# The dataset


@pytest.fixture
def prepared(root: Path, tmp_path: Path) -> Path:
    prepare(root, [npz(tmp_path / "features", everywhere())])
    return root


def test_training_questions_in_halves_and_all_of_val_as_test(prepared: Path):
    data = vqa_v2(prepared, validation=0.2)
    # Sixty and thirty questions whose answers take turns: 23, 22, 22 and 23 times; rare words once.
    counts = Counter(COMMON[q % 4] for p in (*PICTURES["train2014"], *PICTURES["val2014"]) for q in _numbers(p))
    assert dict(zip(data.answers, sorted(counts.values(), reverse=True), strict=True)) == {
        answer: counts[answer] for answer in data.answers
    }
    assert set(data.answers) == set(COMMON)
    assert list(data.clients) == ["client-01", "client-02"]
    parts = [{*s.train.names, *s.validation.names} for s in data.clients.values()]
    everything = {f"vqa_v2-{q}" for p in PICTURES["train2014"] for q in _numbers(p)}
    assert parts[0] | parts[1] == everything
    assert not parts[0] & parts[1]
    assert [len(part) for part in parts] == [30, 30]
    tested = [name for s in data.clients.values() for name in s.test.names]
    assert sorted(tested) == sorted(f"vqa_v2-{q}" for p in PICTURES["val2014"] for q in _numbers(p))
    held = {int(i) for s in data.clients.values() for i in s.validation.image_index}
    trained = {int(i) for s in data.clients.values() for i in s.train.image_index}
    assert len(held) == 4
    assert not held & trained
    split = data.clients["client-01"].train
    assert isinstance(split.images, NoPictures)
    assert split.annotations is not None
    for row, name in enumerate(split.names):
        number = int(name.removeprefix("vqa_v2-"))
        assert split.answers[row] == COMMON[number % 4]
        assert split.types[row] == {"2": "number", "red": "other"}.get(COMMON[number % 4], "yes/no")
        assert list(split.annotations[row]) == answers_of(number)
        assert split.questions[row] == f"Is this thing {number % 5}?"
        assert split.regions is not None
        features, _ = split.regions[split.image_index[row : row + 1]]
        np.testing.assert_allclose(features[0], regions_of(number // 10, 4)[0], atol=2e-3)


def _numbers(picture: int) -> list[int]:
    return [10 * picture + k for k in range(EACH)]


def test_seeds_and_limits_and_shares_that_overlap(prepared: Path):
    first, again, other = (vqa_v2(prepared, validation=0.2, seed=seed) for seed in (0, 0, 1))
    names = [d.clients["client-01"].train.names for d in (first, again, other)]
    assert names[0] == names[1] != names[2]
    assert first.clients["client-02"].test.names == other.clients["client-02"].test.names
    small = vqa_v2(prepared, validation=0.2, clients=3, max_train=5, max_test=4)
    assert [(len(s.train), len(s.test)) for s in small.clients.values()] == [(5, 4)] * 3
    shares = [s.train.names for s in vqa_v2(prepared, "code", validation=0.2).clients.values()]
    assert set(shares[0]) & set(shares[1])


def test_answers_outside_the_vocabulary(root: Path, tmp_path: Path):
    file = root / "v2_mscoco_train2014_annotations.json"
    content = json.loads(file.read_text())
    first, second, *_ = content["annotations"]
    # The first question has a rare majority answer, the second nothing but rare ones.
    first["multiple_choice_answer"] = "zebra"
    first["answers"] = [{"answer": a} for a in ["zebra"] * 5 + ["no"] * 3 + ["yes"] * 2]
    second["multiple_choice_answer"] = "zebra"
    second["answers"] = [{"answer": "zebra"}] * 10
    file.write_text(json.dumps(content))
    prepare(root, [npz(tmp_path / "features", everywhere())])
    data = vqa_v2(root, clients=1, validation=0.2)
    split = data.clients["client-01"]
    answers = dict(zip(split.train.names, split.train.answers, strict=True))
    answers |= dict(zip(split.validation.names, split.validation.answers, strict=True))
    assert answers[f"vqa_v2-{first['question_id']}"] == "no"
    assert f"vqa_v2-{second['question_id']}" not in answers
    assert "1 training questions without one left out" in data.facts["vocabulary"]
    # Files of one's own in this layout are not called those of COCO.
    assert data.facts["origin"].endswith("questions, not those published")
    assert "licence" not in data.facts
    refuses("expected two answers to at least 100 of 90 questions, got 0; lower it", vqa_v2, root, min_answers=100)


def test_what_the_dataset_lacks(root: Path, tmp_path: Path):
    refuses("data prepare vqa-v2 --root", vqa_v2, root)
    refuses(r"nowhere does not exist; data\.root is the folder", vqa_v2, tmp_path / "nowhere")
    some = {"train2014": PICTURES["train2014"], "val2014": [10]}
    folder = npz(tmp_path / "features", everywhere())
    prepare(official(tmp_path / "small", some), [folder])
    stored = tmp_path / "stored.safetensors"
    prepare(root, [folder], out=stored)
    refuses("got all but 9: 12, 14", vqa_v2, root, regions=tmp_path / "small" / "regions.safetensors")
    for options, message in (
        ({"clients": 0}, "clients must be at least 1"),
        ({"partition": "thirds"}, "partition must be one of halves, code"),
        ({"validation": 0.0}, r"validation must lie in \(0, 1\)"),
        ({"clients": 500, "validation": 0.2, "regions": stored}, "for each of 500 clients, got too few"),
    ):
        refuses(message, vqa_v2, root, **options)


def test_the_command_prints_what_it_found(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = npz(tmp_path / "features", everywhere())
    arguments = ["data", "prepare", "vqa-v2", "--root", root, "--features", folder]
    assert confed(*arguments, "--regions", 4) == 0
    printed = capsys.readouterr().out
    assert "train2014: 60 questions about 20 pictures" in printed
    assert "4 regions x 8" in printed
    assert confed(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["width"] == 8
    assert confed(*arguments, "--regions", 36) == 2
    assert "expected 36 regions, got 4" in capsys.readouterr().err


def test_invented_samples_of_the_official_files(real_data: Path, tmp_path: Path):
    samples = real_data / "format_samples" / "vqa_v2"
    if not samples.is_dir():
        pytest.skip("the format samples are not here")
    pictures = {image_number(r.pictures[0]) for s in PICTURES for r in vqa_records(samples, s)}
    folder = npz(tmp_path / "features", dict.fromkeys(pictures, 36), width=2048)
    file = tmp_path / "regions.safetensors"
    found = prepare(samples, [folder], out=file, options=Options(regions=36, width=2048))
    assert found["questions"] == {"train2014": 3, "val2014": 3}
    data = vqa_v2(samples, clients=1, regions=file, min_answers=1, validation=0.5)
    assert set(data.answers) <= {r.answer for s in PICTURES for r in vqa_records(samples, s)}
    assert len(data.clients["client-01"].test) == 3
