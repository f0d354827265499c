from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from confed.models.finetuning import Finetuning
from confed.models.heads import task_head
from confed.models.vilt import Vilt, answer_head, vilt_b32, vilt_mini, vilt_tiny
from larger_values import spread
from refusals import refuses
from small_pictures import asked_pictures

ANSWERS, VOCABULARY = 7, 30
batch = partial(asked_pictures, VOCABULARY)


@pytest.mark.parametrize("size", [(64, 64), (32, 48)])
def test_equals_transformers_up_to_the_order_of_patches(size):
    plain = spread(vilt_tiny(ANSWERS, VOCABULARY), 0.3)
    model = Vilt(plain.vilt, ANSWERS, torch.Generator(), size).eval()
    inputs = batch()
    inputs["image"] = inputs["image"][:, :, : size[0], : size[1]]
    pixels = (inputs["image"] / 255 - 0.5) / 0.5
    with torch.no_grad():
        hidden, mask, _ = model.embed(inputs)
        ours = model.vilt.layernorm(model.vilt.encoder(hidden, mask)[0])
        theirs = model.vilt(
            input_ids=inputs["text"],
            attention_mask=inputs["text_mask"],
            pixel_values=pixels,
            pixel_mask=torch.ones(len(pixels), *size, dtype=torch.int64),
        )
        features = model(inputs).features
    length = inputs["text"].shape[1]
    expected = theirs.last_hidden_state
    torch.testing.assert_close(ours[:, : length + 1], expected[:, : length + 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features, theirs.pooler_output, rtol=1e-5, atol=1e-5)
    # The library shuffles the patch outputs: for each of ours there is exactly one equal one of theirs.
    distance = torch.cdist(ours[:, length + 1 :], expected[:, length + 1 :])
    assert ((distance < 1e-4).sum(1) == 1).all()
    assert ((distance < 1e-4).sum(2) == 1).all()


def test_float_pictures_are_normalised_and_padding_is_ignored():
    model, inputs = spread(vilt_tiny(ANSWERS, VOCABULARY), 0.3), batch()
    as_float = dict(inputs, image=inputs["image"].float() / 255 * 2 - 1)
    torch.testing.assert_close(model(as_float).logits, model(inputs).logits, rtol=1e-4, atol=1e-4)
    padded = dict(inputs, text=F.pad(inputs["text"], (0, 3), value=9), text_mask=F.pad(inputs["text_mask"], (0, 3)))
    torch.testing.assert_close(model(padded).logits, model(inputs).logits, rtol=1e-4, atol=1e-4)


def test_bf16_autocast_trains():
    model = vilt_tiny(ANSWERS, VOCABULARY)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch())
        loss = F.cross_entropy(output.logits.float(), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_adapters_leave_the_backbone_alone():
    plain = vilt_tiny(ANSWERS, VOCABULARY, seed=1)
    model = vilt_tiny(ANSWERS, VOCABULARY, seed=1, trainable="adapters", peft=Finetuning(zero_up=True))
    assert {n: tuple(v.shape) for n, v in plain.state_dict().items()}.items() <= {
        n: tuple(v.shape) for n, v in model.state_dict().items()
    }.items()
    assert torch.equal(plain(batch()).logits, model(batch()).logits)
    wide = vilt_tiny(ANSWERS, VOCABULARY, trainable="adapters", peft=Finetuning(reduction=4))
    assert wide.vilt.encoder.layer[0].output.adapter.down.weight.shape == (8, 32)


class Asked:
    def __init__(self, head):
        self.head = head


HEADS = ("nlvr2", "entailment", "choice")


def several(size=3, choices=4, **options):
    model = spread(vilt_tiny(ANSWERS, VOCABULARY, heads=HEADS, **options), 0.3)
    inputs = batch(size)
    rng = torch.Generator().manual_seed(6)
    inputs["image2"] = torch.randint(0, 256, inputs["image"].shape, generator=rng, dtype=torch.uint8)
    inputs["choices"] = torch.randint(0, VOCABULARY, (size, choices, 9), generator=rng)
    inputs["choices_mask"] = torch.ones(size, choices, 9, dtype=torch.int64)
    inputs["choices_mask"][1, 2, 4:] = 0
    return model, inputs


def test_each_task_has_its_head():
    model, inputs = several()
    assert model.heads_of_tasks == {"answers": "classifier"} | {head: f"heads.{head}" for head in HEADS}
    with torch.no_grad():
        answers = model(inputs)
        model.begin(Asked("entailment"))
        relations = model(inputs)
        model.begin(object())  # a task without a head asks for answers
        torch.testing.assert_close(model(inputs).logits, answers.logits, rtol=0, atol=0)
    torch.testing.assert_close(relations.features, answers.features)
    torch.testing.assert_close(relations.logits, model.heads["entailment"](answers.features))
    assert relations.logits.shape == (3, 3)
    refuses("has the heads answers, nlvr2, entailment, choice, the task needs 'boxes'", model.begin, Asked("boxes"))


def test_pairs_are_two_passes_with_token_types_of_their_own():
    model, inputs = several()
    types = model.vilt.embeddings.token_type_embeddings.weight
    fresh = vilt_tiny(ANSWERS, VOCABULARY, heads=HEADS).vilt.embeddings.token_type_embeddings.weight
    assert torch.equal(fresh[2], fresh[1])
    assert model.vilt.config.modality_type_vocab_size == 3
    with torch.no_grad():
        one = model(inputs).features
        kept = types[1].clone()
        types[1] = types[2]
        two = model(dict(inputs, image=inputs["image2"])).features
        types[1] = kept
        model.begin(Asked("nlvr2"))
        pairs = model(inputs)
        expected = model.heads["nlvr2"](torch.cat([one, two], 1))
    assert pairs.logits.shape == (3, 2)
    torch.testing.assert_close(pairs.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pairs.features, (one + two) / 2, rtol=1e-4, atol=1e-5)
    del inputs["image2"]
    refuses("a batch of the head 'nlvr2' needs the key 'image2'", model, inputs)


def test_choices_are_scored_one_by_one():
    model, inputs = several()
    with torch.no_grad():
        passes = [
            model(dict(inputs, text=inputs["choices"][:, k], text_mask=inputs["choices_mask"][:, k])).features
            for k in range(4)
        ]
        model.begin(Asked("choice"))
        del inputs["text"], inputs["text_mask"]
        output = model(inputs)
        weight, bias = model.heads["choice"][1].weight[0], model.heads["choice"][1].bias
    assert output.features.shape == (3, 32)
    expected = torch.stack([features @ weight + bias for features in passes], 1)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"choices must have shape \(3, K, at most 16\), got \(3, 4, 17\)"):
        model(inputs | {"choices": torch.zeros(3, 4, 17, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"choices must have shape \(B, K, L\), got \(3, 9\)"):
        model(inputs | {"choices": torch.zeros(3, 9, dtype=torch.int64)})
    model.begin(Asked("answers"))
    with pytest.raises(ValueError, match=r"text must have shape \(3, at most 16\), got \(3, 4, 9\)"):
        model(inputs | {"text": inputs["choices"], "text_mask": inputs["choices_mask"]})


def test_published_sizes_of_the_other_heads():
    sizes = {h: sum(p.numel() for p in task_head(h, 768, torch.Generator()).parameters()) for h in HEADS}
    assert sizes == {
        "nlvr2": 1536 * 1536 + 1536 + 2 * 1536 + 1536 * 2 + 2,
        "entailment": 768 * 1536 + 1536 + 2 * 1536 + 1536 * 3 + 3,
        "choice": 769,
    }


@pytest.mark.parametrize("head", ["answers", *HEADS])
@pytest.mark.parametrize("trainable", ["adapters", "head", "prompt"])
def test_prefix_and_suffix_are_the_forward_pass(head, trainable):
    model, inputs = several(trainable=trainable)
    model.begin(Asked(head))
    whole = model(inputs)
    state = model.prefix(inputs)
    again = model.suffix(state)
    assert torch.equal(whole.logits, again.logits)
    assert torch.equal(whole.features, again.features)
    if model.prefix_is_frozen:
        assert not state[0].hidden.requires_grad
    assert model.prefix_is_frozen == (trainable != "prompt")
    three = model.suffix(model.repeat(state, 3)).logits
    torch.testing.assert_close(three, whole.logits.repeat(3, 1), rtol=1e-4, atol=1e-4)
    assert model.attention(inputs).shape == (3, 4, 4)


def test_a_first_block_that_learns_is_no_frozen_prefix():
    assert not vilt_tiny(ANSWERS, VOCABULARY).prefix_is_frozen
    assert not vilt_tiny(ANSWERS, VOCABULARY, trainable="bias").prefix_is_frozen
    assert vilt_tiny(ANSWERS, VOCABULARY, trainable="lora").prefix_is_frozen  # the embeddings alone, without adapters
    model = vilt_tiny(ANSWERS, VOCABULARY, trainable="adapters")
    model.vilt.encoder.layer[0].layernorm_after.weight.requires_grad_()
    assert not model.prefix_is_frozen


def test_attention_finds_the_patch_that_matters():
    model = vilt_tiny(ANSWERS, VOCABULARY, layers=1)
    maps = model.attention(batch())
    assert maps.shape == (4, 4, 4)
    torch.testing.assert_close(maps.flatten(1).amax(1), torch.ones(4))
    assert all(parameter.grad is None for parameter in model.parameters())
    # Every position attends to the keys of patch (2, 1) alone once its key stands out.
    attention = model.vilt.encoder.layer[0].attention.attention
    with torch.no_grad():
        model.vilt.embeddings.position_embeddings[0, 1 + 9] = 10 * F.one_hot(torch.tensor(3), 32)
        attention.query.weight.zero_()
        attention.query.bias.fill_(3.0)
        attention.key.weight.zero_()
        attention.key.weight[:, 3] = 3.0
    with torch.inference_mode():
        found = model.attention(batch()).flatten(1)
    assert (found.argmax(1) == 9).all()
    assert (found.sort(1).values[:, -2] < 0.1).all()


def test_b32_reads_a_saved_checkpoint_and_has_the_published_head(tmp_path):
    body = spread(vilt_tiny(ANSWERS, VOCABULARY), 0.3).vilt
    body.save_pretrained(tmp_path)
    model = vilt_b32(ANSWERS, VOCABULARY, pretrained=tmp_path).eval()
    for name, value in body.state_dict().items():
        assert torch.equal(model.vilt.state_dict()[name], value)
    assert model(batch()).features.shape == (4, 32)
    refuses("a ViLT checkpoint or a hub name owner/name, got", vilt_b32, ANSWERS, pretrained=tmp_path / "missing")
    refuses("has 30 tokens, got 31", vilt_b32, ANSWERS, 31, pretrained=tmp_path)


def test_checkpoints_of_another_model_are_refused(tmp_path):
    body = vilt_tiny(ANSWERS, VOCABULARY).vilt
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(tmp_path / "bert")
    missing = r"is not a checkpoint of this ViLT: embeddings\.cls_token is missing; .* is missing \(and \d+ more\)"
    refuses(missing, vilt_b32, ANSWERS, VOCABULARY, pretrained=tmp_path / "bert")
    for name in ("narrow", "cut"):
        body.save_pretrained(tmp_path / name)
    settings = tmp_path / "narrow" / "config.json"
    settings.write_text(settings.read_text().replace('"intermediate_size": 128', '"intermediate_size": 64'))
    shapes = (
        r"layer\.0\.intermediate\.dense\.bias has shape \(128,\), expected \(64,\); .*\(128, 32\), expected \(64, 32\)"
    )
    refuses(shapes, vilt_b32, ANSWERS, VOCABULARY, pretrained=tmp_path / "narrow")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"no ViLT checkpoint could be read from '.*cut'"):
        vilt_b32(ANSWERS, VOCABULARY, pretrained=tmp_path / "cut")


@pytest.mark.parametrize(("answers", "parameters"), [(100, 1_337_956), (1642, 3_708_010), (3129, 5_993_529)])
def test_published_head_size(answers, parameters):
    head = answer_head(768, answers, torch.Generator())
    assert sum(p.numel() for p in head.parameters()) == parameters


def test_mini_has_a_fifth_of_a_million_parameters():
    assert 190_000 < sum(p.numel() for p in vilt_mini(50, 150, pretrained=False).parameters()) < 250_000
