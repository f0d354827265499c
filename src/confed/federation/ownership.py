"""Modalities of clients: a client whose examples lack a modality has no part in the tensors that read it.

Tensors that belong to a modality m have ``embed.<m>`` in their names (``embed.audio.shared.weight``; a second network
beside the backbone puts something before it); all others serve every modality. For a client without m they are FROZEN,
whatever a method says: neither trained nor sent, so that their mean is the mean over the owners of m.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from confed.federation.protocols import Batch

KEYS = {
    "image": ("image", "image2", "regions", "boxes"),
    "text": ("text", "text_mask"),
    "audio": ("audio", "audio_length"),
    "series": ("series", "series_length"),
}
"""Modality -> the keys that it has in a batch; whatever else a batch holds belongs to none."""
MODALITIES = tuple(KEYS)  # all modalities, in the order in which they are listed everywhere


def modalities_of(names: Iterable[str]) -> tuple[str, ...]:
    """The modalities that tensors of these names belong to, in the fixed order."""
    padded = [f".{name}" for name in names]
    text = "\n".join(padded)
    return tuple(modality for modality in MODALITIES if f".embed.{modality}." in text)


def unowned(names: Iterable[str], modalities: Sequence[str]) -> set[str]:
    """The names of the tensors that belong to modalities which a client does not have."""
    absent = tuple(f".embed.{m}." for m in MODALITIES if m not in modalities) if modalities else ()
    unowned_names: set[str] = set()
    for name in names:
        if any(absent_name in f".{name}" for absent_name in absent):
            unowned_names.add(name)
    return unowned_names


def owned(batch: Batch) -> tuple[str, ...]:
    """The modalities of a batch, in the fixed order."""
    return tuple(modality for modality, keys in KEYS.items() if not batch.keys().isdisjoint(keys))


def narrowed(batches: Iterable[Batch], modalities: Sequence[str], *, complete: bool = False) -> Iterator[Batch]:
    """Batches of which only some modalities are left, as far as there is something left."""
    for batch in batches:
        present = [name for name in owned(batch) if name in modalities]
        if present and not (complete and len(present) < len(modalities)):
            yield restricted(batch, modalities)


def restricted(batch: Batch, modalities: Sequence[str]) -> Batch:
    """The batch without the modalities that are not named; what belongs to no modality stays."""
    gone = set(chain.from_iterable(keys for modality, keys in KEYS.items() if modality not in modalities))
    return {name: tensor for name, tensor in batch.items() if name not in gone}
