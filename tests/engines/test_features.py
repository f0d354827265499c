"""Runs with features of frozen layers kept give the numbers of runs without, for every backbone and finetuning."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedp3 import FedP3
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.frozen_features import FeatureSettings, FrozenFeatures
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.tasks.vqa import VQA
from feature_runs import run, same

KEEP = FeatureSettings(10**8)


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests may take less time than a look-up."""
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


def table(rows: int, seed: int) -> Table:
    rng = torch.Generator().manual_seed(seed)
    columns = {
        "text": torch.randint(5, 30, (rows, 6), generator=rng),
        "text_mask": torch.ones(rows, 6, dtype=torch.int64),
        "label": torch.randint(0, 4, (rows,), generator=rng),
    }
    images = torch.randint(0, 256, (rows, 3, 64, 64), generator=rng).to(torch.uint8)
    return Table(images, torch.arange(rows), columns)


def setup(name: str, algorithm: Algorithm | None = None, **options: Any) -> Setup:
    data = {f"{i}": TableData(table(n, i), table(5, 10 + i), table(6, 20 + i)) for i, n in enumerate((11, 8))}
    build = partial(create_model, name, answers=4, vocab_size=5000, pretrained=False, **options)
    local = Local(epochs=2, batch_size=4, lr=1e-2, eval_batch_size=4)
    return Setup(algorithm or FedAvg(), Members(data), VQA(4), local, build, 3, features=KEEP)


BACKBONES = {"vilt_mini": {}, "vault_mini": {"language_frozen": True}, "vit_mini": {}}
STAGES = {
    ("vilt_mini", "head"): "pooling",
    ("vilt_mini", "top"): "block 2",
    ("vilt_mini", "adapters"): "block 1 without adapter",
    ("vilt_mini", "lora"): "embeddings",
    ("vilt_mini", "ia3"): "embeddings",
    ("vault_mini", "head"): "pooling",
    ("vault_mini", "top"): "block 2",
    ("vault_mini", "adapters"): "block 1 without adapter",
    ("vault_mini", "lora"): "embeddings and BERT",
    ("vault_mini", "ia3"): "embeddings and BERT",
    ("vit_mini", "head"): "normalisation",
    ("vit_mini", "top"): "block 3",
    ("vit_mini", "adapters"): "block 1 without adapter",
    ("vit_mini", "lora"): "embeddings",
    ("vit_mini", "ia3"): "embeddings",
}


@pytest.mark.parametrize(("name", "kind"), STAGES)
def test_numbers_are_those_without_for_every_backbone_and_finetuning(name: str, kind: str):
    counts = same(setup(name, trainable=kind, **BACKBONES[name]))
    assert counts.stage == STAGES[name, kind]
    # 19 examples are trained on six times; 10 are evaluated three times with two models.
    assert counts.reused > 50
    assert counts.exact
    assert not counts.reason


@pytest.mark.parametrize("kind", ["all", "bias", "prompt"])
def test_finetuning_that_begins_with_the_embeddings_says_so(kind: str):
    counts = same(setup("vilt_mini", trainable=kind))
    assert counts.reason == "the first stage (embeddings) is trained"
    assert counts.reused == 0


def test_teacher_continues_from_the_same_features():
    counts = same(setup("vilt_mini", FedP3(), trainable="top"))
    assert counts.reused > 100  # training, evaluation and the teacher


def test_dropout_in_frozen_layers_keeps_evaluations_only():
    counts = same(setup("vilt_mini", trainable="top", dropout=0.1))
    assert "draw random numbers" in counts.notes[0]
    assert 0 < counts.reused <= 60  # ten examples, two models, three rounds


def test_mirrored_pictures_are_other_examples():
    given = setup("vit_mini", trainable="top")
    counts = same(replace(given, local=replace(given.local, augment="flip")))
    assert counts.reused > 30
    assert counts.computed > 2 * 19


def test_worker_processes_and_the_next_run_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.workers.WRITTEN_AFTER", 0.0)
    given = replace(setup("vilt_mini", trainable="top"), features=FeatureSettings(10**8, tmp_path / "features", 10**9))
    first = same(given, workers=2)
    assert first.reused > 50
    assert first.exact
    assert not first.notes
    folder = next((tmp_path / "features").iterdir())
    assert len(list(folder.glob("*.safetensors"))) > 0
    again = same(given)
    assert again.computed < 60 < again.reused  # what is computed is compared


def test_stale_file_is_found_out_and_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.executor.WRITTEN_AFTER", 0.0)
    given = replace(setup("vilt_mini", trainable="top"), features=FeatureSettings(10**8, tmp_path / "features", 10**9))
    run(given)
    # As if the weights had been others: the same name, other values.
    monkeypatch.setattr("confed.engines.executor._address", lambda *_: next((tmp_path / "features").iterdir()).name)
    other = replace(given, build=partial(given.build, seed=1))
    counts = same(other)
    assert any("stale" in note for note in counts.notes)
    assert counts.reused > 50


def test_different_weights_or_shapes_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.executor.WRITTEN_AFTER", 0.0)
    keep = FeatureSettings(10**8, tmp_path, 10**9)
    for seed, kind, folders in ((0, "top", 1), (1, "top", 2), (1, "head", 3), (0, "top", 3)):
        run(replace(setup("vilt_mini", trainable=kind, seed=seed), features=keep))
        assert len(list(tmp_path.iterdir())) == folders


def test_final_examination_keeps_what_enough_models_read_and_nothing_of_control_conditions():
    given = setup("vilt_mini", trainable="head")
    workspace = Workspace(given.model())
    executor = InProcess(given, workspace)
    with Simulation(given, MemoryStore(), executor) as simulation:
        controls: list[Any] = [("0", {}, {"control": c}) for c in ("permuted_image", "blank_image", "permuted_text")]
        own: list[Any] = [("0", {}, {}), ("1", {}, {})]
        once = [message.scalars for message in simulation.examine([*controls, *own], 5)]
        assert (executor.features.computed, executor.features.held) == (0, 0)
        # 6 examples in batches of 4 and 2; each is computed, checked, and after that served to the other models.
        often = [message.scalars for message in simulation.examine(own[:1] * 6, 5)]
    assert executor.features.computed == 12
    assert executor.features.reused == 24
    assert often == [once[3]] * 6
