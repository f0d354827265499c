"""Learned tokens before prompts: what the library's model gives where they are rows of its vocabulary."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from confed import load_exported
from confed.inference.ask import Talk
from confed.inference.export import export, export_merged
from confed.models.finetuning import Finetuning
from confed.models.hf.model import HuggingFaceVLM, with_learned
from confed.models.hf.tiny import tiny
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.tasks.chat import Chat
from vlm_families import HERE, tiny_vlm, vlm_batch

N = 3


def built(family: str, **options: Any) -> HuggingFaceVLM:
    return tiny_vlm(family, trainable="prompt", peft=Finetuning(tokens=N), **options).eval()


def widened(family: str, model: HuggingFaceVLM) -> Any:
    """The library's model, whose embedding layer has the learned values as further rows."""
    body: Any = tiny(family)[0].eval()
    layer: Any = body.get_input_embeddings()
    scale = float(getattr(layer, "embed_scale", 1.0))
    prompt: Any = model.prompts["text"]
    rows = prompt.mlp(prompt.embedding.weight).detach() / scale
    layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), rows]))
    return body


def test_learned_tokens_stand_between_padding_and_prompt() -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found, there = with_learned(ids, mask, 2, 50)
    assert found.tolist() == [[0, 0, 50, 51, 5, 6], [50, 51, 7, 8, 9, 5]]
    assert there.tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]


@pytest.mark.parametrize("family", HERE)
def test_scores_and_texts_are_those_of_further_vocabulary_rows(family: str) -> None:
    model = built(family)
    batch = vlm_batch(model)
    asked = {key: value for key, value in batch.items() if key != "answer_tokens"}
    plain, state = widened(family, model), model.prefix(batch)
    with torch.no_grad():
        scores = model(batch).logits
        model.begin(Chat(2, max_new_tokens=4))
        written = model(asked).logits
        for row in range(2):
            own = slice(row, row + 1)
            answer = batch["answer_tokens"][row, 1:]
            answer = answer[: int((answer != 0).sum())]
            pictures = {key: value[own] for key, value in state.pictures.items()}
            inputs = model._inputs(
                torch.cat([state.ids[own], answer[None, :-1]], 1),
                torch.cat([state.mask[own], torch.ones(1, len(answer) - 1, dtype=torch.int64)], 1),
                pictures, state.shown[own], len(answer) - 1,
            )  # fmt: skip
            there = inputs["attention_mask"][0].bool()
            inputs |= {k: v[:, there] for k, v in inputs.items() if v.shape == inputs["input_ids"].shape}
            assert inputs["input_ids"][0, :N].tolist() == [model.body.get_input_embeddings().weight.shape[0] + i
                                                           for i in range(N)]  # fmt: skip
            expected = plain.get_output_embeddings()(plain.model(**inputs).last_hidden_state[0, -len(answer) :])
            torch.testing.assert_close(scores[row, : len(answer)], expected, rtol=1e-4, atol=1e-5)
            prompt = model._inputs(state.ids[own], state.mask[own], pictures, state.shown[own])
            there = state.mask[row].bool()
            prompt |= {k: v[:, there] for k, v in prompt.items() if v.shape == prompt["input_ids"].shape}
            made = plain.generate(**prompt, max_new_tokens=4, do_sample=False)[0, int(there.sum()) :].tolist()
            assert written[row, : len(made)].tolist() == made


def test_only_the_prompt_learns_and_its_copies_are_their_own() -> None:
    model = built("idefics3")
    assert {name for name, value in model.named_parameters() if value.requires_grad} == {
        f"prompts.text.{name}" for name in ("embedding.weight", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight",
                                            "mlp.2.bias")
    }  # fmt: skip
    batch = vlm_batch(model)
    Chat(2).loss(model(batch), batch).backward()
    assert all(value.grad is not None and value.grad.any() for value in model.prompts.parameters())
    twin, before = copy.deepcopy(model), model(batch).logits
    with torch.no_grad():
        twin.prompts["text"].get_parameter("embedding.weight").add_(1.0)
    assert torch.equal(model(batch).logits, before)
    assert not torch.allclose(twin(batch).logits, before)


def test_choice_behind_cached_prompts_is_that_of_whole_ones() -> None:
    model = built("llava")
    batch = vlm_batch(model)
    batch.pop("answer_tokens")
    candidates = model.tokenizer.answers(["red", "light green", "no"])
    model.begin(Chat(3, "choice").choosing(candidates))
    with torch.no_grad():
        state = model.prefix(batch)
        torch.testing.assert_close(model.rank(state).logits, model._rank_whole(state, candidates).logits)


def test_a_run_learns_prompts_and_sends_nothing_else(tmp_path: Path) -> None:
    small = ("data.train=4", "data.validation=1", "data.test=1", "data.unseen=[]", "run.rounds=2", "run.gallery=0",
             "run.without=['home', 'commercial', 'natural', 'educational']", "run.workers=1", "run.controls=none",
             "local.epochs=1", "local.lr=0.01", "task.max_new_tokens=2", "study.methods=[]")  # fmt: skip
    model = ("model.name=hf", "model.source=tiny:llava", "model.trainable=prompt", "model.attention=fast",
             "task.name=chat", "algorithm.name=fedavg")  # fmt: skip
    summary = run(load_recipe("fedvqa_scenes", [*model, *small]), tmp_path / "run")
    width = 64
    sent = 5 * width + width * width // 4 + width // 4 + width * width // 4 + width
    assert summary["parameters"]["sent"] == sent
    assert summary["exact"] is False  # attention is "fast"
    picture = tmp_path / "a.png"
    Image.new("RGB", (48, 40), "red").save(picture)
    export(tmp_path / "run", tmp_path / "out")
    said = Talk(tmp_path / "run", [picture]).ask("What?")
    assert load_exported(tmp_path / "out").ask(picture, "What?")["answers"] == [{"answer": said}]
    with pytest.raises(ValueError, match=r"learned tokens before prompts .* are no weights of the model"):
        export_merged(tmp_path / "run", tmp_path / "merged")
