"""Loading of a recipe's data: missing modalities, alignment with a data card, region features."""

import json
from functools import cached_property, lru_cache
from inspect import signature
from pathlib import Path

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Pictures, kind_made
from confed.data.imputation import Fill, check_loses, drop_modalities, impute, missing_of
from confed.data.modalities import check_ownership, in_turns, is_modal
from confed.data.pictures import fitted
from confed.data.readable import leave_out_unreadable
from confed.data.regions import Regions
from confed.datasets.card import aligned_to_card, read_card
from confed.models.encoders import cells_of
from confed.models.grid_features import grid_features
from confed.registry import datasets


class Source:
    """A dataset, and the regions of its pictures once a model asks for them; models of one study share both."""

    def __init__(self, dataset: FederatedDataset, fill: Fill = "zero", cells: str = "") -> None:
        self.dataset = dataset
        self.cells = cells
        self.fill: Fill = fill
        self.modal = is_modal(dataset)

    @cached_property
    def whole(self) -> "Source":
        """The same source with stand-ins for missing pictures; itself where none is missing."""
        complete = impute(self.dataset, self.fill) if self.modal else self.dataset
        return self if complete is self.dataset else Source(complete, self.fill, self.cells)

    @cached_property
    def regions(self) -> dict[int, Regions]:
        """The dataset's features by the identity of their tables; where it has none, made of each table of pictures."""
        name = self.dataset.name
        if any(np.ndim(examples.image_index) > 1 for examples in self.dataset.everything):
            raise ValueError(f"{name!r} has questions about two pictures; models that read regions look at one")
        if {examples.regions is None for examples in self.dataset.everything} == {True, False}:
            raise ValueError(f"either all examples of {name!r} must have regions, or none")
        tables: dict[int, Regions] = {}
        for examples in self.dataset.everything:
            key = picture_table_id(examples)
            if key not in tables:
                tables[key] = self._made_of(examples.images) if examples.regions is None else examples.regions
        widths = sorted({regions.shape[2] for regions in tables.values()})
        if len(widths) > 1:
            raise ValueError(f"all regions of {name!r} must have as many features, got {widths}")
        encoders = sorted({regions.encoder for regions in tables.values()})
        if len(encoders) > 1:
            raise ValueError(f"all regions of {name!r} must be made by one encoder, got {encoders}")
        return tables

    def _made_of(self, images: np.ndarray | Pictures) -> Regions:
        return cells_of(images, self.cells) if self.cells else grid_features(images)


def picture_table_id(examples: Examples) -> int:
    """The identity of the table of regions, or of the pictures that they are made of."""
    return id(examples.images if examples.regions is None else examples.regions)


def load_dataset(data: str, seed: int) -> FederatedDataset:
    """A recipe's data as they are before any model reads them."""
    return load_source(data, seed).dataset


@lru_cache(maxsize=2)
def load_source(data: str, seed: int) -> Source:
    """As :func:`load_dataset`, with the regions of its pictures; kept for the next recipe with the same data."""
    values = json.loads(data)
    constructor, missing = datasets[values.pop("name")], missing_of(values.pop("missing", {}))
    terms, fit, cells = values.pop("card", ""), values.pop("fit", "squeeze"), values.pop("cells", "")
    if "seed" in signature(constructor).parameters:
        values["seed"] = seed
    # Before such data are made, which may take long.
    check_loses(missing, kind_made(constructor), str(getattr(constructor, "__name__", constructor)))
    with fitted(fit):
        dataset: FederatedDataset = constructor(**values)
    if dataset.elsewhere is None:
        check_ownership(dataset)
        dataset = leave_out_unreadable(dataset)
    aligned = aligned_to_card(dataset, read_card(Path(terms))) if terms else dataset
    dataset = drop_modalities(aligned, missing, seed)
    return Source(in_turns(dataset) if is_modal(dataset) else dataset, missing.fill, cells)
