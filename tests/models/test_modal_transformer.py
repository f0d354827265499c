"""The multimodal Transformer: its tokens, partly local maps, absent modalities, and the published size."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.params import named_tensors
from confed.federation.structure import feature_width, reads_absent
from confed.models import create_model, create_tokenizer
from confed.models.modal_segments import CLIP_MEAN, CLIP_STD, ClipPatches, EncoderCells
from confed.models.modal_transformer import (
    ModalTransformer,
    modal_transformer,
    modal_transformer_mini,
    modal_transformer_tiny,
)
from confed.recipes.recipe import load_recipe
from confed.runs.encode import derived_options
from modal_batches import ALL, KEYS, modal_batch, only

SUBSETS = [names for size in range(1, 5) for names in combinations(ALL, size)]


def _model(**options: Any) -> ModalTransformer:
    return modal_transformer_tiny(5, 20, **{"modalities": ALL, "series_channels": 2} | options)


def _gradients(model: ModalTransformer, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(batch).logits, batch["label"]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_tokens_are_modality_vector_and_mapped_segment() -> None:
    model, batch = _model(), modal_batch()
    tokens = model.tokens(batch)
    assert list(tokens.spans) == ["image", "audio", "series", "text"]  # text last, for causal attention
    assert tokens.present is not None
    assert tokens.states.shape == (*tokens.present.shape, 16)
    for name, span in tokens.spans.items():
        part: Any = model.embed[name]
        x, present = part.segments(batch)
        mapped = x @ part.shared.weight.T + part.position[: x.shape[1]]
        torch.testing.assert_close(tokens.states[:, span, 4:], mapped)
        assert torch.equal(tokens.states[:, span, :4], part.vector.expand(*x.shape[:2], 4))
        assert torch.equal(
            tokens.present[:, span], torch.ones_like(tokens.present[:, span]) if present is None else present
        )
    assert model.tokens(only(batch, "image")).present is None


@pytest.mark.parametrize("names", SUBSETS)
def test_every_set_of_modalities(names: tuple[str, ...]) -> None:
    model, batch = _model(), only(modal_batch(), *names)
    output = model(batch)
    assert output.logits.shape == (3, 5)
    assert output.features.shape == (3, 16)
    torch.testing.assert_close(output.logits, output.features @ model.head.weight.T + model.head.bias)
    # A batch pays for its own modalities only: nothing else is part of the graph.
    for name, grad in _gradients(model, batch).items():
        own = not name.startswith("embed.") or name.split(".")[1] in names
        assert (grad is not None) == own, name
    # What it has is all that counts, and a model of fewer modalities reads the same.
    torch.testing.assert_close(model(batch | {"index": torch.arange(3)}).logits, output.logits)


@pytest.mark.parametrize("block", ["magneto", "prenorm"])
def test_no_example_depends_on_its_company(block: str) -> None:
    model, batch = _model(block=block).eval(), modal_batch()
    whole = model(batch).logits
    for row in range(3):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        torch.testing.assert_close(model(alone).logits, whole[row : row + 1], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        changed = batch | {"text": torch.where(batch["text_mask"] == 0, 7, batch["text"])}
    torch.testing.assert_close(model(changed).logits, whole)


@pytest.mark.parametrize("names", [("image", "text"), ALL])
def test_half_precision_changes_scores_little(names: tuple[str, ...]) -> None:
    model, batch = modal_transformer_mini(5, 20, modalities=ALL, series_channels=2), only(modal_batch(), *names)
    exact = model(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        close = model(batch).logits
        F.cross_entropy(close, batch["label"]).backward()
    torch.testing.assert_close(close.float(), exact, atol=0.05, rtol=0.05)


def test_features_are_the_mean_of_the_modalities_means() -> None:
    model, batch = _model().eval(), modal_batch()
    encoded = model.encode(batch)
    assert encoded.present is not None
    for row in range(3):
        means = [encoded.states[row, span][encoded.present[row, span]].mean(0) for span in encoded.spans.values()]
        torch.testing.assert_close(model(batch).features[row], torch.stack(means).mean(0), atol=1e-6, rtol=1e-5)


def test_what_a_model_lacks_is_not_read() -> None:
    model = _model(modalities=("text", "image"))
    assert model.modalities == ("image", "text")
    batch = modal_batch()
    torch.testing.assert_close(model(batch).logits, model(only(batch, "image", "text")).logits)
    with pytest.raises(ValueError, match="at least one of image, text, got audio, audio_length, label"):
        model(only(batch, "audio"))


def test_text_behind_what_it_is_about_for_causal_attention() -> None:
    model, batch = _model().eval(), modal_batch()
    before, changed = model.encode(batch, causal=True), batch | {"text": batch["text_mask"] * 3}
    after, text = model.encode(changed, causal=True), before.spans["text"]
    torch.testing.assert_close(before.states[:, : text.start], after.states[:, : text.start])
    assert bool(before.states.isfinite().all())
    assert not torch.allclose(before.states[:, text], after.states[:, text])


# Partly local maps -----------------------------------------------------------------------------------------------


def _maps(model: ModalTransformer, part: str) -> dict[str, Tensor]:
    found = named_tensors(model)
    return {name: found[f"embed.{name}.{part}.weight"] for name in ALL}


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_equal_maps_change_nothing_whatever_their_shares(lam: float) -> None:
    model, batch = _model().eval(), modal_batch()
    before = model(batch).logits
    model.personalise_maps(lam)
    assert model.lam == lam
    assert torch.equal(model(batch).logits, before)
    for name, local in _maps(model, "local").items():
        assert torch.equal(local, _maps(model, "shared")[name])
        assert local is not _maps(model, "shared")[name]


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.7, 1.0])
def test_maps_are_mixed_by_lambda_and_so_are_gradients(lam: float) -> None:
    model, batch = _model(), modal_batch()
    model.personalise_maps(lam)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for local in _maps(model, "local").values():
            local.add_(torch.randn(local.shape, generator=rng))
    plain = _model()  # without local maps, but with the mixture as its map
    with torch.no_grad():
        for name in ALL:
            mixed = lam * _maps(model, "local")[name] + (1 - lam) * _maps(model, "shared")[name]
            _maps(plain, "shared")[name].copy_(mixed)
    torch.testing.assert_close(model(batch).logits, plain(batch).logits, atol=1e-5, rtol=1e-5)
    got, whole = _gradients(model, batch), _gradients(plain, batch)
    for name in ALL:
        local, shared = got[f"embed.{name}.local.weight"], got[f"embed.{name}.shared.weight"]
        expected = whole[f"embed.{name}.shared.weight"]
        assert local is not None
        assert shared is not None
        assert expected is not None
        torch.testing.assert_close(local, lam * expected, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(shared, (1 - lam) * expected, atol=1e-6, rtol=1e-4)
        # The ratio of the two is that of lambda to 1 - lambda, up to one rounding.
        torch.testing.assert_close((1 - lam) * local, lam * shared, atol=0, rtol=3e-7)


def test_a_lambda_of_zero_is_the_shared_map_to_the_bit() -> None:
    model, batch = _model(), modal_batch()
    before = _gradients(model, batch)
    model.personalise_maps(0.0)
    with torch.no_grad():
        for local in _maps(model, "local").values():
            local.add_(1.0)
    for name, grad in _gradients(model, batch).items():
        if ".local." in name:
            assert grad is not None
            assert not grad.any()
        else:
            expected = before[name]
            assert grad is not None
            assert expected is not None
            assert torch.equal(grad, expected)


def test_maps_are_personalised_once_and_in_range() -> None:
    model = _model()
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match=rf"lam must lie in \[0, 1\], got {wrong}"):
            model.personalise_maps(wrong)
    model.personalise_maps(0.3)
    with pytest.raises(ValueError, match="personalised already"):
        model.personalise_maps(0.3)


# Names and what is frozen ----------------------------------------------------------------------------------------


def test_names_say_whose_a_tensor_is() -> None:
    model = _model()
    model.personalise_maps(0.3)
    names = set(named_tensors(model))
    for name in ALL:
        for part in ("shared.weight", "local.weight", "vector", "position"):
            assert f"embed.{name}.{part}" in names
    assert {name.split(".")[0] for name in names} == {"embed", "body", "head"}
    assert tuple(named_tensors(model)["embed.series.shared.weight"].shape) == (12, 16)  # (d, L), L = 8 steps x 2
    assert not model.frozen
    assert feature_width(model, "a test") == 16
    reads_absent(model, "a test")


def test_fixed_vectors_and_words_are_frozen() -> None:
    model = _model(vector="one_hot")
    assert model.frozen == {f"embed.{name}.vector" for name in ALL}
    vectors = torch.stack([named_tensors(model)[f"embed.{name}.vector"] for name in ALL])
    assert torch.equal(vectors, torch.eye(4))
    mini = modal_transformer_mini(5, 20, modalities=("text", "audio"), word_vectors="frozen", positions=False)
    assert mini.frozen == {"embed.text.segments.words.weight"}
    assert not any("position" in name for name in named_tensors(mini))


def test_modalities_of_different_sizes_are_refused() -> None:
    batch = modal_batch()
    with pytest.raises(ValueError, match=r"as many examples, got \{'image': 3, 'text': 2\}"):
        _model()(only(batch, "image") | {key: batch[key][:2] for key in KEYS["text"]})


# Published size --------------------------------------------------------------------------------------------------


def test_published_size_has_its_parameter_count() -> None:
    with torch.device("meta"):  # no memory: shapes only
        model = modal_transformer(10, 1000, modalities=("image", "text", "audio"), max_length=64)
    d, hidden, clip, c = 2048, 4096, 1024, 10
    attention = (3 * d * d + 3 * d) + (d * d + d)
    norms = 3 * 2 * d + 2 * hidden  # two in front, and Magneto's two inside
    layer = attention + (d * hidden + hidden) + (hidden * d + d) + norms
    assert sum(p.numel() for p in model.body.parameters()) == 12 * layer + 2 * d == 403_075_072
    # CLIP ViT-L/14's image encoder has 303,179,776 parameters as published; its last block and last norm learn.
    pictures: Any = model.embed["image"]
    encoder = pictures.segments.clip
    assert sum(p.numel() for p in encoder.parameters()) == 303_179_776
    block = 4 * (clip * clip + clip) + (clip * 4096 + 4096) + (4096 * clip + clip) + 4 * clip
    learning = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in encoder.parameters() if p.requires_grad) == block + 2 * clip
    assert {name.split(".")[0] for name in learning} == {"encoder", "post_layernorm"}
    assert model.frozen == {f"embed.image.segments.clip.{name}" for name, _ in encoder.named_parameters()} - {
        f"embed.image.segments.clip.{name}" for name in learning
    }
    width = d - 64
    assert tuple(pictures.shared.weight.shape) == (width, clip)
    assert tuple(pictures.position.shape) == (256, width)
    own = {name: sum(p.numel() for p in part.parameters()) for name, part in model.embed.items()}
    assert own["text"] == 1000 * 1024 + width * 1024 + 64 * width + 64
    assert sum(p.numel() for p in model.head.parameters()) == d * c + c
    assert sum(p.numel() for p in model.parameters()) == sum(own.values()) + 403_075_072 + d * c + c


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random CLIP, text and pictures, as one finds it on a hub."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=2, image_size=28, patch_size=7, **sizes)
    text = CLIPTextConfig(num_hidden_layers=1, vocab_size=50, eos_token_id=49, **sizes)
    folder = tmp_path_factory.mktemp("clip")
    with torch.random.fork_rng():
        CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())).save_pretrained(folder)
    return folder


def test_clip_gives_the_states_of_its_patches(clip_folder: Path) -> None:
    from transformers import CLIPVisionModel

    encoder = CLIPVisionModel.from_pretrained(clip_folder)
    whole: Any = getattr(encoder, "vision_model", encoder)
    cut = ClipPatches(encoder).eval()
    image = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    pixels = (image / 255 - mean) / std
    with torch.no_grad():
        expected = whole.post_layernorm(encoder(pixel_values=pixels).last_hidden_state[:, 1:])
        torch.testing.assert_close(cut({"image": image}).x, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cut({"image": pixels}).x, expected, atol=1e-5, rtol=1e-5)
        assert cut({"image": image.repeat_interleave(2, 3)}).x.shape == (2, 16, 8)  # other sizes are resized
    for wrong in (torch.zeros(1, 3, 14, 14), torch.zeros(1, 1, 28, 28, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="image must have shape"):
            cut({"image": wrong})


def test_a_frozen_encoders_cells_are_read_one_picture_at_a_time() -> None:
    from confed.models.encoders import load_tower

    cut = EncoderCells("tiny:mobilenet_v2").train()
    image = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encoder: Any = load_tower("tiny:mobilenet_v2", "pictures", 0)  # the same weights, by its seed
    with torch.no_grad():
        plane = encoder(pixel_values=(image[1:2].float() / 255 - 0.5) / 0.5).last_hidden_state
    cells = plane.flatten(2).transpose(1, 2)
    expected = (cells - cells.mean(2, keepdim=True)) / (cells.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    x = cut({"image": image}).x
    assert x.shape == (3, cut.limit, cut.width)
    torch.testing.assert_close(x[1:2], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x[1:2], cut({"image": image[1:2]}).x)
    assert not any(parameter.requires_grad for parameter in cut.parameters())
    assert not any(module.training for module in cut.modules())


def test_the_published_model_reads_a_checkpoint_of_clip(clip_folder: Path) -> None:
    from transformers import CLIPVisionModel

    from confed.models.modal_segments import clip_encoder

    encoder = clip_encoder(clip_folder, 0)
    saved = CLIPVisionModel.from_pretrained(clip_folder).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in encoder.state_dict().items())
    with pytest.raises(ValueError, match="expected a folder with a CLIPVision checkpoint"):
        clip_encoder("./nothing/here", 0)
    cut = ClipPatches(encoder)
    cut({"image": torch.randn(2, 3, 28, 28)}).x.sum().backward()
    assert {n for n, p in cut.clip.named_parameters() if p.grad is not None} == {
        n for n, p in cut.clip.named_parameters() if p.requires_grad
    }


# By name, and on data --------------------------------------------------------------------------------------------


def test_by_name_with_tokenizer() -> None:
    tokenizer = create_tokenizer("modal_transformer_mini", ["one", "two"], max_length=5)
    ids, mask = tokenizer(["two one two", "one"])
    model = create_model("modal_transformer_mini", answers=("a", "b"), vocab_size=tokenizer.vocab_size, max_length=5)
    assert model({"text": ids, "text_mask": mask}).logits.shape == (2, 2)
    assert create_tokenizer("modal_transformer_mini", []).vocab_size > 0  # a dataset without anything to read
    assert (
        create_tokenizer("modal_transformer", ["one"]).vocab_size == create_tokenizer("vilt_tiny", ["one"]).vocab_size
    )


def test_the_data_decide_sizes() -> None:
    shapes = {"picture_size": (32, 48), "sample_rate": 4000, "series_channels": 3}
    options = derived_options("modal_transformer_mini", 0, ("one",), shapes)
    assert options == shapes
    assert not derived_options("vilt_mini", 0, (), shapes)
    model: Any = modal_transformer_mini(5, 20, modalities=ALL, **options)
    assert model.embed["image"].segments.limit == 4 * 6
    assert model.embed["audio"].segments.hop == 64  # 16 ms
    assert model.embed["series"].segments.width == 3 * 8
    with pytest.raises(ValueError, match=r"model\.sample_rate"):
        load_recipe("fedvqa_scenes", ["model.name=modal_transformer_mini", "model.sample_rate=4000"])


def test_spoken_and_written_digits_are_learned(real_data: Path) -> None:
    """Two hundred pairs of three digits, in seconds: far above the third that guessing gets."""
    folder = real_data / "avdigits"
    if not (folder / "audio.npz").is_file():
        pytest.skip("no spoken digits here")
    with np.load(folder / "audio.npz", allow_pickle=False) as file:
        waves, offsets, spoken = file["waveform"], file["offsets"], file["digit"]
    with np.load(folder / "images.npz", allow_pickle=False) as file:
        images, written = file["images"][:2000], file["digit"][:2000]
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 260)
    clips = [int(rng.choice(np.flatnonzero(spoken == digit))) for digit in label]
    rows = [int(rng.choice(np.flatnonzero(written == digit))) for digit in label]
    audio = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(waves[offsets[i] : offsets[i + 1]] / 32768, dtype=torch.float32) for i in clips], batch_first=True
    )
    batch = {
        "image": torch.tensor(images[rows])[:, None].expand(-1, 3, -1, -1),
        "audio": audio,
        "audio_length": torch.tensor([int(offsets[i + 1] - offsets[i]) for i in clips]),
    }
    answer = torch.tensor(label)
    model = modal_transformer_mini(3, 10, modalities=("image", "audio"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(30):
        chosen = torch.arange(200).roll(-40 * step)[:40]
        optimizer.zero_grad()
        part = {key: value[chosen] for key, value in batch.items()}
        F.cross_entropy(model(part).logits, answer[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model({key: value[200:] for key, value in batch.items()}).logits.argmax(1) == answer[200:]
    assert right.float().mean() > 0.8
