"""DICOM and NIfTI: known pixels of small files made by code, patients on one side, and one line for faults."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confed.data.ragged import PackedTexts
from confed.datasets.medical_pictures import DicomPictures, NiftiSlices, dicom_folders, nifti_slices
from confed.registry import datasets
from refusals import refuses

pydicom: Any = pytest.importorskip("pydicom", reason="the extra medical")
nibabel: Any = pytest.importorskip("nibabel", reason="the extra medical")


def dicom(file: Path, values: Any, photometric: str = "MONOCHROME2", **tags: Any) -> Path:
    """A file with uncompressed values, uint16 or uint8; of frames (F, H, W), of colours (H, W, 3)."""
    pixels = np.asarray(values)
    colours = photometric == "RGB"
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    content = pydicom.Dataset()
    content.file_meta = meta
    content.SOPClassUID, content.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
    content.PhotometricInterpretation, content.SamplesPerPixel = photometric, 3 if colours else 1
    content.Rows, content.Columns = pixels.shape[-3:-1] if colours else pixels.shape[-2:]
    content.BitsAllocated = content.BitsStored = 8 * pixels.dtype.itemsize
    content.HighBit, content.PixelRepresentation = content.BitsStored - 1, int(pixels.dtype.kind == "i")
    if colours:
        content.PlanarConfiguration = 0
    if pixels.ndim == 3 and not colours:
        content.NumberOfFrames = len(pixels)
    for name, value in tags.items():
        setattr(content, name, value)
    content.PixelData = pixels.tobytes()
    content["PixelData"].VR = "OB" if pixels.dtype.itemsize == 1 else "OW"
    file.parent.mkdir(parents=True, exist_ok=True)
    content.save_as(file, enforce_file_format=True)
    return file


def opened(file: Path, frame: int = 0, window: tuple[float, float] | None = None) -> np.ndarray:
    pictures = DicomPictures(PackedTexts.of([f"{file.name}#{frame}"]), 8, below=file.parent)
    pictures.window = window
    picture = pictures.opened(0)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    return picture[..., 0]


GREY = np.array([[0, 100, 200, 300]], np.uint16)


@pytest.mark.parametrize(
    ("photometric", "tags", "window", "expected"),
    [
        ("MONOCHROME2", {}, None, [0, 85, 170, 255]),
        ("MONOCHROME1", {}, None, [255, 170, 85, 0]),
        ("MONOCHROME2", {"WindowCenter": 100.5, "WindowWidth": 101}, None, [0, 128, 255, 255]),
        ("MONOCHROME1", {"WindowCenter": 100.5, "WindowWidth": 101}, None, [255, 127, 0, 0]),
        ("MONOCHROME2", {"WindowCenter": [100.5, 7], "WindowWidth": [101, 7]}, None, [0, 128, 255, 255]),
        ("MONOCHROME2", {"WindowCenter": 100, "WindowWidth": 200, "VOILUTFunction": "LINEAR_EXACT"}, None,
         [0, 128, 255, 255]),
        ("MONOCHROME2", {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 100.5, "WindowWidth": 101}, None,
         [0, 128, 255, 255]),
        ("MONOCHROME2", {"WindowCenter": 7, "WindowWidth": 7}, (100.5, 101.0), [0, 128, 255, 255]),
    ],
)  # fmt: skip
def test_grey_is_shown_as_a_viewer_does(
    photometric: str, tags: dict[str, Any], window: tuple[float, float] | None, expected: list[int], tmp_path: Path
) -> None:
    file = dicom(tmp_path / "a.dcm", GREY, photometric, **tags)
    assert opened(file, window=window)[0].tolist() == expected


CORNERS = np.array([[0, 51, 102], [153, 204, 255]], np.uint8)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({}, CORNERS),
        ({"ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}, CORNERS),  # axial, as usual
        ({"ImageOrientationPatient": [-1, 0, 0, 0, 1, 0]}, CORNERS[:, ::-1]),
        ({"ImageOrientationPatient": [1, 0, 0, 0, -1, 0]}, CORNERS[::-1]),
        ({"ImageOrientationPatient": [0, 1, 0, 1, 0, 0]}, CORNERS.T),
        ({"ImageOrientationPatient": [1, 0, 0, 0, 0, -1]}, CORNERS),  # coronal, head above
        ({"ImageOrientationPatient": [1, 0, 0, 0, 0, 1]}, CORNERS[::-1]),
        ({"ImageOrientationPatient": [0.99, 0.1, 0, -0.1, 0.99, 0]}, CORNERS),
        ({"PatientOrientation": ["L", "F"]}, CORNERS),
        ({"PatientOrientation": ["R", "F"]}, CORNERS[:, ::-1]),
        ({"PatientOrientation": ["L", "H"]}, CORNERS[::-1]),
        ({"PatientOrientation": ["AF", "FP"]}, CORNERS[:, ::-1]),
    ],
)
def test_pictures_stand_as_a_viewer_has_them(tags: dict[str, Any], expected: np.ndarray, tmp_path: Path) -> None:
    np.testing.assert_array_equal(opened(dicom(tmp_path / "a.dcm", CORNERS, **tags)), expected)


def test_too_little_memory_says_nothing_about_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    dicom(tmp_path / "a.dcm", GREY)
    nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.int16), np.eye(4)), tmp_path / "a.nii")
    monkeypatch.setattr(pydicom, "dcmread", full)
    monkeypatch.setattr(nibabel, "load", full)
    for pictures in (DicomPictures, NiftiSlices):
        name = "a.dcm#0" if pictures is DicomPictures else "a.nii#0"
        with pytest.raises(MemoryError):
            pictures(PackedTexts.of([name]), 8, below=tmp_path).fault(0)


def test_frames_and_colours(tmp_path: Path) -> None:
    frames = np.stack([np.full((2, 2), value, np.uint8) for value in (0, 50, 100)])
    frames[:, 0, 0] = 255
    frames[:, 0, 1] = 0
    file = dicom(tmp_path / "a.dcm", frames)
    assert [int(opened(file, frame)[1, 1]) for frame in range(3)] == [0, 50, 100]
    colours = np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)
    pictures = DicomPictures([f"{dicom(tmp_path / 'b.dcm', colours, 'RGB').name}#0"], 8, below=tmp_path)
    np.testing.assert_array_equal(pictures.opened(0), colours)


def table(folder: Path, header: Sequence[str], rows: Sequence[Sequence[str]], name: str = "labels.csv") -> None:
    with (folder / name).open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *rows])


OPTIONS: dict[str, Any] = {"image_size": 8, "clients": 2}


def scans(folder: Path, **tags: Any) -> list[list[str]]:
    """Two files of each of 20 patients, whose name only the files have."""
    rows: list[list[str]] = []
    for number in range(40):
        values = np.full((6, 6), 10 + number, np.uint16)
        values[0, 0], values[0, 1] = 0, 100
        dicom(folder / f"scans/{number}.dcm", values, PatientID=f"p{number // 2}", **tags)
        rows.append([f"scans/{number}.dcm", ("sick", "well")[number // 2 % 2], "ns"[number // 20]])
    return rows


def test_a_folder_of_dicom_is_dealt_and_patients_stay_together(tmp_path: Path) -> None:
    table(tmp_path, ("image", "label"), [row[:2] for row in scans(tmp_path)])
    data = dicom_folders(tmp_path, **OPTIONS)
    assert (data.answers, len(data.clients), data.facts["patients"]) == (("sick", "well"), 2, "20")
    sides: dict[int, set[str]] = {}
    count = 0
    for client, split in data.clients.items():
        for role, part in split.roles.items():
            for name in part.names:
                sides.setdefault(int(name.split("/")[1].split(".")[0]) // 2, set()).add(f"{client} {role}")
                count += 1
    assert count == 40
    assert all(len(side) == 1 for side in sides.values())
    train = data.clients["client-00"].train
    number = int(train.names[0].split("/")[1].split(".")[0])
    assert abs(int(train.images[int(train.image_index[0])][5, 5, 0]) - 255 * (10 + number) / 100) < 3


def test_clients_and_columns_of_the_table(tmp_path: Path) -> None:
    table(tmp_path, ("file", "finding", "site"), scans(tmp_path))
    (tmp_path / "._labels.csv").write_bytes(b"\0\5\x16\7")
    data = dicom_folders(tmp_path, columns={"image": "file", "label": "finding", "client": "site"}, image_size=8)
    assert {name: sum(map(len, split.roles.values())) for name, split in data.clients.items()} == {"n": 20, "s": 20}


def test_all_frames_of_a_file_stay_together(tmp_path: Path) -> None:
    rows: list[list[str]] = []
    for number in range(12):
        dicom(tmp_path / f"{number}.dcm", np.random.default_rng(number).integers(0, 255, (5, 6, 6), dtype=np.uint8))
        rows.append([f"{number}.dcm", "ab"[number % 2]])
    table(tmp_path, ("image", "label"), rows)
    data = dicom_folders(tmp_path, frames="all", **OPTIONS)
    names = [name for split in data.clients.values() for part in split.roles.values() for name in part.names]
    assert len(set(names)) == len(names) == 60
    assert len(dicom_folders(tmp_path, **OPTIONS).clients["client-00"].train.names[0].split("#2")) == 2
    for split in data.clients.values():
        files = [{name.split("#")[0] for name in part.names} for part in split.roles.values()]
        assert not files[0] & files[2]
        pictures = {split.train.images[int(row)].tobytes() for row in split.train.image_index}
        assert len(pictures) == len(split.train)


def test_what_is_wrong_with_scans_is_one_line(tmp_path: Path) -> None:
    rows = scans(tmp_path, BurnedInAnnotation="YES")
    table(tmp_path, ("image", "label"), [row[:2] for row in rows])
    with pytest.warns(UserWarning, match=r"40 files have text burned into their pixels, such as scans/0\.dcm"):
        dicom_folders(tmp_path, **OPTIONS)
    scans(tmp_path)
    (tmp_path / "scans" / "3.dcm").write_bytes((tmp_path / "scans" / "3.dcm").read_bytes()[:300])
    refuses(r"1 of 40 pictures.*3\.dcm: expected a DICOM picture, got", dicom_folders, tmp_path, **OPTIONS)
    with pytest.warns(UserWarning, match="left out"):
        assert dicom_folders(tmp_path, unreadable=0.1, **OPTIONS).unreadable is not None
    table(tmp_path, ("image", "label"), rows, "other.csv")
    refuses(r"got labels\.csv, other\.csv: name it with data\.table", dicom_folders, tmp_path, **OPTIONS)
    table(tmp_path, ("image", "klass"), [row[:2] for row in rows])
    with pytest.raises(ValueError, match=r"labels\.csv, row .*expected a cell 'label', got the columns image, klass"):
        dicom_folders(tmp_path, table="labels.csv", **OPTIONS)
    scans(tmp_path)
    splits = [[*row[:2], ("train", "test")[number % 2]] for number, row in enumerate(rows)]
    table(tmp_path, ("image", "label", "split"), splits)
    with pytest.warns(
        UserWarning, match="20 patients, documents or pictures are in several of .* such as patient 'p0'"
    ):
        dicom_folders(tmp_path, table="labels.csv", unreadable=1.0, **OPTIONS)


def nifti(file: Path, volume: np.ndarray, affine: np.ndarray | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4) if affine is None else affine), file)
    return file


def cube() -> np.ndarray:
    """Values tell the place: right + 10 x front + 100 x head, with axes to the right, the front and the head."""
    right, front, head = np.meshgrid(np.arange(2), np.arange(3), np.arange(4), indexing="ij")
    return (right + 10 * front + 50 * head).astype(np.int16)


def slice_of(file: Path, axis: int, number: int = 0, count: int = 1) -> list[list[int]]:
    pictures = NiftiSlices([f"{file.name}#{number}"], 8, below=file.parent)
    pictures.axis, pictures.count, pictures.window = axis, count, (127.5, 255.0)
    return pictures.opened(0)[..., 0].tolist()


AXIAL = [[121, 120], [111, 110], [101, 100]]  # the third slice of four: front above, right on the left
CORONAL = [[161, 160], [111, 110], [61, 60], [11, 10]]
SAGITTAL = [[171, 161, 151], [121, 111, 101], [71, 61, 51], [21, 11, 1]]


@pytest.mark.parametrize("order", ["RAS", "LPS", "SAR", "PIL"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_slices_are_the_same_whatever_the_order_of_axes(order: str, ending: str, tmp_path: Path) -> None:
    from nibabel import orientations

    image = nibabel.Nifti1Image(cube(), np.eye(4))
    change = orientations.ornt_transform(orientations.io_orientation(np.eye(4)), orientations.axcodes2ornt(order))
    nibabel.save(image.as_reoriented(change), tmp_path / f"a{ending}")
    shown = [slice_of(tmp_path / f"a{ending}", axis) for axis in (2, 1, 0)]
    assert shown == [AXIAL, CORONAL, SAGITTAL]


def test_slices_are_evenly_spaced_and_scaled(tmp_path: Path) -> None:
    file = nifti(tmp_path / "a.nii", cube())
    assert [slice_of(file, 2, number, 2)[2][1] for number in range(2)] == [50, 150]
    values = np.linspace(0, 1000, 8000).reshape(20, 20, 20).astype(np.float32)
    values[0, 0, 0] = np.nan
    pictures = NiftiSlices([f"{nifti(tmp_path / 'b.nii', values).name}#0"], 8, below=tmp_path)
    shown = pictures.opened(0)
    assert shown.min() < 5
    assert shown.max() > 250
    four = nifti(tmp_path / "c.nii", np.stack([cube(), 2 * cube()], axis=3))
    assert slice_of(four, 2) == AXIAL


def test_a_folder_of_volumes_is_shared_out(tmp_path: Path) -> None:
    rows: list[list[str]] = []
    for number in range(16):
        nifti(tmp_path / f"{number}.nii.gz", np.random.default_rng(number).integers(0, 9, (6, 6, 6), dtype=np.int16))
        rows.append([f"{number}.nii.gz", "ab"[number % 2], f"p{number // 2}"])
    table(tmp_path, ("image", "label", "patient"), rows)
    data = nifti_slices(tmp_path, slices=3, plane="coronal", **OPTIONS)
    parts = [part for split in data.clients.values() for part in split.roles.values()]
    assert sum(map(len, parts)) == 48
    patients = [{int(name.split(".")[0]) // 2 for name in part.names} for part in parts]
    assert sum(map(len, patients)) == 8
    (tmp_path / "0.nii.gz").write_bytes(b"no volume")
    refuses(r"0\.nii\.gz: expected a NIfTI volume, .nii or .nii.gz, got", nifti_slices, tmp_path, **OPTIONS)
    for options, message in (({"slices": 0}, "at least 1"), ({"plane": "top"}, "axial, coronal, sagittal")):
        refuses(message, nifti_slices, tmp_path, **{**OPTIONS, **options})


def test_the_readers_are_small_and_have_a_name_at_once() -> None:
    assert {"dicom_folders", "nifti_slices"} <= set(datasets.names())
    files = {sys.modules[datasets[name].__module__].__file__ or "" for name in ("dicom_folders", "nifti_slices")}
    assert sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files) <= 200
