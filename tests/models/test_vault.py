"""VAuLT: BERT's last states in place of ViLT's word embeddings, against the two library models put together."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel, ViltConfig, ViltModel

from confed.models.finetuning import Finetuning, finetune
from confed.models.vault import Vault, vault_b32, vault_mini
from larger_values import spread

ANSWERS, VOCABULARY = 7, 30


class Task:
    def __init__(self, head):
        self.head = head


def batch(size=4, length=9, choices=3, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def words(*shape):
        return torch.randint(0, VOCABULARY, shape, generator=rng)

    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, 5:] = 0
    offered = torch.ones(size, choices, length, dtype=torch.int64)
    offered[1, 2, 6:] = 0
    image, image2 = (
        torch.randint(0, 256, (size, 3, 64, 64), generator=rng, dtype=torch.uint8) for _ in range(2)
    )  # fmt: skip
    return {
        "image": image, "image2": image2, "text": words(size, length), "text_mask": mask,
        "choices": words(size, choices, length), "choices_mask": offered,
    }  # fmt: skip


def mini(**options):
    return vault_mini(ANSWERS, VOCABULARY, pretrained=False, **options)


def bodies():
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    vilt = ViltModel(ViltConfig(num_hidden_layers=2, image_size=64, patch_size=16, **common))
    return spread(vilt), spread(BertModel(BertConfig(num_hidden_layers=2, **common), add_pooling_layer=False))


@pytest.mark.parametrize("text_positions", [True, False])
def test_equals_the_two_library_models_put_together(text_positions):
    vilt, bert = bodies()
    oracle = copy.deepcopy(vilt)
    if not text_positions:
        oracle.embeddings.text_embeddings.position_embeddings.weight.data.zero_()
    model = Vault(vilt, bert, ANSWERS, torch.Generator(), text_positions=text_positions).eval()
    inputs = batch()
    with torch.no_grad():
        words = bert(input_ids=inputs["text"], attention_mask=inputs["text_mask"]).last_hidden_state
        theirs = oracle(
            inputs_embeds=words,
            attention_mask=inputs["text_mask"],
            pixel_values=(inputs["image"] / 255 - 0.5) / 0.5,
            pixel_mask=torch.ones(4, 64, 64, dtype=torch.int64),
        ).pooler_output
        ours = model(inputs)
    torch.testing.assert_close(ours.features, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits, model.classifier(theirs), rtol=1e-4, atol=1e-4)
    names = {name for name, _ in model.named_parameters()}
    assert not any(name.startswith("vilt.") and "word_embeddings" in name for name in names)
    assert any("text_embeddings.position_embeddings" in name for name in names) == text_positions


def test_published_size_and_its_adapters():
    with torch.device("meta"):
        model = Vault(ViltModel(ViltConfig()), BertModel(BertConfig(), add_pooling_layer=False), 100, torch.Generator())
    # bert-base-uncased has 109,482,240 parameters, its pooler 590,592 of them.
    assert sum(p.numel() for p in model.language.parameters()) == 109_482_240 - 590_592
    finetune(model, "adapters", Finetuning(), model.places(), torch.Generator())
    assert len(model.adapters.hosts) == 24
    learning = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(n for name, n in learning.items() if name.startswith("classifier.")) == 1_337_956
    assert sum(n for name, n in learning.items() if not name.startswith("classifier.")) == 1_789_056


def test_lora_is_ours_to_place():
    with torch.device("meta"):
        model = vault_b32(100, trainable="lora")
    assert sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "lora_" in n) == 589_824
    targets = Finetuning(targets=("query", "value"))
    hosts = {n.split(".")[0] for n, _ in mini(trainable="lora", peft=targets).named_parameters() if "lora_" in n}
    assert hosts == {"vilt", "language"}
    # A part that never learns is no place for it.
    frozen = mini(trainable="lora", peft=targets, language_frozen=True)
    assert {n.split(".")[0] for n, _ in frozen.named_parameters() if "lora_" in n} == {"vilt"}
    with pytest.raises(ValueError, match=r"no layer of Vault is called 'self\.query'; there are .*attention\.query"):
        mini(trainable="lora", peft=Finetuning(targets=("self.query",)), language_frozen=True)


def test_adapters_of_bert_sit_inside_its_last_normalisation():
    model = spread(mini(trainable="adapters"), 0.3)
    block, inputs = model.language.encoder.layer[0], batch()
    x = model.language.embeddings(inputs["text"])
    with torch.no_grad():
        attended = block.attention(x)[0]
        total = block.output.dense(block.intermediate(attended)) + attended
        norm = block.output.LayerNorm
        u = F.layer_norm(total, (64,), norm.weight, norm.bias, norm.eps)
        down, up = norm.adapter.down, norm.adapter.up
        branch = F.relu(u @ down.weight.T + down.bias) @ up.weight.T + up.bias
        expected = F.layer_norm(total + branch, (64,), norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("trainable", "wanted"),
    [
        ("all", lambda name: True),
        ("top", lambda name: name.startswith(("vilt.encoder.layer.2.", "vilt.layernorm.", "vilt.pooler."))),
        ("head", lambda name: False),
        ("adapters", lambda name: ".adapter." in name),
        ("bias", lambda name: "bias" in name),
        ("lora", lambda name: "lora_" in name),
        ("ia3", lambda name: "ia3_" in name),
        ("prompt", lambda name: name.startswith("prompts.")),
    ],
)
@pytest.mark.parametrize("language_frozen", [False, True])
def test_what_learns_follows_from_trainable(trainable, wanted, language_frozen):
    model = mini(trainable=trainable, language_frozen=language_frozen)
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if wanted(name) and not (language_frozen and name.startswith("language."))}
    expected |= {name for name in names if name.startswith("classifier.")}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == expected == names - model.frozen
    model(batch()).logits.square().sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    # Which picture type nobody saw and the like do not matter: all of a tensor gets a gradient or nothing of it.
    assert reached == expected
    added = [name for name in expected if ".adapter." in name or "lora_" in name or "ia3_" in name]
    if trainable == "lora":  # FedDAT's table 2 counts 12 layers, not 24
        assert all(name.startswith("vilt.") for name in added)
    elif added:
        assert any(name.startswith("language.") for name in added) != language_frozen
        assert any(name.startswith("vilt.") for name in added)


@pytest.mark.parametrize("language_frozen", [False, True])
@pytest.mark.parametrize("trainable", ["adapters", "prompt", "head"])
@pytest.mark.parametrize("head", ["answers", "nlvr2", "choice"])
def test_two_parts_of_a_pass(head, trainable, language_frozen):
    model = spread(mini(trainable=trainable, language_frozen=language_frozen, heads=("nlvr2", "choice")), 0.1)
    model.begin(Task(head))
    if trainable == "adapters":
        model.adapters.add("second", torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, state = model(batch()).logits, model.prefix(batch())
        torch.testing.assert_close(model.suffix(state).logits, whole)
        if trainable == "adapters":
            assert model.prefix_is_frozen
            with model.adapters.using({"second": 1.0}):
                other = model(batch()).logits
            with model.adapters.using({"second": 1.0}, {"adapter": 1.0}):
                both = model.suffix(model.repeat(state, 2)).logits
            torch.testing.assert_close(both, torch.cat([other, whole]), rtol=1e-4, atol=1e-5)
            assert not torch.equal(whole, other)


def test_pairs_and_choices_are_passes_of_their_own():
    model, inputs = spread(mini(heads=("nlvr2", "choice"))), batch()
    with torch.no_grad():
        types = model.vilt.embeddings.token_type_embeddings.weight
        types[2] = types[1]  # so that a second picture is read as a first one is
        one = model(inputs).features
        two = model(inputs | {"image": inputs["image2"]}).features
        model.begin(Task("nlvr2"))
        torch.testing.assert_close(model(inputs).logits, model.heads["nlvr2"](torch.cat([one, two], 1)))
        types[2] = -types[1]
        assert not torch.allclose(model(inputs).logits, model.heads["nlvr2"](torch.cat([one, two], 1)))
        model.begin(Task("choice"))
        offered = model(inputs).logits
        model.begin(Task("answers"))
        for k in range(3):
            part = model(inputs | {"text": inputs["choices"][:, k], "text_mask": inputs["choices_mask"][:, k]})
            torch.testing.assert_close(offered[:, k], model.heads["choice"](part.features).squeeze(1))


def test_padding_does_not_matter():
    model, inputs = spread(mini()), batch()
    padded = inputs | {
        "text": F.pad(inputs["text"], (0, 3), value=9),
        "text_mask": F.pad(inputs["text_mask"], (0, 3)),
    }
    torch.testing.assert_close(model(padded).logits, model(inputs).logits, rtol=1e-4, atol=1e-4)


def test_what_pretraining_sees_and_what_the_model_looked_at():
    model, inputs = spread(mini(), 0.1), batch()
    states = model.pretraining_states(inputs)
    torch.testing.assert_close(states.loss_logits, model(inputs).logits)
    assert states.early.shape == states.late.shape == (4, 16, 64)
    assert states.asked.shape == (4, 9, 64)
    assert states.words is model.language.embeddings.word_embeddings.weight
    looked = model.attention(inputs)
    assert looked.shape == (4, 4, 4)
    assert looked.amax((1, 2)).tolist() == [1.0] * 4


def test_reads_two_checkpoints(tmp_path):
    vilt, bert = bodies()
    vilt.save_pretrained(tmp_path / "vilt")
    bert.save_pretrained(tmp_path / "bert")
    model = vault_b32(
        ANSWERS, VOCABULARY, pretrained=tmp_path / "vilt", language=tmp_path / "bert", trainable="adapters",
        peft=Finetuning(zero_up=True), text_positions=True,
    ).eval()  # fmt: skip
    expected = Vault(vilt, bert, ANSWERS, torch.Generator(), text_positions=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch()).features, expected(batch()).features)
    with pytest.raises(ValueError, match="is not a checkpoint of this BERT: embeddings"):
        vault_b32(ANSWERS, VOCABULARY, pretrained=tmp_path / "vilt", language=tmp_path / "vilt")
    with pytest.raises(ValueError, match=r"the checkpoint '.*vilt' has 30 tokens, got 31"):
        vault_b32(ANSWERS, 31, pretrained=tmp_path / "vilt", language=tmp_path / "bert")
    with pytest.raises(ValueError, match=r"expected a folder with a BERT checkpoint.*got '\./no"):
        vault_b32(ANSWERS, VOCABULARY, pretrained=tmp_path / "vilt", language="./nowhere")


def test_bodies_must_fit():
    vilt, _ = bodies()
    other = BertModel(BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(ValueError, match=r"BERT must be as wide as ViLT \(32 features\), got 16"):
        Vault(vilt, other, ANSWERS, torch.Generator())
