"""Readers of files of others refuse what is too large before they read it, and what would make a model too large."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import confed
from confed.datasets.card import Card, CardClient, digest_of, read_card
from confed.deployment.manifest import MANIFEST, SIGNATURE, verified
from confed.deployment.provision import read_sites
from confed.federation.reading import read_bounded
from confed.inference.export import export
from confed.inference.load import load_exported, read_facts, read_tensors
from confed.recipes.recipe import load_recipe
from confed.report.report import write_report
from confed.results.runs import load
from confed.results.sweep import read_sweep
from confed.studies.published import read_published
from confed.studies.tuned import read_tuned
from refusals import refuses
from tiny_runs import TINY

ABSENT = "absent"
HUGE = 3 * 2**30


def sparse(path: Path, size: int = HUGE) -> Path:
    """A file of that size which takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def manifest(path: Path) -> None:
    (path.parent / SIGNATURE).write_text("AAAA")
    verified(path.parent, b"")


READERS: dict[str, Callable[[Path], Any]] = {
    "recipe.toml": load_recipe, "card.json": read_card, "sites.json": read_sites,
    "row.json": lambda p: read_published(str(p)), "confed.json": lambda p: read_facts(p.parent),
    "tuned.toml": read_tuned, "sweep.json": lambda p: read_sweep(p.parent),
    "summary.json": lambda p: load(p.parent), "metrics.jsonl": lambda p: load(run_beside(p)), MANIFEST: manifest,
    "digest.json": digest_of, "model.safetensors": lambda p: read_tensors(headed(p)),
    "predictions.safetensors": lambda p: load(run_beside(headed(p))).runs[0].predictions(),
}  # fmt: skip


def run_beside(path: Path) -> Path:
    (path.parent / "recipe.toml").write_text("")
    if path.name != "metrics.jsonl":
        (path.parent / "metrics.jsonl").write_text("")
    return path.parent


def headed(path: Path) -> Path:
    with path.open("r+b") as file:
        file.write((64 * 2**20).to_bytes(8, "little"))
    return path


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_too_large_is_refused_unread(name: str, tmp_path: Path) -> None:
    file = sparse(tmp_path / name)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"too large: at most|has a header of") as caught:
            READERS[name](file)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert name in str(caught.value)


def test_a_file_without_a_size_is_bounded_too() -> None:
    refuses("too large", read_bounded, Path("/dev/zero"), 1000)


CARD = Card("scenes", False, ("no", "yes"), (), ("a",), {"x": CardClient(("yes",))}, {}, picture=(32, 32))


@pytest.mark.parametrize("change", [{"picture": [2**17, 8]}, {"regions": [8, 10**9]}, {"picture": [0, 8]}])
def test_a_card_cannot_ask_for_a_model_of_any_size(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_text(CARD.to_json())
    assert read_card(file) == CARD
    file.write_text(json.dumps({**json.loads(CARD.to_json()), **change}))
    refuses("must be two whole numbers from 1 to 65536", read_card, file)


def test_a_card_is_read_in_time_that_grows_with_its_length(tmp_path: Path) -> None:
    names = tuple(map(str, range(60_000)))  # 10^9 comparisons one by one
    (tmp_path / "card.json").write_text(Card("d", False, names, (), (), {"x": CardClient(names[::-1])}, {}).to_json())
    assert len(read_card(tmp_path / "card.json").clients["x"].answers) == 60_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> confed.Run:
    small = {**TINY, "study.methods": [], "algorithm.name": "fedavg", "run.rounds": 2, "run.controls": "none"}
    return confed.run("fedvqa_scenes", small, folder=tmp_path_factory.mktemp("run") / "run", progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 500_000_000}, "vocab_size must be that of the tokenizer beside it"),
        ({"image_size": 10**6}, "image_size must lie in 0 to 8192"),
        ({"image_size": -1}, "image_size must lie in 0 to 8192"),
        ({"regions": {"width": 10**9}}, r"regions\.width must lie in 0 to 8192"),
    ],
)  # fmt: skip
def test_an_export_cannot_ask_for_a_table_of_any_size(
    run: confed.Run, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    export(run.folder, tmp_path / "export")
    facts = tmp_path / "export" / "confed.json"
    load_exported(tmp_path / "export")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), **change}))
    refuses(message, load_exported, tmp_path / "export")


@pytest.mark.parametrize(
    "change",
    [
        {"round": None}, {"round": ABSENT}, {"round": [1]}, {"round": "1"}, {"round": {}}, {"loss": [1]},
        {"bytes_up": 7},
        {"personal": [1]}, {"global": {"warm": 3}}, {"unseen": {"x": [1]}}, {"pooled": {"global": 3}},
    ],
)  # fmt: skip
def test_a_damaged_history_is_one_line_of_the_report(run: confed.Run, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = [line["event"] for line in lines]
    wanted = "round" if {"loss", "bytes_up", "round"} & change.keys() else "evaluation"
    changed = lines[kinds.index(wanted)]
    changed |= change
    if change.get("round") == ABSENT:
        del changed["round"]
    shutil.rmtree(folder / "records")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refuses(r"metrics\.jsonl: \w+ (must be|of round)", write_report, folder)


def test_a_round_of_timings_is_a_number(run: confed.Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    (folder / "timings.jsonl").write_text('{"round": {}, "seconds": 1}\n')
    refuses(r"timings\.jsonl: round must be a whole number", write_report, folder)


def test_sound_predictions_are_read(run: confed.Run, tmp_path: Path) -> None:
    assert load(run.folder).runs[0].predictions()
    save_file({"a": np.ones(3)}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path / "model.safetensors")["a"].tolist() == [1, 1, 1]
