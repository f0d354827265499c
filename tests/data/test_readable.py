"""Picture files that cannot be read: their examples are left out of questions before the first round."""

import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_line import confed
from confed.data import picture_files
from confed.data.examples import Examples, FederatedDataset, Split, Turn
from confed.data.picture_files import Check, PictureFiles
from confed.data.picture_tables import LeftOut, NoPictures
from confed.data.readable import leave_out_unreadable
from confed.data.regions import HeldRegions
from confed.recipes.recipe import load_recipe
from confed.registry import register_dataset
from confed.report.tables.cells import left_out_note
from confed.report.tables.methods import paper_table, table_of
from confed.results.folder import RunFolder
from confed.results.runs import load
from confed.results.summary import Summary
from confed.runs.run import run
from confed.runs.same_recipe import check_same_data, note_data
from confed.system.events import Event, RunProgress
from refusals import refuses

PICTURES = 20
COLOURS = ("red", "blue")


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 99, (PICTURES, 16, 16, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        pixels[..., 2 * (number % 2)] += 150
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder


def _file(root: Path, number: int) -> Path:
    return root / f"{number:02d}.png"


def _truncate(root: Path, *numbers: int) -> None:
    for number in numbers:
        file = _file(root, number)
        file.write_bytes(file.read_bytes()[:-200])


def _claim_size(file: Path, side: int) -> None:
    """The same PNG with another width and height in its head."""
    content = file.read_bytes()
    head = b"IHDR" + struct.pack(">II", side, side) + content[24:29]
    file.write_bytes(content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:])


def _asked(table: Any, rows: Sequence[int], each: int = 1) -> Examples:
    numbers = np.repeat(np.array(rows, dtype=np.int64), each)
    return Examples(
        table, numbers, ["What colour is it?"] * len(numbers), [COLOURS[n % 2] for n in numbers.tolist()],
        ["colour"] * len(numbers), [f"q{n}-{i}" for i, n in enumerate(numbers.tolist())],
    )  # fmt: skip


def _shared_out(table: Any) -> FederatedDataset:
    """Two clients and a place over 20 pictures; client "east" asks two questions about each in training."""
    clients = {
        "east": Split(_asked(table, range(4), 2), _asked(table, [4, 5]), _asked(table, [6, 7])),
        "west": Split(_asked(table, range(8, 12)), _asked(table, [12, 13]), _asked(table, [14, 15])),
    }
    return FederatedDataset("snapshots", COLOURS, clients, {"north": _asked(table, range(16, 20))}, ("colour",))


@register_dataset
def snapshots(root: str, unreadable: float = 0.01, check: Check = "decoded") -> FederatedDataset:
    """A dataset of one's own, whose pictures are a folder of files."""
    files = [_file(Path(root), number) for number in range(PICTURES)]
    return _shared_out(PictureFiles(files, 16, unreadable=unreadable, check=check))


@pytest.mark.filterwarnings("ignore:snapshots")
def test_every_kind_of_damage_leaves_out_its_examples_only(root: Path) -> None:
    whole = leave_out_unreadable(snapshots(str(root)))
    assert whole.unreadable == LeftOut((), PICTURES, {})
    _truncate(root, 1, 7)
    _file(root, 12).unlink()
    _claim_size(_file(root, 17), 60_000)
    _file(root, 18).write_bytes(b"")
    found = leave_out_unreadable(snapshots(str(root), unreadable=0.25))
    assert found.unreadable is not None
    assert found.unreadable.examples == {
        "east": {"train": 2, "test": 1}, "west": {"validation": 1}, "north": {"unseen": 2},
    }  # fmt: skip
    assert found.unreadable.pictures == tuple(f"{n:02d}.png" for n in (1, 7, 12, 17, 18))
    assert found.facts["unreadable"] == (
        "5 of 20 pictures cannot be read and are left out with 6 examples (east 2 train, 1 test; west 1 validation; "
        "north 2 unseen)"
    )
    for before, after in zip(_parts(whole), _parts(found), strict=True):
        kept = [n for n in before.names if n.split("-")[0] not in {"q1", "q7", "q12", "q17", "q18"}]
        assert after.names == kept
        rows = [before.names.index(name) for name in kept]
        np.testing.assert_array_equal(after.images[after.image_index], before.images[before.image_index[rows]])
        assert [after.answers[i] for i in range(len(kept))] == [before.answers[i] for i in rows]
    assert leave_out_unreadable(found) is found


def _parts(dataset: FederatedDataset) -> list[Examples]:
    splits = [part for s in dataset.clients.values() for part in (s.train, s.validation, s.test)]
    return [*splits, *dataset.unseen.values()]


def test_it_is_said_once_in_one_line(root: Path) -> None:
    _truncate(root, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        leave_out_unreadable(snapshots(str(root), unreadable=0.05))
    (warning,) = said
    assert str(warning.message).startswith(
        "snapshots: 1 of 20 pictures cannot be read and are left out with 2 examples (east 2 train); the first: picture"
    )
    assert "01.png" in str(warning.message)
    assert "\n" not in str(warning.message)


def test_too_many_and_clients_without_any_are_refused(root: Path) -> None:
    _truncate(root, 1)
    with pytest.raises(ValueError, match=r"1 of 20 pictures .* more than the share of 0\.01 .*unreadable.*01\.png"):
        leave_out_unreadable(snapshots(str(root)))
    _truncate(root, 8, 9, 10, 11)
    with pytest.raises(ValueError, match=r"'west' has no training example whose picture can be read: .*01\.png"):
        leave_out_unreadable(snapshots(str(root), unreadable=1))
    refuses(r"unreadable must lie in \[0, 1\], got 2", snapshots, str(root), unreadable=2)
    refuses("check must be one of decoded, present, got 'no'", snapshots, str(root), check="no")


@pytest.mark.filterwarnings("ignore:snapshots")
def test_the_verdict_is_remembered_until_a_file_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _truncate(root, 1)
    decoded: list[str] = []
    read = picture_files.read_picture
    monkeypatch.setattr(picture_files, "read_picture", lambda file: decoded.append(file.name) or read(file))

    def check(**options: Any) -> list[str]:
        decoded.clear()
        leave_out_unreadable(snapshots(str(root), unreadable=0.1, **options))
        return sorted(decoded)

    everything = [f"{number:02d}.png" for number in range(PICTURES)]
    assert check() == everything
    assert check() == ["01.png"]  # it may have been the disk
    _truncate(root, 2)
    assert check() == everything
    assert check(check="present") == []


@pytest.mark.filterwarnings("ignore:snapshots")
def test_presence_alone_does_not_see_damage(root: Path) -> None:
    _truncate(root, 1)
    _file(root, 6).write_bytes(b"")
    _file(root, 7).unlink()
    found = leave_out_unreadable(snapshots(str(root), unreadable=0.1, check="present"))
    assert found.unreadable is not None
    assert found.unreadable.examples == {"east": {"test": 2}}


@pytest.mark.filterwarnings("ignore:snapshots")
def test_pairs_pictures_before_an_example_and_gaps_count(root: Path) -> None:
    _truncate(root, 3)
    table = PictureFiles([_file(root, n) for n in range(6)], 16, unreadable=0.5)
    four = _asked(table, [0, 1, 2, 4])
    pairs = replace(four, image_index=np.array([[0, 1], [2, 3], [4, 5], [3, 0]]))
    gaps = replace(four, image_index=np.array([3, 3, 5, 99]), present={"image": np.array([False, True, True, False])})
    shown = replace(four, before=[[Turn(3, "a")], [Turn(4, "b"), Turn(-1, "c")], [], [Turn(0, "d"), Turn(3, "e")]])
    made = replace(_shared_out(table_of_black()), clients={"east": Split(pairs, gaps, shown)}, unseen={})
    split = leave_out_unreadable(made).clients["east"]
    assert split.train.image_index.tolist() == [[0, 1], [3, 4]]  # the table is one shorter
    assert [name[:2] for name in split.validation.names] == ["q0", "q2", "q4"]
    assert split.validation.image_index[1] == 4
    assert split.test.before == [[Turn(3, "b"), Turn(-1, "c")], []]
    assert len(split.test.images) == 5


def table_of_black() -> np.ndarray:
    return np.zeros((PICTURES, 16, 16, 3), np.uint8)


@pytest.mark.filterwarnings("ignore:snapshots")
def test_region_features_keep_their_table(root: Path) -> None:
    _truncate(root, 1)
    made = snapshots(str(root), unreadable=0.1)
    regions = HeldRegions(np.zeros((PICTURES, 2, 3), np.float32), np.zeros((PICTURES, 2, 4), np.float32), "x")
    clients = {n: Split(*(replace(e, regions=regions) for e in _roles(s))) for n, s in made.clients.items()}
    train = leave_out_unreadable(replace(made, clients=clients, unseen={})).clients["east"].train
    assert train.regions is regions
    assert train.image_index.tolist() == [0, 0, 2, 2, 3, 3]


def _roles(split: Split) -> tuple[Examples, Examples, Examples]:
    return split.train, split.validation, split.test


def test_pictures_in_memory_and_own_tables_are_left_alone() -> None:
    class Mine(PictureFilesLookalike):
        pass

    for table in (table_of_black(), NoPictures(PICTURES), Mine()):
        made = _shared_out(table)
        assert leave_out_unreadable(made) is made


class PictureFilesLookalike:
    """A table that cannot be read at all."""

    dtype, ndim, shape = np.dtype(np.uint8), 4, (PICTURES, 16, 16, 3)

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: Any) -> np.ndarray:
        raise AssertionError("nobody may look")


TINY = (
    "study.methods=[]", "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "model.image_size=16", "run.rounds=2", "local.epochs=1", "local.batch_size=4", "run.workers=0",
    "run.gallery=0", "run.evaluate_every=0", "run.threads=1", "run.device=cpu",
)  # fmt: skip


def _recipe(root: Path, *more: str) -> Any:
    given = ["data.name=snapshots", f"data.root={root}", "data.unreadable=0.1", *TINY, *more]
    return load_recipe("fedvqa_scenes", given)


@pytest.mark.filterwarnings("ignore:snapshots")
def test_a_run_leaves_out_the_example_and_not_the_client(root: Path, tmp_path: Path) -> None:
    def damage(event: Event) -> None:
        if isinstance(event, RunProgress) and event.round == 1:
            _file(root, 9).write_bytes(b"no picture")

    _truncate(root, 1, 17)
    summary = run(_recipe(root), tmp_path / "run", progress=damage)
    told = "2 of 20 pictures cannot be read and are left out with 3 examples (east 2 train; north 1 unseen)"
    assert told in summary["notes"]
    assert summary["left_out"] == {"east": {"train": 2}, "north": {"unseen": 1}}
    assert summary["examples"]["east"] == {"train": 6, "validation": 2, "test": 2}
    # Every client takes part; one whose picture breaks on the way fails as before.
    (error,) = summary["errors"]
    assert (error["round"], error["client"]) == (2, "west")
    assert "09.png" in error["error"]
    study = load(tmp_path / "run")
    note = "‡ Without examples whose pictures cannot be read: east 2 train; north 1 unseen."
    for table in (table_of(study), paper_table(study)):
        cells = {c.title: cell for c, cell in zip(table.columns, table.sections[0][0], strict=True)}
        assert cells["east"].text.endswith(" ‡")
        assert "‡" not in cells["west"].text
        assert note in table.notes
    assert {c.title: cell for c, cell in zip(table.columns, table.sections[0][0], strict=True)}["north"].text[-1] == "‡"
    assert left_out_note([Summary({"left_out": {}}), Summary({})]) == []


@pytest.mark.filterwarnings("ignore:snapshots")
def test_a_run_goes_on_with_the_examples_that_it_began_with_only(root: Path, tmp_path: Path) -> None:
    def now() -> Any:
        return SimpleNamespace(dataset=leave_out_unreadable(snapshots(str(root), unreadable=0.1)))

    good = _file(root, 1).read_bytes()
    _truncate(root, 1)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    note_data(folder, now())
    check_same_data(folder, now())
    _file(root, 1).write_bytes(good)
    with pytest.raises(
        ValueError,
        match=r"then 22 examples and 1 that cannot be read .*01\.png.*now 24 and 0 that cannot be read .*other exampl",
    ):
        check_same_data(folder, now())
    _truncate(root, 2)
    refuses(r"now 22 and 1 that cannot be read .*02\.png", check_same_data, folder, now())


@pytest.mark.filterwarnings("ignore:snapshots")
def test_a_description_of_the_data_counts_what_is_left(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _truncate(root, 1)
    assert confed("data", "describe", "snapshots", f"root={root}", "unreadable=0.1") == 0
    assert "1 of 20 pictures cannot be read" in " ".join(capfd.readouterr().out.split())
