"""COCO captions and Flickr30k, partitioned among clients.

Below ``root``: the file of captions, also in ``annotations/``, and the pictures in ``images.tar`` or in folders as the
file names them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from confed.data.caption_files.captions import caption_records
from confed.data.caption_files.records import Captioned
from confed.data.examples import Examples, FederatedDataset, Split, Turn
from confed.data.intake.account import Account, settled
from confed.data.ml_files.coco import COCO_GROUPS
from confed.data.partitions import dirichlet, iid
from confed.data.picture_files import Check, NamedPictures, check_unreadable, open_pictures
from confed.data.ragged import PackedTexts
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.seeding import generator
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, check_fields
from confed.metrics.captions import caption_words
from confed.registry import register_dataset

HELD = 1 << 28
"""Bytes of pictures that are kept in memory."""
NO_KIND = "other"
"""The kind of a picture whose captions name none of COCO's things."""

_FACTS = {
    "coco": {
        "origin": "COCO captions (Chen et al., 2015)",
        "licence": "captions: CC BY 4.0; every picture keeps its own Flickr licence",
        "citation": 'X. Chen et al., "Microsoft COCO captions", arXiv:1504.00325',
    },
    "flickr30k": {
        "origin": "Flickr30k (Young et al., 2014)",
        "licence": "pictures: terms of Flickr; research and education only",
        "citation": 'P. Young et al., "From image descriptions to visual denotations", TACL 2014',
    },
}
_PUBLISHED = {"coco": {123_287, 82_783, 40_504, 118_287, 5_000}, "flickr30k": {31_014, 31_783}}
"""Pictures of the published files; other files in their format are somebody's own."""


@dataclass(frozen=True)
class Sharing:
    """Options of the partition of captioned pictures.

    Attributes:
        partition: equal random shares, or skewed by kinds of pictures (``alpha``).
        alpha: concentration of the skewed partition.
        minimum: fewest pictures of a client of the skewed partition.
        validation: share of each client's pictures that are its validation.
        test_share: share that are its test, where the file has no test split.
        public: share of the pictures that no client gets; their captions are public.
        shots: described training pictures of the client that are shown before a validation or test picture.
        seed: decides what is validation.
    """

    partition: Literal["iid", "kinds"]
    clients: Annotated[int, AT_LEAST_ONE]
    alpha: float
    minimum: int
    validation: Annotated[float, BELOW_ONE]
    test_share: Annotated[float, BELOW_ONE]
    public: Annotated[float, BELOW_ONE]
    shots: Annotated[int, NOT_NEGATIVE]
    seed: Annotated[int, NOT_NEGATIVE]

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.validation + self.test_share >= 1:
            raise ValueError(
                f"validation and test_share must leave pictures to train on, got {self.validation} and "
                f"{self.test_share}"
            )


@register_dataset
def coco_captions(
    root: Path | str,
    partition: Literal["iid", "kinds"] = "iid",
    *,
    captions: str = "dataset_coco.json",
    clients: int = 10,
    alpha: float = 0.5,
    minimum: int = 10,
    validation: float = 0.05,
    test_share: float = 0.2,
    public: float = 0.0,
    min_count: int = 5,
    shots: int = 0,
    image_size: int = 224,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """COCO's photographs with five captions each.

    With Karpathy's file, the clients share its splits train and restval, its 5,000 test pictures are the place "test",
    which no client trains on, and those of val are left out. With an official ``captions_*.json``, each client's own
    pictures are divided. Owners and test sets are the same for all seeds.

    Raises ``ValueError``: a file is missing or faulty, a picture is not there, or an option is out of range.

    Args:
        root: see the module.
        partition: equal random shares; or skewed by the group of COCO's things that a picture's captions name most.
        captions: the file of captions.
        clients: number of clients.
        alpha: concentration of the skewed partition.
        minimum: fewest pictures of a client of the skewed partition.
        validation: share of each client's pictures held out for validation, chosen by the seed.
        test_share: where the file has no test split, the share of each client's pictures that are its test.
        public: share of the training pictures that no client gets. From their captions pieces of words may be learned
            (``confed data prepare pieces``), and with them alone words are counted for ``min_count``.
        min_count: a word must stand in so many training captions to be in the vocabulary.
        shots: described training pictures of the client that are shown before a validation or test picture.
        image_size: side of the pictures in pixels. Pictures that fit into 256 MB are kept in memory.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`. Pictures that are kept in
            memory are decoded in any case, and a damaged one that the check did not find ends the call.
        seed: see ``validation``.
    """
    sharing = Sharing(partition, clients, alpha, minimum, validation, test_share, public, shots, seed)
    return _dataset("coco", Path(root), captions, sharing, min_count, image_size, unreadable, check)


@register_dataset
def flickr30k(
    root: Path | str,
    partition: Literal["iid", "kinds"] = "iid",
    *,
    captions: str = "dataset_flickr30k.json",
    clients: int = 10,
    alpha: float = 0.5,
    minimum: int = 10,
    validation: float = 0.05,
    test_share: float = 0.2,
    public: float = 0.0,
    min_count: int = 5,
    shots: int = 0,
    image_size: int = 224,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Flickr30k's photographs with five captions each.

    Raises ``ValueError``: faults as in :func:`coco_captions`.

    Args:
        root: folder of the files, see the module.
        partition: equal random shares; or skewed by the group of COCO's things that a picture's captions name most.
        captions: Karpathy's file, or the list of tokens (``.token``), which has no splits.
        clients: number of clients.
        alpha: concentration of the skewed partition.
        minimum: fewest pictures of a client of the skewed partition.
        validation: share of each client's pictures held out for validation, chosen by the seed.
        test_share: where the file has no test split, the share of each client's pictures that are its test.
        public: share of the training pictures that no client gets, see :func:`coco_captions`.
        min_count: a word must stand in so many training captions to be in the vocabulary.
        shots: described training pictures of the client that are shown before a validation or test picture.
        image_size: side of the pictures in pixels. Pictures that fit into 256 MB are kept in memory.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :func:`coco_captions`.
        seed: see ``validation``.
    """
    sharing = Sharing(partition, clients, alpha, minimum, validation, test_share, public, shots, seed)
    return _dataset("flickr30k", Path(root), captions, sharing, min_count, image_size, unreadable, check)


def _dataset(
    name: Literal["coco", "flickr30k"],
    root: Path,
    captions: str,
    sharing: Sharing,
    min_count: int,
    size: int,
    unreadable: float,
    check: Check,
) -> FederatedDataset:
    file = next((place for place in (root / captions, root / "annotations" / captions) if place.is_file()), None)
    if file is None:
        raise ValueError(f"{name}: expected the captions at {root / captions} or below annotations/, found neither")
    account = Account()
    records = list(caption_records(file, account))
    if not records:
        raise ValueError(f"{file}: expected pictures with captions, found none")
    dataset = "coco_captions" if name == "coco" else name
    check_unreadable(unreadable, check)
    for record in records:
        account.used[record.name] = record.where
        for k in range(len(record.captions)):
            account.used[f"{record.name}#{k}"] = record.where
    val = {record.where for record in records if record.split == "val"}
    account = account.keep([name for name, where in account.used.items() if where not in val], "of the split val")
    pictures = _pictures(root, [record.picture for record in records], size)
    pictures.unreadable, pictures.check = unreadable, check
    published = len(records) in _PUBLISHED[name]
    facts = _FACTS[name] if published else {"origin": f"captions of {len(records)} pictures in {file.name}"}
    shared = share_captions(dataset, records, pictures, sharing, min_count, facts)
    shared = settled(shared, account, "public, or beyond what clients get")
    return with_held_pictures(leave_out_unreadable(shared)) if math.prod(pictures.shape) <= HELD else shared


def share_captions(
    name: str,
    records: Sequence[Captioned],
    pictures: np.ndarray | NamedPictures,
    sharing: Sharing,
    min_count: int,
    facts: Mapping[str, str],
) -> FederatedDataset:
    """Pictures with captions as a federation; the splits train, restval, val and test are what Karpathy says they are.

    Raises ``ValueError``: fewer pictures than clients, or a client would have none to train on.
    """
    kinds = np.array([kind_of(record.captions) for record in records])
    splits = np.array([record.split for record in records])
    trained = np.flatnonzero(np.isin(splits, ["", "train", "restval"]))
    tested = np.flatnonzero(splits == "test")
    rng = generator(0, "captions", name)
    free = rng.permutation(trained)[: int(sharing.public * len(trained))]
    dealt = np.setdiff1d(trained, free)
    shares = (
        iid(len(dealt), sharing.clients, rng)
        if sharing.partition == "iid"
        else dirichlet(kinds[dealt], sharing.clients, sharing.alpha, rng, sharing.minimum)
    )
    clients = {
        client: _divided(client, dealt[rows], records, kinds, pictures, sharing, tested=len(tested) == 0)
        for client, rows in shares.items()
    }
    told = list(chain.from_iterable(records[row].captions for row in (free if len(free) else trained).tolist()))
    places: dict[str, Examples] = {}
    if len(tested):
        shown = free if len(free) else trained
        places["test"] = _asked("test", tested, shown, records, kinds, pictures, sharing.shots)
    facts = {
        **facts,
        "pictures": f"{len(records)}, of which {len(dealt)} belong to clients, {len(tested)} are the test of all",
        "public": f"the captions of {len(free)} pictures" if len(free) else "none",
    }
    public = list(chain.from_iterable(records[row].captions for row in free.tolist()))
    return FederatedDataset(
        name, ("caption",), clients, places, known_words(told, min_count), facts, public=public
    )  # fmt: skip


def kind_of(captions: Iterable[str]) -> str:
    """The group of COCO's things that captions name most; of equal ones the one named first."""
    kind_counts: Counter[str] = Counter()
    for caption in captions:
        words = f" {' '.join(caption_words(caption))} "
        kind_counts.update(
            {group for thing, group in COCO_GROUPS.items() if f" {thing} " in words or f" {thing}s " in words}
        )
    return kind_counts.most_common(1)[0][0] if kind_counts else NO_KIND


def known_words(captions: Iterable[str], least: int) -> tuple[str, ...]:
    """The words that stand in at least so many captions, in alphabetical order."""
    if least < 1:
        raise ValueError(f"min_count must be at least 1, got {least}")
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(set(caption_words(caption)))
    words = tuple(sorted(word for word, count in counts.items() if count >= least))
    if not words:
        raise ValueError(f"min_count must leave words: none stands in {least} captions")
    return words


def _divided(
    client: str,
    rows: np.ndarray,
    records: Sequence[Captioned],
    kinds: np.ndarray,
    pictures: np.ndarray | NamedPictures,
    sharing: Sharing,
    *,
    tested: bool,
) -> Split:
    """A client's pictures: test (the same for all seeds), validation, and the rest."""
    order = generator(0, "caption test", client).permutation(rows)
    cut = round(sharing.test_share * len(rows)) if tested else 0
    test, rest = order[:cut], np.sort(order[cut:])
    order = generator(sharing.seed, "caption validation", client).permutation(rest)
    held = round(sharing.validation * len(rows))
    validation, train = order[:held], np.sort(order[held:])
    if not len(train):
        raise ValueError(f"{client!r} has {len(rows)} pictures and none is left to train on: take fewer clients")
    index = np.repeat(train, [len(records[row].captions) for row in train.tolist()])
    texts = list(chain.from_iterable(records[row].captions for row in train.tolist()))
    names: list[str] = []
    for row in train.tolist():
        for k in range(len(records[row].captions)):
            names.append(f"{records[row].name}#{k}")
    return Split(
        Examples(pictures, index, texts, ["caption"] * len(texts), kinds[index].tolist(), names, present={}),
        _asked(client, np.sort(validation), train, records, kinds, pictures, sharing.shots),
        _asked(client, np.sort(test), train, records, kinds, pictures, sharing.shots),
    )


def _asked(
    place: str,
    rows: np.ndarray,
    shown: np.ndarray,
    records: Sequence[Captioned],
    kinds: np.ndarray,
    pictures: np.ndarray | NamedPictures,
    shots: int,
) -> Examples:
    """Pictures to be described, each behind a few that are described already."""
    if shots > len(shown):
        raise ValueError(f"shots must be at most {len(shown)}, the pictures to show at {place!r}, got {shots}")
    rng = generator(0, "caption shots", place)
    before: list[list[Turn]] = []
    for chosen in (rng.choice(shown, shots, replace=False).tolist() for _ in rows):
        before.append([Turn(p, records[p].captions[int(rng.integers(len(records[p].captions)))]) for p in chosen])
    return Examples(
        pictures, rows, [""] * len(rows), ["caption"] * len(rows), kinds[rows].tolist(),
        [records[row].name for row in rows.tolist()],
        present={"text": np.zeros(len(rows), dtype=bool)},
        captions=[records[row].captions for row in rows.tolist()],
        before=before if shots else None,
    )  # fmt: skip


def _pictures(root: Path, names: Sequence[str], size: int) -> NamedPictures:
    """The named pictures."""
    archive = root / "images.tar"
    inside = [place for place in sorted(root.iterdir()) if place.is_dir()]
    unpacked = root / "images" if (root / "images").is_dir() else root
    unpacked = next((place for place in (unpacked, root, *inside) if (place / names[0]).is_file()), unpacked)
    source = archive if archive.is_file() else unpacked
    pictures = open_pictures(source, PackedTexts.of(names), size)
    lost = next((name for row, name in enumerate(names) if not pictures.present(row)), None)
    if lost is not None:
        raise ValueError(f"the captions name the picture {lost!r}, which is not in {source}")
    return pictures
