"""Predictions equal those that the run recorded; what cannot be asked is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddpa import FedDPA
from confed.datasets.scenes import scenes
from confed.inference.ask import ask
from confed.models.vilt import vilt_tiny
from confed.recipes.recipe import load_recipe
from confed.results.run_files import name_hashes
from confed.runs.run import run
from refusals import refuses

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
        found = ask(finished, image, examples.questions[row], client, top=2)
        assert found["model"] == (client or "global")
        assert found["answers"][0]["answer"] == dataset.answers[int(recorded[row])]
        assert found["unknown_words"] == []
        assert len(found["answers"]) == 2


def test_predictions_say_which_example_each_row_is(finished: Path) -> None:
    kept, dataset = (
        load_file(finished / "predictions.safetensors"),
        scenes("C", train=40, validation=20, test=40, unseen=()),
    )
    for place, split in dataset.clients.items():
        assert kept[f"names/{place}"].tolist() == name_hashes(split.test.names).tolist()
        assert [dataset.answers[label] for label in kept[f"truth/{place}"].tolist()] == [*split.test.answers]
        assert kept[f"answers/{place}"].tolist() == name_hashes(split.test.answers).tolist()
        right = kept[f"personal/{place}/prediction"] == kept[f"truth/{place}"]
        assert kept[f"personal/{place}/correct"].tolist() == right.float().tolist()
    # The same hash everywhere and for ever: folders of other machines and versions are paired by it.
    assert name_hashes(["sports/test/000000", "ü"]).tolist() == [6076428617358374637, 3976460501203677525]


def test_probabilities_add_up_and_unknown_words_are_named(finished: Path, tmp_path: Path):
    image = _picture(tmp_path, np.full((90, 50, 3), 200, np.uint8))
    found = ask(finished, image, "Is there a zebra, or a RED car?", top=1000)
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
        refuses(message, ask, folder, picture, question, client)


def test_models_that_cannot_answer_are_refused_with_what_can(finished: Path, tmp_path: Path):
    image = _picture(tmp_path, np.zeros((64, 64, 3), np.uint8))
    local = tmp_path / "local"
    run(load_recipe(overrides=[*TINY, "algorithm.name=local", "model.trainable=adapters"]), local)
    refuses(r"no global model; .* transport, sports, educational, natural", ask, local, image, "how many ?")
    refuses("no global model", ask, local, image, "how many ?", "sports", shared=True)
    refuses("shared needs a client", ask, finished, image, "how many ?", shared=True)
    with pytest.raises(ValueError, match=r"reads one picture \(its head is 'answers'\): leave the second one out"):
        ask(finished, image, "how many ?", image2=image)
    refuses(r"has a fixed answer set .* leave the choices out", ask, finished, image, "how many ?", choices=["a", "b"])
    file = local / "models/personal/sports/trained.safetensors"
    tensors = load_file(file)
    tensors["classifier.3.bias"] = torch.zeros(7)
    tensors["vilt.invented"] = torch.zeros(1)
    save_file(tensors, file)
    message = r"vilt\.invented is unknown; classifier\.3\.bias has shape \(7,\), expected \(\d+,\)"
    refuses(message, ask, local, image, "how many ?", "sports")
    file.write_bytes(file.read_bytes()[:500])
    refuses("must be a complete safetensors file", ask, local, image, "how many ?", "sports")


def test_the_shared_part_with_an_own_head_is_called_global(tmp_path: Path):
    folder = tmp_path / "run"
    run(load_recipe(overrides=[*TINY, "algorithm.name=fedpeft", "model.trainable=bias", "local.lr=0.1"]), folder)
    dataset = scenes("C", train=40, validation=20, test=40, unseen=())
    examples = dataset.clients["sports"].test
    refusal = r"shares no model that answers without a client's own parts; name a client: .* transport, sports"
    refuses(refusal, ask, folder, tmp_path / "none.png", "how many ?")
    recorded = load_file(folder / "predictions.safetensors")
    for view, shared in (("personal", False), ("global", True)):
        for row in (3, 20):
            image = _picture(tmp_path, examples.images[int(examples.image_index[row])])
            found = ask(folder, image, examples.questions[row], "sports", top=1, shared=shared)
            expected = int(recorded[f"{view}/sports/prediction"][row])
            assert found["answers"][0]["answer"] == dataset.answers[expected]


def test_a_method_says_how_its_models_answer():
    model: Any = vilt_tiny(3, 12, trainable="adapters")
    model.adapters.add("local", torch.Generator().manual_seed(1))
    assert FedDAT(inference="both", adapter="adapter").deployed_model(model) is model
    assert model.adapters.weights == ({"adapter": 0.5, "local": 0.5},)
    assert FedAvg().deployed_model(model) is model
    assert model.adapters.weights == ({"adapter": 0.5, "local": 0.5},)
    assert FedDPA(adapter="adapter").deployed_model(model) is not model
