"""VAuLT against the two library models put together, MMFed's model and MAGNETO against computations by hand."""

import copy
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertModel, ViltConfig, ViltModel

from confed.federation.params import named_tensors
from confed.federation.structure import feature_width, reads_absent
from confed.models import create_model, create_tokenizer
from confed.models.finetuning import Finetuning, finetune
from confed.models.mmfed import CoAttentionNetwork, mmfed_tiny
from confed.models.modal_transformer import Encoder, magneto_gain
from confed.models.pretrained import seeded
from confed.models.vault import Vault, vault_b32, vault_mini
from larger_values import spread
from modal_batches import ALL, modal_batch, only
from refusals import refuses

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
    refuses(r"BERT must be as wide as ViLT \(32 features\), got 16", Vault, vilt, other, ANSWERS, torch.Generator())


SUBSETS = [names for size in range(1, 5) for names in combinations(ALL, size)]


def _model(**options: Any) -> CoAttentionNetwork:
    return mmfed_tiny(5, 20, **{"modalities": ALL, "series_channels": 2} | options)


def _look(layer: Any, states: Tensor, context: Tensor) -> Tensor:
    """The cross-attention layer for one example without padding: (n, d) look at (m, d)."""
    width, heads = states.shape[1], 2
    norm = layer.attention_norm
    query = norm(states) @ layer.attention.qkv.weight[:width].T + layer.attention.qkv.bias[:width]
    both = norm(context) @ layer.attention.qkv.weight[width:].T + layer.attention.qkv.bias[width:]
    key, value = both[:, :width], both[:, width:]
    part = width // heads
    mixed = [
        (query[:, s] @ key[:, s].T / part**0.5).softmax(-1) @ value[:, s]
        for s in (slice(h * part, (h + 1) * part) for h in range(heads))
    ]
    states = states + layer.attention.out_proj(torch.cat(mixed, 1))
    return states + layer.fc2(F.gelu(layer.fc1(layer.ffn_norm(states))))


@pytest.mark.parametrize("names", SUBSETS)
def test_every_set_of_modalities(names: tuple[str, ...]) -> None:
    model, batch = _model().eval(), only(modal_batch(), *names)
    output = model(batch)
    encoded: dict[str, Any] = {name: model.embed[name](batch) for name in model.embed if name in names}
    for row in range(3):
        own = {
            name: states[row] if present is None else states[row, present[row]]
            for name, (states, present) in encoded.items()
        }
        expected = torch.zeros(4, 16)
        for place, name in enumerate(ALL):
            if name in own:
                others = [states for other, states in own.items() if other != name]
                module: Any = model.embed[name]
                seen = _look(module.look, own[name], torch.cat(others)) if others else own[name]
                expected[place] = seen.mean(0)
        torch.testing.assert_close(output.features[row], expected.flatten(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, model.head(output.features))


def test_a_batch_trains_what_it_has() -> None:
    model, batch = _model(), only(modal_batch(), "text", "audio")
    F.cross_entropy(model(batch).logits, batch["label"]).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name.split(".")[1] for name in trained if name.startswith("embed.")} == {"text", "audio"}
    assert any(".look." in name for name in trained)
    model.zero_grad(set_to_none=True)
    alone = only(modal_batch(), "text")
    F.cross_entropy(model(alone).logits, alone["label"]).backward()
    assert not any(".look." in name for name, p in model.named_parameters() if p.grad is not None)


def test_names_say_whose_a_tensor_is() -> None:
    model = _model()
    names = set(named_tensors(model))
    assert {".".join(name.split(".")[:2]) for name in names} == {
        *(f"embed.{name}" for name in ALL), "head.weight", "head.bias"
    }  # fmt: skip
    assert all(tensor.numel() for tensor in named_tensors(model).values())
    assert feature_width(model, "a test") == 4 * 16
    assert model.modalities == ALL
    reads_absent(model, "a test")


def test_by_name_and_about_as_large_as_the_transformer() -> None:
    tokenizer = create_tokenizer("mmfed_mini", ["one", "two"])
    sizes = [
        sum(p.numel() for p in create_model(name, answers=10, vocab_size=tokenizer.vocab_size).parameters())
        for name in ("mmfed_mini", "modal_transformer_mini")
    ]
    assert 0.5 < sizes[0] / sizes[1] < 2


WIDTH, HEADS, HIDDEN = 16, 4, 24


def _encoder(block: str = "magneto", layers: int = 2, init: str = "torchscale", width: int = WIDTH) -> Encoder:
    options = {"block": block, "magneto_init": init}
    return seeded(0, lambda: Encoder(width, layers, HEADS, HIDDEN if width == WIDTH else 2 * width, **options))


def _norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    gap = x - x.mean(-1, keepdim=True)
    return gap / (gap.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def _expected(model: Encoder, x: Tensor, seen: Tensor) -> Tensor:
    """One example (S, d), head by head; ``seen`` (S, S) says who looks at whom."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    sub_norm = "layers.0.inner_norm.weight" in p
    x = x.double()
    for i in range(len(model.layers)):
        at, part = f"layers.{i}", WIDTH // HEADS
        joint = _norm(x, p, f"{at}.attention_norm") @ p[f"{at}.attention.qkv.weight"].T + p[f"{at}.attention.qkv.bias"]
        heads = []
        for h in range(HEADS):
            query, key, value = (joint[:, j * WIDTH + h * part : j * WIDTH + (h + 1) * part] for j in range(3))
            scores = (query @ key.T / math.sqrt(part)).masked_fill(~seen, -math.inf)
            heads.append(scores.softmax(-1) @ value)
        mixed = torch.cat(heads, 1)
        if sub_norm:
            mixed = _norm(mixed, p, f"{at}.attention.inner_norm")
        x = x + mixed @ p[f"{at}.attention.out_proj.weight"].T + p[f"{at}.attention.out_proj.bias"]
        inner = F.gelu(_norm(x, p, f"{at}.ffn_norm") @ p[f"{at}.fc1.weight"].T + p[f"{at}.fc1.bias"])
        if sub_norm:
            inner = _norm(inner, p, f"{at}.inner_norm")
        x = x + inner @ p[f"{at}.fc2.weight"].T + p[f"{at}.fc2.bias"]
    return _norm(x, p, "norm")


@pytest.mark.parametrize("block", ["magneto", "prenorm"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_states_are_those_of_the_formulas(block: str, causal: bool, padded: bool) -> None:
    model = _encoder(block).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:  # 1 and 0 would hide a mistake
                value.add_(0.3 * torch.randn(value.shape, generator=rng))
    x = torch.randn(2, 5, WIDTH, generator=rng)
    present = torch.tensor([[True] * 5, [True, True, False, True, False]]) if padded else None
    got = model(x, present, causal)
    for row in range(2):
        kept = torch.ones(5, dtype=torch.bool) if present is None else present[row]
        seen = torch.ones(int(kept.sum()), int(kept.sum()), dtype=torch.bool)
        expected = _expected(model, x[row, kept], seen.tril() if causal else seen)
        torch.testing.assert_close(got[row, kept], expected.float(), atol=2e-6, rtol=1e-5)


def test_gain_has_its_golden_value_and_needs_a_layer() -> None:
    assert magneto_gain(12) == pytest.approx(1.7827097, abs=1e-7)  # the golden value of the fact sheet
    refuses("layers must be at least 1, got 0", magneto_gain, 0)


def _is_uniform(x: Tensor, bound: float) -> bool:
    return bool(x.abs().max() <= bound * (1 + 1e-6)) and x.abs().max().item() == pytest.approx(bound, rel=0.02)


def test_initial_values_of_torchscale() -> None:
    width = 64
    layer, gain = _encoder(layers=12, width=width).layers[3], magneto_gain(12)
    query, key, value = layer.attention.qkv.weight.detach().split(width)
    for part in (query, key):
        assert _is_uniform(part, math.sqrt(6 / (2 * width) / 2))
    assert _is_uniform(value, gain * math.sqrt(6 / (2 * width) / 2))
    assert _is_uniform(layer.attention.out_proj.weight.detach(), gain * math.sqrt(6 / (2 * width)))
    assert not layer.attention.out_proj.bias.any()
    assert _is_uniform(layer.fc1.weight.detach(), gain / math.sqrt(width))
    assert _is_uniform(layer.fc2.weight.detach(), gain / math.sqrt(2 * width))
    # Biases are scaled, too; those of queries and keys are not.
    biases = torch.stack([part.abs().max() for part in layer.attention.qkv.bias.detach().split(width)])
    assert bool((biases[:2] <= 1 / math.sqrt(width)).all())
    assert 1 / math.sqrt(width) < biases[2] <= gain / math.sqrt(width)
    assert 1 / math.sqrt(width) < layer.fc1.bias.abs().max() <= gain / math.sqrt(width)


def test_initial_values_of_the_paper_and_of_plain_layers() -> None:
    width = 64
    layer, gain = _encoder(layers=12, init="paper", width=width).layers[0], magneto_gain(12)
    query, key, value = layer.attention.qkv.weight.detach().split(width)
    parts = {"query": (query, 1.0), "key": (key, 1.0), "value": (value, gain)}
    parts |= {"out": (layer.attention.out_proj.weight, gain), "fc1": (layer.fc1.weight, gain)}
    for name, (part, scale) in parts.items():
        expected = scale * math.sqrt(2 / sum(part.shape))
        assert part.std().item() == pytest.approx(expected, rel=0.05), name
    assert not any(b.any() for b in (layer.attention.qkv.bias, layer.fc1.bias, layer.fc2.bias))

    plain = _encoder("prenorm", layers=12, width=width).layers[0]
    assert _is_uniform(plain.attention.out_proj.weight.detach(), math.sqrt(6 / (2 * width)))
    assert plain.inner_norm is None
    assert plain.attention.inner_norm is None


def test_later_tokens_change_nothing_in_causal_attention() -> None:
    model = _encoder().eval()
    x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 4:] = 9.0
    torch.testing.assert_close(model(x, None, True)[:, :4], model(changed, None, True)[:, :4])
    assert not torch.allclose(model(x)[:, :4], model(changed)[:, :4])
