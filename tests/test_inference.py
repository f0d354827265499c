"""Predictions equal those that the run recorded; exports equal transformers' own model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from confed.data.scenes import scenes
from confed.experiment import run
from confed.inference import export, load_exported, predict
from confed.recipe import load_recipe

TINY = [
    "study.methods=[]", "model.name=vilt_tiny", "data.train=40", "data.validation=20", "data.test=40",
    "data.unseen=[]", "run.rounds=1", "run.workers=1",
    "run.gallery=1", "run.evaluate_every=0", "local.lr=0.02",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fedavg"
    run(load_recipe(overrides=[*TINY, "algorithm.name=fedavg"]), folder)
    return folder


def _picture(tmp_path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


@pytest.mark.parametrize("client", [None, "sports"])
def test_predictions_are_those_of_the_run(finished: Path, tmp_path: Path, client: str | None):
    dataset = scenes("C", train=40, validation=20, test=40, unseen=())
    view = "global" if client is None else "personal"
    recorded = load_file(finished / "predictions.safetensors")[f"{view}/sports/prediction"]
    examples = dataset.clients["sports"].test
    for row in (0, 17, 39):
        image = _picture(tmp_path, examples.images[int(examples.image_index[row])])
        found = predict(finished, image, examples.questions[row], client, top=2)
        assert found["model"] == (client or "global")
        assert found["answers"][0]["answer"] == dataset.answers[int(recorded[row])]
        assert found["unknown_words"] == []
        assert len(found["answers"]) == 2


def test_probabilities_add_up_and_unknown_words_are_named(finished: Path, tmp_path: Path):
    image = _picture(tmp_path, np.full((90, 50, 3), 200, np.uint8))
    found = predict(finished, image, "Is there a zebra, or a RED car?", top=1000)
    assert sum(entry["probability"] for entry in found["answers"]) == pytest.approx(1, abs=1e-3)
    assert "zebra" in found["unknown_words"]
    assert not {"RED", "a"} & set(found["unknown_words"])


def test_faulty_questions_to_a_run(finished: Path, tmp_path: Path):
    image = _picture(tmp_path, np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "broken.png").write_bytes(image.read_bytes()[:60])
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.toml").write_bytes((finished / "recipe.toml").read_bytes())
    (unfinished / "metrics.jsonl").write_text('{"event": "round", "round": 7}\n')
    study = tmp_path / "study"
    study.mkdir()
    (study / "summary.json").write_text(json.dumps({"runs": [{"folder": "fedavg/seed-0"}]}))
    for folder, picture, question, client, message in (
        (finished, image, "  ", None, "question must contain"),
        (finished, tmp_path / "broken.png", "red ?", None, "broken.png"),
        (finished, tmp_path / "none.png", "red ?", None, "none.png"),
        (finished, image, "red ?", "mars", "no client is called 'mars'; there are transport, sports"),
        (finished, image, "red ?", "../global", "no client is called"),
        (unfinished, image, "red ?", None, "at round 7; continue it with `confed resume"),
        (study, image, "red ?", None, "is a study.*none yet"),
        (tmp_path, image, "red ?", None, "not a run folder"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(folder, picture, question, client)


def test_export_is_what_transformers_loads(finished: Path, tmp_path: Path):
    from transformers import AutoTokenizer, ViltForQuestionAnswering

    written = export(finished, tmp_path / "out")
    clients = scenes(train=1, validation=1, test=1, unseen=()).clients
    assert list(written) == ["global", *(f"personal/{name}" for name in clients)]
    assert not (tmp_path / "out.part").exists()
    directory = Path(written["personal/sports"])
    ours = load_exported(directory)
    loaded: Any = ViltForQuestionAnswering.from_pretrained(directory, output_loading_info=True)
    theirs, notes = loaded
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert tuple(theirs.config.id2label.values()) == ours.answers

    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    question = "how many red cars are there ?"
    text, mask = ours.tokenizer([question])
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None]
    with torch.inference_mode():
        expected = ours.model({"image": pixels, "text": text, "text_mask": mask}).logits
        tokens = AutoTokenizer.from_pretrained(directory)(question, return_tensors="pt")
        found = theirs.eval()(**tokens, pixel_values=pixels.float() / 127.5 - 1).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    asked = ours.ask(_picture(tmp_path, picture), question)
    assert asked == {k: v for k, v in predict(finished, tmp_path / "picture.png", question, "sports").items()
                     if k != "model"}  # fmt: skip
    assert asked != load_exported(written["global"]).ask(tmp_path / "picture.png", question)
    assert "ViltForQuestionAnswering.from_pretrained" in (directory / "README.md").read_text()
    with pytest.raises(ValueError, match="exists already"):
        export(finished, tmp_path / "out")


def test_export_with_adapters_and_without_global_model(tmp_path: Path):
    folder = tmp_path / "run"
    run(load_recipe(overrides=[*TINY, "algorithm.name=local", "model.trainable=adapters"]), folder)
    image = _picture(tmp_path, np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    with pytest.raises(ValueError, match=r"no global model; .* transport, sports, educational, natural"):
        predict(folder, image, "how many ?")
    written = export(folder, tmp_path / "out")
    assert "global" not in written
    directory = Path(written["personal/natural"])
    assert all(".adapter." in key for key in load_file(directory / "adapters.safetensors"))
    assert not any(".adapter." in key for key in load_file(directory / "model.safetensors"))
    expected = predict(folder, image, "how many red things are there ?", "natural")
    expected.pop("model")
    assert load_exported(directory).ask(image, "how many red things are there ?") == expected
    assert "cannot hold" in (directory / "README.md").read_text()
    with pytest.raises(ValueError, match=r"lacks config\.json"):
        load_exported(tmp_path)


@pytest.mark.parametrize("trainable", ["lora", "prompt"])
def test_export_of_other_kinds_of_finetuning(tmp_path: Path, trainable: str):
    from transformers import ViltForQuestionAnswering

    folder = tmp_path / "run"
    run(load_recipe(overrides=[*TINY, "algorithm.name=local", f"model.trainable={trainable}"]), folder)
    image = _picture(tmp_path, np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    directory = Path(export(folder, tmp_path / "out")["personal/natural"])
    expected = predict(folder, image, "how many red things are there ?", "natural")
    expected.pop("model")
    assert load_exported(directory).ask(image, "how many red things are there ?") == expected
    # LoRA becomes part of the weights; of prompts the plain class knows nothing.
    assert (directory / "adapters.safetensors").is_file() == (trainable == "prompt")
    loaded: Any = ViltForQuestionAnswering.from_pretrained(directory, output_loading_info=True)
    assert not any(loaded[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
