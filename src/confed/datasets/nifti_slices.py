"""Classification of slices of NIfTI volumes in a folder of the user's, with a table of files and labels.

Below ``root`` a table (``labels.csv``) with ``image``, a volume's path (.nii or .nii.gz), and ``label``; if wanted
``patient``, ``client`` and ``split``. Slices are shown as a viewer shows them: the patient's right, or front, on the
left, the head or front above, whatever the order of the file's axes. Of several volumes in a file the first is read.
"""

from functools import lru_cache
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
