"""Merged export of models by name: plain transformers gives the run's scores; what cannot be merged is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command_line import confed as command
from confed.inference.export import export_merged
from confed.inference.finished_run import FinishedRun
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.runs.run import run
from refusals import refuses
from tiny_runs import CHAT


def finished(folder: Path, *more: str) -> Path:
    (folder / "recipe.toml").write_text(CHAT)
    run(load_recipe(folder / "recipe.toml", more), folder / "run")
    return folder / "run"


def test_merged_model_gives_the_runs_scores(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = finished(tmp_path)
    assert command("export", str(folder), str(tmp_path / "out"), "--merged") == 0
    plain: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    processor: Any = AutoProcessor.from_pretrained(tmp_path / "out")
    assert not any("lora" in name for name in plain.state_dict())
    assert plain.config.get_text_config().use_cache
    picture = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    content = [{"type": "image", "image": picture.permute(1, 2, 0).numpy()}, {"type": "text", "text": "red?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    read = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    done = FinishedRun(folder)
    done.load()
    trained = done.model(None)
    text, mask = trained.tokenizer(["red?"])
    answer = trained.tokenizer.answers(["yes"])
    with torch.no_grad():
        logits = plain(**read).logits[0]
        batch = {"image": picture[None], "text": text, "text_mask": mask, "answer_tokens": answer}
        expected = trained.model.eval()(batch).logits[0]
    torch.testing.assert_close(logits[-len(expected) - 1 : -1], expected, rtol=1e-4, atol=1e-4)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: tiny:llava" in card
    assert "1 rounds of federated learning" in card


def test_quantised_bases_and_adapters_behind_blocks_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for name, setting, message in (
        ("nf4", "model.base=nf4", r"a quantised base \(model.base = 'nf4'\) would round what is merged into it"),
        ("adapters", "model.trainable=adapters", r"adapters behind blocks .* are layers of their own"),
    ):
        (tmp_path / name).mkdir()
        folder = finished(tmp_path / name, setting)
        refuses(message, export_merged, folder, tmp_path / name / "out")
        assert not (tmp_path / name / "out").exists()


TWO_CLIENTS = ("run.without=['home', 'commercial', 'natural', 'educational']", "run.rounds=2", "local.lr=0.05")


def finished_preset(folder: Path, preset: str, base: str) -> Path:
    return finished(folder, *TWO_CLIENTS, "algorithm.name=fedlora", f"algorithm.preset={preset}", f"model.base={base}")


@pytest.mark.parametrize(("preset", "base"), [("fedex_lora", "bf16"), ("flora", "fp32")])
def test_merged_weights_hold_what_rounds_added(preset: str, base: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    folder = finished_preset(tmp_path, preset, base)
    export_merged(folder, tmp_path / "out")
    merged: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    trained = load_file(RunFolder(folder).models / "global" / "trained.safetensors")
    done = FinishedRun(folder)
    done.load()
    tensors, checked = done.workspace.tensors, 0
    for name, added in trained.items():
        if not name.endswith(".lora_added"):
            continue
        layer = name.removesuffix(".lora_added")
        factors = [trained[f"{layer}.lora_{part}.default.weight"].double() for part in "BA"]
        before = tensors[f"{layer}.base_layer.weight"]
        (scale,) = done.workspace.model.get_submodule(layer).scaling.values()  # type: ignore[union-attr, operator]
        exact = before.double() + scale * (added.double() + factors[0] @ factors[1])
        assert (scale * added).abs().max() > 1e-3
        written = merged.get_submodule(layer.removeprefix("body.")).weight
        if base == "bf16":
            same = (written == exact.to(torch.bfloat16)).double().mean()
            assert written.dtype == torch.bfloat16
            assert same > 0.999  # an fp32 sum next to the middle of two values may go the other way
        else:
            torch.testing.assert_close(written.double(), exact, rtol=1e-6, atol=1e-7)
        checked += 1
    assert checked >= 4


def test_merging_that_loses_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_preset(tmp_path, "fedex_lora", "bf16")
    monkeypatch.setattr("confed.inference.export.added_weight", lambda layer: None)
    with pytest.raises(ValueError, match=r"differ by up to 0\.\d+, and rounding its weights otherwise by 0\.00\d+"):
        export_merged(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merging_parts_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, *TWO_CLIENTS, "algorithm.name=fedmosaic")
    with pytest.raises(ValueError, match="the method has parts beside the model's weights: export without --merged"):
        export_merged(folder, tmp_path / "out", "transport")


def test_merging_needs_a_global_model_that_answers_alone(tmp_path: Path) -> None:
    folder = finished_preset(tmp_path, "fedsa_lora", "fp32")
    refuses("shares no model that answers without a client's own parts", export_merged, folder, tmp_path / "out")
    export_merged(folder, tmp_path / "out", "transport")
