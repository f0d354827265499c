"""Variants of models: signatures, documentation and declared properties of functions that tables make."""

import inspect
from typing import get_type_hints

import pytest
from torch import nn

from confed.federation.specs import model_spec
from confed.models import mmnasnet
from confed.models.mcan import MCAN, mcan_large, mcan_s_mini
from confed.models.region_model import question_tokenizer
from confed.registry import models

NAMES = [name for name in models.names() if model_spec(models[name]).reads == "regions"]


@pytest.mark.parametrize("name", NAMES)
def test_variants_look_like_written_functions(name):
    variant = models[name]
    parameters = inspect.signature(variant).parameters
    assert variant.__name__ == name
    assert models[f"{variant.__module__}:{name}"] is variant
    assert get_type_hints(variant) == {
        **{key: parameter.annotation for key, parameter in parameters.items()},
        "return": inspect.signature(variant).return_annotation,
    }
    documentation = inspect.getdoc(variant) or ""
    assert [key for key in parameters if f"\n    {key}: " not in documentation] == []
    assert documentation.partition("\n")[0].endswith(".")
    assert model_spec(variant).tokenizer is question_tokenizer


def test_there_are_fifteen_region_models():
    assert len(NAMES) == 15


def test_defaults_and_fixed_sizes_of_a_variant():
    parameters = inspect.signature(mcan_large).parameters
    assert parameters["dropout"].default == 0.1
    assert parameters["region_width"].default == 2048
    assert inspect.signature(mcan_s_mini).parameters["region_width"].default == 64
    assert "hidden" not in parameters  # fixed by the variant
    model = mcan_s_mini(3, 20, region_width=5, dropout=0.25)
    assert isinstance(model, MCAN)
    assert (model.hidden, model.region_width) == (64, 5)
    assert {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)} == {0.25}


def test_options_of_the_class_stand_before_those_of_finetuning():
    names = list(inspect.signature(mmnasnet.mmnas_large).parameters)
    assert names[-6:] == ["head_width", "flat_hidden", "picture_side", "trainable", "peft", "seed"]
    assert "head_width" not in inspect.signature(mmnasnet.mmnas_s_mini).parameters


def test_wrong_arguments_name_the_variant():
    with pytest.raises(TypeError, match=r"^mcan_s_mini\(\) got an unexpected keyword argument 'hidden'$"):
        mcan_s_mini(3, 20, hidden=8)
    with pytest.raises(TypeError, match=r"^mcan_s_mini\(\) missing a required argument: 'answers'$"):
        mcan_s_mini()
