"""Runs, exports and studies of clients and rows whose names are no file names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from confed.data.examples import FederatedDataset
from confed.federation.file_names import file_name
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import register_dataset
from confed.results.folder import RunFolder
from confed.results.runs import load
from confed.runs.run import run
from confed.studies.runner import run_study
from confed.studies.study import open_study, read_study
from toy_federation import squares

HOSTILE = ("../../escaped", "..", "a:b c")
TINY = (
    "study.methods=[]", "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "run.rounds=1", "local.epochs=1", "run.workers=1", "run.gallery=0", "run.evaluate_every=0",
)  # fmt: skip


@register_dataset
def hostile_names(*, seed: int = 0) -> FederatedDataset:
    """Squares whose clients are called like paths."""
    plain = squares(6, 2, seed=seed)
    return replace(plain, clients=dict(zip(HOSTILE, plain.clients.values(), strict=True)))


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["data.name=hostile_names", *TINY, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep") / "er" / "run"
    run(_recipe(), folder)
    return folder


def test_personal_models_stay_in_the_run_folder(finished: Path) -> None:
    assert [path.name for path in finished.parents[1].rglob("escaped*")] == []
    names = sorted(path.name for path in (finished / "models" / "personal").iterdir())
    assert names == sorted(file_name(client) for client in HOSTILE)
    assert FinishedRun(finished).owners == list(HOSTILE)


def test_exports_stay_in_their_folder_and_load_again(finished: Path, tmp_path: Path) -> None:
    written = export(finished, tmp_path / "deep" / "export")
    folders = {f"clients/{file_name(client)}" for client in HOSTILE}
    assert set(written) == {"global", *folders}
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    for client in HOSTILE:
        own = load_file(RunFolder(finished).personal_model(client))
        there = dict(load_exported(tmp_path / "deep" / "export", client).model.named_parameters())
        name = next(iter(own.keys() & there.keys()))
        assert torch.equal(there[name], own[name])


def test_a_run_of_an_earlier_version_is_still_read(finished: Path, tmp_path: Path) -> None:
    own = RunFolder(tmp_path)
    (tmp_path / "models" / "personal" / "a:b c").mkdir(parents=True)
    assert own.personal_model("a:b c").parent.name == "a:b c"
    assert RunFolder(finished).personal_model("a:b c").parent.name == "a%3Ab c"


def test_a_row_with_a_colon_has_a_folder_without(tmp_path: Path) -> None:
    row = "plain:FedAvg"
    recipe = _recipe().with_rows([row], {row: {"name": "fedavg"}})
    open_study(recipe, tmp_path / "study", [0])
    (job,) = read_study(tmp_path / "study").jobs
    assert job.folder == "plain%3AFedAvg/seed-0"
    run_study(tmp_path / "study")
    assert [one.method for one in load(tmp_path / "study").runs] == [row]
    # As earlier versions wrote it.
    index = (tmp_path / "study" / "summary.json").read_text()
    (tmp_path / "study" / "summary.json").write_text(index.replace("%3A", ":"))
    (tmp_path / "study" / file_name(row)).rename(tmp_path / "study" / row)
    assert read_study(tmp_path / "study").jobs[0].folder == f"{row}/seed-0"
    assert [one.method for one in load(tmp_path / "study").runs] == [row]
