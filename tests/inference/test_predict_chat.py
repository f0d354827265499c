"""Conversations with a finished run: earlier turns are in the prompt, and what cannot be asked is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from command_line import confed as command
from confed.data.chat import Said
from confed.inference.ask import Talk
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses
from tiny_runs import CHAT, changed

RECIPE = changed(CHAT, max_new_tokens=4, test=2, peft="{rank = 2}\nmax_length = 400")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "chat.toml").write_text(RECIPE)
    run(load_recipe(folder / "chat.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    for number in range(2):
        Image.fromarray(rng.integers(0, 256, (30, 20, 3), np.uint8)).save(tmp_path / f"{number}.png")
    return [tmp_path / "0.png", tmp_path / "1.png"]


def test_second_question_is_asked_with_what_was_said_before(finished: Path, pictures: list[Path]) -> None:
    talk = Talk(finished, pictures, "transport")
    seen: list[dict[str, Any]] = []
    model: Any = talk._trained.model
    real = model.forward
    model.forward = lambda batch: seen.append(batch) or real(batch)
    first, second = talk.ask("what is it?"), talk.ask("why?")
    turns = (Said("user", (None, None, "what is it?")), Said("assistant", (first or "…",)), Said("user", ("why?",)))
    assert talk.turns == (*turns, Said("assistant", (second or "…",)))
    for batch, said in zip(seen, (turns[:1], turns), strict=True):
        assert batch["text"][0].tolist() == talk._tokenizer.prompt(said)
        assert batch["image_count"].tolist() == [2]
        assert not torch.equal(batch["image"][0, 0], batch["image"][0, 1])


def test_questions_come_from_options_or_from_the_input(
    finished: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = ["predict", str(finished), "--image", str(pictures[0])]
    assert command(*asking, "--question", "what is it?", "--question", "why?") == 0
    given = capsys.readouterr().out
    found = Talk(finished, pictures[:1]).asked(["what is it?", "why?"])
    assert given == "".join(f"{turn['answer']}\n" for turn in found["turns"])
    monkeypatch.setattr("sys.stdin", io.StringIO("what is it?\n\nwhy?\n"))
    assert command(*asking) == 0
    assert capsys.readouterr().out == given


def test_what_cannot_be_asked_is_refused(
    finished: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    refuses("question must contain at least a word", Talk(finished, pictures).ask, " ")
    refuses(r"gone.png", Talk, finished, [pictures[0].parent / "gone.png"])
    refuses(r"more than model.max_length = 400", Talk(finished, []).ask, "why? " * 100)
    assert command("predict", finished, "--question", "why?", "--choice", "a") == 2
    assert "this run's models write their answers: leave --choice out" in capsys.readouterr().err
