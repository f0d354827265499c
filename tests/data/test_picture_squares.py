"""Pictures: conversion to RGB, and errors that name the file."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.data.encode import encode
from confed.data.examples import Examples
from confed.data.intake.opening import read_picture
from confed.data.pictures import empty_table, fill_table, resize
from refusals import refuses


@pytest.fixture
def photo(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for ending in ("png", "jpg"):
        Image.fromarray(noise).save(tmp_path / f"photo.{ending}")
    return tmp_path / "photo.png", noise


def _palette():
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.info["transparency"] = b"\x00\x80"
    return image


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (Image.new("L", (2, 2), 7), (7, 7, 7)),
        (Image.new("RGBA", (2, 2), (1, 2, 3, 128)), (128, 128, 129)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (_palette(), (132, 137, 142)),
    ],
)
def test_other_modes_become_rgb(tmp_path, image, pixel):
    image.save(tmp_path / "x.png")
    picture = read_picture(tmp_path / "x.png")
    assert picture.dtype == np.uint8
    assert picture.shape == (2, 2, 3)
    assert (picture == pixel).all()


def test_png_is_read_exactly_and_from_bytes(photo):
    file, noise = photo
    np.testing.assert_array_equal(read_picture(file), noise)
    np.testing.assert_array_equal(read_picture(file.read_bytes()), noise)


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_truncated_picture_names_the_file(photo, ending, share):
    file = photo[0].with_suffix(f".{ending}")
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    refuses(re.escape(str(file)) + ".*complete, readable picture", read_picture, file)


def test_missing_and_other_files(tmp_path):
    (tmp_path / "note.png").write_text("no picture at all")
    for name, message in [("gone.png", "nothing there"), ("note.png", "readable.*save it as")]:
        refuses(f"{name}.*{message}", read_picture, tmp_path / name)
    refuses("a folder", read_picture, tmp_path)


def test_resize_keeps_flat_colour_and_identity(photo):
    noise = photo[1]
    assert resize(noise, 40) is noise
    assert (resize(np.full((30, 20, 3), 77, dtype=np.uint8), 8) == 77).all()


def test_table_is_encoded_without_a_copy(photo):
    table = empty_table(3, 8)
    fill_table(table, [photo[1]], first=2)
    assert not table[:2].any()
    np.testing.assert_array_equal(table[2], resize(photo[1], 8))
    examples = Examples(table, np.array([2]), ["q"], ["yes"], ["t"], ["n"])
    mask = encode(examples, lambda texts: (_zeros(texts), _zeros(texts)), ["yes"], ["t"])
    assert np.shares_memory(mask.images.numpy(), table)
    np.testing.assert_array_equal(mask.images[2].numpy().transpose(1, 2, 0), table[2])


def _zeros(texts):
    import torch

    return torch.zeros(len(texts), 1, dtype=torch.int64)


@pytest.mark.parametrize("error", [RuntimeError, IndexError, KeyError, TypeError])
def test_whatever_a_reader_raises_names_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(file: object, formats: object) -> None:
        raise error("Failed to decode image")

    file = tmp_path / "x.avif"
    file.write_bytes(b"damaged")
    monkeypatch.setattr(Image, "open", fail)
    refuses(r"x\.avif: expected a complete.*Failed to decode", read_picture, file)
