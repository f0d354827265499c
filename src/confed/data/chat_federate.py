"""Conversations as a federated dataset: examples of each answer, and who owns which."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from confed.data.chat import Said, pictures_shown, transcript
from confed.data.chat_files import ChatRecord
from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, federate, floors, tests_held_out, words
from confed.data.intake.account import Account, settled
from confed.data.intake.identity import first_copies_of_files, joined_groups, note_copies, warn_of_sides
from confed.data.intake.walk import role_of
from confed.data.options import Options
from confed.data.owners import with_owner
from confed.data.picture_files import HELD, PictureFiles
from confed.data.picture_tables import Pictures
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.refusals import check_choice, refuse
from confed.federation.ranges import BELOW_ONE

# Clusters of pictures that look alike, by the colours of their parts ------------------------------------------

_GRID = 4


def picture_features(pictures: np.ndarray | Pictures) -> np.ndarray:
    """Mean and spread of the colours in 4 x 4 cells, standardised, float64 (M, 96); the mean where unreadable."""
    features = np.stack([_features(pictures, row) for row in range(len(pictures))])
    readable = features[~np.isnan(features).any(axis=1)]
    if not len(readable):
        return np.zeros_like(features)
    spread = readable.std(axis=0)
    return np.nan_to_num((features - readable.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


def picture_clusters(pictures: np.ndarray | Pictures, count: int) -> np.ndarray:
    """Number of each picture's cluster by k-means, int64 (M,); the same for all seeds."""
    from scipy.cluster.vq import kmeans2

    if not 1 <= count <= len(pictures):
        raise ValueError(f"clusters of {len(pictures)} pictures can be 1 to {len(pictures)}, got clients = {count}")
    _, clusters = kmeans2(picture_features(pictures), count, minit="++", rng=np.random.default_rng(0), missing="warn")
    return np.unique(clusters, return_inverse=True)[1].astype(np.int64)


def _features(pictures: np.ndarray | Pictures, row: int) -> np.ndarray:
    try:
        picture = pictures[row].astype(np.float64) / 255
    except ValueError:  # examples of a picture that cannot be read are left out later
        return np.full(6 * _GRID**2, np.nan)
    cells = list(chain.from_iterable(np.array_split(band, _GRID, axis=1) for band in np.array_split(picture, _GRID)))
    flat = [cell.reshape(-1, 3) for cell in cells if cell.size] or [np.zeros((1, 3))]
    flat += [flat[-1]] * (_GRID**2 - len(flat))
    return np.concatenate([np.concatenate([cell.mean(axis=0), cell.std(axis=0)]) for cell in flat])


# Conversations as a federated dataset: examples of each answer ------------------------------------------------

CLUSTER = "cluster"
"""Column of the cluster of a conversation's first picture."""
Partition = Literal["client", "place", "type", "cluster", "iid", "dirichlet", "quantity"]
"""One client per value of a column, equal random shares, shares skewed by a column, or shares of different sizes."""
Turns = Literal["each", "last"]
"""Which of a conversation's answers are examples."""


@dataclass(frozen=True)
class ChatOptions(Options):
    """Options of how conversations are shared out, beside those of all datasets.

    Attributes:
        columns: what a column is here -> its name in the files.
        question: what is asked where rows have only pictures and an answer.
        skew: what "dirichlet" skews by: "answer", "type", "place", "client", or "cluster".
        turns: "each" answer of a conversation is an example, with what was said before it as its prompt; or the "last".
        fold_case: whether answers, clients, places and types that differ in case alone are one, spelled as most are.
    """

    partition: str | None = None
    validation: Annotated[float, BELOW_ONE] = 0.1
    test_share: Annotated[float, BELOW_ONE] = 0.2
    columns: Mapping[str, str] | None = None
    question: str = ""
    skew: str = "answer"
    turns: Turns = "each"
    fold_case: bool = False


def shown_files(
    records: Sequence[ChatRecord], find: Callable[[str], Path], account: Account, options: Options
) -> tuple[list[ChatRecord], PictureFiles, dict[str, int]]:  # fmt: skip
    """Conversations that name their pictures by files, these files, and the row of each; equal files are one."""
    names = list(dict.fromkeys(chain.from_iterable(record.pictures for record in records)))
    files = [find(name) for name in names]
    each = list(dict.fromkeys(files))
    firsts = first_copies_of_files(each)
    note_copies(account, [file.name for file in each], firsts)
    file_copied = {file: str(each[first]) for file, first in zip(each, firsts, strict=True)}
    file_of = {name: file_copied[file] for name, file in zip(names, files, strict=True)}
    index = {file: row for row, file in enumerate(dict.fromkeys(file_of.values()))}
    shown: list[ChatRecord] = []
    for record in records:
        shown.append(replace(record, pictures=tuple(file_of[name] for name in record.pictures)))
    return shown, options.pictures(index), index


def share_conversations(
    name: str,
    records: Sequence[ChatRecord],
    pictures: np.ndarray | Pictures,
    index: Mapping[str, int],
    options: ChatOptions,
    facts: Mapping[str, str],
    account: Account,
) -> FederatedDataset:
    """Conversations shared out among clients. Owners and test sets are the same for all seeds.

    Conversations that share a picture, a patient or a document have one role unless a column of splits says otherwise,
    and one owner unless a column says that. Where every one is a single question about a single picture, examples are
    plain questions, which all models read. Without a partition it is "client" where lines have one, otherwise "iid";
    ``skew`` is the column that "dirichlet" skews by, "answer", or "cluster".
    """
    account.check_remains(len(records))
    if not records:
        refuse(name, "conversations", found="none")
    if not index:
        refuse(name, "pictures in the conversations", found="none")
    _check_names(records)
    skew = options.skew
    has_clients = any(record.columns.get("client", "").strip() for record in records)
    partition = options.partition or ("client" if has_clients else "iid")
    records = _owned(records, partition, options.unseen, account)
    together = joined_groups((*record.pictures, *record.united) for record in records)
    examples, owner = _examples(records, pictures, index, options.turns)
    account.used |= {name: records[row].where for name, row in zip(examples.names, owner.tolist(), strict=True)}
    column: dict[str, np.ndarray] = {}
    for key in ("client", "place", "type", "split"):
        column[key] = np.array([record.columns.get(key, "").strip() for record in records], dtype=str)
    if CLUSTER in (partition, skew):
        clusters = picture_clusters(pictures, options.clients)
        speakers = [records[number] for number in together.tolist()]  # of each group one speaks for all
        firsts = [index[record.pictures[0]] if record.pictures else -1 for record in speakers]
        column[CLUSTER] = np.array(["none" if row < 0 else f"cluster {clusters[row]}" for row in firsts])
    roles = _roles(records, column["split"], options.test_share, column["client"], together)
    whole = {key for key in column if key == partition or (column[key] != "").all()}
    keys = {key: column[key][owner] for key in column if key != "split" and key in whole}
    skews = {"answer": np.asarray(examples.answers), **keys}
    if partition == "dirichlet":
        check_choice("data.skew (a column that every line has)", skew, skews)
    pool = Pool(
        examples, roles[owner], column["place"][owner], keys, together[owner], skews.get(skew),
        unseen_roles=("train", "val", "test"), newcomers=tuple(keys),
    )  # fmt: skip
    splits, places = federate(pool, replace(options, partition=partition, test_share=0.0))
    training_answers = [row for row, role in zip(examples.answers, pool.roles, strict=True) if role != "test"]
    dataset = FederatedDataset(
        name, tuple(sorted(set(training_answers))), splits, places, words(examples.questions),
        {**facts, "partition": partition, **floors(splits)}, outside=True,
    )  # fmt: skip
    dataset = settled(dataset, account, "beyond max_train or max_test, or of no client that trains")
    if isinstance(pictures, PictureFiles) and math.prod(pictures.shape) <= HELD:
        return with_held_pictures(leave_out_unreadable(dataset))
    return dataset


def _check_names(records: Sequence[ChatRecord]) -> None:
    rows_by_name: dict[str, str] = {}
    for record in records:
        if (first := rows_by_name.setdefault(record.name, record.where)) != record.where:
            refuse(record.where, "an id of its own", found=f"{record.name!r}, that of {first} already")


def _examples(
    records: Sequence[ChatRecord], pictures: np.ndarray | Pictures, index: Mapping[str, int], turns: Turns
) -> tuple[Examples, np.ndarray]:
    """One example per answer, and the conversation of each."""
    owner: list[int] = []
    before: list[tuple[Said, ...]] = []
    answers: list[str] = []
    people: list[tuple[str, ...]] = []
    names: list[str] = []
    for number, record in enumerate(records):
        ends = [place for place, turn in enumerate(record.turns) if turn.role == "assistant"]
        for count, end in enumerate(ends if turns == "each" else ends[-1:]):
            answer = " ".join(piece for piece in record.turns[end].parts if piece)
            owner.append(number)
            before.append(record.turns[:end])
            answers.append(answer)
            people.append(record.answers or (answer,))
            names.append(record.name if len(ends) == 1 else f"{record.name}#{count if turns == 'each' else len(ends)}")
    counts = [pictures_shown(turns_before) for turns_before in before]
    rows = np.zeros((len(owner), max([*counts, 1])), dtype=np.int64)
    for row, (number, count) in enumerate(zip(owner, counts, strict=True)):
        shown = [index[path] for path in records[number].pictures[:count]]
        rows[row] = [*shown, *[shown[0] if shown else 0] * (rows.shape[1] - count)]
    questions = [transcript(turns[-1:]) for turns in before]
    plain = all(len(turns) == 1 and len(turns[0].parts) == 2 and turns[0].parts[0] is None for turns in before)
    kinds = [records[number].columns.get("type") or "question" for number in owner]
    several = any(record.answers for record in records)
    examples = Examples(
        pictures, rows[:, 0] if plain else rows, questions, answers, kinds, names,
        annotations=people if several else None, conversations=None if plain else before,
    )  # fmt: skip
    return examples, np.array(owner, dtype=np.int64)


def _owned(
    records: Sequence[ChatRecord], partition: str, unseen: Sequence[str], account: Account
) -> Sequence[ChatRecord]:
    """Conversations of a client or an unseen place; with a column of clients, others belong to nobody."""
    if partition not in ("client", "place", "type"):
        return records
    others = [record for record in records if record.columns.get("place", "").strip() not in unseen]
    cells = [record.columns.get(partition, "") for record in others]
    if not any(map(str.strip, cells)):
        refuse(records[0].where, f"a text as {partition!r} for the partition {partition!r}", found="no line with one")
    owned = {id(record) for record in with_owner(others, cells, partition)}
    elsewhere = {id(record) for record in records} - {id(record) for record in others}
    record_ids = owned | elsewhere
    for record in records:
        if id(record) not in record_ids:
            account.leave(f"no {partition}", record.where)
    return [record for record in records if id(record) in record_ids]


def _roles(
    records: Sequence[ChatRecord], split: np.ndarray, test_share: float, client: np.ndarray, together: np.ndarray
) -> np.ndarray:
    """Role of each conversation; where none is a test, a share of each client's is."""
    roles = np.array([role_of(text, r.where) or "train" for r, text in zip(records, split.tolist(), strict=True)])
    if (roles == "test").any():
        united = [row for row, record in enumerate(records) if record.united]
        warn_of_sides(together[united], roles[united].tolist(), [" and ".join(records[row].united) for row in united])
    return tests_held_out(roles.astype("<U5"), client, together, test_share)
