"""Files of data that would start programs, take gigabytes or lead elsewhere are refused from their headers."""

import io
import struct
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.data.bounded_files import check_array, formats, load_npy, load_npz, most_pixels, tar_members
from confed.data.intake.opening import read_picture
from confed.data.picture_files import open_pictures
from confed.data.ragged import PackedTexts
from refusals import refuses

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\nshowpage\n%%EOF\n"


def _png_header(width: int, height: int) -> bytes:
    """A PNG that announces so many pixels and holds none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_no_picture_starts_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[object] = []

    def started(*arguments: object, **options: object) -> None:
        programs.append(arguments)
        raise OSError("no programs here")

    monkeypatch.setattr(subprocess, "check_call", started)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    (tmp_path / "x.png").write_bytes(EPS)
    refuses(r"picture .*x\.png: expected a complete, readable picture file", read_picture, tmp_path / "x.png")
    assert programs == []
    Image.init()
    assert "EPS" in Image.OPEN  # Pillow alone would have opened it
    assert not {"EPS", "WMF", "FPX", "MIC", "PDF"} & set(formats())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "TGA"])
def test_the_usual_formats_are_read(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 40, 40)).save(buffer, kind)
    assert read_picture(buffer.getvalue()).shape == (8, 8, 3)


def test_pixels_are_bounded_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoded(Exception):
        pass

    def decoded(image: object) -> None:
        raise Decoded

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    with pytest.raises(ValueError, match=r"bomb: .*at most 64,000,000 pixels, got 8,001 x 8,000 \(CONFED_MOST_PIXELS"):
        read_picture(_png_header(8001, 8000), name="bomb")
    monkeypatch.setenv("CONFED_MOST_PIXELS", "100")
    refuses("at most 100 pixels, got 11 x 10", read_picture, _png_header(11, 10))
    with pytest.raises(Decoded):
        read_picture(_png_header(10, 10))


@pytest.mark.parametrize("value", ["0", "-1", "many", "1e6", "9" * 30])
def test_a_faulty_bound_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFED_MOST_PIXELS", value)
    refuses("CONFED_MOST_PIXELS must be a positive whole number", most_pixels)


def _npy(shape: tuple[int, ...], data: bytes = b"", kind: str = "<f8") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_npy((10**6, 10**6)), "expected at most 8,589,934,592 bytes .*, got an array"),
        (_npy((10**5, 1000)), "as its header says, got only"),
        (_npy((1,) * 20), "at most 16 extents"),
        (_npy((1,), b"12345678", "|O"), "expected numbers, got Python objects"),
        (b"no array", "NumPy's format"),
    ],
)  # fmt: skip
def test_arrays_are_measured_before_memory_is_taken(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    refuses(expected, load_npy, tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    refuses(expected, load_npz, tmp_path / "a.npz", ["x"])
    assert load_npz(tmp_path / "a.npz", ["other"]) == {}


def test_arrays_of_one_name_do_not_stand_in_for_one_another(tmp_path: Path) -> None:
    for names in (("x", "x.npy"), ("x.npy", "x")):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            for name, shape in zip(names, ((10**6, 10**6), (1,)), strict=True):
                archive.writestr(name, _npy(shape, b"12345678"))
        refuses(r"a\.npz: expected .*a name for every array", load_npz, tmp_path / "a.npz", ["x"])


def test_sound_arrays_are_read_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(6).reshape(2, 3), y=np.zeros(100))
    np.save(tmp_path / "a.npy", np.arange(4))
    assert load_npz(tmp_path / "a.npz", ["x"])["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert load_npy(tmp_path / "a.npy").tolist() == [0, 1, 2, 3]
    monkeypatch.setenv("CONFED_MOST_ARRAY_BYTES", "100")
    refuses(r"at most 100 bytes .*, 800 bytes", load_npz, tmp_path / "a.npz", ["y"])
    assert check_array((12,), np.dtype(np.float64), "x") == 96


def test_members_of_archives_lie_inside(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
        info = tarfile.TarInfo("long")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"four"))
    with tarfile.open(file) as tar:
        assert [member.name for member in tar_members(tar, file)] == ["empty", "long"]
    file.write_bytes(file.read_bytes()[:1026])
    refuses("expected all of 'long', got its beginning", open_pictures, file, PackedTexts.of(["long"]), 8)


def test_hdf5_arrays_lie_in_their_file_and_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret").write_bytes(bytes(192))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["picture"] = np.zeros((8, 8, 3), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = np.zeros((8, 8, 3), np.uint8)
        file["linked"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "picture")
        file.create_dataset("outside", (8, 8, 3), np.uint8, external=[(str(tmp_path / "secret"), 0, 192)])
        file.create_dataset("huge", (10**6, 10**6, 3), np.uint8, chunks=(64, 64, 3))

    def read(name: str) -> np.ndarray:
        return open_pictures(tmp_path / "a.h5", PackedTexts.of([name]), 8)[0]

    assert read("plain").shape == (8, 8, 3)
    for name in ("linked", "outside"):
        refuses(f"{name}: expected an array that is stored in this file", read, name)
    refuses("at most", read, "huge")
