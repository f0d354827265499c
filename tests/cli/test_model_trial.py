"""Trials of models before a recipe is written: what is tried, what is taken, and that nothing is waited for."""

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from command_line import Patch, confed
from confed.cli import model_trial
from confed.recipes.recipe import load_recipe

RGB = {"red": (220, 40, 40), "blue": (40, 60, 220)}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def colours(folder: Path, count: int) -> None:
    for number in range(count):
        colour = list(RGB)[number % 2]
        noise = np.random.default_rng(number).integers(0, 30, (16, 16, 3))
        (folder / colour).mkdir(parents=True, exist_ok=True)
        Image.fromarray((np.array(RGB[colour]) + noise).clip(0, 255).astype(np.uint8)).save(
            folder / colour / f"{number}.png"
        )


def test_the_best_of_a_trial_is_written_with_what_was_measured(tmp_path: Path) -> None:
    colours(tmp_path / "photos", 280)
    assert confed("init", "photos", "--trial", "4", "--encoder", "tiny:resnet", "--json") == 0
    recipe = (tmp_path / "photos.toml").read_text(encoding="utf-8")
    tried = [line for line in recipe.splitlines() if line.startswith("# - tried")]
    assert [line.split(":")[0] for line in tried] == [
        "# - tried vit_mini, packaged", "# - tried cnn_words, from nothing", "# - tried encoders with tiny",
    ]  # fmt: skip
    taken = next(line for line in recipe.splitlines() if line.startswith("# - taken: "))
    model = load_recipe("photos.toml", []).sections["model"]["name"]
    assert model in taken


def test_models_of_several_labels_are_tried_by_average_precision(tmp_path: Path, monkeypatch: Patch) -> None:
    # On a busy machine too, a trial has its seconds of the processor.
    monkeypatch.setattr("confed.cli.model_trial.time", SimpleNamespace(monotonic=time.process_time))
    folder = tmp_path / "scenes"
    (folder / "images").mkdir(parents=True)
    lines: list[str] = []
    for number in range(280):
        labels = [name for name, bit in (("sun", 1), ("sea", 2)) if number % 4 & bit]
        pixels = np.random.default_rng(number).integers(0, 30, (16, 16, 3))
        pixels[:8, :, 0] += 200 * ("sun" in labels)
        pixels[8:, :, 2] += 200 * ("sea" in labels)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "labels": labels or ["nothing"]}))
    (folder / "labels.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert confed("init", "scenes", "--trial", "4", "--encoder", "tiny:resnet") == 0
    tried = [line for line in (tmp_path / "scenes.toml").read_text().splitlines() if line.startswith("# - tried")]
    assert [line.partition(": C-AP-binned ")[0] for line in tried] == [
        "# - tried resnet_multilabel_mini, packaged", "# - tried encoders with tiny:resnet",
    ]  # fmt: skip
    scores = [float(line.partition("C-AP-binned ")[2].partition("%")[0]) for line in tried]
    assert max(scores) > 70  # prior 50
    taken = load_recipe("scenes.toml", []).sections["model"]["name"]
    assert taken == ["resnet_multilabel_mini", "encoders"][scores.index(max(scores))]


def test_too_few_examples_are_not_tried(tmp_path: Path) -> None:
    colours(tmp_path / "photos", 60)
    assert confed("init", "photos", "--encoder", "tiny:resnet") == 0
    recipe = (tmp_path / "photos.toml").read_text(encoding="utf-8")
    assert "# - no trial of models: it takes 60 training examples and 20 to validate on" in recipe
    assert 'name = "vit_mini"' in recipe


@pytest.mark.parametrize("offline", [True, False])
def test_offline_nothing_is_waited_for(offline: bool, monkeypatch: Patch) -> None:
    def never(*_: object) -> None:
        time.sleep(30)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(model_trial, "PATIENCE", 0.2)
    monkeypatch.setattr(model_trial, "in_cache", lambda _: False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    vision, text, why = model_trial._encoders("", "", reads_texts=False)
    assert time.monotonic() - began < 5
    assert (vision, text) == ("", "")
    assert why.startswith("not tried: google/mobilenet_v2_1.0_224 is not in the cache and the hub does not answer")
