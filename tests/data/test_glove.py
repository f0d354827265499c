"""Word vectors from GloVe's text files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from confed.data.glove import load_glove
from refusals import refuses

LINES = "the 0.5 -1 2\ncat 1e-1 0 3\n. . . 9 9 9\nsat 7 8 9\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "glove.txt"
    path.write_text(LINES, encoding="utf-8")
    return path


def test_rows_are_those_of_the_words_and_else_zeros(file: Path):
    vectors = load_glove(file, ["sat", "dog", "the", "sat"])
    assert vectors.dtype is torch.float32
    assert vectors.tolist() == [[7, 8, 9], [0, 0, 0], [0.5, -1, 2], [7, 8, 9]]


def test_no_words_have_no_rows_but_the_width_of_the_file(file: Path):
    assert load_glove(file, []).shape == (0, 3)


def test_of_a_word_that_comes_twice_the_first_line_counts(file: Path):
    file.write_text(LINES + "the 4 4 4\n")
    assert load_glove(file, ["the", "dog"])[0].tolist() == [0.5, -1, 2]


def test_words_need_not_be_ascii_and_lines_may_end_in_a_space(file: Path):
    file.write_text("the 1 2 3 \ncafé 4 5 6 \n", encoding="utf-8")
    assert load_glove(file, ["café"]).tolist() == [[4, 5, 6]]


def test_reading_ends_where_all_words_are_found(file: Path):
    file.write_text(LINES + "broken 1\n")
    assert load_glove(file, ["cat"]).shape == (1, 3)
    refuses("line 5: expected a word and 3 numbers, got 1", load_glove, file, ["dog"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty file"),
        ("the 1 2 3\ncat 1 2", "line 2: expected a word and 3 numbers, got 2; is the file cut off"),
        ("the 1 2 3\ncat 1 2 3 4\n", "line 2: expected a word and 3 numbers, got 4"),
        ("the 1 2 3\ncat 1 x 3\n", "line 2: expected 3 numbers behind the word, got: could not convert"),
        ("the 1 2 3\ncat 1 nan 3\n", "line 2: expected 3 finite numbers"),
        ("400000 300\nthe 1 2 3\n", "line 1: expected a word and its numbers"),
        ("{}\n", "line 1: expected a word and its numbers"),
    ],
)
def test_malformed_vector_files_are_refused(file: Path, content: str, message: str):
    file.write_text(content)
    refuses(message, load_glove, file, ["cat"])


def test_a_missing_file_is_named_with_what_to_look_for(tmp_path: Path):
    refuses(r"none\.txt does not exist.*glove\.6B\.zip", load_glove, tmp_path / "none.txt", ["cat"])


def test_published_vectors_are_read_as_they_are(real_data: Path):
    path = real_data / "text_assets" / "glove.6B.50d.top2445.txt"
    if not path.is_file():
        pytest.skip("the published word vectors are not here")
    table = {line.split(" ")[0]: line.split(" ")[1:] for line in path.read_text(encoding="utf-8").splitlines()}
    words = ["the", "color", "left", "qwertzuiop"]
    vectors = load_glove(path, words)
    assert vectors.shape == (4, 50)
    for word, vector in zip(words, vectors, strict=True):
        expected = np.array(table.get(word, [0] * 50), dtype=np.float32)
        np.testing.assert_array_equal(vector.numpy(), expected)

    def similarity(one: str, other: str) -> float:
        a, b = load_glove(path, [one, other])
        return torch.nn.functional.cosine_similarity(a, b, dim=0).item()

    assert similarity("red", "blue") > similarity("red", "where")
