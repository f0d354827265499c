"""Rows of different lengths in one array, against plain lists."""

import numpy as np
import pytest
import torch

from confed.data.ragged import Ragged, end_to_end, joined, offsets_of
from refusals import refuses

LISTS = [[5, 6], [], [7, 8, 9], [1]]


def table(lists: list[list[int]]) -> Ragged:
    return Ragged(*end_to_end([np.array(row, dtype=np.int32) for row in lists]))


def test_rows_are_those_that_were_put_in() -> None:
    rows = table(LISTS)
    assert [rows.row(number).tolist() for number in range(len(rows))] == LISTS
    assert rows.lengths.tolist() == [2, 0, 3, 1]
    assert rows.nbytes == 4 * 6 + 8 * 5


@pytest.mark.parametrize("chosen", [[3, 0, 0, 1], [1], [], [0, 1, 2, 3]])
def test_taken_rows_come_in_the_given_order(chosen: list[int]) -> None:
    rows = table(LISTS).take(np.array(chosen, dtype=np.int64))
    assert [rows.row(number).tolist() for number in range(len(rows))] == [LISTS[number] for number in chosen]
    assert rows.values.dtype == np.int32


def test_joined_tables_keep_all_rows() -> None:
    rows = joined([table(LISTS), table([[4]]), table(LISTS[1:2])])
    assert [rows.row(number).tolist() for number in range(len(rows))] == [*LISTS, [4], []]


def test_rows_side_by_side_have_zeros_behind_them() -> None:
    found, lengths = table(LISTS).padded(torch.tensor([2, 1, 0]), 0.5)
    assert found.tolist() == [[3.5, 4.0, 4.5], [0.0, 0.0, 0.0], [2.5, 3.0, 0.0]]
    assert lengths.tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([0, 3]), "offsets must go from 0 to 4, got 0 to 3"),
        (np.array([0.0, 4.0]), "offsets must be int64"),
        (np.zeros(0, np.int64), r"of shape \(M \+ 1,\)"),
    ],
)
def test_faulty_offsets_of_ragged_arrays_are_refused(offsets: np.ndarray, message: str) -> None:
    refuses(message, Ragged, np.zeros(4), offsets)


def test_offsets_of_no_rows() -> None:
    assert offsets_of([]).tolist() == [0]
