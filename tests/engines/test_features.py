"""Runs with features of frozen layers kept give the numbers of runs without, for every backbone and finetuning."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedp3 import FedP3
from confed.data.examples import TableData
from confed.data.regions import HeldRegions
from confed.data.table import Table
from confed.engines.executor import InProcess, _address
from confed.engines.local import Members, Setup, Simulation, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.frozen_features import FeatureSettings, FrozenFeatures
from confed.federation.local import Local
from confed.federation.protocols import Task
from confed.federation.stages import staged_part
from confed.federation.state import MemoryStore
from confed.models import create_model, create_tokenizer
from confed.models.finetuning import Finetuning
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hf.prompts import ChatTokenizer
from confed.models.hf.tiny import tiny
from confed.recipes.recipe import load_recipe
from confed.runs.run import run as run_recipe
from confed.tasks.contrastive import Contrastive
from confed.tasks.generation import Generation
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from feature_runs import run, same
from matrix_cases import SGD, Chain, Plain, setup_of

KEEP = FeatureSettings(10**8)


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests may take less time than a look-up."""
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


def table(rows: int, seed: int) -> Table:
    rng = torch.Generator().manual_seed(seed)
    columns = {
        "text": torch.randint(5, 30, (rows, 6), generator=rng),
        "text_mask": torch.ones(rows, 6, dtype=torch.int64),
        "label": torch.randint(0, 4, (rows,), generator=rng),
    }
    images = torch.randint(0, 256, (rows, 3, 64, 64), generator=rng).to(torch.uint8)
    return Table(images, torch.arange(rows), columns)


def setup(name: str, algorithm: Algorithm | None = None, **options: Any) -> Setup:
    data = {f"{i}": TableData(table(n, i), table(5, 10 + i), table(6, 20 + i)) for i, n in enumerate((11, 8))}
    build = partial(create_model, name, answers=4, vocab_size=5000, pretrained=False, **options)
    local = Local(epochs=2, batch_size=4, lr=1e-2, eval_batch_size=4)
    return Setup(algorithm or FedAvg(), Members(data), VQA(4), local, build, 3, features=KEEP)


BACKBONES = {"vilt_mini": {}, "vault_mini": {"language_frozen": True}, "vit_mini": {}}
STAGES = {
    ("vilt_mini", "head"): "pooling",
    ("vilt_mini", "top"): "block 2",
    ("vilt_mini", "adapters"): "block 1 without adapter",
    ("vilt_mini", "lora"): "embeddings",
    ("vilt_mini", "ia3"): "embeddings",
    ("vault_mini", "head"): "pooling",
    ("vault_mini", "top"): "block 2",
    ("vault_mini", "adapters"): "block 1 without adapter",
    ("vault_mini", "lora"): "BERT",
    ("vault_mini", "ia3"): "BERT",
    ("vit_mini", "head"): "normalisation",
    ("vit_mini", "top"): "block 3",
    ("vit_mini", "adapters"): "block 1 without adapter",
    ("vit_mini", "lora"): "embeddings",
    ("vit_mini", "ia3"): "embeddings",
}


# The other backbones with the kinds of fine-tuning of which nothing is left to them alone.
REPEATED = {("vault_mini", "adapters"), ("vault_mini", "ia3"), ("vit_mini", "head"), ("vit_mini", "lora")}


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=[pytest.mark.slow] * (case in REPEATED)) for case in STAGES]
)
def test_kept_features_change_no_number_of_any_backbone(name: str, kind: str):
    counts = same(replace(setup(name, trainable=kind, **BACKBONES[name]), rounds=2))
    assert counts.stage == STAGES[name, kind]
    # 19 examples are trained on four times; 10 are evaluated twice with two models.
    assert counts.reused > 40
    assert counts.exact
    assert not counts.reason


@pytest.mark.parametrize("kind", ["all", "bias", "prompt"])
def test_finetuning_that_begins_with_the_embeddings_says_so(kind: str):
    counts = same(replace(setup("vilt_mini", trainable=kind), rounds=1))
    assert counts.reason == "the first stage (embeddings) is trained"
    assert counts.reused == 0


def test_teacher_continues_from_the_same_features():
    counts = same(setup("vilt_mini", FedP3(), trainable="top"))
    assert counts.reused > 100  # training, evaluation and the teacher


def test_dropout_in_frozen_layers_keeps_evaluations_only():
    counts = same(setup("vilt_mini", trainable="top", dropout=0.1))
    assert "draw random numbers" in counts.notes[0]
    assert 0 < counts.reused <= 60  # ten examples, two models, three rounds


def test_mirrored_pictures_are_other_examples():
    given = setup("vit_mini", trainable="top")
    counts = same(replace(given, local=replace(given.local, augment="flip")))
    assert counts.reused > 30
    assert counts.computed > 2 * 19


def test_worker_processes_and_the_next_run_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.workers.WRITTEN_AFTER", 0.0)
    given = replace(setup("vilt_mini", trainable="top"), features=FeatureSettings(10**8, tmp_path / "features", 10**9))
    first = same(given, workers=2)
    assert first.reused > 50
    assert first.exact
    assert not first.notes
    folder = next((tmp_path / "features").iterdir())
    assert len(list(folder.glob("*.safetensors"))) > 0
    again = same(given)
    assert again.computed < 60 < again.reused  # what is computed is compared


def test_stale_file_is_found_out_and_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.executor.WRITTEN_AFTER", 0.0)
    given = replace(setup("vilt_mini", trainable="top"), features=FeatureSettings(10**8, tmp_path / "features", 10**9))
    run(given)
    # As if the weights had been others: the same name, other values.
    monkeypatch.setattr("confed.engines.executor._address", lambda *_: next((tmp_path / "features").iterdir()).name)
    other = replace(given, build=partial(given.build, seed=1))
    counts = same(other)
    assert any("stale" in note for note in counts.notes)
    assert counts.reused > 50


def test_different_weights_or_shapes_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.engines.executor.WRITTEN_AFTER", 0.0)
    keep = FeatureSettings(10**8, tmp_path, 10**9)
    for seed, kind, folders in ((0, "top", 1), (1, "top", 2), (1, "head", 3), (0, "top", 3)):
        run(replace(setup("vilt_mini", trainable=kind, seed=seed), features=keep, rounds=1))
        assert len(list(tmp_path.iterdir())) == folders


def test_final_examination_keeps_what_enough_models_read():
    given = setup("vilt_mini", trainable="head")
    workspace = Workspace(given.model())
    executor = InProcess(given, workspace)
    with Simulation(given, MemoryStore(), executor) as simulation:
        controls: list[Any] = [("0", {}, {"control": c}) for c in ("permuted_image", "blank_image", "permuted_text")]
        own: list[Any] = [("0", {}, {}), ("1", {}, {})]
        once = [message.scalars for message in simulation.examine([*controls, *own], 5)]
        assert (executor.features.computed, executor.features.held) == (0, 0)
        # 6 examples in batches of 4 and 2; each is computed, checked, and after that served to the other models.
        often = [message.scalars for message in simulation.examine(own[:1] * 6, 5)]
    assert executor.features.computed == 12
    assert executor.features.reused == 24
    assert often == [once[3]] * 6


# Other backbones --------------------------------------------------------------------------------------------------

NAMES = ("red", "green", "dark blue", "yellow")
SIZES = ((6, 4, 0), (4, 4, 0))
"""Examples of each client: to train, to validate, to test."""

Make = Callable[[int, int, bool], Table]
"""A table from its number of rows, a seed, and whether it is to train on."""


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


WRITERS = {
    "head": "question",
    "top": "question",
    "prompt": "picture",
    "adapters": "picture block 1 without adapter",
    "lora": "picture embedding",
    "ia3": "picture embedding",
}
"""Kind of fine-tuning -> the last stage that is kept; every other one of these is slow for one of the two models."""


@pytest.mark.parametrize(
    ("name", "kind", "stage"),
    [pytest.param("albef_mini", *w, marks=[pytest.mark.slow] * (i % 2)) for i, w in enumerate(WRITERS.items())]
    + [pytest.param("blip_mini", *w, marks=[pytest.mark.slow] * (1 - i % 2)) for i, w in enumerate(WRITERS.items())],
)
def test_features_of_models_that_write_answers(name: str, kind: str, stage: str):
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
    [
        ("tiny:idefics3", "adapters"),
        ("tiny:llava", "lora"),
        *[pytest.param("tiny:idefics3", kind, marks=pytest.mark.slow) for kind in ("lora", "ia3", "top")],
    ],
)
def test_features_of_chat_models_whose_language_part_learns(source: str, kind: str):
    counts = same(of("hf", *prompts(source), source=source, trainable=kind, peft=NARROW))
    assert counts.stage == "picture encoder and connector"
    assert counts.exact
    assert counts.reused > 10


def test_picture_encoder_of_a_chat_model_that_learns_is_not_kept():
    made = of("hf", *prompts("tiny:idefics3"), source="tiny:idefics3", peft=NARROW, parts=("language", "vision"))
    assert same(made).reason == "the first stage (picture encoder and connector) is trained"


@pytest.mark.parametrize(("norm", "name"), [("frozen", "ctran_mini"), ("group", "resnet_multilabel_mini")])
def test_plane_of_a_frozen_resnet(norm: str, name: str):
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


def test_features_below_the_head_of_the_convolutional_model():
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


# Addresses of files with features ---------------------------------------------------------------------------------


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


def test_a_finished_run_holds_no_kept_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, release = [], InProcess.release

    def watched(executor: InProcess) -> None:
        features = executor._features
        assert isinstance(features, FrozenFeatures)
        held.append(features.store.used)
        release(executor)
        held.append(features.store.used)
        assert features.store.files is None, "files refer to what wrote them"

    monkeypatch.setattr(InProcess, "release", watched)
    settings = [
        "study.methods=[]",
        "run.workers=1",
        "run.rounds=1",
        "data.train=8",
        "data.test=4",
        "data.validation=4",
        "run.gallery=0",
    ]
    run_recipe(load_recipe("fedvqa_scenes", settings), tmp_path / "run")
    assert held[0] > 0 == held[1]
