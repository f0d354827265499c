"""Exported models give the same scores in a process that knows nothing of the run, with confed and without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from command_line import confed as command
from confed.inference.ask import ask
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import ExportedRun, digest, from_peft, load_exported, to_peft
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

TINY = [
    "study.methods=[]", "data.preset=dirichlet", "data.clients=2", "data.train=8", "data.validation=8", "data.test=8",
    "data.unseen=[]", "run.rounds=1", "run.workers=1", "run.gallery=0", "run.evaluate_every=0", "local.lr=0.02",
    "local.epochs=1",
]  # fmt: skip
GENERATION = ["task.name=generation", "model.pretrained=false"]
CASES = {
    "adapters": ["algorithm.name=feddat", "model.name=vilt_mini", "model.trainable=adapters"],
    "both": ["algorithm.name=feddat", "algorithm.inference=both", "model.name=vilt_tiny", "model.trainable=adapters"],
    "weighing": [
        "algorithm.name=feddpa",
        "algorithm.scale=1.0",
        "model.name=vilt_tiny",
        "model.trainable=adapters",
        "run.rounds=2",
        "local.lr=0.2",
    ],
    "lora": ["algorithm.name=fedavg", "model.name=vilt_mini", "model.trainable=lora"],
    "prompt": ["algorithm.name=fedpeft", "model.name=vilt_mini", "model.trainable=prompt"],
    "full": ["algorithm.name=fedavg", "model.name=vilt_mini", "model.trainable=all"],
    "stacked": ["algorithm.name=fedlora", "algorithm.preset=flora", "model.name=vilt_tiny", "model.trainable=lora"],
    "middle": ["algorithm.name=pfedmma", "model.name=vilt_tiny", "model.trainable=adapters"],
    "projection": ["algorithm.name=moon", "model.name=vilt_tiny", "model.trainable=top"],
    "vault": ["algorithm.name=fedpeft", "model.name=vault_mini", "model.trainable=lora", "model.pretrained=false"],
    "albef": ["algorithm.name=feddat", "model.name=albef_mini", "model.trainable=adapters", *GENERATION],
    "blip": ["algorithm.name=fedavg", "model.name=blip_mini", "model.trainable=lora", *GENERATION],
    "vit": ["algorithm.name=fedavg", "model.name=vit_mini", "model.trainable=lora", "model.pretrained=false"],
}
SCRIPT = """
import json, sys, warnings
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, ViltForQuestionAnswering, ViTForImageClassification
from peft import PeftModel
from confed.inference.load import load_exported

warnings.simplefilter("ignore")
torch.set_num_threads(1)
root, found = sys.argv[1], {}
for name, place, client, shared, kind in json.loads(sys.argv[2]):
    batch = load_file(f"{root}/{name}.batch")
    if kind == "confed":
        found[f"{name} {client} {shared}"] = load_exported(f"{root}/{name}", client, shared=shared)(batch).logits
        continue
    builder = ViTForImageClassification if name == "vit" else ViltForQuestionAnswering
    if kind == "transformers":
        model, notes = builder.from_pretrained(place, output_loading_info=True)
        assert not any(notes.values()), notes
    else:
        config = AutoConfig.from_pretrained(place)
        model = PeftModel.from_pretrained(builder.from_pretrained(f"{root}/{name}/backbone", config=config), place)
    inputs = {"pixel_values": batch["image"].float() / 127.5 - 1}
    if name != "vit":
        inputs |= {"input_ids": batch["text"], "attention_mask": batch["text_mask"]}
    with torch.inference_mode():
        found[f"{name} {client} {kind}"] = model.eval()(**inputs).logits
save_file({key: tensor.clone() for key, tensor in found.items()}, f"{root}/found")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """The exports' folder; what the runs' own models say about test examples; what a fresh process says."""
    runs, root = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("exports")
    expected: dict[str, Tensor] = {}
    jobs: list[Any] = []
    for name, overrides in CASES.items():
        run(load_recipe(overrides=[*TINY, *overrides]), runs / name)
        written = export(runs / name, root / name)
        finished = FinishedRun(runs / name)
        finished.load()
        clients = [place.removeprefix("clients/") for place in written if place != "global"]
        assert clients == finished.owners
        data = finished.setup.data(clients[0])
        batch = next(iter(data.test(8)))
        save_file({key: tensor.contiguous() for key, tensor in batch.items()}, root / f"{name}.batch")
        recorded = load_file(runs / name / "predictions.safetensors")
        views: list[tuple[str | None, bool]] = [(clients[0], False), (clients[0], True)]
        for client, shared in views if finished.needs_own_parts else [*views, (None, False)]:
            logits = finished.model(client, shared=shared)(batch).logits.clone()
            expected[f"{name} {client} {shared}"] = logits
            jobs.append((name, "", client, shared, "confed"))
            # To the run, the shared part with a client's own head is the global model.
            view = "personal" if client is not None and not shared else "global"
            prediction = recorded[f"{view}/{clients[0]}/prediction"][: len(logits)]
            assert torch.equal(logits.argmax(1), prediction), name
        plain = {"full": "transformers", "lora": "peft", "vit": "peft"}.get(name)
        if plain:
            expected[f"{name} {clients[0]} {plain}"] = expected[f"{name} {clients[0]} False"]
            jobs.append((name, str(root / name / "clients" / clients[0]), clients[0], False, plain))
    command = [sys.executable, "-c", SCRIPT, str(root), json.dumps(jobs)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root, expected, load_file(root / "found")


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_process_gives_the_same_scores(exports: Any, case: str):
    _, expected, found = exports
    keys = [key for key in expected if key.split()[0] == case]
    assert len(keys) >= 2
    for key in keys:
        # The plain classes compute in another order (theirs of ViLT shuffles the patches).
        loose = key.endswith(("peft", "transformers"))
        # Logits are as large as 10, of which two units in the last place are more than 1e-6.
        atol, rtol = (1e-4, 0.0) if loose else (1e-6, 1e-6)
        torch.testing.assert_close(found[key], expected[key], atol=atol, rtol=rtol, msg=key)


def test_what_differs_between_views_and_clients_differs(exports: Any):
    _, expected, _ = exports
    for case in ("adapters", "both", "weighing", "lora", "stacked"):
        own, shared = (v for k, v in expected.items() if k.split()[0] == case and "None" not in k and "peft" not in k)
        assert not torch.equal(own, shared)


def test_files_hold_what_was_trained_and_nothing_else(exports: Any):
    root: Path = exports[0]
    names = {case: sorted(p.name for p in next((root / case / "clients").iterdir()).iterdir()) for case in CASES}
    common = ["README.md", "config.json"]
    assert names["adapters"] == sorted([*common, "adapters.safetensors", "head.safetensors"])
    assert names["lora"] == sorted([*common, "adapter_config.json", "adapter_model.safetensors"])
    assert names["full"] == sorted([*common, "model.safetensors"])
    client = next((root / "adapters" / "clients").iterdir())
    networks = {key.split(".")[-3] for key in load_file(client / "adapters.safetensors")}
    assert networks == {"adapter", "local"}
    assert {key.split(".")[-3] for key in load_file(root / "adapters/global/adapters.safetensors")} == {"adapter"}
    assert not (root / "adapters/global/head.safetensors").exists()
    assert not (root / "full/backbone/model.safetensors").exists()
    kept = [key for file in (root / "projection").rglob("*.safetensors") for key in load_file(file)]
    assert kept
    assert all(key.startswith(("vilt.", "classifier.")) for key in kept)
    readme = (root / "lora/global/README.md").read_text()
    assert 'confed.load_exported("DIR")' in readme
    assert "PeftModel.from_pretrained" in readme
    assert "has a place" in (client / "README.md").read_text()
    assert list(root.glob("*.part")) == []


def test_faulty_requests_and_files_are_named(exports: Any, tmp_path: Path):
    root: Path = exports[0]
    refuses(r"must be a folder that `confed export` wrote", load_exported, tmp_path)
    with pytest.raises(ValueError, match=r"shares no model that answers without a client.s own parts; name a client: "):
        load_exported(root / "adapters")
    refuses(r"no client is called 'mars'; there are ", load_exported, root / "lora", "mars")
    backbone = root / "prompt/backbone/model.safetensors"
    client = next((root / "prompt/clients").iterdir())
    head, right = client / "head.safetensors", load_file(client / "head.safetensors")
    before = head.read_bytes()
    save_file({**right, "classifier.0.bias": torch.zeros(5), "invented": torch.zeros(1)}, head)
    with pytest.raises(
        ValueError, match=r"invented is unknown; classifier\.0\.bias has shape \(5,\), expected \(128,\)"
    ):
        load_exported(root / "prompt", client.name)
    head.write_bytes(before[:-9])
    refuses(r"head\.safetensors must be a complete safetensors file", load_exported, root / "prompt", client.name)
    head.unlink()
    with pytest.raises(ValueError, match=r"does not fit the model: classifier\.0\.weight is missing.*\(and 3 more\)"):
        load_exported(root / "prompt", client.name)
    head.write_bytes(before)
    tensors = load_file(backbone)
    tensors["vilt.layernorm.bias"][0] += 1
    save_file(tensors, backbone)
    refuses("is not the one that was trained on: the SHA-256", load_exported, root / "prompt", client.name)


PLAIN_FACTS: dict[str, Any] = {
    "vocab_size": 9, "image_size": 8, "heads": [], "tokenizer": {"type": "a:B"}, "extended": False, "own_heads": False,
    "backbone": {"copied": True, "source": None, "sha256": None}, "global": True, "clients": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("{", r"confed\.json must be a JSON object"),
        ({}, r"confed\.json lacks the key 'vocab_size'"),
        ([], r"confed\.json must be an object, got '\[\]'"),
        ("x", r"confed\.json must be a JSON object"),
        ({**PLAIN_FACTS, "clients": 3}, r"confed\.json: clients must be list, got '3'"),
        ({**PLAIN_FACTS, "clients": [3]}, r"confed\.json: clients must be texts, got '3'"),
        ({**PLAIN_FACTS, "backbone": {}}, r"confed\.json: backbone lacks the key 'copied'"),
        ({**PLAIN_FACTS, "tokenizer": {}}, r"confed\.json: tokenizer lacks the key 'max_length'"),
        ({**PLAIN_FACTS, "regions": 1}, r"confed\.json: regions must be dict, got '1'"),
        ({**PLAIN_FACTS, "vocab_size": True}, r"confed\.json: vocab_size must be int, got 'True'"),
    ],
)
def test_damaged_facts_of_an_export_are_named(facts: object, message: str, tmp_path: Path):
    (tmp_path / "confed.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    for read in (load_exported, ExportedRun):
        refuses(message, read, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], r"config\.json must be an object"),
        ({}, r"config\.json lacks the key 'confed'"),
        ({"confed": {}}, r"config\.json: confed lacks the key 'answers'"),
        ({"confed": {"answers": [1], "task": "", "head": "", "tensors": []}}, r"answers must be texts, got '1'"),
    ],
)
def test_damaged_configuration_of_an_exported_model_is_named(config: object, message: str, tmp_path: Path):
    (tmp_path / "confed.json").write_text(json.dumps(PLAIN_FACTS))
    (tmp_path / "recipe.toml").write_text(load_recipe(overrides=TINY).to_toml())
    (tmp_path / "global").mkdir()
    (tmp_path / "global/config.json").write_text(json.dumps(config))
    refuses(message, load_exported, tmp_path)


def test_a_published_backbone_is_referred_to_and_checked(tmp_path: Path):
    from transformers import ViltConfig, ViltModel

    source = tmp_path / "published"
    tokenizer = WordTokenizer(["is", "there", "a", "dog"], 16)
    tokenizer.save(source)
    config = ViltConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, image_size=64, patch_size=32, max_position_embeddings=16,
    )  # fmt: skip
    ViltModel(config).save_pretrained(source)
    overrides = ["algorithm.name=fedavg", "model.name=vilt_b32", f"model.pretrained={source}", "model.max_length=16"]
    overrides += [f"model.trainable={kind}" for kind in ("lora",)] + ["model.peft={rank=2}"]
    run(load_recipe(overrides=[*TINY, *overrides]), tmp_path / "run")
    written = export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out/backbone/model.safetensors").exists()
    assert f'from_pretrained("{source}", config=config)' in Path(written["global"], "README.md").read_text()
    image = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(image)
    asked = ask(tmp_path / "run", image, "is there a dog ?")
    assert {"model": "global", **load_exported(tmp_path / "out").ask(image, "is there a dog ?")} == asked
    refuses("exists already", export, tmp_path / "run", tmp_path / "out")
    tensors = load_file(source / "model.safetensors")
    tensors["layernorm.bias"] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    refuses(r"published' is not the one that was trained on", load_exported, tmp_path / "out")


def test_clients_with_tasks_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    overrides = ["algorithm.name=feddat", "model.name=vilt_tiny", "model.trainable=adapters", "data.preset=task"]
    tiny = [entry for entry in TINY if not entry.startswith(("data.preset", "data.clients"))]
    run(load_recipe(overrides=[*tiny, *overrides]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    files = [tmp_path / "1.png", tmp_path / "2.png"]
    for seed, file in enumerate(files):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)).save(file)
    first, second = files
    more: dict[str, dict[str, Any]] = {
        "pairs": {"image2": second},
        "choice": {"choices": ["red", "a cat", "two"]},
        "entailment": {},
        "vqa": {},
    }
    answers = {"pairs": {"false", "true"}, "choice": {"red", "a cat", "two"}, "entailment": None, "vqa": None}
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    for client, extra in more.items():
        model = load_exported(tmp_path / "out", client)
        found = model.ask(first, "the cat is red", 99, **extra)
        inside = finished.model(client)
        assert found == inside.ask(first, "the cat is red", 99, **extra)
        pool = answers[client] or set(inside.answers)
        assert {entry["answer"] for entry in found["answers"]} == pool
        assert sum(entry["probability"] for entry in found["answers"]) == pytest.approx(1, abs=1e-3)
        submodule = "classifier." if client == "vqa" else f"heads.{model.head}."
        held = load_file(tmp_path / "out/clients" / client / "head.safetensors")
        assert held
        assert all(name.startswith(submodule) for name in held)
    one = load_exported(tmp_path / "out", "pairs")
    swapped = one.ask(second, "the cat is red", image2=first)
    assert swapped != one.ask(first, "the cat is red", image2=second)
    refuses(r"two pictures: give a second one \(--picture2\)", one.ask, first, "the cat is red")
    with pytest.raises(ValueError, match=r"give at least two \(--choice, repeated\), got 1"):
        load_exported(tmp_path / "out", "choice").ask(first, "what is red", choices=["a cat"])
    with pytest.raises(ValueError, match=r"shares no model that answers without a client's own parts; name a client"):
        ask(tmp_path / "run", first, "the cat is red")
    asking = ["predict", tmp_path / "run", "--image", first, "--question", "the cat is red"]
    capfd.readouterr()
    assert command(*asking, "--client", "pairs", "--picture2", second, "--json") == 0
    said = json.loads(capfd.readouterr().out)
    assert said == {"model": "pairs", **one.ask(first, "the cat is red", image2=second)}
    assert command(*asking, "--client", "choice", "--shared", "--choice", "red", "--choice", "two") == 0
    assert {line.split()[-1] for line in capfd.readouterr().out.splitlines()} == {"red", "two"}
    assert command(*asking, "--client", "pairs") == 2
    assert "--picture2" in capfd.readouterr().err


def test_a_client_answers_from_its_own_pool(tmp_path: Path):
    tiny = [entry for entry in TINY if not entry.startswith(("data.preset", "data.clients", "data.train"))]
    overrides = ["algorithm.name=fedpeft", "model.name=vilt_tiny", "data.preset=scene", "data.pools=12"]
    run(load_recipe(overrides=[*tiny, *overrides, "data.train=16"]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    smaller = 0
    for client in finished.owners:
        batch = next(iter(finished.setup.data(client).test(8)))
        inside, model = finished.model(client), load_exported(tmp_path / "out", client)
        logits, found = inside(batch).logits, model(batch).logits
        assert model.answers == inside.answers
        # The run's head is as wide as the largest pool; the exported one as its client's own.
        assert found.shape[1] == len(model.answers) <= logits.shape[1]
        smaller += found.shape[1] < logits.shape[1]
        torch.testing.assert_close(found, logits[:, : len(model.answers)], atol=1e-6, rtol=0)
    assert smaller


def test_names_in_files_of_peft():
    for ours, theirs in (
        ("vilt.query.lora_A.default.weight", "base_model.model.vilt.query.lora_A.weight"),
        ("vilt.dense.ia3_l.default", "base_model.model.vilt.dense.ia3_l"),
    ):
        assert to_peft(ours) == theirs
        assert from_peft(theirs) == ours
    assert to_peft("vilt.query.base_layer.weight") is None
    assert from_peft("base_model.model.classifier.0.weight") == "classifier.0.weight"


def test_digests_depend_on_values_names_and_shapes_only():
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(1)}
    same = {"a": torch.tensor(1), "b": torch.arange(6.0).reshape(2, 3).t().contiguous().t()}  # laid out otherwise
    assert digest(tensors) == digest(same)
    others = [
        {**tensors, "b": tensors["b"] + 1},
        {**tensors, "b": tensors["b"].t()},
        {"c": tensors["b"], "a": tensors["a"]},
    ]
    assert len({digest(other) for other in [tensors, *others]}) == 4
