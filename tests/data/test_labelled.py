"""Multi-label data as clients' batches: what a dataset holds, masks, pooling, lazily made clients, sampling by size."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import Examples, FederatedDataset, Split, TableData
from confed.data.lazy import Lazy, changed, known_sizes, without
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.ragged import Ragged
from confed.data.table import concatenate_tables
from confed.data.targets import SparseLabels
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.federation.local import Local
from confed.federation.randomness import sample_cohort
from confed.federation.state import MemoryStore
from confed.losses.label_states import label_states
from confed.models.tokenizer import WordTokenizer
from confed.runs.dataset import Source
from confed.runs.encode import RunData, encoded
from confed.testing.toy import toy_clients, toy_setup
from refusals import refuses

LABELS = ("red", "green", "blue")
OWN = (("red",), (), ("red", "blue"), ("green",), ("blue",), ("red", "green", "blue"))
TRUTH = np.array([[name in row for name in LABELS] for row in OWN], dtype=np.float32)


def table(rows=OWN, texts=False) -> MultiLabelTable:
    records = [
        LabelRecord(Path("made up"), i, f"e{i}", row, picture=f"{i}.png", text=f"a b {i}" if texts else "")
        for i, row in enumerate(rows)
    ]
    return build_table(records, LABELS)[""]


def pictures(n=6) -> np.ndarray:
    """Picture i is all i."""
    return np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 4, 4, 3)).copy()


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def dataset(make, owners, sizes=None, **more) -> FederatedDataset:
    clients = Lazy(owners, lambda name: make(name, owners[name]), sizes)
    return FederatedDataset("made_up", LABELS, clients, {}, **more)


def encode_labels(given: FederatedDataset) -> RunData:
    return encoded(Source(given), {"name": "ctran_mini"}, WordTokenizer(("a", "b"), max_length=4))


def test_examples_are_rows_of_a_table() -> None:
    examples = Examples.labelled(table(), pictures(), rows(5, 1, 2))
    assert list(examples.names) == ["e5", "e1", "e2"]
    np.testing.assert_array_equal(examples.labels.dense(), TRUTH[[5, 1, 2]])
    assert examples.labels.numbers().tolist() == [2, 1, 2]
    assert examples.take([2, 0]).image_index.tolist() == [2, 5]
    assert len(examples.take([])) == 0
    assert examples.take([]).labels.numbers().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rows": np.array([0.0])}, "rows must be int64"),
        ({"pictures": None}, "need pictures or texts"),
        ({"pictures": pictures(4)}, r"pictures must have one entry per row of the table \(6\), got 4"),
        ({"types": np.array(["pen"])}, r"one entry per row of the table \(6\), got 1"),
    ],
)
def test_faulty_examples_are_named(change, complaint) -> None:
    refuses(complaint, Examples.labelled, **{"table": table(), "pictures": pictures(), "rows": rows(0), **change})


def test_faulty_datasets_are_named() -> None:
    examples = Examples.labelled(table(), pictures(), rows(0))
    with pytest.raises(ValueError, match="in its order, got 3: red, green, blue"):
        FederatedDataset("x", ("blue", "green", "red"), {}, {"abroad": examples})
    refuses("coarse names no label 'pink'", FederatedDataset, "x", LABELS, {}, {}, coarse={"pink": "warm"})
    refuses("'made_up' has no clients", encode_labels, dataset(lambda n, r: Split(examples, examples, examples), {}))


def test_a_batch_holds_pictures_labels_kinds_and_texts() -> None:
    kinds = np.array(["pen", "ink", "pen", "pen", "ink", "pen"])
    examples = Examples.labelled(table(texts=True), pictures(), rows(4, 2, 5), kinds)
    split = Split(examples, examples.take([0]), examples.take([]))
    run_data = encode_labels(dataset(lambda n, r: split, {"a": rows(0)}))
    clients = run_data.clients
    assert run_data.types == ("ink", "pen")
    (batch,) = clients["a"].tables[0].batches(3, torch.tensor([2, 0, 1]))
    assert batch["image"].shape == (3, 3, 4, 4)
    assert batch["image"][:, 0, 0, 0].tolist() == [5, 4, 2]
    np.testing.assert_array_equal(batch["labels"].numpy(), TRUTH[[5, 4, 2]])
    assert batch["labels"].dtype == torch.float32
    assert batch["type"].tolist() == [1, 0, 1]
    assert batch["index"].tolist() == [2, 0, 1]
    assert batch["text"].shape == batch["text_mask"].shape == (3, 4)
    assert "known" not in batch
    assert [len(t) for t in clients["a"].tables] == [3, 1, 0]


def data(known: float) -> TableData:
    examples = Examples.labelled(table(), pictures(), rows(*range(6)))
    made = encode_labels(dataset(lambda n, r: Split(examples, examples, examples), {"a": rows(0)}))
    return made.clients["a"].masked(known)


def test_masking_keeps_the_order_and_draws_its_key_behind_it() -> None:
    rng = torch.Generator().manual_seed(3)
    plain = [batch["index"].tolist() for batch in data(0).train(4, torch.Generator().manual_seed(3))]
    masked = list(data(0.75).train(4, rng))
    assert [batch["index"].tolist() for batch in masked] == plain

    again = torch.Generator().manual_seed(3)
    order = torch.randperm(6, generator=again)
    key = int(torch.randint(0, (1 << 63) - 1, (), generator=again))
    expected = label_states(torch.from_numpy(TRUTH), torch.arange(6), key, 0.75)[order]
    torch.testing.assert_close(torch.cat([batch["known"] for batch in masked]), expected)
    assert (torch.cat([batch["known"] for batch in masked]) >= 0).any()
    assert all("known" not in batch for batch in (*data(0.75).test(4), *data(0.75).validation(4)))


def test_tables_of_several_clients_become_one() -> None:
    shared, other = table(), table((("blue",), ("red", "green")))
    first, second = pictures(), pictures(2) + 100
    given = [
        Examples.labelled(shared, first, rows(3, 0)),
        Examples.labelled(other, second, rows(1)),
        Examples.labelled(shared, first, rows(5)),
    ]
    splits = {f"c{i}": Split(e, e.take([]), e.take([])) for i, e in enumerate(given)}
    clients = encode_labels(FederatedDataset("x", LABELS, splits, {})).clients
    tables = [clients[name].tables[0] for name in clients]
    (batch,) = concatenate_tables(tables).batches(4)
    assert batch["image"][:, 0, 0, 0].tolist() == [3, 0, 101, 5]
    np.testing.assert_array_equal(batch["labels"].numpy(), [*TRUTH[[3, 0]], [1, 1, 0], TRUTH[5]])
    same = concatenate_tables([tables[0], tables[2]])
    assert same.images is tables[0].images  # one table of pictures is not copied
    np.testing.assert_array_equal(next(same.batches(3))["labels"].numpy(), TRUTH[[3, 0, 5]])
    assert same.take(1).batch(rows_t(0))["labels"].tolist() == [[0, 1, 0]]


def rows_t(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_pictures_elsewhere_are_pooled_from_one_table_only() -> None:
    class Elsewhere:
        dtype, ndim, shape = np.dtype(np.uint8), 4, (6, 4, 4, 3)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index):
            return pictures()[index]

    parts = [Examples.labelled(table(), Elsewhere(), rows(0)), Examples.labelled(table(), Elsewhere(), rows(1))]
    splits = {f"c{i}": Split(e, e, e) for i, e in enumerate(parts)}
    clients = encode_labels(FederatedDataset("x", LABELS, splits, {})).clients
    with pytest.raises(ValueError, match="over 2 picture tables can be pooled in memory only"):
        concatenate_tables([clients[name].tables[0] for name in clients])


def test_sparse_labels_of_no_rows() -> None:
    labels = SparseLabels(Ragged(np.array([2], dtype=np.int32), np.array([0, 1, 1])), 3)
    assert labels[rows_t()].shape == (0, 3)
    assert labels[rows_t(1, 0, 0)].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_tens_of_thousands_of_clients_are_made_when_asked_for() -> None:
    """No one is made beyond those looked at beforehand and those of the cohort, and none is kept."""
    users, asked = 41_131, list[str]()
    everything = Examples.labelled(table(), pictures(), rows(*range(6)))

    def make(name: str, own: np.ndarray) -> Split:
        asked.append(name)
        return Split(everything.take(own), everything.take([]), everything.take([]))

    owners = {f"u{i}": rows(i % 6) for i in range(users)}
    sizes = np.arange(users, dtype=np.int64) % 3
    made = dataset(make, owners, sizes)
    clients = encode_labels(made).clients
    assert len(clients) == users
    before = len(asked)
    assert before <= 1000
    toy = toy_setup(FedAvg(), rounds=1)
    population = Members(clients, sizes=known_sizes(clients).tolist())
    setup = Setup(toy.algorithm, population, toy.task, Local(), toy.build, rounds=1)
    with Simulation(setup, MemoryStore(), cohort=50, by_size=True) as simulation:
        there, cohort = simulation.sample(0)
    assert there == users
    assert len(cohort) == 50
    assert all(info.num_examples > 0 for info in cohort)
    assert len(asked) == before
    fewer = without(clients, ["u0", "u2"])
    assert len(fewer) == users - 2
    assert known_sizes(fewer)[:3].tolist() == [1, 0, 1]
    assert "u0" not in fewer
    assert len(changed(clients, lambda data: data.shortened(1, 0))["u1"].tables[2]) == 0
    assert asked[before:] == ["u1"]
    refuses("sizes must have one entry per client", dataset, make, owners, np.zeros(3, dtype=np.int64))
    assert isinstance(clients, Lazy)


def test_unread_clients_must_have_the_labels_in_order_too(monkeypatch) -> None:
    """Positions would be read as other labels."""
    monkeypatch.setattr("confed.data.examples.LOOKED_AT", 1)
    other = build_table([LabelRecord(Path("made up"), 0, "e0", ("blue",), picture="0.png")], LABELS[::-1])[""]

    def make(name: str, own: np.ndarray) -> Split:
        strange = Examples.labelled(other, pictures(1), rows(0))
        usual = Examples.labelled(table(), pictures(), own)
        return Split(*{"a": (usual, usual, usual), "b": (usual, usual, strange)}[name])

    clients = encode_labels(dataset(make, {"a": rows(0), "b": rows(1)}, np.ones(2, np.int64))).clients
    assert len(clients["a"]) == 1
    with pytest.raises(ValueError, match=r"examples of 'b' must have .* in its order, got 3: blue, green, red"):
        clients["b"]


def test_sampling_by_size_is_like_successive_draws() -> None:
    """Two of three clients: the first with probability n / sum, the second with n / (sum of those left)."""
    sizes = (1, 2, 5)
    exact = dict.fromkeys(((0, 1), (0, 2), (1, 2)), 0.0)
    for a, b in permutations(range(3), 2):
        exact[min(a, b), max(a, b)] += sizes[a] / 8 * sizes[b] / (8 - sizes[a])
    assert sum(exact.values()) == pytest.approx(1)
    draws = 4000
    found = [tuple(sample_cohort(3, 2, 7, round, sizes)) for round in range(draws)]
    for pair, p in exact.items():
        assert abs(found.count(pair) / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5
    assert sample_cohort(3, 2, 7, 5, sizes) == list(found[5])
    assert sample_cohort(4, 3, 0, 0, [0, 3, 0, 1]) == [1, 3]  # who has nothing is never drawn
    for faulty in ([1, 2], [1, -1, 2], [0, 0, 0]):
        refuses("sampling by size needs 3 numbers of examples", sample_cohort, 3, 2, 0, 0, faulty)


def test_a_run_samples_by_size_among_those_present() -> None:
    toy = toy_setup(FedAvg(), rounds=6)
    members = Members(toy_clients(sizes=(100, 1, 1)))
    setup = Setup(toy.algorithm, members, toy.task, toy.local, toy.build, rounds=6)
    with Simulation(setup, MemoryStore(), cohort=1, by_size=True) as simulation:
        workspace_servers = simulation.start(simulation.executor.workspace)
        asked = [next(iter(record.bytes_down)) for record in simulate(simulation, workspace_servers)]
    assert asked.count("client-0") >= 5
