"""SentencePiece model of a recipe's public texts, for models that write."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from confed.data.examples import FederatedDataset
from confed.data.refusals import refuse
from confed.models.caption_tokenizer import train_pieces
from confed.recipes.recipe import load_recipe
from confed.registry import datasets


def prepare_pieces(recipe: str | Path, out: Path, size: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Training of a SentencePiece model on the texts of a recipe's data that no client has."""
    loaded = load_recipe(recipe, overrides)
    options = dict(loaded.sections["data"])
    constructor = datasets[options.pop("name")]
    for key in ("missing", "card", "fit"):
        options.pop(key, None)
    if "seed" in signature(constructor).parameters:
        options["seed"] = loaded.run.seed
    dataset: FederatedDataset = constructor(**options)
    if not dataset.public:
        refuse(loaded.name, "public texts", found="none", remedy="give a share of the data (data.public)")
    pieces = train_pieces(dataset.public, out, size)
    return {"file": str(out), "pieces": pieces, "texts": len(dataset.public)}
