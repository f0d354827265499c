"""One walk of a folder: litter and masks are left out and counted, splits are no classes, links are read once."""

import io
import re
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.data.caption_files.shards import shard_pairs
from confed.data.intake.walk import BARE, LINKS, LITTER, MASKS, in_classes, is_litter, visible, walk
from confed.data.picture_files import find_pictures
from confed.datasets.labelled_folders import labelled_folders
from confed.prepare.own_data import recognise
from refusals import refuses

PNG = b"\x89PNG\r\n\x1a\n"


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PNG)


LITTERED = (
    "cat/._1.png", "cat/.DS_Store", "cat/Thumbs.db", "cat/desktop.ini", "cat/~$1.png", "__MACOSX/cat/._1.png",
    "cat/@eaDir/1.png", "cat/.ipynb_checkpoints/1-checkpoint.png", ".git/1.png", "$RECYCLE.BIN/1.png",
)  # fmt: skip


@pytest.mark.parametrize("name", LITTERED)
def test_litter_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    put(tmp_path, "cat/1.png", "dog/2.JPG", name)
    walked = walk(tmp_path)
    assert walked.pictures == [("cat", "1.png"), ("dog", "2.JPG")]
    assert list(walked.left) == [LITTER]
    assert len(walked.left[LITTER]) == 1
    assert walked.notes()[0].startswith("1 hidden files and litter")


def test_a_picture_called_like_litter_elsewhere_is_one() -> None:
    assert not any(map(is_litter, ("thumbs.png", "a.DS_Store.png", "macosx", "desktop.png", "~.png")))


@pytest.mark.parametrize(
    ("pictures", "masks"),
    [
        (["a/1.png"], ["a/1_mask.png", "a/1_mask_2.png"]),
        (["a/x (1).png"], ["a/x (1)-seg.png"]),
        (["COVID/images/1.png"], ["COVID/masks/"]),
        (["JPEGImages/1.jpg"], ["SegmentationClass/"]),
        (["imagesTr/1.png"], ["labelsTr/"]),
    ],
)
def test_masks_are_left_out(tmp_path: Path, pictures: list[str], masks: list[str]) -> None:
    put(tmp_path, *pictures, *(name + "1.png" if name.endswith("/") else name for name in masks))
    walked = walk(tmp_path)
    assert ["/".join(parts) for parts in walked.pictures] == pictures
    assert walked.left[MASKS] == masks


def test_a_mask_name_without_its_picture_is_a_picture(tmp_path: Path) -> None:
    put(tmp_path, "faces/with_mask.png", "masks/venice.png", "hats/1.png")
    assert len(walk(tmp_path).pictures) == 3


def test_other_formats_are_named_with_the_remedy(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.HEIC", "cat/2.heic", "cat/3.jpg", "cat/notes.txt")
    walked = walk(tmp_path)
    assert walked.pictures == [("cat", "3.jpg")]
    assert walked.notes() == ["2 .heic files, which are not read (save them as .jpg or .png), such as cat/1.HEIC"]


def test_a_folder_of_other_formats_alone_is_named(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.HEIC", "dog/2.heic")
    refuses(r"got 2 \.heic files, which are not read \(save them as", recognise, tmp_path)


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    put(tmp_path / "store", "1.png")
    put(tmp_path / "data", "dog/2.png")
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "dog" / "loop").symlink_to(tmp_path / "data")
    walked = walk(tmp_path / "data")
    assert walked.pictures == [("cat", "1.png"), ("dog", "2.png")]
    assert walked.left == {LINKS: ["dog/loop/"]}


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    refuses("gone cannot be listed", walk, tmp_path / "gone")


def test_splits_are_no_classes(tmp_path: Path) -> None:
    put(tmp_path, *(f"{split}/{number}.png" for split in ("train", "test", "valid") for number in range(4)))
    refuses(r"test, train, valid are splits and no classes, and their 12 pictures", in_classes, tmp_path)
    refuses("splits and no classes", recognise, tmp_path)
    refuses("splits and no classes", labelled_folders, tmp_path)


def test_a_test_split_without_classes_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.png", "train/dog/2.png", "Testing/3.png")
    paths, walked = in_classes(tmp_path)
    assert [(path.role, path.below[0]) for path in paths] == [("train", "cat"), ("train", "dog")]
    assert walked.notes() == [f"1 {BARE}, such as Testing/3.png"]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put(tmp_path, "train/1.png", "bus/2.png")
    assert [(path.role, path.below[0]) for path in in_classes(tmp_path)[0]] == [("", "bus"), ("", "train")]


def test_training_and_testing_are_splits(tmp_path: Path) -> None:
    put(tmp_path, "Training/a/1.png", "Training/b/1.png", "Testing/a/1.png", "Testing/b/1.png")
    assert {path.role for path in in_classes(tmp_path)[0]} == {"train", "test"}


def test_images_beside_masks_are_named(tmp_path: Path) -> None:
    put(tmp_path, "images/1.png", "images/2.png", "masks/1.png", "masks/2.png")
    refuses(r"images beside masks/ are pictures with masks or boxes.*put the pictures in", recognise, tmp_path)


def test_folders_around_the_data_are_named(tmp_path: Path) -> None:
    put(tmp_path, "chest/train/a/1.png", "chest/train/b/1.png", "chest/test/a/1.png", "chest/test/b/1.png")
    refuses(r"got chest/ alone; name that folder, .*chest", recognise, tmp_path)
    assert recognise(tmp_path / "chest")[0][0].form == "classes"


def test_a_folder_of_yolo_is_named(tmp_path: Path) -> None:
    put(tmp_path, "images/train/1.png", "images/val/2.png", "labels/train/1.txt", "labels/val/2.txt")
    refuses("images beside labels/ are pictures with masks or boxes", recognise, tmp_path)


def test_litter_in_an_archive_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("._1.jpg", b"\0\5"), ("1.jpg", PNG), ("._1.txt", b"\0\5"), ("1.txt", b"a cat")):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert [shown.caption for shown in shard_pairs(tmp_path / "a.tar")] == ["a cat"]


def test_proposer_and_reader_see_the_same_pictures(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(20):
            put(tmp_path, f"{name}/._{number}.png", f"{name}/@eaDir/{number}.png")
            pixels = np.random.default_rng([number, len(name), ord(name[0])]).integers(
                0, 255, (9, 9, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    proposals, left = recognise(tmp_path)
    assert proposals[0].saw[0].startswith("folders: 40 pictures of 2 classes")
    assert proposals[0].saw[-1].startswith(f"left out: 42 {LITTER}")
    assert left == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = labelled_folders(tmp_path, "iid", clients=2, shots=0, new="none", image_size=8)
    assert sum(len(split.train) + len(split.test) for split in dataset.clients.values()) == 40
    assert dataset.account is not None
    assert dataset.account.counts == {"rows": 82, "used": 40, "left out": 42, "merged": 0}
    assert (
        f": 82 files = 40 used + 42 left out ({LITTER}: cat/@eaDir/, cat/._0.png, cat/._1.png and 39 more)"
        in dataset.facts["account"]
    )


def test_visible_and_find_pictures(tmp_path: Path) -> None:
    put(tmp_path, "._a.jpg", "b.png", "b.jpg", "b.jpeg", "c.JPEG", "d.txt", "._d.csv", "d.csv")
    assert [path.name for path in visible(tmp_path, ".csv")] == ["d.csv"]
    assert {stem: file.name for stem, file in find_pictures(tmp_path).items()} == {"b": "b.jpg", "c": "c.JPEG"}


def test_nothing_else_walks_folders_of_data() -> None:
    source = Path(__file__).parents[3] / "src" / "confed"
    walks: list[str] = []
    for package in ("data", "datasets", "prepare"):
        for file in (source / package).rglob("*.py"):
            if re.search(r"\.rglob\(|os\.walk\(|os\.scandir\(", file.read_text(encoding="utf-8")):
                walks.append(str(file.relative_to(source)))
    # The others look for YOLO's text files, and for pickles that are refused.
    assert sorted(walks) == ["data/intake/layouts.py", "data/intake/walk.py", "datasets/medical_questions.py"]
