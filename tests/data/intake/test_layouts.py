"""Layouts of other tools, made by code: which pictures have which labels, and what is said of the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.intake.account import Account
from confed.data.intake.layouts import layout_of, layout_records
from confed.datasets.labelled_pictures import labelled_pictures
from confed.prepare.own_data import recognise
from refusals import refuses

LABELS = [("cat",), ("dog", "cat"), (), ("dog",)]


def pictures(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(first, first + count):
        Image.fromarray(np.full((4, 4, 3), 9 * n, np.uint8)).save(folder / f"{n}.png")


def yolo(root: Path) -> None:
    for split, first in (("train", 0), ("valid", 8)):
        pictures(root / split / "images", 8, first)
        (root / split / "labels").mkdir(parents=True)
        for n in range(first, first + 8):
            if LABELS[n % 4]:
                text = "".join(f"{['cat', 'dog'].index(name)} 0.5 0.5 0.1 0.1\n" for name in LABELS[n % 4])
                (root / split / "labels" / f"{n}.txt").write_text(text)
    (root / "data.yaml").write_text("train: ../train/images\nval: ../valid/images\n\nnc: 2\nnames: ['cat', 'dog']\n")


def roboflow(root: Path) -> None:
    for split, first in (("train", 0), ("valid", 8)):
        pictures(root / split, 8, first)
        annotations: list[dict[str, Any]] = []
        for n in range(first, first + 8):
            for name in LABELS[n % 4]:
                number = len(annotations)
                annotations.append({"id": number, "image_id": n - first, "category_id": ["cat", "dog"].index(name)})
        images = [{"id": n, "file_name": f"{first + n}.png"} for n in range(8)]
        content = {"images": images, "annotations": annotations,
                   "categories": [{"id": n, "name": name} for n, name in enumerate(("cat", "dog"))]}  # fmt: skip
        (root / split / "_annotations.coco.json").write_text(json.dumps(content))


def coco(root: Path) -> None:
    pictures(root / "images", 16)
    objects = [(n, name) for n in range(16) for name in LABELS[n % 4]]
    content = {
        "images": [{"id": n, "file_name": f"images/{n}.png"} for n in range(16)],
        "annotations": [
            {"id": number, "image_id": n, "category_id": ["cat", "dog"].index(name)}
            for number, (n, name) in enumerate(objects)
        ],
        "categories": [{"id": n, "name": name} for n, name in enumerate(("cat", "dog"))],
    }
    (root / "result.json").write_text(json.dumps(content))


def voc(root: Path) -> None:
    pictures(root / "train", 16)
    for n in range(16):
        shapes = "".join(f"<object><name>{name}</name></object>" for name in LABELS[n % 4])
        text = f"<annotation><filename>{n}.png</filename>{shapes}</annotation>"
        (root / "train" / f"{n}.xml").write_text(text)


def labelme(root: Path) -> None:
    pictures(root, 16)
    for n in range(16):
        shapes = [{"label": name, "points": []} for name in LABELS[n % 4]]
        (root / f"{n}.json").write_text(json.dumps({"shapes": shapes, "imagePath": f"..\\{n}.png"}))


def createml(root: Path) -> None:
    pictures(root / "train", 16)
    rows: list[dict[str, Any]] = []
    for n in range(16):
        shapes = [{"label": name, "coordinates": {"x": 1}} for name in LABELS[n % 4]]
        rows.append({"image": f"{n}.png", "annotations": shapes})
    (root / "train" / "_annotations.createml.json").write_text(json.dumps(rows))


def yolo_beside(root: Path) -> None:
    pictures(root, 16)
    (root / "classes.txt").write_text("cat\ndog\n")
    for n in range(16):
        text = "".join(f"{['cat', 'dog'].index(name)} 0.5 0.5 0.1 0.1\n" for name in LABELS[n % 4])
        (root / f"{n}.txt").write_text(text)


def cvat(root: Path) -> None:
    pictures(root / "images", 16)
    body = ""
    for n in range(16):
        shapes = "".join(f'<box label="{name}" xtl="1" ytl="1" xbr="2" ybr="2"/>' for name in LABELS[n % 4])
        body += f'<image id="{n}" name="{n}.png" width="4" height="4">{shapes}</image>'
    (root / "annotations.xml").write_text(f"<annotations><version>1.1</version>{body}</annotations>")


def label_studio(root: Path) -> None:
    pictures(root / "images", 16)
    tasks = [
        {"id": n, "data": {"image": f"/data/upload/3/0a1b2c3d-{n}.png"}, "annotations": [
            {"result": [{"type": "choices", "value": {"choices": list(LABELS[n % 4])}}]}]} for n in range(16)
    ]  # fmt: skip
    (root / "project-1.json").write_text(json.dumps(tasks))


def short_label_studio(root: Path) -> None:
    pictures(root / "images", 16)
    tasks: list[dict[str, Any]] = []
    for n in range(16):
        task = {"image": f"/data/local-files/?d=images/{n}.png", "id": n, "annotator": 1, "annotation_id": n}
        names = LABELS[n % 4]
        tasks.append(task | ({"choice": names[0] if len(names) == 1 else {"choices": list(names)}} if names else {}))
    (root / "short.json").write_text(json.dumps(tasks))


def one_hot(root: Path) -> None:
    pictures(root / "train_images", 16)
    rows = [f"{n},{n * 7},{int('cat' in LABELS[n % 4])},{int('dog' in LABELS[n % 4])}\n" for n in range(16)]
    (root / "train.csv").write_text("image_id,width,cat,dog\n" + "".join(rows))


def signs(root: Path) -> None:
    one_hot(root)
    rows = [
        f"{n},{'1' if 'cat' in LABELS[n % 4] else '-1'},{'1' if 'dog' in LABELS[n % 4] else '-1'}\n" for n in range(16)
    ]
    (root / "train.csv").write_text("image_id,cat,dog\n" + "".join(rows))


def one_hot_beside(root: Path) -> None:
    for split, first in (("train", 0), ("valid", 8)):
        pictures(root / split, 8, first)
        rows = [
            f"{n}.png, {int('cat' in LABELS[n % 4])}, {int('dog' in LABELS[n % 4])}\n" for n in range(first, first + 8)
        ]
        (root / split / "_classes.csv").write_text("filename, cat, dog\n" + "".join(rows))


KINDS = {
    "yolo": (yolo, "yolo"), "roboflow": (roboflow, "roboflow"), "cvat": (cvat, "cvat"),
    "label studio": (label_studio, "label_studio"), "short label studio": (short_label_studio, "label_studio"),
    "one hot": (one_hot, "one_hot"), "one hot beside": (one_hot_beside, "one_hot"), "signs": (signs, "one_hot"),
    "coco": (coco, "coco"), "voc": (voc, "voc"), "labelme": (labelme, "labelme"), "createml": (createml, "createml"),
    "yolo beside": (yolo_beside, "yolo"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_are_recognised_and_read(kind: str, tmp_path: Path) -> None:
    make, layout = KINDS[kind]
    make(tmp_path)
    assert layout_of(tmp_path) == layout
    found = recognise(tmp_path)[0][0]
    assert (found.dataset, found.options["layout"]) == ("labelled_pictures", layout)
    options = {key: value for key, value in found.options.items() if key != "image_size"}
    dataset = labelled_pictures(**options, image_size=4)
    assert dataset.answers == ("cat", "dog")
    assert dataset.account is not None
    assert dataset.account.counts == {"rows": 16, "used": 16, "left out": 0, "merged": 0}
    given: dict[int, tuple[str, ...]] = {}
    for split in dataset.clients.values():
        for part in split.roles.values():
            given |= {
                int(Path(part.labels.table.pictures[row]).stem): part.labels.table.labels_of(row)
                for row in part.image_index.tolist()
            }
    assert given == {n: tuple(sorted(LABELS[n % 4])) for n in range(16)}


def test_rows_of_boxes_are_merged_by_picture(tmp_path: Path) -> None:
    pictures(tmp_path / "images", 16)
    rows = [f"{n // 2}.png,{['cat', 'dog'][n % 2]},1,1,2,2\n" for n in range(32)]
    (tmp_path / "boxes.csv").write_text("filename,class,xmin,ymin,xmax,ymax\n" + "".join(rows))
    options = recognise(tmp_path)[0][0].options
    dataset = labelled_pictures(**{**options, "image_size": 4})
    assert dataset.account is not None
    assert dataset.account.counts == {"rows": 32, "used": 16, "left out": 0, "merged": 16}
    assert "16 merged (objects of one picture)" in dataset.facts["account"]
    assert (dataset.answers, options["layout"]) == (("cat", "dog"), "boxes")


@pytest.mark.parametrize(
    ("text", "names"),
    [("names: [cat, 'big dog']", ["cat", "big dog"]), ("names:\n- cat\n- big dog\nnc: 2", ["cat", "big dog"]),
     ("path: x\nnames:\n  0: cat\n  1: big dog\n", ["cat", "big dog"]),
     ("names: {0: cat, 1: big dog}", ["cat", "big dog"])],
)  # fmt: skip
def test_names_of_classes_in_yaml(text: str, names: list[str], tmp_path: Path) -> None:
    yolo(tmp_path)
    (tmp_path / "data.yaml").write_text(text)
    records = layout_records(tmp_path, "yolo", Account())
    assert {label for record in records for label in record.labels} == set(names)


def test_faults_of_layouts_name_file_and_row(tmp_path: Path) -> None:
    yolo(tmp_path)
    (tmp_path / "train" / "labels" / "0.txt").write_text("0 0.5 0.5 1 1\n7 0.5 0.5 1 1\n")
    with pytest.raises(ValueError, match=r"0\.txt, row 2: expected a class from 0 to 1 of data\.yaml, got '7 0"):
        labelled_pictures(tmp_path, layout="yolo", image_size=4)
    refuses("expected files in the layout 'cvat', got none", labelled_pictures, tmp_path, layout="cvat", image_size=4)


def test_pictures_that_are_not_there_are_left_out_and_counted(tmp_path: Path) -> None:
    cvat(tmp_path)
    (tmp_path / "images" / "3.png").unlink()
    dataset = labelled_pictures(tmp_path, layout="cvat", clients=2, minimum=1, image_size=4)
    assert "16 rows = 15 used + 1 left out (picture is missing: row 4)" in dataset.facts["account"]


def test_masks_beside_images_are_no_classes(tmp_path: Path) -> None:
    pictures(tmp_path / "images", 4)
    pictures(tmp_path / "masks", 4)
    refuses("images beside masks/ are pictures with masks or boxes, no classes", recognise, tmp_path)
