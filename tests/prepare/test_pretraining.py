import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command_line import confed as command
from confed.data.encode import encode
from confed.datasets.scenes import ANSWERS, FAMILIES, WORDS, public_split
from confed.models import create_model
from confed.models.pretrained import MINI_WEIGHTS, States, describe, packaged, weights_file
from confed.models.tokenizer import WordTokenizer
from confed.models.vilt import mini_tokenizer, vilt_mini
from confed.prepare.pretraining import MINIS, Tagger, accuracy, minis, pretrain, word_targets
from confed.prepare.pretraining.minis import Settings
from confed.tasks.generation import Generation
from refusals import refuses

SMALL = {"questions": 64, "validation": 16, "epochs": 2, "batch_size": 32, "progress": False}
FILES = [name for name, mini in MINIS.items() if not mini.folder]


def test_word_targets_by_hand():
    # Tokens: 10 dog, 11 cat; 20 red, 21 blue; 30 small, 31 large; 0 nothing.
    words = {
        "noun": torch.tensor([0, 10, 11]),
        "colour": torch.tensor([0, 20, 21]),
        "size": torch.tensor([0, 30, 31]),
        "number": torch.arange(40, 46),
    }
    cells = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("noun", "colour", "size")}
    # Picture 0: a large blue dog in cell 3 (top right) and a small red cat in cell 12 (bottom left).
    # Picture 1: a small red dog in cell 0 and a large red dog in cell 5.
    for picture, cell, noun, colour, size in (
        (0, 3, 1, 2, 2),
        (0, 12, 2, 1, 1),
        (1, 0, 1, 1, 1),
        (1, 5, 1, 1, 2),
    ):
        for name, value in (("noun", noun), ("colour", colour), ("size", size)):
            cells[name][picture, cell] = value
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    cells["right"] = torch.zeros(2, 16, dtype=torch.int64)
    cells["right"][0, 12] = 2
    cells["quadrant"] = (2 * (row >= 2) + (column >= 2)).expand(2, -1)
    text = torch.tensor([[5, 10, 11, 21], [10, 11, 20, 21]])
    targets = word_targets(text, words, cells)
    assert targets["colour"].tolist() == [[-1, 2, 1, -1], [-1, 0, -1, -1]]
    assert targets["size"].tolist() == [[-1, 2, 1, -1], [-1, 0, -1, -1]]
    assert targets["quadrant"].tolist() == [[-1, 1, 2, -1], [-1, -1, -1, -1]]
    assert targets["right"].tolist() == [[-1, 0, 2, -1], [-1, -1, -1, -1]]
    assert targets["noun"].tolist() == [[-1, -1, -1, 1], [-1, -1, -1, 0]]
    assert targets["number"].tolist() == [[-1, -1, -1, 1], [-1, -1, 2, 0]]


def test_tagger_scores_are_products_with_word_embeddings():
    words = {"colour": torch.tensor([0, 2, 1]), "quadrant": torch.tensor([[1, 2], [0, 1], [2, 2], [0, 0]])}
    tagger = Tagger(4, words, torch.Generator().manual_seed(0))
    embeddings = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(2))
    mapped = tagger.layers["patch"](hidden)[0]
    colour = (mapped[1] @ embeddings[[0, 2, 1]].T).log_softmax(0)[2]
    corners = torch.stack([embeddings[i] + embeddings[j] for i, j in ((1, 2), (0, 1), (2, 2), (0, 0))])
    quadrant = (mapped[0] @ corners.T).log_softmax(0)[3]
    targets = {"colour": torch.tensor([[-1, 2]]), "quadrant": torch.tensor([[3, -1]])}
    torch.testing.assert_close(tagger.loss("patch", hidden, targets, embeddings), -colour - quadrant)


def test_tags_of_states_that_a_model_does_not_have_are_left_out():
    words = {"noun": torch.tensor([0, 1]), "colour": torch.tensor([0, 2]), "size": torch.tensor([0, 3])}
    words |= {"quadrant": torch.tensor([[1, 2], [2, 3], [3, 1], [1, 1]]), "number": torch.tensor([0, 1, 2])}
    tagger = Tagger(4, words, torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1)
    embeddings, late = torch.randn(4, 4, generator=rng), torch.randn(1, 2, 4, generator=rng)
    cells = {name: torch.tensor([[1, 0]]) for name in ("noun", "colour", "size", "right", "quadrant")}
    text = torch.tensor([[1, 2]])
    assert tagger.losses(States(words=embeddings), text, cells) == 0
    expected = tagger.loss("late_right", late, {"colour": cells["right"]}, embeddings)
    torch.testing.assert_close(tagger.losses(States(late=late, words=embeddings), text, cells), expected)
    whole = States(early=late, late=late, asked=late, words=embeddings)
    assert tagger.losses(whole, text, cells) > expected


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    state = torch.get_rng_state()
    result = pretrain("vilt_mini", whole, **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert {"overall"} < set(result) <= {*FAMILIES, "overall"}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(minis, "_show", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain("vilt_mini", broken, **(SMALL | {"progress": True}))
    assert describe(broken)["epochs_done"] == 1
    assert pretrain("vilt_mini", broken, **SMALL) == result
    first, second = load_file(whole), load_file(broken)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert describe(whole) == describe(broken)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken.safetensors", "whole.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_every_mini_learns_and_writes_what_its_factory_reads(name, tmp_path):
    file, mini = tmp_path / "weights.safetensors", MINIS[name]
    settings = {"questions": 40, "validation": 8, "epochs": 1, "batch_size": 20, "progress": False}
    result = pretrain(name, file, **settings)
    facts = describe(file)
    assert facts["accuracy"] == result
    assert facts["epochs_done"] == 1
    assert facts.get("start") == ("vilt_mini" if mini.start else None)
    saved = load_file(file)
    vocabulary = len(WordTokenizer(facts["words"]).vocabulary)
    model = create_model(name, answers=facts["answers"], vocab_size=vocabulary, pretrained=file, seed=5)
    state = model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    fresh = create_model(name, answers=facts["answers"], vocab_size=vocabulary, pretrained=False, seed=5).state_dict()
    changed = [key for key in saved if saved[key].is_floating_point() and not torch.equal(saved[key], fresh[key])]
    assert len(changed) > 0.6 * len(saved)
    # Further words get rows of their own behind the known ones.
    wider = create_model(name, answers=3, vocab_size=vocabulary + 2, pretrained=file, seed=5)
    for key, value in wider.state_dict().items():
        if key.endswith("word_embeddings.weight"):
            assert len(value) == vocabulary + 2
            assert torch.equal(value[:vocabulary], saved[key])


@pytest.mark.parametrize("name", [name for name in FILES if packaged(name)])
def test_packaged_weights_answer_questions_they_never_saw(name):
    mini, file = MINIS[name], weights_file(name)
    facts = describe(file)
    assert facts["accuracy"]["overall"] >= mini.bar
    assert facts["settings"] == mini.settings._asdict()
    assert facts["epochs_done"] == mini.settings.epochs
    assert file.stat().st_size <= 3_000_000
    captions = name == "vilt_mlm_mini"  # of which a part is masked, and has no answer
    material = mini.material(name, 1400 if captions else 400, 987)
    words = material.tokenizer.vocab_size
    model: Any = create_model(name, answers=material.answers, vocab_size=words, pretrained=True)
    if material.candidates is not None:
        model.begin(Generation(len(material.answers)).choosing(material.candidates))
    # 400 answers: three standard errors of a share of 0.85 are 0.054. (Average precision of labels varies less.)
    rows = (material.table.columns["label"] >= 0).nonzero()[:, 0] if captions else None
    assert accuracy(model, material.table, material.types, rows)["overall"] >= mini.bar - 0.055


def test_packaged_vilt_mini():
    assert tuple(describe()["answers"]) == ANSWERS
    tokenizer = mini_tokenizer(WORDS)
    examples, _ = public_split(8, seed=987)
    table = encode(examples, tokenizer, ANSWERS, FAMILIES)
    maps = vilt_mini(ANSWERS, tokenizer.vocab_size).attention(table.batch(torch.arange(8)))
    assert maps.shape == (8, 4, 4)


def test_minis_start_from_vilt_mini_part_by_part():
    theirs = load_file(MINI_WEIGHTS)
    block, words = "vilt.encoder.layer.1.", "vilt.embeddings.text_embeddings.word_embeddings.weight"
    size = mini_tokenizer([]).vocab_size
    models = {name: create_model(name, answers=ANSWERS, vocab_size=size, pretrained=False) for name in FILES}
    for name in ("vault_mini", "albef_mini", "blip_mini"):
        minis.copy(models[name], MINIS[name].start)
    vault, albef, blip = (models[name].state_dict() for name in ("vault_mini", "albef_mini", "blip_mini"))
    assert torch.equal(vault["language.embeddings.word_embeddings.weight"], theirs[words])
    assert all(torch.equal(vault[name], theirs[name]) for name in theirs if name in vault)
    assert torch.equal(albef["text_decoder.bert.embeddings.word_embeddings.weight"], theirs[words])
    pairs = [(albef, f"visual_encoder.layers.1.{own}.weight", f"{block}{there}.weight") for own, there in (
        ("attention.q_proj", "attention.attention.query"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc2", "output.dense"),
        ("layernorm_before", "layernorm_before"),
    )]  # fmt: skip
    pairs += [(blip, f"vision_model.encoder.layers.1.{own}.weight", f"{block}{there}.weight") for own, there in (
        ("self_attn.projection", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("layer_norm2", "layernorm_after"),
    )]  # fmt: skip
    for state, own, there in pairs:
        assert torch.equal(state[own], theirs[there]), own
    stacked = blip["vision_model.encoder.layers.1.self_attn.qkv.weight"].split(64)
    for part, value in zip(("query", "key", "value"), stacked, strict=True):
        assert torch.equal(value, theirs[f"{block}attention.attention.{part}.weight"])
    with pytest.raises(ValueError, match=r"expected a tensor like 'nothing' to start from vilt_mini.safetensors"):
        minis.copy(models["vit_mini"], [("nothing", "x")])
    with pytest.raises(ValueError, match=r"tensors that 'classifier.bias' starts from, got all but 1: x"):
        minis.copy(models["vit_mini"], [(r"classifier\.bias", "x")])
    with pytest.raises(ValueError, match=r"classifier.bias: expected the shape of .* \(44, 128\), got \(44,\)"):
        minis.copy(models["vit_mini"], [(r"classifier\.bias", "classifier.3.weight")])


def test_unknown_minis_settings_and_missing_weights(tmp_path, capsys):
    refuses(r"model must be one of vilt_mini, .* got 'vilt'", pretrain, "vilt", tmp_path / "x")
    with pytest.raises(ValueError, match=r"settings must be distinct names out of questions, .* got .'rate'"):
        pretrain("vilt_mini", tmp_path / "x", rate=1)
    refuses("`confed weights pretrain nobody --out FILE`", weights_file, "nobody")
    assert command("weights", "pretrain", "weights.safetensors") == 2
    assert "got 'weights.safetensors'" in capsys.readouterr().err.replace("\n", " ")


def test_the_command_writes_where_it_is_told(tmp_path, capsys, monkeypatch):
    file = tmp_path / "mini.safetensors"
    monkeypatch.setitem(MINIS, "vit_mini", replace(MINIS["vit_mini"], settings=Settings(16, 8, epochs=2)))
    small = ["--questions", "8", "--epochs", "1"]
    assert command("weights", "pretrain", "vit_mini", "--out", str(file), *small, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"model": "vit_mini", "file": str(file), "accuracy": describe(file)["accuracy"]}


def test_known_words_keep_embeddings_and_new_ones_start_fresh():
    tokenizer = mini_tokenizer(["zebra", "dog", "stripes"])
    model = vilt_mini(["yes", "no"], tokenizer.vocab_size, max_length=20, seed=1)
    other = vilt_mini(["yes", "no"], tokenizer.vocab_size, max_length=20, seed=2)
    saved = load_file(MINI_WEIGHTS)
    name = "vilt.embeddings.text_embeddings.word_embeddings.weight"
    known = len(saved[name])
    assert tokenizer.vocab_size == known + 2
    assert torch.equal(model.state_dict()[name][:known], saved[name])
    assert not torch.equal(model.state_dict()[name][known:], other.state_dict()[name][known:])
    assert not torch.equal(model.classifier[0].weight, saved["classifier.0.weight"])
    assert not torch.equal(model.classifier[0].weight, other.classifier[0].weight)
    refuses(rf"vocab_size must be at least {known} .* got {known - 1}", vilt_mini, 2, known - 1)


def test_the_head_is_reused_only_for_the_same_answers():
    saved = load_file(MINI_WEIGHTS)["classifier.3.weight"]
    size = mini_tokenizer([]).vocab_size
    assert torch.equal(vilt_mini(ANSWERS, size).classifier[3].weight, saved)
    for answers in (ANSWERS[::-1], len(ANSWERS)):
        assert not torch.equal(vilt_mini(answers, size).classifier[3].weight, saved)
    refuses("expected a safetensors file at", vilt_mini, ANSWERS, size, pretrained="nowhere.safetensors")
