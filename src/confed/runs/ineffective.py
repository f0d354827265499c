"""Warnings of settings without effect and of missing test data, before a run begins."""

import warnings
from collections.abc import Mapping
from inspect import Parameter, signature
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from confed.models.tokenizer import CountsShortened
from confed.recipes.run_section import Run
from confed.registry import datasets

if TYPE_CHECKING:
    from confed.runs.encode import RunData

__all__ = ["warn_of_ignored", "warn_of_long_texts"]

LOOKED_AT = 1000
"""Clients whose test examples are looked for; where none of the first so many has any, more are not asked."""


def warn_of_ignored(data: Mapping[str, Any], run: Run, run_data: "RunData") -> None:
    """Warnings of an ineffective number of clients, of a cohort beyond it, and of missing test data.

    Args:
        data: the section ``[data]``.
        run: the section ``[run]``.
        run_data: the data as tensors, all clients of the run among them.
    """
    there = len(run_data.clients)
    asked, usual = data.get("clients"), signature(datasets[data["name"]]).parameters.get("clients")
    default = Parameter.empty if usual is None else usual.default
    made = there + len(run.without)
    # A card puts a site's data in the terms of all; whose examples these are is another matter.
    if isinstance(asked, int) and asked not in (made, default) and run_data.dataset.elsewhere is None:
        _say(f"data.clients = {asked} has no effect: who the {made} clients are follows from other keys of [data]")
    if run.cohort >= 1 and run.cohort > there:
        _say(f"run.cohort = {run.cohort:g} is more than the {_counted(there)}: all take part in every round")
    # Unseen places first: clients' examples may be made only when they are asked for.
    places = chain(run_data.unseen.values(), islice(run_data.clients.values(), LOOKED_AT))
    if run_data.dataset.elsewhere is None and not any(len(data.tables[2]) for data in places):
        _say("there are no test examples, of clients or unseen places: nothing is measured at the end of the run")


def _counted(clients: int) -> str:
    return "one client there is" if clients == 1 else f"{clients} clients there are"


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def warn_of_long_texts(run_data: "RunData") -> None:
    """Warning that counts truncated texts.

    Args:
        run_data: the data, and the tokenizer that reads them.
    """
    cut, texts = run_data.texts_cut
    if cut and isinstance(run_data.tokenizer, CountsShortened):
        warnings.warn(
            f"{cut} of {texts} different texts of {run_data.dataset.name!r} are longer than model.max_length = "
            f"{run_data.tokenizer.max_length} tokens and lose their end",
            stacklevel=3,
        )
