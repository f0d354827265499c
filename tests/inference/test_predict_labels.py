"""Asking models that give labels: what a run recorded comes back, known labels change the others, faults are named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from coloured_labels import RECIPE, SHIFT, colours_dataset
from command_line import confed as command
from confed.inference.ask import ask, known_labels, write_page
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import ExportedRun
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses


@pytest.fixture(scope="module")
def finished(finished_label_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_label_run, tmp_path_factory.mktemp("told") / "run"))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    examples = colours_dataset().clients["u1"].test
    Image.fromarray(np.asarray(examples.images[int(examples.image_index[2])])).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


@pytest.mark.parametrize("client", [None, "u1"])
def test_probabilities_are_those_that_the_run_recorded(finished: Path, picture: Path, client: str | None) -> None:
    view = "global" if client is None else "personal"
    expected = load_file(finished / "predictions.safetensors")[f"{view}/u1/probabilities"][2]
    found = ask(finished, picture, client=client)
    values = {entry["label"]: entry["probability"] for entry in found["labels"]}
    np.testing.assert_allclose([values[n] for n in ("red", "green", "blue", "never")], expected, atol=2e-6)
    assert [e["probability"] for e in found["labels"]] == sorted(values.values(), reverse=True)
    assert all(e["predicted"] == (e["probability"] >= 0.5) and "alone" not in e for e in found["labels"])
    assert (found["model"], found["known"]) == (client or "global", [])


def test_known_labels_change_the_others(finished: Path, picture: Path) -> None:
    before = {e["label"]: e["probability"] for e in ask(finished, picture)["labels"]}
    found = ask(finished, picture, known=["Red=yes"], attention=True)
    assert [e["label"] for e in found["known"]] == ["red"]
    assert found["known"][0] == {"label": "red", "state": True, "alone": before["red"]}
    assert {e["label"] for e in found["labels"]} == {"green", "blue", "never"}
    logit = {k: np.log(p / (1 - p)) for k, p in before.items()}
    for entry in found["labels"]:
        assert entry["alone"] == before[entry["label"]]
        assert entry["probability"] == pytest.approx(1 / (1 + np.exp(-logit[entry["label"]] - SHIFT)), abs=1e-5)
    green = next(e for e in found["labels"] if e["label"] == "green")
    assert green["attention"] == [[0.5, 1.0, 0.5], [0.5, 0.5, 0.5]]  # its own place, the largest weight being 1
    both = ask(finished, picture, known=["red=yes, green=no"])
    assert all(e["probability"] == pytest.approx(e["alone"], abs=1e-6) for e in both["labels"])
    assert len(ask(finished, picture, top=1)["labels"]) == 1


def test_a_label_with_a_comma_stands_alone() -> None:
    labels = ("sky", "car, parked", "Car")
    assert known_labels(["car, parked=yes", "SKY = No ,Car=YES"], labels) == {
        "car, parked": True, "sky": False, "Car": True
    }  # fmt: skip
    assert known_labels([], labels) == {}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "known must be LABEL=yes or LABEL=no, several with commas, got ''"),
        (["sky"], "must be LABEL=yes or LABEL=no.*got 'sky'"),
        (["sky=maybe"], "got 'sky=maybe'"),
        (["=yes"], "got '=yes'"),
        (["sky=yes,"], "got ''"),
        (["skyy=yes"], "no label is called 'skyy'; the nearest are sky"),
        (["zzzzzz=yes"], "no label is called 'zzzzzz'; there are sky, ski, boat"),
        (["sky=yes", "Sky=no"], "'sky' cannot be both yes and no"),
    ],
)
def test_faulty_known_labels_are_named(texts: list[str], message: str) -> None:
    refuses(message, known_labels, texts, ("sky", "ski", "boat"))


def test_what_cannot_be_asked_is_refused(finished: Path, picture: Path, tmp_path: Path) -> None:
    refuses("give labels: leave question out", ask, finished, picture, "is it red?")
    refuses(r"reads pictures: give one \(--image\)", ask, finished)
    refuses("reads pictures: leave the text out", ask, finished, text="red")
    refuses("top must be at least 1", ask, finished, picture, top=0)
    refuses("no client is called 'mars'", ask, finished, picture, client="mars")
    (tmp_path / "colours.toml").write_text(RECIPE)
    blind = ["model.name='coloured_labels:blind'", "task.known=0.0", "run.rounds=1", "run.gallery=0"]
    run(load_recipe(tmp_path / "colours.toml", blind), tmp_path / "run")
    refuses("blind' cannot be told known labels", ask, tmp_path / "run", picture, known=["red=no"])


def test_the_command_prints_labels_and_writes_a_page(
    finished: Path, picture: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert command("predict", str(finished), "--image", str(picture), "--known", "blue=yes", "--page", str(page)) == 0
    out = capsys.readouterr().out
    assert "known: blue yes" in out
    assert "never" in out
    assert "* predicted otherwise without what is known" in out
    html = page.read_text()
    assert "Where each label looked" in html
    assert "blue: yes" in html
    assert html.count("data:image/png") > 1  # the picture and a veil
    assert command("predict", str(finished), "--image", str(picture), "--page", str(page), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(page)
    assert all(entry["attention"] for entry in found["labels"])
    assert command("predict", str(finished), "--image", str(picture), "--question", "red?") == 2
    assert "leave --question out" in capsys.readouterr().err


def test_a_page_about_a_text_shades_its_words(tmp_path: Path) -> None:
    entry = {"label": "car", "probability": 0.7, "predicted": True, "attention": [0.1, 1.0, 0.5, 0.2]}
    found = {"run": "R", "model": "global", "threshold": 0.5, "known": [], "labels": [entry],
             "words": ["[CLS]", "car", "##s", "[SEP]"]}  # fmt: skip
    write_page(tmp_path / "p.html", found, None, "cars <b>")
    html = (tmp_path / "p.html").read_text()
    assert "cars &lt;b&gt;" in html
    assert '--a:0.60">car</span><span' in html
    assert "[CLS]" not in html


def test_export_gives_the_labels_of_its_run(finished: Path, picture: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "exported")
    run = ExportedRun(tmp_path / "exported")
    wanted, found = (ask(one, picture) for one in (FinishedRun(finished), run))
    assert found["labels"] == wanted["labels"]
    assert found["threshold"] == wanted["threshold"]
    told = "red=yes"
    assert ask(run, picture, known=[told])["known"] == ask(FinishedRun(finished), picture, known=[told])["known"]
