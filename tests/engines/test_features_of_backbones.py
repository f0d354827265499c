"""Every backbone with frozen layers in front keeps what they make, and its numbers are those without."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.regions import HeldRegions
from confed.data.table import Table
from confed.engines.local import Members, Setup
from confed.federation.frozen_features import FeatureSettings, FrozenFeatures
from confed.federation.local import Local
from confed.federation.protocols import Task
from confed.models import create_model, create_tokenizer
from confed.models.finetuning import Finetuning
from confed.tasks.contrastive import Contrastive
from confed.tasks.generation import Generation
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from feature_runs import same

NAMES = ("red", "green", "dark blue", "yellow")
SIZES = ((6, 4, 0), (4, 4, 0))
"""Examples of each client: to train, to validate, to test."""

Make = Callable[[int, int, bool], Table]
"""A table from its number of rows, a seed, and whether it is to train on."""


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests may take less time than a look-up."""
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def questions(rows: int, seed: int, training: bool, *, side: int = 64, answers: bool = False) -> Table:
    """Pictures with questions; with ``answers`` what is to be learned are tokens."""
    rng = rng_of(seed)
    label = torch.randint(0, 4, (rows,), generator=rng)
    columns = {
        "text": torch.randint(5, 30, (rows, 6), generator=rng),
        "text_mask": torch.ones(rows, 6, dtype=torch.int64),
        "label": label,
    }
    if answers and training:
        columns["answer_tokens"] = TOKENS[label]
    images = torch.randint(0, 256, (rows, 3, side, side), generator=rng).to(torch.uint8)
    return Table(images, torch.arange(rows), columns)


TOKENS = torch.tensor([[2, 7, 3, 0], [2, 8, 9, 3], [2, 10, 3, 0], [2, 11, 3, 0]])


def labels(rows: int, seed: int, training: bool) -> Table:
    """Pictures with several labels each."""
    table = questions(rows, seed, training)
    assert isinstance(table.images, Tensor)
    return Table(table.images, table.image_index, {"labels": torch.rand(rows, 4, generator=rng_of(seed)).round()})


def regions(rows: int, seed: int, training: bool) -> Table:
    """Questions about regions."""
    rng, columns = rng_of(seed), questions(rows, seed, training).columns
    low = torch.rand(rows, 5, 2, generator=rng) / 2
    boxes = torch.cat([low, low + 0.3], -1)
    return Table(
        None, torch.arange(rows), columns, HeldRegions(torch.randn(rows, 5, 64, generator=rng).numpy(), boxes.numpy())
    )


def prompts(source: str) -> tuple[Make, Task]:
    """Prompts and answers of a tokenizer of a chat model, and the task."""
    tokenizer: Any = create_tokenizer("hf", (), source=source)
    answers = tokenizer.answers(list(NAMES))

    def made(rows: int, seed: int, training: bool) -> Table:
        table = questions(rows, seed, training, side=40)
        text, mask = tokenizer([f"what is {number}?" for number in range(rows)])
        columns = {"text": text, "text_mask": mask, "label": table.columns["label"]}
        if training:
            columns["answer_tokens"] = answers[columns["label"]]
        return replace(table, columns=columns)

    return made, Generation(4).choosing(answers)


def federation(make: Make, task: Task, build: Callable[[], nn.Module], size: int = 3) -> Setup:
    """Two clients, two rounds of two epochs, batches of ``size``."""
    data = {
        f"{i}": TableData(*(make(n, 10 * i + part, part == 0) for part, n in enumerate(sizes)))
        for i, sizes in enumerate(SIZES)
    }
    local = Local(epochs=2, batch_size=size, lr=1e-2, eval_batch_size=size)
    return Setup(FedAvg(), Members(data), task, local, build, 2, features=FeatureSettings(10**8))


def of(name: str, make: Make, task: Task, size: int = 3, **options: Any) -> Setup:
    return federation(make, task, partial(create_model, name, answers=NAMES, vocab_size=64, **options), size)


SAID = Generation(4).choosing(TOKENS)
WRITTEN: Make = partial(questions, answers=True)
NARROW = Finetuning(rank=2, reduction=8)


@pytest.mark.parametrize("name", ["albef_mini", "blip_mini"])
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("head", "question"),
        ("top", "question"),
        ("prompt", "picture"),
        ("adapters", "picture block 1 without adapter"),
        ("lora", "picture embedding"),
        ("ia3", "picture embedding"),
    ],
)
def test_picture_encoder_and_question_of_models_that_write_answers(name: str, kind: str, stage: str):
    counts = same(of(name, WRITTEN, SAID, trainable=kind, peft=NARROW, pretrained=False))
    assert counts.stage == stage
    assert counts.exact
    assert not counts.reason
    assert counts.reused > 10  # 10 examples are trained on four times, 8 are evaluated twice with two models


def test_lora_in_the_texts_alone_keeps_the_whole_picture_encoder():
    texts = Finetuning(rank=2, targets=("attention.self.query",))
    assert same(of("albef_mini", WRITTEN, SAID, trainable="lora", peft=texts, pretrained=False)).stage == "picture"


@pytest.mark.parametrize(
    ("source", "kind"),
    [("tiny:idefics3", kind) for kind in ("lora", "adapters", "ia3", "top")] + [("tiny:llava", "lora")],
)
def test_picture_encoder_of_chat_models_whose_language_part_learns(source: str, kind: str):
    counts = same(of("hf", *prompts(source), source=source, trainable=kind, peft=NARROW))
    assert counts.stage == "picture encoder and connector"
    assert counts.exact
    assert counts.reused > 10


def test_picture_encoder_of_a_chat_model_that_learns_is_not_kept():
    made = of("hf", *prompts("tiny:idefics3"), source="tiny:idefics3", peft=NARROW, parts=("language", "vision"))
    assert same(made).reason == "the first stage (picture encoder and connector) is trained"


@pytest.mark.parametrize("norm", ["frozen", "group"])
def test_plane_of_a_frozen_resnet(norm: str):
    for name in ("ctran_mini", "resnet_multilabel_mini"):
        counts = same(of(name, labels, Multilabel(4), norm=norm, pretrained=True, picture_frozen=True))
        assert counts.stage == "last plane of the ResNet"
        assert counts.exact
        assert counts.reused > 10
    with pytest.raises(ValueError, match=r"set model\.norm to 'frozen' or 'group'"):
        create_model("ctran_mini", answers=4, vocab_size=0, picture_frozen=True)


@pytest.mark.parametrize("name", ["mcan_s_mini", "butd_mini", "ban_mini", "mfb_mini", "mmnas_s_mini"])
@pytest.mark.parametrize("kind", ["head", "top"])
def test_words_and_regions(name: str, kind: str):
    counts = same(of(name, regions, VQA(4), size=4, trainable=kind))
    assert counts.stage == ("words and regions" if kind == "head" else "words")
    assert counts.exact
    if kind == "head" and name in ("butd_mini", "ban_mini"):  # which have dropout in front of the head
        assert any("random numbers" in note for note in counts.notes)
    assert counts.reused > 10


@pytest.mark.parametrize("kind", ["adapters", "lora", "ia3"])
def test_words_of_a_region_model_with_few_added_parameters(kind: str):
    counts = same(of("mcan_s_mini", regions, VQA(4), size=4, trainable=kind, peft=NARROW))
    assert (counts.stage, counts.exact) == ("words", True)
    assert counts.reused > 10


@pytest.mark.parametrize(("name", "stage"), [("mcan_s_mini", "words and regions"), ("vilt_mini", "pooling")])
def test_backbone_of_contrastive_answers(name: str, stage: str):
    make: Make = regions if name == "mcan_s_mini" else questions
    task = Contrastive(4, width=6, hidden=7, embedding=5)
    options = {} if name == "mcan_s_mini" else {"pretrained": False}

    def build() -> nn.Module:
        model = create_model(name, answers=NAMES, vocab_size=64, trainable="head", **options)
        return task.wrap(model, NAMES, rng_of(0))

    counts = same(federation(make, task, build, size=4))
    assert (counts.stage, counts.exact) == (stage, True)
    assert counts.reused > 10


@pytest.mark.parametrize("source", ["clip_mini", "tiny:siglip"])
@pytest.mark.parametrize("options", [{"trainable": "prompt"}, {"trainable": "head", "head": "linear"}])
def test_pictures_of_dual_encoders(source: str, options: dict[str, Any]):
    counts = same(of("clip", partial(questions, side=32), VQA(4), source=source, **options))
    assert (counts.stage, counts.exact) == ("features of pictures", True)
    assert counts.reused > 10


def test_features_below_the_head_of_the_small_convolutional_model():
    counts = same(of("cnn_words", questions, VQA(4), trainable="head"))
    assert (counts.stage, counts.exact) == ("features", True)
    assert counts.reused > 10


def test_clip_below_its_last_block_in_a_multimodal_transformer(tmp_path: Path):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from confed.models.modal_transformer import assemble

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    with torch.random.fork_rng():
        CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=2, image_size=28, patch_size=7, **sizes)).save_pretrained(
            tmp_path
        )
    small = {"width": 16, "vector_width": 4, "layers": 1, "attention_heads": 2, "hidden": 32}
    build = partial(assemble, 4, 64, modalities=("image", "text"), clip=True, pretrained=tmp_path, **small)
    counts = same(federation(partial(questions, side=28), VQA(4), build, size=4))
    assert (counts.stage, counts.exact) == ("CLIP below its last block", True)
    assert counts.reused > 10
