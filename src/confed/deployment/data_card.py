"""Data cards of recipes: made from the data, merged over sites, and used in place of the data."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from confed.data.card_files import Card, digest_of, merged, read_card
from confed.datasets.card import card_of
from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe
from confed.runs.dataset import load_dataset

CARD = "card"  # registered name of data at other sites; also the key of [data] for a card in whose terms data are put


def card_of_recipe(recipe: Recipe) -> Card:
    """The card of a recipe's data.

    Faulty data are a ValueError.
    """
    data = recipe.sections["data"]
    return card_of(load_dataset(json.dumps(data, default=str), recipe.run.seed), str(data["name"]))


def write_card(card: Card, out: Path) -> None:
    text = card.to_json().encode()
    if out.exists() and (not out.is_file() or out.read_bytes() != text):
        raise ValueError(f"{out} is there already, and no card is overwritten: give --out another name, or remove it")
    write_atomically(out, text)


def merge_cards(files: Sequence[Path]) -> Card:
    """One card for the data of several sites; see :func:`confed.data.card_files.merged`.

    A file that is no card, and cards that contradict each other, are a ValueError.
    """
    return merged([read_card(file) for file in files])


def with_card(recipe: Recipe, file: Path) -> Recipe:
    """A recipe for a server without data: the card takes the place of the section ``[data]``."""
    card, name = read_card(file), recipe.sections["data"]["name"]
    if name != card.data:
        raise ValueError(f"{file} is a card of the data {card.data!r}, and the recipe's are {name!r}")
    data = {"name": CARD, "file": str(file.resolve()), "digest": digest_of(file)}
    return replace(recipe, sections={**recipe.sections, "data": data})
