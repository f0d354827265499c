"""Segments of each modality: what they are made of, that padding is nothing, and what is refused."""

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.models.modal_segments import (
    LogMelFrames,
    Patches,
    SeriesWindows,
    WaveFrames,
    Words,
    checked_modalities,
    patch_side,
)


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
    with pytest.raises(ValueError, match=message):
        cut(batch)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.patch must divide the pictures' sides 28 x 28, got 5"):
        Patches((28, 28), 5)
    with pytest.raises(ValueError, match="29 x 29 pixels cannot be cut into 16 to 256 equal squares"):
        patch_side((29, 29))
    with pytest.raises(ValueError, match=r"of 60 bands .* hold no frequency"):
        LogMelFrames(8000, 60, 64, 2, 100)
    with pytest.raises(ValueError, match="the series' channels must be at least 1, got 0"):
        SeriesWindows(0, 8, 10)
    with pytest.raises(ValueError, match="longest sound"):
        WaveFrames(8, 0)
    assert checked_modalities(("series", "image")) == ("image", "series")
    for wrong in ((), ("image", "image"), ("image", "smell")):
        with pytest.raises(ValueError, match=r"model\.modalities must name some of image, text, audio, series"):
            checked_modalities(wrong)
