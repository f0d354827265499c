"""Recordings and series as tables: rows side by side, other sample rates, bad input."""

import numpy as np
import pytest
import torch

from confed.data.sounds import Series, Sounds, resample, sounds_of
from refusals import refuses


def test_a_batch_holds_waveforms_with_zeros_behind_them() -> None:
    sounds = Sounds(np.array([16384, -32768, 8192, 1, 2, 3], np.int16), np.array([0, 2, 6]), 8000)
    waves, lengths = sounds[torch.tensor([1, 0, 1])]
    assert waves.dtype == torch.float32
    assert lengths.tolist() == [4, 2, 4]
    assert waves[1].tolist() == [0.5, -1.0, 0.0, 0.0]
    assert torch.equal(waves[0], torch.tensor([8192.0, 1, 2, 3]) / 32768)
    assert sounds[torch.zeros(0, dtype=torch.int64)][0].shape == (0, 0)


def test_the_batch_is_as_long_as_its_longest_recording_only() -> None:
    sounds = Sounds(np.arange(9, dtype=np.int16), np.array([0, 2, 9]), 8000)
    assert sounds[torch.tensor([0])][0].shape == (1, 2)


def test_recordings_of_one_origin_count_once() -> None:
    sounds = Sounds(np.zeros(4, np.int16), np.arange(5), 8000, np.array([7, 7, 3, 7]))
    assert sounds.independent(np.array([0, 1, 3])) == 1
    assert sounds.independent(np.array([0, 2])) == 2
    assert Sounds(np.zeros(4, np.int16), np.arange(5), 8000).independent(np.array([0, 2, 2])) == 2


def test_another_rate_is_resampled_and_said_once() -> None:
    time = np.arange(16000) / 16000
    tone = (0.5 * np.sin(2 * np.pi * 300 * time)).astype(np.float32)
    with pytest.warns(UserWarning, match=r"2 of 3 sounds have 4000, 16000 Hz: resampled to 8000 Hz") as told:
        sounds = sounds_of([tone, tone[:80], np.zeros(5, np.int16)], [16000, 4000, 8000], 8000, ["a", "b", "c"])
    assert len(told) == 1
    assert np.diff(sounds.offsets).tolist() == [8000, 160, 5]
    wanted = 0.5 * np.sin(2 * np.pi * 300 * np.arange(8000) / 8000)
    got = sounds.row(0) / 32768
    assert np.abs(got - wanted)[100:-100].max() < 2e-3  # the filter rings at both ends


def test_resampling_keeps_a_level() -> None:
    level = resample(np.full(3000, 0.25), 3, 2)
    assert len(level) == 2000
    assert np.abs(level[50:-50] - 0.25).max() < 1e-3


@pytest.mark.parametrize(
    ("clip", "rate", "message"),
    [
        (np.zeros(0, np.int16), 8000, "'bell' must be one channel of at least one sample"),
        (np.zeros((4, 2), np.int16), 8000, r"'bell' must be one channel of at least one sample, got shape \(4, 2\)"),
        (np.zeros(4, np.int32), 8000, "'bell' must be int16, or finite floating point"),
        (np.array([0.0, np.nan]), 8000, "'bell' must be int16, or finite floating point"),
        (np.zeros(4, np.int16), 0, "'bell': the sample rate must be at least 1 Hz, got 0"),
    ],
)
def test_faulty_recordings_are_named(clip: np.ndarray, rate: int, message: str) -> None:
    refuses(message, sounds_of, [clip], rate, 8000, ["bell"])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([0, 2, 2, 4]), "sound number 1 is empty"),
        (np.array([0, 3]), "offsets must go from 0 to 4, got 0 to 3"),
        (np.array([0.0, 4.0]), "offsets must be int64"),
    ],
)
def test_faulty_offsets_of_sounds_are_refused(offsets: np.ndarray, message: str) -> None:
    refuses(message, Sounds, np.zeros(4, np.int16), offsets, 8000)


def test_series_side_by_side_and_standardised() -> None:
    values = np.array([[1, 5], [3, 5], [5, 5]], np.float32)
    series = Series(values, np.array([0, 1, 3]), ("heat", "light"))
    table, steps = series[torch.tensor([0, 1])]
    assert table.shape == (2, 2, 2)
    assert steps.tolist() == [1, 2]
    assert table[0].tolist() == [[1, 5], [0, 0]]
    own = series.standardised(values.mean(0), values.std(0)).values
    assert np.allclose(own[:, 0], [-(1.5**0.5), 0, 1.5**0.5])
    assert not own[:, 1].any()  # a channel that never changes is only shifted


@pytest.mark.parametrize(
    ("values", "channels", "message"),
    [
        (np.zeros((2, 2)), ("a", "b"), "must be float32"),
        (np.zeros((2, 2), np.float32), ("a",), r"float32 of shape \(S, 1\)"),
        (np.full((2, 1), np.inf, np.float32), ("a",), "must be finite"),
    ],
)
def test_faulty_values_of_series_are_refused(values: np.ndarray, channels: tuple[str, ...], message: str) -> None:
    refuses(message, Series, values, np.array([0, 2]), channels)
