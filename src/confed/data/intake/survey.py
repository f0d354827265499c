"""What is said of a folder's pictures from their headers, before a model reads them."""

from collections import defaultdict
from pathlib import Path

from confed.data.intake.opening import look
from confed.data.intake.walk import walk

MOST = 10_000
"""Files that are looked at, evenly spaced."""
_UNEVEN = 1.5
"""Proportions from which on a squeezed picture is spoken of."""
_FITS = {"squeeze": "squeezed", "crop": "cropped at the middle", "pad": "between bars of grey"}


def survey(folder: Path, side: int, fit: str) -> tuple[str, list[str]]:
    """Sizes of a folder's pictures, which become squares of ``side`` pixels, and warnings, a line each."""
    paths = walk(folder).pictures
    sizes: list[tuple[int, int]] = []
    kinds: dict[str, list[str]] = defaultdict(list)
    for parts in paths[:: -(-len(paths) // MOST) or 1]:
        seen = look(folder.joinpath(*parts))
        if seen is None:
            continue
        size, special = seen
        sizes.append(size)
        if max(size) < side:
            special.append(f"are smaller than the {side} x {side} pixels that the model reads")
        if fit == "squeeze" and max(size) > _UNEVEN * min(size):
            special.append('are far from square and are squeezed (data.fit = "crop" or "pad" keeps proportions)')
        for what in special:
            kinds[what].append("/".join(parts))
    if not sizes:
        return "", []
    sizes.sort(key=lambda size: size[0] * size[1])
    least, most = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    between = least if least == most else f"{least} to {most}"
    told = f"{len(sizes)} of {len(paths)} looked at, {between} pixels; the model reads {side} x {side}, {_FITS[fit]}"
    return told, [f"{len(names)} pictures {what}, such as {names[0]}" for what, names in kinds.items()]
