"""Sounds and values of sensors in the gallery: what is kept of a sample, and how its card shows it."""

import base64
import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confed.data.sounds import Sounds
from confed.data.time_series import Series
from confed.recipes.recipe import load_recipe
from confed.report.html import media
from confed.report.report import render
from confed.results.runs import load
from confed.runs import samples as recorded
from confed.runs.run import run
from html_page import Page
from modal_examples import recipe_file
from synthetic_study import make_run, picture


def sounds(*clips: np.ndarray, rate: int = 8000) -> Sounds:
    offsets = np.cumsum([0, *map(len, clips)]).astype(np.int64)
    return Sounds(np.concatenate(clips).astype(np.int16), offsets, rate)


def file(samples: np.ndarray, channels: int = 1, width: int = 2) -> str:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(8000)
        out.writeframes(samples.tobytes())
    return base64.b64encode(buffer.getvalue()).decode()


# Sounds ----------------------------------------------------------------------------------------------------------


def test_a_recording_is_kept_as_a_wav_file_of_the_same_samples() -> None:
    clip = np.arange(-300, 300)
    kept = recorded._sound(sounds(np.ones(5), clip, rate=16000), 1)
    with wave.open(io.BytesIO(base64.b64decode(kept["wav"]))) as found:
        assert (found.getnchannels(), found.getsampwidth(), found.getframerate()) == (1, 2, 16000)
        assert np.frombuffer(found.readframes(1000), "<i2").tolist() == clip.tolist()
    assert kept["seconds"] == pytest.approx(600 / 16000, abs=1e-3)
    recording = media.read(kept)
    assert recording is not None
    assert recording.rate == 16000
    assert recording.samples.tolist() == clip.tolist()


def test_a_long_recording_is_cut_and_the_card_says_so() -> None:
    kept = recorded._sound(sounds(np.ones(96_000)), 0)
    recording = media.read(kept)
    assert recording is not None
    assert len(recording.samples) == recorded.LONGEST // 2
    assert "the first 10.0 s of 12.0 s" in media.player(recording, kept["seconds"])
    assert "sound, 10.0 s<" in media.player(recording, 10.0)


def test_nothing_but_such_a_file_is_played() -> None:
    tone = np.arange(20, dtype=np.int16)
    assert media.read({"wav": file(tone)}) is not None
    for bad in (
        {"wav": "no base64!"}, {"wav": base64.b64encode(b"<script>").decode()}, {"wav": file(tone, channels=2)},
        {"wav": file(tone.astype(np.uint8), width=1)}, {"wav": file(tone[:0])}, {"wav": 3}, {}, "text", None,
    ):  # fmt: skip
        assert media.read(bad) is None


def test_a_waveform_reaches_from_lowest_to_highest() -> None:
    # 256 samples for 128 strokes: two each, of which one is 0.
    samples = np.zeros(256)
    samples[0], samples[129], samples[254] = 1000, -500, 250
    kept = recorded._sound(sounds(samples), 0)
    html = media.player(media.read(kept))  # type: ignore[arg-type]
    strokes = [tuple(map(float, found)) for found in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", html)]
    assert len(strokes) == 128
    # Bottom and top in 64 units, of which two are left free on either side; half a unit is the stroke's own width.
    assert strokes[0] == (32.5, 1.5)
    assert strokes[64] == (47.5, 31.5)
    assert strokes[127] == (32.5, 24.0)
    assert strokes[1] == (32.5, 31.5)
    assert not Page(html).open


def test_a_silent_recording_is_a_flat_line() -> None:
    html = media.player(media.read(recorded._sound(sounds(np.zeros(3)), 0)))  # type: ignore[arg-type]
    assert set(re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", html)) == {("32.5", "31.5")}


# Series ----------------------------------------------------------------------------------------------------------


def test_of_a_long_series_evenly_spread_steps_are_kept() -> None:
    values = np.arange(1000 * 8, dtype=np.float32).reshape(1000, 8)
    series = Series(values, np.array([0, 300, 1000]), tuple("abcdefgh"))
    kept = recorded._series(series, 1)
    assert kept["steps"] == 700
    assert (len(kept["values"]), len(kept["values"][0])) == (recorded.CHANNELS, recorded.STEPS)
    assert kept["values"][0][0] == values[300, 0]
    assert kept["values"][5][-1] == pytest.approx(values[999, 5], rel=1e-3)
    assert "and 2 more" in media.series_plot(kept)


def test_a_line_per_channel_on_one_scale() -> None:
    kept = {"channels": ["x", "<b>"], "values": [[0, 1, 2], [4, 4, 4]], "steps": 3}
    html = media.series_plot(kept)
    lines = re.findall(r'points="([^"]+)"', html)
    assert lines == ["2.0,62.0 128.0,47.0 254.0,32.0", "2.0,2.0 128.0,2.0 254.0,2.0"]
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "0 to 4, 3 steps" in html
    assert 'points="2.0,62.0"' in media.series_plot({"channels": ["x"], "values": [[7]], "steps": 1})


def test_values_that_are_none_are_not_drawn() -> None:
    good: dict[str, Any] = {"channels": ["x"], "values": [[1, 2]], "steps": 2}
    assert media.series_plot(good)
    for bad in (
        {**good, "values": [[1, float("nan")]]}, {**good, "values": [[1], [2]]}, {**good, "values": [["a", "b"]]},
        {**good, "values": []}, {**good, "channels": "x"}, {**good, "values": [[1], [2, 3]]}, None, 4,
    ):  # fmt: skip
        assert media.series_plot(bad) == ""


# Cards -----------------------------------------------------------------------------------------------------------


def test_a_runs_gallery_holds_what_its_samples_have(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "sums", "gaps"), ["run.workers=1", "run.gallery=2", "run.rounds=1"])
    run(recipe, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "gallery.json").read_text())
    of = {entry["place"]: entry for entry in found}
    assert (of["both"]["has"], of["both"]["lacks"]) == (["image", "text"], ["audio", "series"])
    assert (of["ears"]["has"], of["ears"]["lacks"]) == (["text", "audio"], ["image", "series"])
    assert (of["sensor"]["has"], of["all"]["lacks"]) == (["series"], [])
    assert {name: set(entry) & {"image", "sound", "series"} for name, entry in of.items()} == {
        "both": {"image"}, "ears": {"sound"}, "sensor": {"series"}, "all": {"image", "sound", "series"},
    }  # fmt: skip
    assert of["sensor"]["series"]["channels"] == ["heat"]
    html = render(load(tmp_path / "out"))
    page = Page(html)
    assert not page.open
    assert page.tags.count("audio") == len({entry["sound"]["wav"] for entry in found if "sound" in entry})
    assert all(link.startswith(("#", "data:audio/wav;base64,")) for link in page.links)
    assert "has text, audio; lacks image, series" in html
    assert "features of this picture" not in html


def samples(folder: Path, *entries: dict[str, Any]) -> None:
    base = {"seen": True, "type": "audio", "answer": "yes", "question": "", "global": None}
    (folder / "gallery.json").write_text(json.dumps([{**base, **entry} for entry in entries]))


def test_each_sound_is_in_the_page_once(tmp_path: Path) -> None:
    tone = {"wav": file(np.arange(50, dtype=np.int16)), "seconds": 0.006}
    other = {"wav": file(np.arange(60, dtype=np.int16)), "seconds": 0.007}
    for method in ("fedavg", "fedp3"):
        folder = make_run(tmp_path / method / "seed-0", method, 0)
        heard_by = {"answer": "yes" if method == "fedp3" else "no", "probability": 0.5}
        samples(
            folder,
            {"place": "school", "has": ["audio"], "lacks": ["image"], "sound": tone, "personal": heard_by},
            {"place": "school", "has": ["audio"], "lacks": ["image"], "sound": other, "personal": heard_by},
            {"place": "home", "seen": False, "image": picture(1), "has": ["image"], "lacks": ["audio"], "sound": "<x>"},
        )
    html = render(load(tmp_path))
    page = Page(html)
    assert page.tags.count("audio") == 2
    assert html.count(tone["wav"]) == html.count(other["wav"]) == 1
    # Two rows of the table with all methods, though place, question and answer are the same, and two cards per method.
    assert html.count('aria-label="waveform"') == 2 + 2 * 2
    assert html.count("to be heard under “All methods”") == 4
    assert html.index("<audio") < html.index("to be heard under")
    assert "There is no model to be asked here." in html
    assert "<x>" not in html
