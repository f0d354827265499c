"""JSON lines: rows, compression, and files that are damaged."""

import gzip
from pathlib import Path

import pytest

from confed.data.intake.tables import read_jsonl
from refusals import refuses

LINES = '{"a": "\u2028"}\n\n{"a": 2, "b": 3}\n'


def test_empty_lines_count_and_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(LINES, encoding="utf-8")
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(LINES)
    expected = [(1, {"a": "\u2028"}), (3, {"a": 2, "b": 3})]
    assert list(read_jsonl(tmp_path / "x.jsonl", ["a"])) == list(read_jsonl(tmp_path / "x.jsonl.gz")) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": 2', r"bad\.jsonl, row 3: expected one JSON object.*cut off"),
        (b'{"a": 1}\n[2]', r"row 2: expected an object, got \[2\]"),
        (b'{"a": 1}\n{"b": 1}', r"row 2: expected the key 'a', got {'b': 1}"),
        (b'"\xff"', "expected UTF-8"),
        (b"[" * 100_000, "row 1: expected one JSON object"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    refuses(message, list, read_jsonl(tmp_path / "bad.jsonl", ["a"]))


def test_missing_and_cut_off_files_are_named(tmp_path: Path) -> None:
    refuses("does not exist", list, read_jsonl(tmp_path / "none"))
    data = gzip.compress(LINES.encode() * 99)
    for name, content in (("cut.gz", data[: len(data) // 2]), ("no.gz", b"nothing"), ("bad.gz", data[:20] + data[30:])):
        (tmp_path / name).write_bytes(content)
        refuses(f"{name}: expected a complete compressed file", list, read_jsonl(tmp_path / name))
