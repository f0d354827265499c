"""Recipes on photographs with published encoders: every row runs with tiny ones; a few real pictures are learned."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from confed.models.encoders import cells_of, load_tower
from confed.recipes.recipe import load_recipe, packaged_recipes
from confed.runs.run import run
from digit_files import write_digits, write_photographs
from refusals import refuses
from repository import ROOT

SHARED = ROOT.parent / "shared"
REAL = Path(os.environ.get("CONFED_DATA", SHARED / "data")) / "ucm_multilabel"
WEIGHTS = Path(os.environ.get("CONFED_WEIGHTS", SHARED / "weights")) / "mobilenet_v2_imagenet"
USES = {"forest": "nature", "river": "water", "harbor": "water", "beach": "water"}
LABELS = {"forest": ["trees"], "river": ["trees", "water"], "harbor": ["dock", "ship", "water"], "beach": ["sea"]}
QUICK = ["run.rounds=1", "run.cohort=0", "run.gallery=0", "run.controls=none", "local.epochs=1"]
# What needs another source of data, or encoders with a tokenizer; easy-VQA's pictures have a reader tested beside it.
ELSEWHERE = ("photos_easyvqa", "photos_modalities", "photos_prompts")
RECIPES = sorted(name for name in packaged_recipes() if name.startswith("photos_") and name not in ELSEWHERE)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of UC Merced's three tables: classes, labels and questions."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "images").mkdir()
    pictures: list[dict[str, object]] = []
    questions: list[dict[str, object]] = []
    for number_of_use, (use, scene) in enumerate(USES.items()):
        for number, split in enumerate(6 * ["train"] + 4 * ["val"] + 4 * ["test"]):
            name = f"{use}{number:02d}.png"
            pixels = np.random.default_rng(number).integers(0, 40, (32, 32, 3))
            pixels[..., number_of_use % 3] += 50 * (1 + number_of_use)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "images" / name)
            common = {"image": name, "scene": scene, "split": split}
            pictures.append(common | {"land_use": use, "label": use, "labels": LABELS[use]})
            question = {"question_id": len(questions), "question": "what land use is this?", "answer": use}
            questions.append(common | question | {"type": "land_use"})
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, pictures)))
    (folder / "vqa_derived.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_rows_run_with_tiny_encoders(name: str, photographs: Path, tmp_path: Path) -> None:
    settings = [f"data.root={photographs}", *QUICK, "data.image_size=32"]
    settings.append("data.cells=tiny:resnet" if name == "photos_bicsl" else "model.vision=tiny:resnet")
    if name == "photos_composed":
        settings.append('data.unseen=["water"]')
    sections = load_recipe(name, settings).sections
    if sections["model"].get("text"):
        settings.append("model.text=tiny:bert")
    if sections["data"].get("domains"):
        settings += ["data.domains=false", "data.domain_key=scene", "model.blocks=1"]
    elif sections["data"]["name"] == "labelled_folders":
        settings.append("data.clients=2")
    recipe = load_recipe(name, settings)
    for row in recipe.methods:
        method = recipe.method(row)
        if method.sections["model"].get("labels"):  # names need a tokenizer, which no tiny encoder has
            method.sections["model"]["labels"] = "random"
        assert run(method, tmp_path / row)["rounds"] == 1


def test_modalities_run_with_a_tiny_encoder(tmp_path: Path) -> None:
    sounds, pictures = tmp_path / "sounds", write_photographs(tmp_path / "pictures")
    sounds.mkdir()
    write_digits(sounds, ("ann", "bob", "cid", "dee"), rate=8000)
    sizes = ["data.train=20", "data.validation=10", "data.test=10", "data.image_size=32"]
    paths = [f"data.root={sounds}", f"data.photographs={pictures}", "model.vision=tiny:mobilenet_v2"]
    recipe = load_recipe("photos_modalities", [*paths, *sizes, *QUICK])
    for row in recipe.methods:
        assert run(recipe.method(row), tmp_path / row)["rounds"] == 1


@pytest.mark.slow  # 86 s: ten rows; tests/models/test_contrastive.py tries the pair
def test_prompts_run_with_real_encoders(photographs: Path, tmp_path: Path) -> None:
    if not WEIGHTS.is_dir():
        pytest.skip("no real encoders here; set CONFED_WEIGHTS to their folder")
    pair = [f"model.source={WEIGHTS}", f"model.text={WEIGHTS.with_name('minilm_l3')}"]
    few = ["data.clients=2", "data.partition=iid", "data.shots=2", "data.validation_shots=1", "data.max_test=2"]
    recipe = load_recipe("photos_prompts", [f"data.root={photographs}", *pair, *few, *QUICK])
    for row in recipe.methods:
        assert run(recipe.method(row), tmp_path / row)["rounds"] == 1


def test_cells_of_a_picture_encoder_are_regions() -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (35, 32, 32, 3), dtype=np.uint8)
    regions = cells_of(pictures, "tiny:vit")
    model = load_tower("tiny:vit", "pictures", 0)
    with torch.no_grad():
        states = model(pixel_values=(torch.tensor(pictures[33:]).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)[0][:, 1:]
    features, boxes = regions[np.array([33, 34])]
    torch.testing.assert_close(torch.tensor(features), states)
    assert boxes[0, 1].tolist() == [0.25, 0.0, 0.5, 0.25]
    refuses("'tiny:vit' reads pictures of 32 pixels a side, got", cells_of, pictures[:, :16, :16], "tiny:vit")


@pytest.mark.slow  # 26 s; test_rows_run_with_tiny_encoders runs the same recipe
@pytest.mark.filterwarnings("ignore:.*are in several of the splits")  # the published set has copies
def test_few_real_pictures_are_learned(tmp_path: Path) -> None:
    if not (REAL / "images.tar").is_file() or not WEIGHTS.is_dir():
        pytest.skip("no photographs or no encoder here; set CONFED_DATA and CONFED_WEIGHTS to their folders")
    few = ["data.clients=2", "data.shots=4", "data.max_test=40", "run.rounds=4", "run.gallery=0", "run.controls=none"]
    recipe = load_recipe("photos_ucm", [f"model.vision={WEIGHTS}", f"data.root={REAL}", *few])
    summary = run(recipe.method("fedavg"), tmp_path)
    assert summary["global_seen_mean"] > 0.6  # chance 0.05
