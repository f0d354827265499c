"""Every small model: values from the seed, rows on their own, parts of a pass, variants, picture sizes, refusals."""

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from confed.datasets.scenes import public_split
from confed.federation.params import named_tensors
from confed.federation.specs import frozen_names, model_spec
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.models import create_model, create_tokenizer, mmnasnet
from confed.models.inputs import picture_side
from confed.models.mcan import MCAN, mcan_large, mcan_s_mini
from confed.models.pretrained import describe, packaged, weights_file
from confed.models.region_model import question_tokenizer
from confed.models.tokenizer import WordTokenizer
from confed.prepare.pretraining import MINIS, accuracy
from confed.recipes.recipe import load_recipe, parse_recipe
from confed.registry import models
from confed.runs.run import run
from confed.tasks.generation import Generation
from larger_values import spread
from refusals import refuses

ANSWERS, VOCABULARY, ROWS = 7, 60, 3
WORDS = ("text", "text_mask")
REGIONS = ("regions", *WORDS)
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "vilt_tiny": (("image", *WORDS), {}),
    "vault_mini": (("image", *WORDS), {"pretrained": False}),
    "vit_mini": (("image",), {"pretrained": False}),
    "albef_mini": (("image", *WORDS, "answer_tokens"), {"pretrained": False}),
    "blip_mini": (("image", *WORDS, "answer_tokens"), {"pretrained": False}),
    "cnn_words": (("image", *WORDS), {}),
    "ctran_mini": (("image",), {"graph": True}),
    "ctran_text_mini": (WORDS, {}),
    "resnet_multilabel_mini": (("image",), {}),
    "modal_transformer_tiny": (("small", *WORDS), {"modalities": ("image", "text")}),
    "mmfed_tiny": (("small", *WORDS), {"modalities": ("image", "text")}),
    "late_fusion_mini": (("small", *WORDS), {"modalities": ("image", "text")}),
    "butd_mini": (REGIONS, {}), "ban_mini": (REGIONS, {}), "mfb_mini": (REGIONS, {}),
    "mcan_s_mini": (REGIONS, {}), "mcan_l_mini": (REGIONS, {}),
    "mmnas_s_mini": (("boxes", *REGIONS), {}), "mmnas_l_mini": (("boxes", *REGIONS), {}),
}  # fmt: skip
"""Name -> keys of a batch that it needs, and options."""
READS_ABSENT = ("modal_transformer_tiny", "mmfed_tiny", "late_fusion_mini")


def build(name: str, **options: Any) -> Any:
    return create_model(name, answers=ANSWERS, vocab_size=VOCABULARY, **MODELS[name][1], **options).eval()


def batch_of(name: str) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    mask = (torch.arange(9) < torch.tensor([[5], [9], [3]])).long()
    low = torch.rand(ROWS, 6, 2, generator=rng) / 2
    whole = {
        "image": torch.randint(0, 256, (ROWS, 3, 64, 64), generator=rng, dtype=torch.uint8),
        "text": torch.randint(7, VOCABULARY, (ROWS, 9), generator=rng) * mask,
        "text_mask": mask,
        "answer_tokens": torch.tensor([[2, 9, 3, 0], [2, 11, 12, 3], [2, 8, 3, 0]]),
        "regions": torch.randn(ROWS, 6, 64, generator=rng),
        "boxes": torch.cat([low, low + 0.3], -1),
    }
    whole["small"] = whole["image"][:, :, :28, :28]
    return {"image" if key == "small" else key: whole[key] for key in MODELS[name][0]}


@pytest.mark.parametrize("name", MODELS)
def test_values_come_from_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    model, twin, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    again = twin.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        output = model(batch_of(name))
        assert output.logits.shape[-1] in (ANSWERS, VOCABULARY)
        assert torch.equal(output.logits, twin(batch_of(name)).logits)
        assert not torch.equal(output.logits, other(batch_of(name)).logits)
        assert torch.equal(output.logits, model(batch_of(name) | {"unread": torch.zeros(1)}).logits)


@pytest.mark.parametrize("name", MODELS)
def test_examples_do_not_see_each_other(name: str) -> None:
    model, batch = build(name), batch_of(name)
    with torch.no_grad():
        whole = model(batch)
        rows = [model({key: value[i : i + 1] for key, value in batch.items()}) for i in range(ROWS)]
    torch.testing.assert_close(whole.features, torch.cat([row.features for row in rows]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.logits, torch.cat([row.logits for row in rows]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_other_values_for_one_call(name: str) -> None:
    model, other, batch = build(name, seed=3), build(name, seed=4), batch_of(name)
    with torch.no_grad():
        expected = model(batch).logits
        swapped = torch.func.functional_call(model, other.state_dict(), (batch,))
        torch.testing.assert_close(swapped.logits, other(batch).logits, rtol=1e-5, atol=1e-6)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(batch).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_it_says_which_input_is_missing(name: str) -> None:
    if name in READS_ABSENT:
        with pytest.raises(ValueError, match="at least one of image, text, got label"):
            build(name)({"label": torch.zeros(1)})
        return
    batch = batch_of(name)
    for key in set(batch) - {"answer_tokens"}:
        with pytest.raises(ValueError, match=f"needs the key '{key}', got "):
            build(name)({other: value for other, value in batch.items() if other != key})


REFUSED_BATCHES: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("vilt_tiny", {"image": torch.zeros(3, 3, 48, 64)}, "image must have shape (B, 3, 64, 64), got (3, 3, 48, 64)"),
    ("vilt_tiny", {"text": torch.zeros(3, 17)}, "text must have shape (3, at most 16), got (3, 17)"),
    ("vilt_tiny", {"text_mask": torch.ones(3, 3)}, "text_mask must have the shape of text (3, 9), got (3, 3)"),
    ("vit_mini", {"image": torch.zeros(4, 3, 32, 32)}, "image must have shape (B, 3, 64, 64), got (4, 3, 32, 32)"),
    ("albef_mini", {"image": torch.zeros(3, 3, 8, 8)}, "image must have shape (B, 3, 64, 64), got (3, 3, 8, 8)"),
    ("albef_mini", {"text": torch.zeros(3, 17)}, "text must have shape (3, at most 16), got (3, 17)"),
    ("albef_mini", {"text_mask": torch.ones(3, 4)}, "text_mask must have the shape of text"),
    ("albef_mini", {"answer_tokens": torch.zeros(3, 1)}, "answer_tokens must have shape (3, at least 2)"),
    ("albef_mini", {"answer_tokens": None}, "got none: task.name must be 'generation'"),
    ("ctran_mini", {"known": torch.zeros(3, 4)}, "known must have shape (3, 7), got (3, 4)"),
    ("ctran_mini", {"image": torch.zeros(3, 3, 32, 32)}, "image must have shape"),
    ("ctran_text_mini", {"text": torch.ones(3, 33)}, "text must have shape (3, at most 32), got (3, 33)"),
    ("ctran_text_mini", {"known": torch.zeros(3, 2)}, "known must have shape"),
    ("mmnas_s_mini", {"regions": torch.ones(3, 6, 32)}, "regions must have shape (B, R, 64), got (3, 6, 32)"),
    ("mmnas_s_mini", {"text": torch.zeros(3, 15)}, "text must have shape (3, at most 14), got (3, 15)"),
    ("mmnas_s_mini", {"text_mask": torch.ones(3, 8)}, "text_mask must have the shape of text (3, 9), got (3, 8)"),
    ("mmnas_s_mini", {"boxes": torch.zeros(3, 6, 5)}, "boxes must have shape (3, 6, 4), got (3, 6, 5)"),
]
"""Model, what of its batch is changed (None: taken away), message."""


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED_BATCHES)
def test_batches_that_do_not_fit_are_refused(name: str, changes: dict[str, Tensor | None], message: str) -> None:
    changed = {key: value.long() if key == "text" and value is not None else value for key, value in changes.items()}
    batch = {key: value for key, value in (batch_of(name) | changed).items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name)(batch)


HF, CLIP = {"source": "tiny:llava"}, {"source": "tiny:clip", "answers": ("a dog", "a cat")}
REFUSED_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("vilt_tiny", {"trainable": "some"}, "trainable must be one of all, top, head"),
    ("vilt_tiny", {"answers": 0}, "answers must be at least 1, got 0"),
    ("vilt_tiny", {"heads": ("boxes",)}, "heads must be among nlvr2, entailment, choice, got 'boxes'"),
    ("vit_mini", {"trainable": "prefix"}, "'prefix' does not work with Vit"),
    ("vit_mini", {"answers": 0}, "answers must be at least 1, got 0"),
    ("albef_mini", {"k": 0}, "k must be at least 1, got 0"),
    ("blip_mini", {"trainable": "prefix"}, "prefix' does not work with Blip: its attention takes no keys"),
    ("cnn_words", {"answers": 0}, "answers must be at least 1, got 0"),
    ("cnn_words", {"image_size": 60}, "image_size must be a multiple of 16 with 4 convolutions, got 60"),
    ("cnn_words", {"channels": ()}, "channels must name at least one convolution, got none"),
    ("cnn_words", {"trainable": "adapters"}, "model.trainable must be one of all, head, got 'adapters'"),
    ("ctran_mini", {"swap_states": True}, "model.swap_states is about a file"),
    ("ctran_mini", {"learn_labels": True}, "model.learn_labels is about a file"),
    ("ctran_mini", {"norm": "layer"}, "model.norm must be one of batch, frozen, group, got 'layer'"),
    ("ctran_mini", {"norm": "frozen"}, "needs pretrained weights"),
    ("ctran", {"attention_heads": 5}, "must divide the width 512, got 5"),
    ("resnet_multilabel_mini", {"answers": 0}, "answers must be at least 1"),
    ("ctran_text_mini", {"attention_heads": 3}, "attention_heads must divide the width 64, got 3"),
    ("ctran_text_mini", {"layers": 0}, "model.layers must be at least 1, got 0"),
    ("ctran_text_mini", {"word_layers": -1}, "model.word_layers must not be negative, got -1"),
    ("ctran_text_mini", {"learn_labels": True}, "needs model.embeddings"),
    ("butd_mini", {"answers": ()}, "answers must be at least 1, got 0"),
    ("butd_mini", {"glove": "vectors.txt"}, "model.glove needs the words of the 60 token ids, got 0 words"),
    ("mmnas_large", {"head_width": 100}, "model.head_width must divide the width 1024, got 100"),
    ("mmnas_large", {"picture_side": -1}, "model.picture_side must not be negative, got -1"),
    ("mmfed_mini", {"modalities": ("smell",)}, "model.modalities must name some of"),
    ("mmfed_mini", {"answers": 0}, "answers must be at least 1, got 0"),
    ("mmfed_mini", {"attention_heads": 5}, "model.attention_heads must divide the width 48, got 5"),
    ("modal_transformer_mini", {"modalities": ()}, "image, text, audio, series, each once; got none"),
    ("modal_transformer_mini", {"modalities": ("touch",)}, "got 'touch'"),
    ("modal_transformer_mini", {"modalities": ("series",)}, "the series' channels must be at least 1, got 0"),
    ("modal_transformer_mini", {"patch": 5}, "model.patch must divide the pictures' sides 28 x 28, got 5"),
    ("modal_transformer_mini", {"sound": "mp3"}, "model.sound must be one of log_mel, waveform, got 'mp3'"),
    ("modal_transformer_mini", {"word_vectors": "glove"}, "must be one of learned, frozen, got 'glove'"),
    ("modal_transformer_mini", {"vector": "none"}, "model.vector must be one of learned, one_hot, got 'none'"),
    ("modal_transformer_mini", {"vector": "one_hot", "vector_width": 3}, "at least 4 for 'one_hot' vectors"),
    ("modal_transformer_mini", {"vector_width": 64}, "less than model.width, got 64 of 64"),
    ("modal_transformer_mini", {"attention_heads": 5}, "model.attention_heads must divide the width 64, got 5"),
    ("modal_transformer_mini", {"answers": 0}, "answers must be at least 1, got 0"),
    ("modal_transformer_mini", {"max_length": 0}, "model.max_length must be at least 1, got 0"),
    ("modal_transformer_mini", {"audio_seconds": 0.0}, "model.audio_seconds"),
    ("modal_transformer_mini", {"layers": 0}, "model.layers must be at least 1, got 0"),
    ("modal_transformer_mini", {"block": "postnorm"}, "model.block must be one of magneto, prenorm, got 'postnorm'"),
    ("modal_transformer_mini", {"magneto_init": "bert"}, "model.magneto_init must be one of torchscale, paper"),
    ("clip", {**CLIP, "answers": 3}, "reads the names of classes, got only their number, 3"),
    ("clip", {**CLIP, "answers": ("a dog", "")}, "class names must not be empty, got 'a dog', ''"),
    ("clip", {**CLIP, "answers": ("a_dog", "a dog")}, "got 'a dog' twice"),
    ("clip", {**CLIP, "answers": ("dog", "x" * 80)}, "reads at most 64 tokens"),
    ("clip", {**CLIP, "template": "a photo"}, "must have {} once"),
    ("clip", {**CLIP, "context": 0}, "at least 1 vector, got 0"),
    ("clip", {**CLIP, "context": " "}, "must be words, or a number of vectors"),
    ("clip", {**CLIP, "head": "linear"}, "has no effect with model.head = 'linear'"),
    ("clip", {**CLIP, "head": "attention"}, "has no effect with model.head = 'attention'"),
    ("clip", {**CLIP, "head": "cosine"}, "must be one of text, linear, attention, adapter, got 'cosine'"),
    ("clip", {**CLIP, "source": "tiny:nothing"}, "there are tiny:clip, tiny:siglip"),
    ("clip", {**CLIP, "source": "nowhere"}, "there is no folder 'nowhere'"),
    ("hf", {"source": "tiny:nothing"}, "there are tiny:idefics3"),
    ("hf", {"source": "./not/there"}, "there is no folder './not/there'"),
    ("hf", {**HF, "parts": ("tail",)}, "model.parts must be of language, connector, vision, got tail"),
    ("hf", {**HF, "base": "fp8"}, "model.base must be one of fp32, bf16, int8, nf4, got 'fp8'"),
    ("hf", {**HF, "trainable": "prefix"}, "'prefix' does not work with HuggingFaceVLM"),
    ("hf", {**HF, "trainable": "prompt", "parts": ("vision",)}, "'prompt' does not work with HuggingFaceVLM"),
    ("hf", {**HF, "attention": "flash"}, "model.attention must be one of exact, fast, got"),
]
"""Model, options, message."""


@pytest.mark.parametrize(("name", "options", "message"), REFUSED_OPTIONS)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    usual = {"answers": ANSWERS, "vocab_size": VOCABULARY, **MODELS.get(name, ((), {}))[1]}
    refuses(re.escape(message), create_model, name, **usual | options)


@pytest.mark.parametrize("name", MODELS)
def test_its_tokenizer_reads_what_it_reads(name: str) -> None:
    tokenizer: Any = create_tokenizer(name, ("red", "ball"), max_length=9)
    text, mask = tokenizer(["a red ball"])
    assert text.shape == mask.shape == (1, 9)
    if "text" not in MODELS[name][0] or "answer_tokens" in MODELS[name][0]:
        return
    model: Any = create_model(name, answers=("yes", "no"), vocab_size=tokenizer.vocab_size, **MODELS[name][1])
    batch = batch_of(name) | {"text": text.expand(ROWS, -1), "text_mask": mask.expand(ROWS, -1)}
    assert model(batch).logits.shape == (ROWS, 2)
    assert isinstance(tokenizer, WordTokenizer)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap over fused attention
@pytest.mark.parametrize(
    ("name", "trainable"), [("vilt_tiny", "all"), ("vit_mini", "adapters"), ("vault_mini", "adapters")]
)
def test_per_sample_gradients_through_vmap_equal_a_loop(name: str, trainable: str) -> None:
    model, rows = build(name, trainable=trainable), batch_of(name)
    parameters = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}

    def loss(params: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        one = {key: value[None] for key, value in row.items()}
        return torch.func.functional_call(model, params, (one,)).logits.logsumexp(1).sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, rows)
    single = torch.func.grad(loss)(parameters, {key: value[2] for key, value in rows.items()})
    for key, value in single.items():
        torch.testing.assert_close(together[key][2], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vilt_tiny", "vit_mini", "vault_mini", "albef_mini", "blip_mini", "mcan_s_mini"])
def test_two_parts_of_a_pass_and_two_blends_of_adapters_at_once(name: str) -> None:
    model, batch = build(name, trainable="adapters"), batch_of(name)
    model.adapters.add("second", torch.Generator().manual_seed(1))
    spread(model, 0.1)
    assert model.prefix_is_frozen
    assert not build(name).prefix_is_frozen
    blends: tuple[dict[str, float], ...] = ({"adapter": 1.0}, {"adapter": 0.5, "second": 0.5})
    with torch.no_grad():
        state = model.prefix(batch)
        torch.testing.assert_close(model.suffix(state).logits, model(batch).logits)
        alone: list[Tensor] = []
        for blend in blends:
            with model.adapters.using(blend):
                alone.append(model(batch).logits)
        with model.adapters.using(*blends):
            together = model.suffix(model.repeat(state, 2)).logits
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


TOPS = {
    "vilt_tiny": ("vilt.encoder.layer.1.", "vilt.layernorm.", "vilt.pooler."),
    "vit_mini": ("vit.layers.3.", "vit.layernorm."),
    "vault_mini": ("vilt.encoder.layer.2.", "vilt.layernorm.", "vilt.pooler."),
    "blip_mini": ("text_decoder.bert.encoder.layer.1.",),
    "albef_mini": ("text_decoder.bert.encoder.layer.1.",),
}
HEADS = {"blip_mini": "text_decoder.cls.", "albef_mini": "text_decoder.cls."}


@pytest.mark.parametrize("trainable", ["all", "top", "head", "adapters", "bias", "lora", "ia3", "prompt"])
@pytest.mark.parametrize("name", TOPS)
def test_what_learns_follows_from_trainable_and_gets_gradients(name: str, trainable: str) -> None:
    model, batch = build(name, trainable=trainable), batch_of(name)
    names = {key for key, _ in model.named_parameters()}
    added = {"adapters": ".adapter.", "bias": "bias", "lora": "lora_", "ia3": "ia3_", "prompt": "prompts."}
    chosen = {key for key in names if trainable in added and added[trainable] in key}
    if trainable in ("all", "top"):
        chosen = {key for key in names if trainable == "all" or key.startswith(TOPS[name])}
    expected = chosen | {key for key in names if key.startswith(HEADS.get(name, "classifier."))}
    assert {key for key, value in model.named_parameters() if value.requires_grad} == expected
    assert expected == names - model.frozen
    assert model.frozen | expected >= set(model.state_dict())
    assert chosen or trainable == "head"
    model(batch).logits.square().sum().backward()
    assert {key for key, value in model.named_parameters() if value.grad is not None} == expected


NAMES = [name for name in models.names() if model_spec(models[name]).reads == "regions"]


@pytest.mark.parametrize("name", NAMES)
def test_variants_look_like_written_functions(name):
    variant = models[name]
    parameters = inspect.signature(variant).parameters
    assert variant.__name__ == name
    assert models[f"{variant.__module__}:{name}"] is variant
    assert get_type_hints(variant) == {
        **{key: parameter.annotation for key, parameter in parameters.items()},
        "return": inspect.signature(variant).return_annotation,
    }
    documentation = inspect.getdoc(variant) or ""
    assert [key for key in parameters if f"\n    {key}: " not in documentation] == []
    assert documentation.partition("\n")[0].endswith(".")
    assert model_spec(variant).tokenizer is question_tokenizer


def test_there_are_fifteen_region_models():
    assert len(NAMES) == 15


def test_defaults_and_fixed_sizes_of_a_variant():
    parameters = inspect.signature(mcan_large).parameters
    assert parameters["dropout"].default == 0.1
    assert parameters["region_width"].default == 2048
    assert inspect.signature(mcan_s_mini).parameters["region_width"].default == 64
    assert "hidden" not in parameters  # fixed by the variant
    model = mcan_s_mini(3, 20, region_width=5, dropout=0.25)
    assert isinstance(model, MCAN)
    assert (model.hidden, model.region_width) == (64, 5)
    assert {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)} == {0.25}


def test_options_of_the_class_stand_before_those_of_finetuning():
    names = list(inspect.signature(mmnasnet.mmnas_large).parameters)
    assert names[-6:] == ["head_width", "flat_hidden", "picture_side", "trainable", "peft", "seed"]
    assert "head_width" not in inspect.signature(mmnasnet.mmnas_s_mini).parameters


def test_wrong_arguments_name_the_variant():
    with pytest.raises(TypeError, match=r"^mcan_s_mini\(\) got an unexpected keyword argument 'hidden'$"):
        mcan_s_mini(3, 20, hidden=8)
    with pytest.raises(TypeError, match=r"^mcan_s_mini\(\) missing a required argument: 'answers'$"):
        mcan_s_mini()


PROCESSORS: dict[str, tuple[dict[str, Any], int | None]] = {
    "squeezed": ({"size": {"height": 384, "width": 384}}, 384),
    "number": ({"size": 224}, 224),
    "cropped": ({"do_center_crop": True, "size": {"shortest_edge": 256}, "crop_size": {"height": 224}}, 256),
    "not cropped": ({"do_center_crop": False, "size": {"shortest_edge": 336}, "crop_size": {"height": 224}}, 336),
    "tiles": ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 512),
    "areas": ({"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_side_of_a_processor(kind: str, file: str, tmp_path: Path):
    content, side = PROCESSORS[kind]
    whole = {"image_processor": content} if file == "processor_config.json" else content
    (tmp_path / file).write_text(json.dumps(whole), encoding="utf-8")
    assert picture_side({"source": str(tmp_path)}) == side


def test_sides_of_packaged_and_small_models():
    sides = [picture_side({"source": source}) for source in ("smolvlm_mini", "clip_mini", "tiny:siglip", "")]
    assert sides == [64, 64, 32, None]


DATA = '[data]\nname = "chat_records"\nroot = "."\n'


def test_pictures_have_the_models_size_where_a_recipe_gives_none(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 384, "width": 384}}', encoding="utf-8")
    head = '[algorithm]\nname = "fedavg"\n'
    model = f'{head}[model]\nname = "hf"\nsource = {json.dumps(str(tmp_path))}\n[task]\nname = "chat"\n'
    recipe = parse_recipe(model + DATA)
    assert recipe.sections["data"]["image_size"] == 384
    assert parse_recipe(recipe.to_toml()).sections["data"]["image_size"] == 384
    assert parse_recipe(f"{model}{DATA}image_size = 128").sections["data"]["image_size"] == 128
    assert (
        parse_recipe(f'{head}[model]\nname = "vilt_mini"\n{DATA}[task]\nname = "vqa"').sections["data"]["image_size"]
        == 224
    )
    changed = parse_recipe(model + DATA, overrides=['model.source="tiny:idefics3"'])
    assert changed.sections["data"]["image_size"] == 32


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


def test_held_out_questions_are_answered_in_both_ways() -> None:
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
