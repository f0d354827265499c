"""Folders of models of transformers: no code of theirs is run or asked about, and no pickle is opened by a run."""

import ast
import json
import os
import pickle
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

import confed
from confed.models.clip import clip
from confed.models.grid_features import load_vision_encoder
from confed.models.hf import hf
from confed.models.hf.prompts import read_processor
from confed.models.label_embeddings import clip_text_encoder, sentence_encoder
from confed.models.pretrained import published
from confed.prepare.checkpoints import convert_model
from refusals import refuses
from source_trees import nodes_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main

PACKAGE = Path(confed.__file__).parent
BASES = {"Embedding", "PeftModel", "Tokenizer"}
"""Classes whose ``from_pretrained`` is another: of torch, or without code and weights."""
READ = {"from_pretrained", "from_config", "pipeline", "load_dataset", "hf_hub_download"}
MODELS = {"AutoModel", "AutoModelForImageTextToText", "auto", "model"}
"""What reads weights."""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Place, receiver and call of everything that reads a model folder of the library."""
    readers: list[tuple[str, str, ast.Call]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READ:
                receiver = node.func.value
                name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
                place = f"{path.relative_to(PACKAGE)}:{node.lineno} {name}.{node.func.attr}"
                if name not in BASES and node.func.attr in ("from_pretrained", "pipeline"):
                    readers.append((place, name, node))
    return readers


def keyword(call: ast.Call, name: str) -> Any:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def test_every_call_of_the_library_forbids_foreign_code() -> None:
    assert len(calls()) >= 10
    assert [place for place, _, call in calls() if keyword(call, "trust_remote_code") is not False] == []


def test_every_reading_of_weights_is_of_safetensors() -> None:
    readers = [(place, call) for place, name, call in calls() if name in MODELS]
    assert len(readers) >= 3
    assert [place for place, call in readers if keyword(call, "use_safetensors") is not True] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A text encoder with a tokenizer, of no known kind, whose code leaves a trace."""
    small = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(small).save_pretrained(tmp_path / "model")
    place = tmp_path / "model"
    kinds = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoProcessor": "evil.P", "AutoTokenizer": ["evil.T"] * 2,
             "AutoImageProcessor": "evil.I", "AutoModelForImageTextToText": "evil.M"}  # fmt: skip
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": kinds}))
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        (place / name).write_text(json.dumps({"auto_map": kinds}))
    (place / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').write('ran')\nclass C: pass\n")
    return place


@pytest.mark.parametrize(
    "read",
    [
        sentence_encoder,
        lambda place: load_vision_encoder(str(place)),
        lambda place: clip(["a", "b"], source=str(place)),
        lambda place: hf(["a"], 0, source=str(place)),
        lambda place: read_processor(str(place), str(place)),
    ],
    ids=["text_encoders", "vision_features", "clip", "hf", "processors"],
)  # fmt: skip
def test_a_folder_with_auto_map_neither_asks_nor_runs(
    read: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    with pytest.raises(ValueError, match="auto_map") as caught:
        read(folder)
    assert "trust_remote_code" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert asked == []
    assert not (folder.parent / "trace").exists()
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['CONFED_TEST_TRACE']}",))


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose weights are a pickle."""
    monkeypatch.setenv("CONFED_TEST_TRACE", str(tmp_path / "trace"))
    small = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=16)
    model = ViTModel(small)
    model.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "vit" / "pytorch_model.bin")
    return tmp_path / "vit"


def test_a_run_opens_no_pickle_and_says_how_to_convert(pickled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("torch.load was called")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", opened)
        for read in (
            lambda: published(ViTModel, pickled, 0), lambda: load_vision_encoder(str(pickled)),
            lambda: clip(["a", "b"], source=str(pickled)), lambda: hf(["a"], 0, source=str(pickled)),
            lambda: clip_text_encoder(pickled),
        ):  # fmt: skip
            refuses(r"pytorch_model\.bin.*confed weights convert model", read)
    facts = convert_model(pickled, pickled.parent / "safe")
    body = published(ViTModel, pickled.parent / "safe", 0)
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    assert facts["tensors"] == len(weights)
    assert all(torch.equal(body.state_dict()[name], tensor) for name, tensor in weights.items())
    refuses("exists already", convert_model, pickled, pickled.parent / "safe")


def test_parts_of_weights_are_put_together(pickled: Path, tmp_path: Path) -> None:
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(weights)
    torch.save({name: weights[name] for name in names[:3]}, pickled / "a.bin")
    torch.save({name: weights[name] for name in names[3:]}, pickled / "b.bin")
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: "a.bin" if name in names[:3] else "b.bin" for name in names}}))
    convert_model(pickled, tmp_path / "safe")
    assert load_file(tmp_path / "safe" / "model.safetensors").keys() == weights.keys()
    for content in ({"weight_map": {"w": "../a.bin"}}, {"weight_map": 3}, {}, []):
        index.write_text(json.dumps(content))
        refuses("index", convert_model, pickled, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("content", [Bomb, lambda: {"w": Bomb()}, lambda: {"w": 3}, lambda: [1]])
def test_a_malicious_pickle_is_a_line(content: Any, pickled: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(content()))
    for words in (["weights", "convert", "model", str(pickled), str(pickled.parent / "safe")],):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
    refuses("confed weights convert model", published, ViTModel, pickled, 0)
    assert not (pickled.parent / "trace").exists()
    assert not (pickled.parent / "safe").exists()


def test_an_adapter_of_another_model_is_not_followed(pickled: Path) -> None:
    (pickled / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc"}')
    refuses("holds an adapter of another model", published, ViTModel, pickled, 0)
