"""Vision-language models of transformers by name: the library's own numbers, finetuning, folders, faults."""

import importlib.util
import json
import re
import sys
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from command_line import confed
from confed.data.chat import asked
from confed.federation.protocols import Batch
from confed.federation.specs import model_spec
from confed.models import create_model, create_tokenizer
from confed.models.finetuning import Finetuning
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer, check_torchvision
from confed.models.hf.tiny import tiny
from confed.tasks.generation import Generation
from refusals import refuses
from vlm_families import HERE, tiny_vlm

QUESTIONS = ["what colour is it?", "red?", "is there a big thing here?"]
ANSWERS = ["red", "light green", "yes"]


def pictures(count: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, 3, 48, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def built(family: str, **options: Any) -> tuple[HuggingFaceVLM, ChatTokenizer]:
    tokenizer: Any = create_tokenizer("hf", (), source=f"tiny:{family}")
    return tiny_vlm(family, **options), tokenizer


def batch_of(tokenizer: ChatTokenizer) -> dict[str, Tensor]:
    text, mask = tokenizer(QUESTIONS)
    return {"image": pictures(), "text": text, "text_mask": mask, "answer_tokens": tokenizer.answers(ANSWERS)}


def library(model: HuggingFaceVLM, tokenizer: ChatTokenizer) -> Tensor:
    """log p of each answer by the library alone, one example at a time, without padding."""
    found = []
    for picture, question, answer in zip(pictures(), QUESTIONS, ANSWERS, strict=True):
        if "suffix" in signature(tokenizer.processor.__call__).parameters:
            found.append(-suffixed(model, tokenizer, picture, question, answer))
            continue
        content = [{"type": "image", "image": picture.permute(1, 2, 0).numpy()}, {"type": "text", "text": question}]
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        make = tokenizer.processor.apply_chat_template
        prompt = make(turns[:1], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True)
        whole = make(turns, tokenize=True, return_dict=True, return_tensors="pt")
        ids, start = whole["input_ids"][0], prompt["input_ids"].shape[1]
        assert torch.equal(ids[:start], prompt["input_ids"][0])
        scores = model.body(**whole).logits[0].log_softmax(-1)
        found.append(scores[range(start - 1, len(ids) - 1), ids[start:]].sum())
    return torch.stack(found)


def suffixed(model: HuggingFaceVLM, tokenizer: ChatTokenizer, picture: Tensor, question: str, answer: str) -> Tensor:
    """-log p of an answer by the library of a processor that makes labels."""
    with warnings.catch_warnings():  # it makes an array of a tensor
        warnings.simplefilter("ignore", DeprecationWarning)
        whole = tokenizer.processor(
            text=f"<image>{question}", images=picture.permute(1, 2, 0).numpy(), suffix=answer, return_tensors="pt"
        )
    return model.body(**whole).loss * (whole["labels"] != -100).sum()


@pytest.mark.parametrize("family", HERE)
def test_likelihoods_of_answers_are_the_librarys(family: str) -> None:
    model, tokenizer = built(family)
    model.eval()
    batch = batch_of(tokenizer)
    task = Generation(3).choosing(batch["answer_tokens"])
    with torch.no_grad():
        expected = library(model, tokenizer)
        trained = model(batch)
        torch.testing.assert_close(task.loss(trained, batch), -expected.mean(), rtol=1e-5, atol=1e-4)
        model.begin(task)
        ranked = model({key: value for key, value in batch.items() if key != "answer_tokens"})
    assert ranked.logits.shape == (3, 3)
    torch.testing.assert_close(ranked.logits.diagonal(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ranked.features, trained.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HERE)
def test_ranking_reads_the_picture_and_is_the_same_one_by_one(family: str) -> None:
    model, tokenizer = built(family)
    model.eval()
    batch = batch_of(tokenizer)
    model.begin(Generation(3).choosing(batch.pop("answer_tokens")))
    with torch.no_grad():
        whole = model(batch).logits
        for row in range(3):
            one = model({key: value[row : row + 1] for key, value in batch.items()}).logits
            torch.testing.assert_close(one[0], whole[row], rtol=1e-4, atol=1e-4)
        other = model({**batch, "image": 255 - batch["image"]}).logits
    assert (other - whole).abs().max() > 1e-4


@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("trainable", ["lora", "adapters", "ia3", "top", "all"])
def test_the_language_part_learns_and_gets_gradients(family: str, trainable: str) -> None:
    model, tokenizer = built(family, trainable=trainable, peft=Finetuning(rank=4, reduction=8))
    batch = batch_of(tokenizer)
    learning = {name for name, value in model.named_parameters() if value.requires_grad}
    language = f"{model.part('language')}."
    assert learning
    assert all(name.startswith(language) or (trainable == "all" and model.is_head(name)) for name in learning)
    Generation(3).loss(model(batch), batch).backward()
    with_gradient = {name for name, value in model.named_parameters() if value.grad is not None}
    assert with_gradient == learning
    assert set(model.frozen) >= {name for name, _ in model.named_parameters()} - learning


def test_lora_reaches_the_vision_part_on_request_only() -> None:
    model, _ = built("idefics3", parts=("language", "vision", "connector"), peft=Finetuning(rank=2))
    places = {name.split(".lora_")[0] for name, value in model.named_parameters() if value.requires_grad}
    assert any(name.startswith(model.part("vision")) for name in places)
    assert any("connector" in name for name in places)


def test_a_saved_folder_gives_the_same_model(tmp_path: Path) -> None:
    body, processor = tiny("llava", seed=3)
    body.save_pretrained(tmp_path)  # type: ignore[operator]
    processor.save_pretrained(tmp_path)
    tokenizer: Any = create_tokenizer("hf", (), source=str(tmp_path))
    batch = batch_of(tokenizer)
    task = Generation(3).choosing(batch.pop("answer_tokens"))
    found = []
    for model in (
        HuggingFaceVLM(body, ChatTokenizer(processor)),
        create_model("hf", answers=3, vocab_size=0, source=str(tmp_path)),
    ):
        chat: Any = model.eval()
        chat.begin(task)
        with torch.no_grad():
            found.append(chat(batch).logits)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-5)


def test_reading_a_folder_draws_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    for part in tiny("llava"):
        part.save_pretrained(tmp_path)  # type: ignore[operator]
    capfd.readouterr()
    create_model("hf", answers=3, vocab_size=0, source=str(tmp_path))
    assert "Loading" not in "".join(capfd.readouterr())
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_values_have_the_type_of_base_however_they_are_stored(tmp_path: Path, base: str) -> None:
    body, processor = tiny("llava")
    for part in (body.to(torch.bfloat16), processor):
        part.save_pretrained(tmp_path)
    model: Any = create_model("hf", answers=3, vocab_size=0, source=str(tmp_path), base=base)
    kinds = {value.dtype for value in model.parameters() if not value.requires_grad}
    assert kinds == {torch.float32 if base == "fp32" else torch.bfloat16}


def test_bf16_keeps_what_learns_in_single_precision() -> None:
    model, tokenizer = built("idefics3", base="bf16", peft=Finetuning(rank=2))
    kinds = {(value.requires_grad, value.dtype) for value in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    batch = batch_of(tokenizer)
    loss = Generation(3).loss(model(batch), batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


def test_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, tokenizer = built("idefics3", checkpointing=checkpointing, peft=Finetuning(rank=2))
        batch = batch_of(tokenizer)
        Generation(3).loss(model(batch), batch).backward()
        gradients.append([value.grad for value in model.parameters() if value.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", HERE)
def test_candidates_are_ranked_in_training_with_checkpointing(family: str) -> None:
    model, tokenizer = built(family, checkpointing=True, peft=Finetuning(rank=2))
    model.begin(Generation(3).choosing(tokenizer.answers(ANSWERS)))
    asked = {key: value for key, value in batch_of(tokenizer).items() if key != "answer_tokens"}
    found = model.train()(asked)
    found.logits.sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    with torch.no_grad():
        wanted = model.eval()(asked)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.features, wanted.features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", HERE)
def test_candidates_behind_cached_prompts_keep_their_positions(family: str) -> None:
    model, tokenizer = built(family)
    for name, value in model.named_parameters():
        if ".self_attn." in name and name.endswith("proj.weight"):  # attention that counts, and is not nearly uniform
            value.data *= 10
    model.eval().begin(Generation(3).choosing(tokenizer.answers(ANSWERS)))
    asked = {key: value for key, value in batch_of(tokenizer).items() if key != "answer_tokens"}
    with torch.no_grad():
        found = model(asked).logits
        candidates: Any = model._candidates
        torch.testing.assert_close(found, model._rank_whole(model.prefix(asked), candidates).logits, atol=3e-4, rtol=0)


def test_families_with_other_positions_rank_behind_whole_prompts() -> None:
    model, tokenizer = built("llava")
    model.begin(Generation(3).choosing(tokenizer.answers(ANSWERS)))
    asked = {key: value for key, value in batch_of(tokenizer).items() if key != "answer_tokens"}
    with torch.no_grad():
        wanted = model.eval()(asked).logits
        model.body.model.get_rope_index = lambda: None
        model._continued = None  # type: ignore[method-assign, assignment]  # continues a cache
        torch.testing.assert_close(model(asked).logits, wanted, atol=1e-4, rtol=1e-5)


def test_placeholder_is_found_where_a_picture_changes_the_start() -> None:
    _, processor = tiny("idefics3")
    processor.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
        "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = ChatTokenizer(processor)
    assert tokenizer.placeholder.text == "<image>"
    text, _ = tokenizer(["red?"])
    assert len(tokenizer.placeholder.places(text[0].tolist())) == 1


@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_frequencies_of_positions_keep_their_precision(base: str) -> None:
    pytest.importorskip("bitsandbytes")
    model, _ = built("idefics3", base=base)
    kinds = {value.dtype for name, value in model.named_buffers() if "inv_freq" in name}
    assert kinds == {torch.float32}


def test_output_layer_belongs_to_the_language_part() -> None:
    model, _ = built("llava", trainable="all", parts=("vision",))
    learning = [name for name, value in model.named_parameters() if value.requires_grad]
    assert learning
    assert all(name.startswith(f"{model.part('vision')}.") for name in learning)


def test_folder_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for part in tiny("llava"):
        part.save_pretrained(tmp_path)  # type: ignore[operator]
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({k: v for k, v in weights.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights of .* lack .*q_proj\.weight; nothing is made up"):
        create_model("hf", answers=3, vocab_size=0, source=str(tmp_path))


def test_several_answers_are_read_where_they_are() -> None:
    model, tokenizer = built("gemma3")
    model.eval()
    batch: dict[str, Tensor] = batch_of(tokenizer)
    tokens = batch.pop("answer_tokens")
    several = torch.stack([tokens, tokens.roll(1, 0)], 1)
    weight = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    with torch.no_grad():
        both = model({**batch, "answer_tokens": several, "answer_weight": weight})
        one = model({**batch, "answer_tokens": tokens})
    assert both.logits.shape[0] == 5
    torch.testing.assert_close(both.logits[[0, 2, 3]], one.logits, rtol=1e-4, atol=1e-5)


def test_processed_pictures_are_kept_up_to_a_budget() -> None:
    _, tokenizer = built("idefics3")
    from confed.models.hf.model import Pictures

    small = Pictures(tokenizer.placeholder, kept=40_000)
    first = small(pictures(8)[:, None])
    again = small(pictures(8)[:, None])
    assert small.bytes_kept <= 40_000
    for key, value in first.items():
        assert torch.equal(value, again[key])


def test_a_folder_without_processor_or_template_is_refused(tmp_path: Path) -> None:
    body, processor = tiny("llava")
    body.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"no processor could be read from|has no processor of pictures and texts"):
        create_tokenizer("hf", (), source=str(tmp_path))
    processor.chat_template = None
    refuses("has no chat template", ChatTokenizer, processor)


def test_bad_batches_are_named() -> None:
    model, tokenizer = built("llava")
    batch: Batch = batch_of(tokenizer)
    with pytest.raises(ValueError, match="needs the key 'image', got answer_tokens, text, text_mask"):
        model({key: value for key, value in batch.items() if key != "image"})
    with pytest.raises(ValueError, match=r"image must be uint8 of shape \(B, 3, H, W\), got torch.float32"):
        model({**batch, "image": batch["image"].float()})
    with pytest.raises(ValueError, match=r"task.name must be 'generation'"):
        model({key: value for key, value in batch.items() if key != "answer_tokens"})
    with pytest.raises(ValueError, match="a prompt lacks the placeholder '<image>' of its picture"):
        model({**batch, "text": torch.full_like(batch["text"], 40)})


def test_too_long_questions_and_unlearnable_answers_are_named() -> None:
    _, tokenizer = built("llava")
    refuses("raise it, or leave the example out", tokenizer, ["x" * 400])
    refuses("the answer '' adds no token", tokenizer.answers, ["red", ""])
    assert tokenizer.decode(tokenizer.answers(["light green"])[:, 1:]) == ["light green\n"]
    assert np.array_equal(tokenizer(["a"])[1][0].numpy(), np.ones(len(tokenizer(["a"])[1][0])))


def test_attention_on_a_gpu_repeats_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, bool] = {}
    for kernel in ("math", "flash", "mem_efficient", "cudnn"):
        monkeypatch.setattr(
            f"torch.backends.cuda.enable_{kernel}_sdp", lambda on, kernel=kernel: chosen.update({kernel: on})
        )
    monkeypatch.setattr(HuggingFaceVLM, "to", lambda self, device: self)
    for attention, others in (("exact", False), ("fast", True)):
        model, _ = built("llava", attention=attention)
        model.place("cpu")
        assert not chosen
        model.place("cuda:0")
        assert chosen == {"math": True, "flash": others, "mem_efficient": others, "cudnn": others}
        assert model_spec(model).exact is not others
        chosen.clear()


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    _, processor = tiny("llava")
    text = {"model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2,
            "num_experts_per_tok": 1, "vocab_size": 300, "head_dim": 8}  # fmt: skip
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 32, "patch_size": 8}  # fmt: skip
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=4)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a mixture of experts, whose experts are no linear layers that adapters"):
        create_model("hf", answers=3, vocab_size=0, source=str(tmp_path))


def test_description_counts_what_learns_and_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from confed.models.hf.description import describe

    found = describe("tiny:llava", peft=Finetuning(rank=2))
    model, _ = built("llava", peft=Finetuning(rank=2))
    learning = [value for value in model.parameters() if value.requires_grad]
    assert found["learning"]["values"] == f"{sum(value.numel() for value in learning):,}"
    assert found["learning"]["sent per round and client"].startswith(f"{sum(v.nbytes for v in learning) / 1000:.3g} kB")
    assert found["learning"]["layers"].startswith("14: model.language_model.layers.0.mlp.down_proj, ")
    plain, _ = tiny("llava")
    assert found["model"]["values"] == f"{sum(value.numel() for value in plain.parameters()):,}"
    assert sum(int(part.split(" ")[0].replace(",", "")) for part in found["parts"].values()) == sum(
        value.numel() for name, value in plain.named_parameters() if not name.startswith("lm_head.")
    )
    assert found["model"]["licence"] == "that of confed"
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    tiny("llava")[1].save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: none of ours\n")
    assert confed("doctor", "model", tmp_path, "model.trainable=prompt", "model.base=bf16", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"]["licence"] == "apache-2.0"
    assert said["learning"]["kind"] == "prompt in language"
    assert "in bf16" in said["memory"]["weights"]
    for wrong, message in (("model.bass=nf4", "bass"), ("task.name=chat", "takes settings of model")):
        assert confed("doctor", "model", "tiny:llava", wrong) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert confed("doctor", "model") == 2
    assert "confed doctor takes nothing, or model SOURCE; got 'model' alone" in capsys.readouterr().err


def test_a_processor_names_its_missing_library_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, processor = tiny("llava")
    processor.tokenizer.save_pretrained(tmp_path)
    settings = {"image_processor_type": "Lfm2VlImageProcessor", "processor_class": "Lfm2VlProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2_vl"}))
    if importlib.util.find_spec("torchvision") is None:
        message = (
            f"the processor of '{tmp_path}' needs the library torchvision, which is not installed: install confed "
            "with the extra 'vlm'"
        )
        refuses(re.escape(message), create_tokenizer, "hf", (), source=str(tmp_path))
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    refuses(r"'tiny:smolvlm' needs the library num2words, .* with the extra 'vlm'", tiny, "smolvlm")


def test_torchvision_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    fault = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    message = r"the torchvision that is installed does not fit torch .*nms does not exist\): install both"
    refuses(message, check_torchvision)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "internvl", "llava_onevision", "paligemma"])
def test_folders_are_read_without_the_part_for_videos(family: str, tmp_path: Path) -> None:
    body, processor = tiny(family, seed=3)
    body.save_pretrained(tmp_path)  # type: ignore[operator]
    processor.save_pretrained(tmp_path)
    tokenizer: Any = create_tokenizer("hf", (), source=str(tmp_path))
    assert type(tokenizer.processor).__name__ == type(processor).__name__
    model: Any = create_model("hf", answers=3, vocab_size=0, source=str(tmp_path)).eval()  # type: ignore[attr-defined]
    batch = batch_of(tokenizer)
    with torch.no_grad():
        found = model(batch).logits
        wanted = HuggingFaceVLM(body, ChatTokenizer(processor)).eval()(batch).logits
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)


def test_a_processor_with_a_part_for_videos_is_read_as_published(tmp_path: Path) -> None:
    """Files as they lie on the hub: settings of pictures in a file of their own, the template in another."""
    body, processor = tiny("qwen2_5_vl")
    body.save_pretrained(tmp_path)  # type: ignore[operator]
    processor.tokenizer.save_pretrained(tmp_path)
    images = processor.image_processor.to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | {"processor_class": "Qwen2_5_VLProcessor"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": processor.chat_template}))
    tokenizer: Any = create_tokenizer("hf", (), source=str(tmp_path))
    assert type(tokenizer.processor).__name__ == "Qwen2_5_VLProcessor"
    assert tokenizer.prompt(asked("red?")) == ChatTokenizer(processor).prompt(asked("red?"))
    assert tokenizer.processor.image_processor.patch_size == processor.image_processor.patch_size
