"""Examples of pictures, texts and what is asked of them as plain tables, and federated datasets of them.

A dataset file returns a :class:`FederatedDataset`: raw strings and uint8 pictures, split by client. Only
:func:`confed.data.encode.encode` turns it into tensors, with the tokenizer of the chosen backbone, so that one dataset
serves every model.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from inspect import signature
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from confed.data.chat import Conversation, pictures_shown
from confed.data.controls import controlled
from confed.data.intake.account import Account
from confed.data.lazy import Lazy, NoTexts, Taken, shared_columns, take_rows
from confed.data.ml_files.table import MultiLabelTable
from confed.data.modality_names import sort_modalities
from confed.data.picture_tables import LeftOut, NoPictures, Pictures, StoredPictures, channels_first
from confed.data.refusals import check_form, check_length, check_rows
from confed.data.regions import Regions
from confed.data.sounds import Series, Sounds
from confed.data.table import RowBatch, Table
from confed.data.targets import Kind, Labels
from confed.federation.ownership import MODALITIES
from confed.federation.protocols import Batch
from confed.losses.label_states import label_states

# A client's data as three tables: training, validation and test examples --------------------------------------


class Source:
    """What stands for one table: two are never equal."""


class TableData:
    """A client's data as tables; implements :class:`confed.federation.protocols.ClientData`."""

    deterministic = True
    samples_rows = True

    def __init__(self, train: Table, validation: Table, test: Table, known: float = 0.0) -> None:
        self.tables = (train, validation, test)
        self._train, self._validation, self._test = self._read = self.tables
        self._sources = (Source(), Source(), Source())
        self.known = known
        self._kept: Tensor | None = None

    def only(self, rows: Tensor) -> "TableData":
        """The same with some of its training examples, whose numbers stay as they are."""
        fewer = copy(self)
        fewer._kept = rows
        return fewer

    @property
    def drawn(self) -> tuple[str, ...]:
        """What is drawn anew in every epoch; see :class:`confed.federation.protocols.ClientData`."""
        return ("known",) if self.known else ()

    @property
    def row_bytes(self) -> int:
        """See :class:`confed.federation.protocols.RandomAccess`."""
        return self._read[0].row_bytes if self.samples_rows and not self.known else 0

    def masked(self, known: float) -> "TableData":
        """The same with a largest share of known labels in training."""
        other = copy(self)
        other.known = known
        return other

    def on(self, move: Callable[[Tensor], Tensor]) -> "TableData":
        """See :class:`confed.federation.protocols.Movable`; test examples with other inputs stay on the host."""
        moved = copy(self)
        moved._read = tuple(table.on(move) for table in self.tables)
        return moved

    def __len__(self) -> int:
        return len(self._train) if self._kept is None else len(self._kept)

    def shortened(self, train: int, others: int) -> "TableData":
        """The same with at most so many training examples, and so many validation and test examples."""
        return self.with_tables(self._train.take(train), self._validation.take(others), self._test.take(others))

    def with_tables(self, train: Table, validation: Table, test: Table) -> "TableData":
        """The same client with other tables."""
        other = copy(self)
        other.tables = other._read = (other._train, other._validation, other._test) = train, validation, test
        other._sources = (Source(), Source(), Source())
        return other

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        """One shuffled epoch; with ``known``, batches have the labels' states under ``known``, int8 (B, C).

        The order is drawn from ``rng`` first and the key of the states after it, so that masking does not change it.
        """
        order = torch.randperm(len(self), generator=rng)
        batches = self._batches(0, batch_size, order if self._kept is None else self._kept[order])
        if not self.known:
            return batches
        key = int(torch.randint(0, (1 << 63) - 1, (), generator=rng))
        return (self._with_states(batch, key) for batch in batches)

    def _with_states(self, batch: Batch, key: int) -> Batch:
        """A batch with the states of its labels, made when they are read."""

        def states() -> Tensor:
            return label_states(batch["labels"], batch["index"], key, self.known)

        return batch.with_tensor("known", states) if isinstance(batch, RowBatch) else {**batch, "known": states()}

    def chosen(self, numbers: Tensor, batch_size: int) -> Iterator[Batch]:
        """Training batches of some examples; see :class:`confed.federation.protocols.RandomAccess`."""
        return self._batches(0, batch_size, numbers)

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of training batches per epoch with at least ``least`` examples."""
        rows = self._train if self._kept is None else self._train.take(len(self._kept))
        return rows.steps(batch_size, least)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Validation batches in stored order."""
        return self._batches(1, batch_size)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Test batches in stored order."""
        return self._batches(2, batch_size)

    def controlled_test(self, batch_size: int, control: str, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Test batches with the inputs of a control condition; see :mod:`confed.data.controls`."""
        return controlled(self._test, batch_size, control, rng)

    def _batches(self, part: int, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        table = self._read[part]
        if not table.by_rows:
            return table.batches(batch_size, order)
        order = torch.arange(len(table)) if order is None else order
        return table.row_batches(order, batch_size, self._sources[part])


# Examples of visual question answering as plain tables --------------------------------------------------------

__all__ = [
    "LOOKED_AT", "Examples", "FederatedDataset", "LabelledDataset", "Pictures", "Split", "StoredPictures", "TableData",
    "Turn", "channels_first", "check_presence", "kind_made", "presence",
]  # fmt: skip


class Turn(NamedTuple):
    """A picture (its number in the table, or -1), a text (or empty), or both, before an example."""

    picture: int
    text: str


@dataclass(frozen=True)
class Examples:
    """N questions over M pictures, or N rows with labels of a table that others share (:meth:`labelled`).

    Attributes:
        images: uint8 pictures, shape (M, H, W, 3), in memory or read when they are asked for;
            :class:`confed.data.picture_tables.NoPictures` where there are only features of them.
        image_index: which picture each question is about, int64, shape (N,); shape (N, 2) where a question is about
            a pair; shape (N, P) of conversations, each row's pictures in their order and then the first of them again.
        questions: N questions, none empty but where ``present`` says that there is none.
        answers: N answers, each a word of the dataset's answer vocabulary (test questions: see
            :class:`FederatedDataset`).
        types: N question types (rows of the per-type accuracy).
        names: N identifiers, stable across runs (used to pair methods example by example).
        annotations: where several people answered, all their answers per question, for soft scores and for models
            that learn to write each of them.
        choices: where the answer is one of some texts offered with the question, those texts, K for every question;
            ``answers`` are then their positions, "0" to "K - 1".
        regions: features of the same M pictures, for models that read these instead.
        sounds: recordings, where there are some.
        sound_index: which recording belongs to each question, int64, shape (N,).
        series: values of sensors over time, where there are some.
        series_index: which series belongs to each question, int64, shape (N,).
        present: modality ("image", "text", "audio", "series") -> whether each question has it, bool, shape (N,); one
            that is not named is there everywhere where its table is. Indices are of no meaning where it is not there.
        captions: where a text is to be written about each picture, those that people wrote, one at least.
        before: where examples stand in a document, or have other ones shown before them, what comes before each.
        conversations: where an answer ends a conversation, all that was said before it; ``questions`` are then the
            texts of the last turns.
        offered: of a classification, the answers that each of these examples is chosen from; None for all.
        labels: where examples have any number of labels, these.
    """

    images: np.ndarray | Pictures
    image_index: np.ndarray
    questions: Sequence[str]
    answers: Sequence[str]
    types: Sequence[str]
    names: Sequence[str]
    annotations: Sequence[Sequence[str]] | None = None
    choices: Sequence[Sequence[str]] | None = None
    regions: Regions | None = None
    sounds: Sounds | None = None
    sound_index: np.ndarray | None = None
    series: Series | None = None
    series_index: np.ndarray | None = None
    present: Mapping[str, np.ndarray] | None = None
    captions: Sequence[Sequence[str]] | None = None
    before: Sequence[Sequence[Turn]] | None = None
    conversations: Sequence[Conversation] | None = None
    offered: tuple[str, ...] | None = None
    labels: Labels | None = None

    @staticmethod
    def labelled(
        table: MultiLabelTable,
        pictures: np.ndarray | Pictures | None,
        rows: np.ndarray,
        types: Sequence[str] | None = None,
    ) -> "Examples":
        """Rows of a table with labels; nothing is copied.

        Args:
            table: labels, names and texts of M rows.
            pictures: uint8, shape (M, H, W, 3), in memory or read when they are asked for; None for texts alone.
            rows: which rows of the table these are, int64, shape (N,).
            types: the kind of each of the table's rows, such as its drawing style; None where there is one kind only.
        """
        m = len(table)
        check_form("rows", rows, np.int64, "N")
        if pictures is None and table.texts is None:
            raise ValueError("multi-label examples need pictures or texts, got neither")
        for name, given in (("pictures", pictures), ("types", types)):
            check_length(name, given, m, "row of the table")
        nothing, labels = NoTexts(len(rows)), Labels(table, rows)
        return Examples(
            NoPictures(m) if pictures is None else pictures, rows,
            nothing if table.texts is None else Taken(table.texts, rows), nothing,
            nothing if types is None else Taken(types, rows), Taken(table.names, rows), labels=labels,
        )  # fmt: skip

    def __post_init__(self) -> None:
        check_form("images", self.images, np.uint8, "M", "H", "W", 3)
        if self.labels is not None:  # made for each client whenever it is asked for: nothing walks through the rows
            return
        n = len(self.questions)
        for label, given in {"image_index": self.image_index, **self._columns}.items():
            check_length(label, given, n, "question")
        if self.conversations is not None:
            self._check_conversations(self.conversations)
        elif np.ndim(self.image_index) != 1 and np.shape(self.image_index)[1:] != (2,):
            raise ValueError(f"image_index must have shape (N,), or (N, 2) for pairs, got {np.shape(self.image_index)}")
        if self.choices is not None and len({len(offered) for offered in self.choices}) > 1:
            raise ValueError("choices must offer as many texts with every question")
        shown = self.image_index[self._with_pictures()]
        check_rows("image_index", shown, len(self.images))
        check_length("regions", self.regions, len(self.images), "picture")
        if self.sounds is not None or self.series is not None or self.present is not None:
            check_presence(self)
        has_text = None if self.present is None else self.present.get("text")
        for row, (name, question) in enumerate(zip(self.names, self.questions, strict=True)):
            if not question.strip() and (has_text is None or has_text[row]):
                raise ValueError(f"the question of example {name!r} is empty")
        self._check_texts()

    def _with_pictures(self) -> np.ndarray:
        """Rows whose index of a picture means something: none without pictures, else those that have one."""
        if not self.has_pictures and self.regions is None:
            return np.zeros(0, dtype=np.int64)
        has_picture = None if self.present is None else self.present.get("image")
        return (
            np.arange(len(self))
            if has_picture is None or len(has_picture) != len(self)
            else np.flatnonzero(has_picture)
        )

    def _check_texts(self) -> None:
        """Check of captions, and of the texts and pictures that stand before examples."""
        for name, captions in zip(self.names, self.captions or (), strict=self.captions is not None):
            if not captions or not all(caption.strip() for caption in captions):
                raise ValueError(f"example {name!r} needs captions that are not empty, got {list(captions)!r:.80}")
        for name, turns in zip(self.names, self.before or (), strict=self.before is not None):
            for picture, text in turns:
                if not -1 <= picture < len(self.images) or (picture < 0 and not text.strip()):
                    raise ValueError(
                        f"before example {name!r} stand pictures in [0, {len(self.images)}) or texts, got picture "
                        f"{picture} with the text {text!r}"
                    )

    def _check_conversations(self, conversations: Sequence[Conversation]) -> None:
        """Check that every conversation has its pictures."""
        check_form("image_index of conversations", self.image_index, None, "N", "P")
        for name, turns in zip(self.names, conversations, strict=True):
            if (count := pictures_shown(turns)) > self.image_index.shape[1]:
                raise ValueError(
                    f"example {name!r} shows {count} pictures, and image_index has shape {self.image_index.shape}"
                )

    def __len__(self) -> int:
        return len(self.questions)

    def take(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """The given rows, in that order; the pictures are shared, not copied."""
        rows = np.asarray(rows, dtype=np.int64)
        taken: dict[str, Any] = {
            name: column if column is None else take_rows(column, rows) for name, column in self._columns.items()
        }
        for name in ("image_index", "sound_index", "series_index"):
            index = vars(self)[name]
            taken[name] = index if index is None else index[rows]
        present = None if self.present is None else {name: given[rows] for name, given in self.present.items()}
        labels = None if self.labels is None else self.labels.take(rows)
        return replace(self, **taken, present=present, labels=labels)

    @property
    def _columns(self) -> dict[str, Sequence[object] | None]:
        """What has a value for each example, by the names of fields."""
        names = ("questions", "answers", "types", "names", "annotations", "choices", "captions", "before")
        return {name: vars(self)[name] for name in (*names, "conversations")}

    @property
    def kind(self) -> Kind:
        """What is asked of the examples."""
        if self.labels is not None:
            return "labels"
        if self.captions is not None:
            return "captions"
        return "answers" if self.conversations is None else "conversations"

    def right_answer(self, row: int) -> str:
        """What is right, for people to read: the answer, the text that is to be chosen, or the labels if any."""
        if self.labels is not None:
            return ", ".join(self.labels.of(row))
        answer = self.answers[row]
        return answer if self.choices is None else self.choices[row][int(answer)]

    def counted_answers(self) -> Counter[str]:
        """How many examples have each answer, or label."""
        if self.labels is None:
            return Counter(self.answers)
        return Counter(dict(zip(self.labels.names, self.labels.numbers().tolist(), strict=True)))

    @property
    def has_pictures(self) -> bool:
        """Whether there are pictures, and not features of them alone."""
        return not isinstance(self.images, NoPictures)

    @property
    def tables(self) -> dict[str, bool]:
        """Modality -> whether there is something of it, in the order of :data:`MODALITIES`."""
        return {
            "image": self.has_pictures or self.regions is not None,
            "text": not isinstance(self.questions, NoTexts),
            "audio": self.sounds is not None,
            "series": self.series is not None,
        }


def presence(examples: Examples) -> np.ndarray:
    """Presence of each modality in each example, in the order of :data:`MODALITIES`, bool, shape (N, 4)."""
    declared: Mapping[str, np.ndarray] = examples.present or {}
    columns = [
        np.asarray(declared[name], dtype=bool) if present and name in declared else np.full(len(examples), present)
        for name, present in examples.tables.items()
    ]
    return np.stack(columns, axis=1)


def check_presence(examples: Examples) -> None:
    """Check of sounds, series and declared modalities of examples."""
    n = len(examples.questions)
    for name, table in (("sound", examples.sounds), ("series", examples.series)):
        index = examples.sound_index if name == "sound" else examples.series_index
        if (table is None) != (index is None):
            raise ValueError(f"{name}_index must be given with its table, and only then")
        if table is None or index is None:
            continue
        check_form(f"{name}_index", index, None, n)
        check_rows(f"{name}_index", index, len(table))
    declared: Mapping[str, np.ndarray] = examples.present or {}
    sort_modalities(declared, "present")
    for name, present in declared.items():
        check_form(f"present[{name!r}]", present, np.bool_, n)
    present_modalities = presence(examples)
    for column, name in enumerate(MODALITIES):
        if name in declared and (strange := np.flatnonzero(declared[name] & ~present_modalities[:, column])).size:
            raise ValueError(
                f"example {examples.names[int(strange[0])]!r} is said to have {name}, of which there is none"
            )
    if (nothing := np.flatnonzero(~present_modalities.any(axis=1))).size:
        first = examples.names[int(nothing[0])]
        raise ValueError(f"example {first!r} has none of {', '.join(MODALITIES)} ({nothing.size} such rows)")


@dataclass(frozen=True)
class Split:
    """One client's examples, by role."""

    train: Examples
    validation: Examples
    test: Examples

    @property
    def roles(self) -> dict[str, Examples]:
        """Role -> its examples."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


def kind_made(constructor: Callable[..., object]) -> Kind:
    """What is asked of the examples that a dataset's function makes, as far as its return type tells."""
    told = getattr(signature(constructor).return_annotation, "__metadata__", ())
    return told[0] if told else "answers"


LOOKED_AT = 1000
"""Clients whose examples are looked at to know what they are like, where they are made when they are asked for."""


@dataclass(frozen=True)
class FederatedDataset:
    """Federated dataset: clients, unseen places, answers or labels, and facts.

    Attributes:
        name: the dataset's registered name.
        answers: the answer vocabulary, or the names of the labels; an answer's label is its position.
        clients: client id -> its split, in a fixed order; may be made when asked for
            (:class:`confed.data.lazy.Lazy`).
        unseen: scene -> test examples of a scene, or of people, that no client trains on.
        words: every word that questions may contain (the vocabulary of an offline tokenizer).
        facts: what ``confed data describe`` prints beside the counts (sources, floors, ceilings).
        outside: whether test questions may have an answer outside the vocabulary, which no model can give.
        answer_sets: client -> its own answers, where clients do not share the vocabulary: their labels are positions
            in their own answer set, and heads cannot be averaged. ``answers`` is then the union.
        tasks: client -> the registered task of its examples, where it is not the recipe's.
        modalities: client -> what it owns ("image", "text", "audio", "series"); empty where all clients own the same.
        mixture: where texts are learned, the shares of texts alone, of pictures with texts, and of documents in every
            training batch; empty where rows come as they are.
        public: public texts, from which pieces of words may be learned.
        types: question types that there are besides those of the examples here.
        type_names: question type -> what it asks, in words, for reports.
        elsewhere: where all examples are at the sites of a federation and a card stands for them here, unseen place ->
            number of its examples; None where they are here.
        unreadable: what was left out because pictures cannot be read; None where they were not checked.
        ceilings: client or unseen place -> the accuracy that no model can exceed, where it can be computed.
        account: what became of the rows of the files that it was read from.
        coarse: label -> its coarse label, where there are two levels.
        pools: the name of ``answer_sets`` in version 0.1.
    """

    name: str
    answers: tuple[str, ...]
    clients: Mapping[str, Split]
    unseen: Mapping[str, Examples]
    words: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    outside: bool = False
    answer_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    modalities: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    mixture: tuple[float, ...] = ()
    public: Sequence[str] = ()
    types: tuple[str, ...] = ()
    type_names: Mapping[str, str] = field(default_factory=dict[str, str])
    elsewhere: Mapping[str, int] | None = None
    unreadable: LeftOut | None = None
    ceilings: Mapping[str, float] = field(default_factory=dict[str, float])
    account: Account | None = None
    coarse: Mapping[str, str] = field(default_factory=dict[str, str])
    pools: InitVar[Mapping[str, tuple[str, ...]] | None] = None

    def __post_init__(self, pools: Mapping[str, tuple[str, ...]] | None) -> None:
        if pools is not None:
            object.__setattr__(self, "answer_sets", pools)
        for place, examples in self.unseen.items():
            self.check_labels(place, examples)
        strange = [label for label in self.coarse if label not in set(self.answers)]
        if strange:
            raise ValueError(f"dataset {self.name!r}: coarse names no label {strange[0]!r}")

    def check_labels(self, place: str, examples: Examples) -> None:
        """Check that examples of a client or place with labels have the dataset's in the same order."""
        if examples.labels is None or examples.labels.names is self.answers:
            return
        names = examples.labels.names
        if names != self.answers:
            raise ValueError(
                f"dataset {self.name!r}: the examples of {place!r} must have the dataset's {len(self.answers)} labels "
                f"in its order, got {len(names)}: {', '.join(names[:5])} ..."
            )

    @cached_property
    def parts(self) -> list[Examples]:
        """Training, validation and test examples of all clients; of the first where they are made when asked for."""
        count = LOOKED_AT if isinstance(self.clients, Lazy) else len(self.clients)
        return list(chain.from_iterable(split.roles.values() for split in islice(self.clients.values(), count)))

    @cached_property
    def everything(self) -> list[Examples]:
        """The parts, and the examples of unseen places."""
        return [*self.parts, *self.unseen.values()]

    def placed(self, most: int | None = None) -> Iterator[tuple[str, str, Examples]]:
        """Client, role and examples of all clients or so many; then each unseen place, with the role "unseen"."""
        for client in islice(self.clients, most):
            for role, examples in self.clients[client].roles.items():
                yield client, role, examples
        for place, examples in self.unseen.items():
            yield place, "unseen", examples

    def changed(self, change: Callable[[Examples, str, str], Examples], **fields: Any) -> "FederatedDataset":
        """The dataset with ``change`` of the examples of every place and role, as :meth:`placed` has them."""
        clients: dict[str, Split] = {}
        for name, split in self.clients.items():
            clients[name] = Split(**{role: change(examples, name, role) for role, examples in split.roles.items()})
        unseen = {name: change(examples, name, "unseen") for name, examples in self.unseen.items()}
        return replace(self, clients=clients, unseen=unseen, **fields)

    @cached_property
    def kind(self) -> Kind:
        """What is asked of the examples."""
        kinds = {examples.kind for examples in self.everything}
        named: tuple[Kind, ...] = ("labels", "captions", "conversations", "answers")
        return next(kind for kind in named if kind in kinds or kind == "answers")

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The names of the question types, sorted; where examples share a column, of all its rows."""
        kinds = set(self.types)
        for column in shared_columns([e.types for e in self.everything if not isinstance(e.types, NoTexts)]):
            kinds.update(column)
        return tuple(sorted(kinds))

    def answer_set(self, client: str) -> tuple[str, ...]:
        """Answer set of a client, in which labels are positions."""
        return self.answer_sets.get(client, self.answers)

    @property
    def widest(self) -> int:
        """Width of the answer head: the size of the largest answer set."""
        return max(map(len, self.answer_sets.values())) if self.answer_sets else len(self.answers)


LabelledDataset = Annotated[FederatedDataset, "labels"]
"""Return type of a dataset's function whose examples have any number of labels each."""
