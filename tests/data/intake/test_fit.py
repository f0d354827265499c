"""Pictures reach a model as its own processor makes them: squeezed, cropped or padded as its configuration says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import confed
from confed.cli.dataset_description import describe
from confed.data.examples import FederatedDataset
from confed.data.intake.opening import read_picture
from confed.data.picture_files import PictureFiles
from confed.data.pictures import fitted, resize
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.models.inputs import picture_fit, picture_side
from confed.recipes.recipe import parse_recipe
from confed.runs.dataset import load_dataset

CROPPED: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32}, "resample": 3,
}  # fmt: skip
PROCESSORS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "cropped": (CROPPED, "crop", 40),
    "old cropped": ({"do_center_crop": True, "size": 224, "crop_size": 224}, "crop", 224),
    "squeezed, then cropped": ({**CROPPED, "size": {"height": 40, "width": 40}}, "squeeze", 32),
    "squeezed": ({"size": {"height": 384, "width": 384}}, "squeeze", 384),
    "not cropped": ({**CROPPED, "do_center_crop": False}, "squeeze", 40),
    "padded": ({"image_processor_type": "JanusImageProcessor", "size": {"height": 384, "width": 384}}, "pad", 384),
    "tiles": ({**CROPPED, "image_grid_pinpoints": [[40, 80]]}, "squeeze", 40),
    "nothing": ({}, "squeeze", None),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_fit_of_a_processor(kind: str, tmp_path: Path) -> None:
    content, fit, side = PROCESSORS[kind]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    assert (picture_fit({"source": str(tmp_path)}), picture_side({"source": str(tmp_path)})) == (fit, side)


@pytest.mark.parametrize("shape", [(100, 50, 3), (37, 90, 3), (40, 40, 3), (20, 33, 3)])
def test_the_processor_makes_the_same_of_the_cropped_picture_as_of_the_file(shape: tuple[int, ...]) -> None:
    from transformers import CLIPImageProcessorPil

    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    settings = {key: value for key, value in CROPPED.items() if key != "image_processor_type"}
    processor = CLIPImageProcessorPil(**settings)
    of_file = processor(picture, return_tensors="np")["pixel_values"]
    of_table = processor(resize(picture, 40, "crop"), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(of_table, of_file)
    if shape[0] != shape[1]:
        assert not np.array_equal(processor(resize(picture, 40), return_tensors="np")["pixel_values"], of_file)


def test_crop_and_pad_keep_proportions() -> None:
    wide = np.full((20, 40, 3), 200, np.uint8)
    wide[:, 10:30] = 50
    assert (resize(wide, 20, "crop") == 50).all()
    padded = resize(wide, 40, "pad")
    assert (padded[:10] == 127).all()
    assert (padded[30:] == 127).all()
    np.testing.assert_array_equal(padded[10:30], wide)
    zoom: Any = "zoom"
    with pytest.raises(ValueError, match=r"data\.fit must be one of squeeze, crop, pad, got 'zoom'"), fitted(zoom):
        pass


def test_files_keep_the_fit_that_they_were_made_in(tmp_path: Path) -> None:
    wide = np.full((20, 40, 3), 200, np.uint8)
    wide[:, 10:30] = 50
    Image.fromarray(wide).save(tmp_path / "1.png")
    with fitted("crop"):
        cropped = PictureFiles([tmp_path / "1.png"] * 3, 20)
    assert (cropped[np.arange(3)] == 50).all()
    assert (cropped.take(np.array([1]))[0] == 50).all()
    assert cropped.of([tmp_path / "1.png"]).fit == "crop"
    assert not (PictureFiles([tmp_path / "1.png"], 20)[0] == 50).all()


HEAD = '[algorithm]\nname = "fedavg"\n[task]\nname = "vqa"\n'


def recipe_text(folder: Path, data: str = "", model: str = "clip") -> str:
    source = f"source = {json.dumps(str(folder))}\n" if model == "clip" else ""
    root = json.dumps(str(folder / "data"))
    return (
        f'{HEAD}[model]\nname = "{model}"\n{source}[data]\nname = "labelled_folders"\nroot = {root}\n'
        f'partition = "iid"\nclients = 1\nshots = 0\nnew = "none"\n{data}'
    )


def recipe(folder: Path, data: str = "", model: str = "clip") -> Any:
    return parse_recipe(recipe_text(folder, data, model))


def test_a_recipe_has_the_fit_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    assert recipe(tmp_path).sections["data"]["fit"] == "crop"
    assert recipe(tmp_path, 'fit = "pad"').sections["data"]["fit"] == "pad"
    assert "fit" not in recipe(tmp_path, model="vilt_mini").sections["data"]
    # Runs of before had a size and no fit: they stay what they are.
    assert "fit" not in recipe(tmp_path, "image_size = 40").sections["data"]
    again = parse_recipe(recipe(tmp_path).to_toml())
    assert again.sections["data"]["fit"] == "crop"
    with pytest.raises(ValueError, match=r"data\.fit must be squeeze or crop or pad.*got 'zoom'"):
        recipe(tmp_path, 'fit = "zoom"')


def test_the_data_are_made_with_the_fit(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    wide = np.full((40, 80, 3), 200, np.uint8)
    wide[:, 20:60] = 50
    for name in ("a", "b"):
        for number in range(5):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(wide).save(tmp_path / "data" / name / f"{number}.png")
    for in_memory in (True, False):
        made = recipe(tmp_path, f"in_memory = {str(in_memory).lower()}")
        data = load_dataset(json.dumps(made.sections["data"], default=str), 0)
        assert isinstance(data, FederatedDataset)
        train = data.clients["client-00"].train
        assert train.images.shape[1:] == (40, 40, 3)
        assert (train.images[int(train.image_index[0])] == 50).all()


def run_of(folder: Path, model: str, data: str = "", side: int = 32) -> Path:
    """A run of one round on wide pictures."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        for number in range(8):
            (folder / "data" / name).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "data" / name / f"{number}.png")
    (folder / "recipe.toml").write_text(
        f'{HEAD}[model]\n{model}\n[data]\nname = "labelled_folders"\nroot = {json.dumps(str(folder / "data"))}\n'
        f'partition = "iid"\nclients = 2\nshots = 0\nnew = "none"\n{data}\n'
        '[run]\nrounds = 1\ngallery = 0\ncontrols = "none"\n'
    )
    return confed.run(folder / "recipe.toml", folder=folder / "run", progress=False).folder


def reads_the_middle(trained: Any, picture: Path) -> bool:
    shown = trained.seen(picture)["image"][0].permute(1, 2, 0).numpy()
    side = len(shown)
    return trained.fit == "crop" and np.array_equal(shown, read_picture(picture)[:, side // 2 : side // 2 + side])


def test_a_finished_run_reads_pictures_as_its_model_was_trained(tmp_path: Path) -> None:
    from confed.models.clip import tiny_encoder

    made: Any = tiny_encoder("clip")
    body, processor = made
    source = tmp_path / "model"
    body.save_pretrained(source)
    processor.tokenizer.save_pretrained(source)
    settings = {**CROPPED, "size": {"shortest_edge": 32}}
    (source / "preprocessor_config.json").write_text(json.dumps(settings))
    finished = FinishedRun.of(run_of(tmp_path, f'name = "clip"\nsource = {json.dumps(str(source))}'))
    finished.load()
    assert reads_the_middle(finished.model(None), tmp_path / "data" / "a" / "0.png")


def test_an_export_reads_pictures_as_its_run(tmp_path: Path) -> None:
    export(run_of(tmp_path, 'name = "vilt_mini"', 'image_size = 64\nfit = "crop"', 64), tmp_path / "export")
    assert reads_the_middle(confed.load_exported(tmp_path / "export"), tmp_path / "data" / "a" / "0.png")


def test_describe_says_where_pictures_are_not_as_the_model_wants_them(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    for name in ("a", "b"):
        for number in range(8):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((64, 64, 3), number, np.uint8)).save(tmp_path / "data" / name / f"{number}.png")
    for text, expected in (("", []), ("image_size = 20", ["data.image_size is 20", "data.fit is 'squeeze'"])):
        (tmp_path / "recipe.toml").write_text(recipe_text(tmp_path, text))
        told = [line for line in describe(str(tmp_path / "recipe.toml"))["faults"] if line.startswith("data.")]
        assert [line.split(",")[0] for line in told] == expected
