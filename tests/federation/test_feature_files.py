"""Files of features: shared by processes and runs, and never believed when they are damaged."""

import json
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from children import forked, status_of
from confed.federation.feature_store import FeatureFiles, FeatureStore, Field, Shard, room_for

LAYOUT = (Field(torch.float32, (3,)), Field(torch.int64, ()))
DIGESTS = [bytes([n]) * 16 for n in range(5)]


def rows(digests: Sequence[bytes] = DIGESTS) -> list[torch.Tensor]:
    firsts = torch.tensor([digest[0] for digest in digests])
    return [firsts[:, None].float() + torch.arange(3) / 10, firsts]


def filled(folder: Path, said: list[str], memory: int = 10**6, digests: Sequence[bytes] = DIGESTS) -> FeatureStore:
    store = FeatureStore(memory, FeatureFiles(folder / "weights", 10**6, said.append))
    assert store.add(digests, LAYOUT, rows(digests), 0)
    return store


def reopened(folder: Path, said: list[str], number_of: Callable[[str], int] = len) -> FeatureStore:
    return FeatureStore(10**6, FeatureFiles(folder / "weights", 10**6, said.append, number_of))


def only(folder: Path) -> Path:
    (path,) = (folder / "weights").glob("*.safetensors")
    return path


def read(store: FeatureStore, digests: Sequence[bytes] = DIGESTS) -> list[torch.Tensor] | None:
    places = store.find(digests)
    return None if places is None else store.rows(LAYOUT, places)


def test_another_process_finds_what_was_saved(tmp_path: Path):
    said: list[str] = []
    store = filled(tmp_path, said)
    other = reopened(tmp_path, said, {"batches of 5": 3}.__getitem__)
    assert other.find(DIGESTS) is None
    assert store.save(["batches of 5"])
    found = read(other, DIGESTS[::-1])
    assert found is not None
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(found, rows(), strict=True))
    places = other.find(DIGESTS[:2])
    assert places is not None
    assert other.origins(places) == [3, 3]
    assert said == []
    assert only(tmp_path).stat().st_mode & 0o077 == 0


def test_memory_and_file_make_one_batch(tmp_path: Path):
    said: list[str] = []
    filled(tmp_path, said, digests=DIGESTS[:3]).save([""])
    store = reopened(tmp_path, said)
    store.add(DIGESTS[3:], LAYOUT, rows(DIGESTS[3:]), 0)
    mixed = [DIGESTS[i] for i in (4, 0, 3, 2, 0)]
    found = read(store, mixed)
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, rows(mixed), strict=True))


def test_full_memory_goes_to_files_and_what_is_not_saved_stays(tmp_path: Path):
    said: list[str] = []
    each = sum(field.bytes for field in LAYOUT)
    store = filled(tmp_path, said, memory=5 * each)
    more = [bytes([n]) * 16 for n in range(10, 13)]
    assert not store.add(more, LAYOUT, rows(more), 0)
    assert read(store) is not None
    assert store.save([""])
    assert store.add(more, LAYOUT, rows(more), 0)
    assert store.used == 3 * each
    found = read(store, [*DIGESTS, *more])
    assert found is not None
    assert torch.equal(found[1], rows([*DIGESTS, *more])[1])


@pytest.mark.parametrize("damage", ["cut", "empty", "other version", "no safetensors", "fewer rows"])
def test_damaged_file_is_left_aside_and_said_once(tmp_path: Path, damage: str):
    said: list[str] = []
    filled(tmp_path, said).save([""])
    path = only(tmp_path)
    tensors, whole = load_file(path), path.read_bytes()
    if damage == "other version":
        save_file(tensors, path, {"format": "confed features 0", "circumstances": "[]"})
    elif damage == "fewer rows":
        save_file(
            {**tensors, "checks": tensors["checks"][:2]}, path, {"format": "confed features 1", "circumstances": "[]"}
        )
    else:
        path.write_bytes({"cut": whole[:-40], "empty": b"", "no safetensors": b"x" * 100}[damage])
    store = reopened(tmp_path, said)
    assert [store.find(DIGESTS) for _ in range(2)] == [None, None]
    assert len(said) == 1
    assert str(path) in said[0]
    assert "left aside" in said[0]
    assert store.add(DIGESTS, LAYOUT, rows(), 0)
    assert store.save([""])
    assert read(reopened(tmp_path, [])) is not None  # the new file has taken its place


def test_changed_byte_is_found_when_its_row_is_read(tmp_path: Path):
    said: list[str] = []
    filled(tmp_path, said).save([""])
    path = only(tmp_path)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(torch.tensor([3.0, 3.1, 3.2]).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    store = reopened(tmp_path, said)
    assert read(store, DIGESTS[:3]) is not None
    assert read(store) is None
    assert len(said) == 1
    assert "damaged" in said[0]
    assert store.find(DIGESTS[:1]) is None
    assert not path.exists()


def test_two_processes_that_write_the_same_leave_one_file(tmp_path: Path):
    said: list[str] = []
    one, two = filled(tmp_path, said), filled(tmp_path, said)
    assert one.save([""])
    assert two.save([""])
    assert [p.name for p in (tmp_path / "weights").iterdir()] == [only(tmp_path).name]
    assert not said
    assert read(two) is not None


def test_folder_that_cannot_be_written_is_said_once(tmp_path: Path):
    said: list[str] = []
    (tmp_path / "weights").write_text("a file where the folder should be")
    store = filled(tmp_path, said)
    assert [store.save([""]) for _ in range(2)] == [False, False]
    assert len([text for text in said if "cannot be kept" in text]) == 1
    assert read(store) is not None


def test_full_disk_leaves_no_part_and_is_said_once(tmp_path: Path):
    said: list[str] = []
    store = filled(tmp_path, said)

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        assert not store.save([""])
        assert not store.save([""])
        (text,) = said
        assert "cannot be kept" in text
        assert read(store) is not None

    assert status_of(forked(on_a_full_disk)) == 0
    assert list((tmp_path / "weights").iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200


def test_limit_of_the_folder_removes_what_was_used_longest_ago(tmp_path: Path):
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").write_bytes(bytes(100))
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    (tmp_path / "own").mkdir()
    assert room_for(tmp_path, 150, 300, tmp_path / "own")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "own"]
    assert not room_for(tmp_path, 301, 300, tmp_path / "own")
    said: list[str] = []
    store = FeatureStore(10**6, FeatureFiles(tmp_path / "own", 50, said.append))
    store.add(DIGESTS, LAYOUT, rows(), 0)
    assert not store.save([""])
    assert len(said) == 1
    assert "have reached 50 bytes" in said[0]


def test_circumstances_are_text_in_the_header(tmp_path: Path):
    filled(tmp_path, []).save(["batches of 5"])
    header = only(tmp_path).read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["circumstances"] == '["batches of 5"]'
    assert Shard(only(tmp_path)).layout == LAYOUT
