"""Folders of kept features: everything that decides what frozen layers make of an example is in their name."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from confed.engines.executor import InProcess, _address
from confed.federation.frozen_features import FeatureSettings
from confed.federation.stages import staged_part
from confed.models import create_model
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer
from confed.models.hf.tiny import tiny
from matrix_cases import SGD, Chain, Plain, setup_of


def vlm() -> Any:
    body, processor = tiny("llava")
    return HuggingFaceVLM(body, ChatTokenizer(processor, 64)), processor.image_processor


def dual_encoder() -> Any:
    model: Any = create_model("clip", answers=("dog", "cat"), source="tiny:clip")
    return model, model._pictures._images


def address(model: Any) -> str:
    found = staged_part(model)
    assert found is not None
    return _address(found[1], 1)


@pytest.mark.parametrize("make", [vlm, dual_encoder], ids=["vlm", "dual encoder"])
def test_the_settings_of_the_image_processor(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    model, processor = make()
    before, variant = address(model), staged_part(model)[1].stage_variant  # type: ignore[index]
    assert address(model) == before
    for name, value in (("image_mean", [0.1, 0.2, 0.3]), ("resample", 0), ("do_normalize", False)):
        monkeypatch.setattr(processor, name, value)
        assert address(model) != before
        # In memory and within one folder it stands with each example.
        assert staged_part(model)[1].stage_variant != variant  # type: ignore[index]
        monkeypatch.undo()
    assert address(model) == before


def test_how_attention_is_computed():
    model, _ = vlm()
    before = address(model)
    model.body.config._attn_implementation = "eager"
    assert address(model) != before


@dataclass
class Sizes:
    """Settings of a model of one's own."""

    shortest: int = 8


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("mean", [0.5, 0.5], [0.5, 0.4]),
        ("size", {"height": 8}, {"height": 9}),
        ("sizes", Sizes(), Sizes(9)),
        ("depth", None, 2),
        ("crop", (1, (2, 3)), (1, (2, 4))),
    ],
)
def test_settings_that_are_lists_and_the_like(name: str, one: Any, other: Any):
    model: Any = Chain()
    setattr(model.stem, name, one)
    before = address(model)
    assert address(model) == before
    setattr(model.stem, name, other)
    assert address(model) != before


def test_arithmetic_and_libraries(monkeypatch: pytest.MonkeyPatch):
    before = address(Chain())
    assert address(Chain()) == before
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert address(Chain()) != before
    monkeypatch.undo()
    monkeypatch.setattr("confed.engines.executor.version", lambda name: f"another {name}")
    assert address(Chain()) != before
    monkeypatch.undo()
    monkeypatch.setattr("confed.engines.executor.fingerprint", lambda threads: {"source": "another checkout"})
    assert address(Chain()) != before


def own_model(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("own_chain", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["own_chain"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Own()


def test_the_source_of_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "own_chain", None)  # type: ignore[arg-type]  # what is put there is taken out
    file = tmp_path / "own_chain.py"
    text = "import matrix_cases\n\n\nclass Own(matrix_cases.Chain):\n    FACTOR = 1.0\n"
    file.write_text(text)
    before = address(own_model(file))
    file.write_text(text.replace("1.0", "2.0"))
    assert address(own_model(file)) != before


def test_a_class_without_a_source_file_keeps_for_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.executor.WRITTEN_AFTER", 0.0)

    class Shown(Chain):
        """As a cell of a notebook defines it."""

    Shown.__module__ = "a_notebook"
    given = replace(setup_of(Plain(), SGD), build=Shown, features=FeatureSettings(10**7, tmp_path, 10**9))
    executor = InProcess(given)
    message = executor.workspace.initial
    from confed.federation.messages import Call, Message
    from confed.federation.state import MemoryStore

    list(executor([Call(given.population.info(0), "fit", Message(dict(message)))], MemoryStore(), 0))
    assert "a part of the model has no source file" in executor.features.notes[0]
    assert executor.features.computed > 0
    assert list(tmp_path.iterdir()) == []
