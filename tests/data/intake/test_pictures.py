"""Odd picture files as people have them: known pixels, the size models want, or one line with the remedy."""

import ast
import io
import json
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image, ImageCms

import confed
from confed.cli.dataset_description import describe
from confed.data.examples import FederatedDataset
from confed.data.faults import survey
from confed.data.intake.opening import look, read_picture
from confed.data.picture_files import PictureFiles
from confed.data.pictures import fitted, resize
from confed.data.tables import tables_of
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.models.inputs import picture_fit, picture_side
from confed.recipes.recipe import parse_recipe
from confed.runs.dataset import load_dataset
from refusals import refuses

SOURCE = Path(__file__).parents[3] / "src" / "confed"
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
# Two rows of three: which corner is where tells how a picture was turned.
CORNERS = np.array([[RED, WHITE, GREEN], [BLACK, WHITE, BLUE]], np.uint8)


class Kind(NamedTuple):
    """A file: its name, what writes it, and its pixels or a part of the error."""

    name: str
    write: Callable[[Path], Any]
    gives: Any
    warns: str = ""


class Near(NamedTuple):
    """Pixels that a conversion of colours gives, but for rounding."""

    pixels: np.ndarray


def saved(image: Image.Image, kind: str, **options: Any) -> Callable[[Path], None]:
    return lambda file: image.save(file, kind, **options)


def written(content: bytes) -> Callable[[Path], int]:
    return lambda file: file.write_bytes(content)


def packed(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(kind: str, way: int) -> Callable[[Path], None]:
    exif = Image.Exif()
    exif[0x0112] = way
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    big = Image.fromarray(CORNERS).resize((48, 32), Image.Resampling.NEAREST)
    return saved(big, kind, exif=exif.tobytes() if kind == "JPEG" else exif, **options)


def upright(way: int) -> np.ndarray:
    """The corners as a viewer shows them, 16 pixels each."""
    ways = {
        1: CORNERS, 2: CORNERS[:, ::-1], 3: CORNERS[::-1, ::-1], 4: CORNERS[::-1], 5: CORNERS.transpose(1, 0, 2),
        6: np.rot90(CORNERS, -1), 7: CORNERS[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(CORNERS),
    }  # fmt: skip
    return np.repeat(np.repeat(ways[way], 16, 0), 16, 1)


def grey(*values: int) -> np.ndarray:
    return np.repeat(np.array([values], np.uint8)[..., None], 3, 2)


def colours(*values: tuple[int, int, int]) -> np.ndarray:
    return np.array([values], np.uint8)


def palette() -> Image.Image:
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    return image


def frames(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)[:count]]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge(side: int) -> bytes:
    """A PNG that announces many pixels and holds none."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def profile(swapped: bool) -> bytes:
    """sRGB, or the same with the primaries of red and blue exchanged, by another name."""
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    if not swapped:
        return bytes(content)
    count = struct.unpack(">I", content[128:132])[0]
    places = {bytes(content[132 + 12 * n : 136 + 12 * n]): 132 + 12 * n for n in range(count)}
    red, blue = (content[places[name] + 4 : places[name] + 12] for name in (b"rXYZ", b"bXYZ"))
    content[places[b"rXYZ"] + 4 : places[b"rXYZ"] + 12] = blue
    content[places[b"bXYZ"] + 4 : places[b"bXYZ"] + 12] = red
    return bytes(content).replace("sRGB".encode("utf-16-be"), "xyzw".encode("utf-16-be"))


def array(values: Any, kind: type) -> Image.Image:
    return Image.fromarray(np.array(values, kind))


NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
ICON = np.array([[(0, 0, 0, 255), (0, 0, 0, 0), (255, 0, 0, 128)]], np.uint8)
DARK = "16th of their range"
FRAME = "first frame"

KINDS = {
    "plain": Kind("a.png", saved(Image.fromarray(NOISE), "PNG"), NOISE),
    "wrong ending": Kind("a.jpg", saved(Image.fromarray(NOISE), "PNG"), NOISE),
    "upper case": Kind("A.PNG", saved(Image.fromarray(NOISE), "PNG"), NOISE),
    "unicode name": Kind("Müller 猫.png", saved(Image.fromarray(NOISE), "PNG"), NOISE),
    **{f"turned {way}": Kind("a.jpg", turned("JPEG", way), upright(way)) for way in range(1, 9)},
    "turned png": Kind("a.png", turned("PNG", 6), upright(6)),
    "turned tiff": Kind("a.tif", turned("TIFF", 8), upright(8)),
    "turned nonsense": Kind("a.png", turned("PNG", 77), upright(1)),
    "alpha": Kind("a.png", saved(Image.fromarray(ICON), "PNG"), colours(BLACK, WHITE, (255, 127, 127))),
    "opaque alpha": Kind(
        "a.png", saved(Image.fromarray(np.dstack([NOISE, np.full((40, 40), 255, np.uint8)])), "PNG"), NOISE
    ),
    "alpha of a broken tool": Kind(
        "a.png", saved(Image.fromarray(np.dstack([NOISE, np.zeros((40, 40), np.uint8)])), "PNG"), NOISE
    ),
    "grey alpha": Kind("a.png", saved(array([[[0, 255], [0, 0]]], np.uint8), "PNG"), grey(0, 255)),
    "alpha webp": Kind(
        "a.webp", saved(Image.fromarray(ICON[:, :2]), "WEBP", lossless=True, exact=True), colours(BLACK, WHITE)
    ),
    "palette": Kind("a.png", saved(palette(), "PNG"), colours(RED, GREEN, BLUE)),
    "palette gif": Kind("a.gif", saved(palette(), "GIF"), colours(RED, GREEN, BLUE)),
    "transparent palette": Kind("a.png", saved(palette(), "PNG", transparency=1), colours(RED, WHITE, BLUE)),
    "palette with alphas": Kind(
        "a.png", saved(palette(), "PNG", transparency=b"\xff\x00\x80"), colours(RED, WHITE, (127, 127, 255))
    ),
    "transparent gif": Kind("a.gif", saved(palette(), "GIF", transparency=2), colours(RED, GREEN, WHITE)),
    "colour key": Kind(
        "a.png", saved(array([[RED, GREEN]], np.uint8), "PNG", transparency=GREEN), colours(RED, WHITE)
    ),
    "one bit": Kind("a.png", saved(array([[0, 255]], np.uint8).convert("1"), "PNG"), grey(0, 255)),
    "grey": Kind("a.png", saved(array([[0, 7, 255]], np.uint8), "PNG"), grey(0, 7, 255)),
    "16 bit": Kind("a.png", saved(array([[0, 257, 32768, 65535]], np.uint16), "PNG"), grey(0, 1, 128, 255)),
    "16 bit tiff": Kind("a.tif", saved(array([[0, 32768, 65535]], np.uint16), "TIFF"), grey(0, 128, 255)),
    "16 bit pgm": Kind("a.pgm", saved(array([[0, 32768, 65535]], np.uint16), "PPM"), grey(0, 128, 255)),
    "16 bit, 12 used": Kind("a.png", saved(array([[0, 4000]], np.uint16), "PNG"), grey(0, 16), DARK),
    "32 bit": Kind("a.tif", saved(array([[-100, 0, 100]], np.int32), "TIFF"), grey(0, 128, 255)),
    "fractions": Kind("a.tif", saved(array([[0, 0.5, 1]], np.float32), "TIFF"), grey(0, 128, 255)),
    "float to 255": Kind("a.tif", saved(array([[0, 7, 255]], np.float32), "TIFF"), grey(0, 7, 255)),
    "float of any range": Kind("a.tif", saved(array([[-1000, 0, 1000]], np.float32), "TIFF"), grey(0, 128, 255)),
    "float with nan": Kind("a.tif", saved(array([[np.nan, 0.2, np.inf, 1]], np.float32), "TIFF"), grey(0, 51, 0, 255)),
    "cmyk": Kind("a.tif", saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF"), colours(RED)),
    "cmyk jpeg": Kind("a.jpg", saved(Image.new("CMYK", (8, 8), (255, 0, 255, 0)), "JPEG"), np.full((8, 8, 3), GREEN)),
    "lab": Kind("a.tif", saved(Image.new("LAB", (1, 1), (255, 128, 128)), "TIFF"), Near(colours(WHITE))),
    "srgb profile": Kind("a.png", saved(Image.fromarray(NOISE), "PNG", icc_profile=profile(False)), NOISE),
    "other profile": Kind(
        "a.png", saved(array([[RED, BLUE]], np.uint8), "PNG", icc_profile=profile(True)), Near(colours(BLUE, RED))
    ),
    "profile of another space": Kind(
        "a.png", saved(array([[0, 7, 255]], np.uint8), "PNG", icc_profile=profile(True)), grey(0, 7, 255)
    ),
    "damaged profile": Kind("a.png", saved(Image.fromarray(NOISE), "PNG", icc_profile=b"nonsense" * 40), NOISE),
    "animated gif": Kind(
        "a.gif", saved(frames(1)[0], "GIF", save_all=True, append_images=frames(3)[1:]), np.full((4, 4, 3), RED), FRAME
    ),
    "animated png": Kind(
        "a.png", saved(frames(1)[0], "PNG", save_all=True, append_images=frames(3)[1:]), np.full((4, 4, 3), RED), FRAME
    ),
    "animated webp": Kind(
        "a.webp", saved(frames(1)[0], "WEBP", save_all=True, append_images=frames(3)[1:], lossless=True),
        np.full((4, 4, 3), RED), FRAME,
    ),
    "pages": Kind(
        "a.tif", saved(frames(1)[0], "TIFF", save_all=True, append_images=frames(3)[1:]), np.full((4, 4, 3), RED), FRAME
    ),
    "two pictures of a camera": Kind(
        "a.jpg", saved(Image.new("RGB", (8, 8), WHITE), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))]),
        np.full((8, 8, 3), 255),
    ),
    "one pixel": Kind("a.png", saved(array([[RED]], np.uint8), "PNG"), colours(RED)),
    "truncated jpeg": Kind("a.jpg", written(packed(Image.fromarray(NOISE), "JPEG")[:900]), "truncated.*copy it again"),
    "truncated png": Kind("a.png", written(packed(Image.fromarray(NOISE), "PNG")[:900]), "copy it again"),
    "empty": Kind("a.png", written(b""), "an empty file: copy it again"),
    "web page": Kind("a.jpg", written(b"<!DOCTYPE html><title>403"), "a web page: download the picture again"),
    "lfs pointer": Kind("a.jpg", written(b"version https://git-lfs.github.com/spec/v1\n"), "`git lfs pull`"),
    "heic": Kind("a.jpg", written(b"\0\0\0\x18ftypheic" + b"\0" * 40), "HEIC: save it as .jpg"),
    "dicom": Kind("a.png", written(b"\0" * 128 + b"DICM" + b"\0" * 40), "dicom_folders"),
    "pdf": Kind("a.png", written(b"%PDF-1.7"), "a PDF: save its pages"),
    "drawing": Kind("a.png", written(b"<svg xmlns='x'></svg>"), "SVG"),
    "apple double": Kind("a.png", written(b"\0\5\x16\7\0\2\0\0Mac OS X"), "beside a picture: delete it"),
    "text": Kind("a.png", written(b"no picture"), "no picture of a format that is read: save it as"),
    "too large": Kind("a.png", written(huge(9000)), "at most 64,000,000 pixels.*CONFED_MOST_PIXELS"),
    "bomb": Kind("a.png", written(huge(60_000)), "exceeds limit"),
    "folder": Kind("a.png", Path.mkdir, "got a folder"),
    "nothing": Kind("a.png", lambda file: None, "got nothing there"),
    "link to nothing": Kind("a.png", lambda file: file.symlink_to("gone.png"), "got nothing there"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_known_pixels_or_is_named(kind: str, tmp_path: Path) -> None:
    name, write, gives, warns = KINDS[kind]
    file = tmp_path / name
    write(file)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        if isinstance(gives, str):
            with pytest.raises(ValueError, match=gives) as caught:
                read_picture(file)
            assert str(file) in str(caught.value)
            assert "\n" not in str(caught.value)
            return
        pixels = read_picture(file)
        np.testing.assert_array_equal(read_picture(file.read_bytes()), pixels)
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    if isinstance(gives, Near):
        assert np.abs(pixels.astype(int) - gives.pixels).max() <= 5
    elif file.suffix == ".jpg" and kind != "wrong ending":
        assert np.abs(pixels.astype(int) - gives).max() <= 4
    else:
        np.testing.assert_array_equal(pixels, gives)
    assert {str(warning.message) for warning in told if warns and warns in str(warning.message)} or not warns
    assert warns or not told


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) >= 60


def test_nothing_else_opens_pictures() -> None:
    """Or converts them on its own."""
    calls: list[str] = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                rgb = node.func.attr == "convert" and any(ast.unparse(one) == "'RGB'" for one in node.args)
                if call in ("Image.open", "PIL.Image.open", "cv2.imread") or rgb:
                    calls.append(str(file.relative_to(SOURCE)))
    assert set(calls) == {"data/intake/opening.py"}


@pytest.mark.parametrize(
    ("picture", "pixel"),
    [
        (np.full((2, 2, 4), (0, 0, 0, 0), np.uint8) | np.array([[[0, 0, 0, 255]], [[0, 0, 0, 0]]], np.uint8), 0),
        (np.full((2, 2), 9, np.uint8), 9),
        (Image.new("I;16", (2, 2), 65535), 255),
    ],
)
def test_pictures_in_memory(picture: Any, pixel: int) -> None:
    assert (read_picture(picture)[0, 0] == pixel).all()


def test_a_table_of_python_keeps_turned_and_deep_pictures() -> None:
    pandas = pytest.importorskip("pandas")
    exif = Image.Exif()
    exif[0x0112] = 6
    phone = Image.open(io.BytesIO(packed(Image.fromarray(CORNERS), "PNG", exif=exif)))
    cells = [phone, array([[0, 0.5, 1]], np.float32), Image.new("CMYK", (1, 1), (0, 255, 255, 0))]
    rows = tables_of(pandas.DataFrame({"image": cells})).splits["train"]
    np.testing.assert_array_equal(read_picture(rows[0]["image"]), np.rot90(CORNERS, -1))
    np.testing.assert_array_equal(read_picture(rows[1]["image"]), grey(0, 128, 255))
    np.testing.assert_array_equal(read_picture(rows[2]["image"]), colours(RED))


def test_readers_turn_pictures_in_every_thread(tmp_path: Path) -> None:
    for way in range(1, 9):
        turned("JPEG", way)(tmp_path / f"{way}.jpg")
    table = PictureFiles([tmp_path / f"{way}.jpg" for way in range(1, 9)], 32)
    for way, picture in zip(range(1, 9), table[np.arange(8)], strict=True):
        expected = np.array(Image.fromarray(upright(way)).resize((32, 32), Image.Resampling.BICUBIC))
        assert np.abs(picture.astype(int) - expected).max() <= 8
    assert look(tmp_path / "6.jpg") == ((32, 48), ["are turned as their EXIF says"])


def folder_of(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.fromarray(NOISE + np.uint8(number + 50 * (name == "dog"))).save(tmp_path / name / f"{number}.png")
    turned("JPEG", 6)(tmp_path / "cat" / "phone.jpg")
    saved(Image.fromarray(ICON), "PNG")(tmp_path / "dog" / "logo.png")
    return tmp_path


def test_survey_says_what_is_special(tmp_path: Path) -> None:
    told, lines = survey(folder_of(tmp_path), 64, "squeeze")
    assert told == "22 of 22 looked at, 3 x 1 to 40 x 40 pixels; the model reads 64 x 64, squeezed"
    assert "1 pictures are turned as their EXIF says, such as cat/phone.jpg" in lines
    assert "1 pictures have an alpha channel and white behind what is transparent, such as dog/logo.png" in lines
    assert "22 pictures are smaller than the 64 x 64 pixels that the model reads, such as cat/0.png" in lines
    assert any(line.startswith("1 pictures are far from square") for line in lines)
    assert not any("far from square" in line for line in survey(tmp_path, 64, "crop")[1])
    assert survey(tmp_path / "cat", 16, "crop")[1] == [
        "1 pictures are turned as their EXIF says, such as phone.jpg"
    ]  # fmt: skip


def test_describe_shows_twelve_pictures_as_the_model_reads_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folder = folder_of(tmp_path / "data")
    options = [f"root={folder}", "partition=iid", "clients=2", "shots=0", "new=none", "image_size=8"]
    found = describe("labelled_folders", options, tmp_path / "sheet.png", tmp_path / "page.html")
    assert len(found["shown"]) == 12
    assert all(pixels.shape == (8, 8, 3) for pixels, _ in found["shown"])
    assert len({pixels.tobytes() for pixels, _ in found["shown"]}) == 12
    assert "1 pictures are turned as their EXIF says, such as cat/phone.jpg" in found["faults"]
    assert found["facts"]["files"].startswith("22 of 22 looked at")
    page = (tmp_path / "page.html").read_text()
    assert "Pictures as the model reads them: 8 x 8" in page
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[1] == 4 * 214  # two rows of six, and one for each of two clients


def test_a_terminal_shows_them_as_blocks() -> None:
    from confed.cli.data import _thumbnails  # pyright: ignore[reportPrivateUsage]

    text = _thumbnails([(np.full((9, 9, 3), number, np.uint8), "") for number in range(12)])
    lines = text.plain.split("\n")
    assert [len(line) for line in lines] == [*[78] * 6, 0, *[78] * 6, 0, 0]
    assert str(text.spans[0].style) == "rgb(0,0,0) on rgb(0,0,0)"
    assert str(text.spans[-2].style) == "rgb(11,11,11) on rgb(11,11,11)"


CROPPED: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32}, "resample": 3,
}  # fmt: skip
PROCESSORS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "cropped": (CROPPED, "crop", 40),
    "old cropped": ({"do_center_crop": True, "size": 224, "crop_size": 224}, "crop", 224),
    "squeezed, then cropped": ({**CROPPED, "size": {"height": 40, "width": 40}}, "squeeze", 32),
    "squeezed": ({"size": {"height": 384, "width": 384}}, "squeeze", 384),
    "not cropped": ({**CROPPED, "do_center_crop": False}, "squeeze", 40),
    "padded": ({"image_processor_type": "JanusImageProcessor", "size": {"height": 384, "width": 384}}, "pad", 384),
    "tiles": ({**CROPPED, "image_grid_pinpoints": [[40, 80]]}, "squeeze", 40),
    "nothing": ({}, "squeeze", None),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_fit_of_a_processor(kind: str, tmp_path: Path) -> None:
    content, fit, side = PROCESSORS[kind]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    assert (picture_fit({"source": str(tmp_path)}), picture_side({"source": str(tmp_path)})) == (fit, side)


@pytest.mark.parametrize("shape", [(100, 50, 3), (37, 90, 3), (40, 40, 3), (20, 33, 3)])
def test_the_processor_makes_the_same_of_crop_and_file(shape: tuple[int, ...]) -> None:
    from transformers import CLIPImageProcessorPil

    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    settings = {key: value for key, value in CROPPED.items() if key != "image_processor_type"}
    processor = CLIPImageProcessorPil(**settings)
    of_file = processor(picture, return_tensors="np")["pixel_values"]
    of_table = processor(resize(picture, 40, "crop"), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(of_table, of_file)
    if shape[0] != shape[1]:
        assert not np.array_equal(processor(resize(picture, 40), return_tensors="np")["pixel_values"], of_file)


def test_crop_and_pad_keep_proportions() -> None:
    wide = np.full((20, 40, 3), 200, np.uint8)
    wide[:, 10:30] = 50
    assert (resize(wide, 20, "crop") == 50).all()
    padded = resize(wide, 40, "pad")
    assert (padded[:10] == 127).all()
    assert (padded[30:] == 127).all()
    np.testing.assert_array_equal(padded[10:30], wide)
    zoom: Any = "zoom"
    with pytest.raises(ValueError, match=r"data\.fit must be one of squeeze, crop, pad, got 'zoom'"), fitted(zoom):
        pass


def test_files_keep_the_fit_that_they_were_made_in(tmp_path: Path) -> None:
    wide = np.full((20, 40, 3), 200, np.uint8)
    wide[:, 10:30] = 50
    Image.fromarray(wide).save(tmp_path / "1.png")
    with fitted("crop"):
        cropped = PictureFiles([tmp_path / "1.png"] * 3, 20)
    assert (cropped[np.arange(3)] == 50).all()
    assert (cropped.take(np.array([1]))[0] == 50).all()
    assert cropped.of([tmp_path / "1.png"]).fit == "crop"
    assert not (PictureFiles([tmp_path / "1.png"], 20)[0] == 50).all()


HEAD = '[algorithm]\nname = "fedavg"\n[task]\nname = "vqa"\n'


def recipe_text(folder: Path, data: str = "", model: str = "clip") -> str:
    source = f"source = {json.dumps(str(folder))}\n" if model == "clip" else ""
    root = json.dumps(str(folder / "data"))
    return (
        f'{HEAD}[model]\nname = "{model}"\n{source}[data]\nname = "labelled_folders"\nroot = {root}\n'
        f'partition = "iid"\nclients = 1\nshots = 0\nnew = "none"\n{data}'
    )


def recipe(folder: Path, data: str = "", model: str = "clip") -> Any:
    return parse_recipe(recipe_text(folder, data, model))


def test_a_recipe_has_the_fit_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    assert recipe(tmp_path).sections["data"]["fit"] == "crop"
    assert recipe(tmp_path, 'fit = "pad"').sections["data"]["fit"] == "pad"
    assert "fit" not in recipe(tmp_path, model="vilt_mini").sections["data"]
    # Runs of before had a size and no fit: they stay what they are.
    assert "fit" not in recipe(tmp_path, "image_size = 40").sections["data"]
    again = parse_recipe(recipe(tmp_path).to_toml())
    assert again.sections["data"]["fit"] == "crop"
    refuses(r"data\.fit must be squeeze or crop or pad.*got 'zoom'", recipe, tmp_path, 'fit = "zoom"')


def test_the_data_are_made_with_the_fit(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    wide = np.full((40, 80, 3), 200, np.uint8)
    wide[:, 20:60] = 50
    for name in ("a", "b"):
        for number in range(5):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(wide).save(tmp_path / "data" / name / f"{number}.png")
    for in_memory in (True, False):
        made = recipe(tmp_path, f"in_memory = {str(in_memory).lower()}")
        data = load_dataset(json.dumps(made.sections["data"], default=str), 0)
        assert isinstance(data, FederatedDataset)
        train = data.clients["client-00"].train
        assert train.images.shape[1:] == (40, 40, 3)
        assert (train.images[int(train.image_index[0])] == 50).all()


def run_of(folder: Path, model: str, data: str = "", side: int = 32) -> Path:
    """A run of one round on wide pictures."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        for number in range(8):
            (folder / "data" / name).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "data" / name / f"{number}.png")
    (folder / "recipe.toml").write_text(
        f'{HEAD}[model]\n{model}\n[data]\nname = "labelled_folders"\nroot = {json.dumps(str(folder / "data"))}\n'
        f'partition = "iid"\nclients = 2\nshots = 0\nnew = "none"\n{data}\n'
        '[run]\nrounds = 1\ngallery = 0\ncontrols = "none"\n'
    )
    return confed.run(folder / "recipe.toml", folder=folder / "run", progress=False).folder


def reads_the_middle(trained: Any, picture: Path) -> bool:
    shown = trained.seen(picture)["image"][0].permute(1, 2, 0).numpy()
    side = len(shown)
    return trained.fit == "crop" and np.array_equal(shown, read_picture(picture)[:, side // 2 : side // 2 + side])


def test_a_finished_run_reads_pictures_as_its_model_was_trained(tmp_path: Path) -> None:
    from confed.models.clip import tiny_encoder

    made: Any = tiny_encoder("clip")
    body, processor = made
    source = tmp_path / "model"
    body.save_pretrained(source)
    processor.tokenizer.save_pretrained(source)
    settings = {**CROPPED, "size": {"shortest_edge": 32}}
    (source / "preprocessor_config.json").write_text(json.dumps(settings))
    finished = FinishedRun.of(run_of(tmp_path, f'name = "clip"\nsource = {json.dumps(str(source))}'))
    finished.load()
    assert reads_the_middle(finished.model(None), tmp_path / "data" / "a" / "0.png")


def test_an_export_reads_pictures_as_its_run(tmp_path: Path) -> None:
    export(run_of(tmp_path, 'name = "vilt_mini"', 'image_size = 64\nfit = "crop"', 64), tmp_path / "export")
    assert reads_the_middle(confed.load_exported(tmp_path / "export"), tmp_path / "data" / "a" / "0.png")


def test_describe_says_which_pictures_do_not_fit_the_model(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    for name in ("a", "b"):
        for number in range(8):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((64, 64, 3), number, np.uint8)).save(tmp_path / "data" / name / f"{number}.png")
    for text, expected in (("", []), ("image_size = 20", ["data.image_size is 20", "data.fit is 'squeeze'"])):
        (tmp_path / "recipe.toml").write_text(recipe_text(tmp_path, text))
        told = [line for line in describe(str(tmp_path / "recipe.toml"))["faults"] if line.startswith("data.")]
        assert [line.split(",")[0] for line in told] == expected
