"""Labelled random pictures of 16 x 16 pixels, with four words each where asked for."""

import torch

from confed.data.table import Table

__all__ = ["labelled_pictures"]


def labelled_pictures(count: int, rng: torch.Generator, words: bool = False) -> Table:
    """So many pictures with one of four labels."""
    columns = {"label": torch.randint(0, 4, (count,), generator=rng)}
    if words:
        columns["text"] = torch.randint(0, 9, (count, 4), generator=rng)
        columns["text_mask"] = torch.ones(count, 4, dtype=torch.int64)
    pictures = torch.randint(0, 256, (max(count, 1), 3, 16, 16), generator=rng).to(torch.uint8)
    return Table(pictures, torch.arange(count), columns)
