"""Sections of a recipe: their checks, and the parts that rows of a study have of their own."""

from collections.abc import Mapping
from typing import Any, get_args

from confed.data.imputation import missing_of
from confed.data.pictures import Fit
from confed.recipes.overrides import NAMED
from confed.recipes.schema import DERIVED, plain, validate


def named_section(section: str, values: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """A section that names a constructor, checked, with defaults filled in."""
    values = dict(values)
    where = where or section
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{where}.name must be given, the name of one {NAMED[section].kind}; there are "
            f"{', '.join(NAMED[section].names())}"
        )
    # What examples lose at random, in whose terms they are put and how pictures become squares is no dataset's affair.
    missing = values.pop("missing", None) if section == "data" else None
    card = values.pop("card", None) if section == "data" else None
    fit = values.pop("fit", None) if section == "data" else None
    checked = validate(NAMED[section][name], values, where, DERIVED.get(section, set()))
    if card is not None and not (isinstance(card, str) and card):
        raise ValueError(f"{where}.card must name a card's file, got {card!r}")
    if missing is not None:
        missing_of(missing, f"{where}.missing")
        checked = {**checked, "missing": plain(missing)}
    if fit is not None:
        if fit not in get_args(Fit) or "image_size" not in checked:
            ways = " or ".join(get_args(Fit))
            raise ValueError(f"{where}.fit must be {ways}, of a dataset with image_size, got {fit!r} of {name!r}")
        checked = {**checked, "fit": fit}
    return {"name": name, **checked, **({} if card is None else {"card": card})}


def without_local(given: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """A row's keywords without those of its ``local`` that a model decides."""
    if "local" not in given:
        return dict(given)
    return {**given, "local": {key: value for key, value in given["local"].items() if key not in taken}}


def taken_part(given: dict[str, Any], part: str, where: str) -> dict[str, Any]:
    """Takes a row's own section out of its keywords."""
    values = given.pop(part, {})
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}.{part} must be a section of [{part}]'s keys, got {values!r}")
    return dict(values)
