"""The packaged vision-language model smolvlm_mini: its size, what it knows, and its adapters in peft."""

from pathlib import Path
from typing import Any

import pytest
import torch

from confed.datasets.scenes import public_split
from confed.federation.params import named_tensors
from confed.federation.specs import frozen_names
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.models import create_model
from confed.models.pretrained import describe, packaged, weights_file
from confed.prepare.pretraining import MINIS, accuracy
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.tasks.generation import Generation

NAME = "smolvlm_mini"


def answered(processor: Any, body: Any, picture: Any, question: str) -> str:
    """What the library's own model writes, greedily."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    read = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        tokens = body.generate(**read, max_new_tokens=6, do_sample=False)
    return processor.tokenizer.decode(tokens[0, read["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_folder_is_small_and_says_how_it_was_made() -> None:
    facts, mini, place = describe(weights_file(NAME)), MINIS[NAME], weights_file(NAME)
    assert packaged(NAME)
    assert sum(file.stat().st_size for file in place.iterdir()) <= 6_000_000
    assert {file.suffix for file in place.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert facts["accuracy"]["overall"] >= mini.bar
    assert facts["settings"] == mini.settings._asdict()
    assert facts["epochs_done"] == mini.settings.epochs


def test_what_lora_leaves_alone_is_frozen() -> None:
    model = create_model("hf", answers=0, vocab_size=0, source=NAME)
    # Input and output embeddings are one tensor with two names, of which the first counts.
    tied = {"body.lm_head.weight", "body.model.text_model.embed_tokens.weight"}
    assert tied <= dict(model.named_parameters(remove_duplicate=False)).keys()
    assert tied & set(named_tensors(model)) == {"body.model.text_model.embed_tokens.weight"}
    assert all(".lora_" in name for name in set(named_tensors(model)) - frozen_names(model))


def test_held_out_questions_are_answered_by_writing_and_by_likelihood() -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    mini, place = MINIS[NAME], weights_file(NAME)
    examples, _ = public_split(80, 987)
    processor = AutoProcessor.from_pretrained(place)
    body: Any = AutoModelForImageTextToText.from_pretrained(place).eval()
    written = [
        answered(processor, body, examples.images[index], question)
        for index, question in zip(examples.image_index.tolist(), examples.questions, strict=True)
    ]
    right = sum(a == b for a, b in zip(written, examples.answers, strict=True)) / len(written)
    assert right >= mini.bar - 0.12  # three standard errors of a share of 0.85 of 80
    model: Any = create_model("hf", answers=0, vocab_size=0, source=NAME)
    material = mini.material(NAME, 80, 987)
    model.begin(Generation(len(material.answers)).choosing(model.tokenizer.answers(material.answers)))
    # The tokenizer of the folder is another one than that of so few questions.
    text, mask = model.tokenizer(examples.questions)
    material.table.columns.update(text=text, text_mask=mask)  # pyright: ignore[reportAttributeAccessIssue]
    assert accuracy(model, material.table, material.types)["overall"] == pytest.approx(right, abs=0.05)


# peft asks the library's model by a name that is about to go.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_of_a_run_load_in_peft_on_the_folder(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    small = [
        "run.rounds=1", "local.epochs=1", "data.train=8", "data.validation=4", "data.test=4", "run.gallery=0",
        "data.preset=quantity", "data.clients=2", "data.unseen=[]",
    ]  # fmt: skip
    run(load_recipe("chat_scenes", small).method("fedavg"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    trained: Any = finished.model(None)
    text, mask = trained.tokenizer(["where is the dog?"])
    picture = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    answers = trained.tokenizer.answers(["top left"])
    with torch.no_grad():
        batch = {"image": picture[None], "text": text, "text_mask": mask, "answer_tokens": answers}
        expected = trained.model(batch).logits[0]
    body: Any = AutoModelForImageTextToText.from_pretrained(weights_file(NAME))
    plain: Any = PeftModel.from_pretrained(body, str(tmp_path / "out" / "global")).eval()
    content = [{"type": "image", "image": picture.permute(1, 2, 0).numpy()}]
    content.append({"type": "text", "text": "where is the dog?"})
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "top left"}]
    read = trained.tokenizer.processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        logits = plain(**read).logits[0]
    torch.testing.assert_close(logits[-len(expected) - 1 : -1], expected, rtol=1e-4, atol=1e-4)
    assert '"DIR/base"' in (tmp_path / "out" / "global" / "README.md").read_text()
    assert (tmp_path / "out" / "base" / "config.json").is_file()
