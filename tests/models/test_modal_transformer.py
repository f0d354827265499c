"""The multimodal Transformer: its tokens, partly local maps, absent modalities, and the published size."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.algorithms.feddat import FedDAT
from confed.algorithms.fedlora import FedLoRA
from confed.data.examples import FederatedDataset
from confed.data.modalities import longest
from confed.data.sounds import Sounds
from confed.federation.client_info import ClientInfo
from confed.federation.params import Scope, named_tensors
from confed.federation.structure import feature_width, reads_absent
from confed.models import create_model, create_tokenizer
from confed.models.finetuning import Trainable
from confed.models.modal_segments import (
    CLIP_MEAN,
    CLIP_STD,
    ClipPatches,
    EncoderCells,
    LogMelFrames,
    Patches,
    SeriesWindows,
    WaveFrames,
    Words,
    checked_modalities,
    patch_side,
)
from confed.models.modal_transformer import (
    ModalTransformer,
    modal_transformer,
    modal_transformer_mini,
    modal_transformer_tiny,
)
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from confed.runs.encode import derived_options
from confed.tasks.vqa import VQA
from modal_batches import ALL, KEYS, modal_batch, only
from modal_examples import gaps
from refusals import refuses

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
    refuses("at least one of image, text, got audio, audio_length, label", model, only(batch, "audio"))


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
        refuses(rf"lam must lie in \[0, 1\], got {wrong}", model.personalise_maps, wrong)
    model.personalise_maps(0.3)
    refuses("personalised already", model.personalise_maps, 0.3)


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
        refuses("image must have shape", cut, {"image": wrong})


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
    refuses("expected a folder with a CLIPVision checkpoint", clip_encoder, "./nothing/here", 0)
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


def _sounds(lengths: list[int], total: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    length = torch.tensor(lengths)
    audio = 0.2 * torch.randn(len(lengths), total, generator=rng)
    return {"audio": audio * (torch.arange(total) < length[:, None]), "audio_length": length}


def test_patches_are_squares_row_by_row() -> None:
    image = torch.randint(0, 256, (2, 3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cut = Patches((6, 8), 2)
    x, present = cut({"image": image})
    assert present is None
    assert (cut.width, cut.limit) == (12, 12)
    for row in range(3):
        for column in range(4):
            square = image[1, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten().double() / 127.5 - 1
            torch.testing.assert_close(x[1, 4 * row + column], square.float())
    floats = torch.randn(1, 3, 6, 8)
    assert set(cut({"image": floats}).x.flatten().tolist()) == set(floats.flatten().tolist())


@pytest.mark.parametrize(("size", "patch"), [((28, 28), 7), ((32, 32), 8), ((64, 64), 16), ((24, 48), 8), ((6, 9), 1)])
def test_the_usual_patch(size: tuple[int, int], patch: int) -> None:
    assert patch_side(size) == patch


def test_words_are_rows_of_the_table_and_padding_is_cut_off() -> None:
    cut = Words(9, 4, 6)
    text = torch.tensor([[2, 5, 3, 0, 0, 0], [2, 3, 0, 0, 0, 0]])
    x, present = cut({"text": text, "text_mask": (text != 0).long()})
    assert torch.equal(x, cut.words.weight[text[:, :3]])
    assert present is not None
    assert present.tolist() == [[True, True, True], [True, True, False]]
    assert cut({"text": text[:1], "text_mask": (text[:1] != 0).long()}).present is None
    assert not Words(9, 4, 6, learn=False).words.weight.requires_grad


def test_wave_pieces_have_no_loudness() -> None:
    batch = _sounds([10, 3], 12)
    x, present = WaveFrames(4, 100)(batch)
    assert x.shape == (2, 3, 4)
    assert present is not None
    assert present.tolist() == [[True, True, True], [True, False, False]]
    first = batch["audio"][0, :10].numpy().astype(np.float64)
    scaled = (first - first.mean()) / np.sqrt(first.var() + 1e-7)
    np.testing.assert_allclose(x[0].flatten().numpy(), [*scaled, 0, 0], atol=1e-5)
    louder = batch | {"audio": 3 * batch["audio"] + 0.1 * (batch["audio"] != 0)}
    torch.testing.assert_close(WaveFrames(4, 100)(louder).x, x, atol=1e-3, rtol=0)


def test_spectrograms_are_those_of_transformers() -> None:
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    size, hop, stack, mels = 64, 32, 3, 6
    batch = _sounds([500, 200], 600)
    cut = LogMelFrames(2000, mels, size, stack, 1000)
    x, present = cut(batch)
    pieces = -(-500 // (stack * hop))
    assert x.shape == (2, pieces, stack * mels)
    assert present is not None
    assert present.sum(1).tolist() == [pieces, -(-200 // (stack * hop))]
    filters = mel_filter_bank(1 + size // 2, mels, 0, 1000, 2000, "slaney", "slaney")
    for row in range(2):
        wave = np.zeros((pieces * stack - 1) * hop + size)
        wave[:500] = batch["audio"][row, :500].numpy()
        bands = spectrogram(
            wave, window_function(size, "hann"), size, hop, power=2.0, center=False, mel_filters=filters,
            mel_floor=1e-10, log_mel="log10",
        )  # fmt: skip
        expected = (np.maximum(bands, bands.max() - 8) - bands.max() + 4) / 4
        np.testing.assert_allclose(x[row].reshape(-1, mels).numpy(), expected.T, atol=2e-4)
    assert x.max() == 1
    assert x.min() >= -1


def test_series_are_cut_step_by_step() -> None:
    series = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0))
    series[1, 4:] = 0
    x, present = SeriesWindows(3, 4, 20)({"series": series, "series_length": torch.tensor([9, 4])})
    assert x.shape == (2, 3, 12)
    assert present is not None
    assert present.sum(1).tolist() == [3, 1]
    assert torch.equal(x[0, 1], series[0, 4:8].flatten())
    assert torch.equal(x[0, 2, :3], series[0, 8])
    assert not x[0, 2, 3:].any()


@pytest.mark.parametrize("cut", [WaveFrames(40, 2000), LogMelFrames(2000, 6, 64, 3, 2000)])
def test_a_sound_is_the_same_in_any_company(cut: WaveFrames | LogMelFrames) -> None:
    together = _sounds([900, 130], 1500)
    alone = {"audio": together["audio"][1:, :130], "audio_length": together["audio_length"][1:]}
    x, present = cut(together)
    assert present is not None
    got = cut(alone)
    assert got.present is None
    torch.testing.assert_close(x[1, present[1]], got.x[0], atol=1e-6, rtol=1e-6)


def test_a_sound_shorter_than_a_piece_is_padded() -> None:
    one = {"audio": torch.tensor([[0.5]]), "audio_length": torch.tensor([1])}
    for cut in (WaveFrames(40, 2000), LogMelFrames(2000, 6, 64, 3, 2000)):
        x = cut(one).x
        assert x.shape == (1, 1, cut.width)
        assert bool(x.isfinite().all())
    silence = {"audio": torch.zeros(1, 300), "audio_length": torch.tensor([300])}
    assert all(
        bool(cut(silence).x.isfinite().all()) for cut in (WaveFrames(40, 2000), LogMelFrames(2000, 6, 64, 3, 400))
    )


IDS = torch.ones(2, 4, dtype=torch.int64)
WAVES = torch.zeros(2, 50)


@pytest.mark.parametrize(
    ("cut", "batch", "message"),
    [
        (Patches((4, 4), 2), {"image": torch.zeros(1, 3, 6, 6)}, r"image must have shape \(B, 3, 4, 4\)"),
        (Patches((4, 4), 2), {"image": torch.zeros(1, 1, 4, 4)}, r"got \(1, 1, 4, 4\)"),
        (Words(9, 4, 3), {"text": IDS, "text_mask": IDS}, r"at most 3 tokens \(model\.max_length\), got 4"),
        (Words(9, 4, 6), {"text": IDS}, "needs the key 'text_mask', got text"),
        (Words(9, 4, 6), {"text": IDS, "text_mask": IDS[:1]}, "text_mask must have shape"),
        (Words(9, 4, 6), {"text": IDS, "text_mask": 0 * IDS}, "a token at least, row 0 of the batch has none"),
        (WaveFrames(8, 99), {"audio": WAVES, "audio_length": torch.tensor([5, 0])}, "row 1 of the batch has none"),
        (WaveFrames(8, 99), {"audio": WAVES, "audio_length": torch.tensor([5, 51])}, "must be at most 50, .* got 51"),
        (WaveFrames(8, 40), {"audio": WAVES, "audio_length": torch.tensor([5, 45])}, r"at most 40 samples .*, got 45"),
        (WaveFrames(8, 99), {"audio": WAVES[0], "audio_length": torch.tensor([5])}, "audio must have shape"),
        (WaveFrames(8, 99), {"audio": WAVES}, "needs the key 'audio_length'"),
        (WaveFrames(8, 99), {"audio": WAVES, "audio_length": torch.tensor([5])}, "audio_length must have shape"),
        (WaveFrames(8, 99), {"audio": WAVES[:0], "audio_length": torch.ones(0).long()}, "an example at least"),
        (
            SeriesWindows(2, 4, 9),
            {"series": torch.zeros(1, 5, 3), "series_length": torch.tensor([5])},
            "must have 2 channels, got 3",
        ),
        (
            SeriesWindows(3, 4, 4),
            {"series": torch.zeros(1, 5, 3), "series_length": torch.tensor([5])},
            r"at most 4 steps \(model\.series_steps\), got 5",
        ),
    ],
)  # fmt: skip
def test_batches_of_other_shapes_are_refused(cut: torch.nn.Module, batch: dict[str, Tensor], message: str) -> None:
    refuses(message, cut, batch)


def test_options_out_of_range_are_refused() -> None:
    refuses(r"model\.patch must divide the pictures' sides 28 x 28, got 5", Patches, (28, 28), 5)
    refuses("29 x 29 pixels cannot be cut into 16 to 256 equal squares", patch_side, (29, 29))
    refuses(r"of 60 bands .* hold no frequency", LogMelFrames, 8000, 60, 64, 2, 100)
    refuses("the series' channels must be at least 1, got 0", SeriesWindows, 0, 8, 10)
    refuses("longest sound", WaveFrames, 8, 0)
    assert checked_modalities(("series", "image")) == ("image", "series")
    for wrong in ((), ("image", "image"), ("image", "smell")):
        refuses(r"model\.modalities must name some of image, text, audio, series", checked_modalities, wrong)


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


def test_too_long_texts_lose_their_end_and_it_is_said_once() -> None:
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


def test_an_unreadable_sound_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[algorithm]\nname = "fedavg"\n[task]\nname = "vqa"\n[model]\nname = "modal_transformer_mini"\n'
        'modalities = ["text", "audio"]\n[data]\nname = "test_modal_transformer:heard"\nlongest_sound = 16001\n'
    )
    refuses(r"model\.audio_seconds must be at least 2\.01, .* of 'gaps', got 2", prepare, load_recipe(path))
    prepare(load_recipe(path, ["model.audio_seconds=2.01"]))
    prepare(load_recipe(path, ["data.longest_sound=16000"]))
