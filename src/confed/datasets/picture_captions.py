"""COCO captions and Flickr30k, partitioned among clients.

Below ``root``: the file of captions, also in ``annotations/``, and the pictures in ``images.tar`` or in folders as the
file names them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from confed.data.caption_files.captions import caption_records
from confed.data.examples import Examples, FederatedDataset, Split, Turn
from confed.data.intake.account import Account, settled
from confed.data.ml_files.coco import COCO_GROUPS
from confed.data.options import Options
from confed.data.partitions import dirichlet, iid
from confed.data.picture_files import NamedPictures, open_pictures
from confed.data.picture_tables import Pictures
from confed.data.ragged import PackedTexts
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.refusals import check_nothing_lacks, first_of, refuse
from confed.data.seeding import generator
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE
from confed.metrics.captions import caption_words

HELD = 1 << 28
"""Bytes of pictures that are kept in memory."""
NO_KIND = "other"
"""The kind of a picture whose captions name none of COCO's things."""

_FACTS = {
    "coco_captions": {
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
_PUBLISHED = {"coco_captions": {123_287, 82_783, 40_504, 118_287, 5_000}, "flickr30k": {31_014, 31_783}}
"""Pictures of the published files; other files in their format are somebody's own."""


@dataclass(frozen=True)
class Captions:
    """M captioned pictures: names, captions, kinds (M,) and pixels, and how many are shown before one to be described.

    ``purpose`` names the random streams.
    """

    names: Sequence[str]
    captions: Sequence[Sequence[str]]
    kinds: np.ndarray
    pictures: NamedPictures
    shots: int
    purpose: str = "caption"

    def divided(self, client: str, rows: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A client's pictures in order: test (the same for all seeds), validation, and the rest to train on."""
        order = generator(0, f"{self.purpose} test", client).permutation(rows)
        cut = round(options.test_share * len(rows))
        order, test = np.sort(order[cut:]), np.sort(order[:cut])
        order = generator(options.seed, f"{self.purpose} validation", client).permutation(order)
        held = round(options.validation * len(rows))
        return np.sort(order[held:]), np.sort(order[:held]), test

    def described(self, place: str, rows: np.ndarray, shown: np.ndarray) -> Examples:
        """Pictures to be described, each behind a few that are described already."""
        if self.shots > len(shown):
            refuse("data.shots", f"at most {len(shown)}, the pictures to show at {place!r}", self.shots)
        rng = generator(0, f"{self.purpose} shots", place)
        before: list[list[Turn]] = []
        numbers: list[int] = rows.tolist()
        for _ in numbers:
            chosen: list[int] = rng.choice(shown, self.shots, replace=False).tolist()
            before.append([Turn(p, self.captions[p][int(rng.integers(len(self.captions[p])))]) for p in chosen])
        names, captions = [self.names[row] for row in numbers], [self.captions[row] for row in numbers]
        kinds = self.kinds[rows].tolist()
        return to_describe(self.pictures, rows, kinds, names, captions, before if self.shots else None)


@dataclass(frozen=True)
class CaptionOptions(Options):
    """Options of photographs with captions.

    Attributes:
        partition: equal random shares; or skewed by the group of COCO's things that a picture's captions name most.
        captions: the file of captions.
        alpha: concentration of the skewed partition.
        minimum: fewest pictures of a client of the skewed partition.
        validation: share of each client's pictures held out for validation, chosen by the seed.
        test_share: where the file has no test split, the share of each client's pictures that are its test.
        public: share of the training pictures that no client gets. From their captions pieces of words may be learned
            (``confed data prepare pieces``), and with them alone words are counted for ``min_count``.
        min_count: a word must stand in so many training captions to be in the vocabulary.
        shots: described training pictures of the client that are shown before a validation or test picture.
        image_size: side of the pictures in pixels. Pictures that fit into 256 MB are kept in memory.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`. Pictures that are kept in
            memory are decoded in any case, and a damaged one that the check did not find ends the call.
        seed: see ``validation``.
    """

    clients: Annotated[int, AT_LEAST_ONE] = 10
    validation: Annotated[float, BELOW_ONE] = 0.05
    test_share: Annotated[float, BELOW_ONE] = 0.2
    captions: str = "dataset_coco.json"
    public: Annotated[float, BELOW_ONE] = 0.0
    min_count: Annotated[int, AT_LEAST_ONE] = 5
    shots: Annotated[int, NOT_NEGATIVE] = 0


_NAMES = (
    "root partition * captions clients alpha minimum validation test_share public min_count shots image_size "
    "unreadable check seed"
)


@reader(_NAMES, things="pictures", partition=Literal["iid", "kinds"])
def coco_captions(options: CaptionOptions) -> FederatedDataset:
    """COCO's photographs with five captions each.

    With Karpathy's file, the clients share its splits train and restval, its 5,000 test pictures are the place "test",
    which no client trains on, and those of val are left out. With an official ``captions_*.json``, each client's own
    pictures are divided. Owners and test sets are the same for all seeds.

    Raises ``ValueError``: a file is missing or faulty, a picture is not there, or an option is out of range.
    """
    return _dataset("coco_captions", options)


@reader(_NAMES, things="pictures", partition=Literal["iid", "kinds"], captions="dataset_flickr30k.json")
def flickr30k(options: CaptionOptions) -> FederatedDataset:
    """Flickr30k's photographs with five captions each.

    Raises ``ValueError``: faults as in :func:`coco_captions`.

    Options:
        captions: Karpathy's file, or the list of tokens (``.token``), which has no splits.
    """
    return _dataset("flickr30k", options)


def _dataset(name: str, options: CaptionOptions) -> FederatedDataset:
    check_training_left(options)
    captions = options.captions
    root = options.folder
    file = first_of([root / captions, root / "annotations" / captions], "the captions")
    account = Account()
    records = list(caption_records(file, account))
    if not records:
        refuse(file, "pictures with captions", found="none")
    for record in records:
        account.used[record.name] = record.where
        account.used |= {f"{record.name}#{k}": record.where for k in range(len(record.captions))}
    val = {record.where for record in records if record.split == "val"}
    account = account.keep([name for name, where in account.used.items() if where not in val], "of the split val")
    pictures = _pictures(root, [record.picture for record in records], options.image_size)
    pictures.unreadable, pictures.check = options.unreadable, options.check
    published = len(records) in _PUBLISHED[name]
    facts = _FACTS[name] if published else {"origin": f"captions of {len(records)} pictures in {file.name}"}
    kinds = np.array([kind_of(record.captions) for record in records])
    names, texts = [record.name for record in records], [record.captions for record in records]
    captioned = Captions(names, texts, kinds, pictures, options.shots)
    splits = np.array([record.split for record in records])
    shared = _shared(name, captioned, splits, options, facts)
    shared = settled(shared, account, "public, or beyond what clients get")
    return with_held_pictures(leave_out_unreadable(shared)) if math.prod(pictures.shape) <= HELD else shared


def check_training_left(options: Options) -> None:
    """Check that validation and tests leave some pictures."""
    held = options.validation + options.test_share
    if held >= 1:
        refuse("data.validation and data.test_share", "less than 1 in all, to leave pictures to train on", held)


def _shared(
    name: str, captioned: Captions, splits: np.ndarray, options: CaptionOptions, facts: Mapping[str, str]
) -> FederatedDataset:
    """Pictures with captions as a federation, whose splits are those of Karpathy."""
    trained = np.flatnonzero(np.isin(splits, ["", "train", "restval"]))
    tested = np.flatnonzero(splits == "test")
    rng = generator(0, "captions", name)
    free = rng.permutation(trained)[: int(options.public * len(trained))]
    dealt = np.setdiff1d(trained, free)
    if options.partition == "iid":
        shares = iid(len(dealt), options.clients, rng)
    else:
        shares = dirichlet(captioned.kinds[dealt], options.clients, options.alpha, rng, options.minimum)
    test_share = 0.0 if len(tested) else options.test_share
    clients: dict[str, Split] = {}
    for client, rows in shares.items():
        clients[client] = _divided(client, dealt[rows], captioned, replace(options, test_share=test_share))
    shown = free if len(free) else trained
    places = {"test": captioned.described("test", tested, shown)} if len(tested) else {}
    facts = {
        **facts,
        "pictures": f"{len(splits)}, of which {len(dealt)} belong to clients, {len(tested)} are the test of all",
        "public": f"the captions of {len(free)} pictures" if len(free) else "none",
    }
    words = known_words(chain.from_iterable(captioned.captions[row] for row in shown.tolist()), options.min_count)
    freed = list(chain.from_iterable(captioned.captions[int(row)] for row in free))
    return FederatedDataset(name, ("caption",), clients, places, words, facts, public=freed)


def kind_of(captions: Iterable[str]) -> str:
    """The group of COCO's things that captions name most; of equal ones the one named first."""
    kind_counts: Counter[str] = Counter()
    for caption in captions:
        words = f" {' '.join(caption_words(caption))} "
        places: dict[str, int] = {}
        for thing, group in COCO_GROUPS.items():
            for spelling in (f" {thing} ", f" {thing}s "):
                place = words.find(spelling)
                if place >= 0:
                    places[group] = min(place, places.get(group, place))
        kind_counts.update(sorted(places, key=places.__getitem__))
    return kind_counts.most_common(1)[0][0] if kind_counts else NO_KIND


def known_words(captions: Iterable[str], least: int) -> tuple[str, ...]:
    """The words that stand in at least so many captions, in alphabetical order."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(set(caption_words(caption)))
    words = tuple(sorted(word for word, count in counts.items() if count >= least))
    if not words:
        refuse("data.min_count", f"words that stand in {least} captions", found="none")
    return words


def _divided(client: str, rows: np.ndarray, captioned: Captions, options: Options) -> Split:
    """A client's pictures as examples; each caption of a training picture is one."""
    train, validation, test = captioned.divided(client, rows, options)
    if not len(train):
        refuse(client, "a picture to train on", found=f"none of {len(rows)}", remedy="take fewer clients")
    numbers: list[int] = train.tolist()
    captions = [captioned.captions[row] for row in numbers]
    index = np.repeat(train, list(map(len, captions)))
    texts = list(chain.from_iterable(captions))
    names: list[str] = []
    for row, given in zip(numbers, captions, strict=True):
        names += [f"{captioned.names[row]}#{k}" for k in range(len(given))]
    kinds = captioned.kinds[index].tolist()
    return Split(
        Examples(captioned.pictures, index, texts, ["caption"] * len(texts), kinds, names, present={}),
        captioned.described(client, validation, train),
        captioned.described(client, test, train),
    )


def to_describe(
    pictures: np.ndarray | Pictures,
    rows: np.ndarray,
    kinds: Sequence[str],
    names: Sequence[str],
    captions: Sequence[Sequence[str]],
    before: Sequence[Sequence[Turn]] | None,
) -> Examples:
    """Pictures without a text of their own, which is to be written and compared with the captions."""
    nothing = np.zeros(len(rows), dtype=bool)
    return Examples(
        pictures, rows, [""] * len(rows), ["caption"] * len(rows), kinds, names, present={"text": nothing},
        captions=captions, before=before,
    )  # fmt: skip


def _pictures(root: Path, names: Sequence[str], size: int) -> NamedPictures:
    """The named pictures."""
    archive = root / "images.tar"
    inside = [place for place in sorted(root.iterdir()) if place.is_dir()]
    unpacked = root / "images" if (root / "images").is_dir() else root
    unpacked = next((place for place in (unpacked, root, *inside) if (place / names[0]).is_file()), unpacked)
    source = archive if archive.is_file() else unpacked
    pictures = open_pictures(source, PackedTexts.of(names), size)
    lost = [name for row, name in enumerate(names) if not pictures.present(row)]
    check_nothing_lacks("pictures with captions", lost, len(names), source)
    return pictures
