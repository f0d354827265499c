"""Models that write, over the stand-in of the hub: captions, and conversations with LoRA; asked by name, as at home."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import confed
from command_line import confed as command
from confed.inference.load import load_exported
from confed.models.caption_tokenizer import WrittenWords
from hub_server import Hub
from refusals import refuses

SHORT = {"rounds": 1, "gallery": 0, "evaluate_every": 0, "controls": "none", "modality_matrix": False, "workers": 1}
RECIPES: dict[str, dict[str, Any]] = {
    "captions": {
        "model": {"name": "caption_transformer_mini", "max_length": 16},
        "task": {"name": "captioning", "beams": 2},
        "data": {"name": "scene_captions", "train": 4, "validation": 1, "test": 1, "texts": 4, "documents": 1},
    },
    "chat": {
        "model": {"name": "hf", "source": "tiny:llava", "peft": {"rank": 2}},
        "task": {"name": "chat", "max_new_tokens": 3},
        "data": {"name": "scenes", "train": 4, "validation": 1, "test": 2, "unseen": []},
    },
}
TAGS = {"captions": "image-to-text", "chat": "image-text-to-text"}


def printed(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    capfd.readouterr()
    status = command(*words)
    out, err = capfd.readouterr()
    assert status == 0, err
    return out


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_what_a_fetched_model_writes_is_what_the_run_writes(
    kind: str, hub: Hub, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = confed.Recipe(algorithm="fedavg", run=SHORT, name=kind, **RECIPES[kind])
    run = confed.run(recipe, folder=tmp_path / "run", progress=False)
    asked = ["--question", "is there a dog ?"] if kind == "chat" else []
    printed(capfd, "export", run.folder, tmp_path / "exported", "--hub", f"me/{kind}", "--quiet")
    here = printed(capfd, "predict", run.folder, "--image", picture, *asked)
    assert here.strip()
    assert printed(capfd, "predict", f"hf:me/{kind}", "--image", picture, *asked) == here
    files = hub.repositories[f"me/{kind}"].commits[hub.repositories[f"me/{kind}"].head]
    card, readme = files["README.md"].decode(), files["global/README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == TAGS[kind]
    assert (f"confed predict hf:me/{kind} --image x.jpg --question" in card) == bool(asked)
    assert "pip install" not in card  # of a name on the index that is not ours yet
    assert ("model.ask(" in readme) == bool(asked)
    assert ("confed predict DIR --image picture.png\n" in readme) == (kind == "captions")


def test_captions_in_a_client_s_words_come_back(tmp_path: Path) -> None:
    tokenizer = WrittenWords(("a", "red", "car"), 8)
    tokenizer.save(tmp_path)
    loaded = WrittenWords.load(tmp_path, 8)
    ids, _ = tokenizer(["a red cars"])
    assert loaded.words == tokenizer.words
    assert loaded.decode(ids) == tokenizer.decode(ids) == ["a red cars"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    refuses(r"tokenizer\.json must be a tokenizer of words: it has no 'vocab'", WrittenWords.load, tmp_path, 8)


@pytest.mark.slow  # a run of its own, 5 s of processor time
def test_pieces_of_words_are_exported_with_their_model(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    from confed.models.caption_tokenizer import train_pieces

    texts = [f"a {colour} {thing} on the {place}" for colour in ("red", "blue") for thing in ("car", "dog") for place in
             ("road", "grass")]  # fmt: skip
    train_pieces(texts, tmp_path / "words.model", 40)
    recipe = {**RECIPES["captions"], "model": {**RECIPES["captions"]["model"], "pieces": str(tmp_path / "words.model")}}
    recipe["model"]["max_length"] = 120  # pieces of words that were not learned are letters
    run = confed.run(confed.Recipe(algorithm="fedavg", run=SHORT, **recipe), folder=tmp_path / "run", progress=False)
    run.export(tmp_path / "exported")
    (tmp_path / "words.model").unlink()  # elsewhere it is not there
    model = load_exported(tmp_path / "exported")
    assert model.tokenizer.decode(model.tokenizer(["a red dog"])[0]) == ["a red dog"]
