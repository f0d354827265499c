"""Adapters and LoRA in the multimodal Transformer, the recipes' rows, and data that do not fit the model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from confed.algorithms.feddat import FedDAT
from confed.algorithms.fedlora import FedLoRA
from confed.data.examples import FederatedDataset
from confed.data.modalities import longest
from confed.data.sounds import Sounds
from confed.federation.client_info import ClientInfo
from confed.federation.params import Scope, named_tensors
from confed.models.finetuning import Trainable
from confed.models.modal_transformer import modal_transformer_mini, modal_transformer_tiny
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from confed.tasks.vqa import VQA
from modal_batches import ALL, modal_batch
from modal_examples import gaps

FEW = ["data.train=4", "data.validation=1", "data.test=1"]
OPTIONS = {"modalities": ALL, "series_channels": 2}


@pytest.mark.parametrize(
    ("kind", "learns"),
    [
        ("adapters", {"body.layers.0.adapter"}),
        ("lora", {"body.layers.0.attention.qkv.lora_A", "body.layers.0.attention.qkv.lora_B"}),
        ("top", {"body.layers.0", "body.norm"}),
        ("head", set()),
    ],
)
def test_what_belongs_to_a_modality_and_the_head_always_learn(kind: Trainable, learns: set[str]) -> None:
    model = modal_transformer_tiny(5, 20, trainable=kind, **OPTIONS)
    found = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {n for n in found if n.startswith("body.")} == {
        n for n, _ in model.named_parameters() if n.startswith(tuple(f"{part}." for part in learns))
    }
    assert {n for n, _ in model.named_parameters() if n.startswith(("embed.", "head."))} <= found
    assert model.frozen == {n for n, _ in model.named_parameters()} - found
    F.cross_entropy(model(modal_batch()).logits, torch.tensor([0, 3, 4])).backward()
    assert all((p.grad is not None) == (n in found) for n, p in model.named_parameters())


def test_what_a_modality_keeps_as_it_is_does_not_begin_to_learn() -> None:
    model = modal_transformer_mini(5, 20, word_vectors="frozen", trainable="adapters")
    assert not model.get_parameter("embed.text.segments.words.weight").requires_grad
    assert "embed.text.segments.words.weight" in model.frozen
    assert model.get_parameter("embed.text.shared.weight").requires_grad


def test_all_of_it_has_the_values_that_it_had_before() -> None:
    plain, tuned = (modal_transformer_tiny(5, 20, trainable=kind, seed=3, **OPTIONS) for kind in ("all", "adapters"))
    theirs = named_tensors(tuned)
    assert all(torch.equal(t, theirs[n]) for n, t in named_tensors(plain).items())
    assert not plain.frozen


def test_feddat_keeps_what_reads_a_modality_and_the_head_at_home() -> None:
    model = modal_transformer_tiny(5, 20, trainable="adapters", **OPTIONS)
    method = FedDAT(head=("head", "embed")).configure(model, VQA(5))
    method.add_modules(model, torch.Generator().manual_seed(0))
    rules = method.rules(ClientInfo("x", 1))
    assert rules["*"] is Scope.FROZEN
    assert {glob for glob, scope in rules.items() if scope is Scope.PRIVATE} == {"head.*", "embed.*", "*.local.*"}
    lora = FedLoRA(aggregation="dimension", ranks={"x": 4})
    assert lora.configure(modal_transformer_tiny(5, 20, trainable="lora", **OPTIONS), VQA(5)).head == ("head",)


# Recipes ---------------------------------------------------------------------------------------------------------


def test_every_row_of_the_recipe_can_begin() -> None:
    recipe = load_recipe("modalities", FEW)
    for row in recipe.methods:
        prepare(recipe.method(row))
    setup, run_data = prepare(recipe.method("fedmd"))
    assert setup.public is run_data.unseen["new_image_text_audio"]
    assert "new_image_text_audio" not in setup.observers
    assert load_recipe("modalities_digits").methods == recipe.methods


# Data that do not fit ----------------------------------------------------------------------------------------------


def test_every_client_must_see_the_public_examples() -> None:
    public = [*FEW, "algorithm.name=fedmd", 'algorithm.public="new_image"']
    with pytest.raises(ValueError, match="'new_image' has some with image only, and client 'only_text' has text"):
        prepare(load_recipe("modalities", public))
    hearing = ["only_text", "only_audio", "image_text_audio"]
    prepare(load_recipe("modalities", [*public, f"run.without={hearing}"]))


def test_the_model_must_read_something_of_every_client() -> None:
    with pytest.raises(ValueError, match="got image, audio; of these only_text have nothing"):
        prepare(load_recipe("modalities", [*FEW, 'model.modalities=["image", "audio"]']))
    deaf = ["only_audio", "image_audio", "image_text_audio"]
    with pytest.warns(UserWarning, match="names audio, which no client of 'modalities' has"):
        prepare(load_recipe("modalities", [*FEW, f"run.without={deaf}"]))


def test_series_that_nobody_has_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"model\.modalities names series, of which 'modalities' has none"):
        prepare(load_recipe("modalities", [*FEW, 'model.modalities=["image", "text", "audio", "series"]']))


def test_texts_longer_than_the_limit_lose_their_end_and_it_is_said_once() -> None:
    # [CLS], four words, [SEP]: "there was one red ball" has a word too many, "there was one ball" fits.
    with pytest.warns(UserWarning, match=r"\d+ of \d+ different texts of 'modalities' .*max_length = 6 ") as said:
        _, run_data = prepare(load_recipe("modalities", [*FEW, "model.max_length=6"]))
    assert len([warning for warning in said if "lose their end" in str(warning.message)]) == 1
    texts = dict.fromkeys(
        text
        for split in run_data.dataset.clients.values()
        for part in (split.train, split.validation, split.test)
        for text in part.questions
    ) | dict.fromkeys(text for part in run_data.dataset.unseen.values() for text in part.questions)
    long = sum(len(text.split()) > 4 for text in texts)
    assert long
    assert str(said[0].message).startswith(f"{long} of {len(texts)} ")


def heard(longest_sound: int, *, seed: int = 0) -> FederatedDataset:
    """One client with sounds, of which a place's is the longest."""
    del seed
    dataset = gaps(4)
    ears = dataset.clients["ears"]
    place = replace(
        ears.test,
        sounds=Sounds(np.zeros(longest_sound, np.int16), np.array([0, longest_sound]), 8000),
        sound_index=np.zeros(4, np.int64),
    )
    return replace(
        dataset, clients={"ears": ears}, unseen={"far": place}, modalities={"ears": dataset.modalities["ears"]}
    )


def test_the_longest_sound_and_series_are_found() -> None:
    assert longest(heard(16001)) == {"audio": (16001, 8000)}
    found = longest(gaps())
    assert found == {"audio": (5, 8000), "series": (5, 1)}


def test_a_sound_that_the_model_cannot_read_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[algorithm]\nname = "fedavg"\n[task]\nname = "vqa"\n[model]\nname = "modal_transformer_mini"\n'
        'modalities = ["text", "audio"]\n[data]\nname = "test_modal_finetuning:heard"\nlongest_sound = 16001\n'
    )
    with pytest.raises(ValueError, match=r"model\.audio_seconds must be at least 2\.01, .* of 'gaps', got 2"):
        prepare(load_recipe(path))
    prepare(load_recipe(path, ["model.audio_seconds=2.01"]))
    prepare(load_recipe(path, ["data.longest_sound=16000"]))
