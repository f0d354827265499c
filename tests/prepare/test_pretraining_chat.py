"""Pretraining of smolvlm_mini: questions of one pass against single ones, tokenizer, folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.data.table import Table
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer
from confed.models.pretrained import States, describe
from confed.prepare.pretraining import MINIS, Tagger, pretrain
from confed.prepare.pretraining.chat import CAPTION, QUESTIONS, ChatLearner, word_ids
from confed.prepare.pretraining.minis import Material
from refusals import refuses


@pytest.fixture(scope="module")
def material() -> Material:
    return MINIS["smolvlm_mini"].material("smolvlm_mini", 12, 3)


@pytest.fixture(scope="module")
def learner(material: Material) -> ChatLearner:
    made: Any = MINIS["smolvlm_mini"].create(material, 1)
    return made


def alone(learner: ChatLearner, batch: dict[str, Tensor]) -> Tensor:
    """-log p of all answer tokens, (n,), each question read by itself."""
    logits = HuggingFaceVLM.forward(learner, batch).logits
    target = batch["answer_tokens"][:, 1:]
    return F.cross_entropy(logits[target > 0], target[target > 0], reduction="none")


def test_questions_of_a_picture_are_read_as_if_each_stood_alone(learner: ChatLearner, material: Material) -> None:
    table: Table = material.table
    batch = table.batch(torch.arange(len(table)))
    with torch.no_grad():
        states = learner.pretraining_states(batch)
        joined = states.asked
        asked = {key: batch[key] for key in ("image", "text", "text_mask")}
        answers = alone(learner, {**asked, "answer_tokens": batch["answer_tokens"]})
        single = learner._kept["asked"]  # of the same layer, each question by itself
        request, mask = (part.expand(len(table) // QUESTIONS, -1) for part in learner.tokenizer([CAPTION]))
        told = batch["caption_tokens"][::QUESTIONS]
        shown = {"image": batch["image"][::QUESTIONS], "text": request, "text_mask": mask, "answer_tokens": told}
        captions = alone(learner, shown)
    assert states.answer_loss is not None
    assert joined is not None
    torch.testing.assert_close(states.answer_loss, answers.mean() + captions.mean(), rtol=1e-5, atol=1e-5)
    image = batch["text"].eq(learner.body.config.image_token_id).int().argmax(1)
    more = len(learner._before) - 2
    for row in range(len(table)):
        own = slice(int(image[row]) + 1, batch["text"].shape[1])
        there = slice(own.start + more, own.stop + more)
        torch.testing.assert_close(joined[row, own], single[row, there], rtol=1e-4, atol=1e-4)


def test_patches_of_a_picture_are_tagged_once(material: Material) -> None:
    rng = torch.Generator().manual_seed(0)
    patches, words = torch.randn(3, 16, 8, generator=rng), torch.randn(1024, 8, generator=rng)
    tagger, rows = Tagger(8, material.words, rng), torch.arange(3).repeat_interleave(QUESTIONS)
    cells = {name: value[rows] for name, value in material.cells.items()}
    text = material.table.columns["text"]
    once = tagger.losses(States(early=patches, words=words), text, cells)
    each = tagger.losses(States(early=patches[rows], words=words), text, cells)
    torch.testing.assert_close(once, each)


def test_public_words_are_tokens_and_texts_come_back(material: Material) -> None:
    tokenizer: ChatTokenizer = material.tokenizer
    assert len(set(word_ids(tokenizer, ["red", "dog", "top"]).tolist())) == 3
    refuses(r"expected one token each, got several of 'zebra'", word_ids, tokenizer, ["red", "zebra"])
    # Any text has tokens: bytes where nothing was merged.
    texts = ["a red dog next to a box", "whaur is the zébra?"]
    assert tokenizer.decode(tokenizer.answers(texts)) == texts


def test_the_folder_is_read_by_the_library(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tmp_path / "mini"
    settings = {"questions": 32, "validation": 8, "epochs": 2, "batch_size": 16}
    result = pretrain("smolvlm_mini", folder, progress=False, **settings)
    assert describe(folder)["accuracy"] == result
    assert describe(folder)["epochs_done"] == 2
    assert json.loads((folder / "config.json").read_text())["model_type"] == "idefics3"
    assert not [file for file in tmp_path.iterdir() if file != folder]
    body: Any = AutoModelForImageTextToText.from_pretrained(folder)
    assert body.lm_head.weight is body.get_input_embeddings().weight
    assert body.config.use_cache
    again = ChatTokenizer(AutoProcessor.from_pretrained(folder))
    assert again(["where is the dog?"])[0].shape[0] == 1
    # As many steps from the same seed give the same weights.
    other = tmp_path / "other"
    pretrain("smolvlm_mini", other, progress=False, **settings)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
