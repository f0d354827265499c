"""Sizes of pictures that models by name read, and that data have where a recipe gives none."""

import json
from pathlib import Path
from typing import Any

import pytest

from confed.models.inputs import picture_side
from confed.recipes.recipe import parse_recipe

PROCESSORS: dict[str, tuple[dict[str, Any], int | None]] = {
    "squeezed": ({"size": {"height": 384, "width": 384}}, 384),
    "number": ({"size": 224}, 224),
    "cropped": ({"do_center_crop": True, "size": {"shortest_edge": 256}, "crop_size": {"height": 224}}, 256),
    "not cropped": ({"do_center_crop": False, "size": {"shortest_edge": 336}, "crop_size": {"height": 224}}, 336),
    "tiles": ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 512),
    "areas": ({"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_side_of_a_processor(kind: str, file: str, tmp_path: Path):
    content, side = PROCESSORS[kind]
    whole = {"image_processor": content} if file == "processor_config.json" else content
    (tmp_path / file).write_text(json.dumps(whole), encoding="utf-8")
    assert picture_side({"source": str(tmp_path)}) == side


def test_sides_of_packaged_and_small_models():
    sides = [picture_side({"source": source}) for source in ("smolvlm_mini", "clip_mini", "tiny:siglip", "")]
    assert sides == [64, 64, 32, None]


DATA = '[data]\nname = "chat_records"\nroot = "."\n'


def test_pictures_have_the_models_size_where_a_recipe_gives_none(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 384, "width": 384}}', encoding="utf-8")
    head = '[algorithm]\nname = "fedavg"\n'
    model = f'{head}[model]\nname = "hf"\nsource = {json.dumps(str(tmp_path))}\n[task]\nname = "chat"\n'
    recipe = parse_recipe(model + DATA)
    assert recipe.sections["data"]["image_size"] == 384
    assert parse_recipe(recipe.to_toml()).sections["data"]["image_size"] == 384
    assert parse_recipe(f"{model}{DATA}image_size = 128").sections["data"]["image_size"] == 128
    assert (
        parse_recipe(f'{head}[model]\nname = "vilt_mini"\n{DATA}[task]\nname = "vqa"').sections["data"]["image_size"]
        == 224
    )
    changed = parse_recipe(model + DATA, overrides=['model.source="tiny:idefics3"'])
    assert changed.sections["data"]["image_size"] == 32
