"""Classification of medical pictures in a folder of the user's: DICOM or NIfTI files, with a table of labels.

Below ``root`` a table (``labels.csv``) with ``image``, a file's path, and ``label``; if wanted ``patient``, ``client``
and ``split``. Pictures are as a viewer shows them: the patient's right, or front, on the left, the head or front above.

DICOM pictures are rescaled, in their window (PS3.3 C.11.2), light where MONOCHROME1 says dark; without a column of
patients these are those of the files (Patient ID). Volumes are .nii or .nii.gz, whatever the order of their axes; of
several volumes in a file the first is read.
"""

import warnings
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from confed.data.bounded_files import check_array
from confed.data.examples import FederatedDataset
from confed.data.intake.class_table import ClassOptions, NumberedPictures, class_rows, federate_classes
from confed.data.intake.opening import read_picture
from confed.data.refusals import expecting, library, refuse
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE

# DICOM --------------------------------------------------------------------------------------------------------

_AXES = {"L": (0, 1), "R": (0, -1), "P": (1, 1), "A": (1, -1), "H": (2, 1), "F": (2, -1)}
_SHOWN = (1, 1, -1)
"""Letters of directions as axis and sign; and those of a viewer: towards the patient's left, back and feet."""


@reader(
    "root partition * table columns frames window clients alpha validation test_share max_train unreadable check "
    "image_size seed",
    things="examples",
)
def dicom_folders(
    how: ClassOptions,
    frames: Literal["middle", "all"] = "middle",
) -> FederatedDataset:
    """DICOM pictures with one class each; a patient's are on one side of every split.

    Options:
        frames: of files with several, the one in the middle or all.
    """
    folder, rows, names, burned = how.folder, list[Any](), list[str](), list[str]()
    for row in class_rows(folder, how.table, how.columns):
        head = _header(folder / row.image)
        count = int(head.get("NumberOfFrames") or 1)
        shown = range(count) if frames == "all" else (count // 2,)
        burned += [row.image] if head.get("BurnedInAnnotation") == "YES" else []
        rows += [row._replace(patient=row.patient or str(head.get("PatientID", "")))] * len(shown)
        names += [f"{row.image}#{number}" for number in shown]
    if burned:
        warnings.warn(f"{len(burned)} files have text burned into their pixels, such as {burned[0]}", stacklevel=2)
    pictures = DicomPictures(names, how.image_size, below=folder, unreadable=how.unreadable, check=how.check)
    pictures.window = how.window
    return federate_classes("dicom_folders", rows, pictures, how, {"origin": "DICOM files of a folder"})


class DicomPictures(NumberedPictures):
    """Frames of DICOM files; names have the frame behind "#"."""

    def opened(self, row: int) -> np.ndarray:
        file, frame = self.file(row), self.number(row)
        with expecting(file, "a DICOM picture", Exception):
            content = library("pydicom", file, "medical").dcmread(file)
            check_array((int(content.Rows), int(content.Columns), 3), np.dtype(np.float64), str(file))
            pixels = import_module("pydicom.pixels").pixel_array(content, index=frame)
            return _upright(_shown_pixels(content, pixels, self.window), content)


def _header(file: Path) -> Any:
    """What a file says of its pixels; nothing where it cannot be read, which the check of pictures says."""
    pydicom, tags = library("pydicom", file, "medical"), ["PatientID", "NumberOfFrames", "BurnedInAnnotation"]
    try:
        return pydicom.dcmread(file, stop_before_pixels=True, specific_tags=tags)
    except (OSError, pydicom.errors.InvalidDicomError):
        return {}


def _shown_pixels(content: Any, pixels: np.ndarray, window: tuple[float, float] | None) -> np.ndarray:
    """Stored values as uint8, grey (H, W) or colours (H, W, 3)."""
    tools = import_module("pydicom.pixels")
    if content.PhotometricInterpretation == "PALETTE COLOR":
        pixels = tools.apply_color_lut(pixels, content)
    if pixels.ndim == 3:
        return (pixels >> 8).astype(np.uint8) if pixels.dtype.itemsize > 1 else pixels.astype(np.uint8)
    values = np.asarray(tools.apply_modality_lut(pixels, content), dtype=np.float64)
    if window is None and content.get("VOILUTSequence"):
        values = np.asarray(tools.apply_voi(tools.apply_modality_lut(pixels, content), content), dtype=np.float64)
    elif window is None and content.get("WindowCenter") is not None:
        window = float(np.ravel(content.WindowCenter)[0]), float(np.ravel(content.WindowWidth)[0])
    low, high = float(values.min()), float(values.max())
    if window is not None:  # PS3.3 C.11.2.1.2: half a unit less, and the width from the first to the last value
        exact = content.get("VOILUTFunction") == "LINEAR_EXACT"
        centre, width = (window[0], window[1]) if exact else (window[0] - 0.5, window[1] - 1)
        low, high = centre - width / 2, centre + width / 2
    grey = np.rint(255 * np.clip((values - low) / max(high - low, 1e-9), 0, 1)).astype(np.uint8)
    return 255 - grey if content.PhotometricInterpretation == "MONOCHROME1" else grey


def _upright(pixels: np.ndarray, content: Any) -> np.ndarray:
    """Rows towards the patient's left or back, columns towards back or feet; as it is where the file does not say."""
    cosines, letters = content.get("ImageOrientationPatient"), content.get("PatientOrientation") or ()
    directions: list[tuple[int, int]] = []
    for vector in np.reshape(np.array(cosines, dtype=np.float64), (2, 3)) if cosines else ():
        axis = int(np.abs(vector).argmax())
        directions.append((axis, int(np.sign(vector[axis]))))
    if not directions and len(letters) == 2 and all(letter[:1] in _AXES for letter in letters):
        directions = [_AXES[letter[0]] for letter in letters]
    if not directions or directions[0][0] == directions[1][0]:
        return read_picture(pixels)
    if directions[0][0] > directions[1][0]:
        pixels, directions = pixels.swapaxes(0, 1), directions[::-1]
    for image_axis, (axis, sign) in zip((1, 0), directions, strict=True):
        pixels = pixels if sign == _SHOWN[axis] else np.flip(pixels, image_axis)
    return read_picture(np.ascontiguousarray(pixels))


# NIfTI --------------------------------------------------------------------------------------------------------

Plane = Literal["axial", "coronal", "sagittal"]
"""Slices across, from front to back, from left to right."""
_AXIS = {"sagittal": 0, "coronal": 1, "axial": 2}
_SHARES = (0.5, 99.5)
"""Percentiles of a volume's values that are black and white, where nothing else says it."""


@reader(
    "root partition * table columns plane slices window clients alpha validation test_share max_train unreadable check "
    "image_size seed",
    things="examples",
)
def nifti_slices(
    how: ClassOptions,
    plane: Plane = "axial",
    slices: Annotated[int, AT_LEAST_ONE] = 1,
) -> FederatedDataset:
    """Slices of volumes with one class each; those of a volume and of a patient are on one side of every split.

    Options:
        plane: "axial", "coronal" or "sagittal".
        slices: how many of each volume, evenly spaced and the middle one among an odd number.

    Raises ``ValueError``: nibabel is not installed, the table is missing or faulty, or too many files cannot be read.
    """
    library("nibabel", "nifti_slices", "medical")
    folder, rows, names = how.folder, list[Any](), list[str]()
    for row in class_rows(folder, how.table, how.columns):
        rows += [row] * slices
        names += [f"{row.image}#{number}" for number in range(slices)]
    pictures = NiftiSlices(names, how.image_size, below=folder, unreadable=how.unreadable, check=how.check)
    pictures.axis, pictures.count, pictures.window = _AXIS[plane], slices, how.window
    return federate_classes("nifti_slices", rows, pictures, how, {"origin": f"{plane} slices of NIfTI volumes"})


class NiftiSlices(NumberedPictures):
    """Slices of NIfTI volumes; names have the slice's number behind "#"."""

    axis, count = 2, 1

    def opened(self, row: int) -> np.ndarray:
        file, number = self.file(row), self.number(row)
        volume, low, high = _volume(file, self.version(row))
        if self.window is not None:
            low, high = self.window[0] - self.window[1] / 2, self.window[0] + self.window[1] / 2
        place = (2 * number + 1) * volume.shape[self.axis] // (2 * self.count)
        values = np.take(volume, place, axis=self.axis).T[::-1, ::-1].astype(np.float64)
        grey = 255 * np.clip((np.nan_to_num(values) - low) / max(high - low, 1e-9), 0, 1)
        return read_picture(np.rint(grey).astype(np.uint8))


@lru_cache(maxsize=4)  # slices of one volume are asked for one after the other
def _volume(file: Path, version: tuple[int, ...]) -> tuple[np.ndarray, float, float]:
    """A volume with axes towards the patient's right, front and head, float32, and which values are black and white."""
    del version  # it tells one state of the file from another
    nibabel = library("nibabel", file, "medical")
    with expecting(file, "a NIfTI volume, .nii or .nii.gz", Exception):
        image = nibabel.load(file)
        check_array(image.shape, np.dtype(np.float64), str(file))
        if len(image.shape) < 3:
            refuse(file, "a volume of at least three axes", found=image.shape)
        volume = np.asarray(nibabel.as_closest_canonical(image).dataobj, dtype=np.float32)
        volume = volume.reshape(*volume.shape[:3], -1)[..., 0]
        limits = float(image.header["cal_min"]), float(image.header["cal_max"])
    if not limits[1] > limits[0]:
        low, high = np.percentile(volume[np.isfinite(volume)], _SHARES)
        limits = float(low), float(high)
    return volume, *limits
