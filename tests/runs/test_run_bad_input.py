"""Bad input gets one clear error that names the thing, and a run loses nothing by it."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.data.encode import encode
from confed.data.examples import Examples, channels_first
from confed.data.table import Table, concatenate_tables
from confed.datasets.scenes import scenes
from confed.datasets.scenes.graph import GENERAL_NOUNS, OWN_NOUNS
from confed.federation.checkpoint import CorruptCheckpoint
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder
from confed.runs.encode import tokenizer_options
from confed.runs.run import run
from refusals import refuses

TINY = (
    "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=24",
    "data.validation=8", "data.test=16", "local.epochs=1", "run.rounds=3", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip


def _tiny(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more]).method("fedavg")


def _examples(count: int = 3) -> Examples:
    return Examples(
        np.zeros((1, 4, 4, 3), dtype=np.uint8), np.zeros(count, dtype=np.int64), ["what is it?"] * count,
        ["dog"] * count, ["kind"] * count, [f"row-{i}" for i in range(count)],
    )  # fmt: skip


def _tokenizer(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(texts), 2, dtype=torch.int64), torch.ones(len(texts), 2, dtype=torch.int64)


def test_an_answer_outside_the_vocabulary_names_the_example() -> None:
    with pytest.raises(ValueError, match="example 'row-0': the answer 'dog' is not in the vocabulary of 2 answers"):
        encode(_examples(), _tokenizer, ("cat", "cow"), ("kind",))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"questions": ["fine?", "  ", "fine?"]}, "question of example 'row-1' is empty"),
        ({"answers": ["dog"]}, "answers must have one entry per question .3., got 1"),
        ({"images": np.zeros((1, 4, 4), dtype=np.uint8)}, r"images must be uint8 of shape \(M, H, W, 3\)"),
        ({"images": np.zeros((1, 4, 4, 3))}, "got float64"),
        ({"image_index": np.array([0, 0, 1])}, r"image_index must lie in \[0, 1\), got 0 to 1"),
    ],
)
def test_examples_whose_columns_do_not_fit_are_refused(change: dict, complaint: str) -> None:
    refuses(complaint, replace, _examples(), **change)


def test_pooling_shares_pictures_and_keeps_rows() -> None:
    images = channels_first(np.arange(2 * 2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 2, 3))
    one = Table(images, torch.tensor([1, 0]), {"label": torch.tensor([1, 2])})
    two = Table(images, torch.tensor([0]), {"label": torch.tensor([3])})
    other = Table(images[:1].clone(), torch.tensor([0]), {"label": torch.tensor([4])})
    assert concatenate_tables([one, two]).images is images
    everything = concatenate_tables([one, other, two])
    assert everything.columns["label"].tolist() == [1, 2, 4, 3]
    for row, source in ((0, images[1]), (1, images[0]), (2, images[0]), (3, images[0])):
        assert torch.equal(everything.batch(torch.tensor([row]))["image"][0], source)


def test_a_client_with_one_example_takes_part(tmp_path: Path) -> None:
    summary = run(_tiny("data.train=1"), tmp_path / "run")
    assert summary["errors"] == []
    assert all(counts["train"] == 1 for counts in summary["examples"].values())


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    refuses(r"exists already; continue it with `confed resume", run, _tiny(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_continues(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    run(_tiny(), reference)
    folder, messages = tmp_path / "run", list[str]()

    def stop(progress) -> None:
        if progress.round == 3 and "loss" in progress.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(_tiny(), folder, progress=stop)
    victim = folder / "checkpoint" / "round-000002" / "main-0.safetensors"
    victim.write_bytes(victim.read_bytes()[:-8])
    run(_tiny(), folder, resume=True, progress=lambda p: messages.append(p.text))
    assert any("damaged checkpoint" in m and "round-000002" in m for m in messages)
    assert RunFolder(folder).metrics.read_bytes() == RunFolder(reference).metrics.read_bytes()
    final = "models/global/trained.safetensors"
    assert (folder / final).read_bytes() == (reference / final).read_bytes()


def test_when_no_checkpoint_is_sound_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(_tiny("run.keep_checkpoints=1"), folder)
    (folder / "summary.json").unlink()
    victim = next((folder / "checkpoint").glob("round-*/checkpoint.json"))
    victim.write_text("{")
    history = RunFolder(folder).metrics.read_bytes()
    with pytest.raises(CorruptCheckpoint, match=r"no sound checkpoint .*checkpoint\.json"):
        run(_tiny("run.keep_checkpoints=1"), folder, resume=True)
    assert RunFolder(folder).metrics.read_bytes() == history


def test_a_full_disk_stops_the_run_and_it_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    run(_tiny(), reference)
    original, writes = os.replace, []

    def full(source: Path, target: Path) -> None:
        writes.append(target)
        if len(writes) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            run(_tiny(), folder)
    run(_tiny(), folder, resume=True)
    assert RunFolder(folder).metrics.read_bytes() == RunFolder(reference).metrics.read_bytes()


def test_a_run_without_clients(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", ["data.name=test_run_bad_input:nobody"]).method("fedavg")
    refuses("has no clients; a federation needs at least one", run, recipe, tmp_path / "run")


def nobody():
    """A dataset without clients."""
    from confed.data.examples import FederatedDataset

    return FederatedDataset("nobody", ("yes",), {}, {}, ("word",))


def test_checkpoints_keep_their_distance_in_time_but_the_last_is_always_there(tmp_path: Path) -> None:
    run(_tiny("run.checkpoint_seconds=1e6", "run.keep_checkpoints=9"), tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoint").glob("round-*")) == ["round-000001", "round-000003"]


def test_soft_scores_can_be_trained_and_reported(tmp_path: Path) -> None:
    summary = run(_tiny("task.objective=bce", "run.rounds=1"), tmp_path / "run")
    assert summary["metric"] == "vqa_accuracy"
    assert set(summary["personal"]) == {"transport", "sports", "educational", "natural"}


def test_a_published_backbone_brings_its_tokenizer_from_the_same_folder() -> None:
    options = tokenizer_options({"name": "vilt_b32", "pretrained": "some/folder", "max_length": 40})
    assert options == {"path": "some/folder", "max_length": 40}
    assert tokenizer_options({"name": "vilt_mini", "pretrained": True, "max_length": 16}) == {"max_length": 16}


def test_clients_answer_with_their_own_nouns() -> None:
    dataset = scenes(train=80, validation=40, test=200)
    for name, split in dataset.clients.items():
        pool = {*GENERAL_NOUNS, *OWN_NOUNS[name]}
        for examples in (split.train, split.validation, split.test):
            nouns = {a for a, kind in zip(examples.answers, examples.types, strict=True) if kind == "qnoun"}
            assert nouns <= pool, name
