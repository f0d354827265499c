"""Whether data, model and method fit where clients have pictures, texts, sounds and series, or only some of these."""

import warnings
from collections.abc import Mapping, Sequence
from math import ceil

from torch import nn

from confed.data.examples import FederatedDataset, TableData
from confed.data.labelled import LabelDataset
from confed.data.modal_tables import ModalTable
from confed.data.modalities import longest
from confed.engines.perform import listed
from confed.federation.algorithm import Algorithm
from confed.federation.families.public_data import UsesPublicData
from confed.federation.ownership import unowned
from confed.federation.params import named_tensors
from confed.federation.protocols import ClientData
from confed.recipes.recipe import Recipe
from confed.runs.encode import RunData, reads_absent

__all__ = ["check_lengths", "check_modalities", "check_whole", "public_data", "warn_of_long_texts"]


def check_modalities(recipe: Recipe, data: str, owned: tuple[str, ...] | Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError if a client has nothing that the model reads; warns if the model reads what no client has."""
    if isinstance(owned, tuple):
        return
    model = recipe.sections["model"]
    gaps = reads_absent(model["name"])
    reads: Sequence[str] | None = model.get("modalities") if gaps else ("image", "text")
    if reads is None:
        return
    blind = [name for name, own in owned.items() if not set(reads) & set(own)]
    if blind and gaps:
        raise ValueError(
            f"model.modalities must have something of every client, got {', '.join(reads)}; of these {listed(blind)} "
            "have nothing"
        )
    if blind:
        raise ValueError(
            f"the model {model['name']!r} reads pictures and texts, of which {listed(blind)} have neither: leave these "
            "clients out (run.without), or take a model that reads other modalities"
        )
    nobodys = [name for name in reads if not any(name in own for own in owned.values())]
    if nobodys and gaps:
        warnings.warn(
            f"model.modalities names {', '.join(nobodys)}, which no client of {data!r} has: what reads it never learns",
            stacklevel=3,
        )


def check_lengths(recipe: Recipe, dataset: FederatedDataset | LabelDataset) -> None:
    """Raises ValueError if a sound or series is longer than the model reads, or it reads series and there are none."""
    if not isinstance(dataset, FederatedDataset) or not reads_absent(recipe.sections["model"]["name"]):
        return
    options = {"audio": ("audio_seconds", "sounds"), "series": ("series_steps", "series")}
    found = longest(dataset)
    if "series" in (recipe.sections["model"].get("modalities") or ()) and "series" not in found:
        raise ValueError(
            f"model.modalities names series, of which {dataset.name!r} has none, so nothing tells how many channels "
            "to read"
        )
    for modality, (length, unit) in found.items():
        key, what = options[modality]
        most = recipe.sections["model"].get(key)
        if most is not None and length > round(most * unit):
            raise ValueError(
                f"model.{key} must be at least {ceil(100 * length / unit) / 100:g}, as long as the longest of the "
                f"{what} of {dataset.name!r}, got {most}"
            )


def warn_of_long_texts(run_data: RunData) -> None:
    """Says how many different texts lose their end, whatever the dataset and the model.

    Args:
        run_data: the data, and the tokenizer that reads them.
    """
    cut, texts = run_data.texts_cut
    if cut:
        warnings.warn(
            f"{cut} of {texts} different texts of {run_data.dataset.name!r} are longer than model.max_length = "
            f"{getattr(run_data.tokenizer, 'max_length', '?')} tokens and lose their end",
            stacklevel=3,
        )


def check_whole(algorithm: Algorithm, model: nn.Module, owned: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError if a method needs all clients in all of the model, and they have not the same modalities."""
    names = named_tensors(model)
    read = {client: {*names} - unowned(names, own) for client, own in owned.items()}
    first = next(iter(read))
    other = next((client for client in read if read[client] != read[first]), None)
    if other is not None:
        raise ValueError(
            f"{algorithm.title} keeps sums over all clients, so all of them must have the "
            f"same modalities, and {first!r} has {'+'.join(owned[first])}, {other!r} {'+'.join(owned[other])}"
        )


def public_data(
    algorithm: Algorithm,
    dataset: FederatedDataset | LabelDataset,
    unseen: Mapping[str, ClientData],
    owned: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
) -> tuple[ClientData | None, Mapping[str, ClientData]]:
    """What every client holds besides its own, where the method needs that, and the unseen places that are left.

    Raises:
        ValueError: the method names no unseen place, the clients' answers are not the same, or a client has no
            modality in which it could see some of the place's examples.
    """
    if not isinstance(algorithm, UsesPublicData):
        return None, unseen
    place = algorithm.public_place()
    name = algorithm.title
    if isinstance(dataset, FederatedDataset) and (dataset.answer_sets or dataset.tasks):
        raise ValueError(
            f"{name} averages scores, and the clients of {dataset.name!r} have answers or tasks of their own"
        )
    if place not in unseen:
        there = f"one of {listed(list(unseen))}" if unseen else f"one, but {dataset.name!r} has none"
        raise ValueError(
            f"algorithm.public must name an unseen place whose examples every client is to hold, {there}; got {place!r}"
        )
    data = unseen[place]
    table = data.tables[0] if isinstance(data, TableData) else None
    sets = table.sets() if isinstance(table, ModalTable) else []
    for client, own in ({} if isinstance(owned, tuple) else owned).items():
        strange = next((there for there in sets if not set(there) & set(own)), None)
        if strange is not None:
            raise ValueError(
                f"algorithm.public must name a place whose every example each client can see: {place!r} has some with "
                f"{'+'.join(strange)} only, and client {client!r} has {'+'.join(own)}"
            )
    return data, {other: kept for other, kept in unseen.items() if other != place}
