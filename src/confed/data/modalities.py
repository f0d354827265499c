"""Modalities of examples: pictures, texts, sound and sensor series."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.modality_names import set_name, set_names, sort_modalities
from confed.data.picture_tables import NoPictures
from confed.federation.ownership import MODALITIES

SIX_CLIENTS: Mapping[str, tuple[str, ...]] = {
    "only_image": ("image",),
    "only_text": ("text",),
    "only_audio": ("audio",),
    "image_text": ("image", "text"),
    "image_audio": ("image", "audio"),
    "image_text_audio": ("image", "text", "audio"),
}
"""Clients of datasets of pictures, texts and sounds, and what each of them owns."""
SUBSETS: tuple[tuple[str, ...], ...] = (
    *(("image",), ("text",), ("audio",)),
    *(("image", "text"), ("image", "audio"), ("text", "audio")),
    ("image", "text", "audio"),
)
"""All sets of pictures, texts and sounds."""

RUN = 64
"""Rows with the same set that stand behind each other, at most, where a table has several sets."""


def is_modal(dataset: FederatedDataset) -> bool:
    """Whether there is more to a dataset than pictures with texts that are always there."""
    return bool(dataset.modalities) or any(
        e.sounds is not None or e.series is not None or e.present is not None for e in dataset.everything
    )


def longest(dataset: FederatedDataset) -> dict[str, tuple[int, float]]:
    """The longest sound and the longest series that some example has, as far as there are any."""
    longest_of: dict[str, tuple[int, float]] = {}
    for examples in dataset.everything:
        present = presence(examples)
        tables = (
            ("audio", examples.sounds, examples.sound_index, 1.0 if examples.sounds is None else examples.sounds.rate),
            ("series", examples.series, examples.series_index, 1.0),
        )
        for name, table, index, unit in tables:
            if table is None or index is None:
                continue
            lengths = table.lengths[index[present[:, MODALITIES.index(name)]]]
            longest_of[name] = max(longest_of.get(name, (0, unit)), (int(lengths.max(initial=0)), unit))
    return longest_of


def modalities_of(dataset: FederatedDataset) -> dict[str, tuple[str, ...]]:
    """Modalities of each client, in the fixed order; by default those of its examples."""
    if dataset.modalities:
        return {name: sort_modalities(dataset.modalities[name], f"client {name!r}") for name in dataset.clients}
    return dict.fromkeys(dataset.clients, modalities_in(dataset.parts))


def owned_by_clients(dataset: FederatedDataset) -> tuple[str, ...] | dict[str, tuple[str, ...]]:
    """Modalities of all clients' examples, or of each client's where examples may lack some."""
    if is_modal(dataset):
        return modalities_of(dataset)
    return tuple(name for name, given in dataset.everything[0].tables.items() if given)


def check_ownership(dataset: FederatedDataset) -> None:
    """Check of the declared modalities of clients against those of their examples."""
    if not dataset.modalities:
        return
    strange = [name for name in dataset.modalities if name not in dataset.clients]
    silent = [name for name in dataset.clients if not dataset.modalities.get(name)]
    if strange or silent:
        raise ValueError(
            f"the modalities of {dataset.name!r} must be given for each client and no other; "
            + (f"there is no client {strange[0]!r}" if strange else f"nothing is said of {silent[0]!r}")
        )
    for name, split in dataset.clients.items():
        owned = sort_modalities(dataset.modalities[name], f"client {name!r}")
        train, everywhere = modalities_in([split.train]), modalities_in(split.roles.values())
        for modality in MODALITIES:
            if modality in owned and modality not in train:
                raise ValueError(f"client {name!r} declares {modality} and has no training example with it")
            if modality not in owned and modality in everywhere:
                raise ValueError(f"client {name!r} has examples with {modality}, which it does not declare: {owned}")


def in_turns(dataset: FederatedDataset) -> FederatedDataset:
    """A dataset of whose examples those with one set stand together, in runs of up to :data:`RUN`."""
    return dataset.changed(lambda examples, _, __: _turns(examples))


def _turns(examples: Examples) -> Examples:
    present = presence(examples)
    if len(present) == 0 or bool((present == present[0]).all()):
        return examples
    _, kind = np.unique(present, axis=0, return_inverse=True)
    runs: list[tuple[float, np.ndarray]] = []
    for number in range(int(kind.max()) + 1):
        rows = np.flatnonzero(kind.reshape(-1) == number)
        pieces = np.array_split(rows, -(-len(rows) // RUN))
        # The middle of each run, as a share of the set's rows, says when its turn comes.
        runs += [((position + 0.5) / len(pieces), piece) for position, piece in enumerate(pieces)]
    runs.sort(key=lambda run: (run[0], int(run[1][0])))
    return examples.take(np.concatenate([piece for _, piece in runs]))


def relabelled(before: Examples, after: Examples) -> Examples:
    """Types of examples after a change of modalities, where types are names of sets."""
    was, now = set_names(presence(before)), set_names(presence(after))
    types = [new if kind == old else kind for kind, old, new in zip(after.types, was, now, strict=True)]
    return replace(after, types=types)


def modalities_in(parts: Iterable[Examples]) -> tuple[str, ...]:
    """The modalities of which some of the examples have something."""
    present_anywhere = np.zeros(len(MODALITIES), dtype=bool)
    for examples in parts:
        present_anywhere |= presence(examples).any(axis=0)
    return tuple(name for name, present in zip(MODALITIES, present_anywhere.tolist(), strict=True) if present)


def showing(whole: Examples, shown: Sequence[str], names: Sequence[str]) -> Examples:
    """Examples of pictures, texts and sounds of which only some modalities are there."""
    count = len(whole)
    image, text, audio = (modality in shown for modality in ("image", "text", "audio"))
    return replace(
        whole,
        images=whole.images if image else NoPictures(1),
        image_index=whole.image_index if image else np.zeros(count, np.int64),
        questions=whole.questions if text else [""] * count,
        types=[set_name([modality in shown for modality in MODALITIES])] * count,
        names=names,
        sounds=whole.sounds if audio else None,
        sound_index=whole.sound_index if audio else None,
        present={modality: np.full(count, modality in shown) for modality in ("image", "text", "audio")},
    )
