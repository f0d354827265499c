"""Captioning corpus of texts, captioned pictures and documents (Cao, Sun and Yu, 2025).

Below ``root``: ``pairs/`` with shards (``.tar`` or ``.parquet``, see :mod:`confed.data.caption_files.shards`);
``texts/`` and ``documents/`` with JSON lines (``.jsonl`` or ``.jsonl.zst``, see
:mod:`confed.data.caption_files.shards`); the documents' pictures in ``documents/images.tar`` or ``documents/images/``.
Files are read in the order of their names and row by row; pictures stay in them until a batch asks for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import numpy as np

from confed.data.caption_files.captions import Piece
from confed.data.caption_files.shards import (
    NearDuplicates,
    Place,
    ShardPictures,
    chunks,
    shard_pairs,
    story_lines,
    text_lines,
)
from confed.data.examples import Examples, FederatedDataset, Split, Turn
from confed.data.intake.values import file_in
from confed.data.intake.walk import visible
from confed.data.options import Options
from confed.data.partitions import iid
from confed.data.picture_files import tar_spans
from confed.data.ragged import PackedTexts
from confed.data.refusals import refuse
from confed.data.seeding import generator
from confed.datasets.picture_captions import Captions, check_training_left, kind_of, known_words
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE
from confed.metrics.captions import caption_words


@reader(
    "root * clients mixture words turns most validation test_share public min_count shots image_size "
    "unreadable check seed",
    things="pictures", validation=0.02, test_share=0.1,
)  # fmt: skip
def caption_corpus(
    options: Options,
    mixture: tuple[float, float, float] = (14.0, 14.0, 4.0),
    words: Annotated[int, AT_LEAST_ONE] = 20,
    turns: Annotated[int, AT_LEAST_ONE] = 3,
    most: Annotated[int, AT_LEAST_ONE] = 100_000,
    public: Annotated[float, BELOW_ONE] = 0.0,
    min_count: Annotated[int, AT_LEAST_ONE] = 5,
    shots: Annotated[int, NOT_NEGATIVE] = 0,
) -> FederatedDataset:
    """A corpus in shards, dealt out in equal random shares.

    Each client's own pictures with captions are divided into training, validation and test; texts and documents are for
    training. Owners and test sets are the same for all seeds.

    Raises ``ValueError``: there are no pictures with captions, a file is faulty, or an option is out of range.

    Options:
        mixture: shares of texts, of pictures with captions and of documents in every training batch.
        words: longer texts are cut into pieces of so many words; pictures whose captions are longer are left out.
        turns: most pictures with their texts of a document; longer ones are cut.
        most: most texts, pictures and documents, each, that are read. Their words are kept in memory, pictures are not.
        public: share of the pictures whose captions, and of the texts that, no client gets (``confed data prepare
            pieces`` learns from them).
        min_count: a word must stand in so many texts to be in the vocabulary.
        shots: described training pictures of the client that are shown before a validation or test picture.
    """
    check_training_left(options)
    root = options.folder
    corpus = _read(root, words, turns, most)
    places = [*corpus.places, *_document_places(root, corpus.named)]
    pictures = ShardPictures(places, PackedTexts.of([*corpus.names, *corpus.named]), options.image_size)
    pictures.unreadable, pictures.check = options.unreadable, options.check
    owners, free = _owners(corpus, options.clients, public)
    kinds, captions = np.array([kind_of([caption]) for caption in corpus.captions]), [(c,) for c in corpus.captions]
    captioned = Captions(corpus.names, captions, kinds, pictures, shots, "corpus")
    splits = {name: _divided(name, rows, corpus, captioned, options) for name, rows in owners.items()}
    facts = {
        "origin": f"{len(corpus.captions)} pictures with captions, {len(corpus.texts)} texts, {len(corpus.documents)} "
        f"documents of {root}",
        "near duplicates": f"{corpus.duplicates} left out",
        "long captions": f"{corpus.long} pictures with captions of more than {words} words left out",
        "public": f"{len(free)} texts that no client has" if free else "none",
    }
    told = (turn.text for turn in chain.from_iterable(corpus.documents))
    vocabulary = known_words(free or [*corpus.captions, *corpus.texts, *told], min_count)
    return FederatedDataset(
        "caption_corpus", ("caption",), splits, {}, vocabulary, facts, mixture=tuple(mixture), public=free
    )


def _owners(corpus: "_Corpus", clients: int, public: float) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """Client -> rows of its pictures, texts and documents; and the captions and texts that no client gets."""
    rng = generator(0, "corpus")
    owners: dict[str, list[np.ndarray]] = {f"client-{number:02d}": [] for number in range(clients)}
    free: list[str] = []
    for texts in (corpus.captions, corpus.texts, [""] * len(corpus.documents)):
        rows = rng.permutation(len(texts))
        cut = int(public * len(rows))
        free += [texts[row] for row in rows[:cut].tolist() if texts[row]]
        dealt = np.sort(rows[cut:])
        shares = iid(len(dealt), clients, rng) if len(dealt) >= clients else {}
        for name, parts in owners.items():
            parts.append(dealt[shares.get(name, np.zeros(0, np.int64))])
    return owners, free


@dataclass
class _Corpus:
    """Content of the files; documents refer to pictures by their numbers in ``named``."""

    places: list[Place] = field(default_factory=list[Place])
    names: list[str] = field(default_factory=list[str])
    captions: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    documents: list[list[Turn]] = field(default_factory=list[list[Turn]])
    named: list[str] = field(default_factory=list[str])
    duplicates: int = 0
    long: int = 0


def turns_of(pieces: Sequence[Piece], words: int, turns: int) -> list[list[tuple[str, str]]]:
    """A document as turns of a picture with the text behind it, in parts of up to so many turns.

    Texts behind each other are one; a text in front of the first picture is a turn without a picture, and a picture
    without a text behind it is left out at the end of a part. So the last turn of a part has a picture and a text.
    """
    turns_so_far: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.picture:
            turns_so_far.append((piece.picture, ""))
        elif piece.text.strip():
            picture, before = turns_so_far.pop() if turns_so_far else ("", "")
            turns_so_far.append((picture, " ".join(f"{before} {piece.text}".split()[:words])))
    parts = [turns_so_far[first : first + turns] for first in range(0, len(turns_so_far), turns)]
    for turn in parts:
        while turn and not (turn[-1][0] and turn[-1][1]):
            turn.pop()
    return [turn for turn in parts if turn]


def _read(root: Path, words: int, turns: int, most: int) -> _Corpus:
    """All files below the root, each once and row by row."""
    corpus = _Corpus()
    seen = NearDuplicates()
    pairs = root / "pairs"
    shards = visible(pairs, ".tar", ".parquet") if pairs.is_dir() else []
    if not shards:
        refuse("caption_corpus", f"shards of pictures with captions in {root / 'pairs'}", found="none")
    for shown in islice(chain.from_iterable(shard_pairs(file) for file in shards), most):
        if len(caption_words(shown.caption)) > words:
            corpus.long += 1
        elif seen.is_new(shown.caption):
            corpus.places.append(shown.place)
            corpus.names.append(f"{shown.place.file.stem}/{shown.name}")
            corpus.captions.append(shown.caption)
    texts = chain.from_iterable(text_lines(file) for file in _lines(root / "texts"))
    for _, text in islice(texts, most):
        if seen.is_new(text):
            corpus.texts += chunks(text, words)
    numbers: dict[str, int] = {}
    for story in islice(chain.from_iterable(story_lines(file) for file in _lines(root / "documents")), most):
        parts = turns_of(story.pieces, words, turns)
        if parts and seen.is_new(" ".join(text for _, text in chain.from_iterable(parts))):
            for part_turns in parts:
                places = [numbers.setdefault(name, len(numbers)) if name else -1 for name, _ in part_turns]
                corpus.documents.append([Turn(p, text) for p, (_, text) in zip(places, part_turns, strict=True)])
    corpus.named = list(numbers)
    corpus.duplicates = seen.dropped
    return corpus


def _lines(folder: Path) -> Iterator[Path]:
    yield from visible(folder, ".jsonl", ".jsonl.zst") if folder.is_dir() else ()


def _document_places(root: Path, names: Sequence[str]) -> list[Place]:
    """Where the documents' pictures are: in an archive, or files of their own, of no bytes where there is none."""
    archive, folder = root / "documents" / "images.tar", root / "documents" / "images"
    if archive.is_file():
        return [Place(archive, first, size) for first, size in tar_spans(archive, names).tolist()]
    places: list[Place] = []
    for name in names:
        file = file_in((folder,), name)
        places.append(Place(file, 0, file.stat().st_size if file.is_file() else 0))
    return places


def _divided(client: str, rows: Sequence[np.ndarray], corpus: _Corpus, captioned: Captions, options: Options) -> Split:
    """A client's examples."""
    pairs, texts, documents = rows
    train, validation, test = captioned.divided(client, pairs, options)
    if not len(train) or captioned.shots > len(train):
        refuse(client, f"{max(captioned.shots, 1)} pictures to train on", found=len(train), remedy="take fewer clients")
    shift = len(corpus.places)
    turns: list[list[Turn]] = []
    for row in documents.tolist():
        turns.append(
            [Turn(turn.picture + shift if turn.picture >= 0 else -1, turn.text) for turn in corpus.documents[row]]
        )
    sizes = len(train), len(texts), len(turns)
    captions = [corpus.captions[row] for row in train.tolist()]
    sentences = [*captions, *(corpus.texts[row] for row in texts.tolist()), *(turn[-1].text for turn in turns)]
    told = Examples(
        captioned.pictures,
        np.array([*train.tolist(), *[0] * len(texts), *(turn[-1].picture for turn in turns)], dtype=np.int64),
        sentences,
        ["caption"] * sum(sizes),
        [*captioned.kinds[train].tolist(), *["text"] * sizes[1], *["document"] * sizes[2]],
        [f"{client}/train/{row:08d}" for row in range(sum(sizes))],
        present={"image": np.repeat([True, False, True], sizes)},
        before=[*[()] * (sizes[0] + sizes[1]), *(turn[:-1] for turn in turns)],
    )
    return Split(told, *(captioned.described(client, rows, train) for rows in (validation, test)))
