"""MCAN, BUTD, BAN, MFB and MMNasNet: equations against loops in NumPy, masking, sizes, life in a federation."""

import math

import numpy as np
import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.data.encode import encode
from confed.data.examples import Examples, TableData
from confed.data.table import Table
from confed.engines.local import InProcess, Members, Simulation, simulate
from confed.engines.perform import Setup, Workspace
from confed.federation.local import Local
from confed.federation.protocols import Output
from confed.federation.specs import model_spec
from confed.federation.state import MemoryStore
from confed.models import create_model, create_tokenizer
from confed.models.ban import BAN
from confed.models.finetuning import Finetuning
from confed.models.mfb import MFB
from confed.models.mmnasnet import DECODER, ENCODER
from confed.models.region_model import (
    AttFlat,
    LayerNorm,
    MultiHeadAttention,
    WeightNormLinear,
    box_geometry,
    masked_softmax,
)
from confed.registry import models
from confed.tasks.vqa import VQA
from refusals import refuses

MINIS = ["ban_mini", "butd_mini", "mfb_mini", "mcan_s_mini", "mcan_l_mini", "mmnas_s_mini", "mmnas_l_mini"]
WIDTHS = [256, 256, 128, 128, 192, 128, 192]
PUBLISHED = ["ban_4", "ban_8", "butd", "mfb", "mcan_small", "mcan_large", "mmnas_small", "mmnas_large"]
B, R, W, L = 3, 6, 64, 9
VOCABULARY, ANSWERS = 40, 11


def make_batch(width=W, padding=2, seed=1):
    rng = torch.Generator().manual_seed(seed)
    regions = torch.randn(B, R, width, generator=rng)
    low = torch.rand(B, R, 2, generator=rng) / 2
    boxes = torch.cat([low, low + 0.1 + torch.rand(B, R, 2, generator=rng) / 3], -1)
    if padding:
        regions[:, -padding:], boxes[:, -padding:] = 0, 0
    mask = (torch.arange(L) < torch.tensor([[5], [9], [3]])).long()
    text = torch.randint(7, VOCABULARY, (B, L), generator=rng) * mask
    return {"regions": regions, "boxes": boxes, "text": text, "text_mask": mask, "label": torch.tensor([0, 3, 10])}


def build(name, **options):
    return create_model(name, answers=ANSWERS, vocab_size=VOCABULARY, **options).eval()


def numbers(tensor):
    return tensor.detach().double().numpy()


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def linear(layer, x):
    weight = numbers(layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight_v)
    if isinstance(layer, WeightNormLinear):
        weight = weight * numbers(layer.weight_g) / math.sqrt((weight**2).sum())
    return weight @ x + numbers(layer.bias)


# Layers -------------------------------------------------------------------------------------------------------


def test_layer_norm_by_hand():
    norm = LayerNorm(4)
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    # Mean 3; the unbiased variance is (4 + 1 + 0 + 9) / 3.
    std = math.sqrt(14 / 3)
    assert norm(x)[0].tolist() == pytest.approx([-2 / (std + 1e-6), -1 / (std + 1e-6), 0, 3 / (std + 1e-6)])
    assert torch.nn.functional.layer_norm(x, (4,))[0, 3] > norm(x)[0, 3] * 1.1
    # eps is added to the deviation, not to the variance: tiny differences are not blown up to unit size.
    tiny = norm(torch.tensor([[0.0, 1e-6]], dtype=torch.float64).repeat(1, 2))
    assert tiny.abs().max().item() == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1), rel=1e-4)
    same = torch.ones(1, 4, requires_grad=True)
    norm(same).sum().backward()
    assert torch.equal(norm(same), torch.zeros(1, 4))
    assert same.grad is not None
    assert bool(same.grad.isfinite().all())


def test_multi_head_attention_by_loops():
    torch.manual_seed(0)
    attention = MultiHeadAttention(6, 2, 0.0)
    x, context, bias = torch.randn(1, 2, 6), torch.randn(1, 4, 6), torch.randn(1, 2, 2, 4)
    present = torch.tensor([[True, True, False, True]])
    found = attention(x, context, present, bias)
    for m in range(2):
        joined = []
        for h in range(2):
            part = slice(3 * h, 3 * h + 3)
            query = linear(attention.query, numbers(x[0, m]))[part]
            scores = np.array(
                [query @ linear(attention.key, numbers(context[0, n]))[part] / math.sqrt(3) for n in (0, 1, 3)]
            )
            weights = softmax(scores + numbers(bias[0, h, m])[[0, 1, 3]])
            values = [linear(attention.value, numbers(context[0, n]))[part] for n in (0, 1, 3)]
            joined.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        assert numbers(found[0, m]) == pytest.approx(linear(attention.merge, np.concatenate(joined)), abs=1e-5)
    refuses(r"must divide the width 6, got 4", MultiHeadAttention, 6, 4, 0.0)


def test_att_flat_and_masking():
    torch.manual_seed(0)
    flat, x = AttFlat(5, 7, 3, 0.0), torch.randn(2, 4, 5)
    present = torch.tensor([[True, True, True, False], [True] * 4])
    vector, weights = flat(x, present)
    assert weights.sum(1).tolist() == pytest.approx([1, 1])
    assert weights[0, 3] == 0
    scores = [linear(flat.mlp.output, relu(linear(flat.mlp.hidden.linear, numbers(x[0, n]))))[0] for n in range(3)]
    assert numbers(weights[0, :3]) == pytest.approx(softmax(np.array(scores)), abs=1e-6)
    mean = sum(w * numbers(x[0, n]) for n, w in enumerate(softmax(np.array(scores))))
    assert numbers(vector[0]) == pytest.approx(linear(flat.merge, mean), abs=1e-5)
    nothing = masked_softmax(torch.randn(1, 4), torch.zeros(1, 4, dtype=torch.bool))
    assert nothing.tolist() == [[0.25] * 4]


def test_weight_normalisation_has_one_length_per_matrix():
    torch.manual_seed(0)
    layer = WeightNormLinear(3, 5)
    x = torch.randn(2, 3)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight_v, layer.bias))
    before = layer(x) - layer.bias
    with torch.no_grad():
        layer.weight_v *= 7
        assert torch.allclose(layer(x) - layer.bias, before, atol=1e-6)
        layer.weight_g *= 2
        assert torch.allclose(layer(x) - layer.bias, 2 * before, atol=1e-6)
    assert layer.weight_g.shape == ()


def test_box_geometry_by_hand():
    boxes = torch.tensor([[[0.0, 0.0, 0.2, 0.4], [0.5, 0.2, 0.9, 0.3], [0, 0, 0, 0]]])
    found = box_geometry(boxes)
    # Centres (.1, .2) and (.7, .25), sizes (.2, .4) and (.4, .1).
    expected = [math.log(0.6 / 0.2), math.log(0.05 / 0.4), math.log(0.5), math.log(4)]
    assert found[0, 0, 1].tolist() == pytest.approx(expected, abs=1e-5)
    expected = [math.log(0.6 / 0.4), math.log(0.05 / 0.1), math.log(2), math.log(0.25)]
    assert found[0, 1, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[0, 0, 0].tolist() == pytest.approx([math.log(1e-3)] * 2 + [0, 0], abs=1e-5)
    assert found.shape == (1, 3, 3, 4)
    assert bool(found.isfinite().all())


def test_box_geometry_counts_both_border_pixels():
    """The released code's geometry, in pixels of a picture of 640 x 640: widths and heights are one pixel larger."""
    pixels = np.array([[10.0, 20.0, 330.0, 84.0], [300.0, 300.0, 300.0, 639.0], [0, 0, 0, 0]])
    centre, size = (pixels[:, :2] + pixels[:, 2:]) / 2, pixels[:, 2:] - pixels[:, :2] + 1
    distance = np.abs(centre[:, None] - centre[None]) / size[:, None]
    wanted = np.log(np.concatenate([np.maximum(distance, 1e-3), size[:, None] / size[None]], axis=-1))
    boxes = torch.tensor(pixels / 640).unsqueeze(0)
    assert box_geometry(boxes, 1 / 640)[0].numpy() == pytest.approx(wanted, abs=1e-9)
    assert np.abs(box_geometry(boxes)[0].numpy() - wanted).max() > 0.01
    for name, pixel in (("mmnas_small", 1 / 640), ("mmnas_s_mini", 0.0)):
        with torch.device("meta"):
            assert create_model(name, answers=3, vocab_size=40).pixel == pixel
    torch.manual_seed(0)
    batch = make_batch()
    with torch.no_grad():
        model = build("mmnas_s_mini")
        before = model(batch).logits
        model.pixel = 1 / 640
        assert not torch.equal(model(batch).logits, before)


# Equations ----------------------------------------------------------------------------------------------------


def test_ban_equals_its_equations_in_numpy():
    model, batch = build("ban_mini"), make_batch()
    assert isinstance(model, BAN)
    state = model.read(batch)
    features, weights = model.look(state)
    i, shown = 1, R - 2
    v = [numbers(region) for region in batch["regions"][i, :shown]]
    q = [numbers(word) for word in state.words[i]]
    share = np.zeros(shown)
    maps = []
    pair, score = model.maps.pair, model.maps.score
    for g in range(2):
        scores = np.zeros((L, shown))
        for m in range(L):
            for r in range(shown):
                joint = relu(linear(pair.words, q[m])) * relu(linear(pair.regions, v[r]))
                scores[m, r] = linear(score, joint)[g]
        maps.append(softmax(scores))
        share += maps[-1].sum(0) / 2
    for g, connection in enumerate(model.connections):
        total = sum(
            maps[g][m, r] * relu(linear(connection.words, q[m])) * relu(linear(connection.regions, v[r]))
            for m in range(L)
            for r in range(shown)
        )
        pooled = np.array([total[3 * k : 3 * k + 3].sum() for k in range(64)])
        q = [word + linear(model.projections[g], pooled) for word in q]
    assert numbers(weights[i]) == pytest.approx([*share, 0, 0], abs=1e-5)
    assert numbers(features[i]) == pytest.approx(relu(linear(model.joint, sum(q))), abs=1e-4)


def test_mfb_equals_its_equations_in_numpy():
    model, batch = build("mfb_mini"), make_batch()
    assert isinstance(model, MFB)
    state = model.read(batch)
    features, weights = model.look(state)

    def mlp(layers, x):
        return linear(layers.output, relu(linear(layers.hidden.linear, x)))

    def pooled(fusion, xs, y):
        rows = []
        for x in xs:
            product = linear(fusion.visual, x) * linear(fusion.question, y)
            z = np.array([product[5 * o : 5 * o + 5].sum() for o in range(128)])
            rows.append(np.sign(z) * np.sqrt(np.abs(z)))
        return np.array(rows) / math.sqrt((np.array(rows) ** 2).sum())

    for i in range(B):
        q = [numbers(word) for word in state.words[i][batch["text_mask"][i] == 1]]
        v = [numbers(region) for region in batch["regions"][i, : R - 2]]
        scores = np.array([mlp(model.word_scores, word) for word in q])
        y = np.concatenate([softmax(scores[:, g]) @ np.array(q) for g in range(2)])
        scores = np.array([mlp(model.region_scores, row) for row in pooled(model.region_fusion, v, y)])
        shares = [softmax(scores[:, g]) for g in range(2)]
        assert numbers(weights[i]) == pytest.approx([*(shares[0] + shares[1]) / 2, 0, 0], abs=1e-5)
        x = np.concatenate([share @ np.array(v) for share in shares])
        assert numbers(features[i]) == pytest.approx(pooled(model.fusion, [x], y)[0], abs=1e-5)


# Sizes --------------------------------------------------------------------------------------------------------


# With 20,573 words, 3,129 answers and regions of 2,048 features, counted from openvqa's configurations and layers.
LITERAL = {
    "mcan_small": 57_812_791, "mcan_large": 201_723_191, "mmnas_small": 59_913_367, "mmnas_large": 211_166_871,
    "butd": 31_655_230, "ban_4": 70_183_242, "ban_8": 112_167_258, "mfb": 66_994_689,
}  # fmt: skip
PARTS = {
    "embedding": 6_171_900, "recurrent": 5_431_296, "regions": 2_098_176, "relation": 320, "encoder": 79_772_672,
    "decoder": 104_977_440, "flat_text": 3_149_825, "flat_regions": 3_149_825, "norm": 4_096, "classifier": 6_411_321,
}  # fmt: skip
"""Of MMNasNet-large: 8 heads of 128, AttFlat of 1,024, D = 2,048."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_sizes(name):
    """For 20,573 words, 3,129 answers, regions of 2048 features."""
    with torch.device("meta"):  # no memory: shapes only
        model = create_model(name, answers=3129, vocab_size=20573)
    found = sum(p.numel() for p in model.parameters())
    assert found == LITERAL[name]
    width = {"mcan_small": 1024, "mmnas_small": 1024, "mfb": 1000}.get(name, 2048)
    head = [p for p in model.get_submodule("classifier").parameters() if p.ndim == 2]
    assert [tuple(p.shape) for p in head] == [(3129, width)]


def test_mmnasnet_large_is_the_published_one():
    with torch.device("meta"):
        model = create_model("mmnas_large", answers=3129, vocab_size=20573)
        small = create_model("mmnas_large", answers=11, vocab_size=40, region_width=16)
        other = create_model("mmnas_large", answers=11, vocab_size=40, region_width=16, head_width=64, flat_hidden=512)
    parts = {part: sum(p.numel() for p in model.get_submodule(part).parameters()) for part in PARTS}
    assert parts == PARTS
    assert sum(p.numel() for p in small.parameters()) == 196_537_421
    assert sum(p.numel() for p in other.parameters()) == 195_488_877
    attentions = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    assert len(attentions) == 16
    assert {m.heads for m in attentions} == {8}
    relations = [m.relation.weight.shape for m in model.decoder if m.kind == "RSA"]
    assert relations == [(8, 64)] * 4
    assert (len(ENCODER), len(DECODER)) == (12, 18)
    assert [DECODER.count(kind) for kind in ("GA", "RSA", "SA", "FFN")] == [6, 4, 1, 7]


# Behaviour ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [*zip(MINIS, WIDTHS, strict=True)])
def test_shapes_attention_and_gradients(name, width):
    model, batch = build(name), make_batch()
    output = model(batch)
    assert isinstance(output, Output)
    assert (output.logits.shape, output.features.shape) == ((B, ANSWERS), (B, width))
    assert torch.equal(model.classifier(output.features), output.logits)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 800_000
    weights = model.look(model.read(batch))[1]
    assert weights.sum(1).tolist() == pytest.approx([1] * B, abs=1e-5)
    shown = model.attention(batch)
    assert shown.shape == (B, R)
    assert shown.amax(1).tolist() == [1] * B
    assert bool((shown >= 0).all())
    assert torch.allclose(shown, weights / weights.amax(1, keepdim=True))
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY
    model.train()
    # Without dropout, so that no path is closed by chance.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.nn.functional.cross_entropy(model(batch).logits, batch["label"]).backward()
    shifts = ("mlp.output.bias", "scores.output.bias", "attention_score.bias", "maps.score.bias", "key.bias")
    for parameter, value in model.named_parameters():
        assert value.grad is not None, parameter
        assert bool(value.grad.isfinite().all()), parameter
        # A softmax does not see what is added to all of its scores.
        if not parameter.endswith(shifts):
            assert value.grad.abs().max() > 0, parameter


@pytest.mark.parametrize("name", MINIS)
def test_padding_of_regions(name):
    """More padding changes nothing, but for BUTD, whose original does not mask."""
    model, batch = build(name), make_batch()
    short = {**batch, "regions": batch["regions"][:, : R - 2], "boxes": batch["boxes"][:, : R - 2]}
    same = torch.allclose(model(batch).logits, model(short).logits, atol=1e-5)
    assert same is (name != "butd_mini")
    assert bool((model.attention(batch)[:, R - 2 :] == 0).all()) is (name != "butd_mini")
    # No regions at all: a question alone can be answered, and nothing is NaN.
    blind = model({**batch, "regions": torch.zeros(B, R, W), "boxes": torch.zeros(B, R, 4)})
    assert bool(blind.logits.isfinite().all())


@pytest.mark.parametrize("name", ["mfb_mini", "mcan_s_mini", "mmnas_s_mini"])
def test_padding_of_words(name):
    """Models with attention over words mask; BUTD and BAN read the states behind the question, as the originals do.

    (OpenVQA's MFB masks nothing; ours does, as its docstring says.)
    """
    model, batch = build(name), make_batch()
    longer = {**batch, **{key: torch.nn.functional.pad(batch[key], (0, 3)) for key in ("text", "text_mask")}}
    assert torch.allclose(model(batch).logits, model(longer).logits, atol=1e-5)


def test_the_functions_say_what_they_read():
    for name in (*MINIS, *PUBLISHED):
        assert model_spec(models[name]).reads == "regions"
        tokens, mask = create_tokenizer(name, ("what", "is"))(["What is?"])
        assert tokens.shape == mask.shape == (1, 14)


def test_embeddings_start_from_word_vectors(tmp_path):
    file = tmp_path / "vectors.txt"
    file.write_text("red 1 2 3\nblue 4 5 6\n")
    tokenizer = create_tokenizer("mcan_s_mini", ("Blue", "green", "red"))
    options = {"answers": ANSWERS, "vocab_size": tokenizer.vocab_size, "words": tokenizer.words}
    with pytest.raises(
        ValueError, match=r"2 of 3 words have vectors in .*vectors\.txt; 1 have none \('green'\), more than"
    ):
        create_model("mcan_s_mini", glove=file, **options)
    with pytest.warns(UserWarning, match=r"2 of 3 words have vectors in .*; the others start as zeros: 'green'"):
        model = create_model("mcan_s_mini", glove=file, glove_missing=0.4, **options)
    create_model("mcan_s_mini", glove=file, glove_missing=0.4, **options)  # said once: a warning here is an error
    ids, _ = tokenizer(["red green blue"])
    rows = model.get_input_embeddings().weight[ids[0, 1:4]]
    assert rows.tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6]]
    assert model.get_input_embeddings().weight[0].abs().min() > 0
    assert create_model("mcan_s_mini", **options).get_input_embeddings().weight.shape == (len(tokenizer.vocabulary), 64)


@pytest.mark.parametrize("name", ["mcan_s_mini", "mmnas_s_mini"])
def test_what_learns_follows_from_trainable(name):
    batch = make_batch()
    whole, head = build(name), 128 * ANSWERS + ANSWERS
    adapters = build(name, trainable="adapters", peft=Finetuning(reduction=16, zero_up=True))
    places = {"mcan_s_mini": 4, "mmnas_s_mini": 5}[name]
    assert learning(adapters) == head + places * (2 * 64 * 4 + 64 + 4)
    assert adapters.prefix_is_frozen
    assert torch.allclose(adapters(batch).logits, whole(batch).logits, atol=1e-6)
    doubled = adapters.suffix(adapters.repeat(adapters.prefix(batch), 2)).logits
    assert torch.allclose(doubled, adapters(batch).logits.repeat(2, 1), atol=1e-5)
    lora = build(name, trainable="lora", peft=Finetuning(rank=2))
    attentions = {"mcan_s_mini": 6, "mmnas_s_mini": 7}[name]
    assert learning(lora) == head + attentions * 2 * 2 * (64 + 64)
    assert learning(build(name, trainable="head")) == head
    assert head < learning(build(name, trainable="top")) < learning(whole)


@pytest.mark.parametrize("name", ["butd_mini", "ban_mini", "mfb_mini"])
def test_what_learns_without_places_for_adapters(name):
    head = learning(build(name, trainable="head"))
    assert head < learning(build(name, trainable="top")) < learning(build(name))
    refuses(r"'adapters' does not work with (BUTD|BAN|MFB): it has no places", build, name, trainable="adapters")


def learning(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("optimizer", ["adamw", "adamax"])
def test_in_a_federation(optimizer):
    batch = make_batch()
    table = Table(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.zeros(B, dtype=torch.int64), batch)
    clients = {f"client-{i}": TableData(table, table, table) for i in range(2)}
    losses = []
    for _ in range(2):
        local = Local(epochs=5, batch_size=B, lr=3e-3, optimizer=optimizer)
        setup = Setup(
            FedAvg(), Members(clients), VQA(ANSWERS), local,
            lambda: create_model("mcan_s_mini", answers=ANSWERS, vocab_size=VOCABULARY), rounds=3, seed=0,
        )  # fmt: skip
        simulation = Simulation(setup, MemoryStore(), InProcess(setup))
        records = simulate(simulation, simulation.start(Workspace(setup.build())))
        losses.append([sum(record.losses.values()) for record in records if record.losses])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2


# The objective of MFB -----------------------------------------------------------------------------------------


def test_divergence_from_the_annotators_answers():
    logits = torch.tensor([[2.0, 1, 0, -1], [0.5, -0.5, 1.5, 0]])
    # Ten annotators each; one answer of the first question is not in the vocabulary.
    annotated = torch.tensor([[0, 1, 1, 0, 1, 1, 4, 1, 0, 1], [2] * 10])
    shares = [[0.3, 0.6, 0, 0], [0, 0, 1, 0]]
    soft = torch.tensor([[0.9, 1, 0, 0], [0, 0, 1, 0]])
    task = VQA(4, "kl")

    def divergence(p, scores):
        q = np.exp(scores) / np.exp(scores).sum()
        return sum(share * math.log(share / q[c]) for c, share in enumerate(p) if share)

    expected = [divergence(p, s) for p, s in zip(shares, logits.tolist(), strict=True)]
    output = Output(logits, logits)
    batch = {"target": soft, "annotated": annotated}
    assert task.loss(output, batch).item() == pytest.approx(sum(expected) / 2)
    assert task.tally(output, batch)["loss"] == pytest.approx((sum(expected), 2))
    assert VQA(4, "kl", reduction="sum").loss(output, batch).item() == pytest.approx(sum(expected))
    # Nobody gave an answer of the vocabulary: nothing to learn.
    nobody = {"target": torch.zeros(2, 4), "annotated": torch.full((2, 10), 4)}
    learned = logits.clone().requires_grad_()
    task.loss(Output(learned, logits), nobody).backward()
    assert learned.grad is not None
    assert not learned.grad.any()
    # Without the annotators: soft scores divided by their sum; of one answer it is cross-entropy.
    expected[0] = divergence([0.9 / 1.9, 1 / 1.9, 0, 0], logits[0].tolist())
    assert task.loss(output, {"target": soft}).item() == pytest.approx(sum(expected) / 2)
    label = {"label": torch.tensor([1, 2])}
    assert task.loss(output, label).item() == pytest.approx(VQA(4).loss(output, label).item())
    assert (task.metric, task.single_label) == ("vqa_accuracy", False)
    with pytest.raises(ValueError, match=r"annotated must have shape \(2, annotators\), got \(3, 10\)"):
        task.loss(output, {"target": soft, "annotated": annotated[[0, 1, 1]]})
    with pytest.raises(ValueError, match=r"every annotated must lie in \[0, 5\), got 7"):
        task.loss(output, {"target": soft, "annotated": annotated + 3})


def test_divergence_of_examples_with_annotators():
    """What the data give and what the task reads go together; soft scores alone do not tell 4 from 7 of ten."""
    examples = Examples(
        np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, np.int64), ["a ?"], ["yes"], ["t"], ["0"],
        [["yes"] * 4 + ["no"] * 4 + ["perhaps"] * 2],
    )  # fmt: skip
    table = encode(examples, create_tokenizer("mfb_mini", ("a",)), ["yes", "no", "red"], ["t"])
    logits = torch.tensor([[1.0, 0, -1]])
    q = np.exp([1.0, 0, -1]) / np.exp([1.0, 0, -1]).sum()
    expected = 0.4 * math.log(0.4 / q[0]) + 0.4 * math.log(0.4 / q[1])
    loss = VQA(3, "kl").loss(Output(logits, logits), table.batch(torch.tensor([0])))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_dropout_of_mfb():
    """OpenVQA drops embeddings and regions, too: with all embeddings dropped, all questions look the same."""
    model, batch = build("mfb_mini", dropout=1.0).train(), make_batch()
    assert isinstance(model, MFB)
    state = model.read(batch)
    blank = model.read({**batch, "text": torch.zeros_like(batch["text"])})
    assert torch.equal(state.words, blank.words)
    model.dropout.p = 0.5
    torch.manual_seed(0)
    seen = []
    model.region_fusion.visual.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.look(state)
    assert 0.3 < (seen[0][:, : R - 2] == 0).float().mean() < 0.7


def test_sum_over_the_batch():
    logits, label = torch.tensor([[2.0, 1, 0, -1], [0.5, -0.5, 1.5, 0]]), {"label": torch.tensor([1, 2])}
    target = {"target": torch.tensor([[0, 1, 0.3, 0], [0, 0, 1, 0]])}
    output = Output(logits, logits)
    # Golden value: the mean over two examples is 2.8946565.
    assert VQA(4, "bce", reduction="sum").loss(output, target).item() == pytest.approx(2 * 2.8946565)
    assert VQA(4, reduction="sum").loss(output, label).item() == pytest.approx(2 * VQA(4).loss(output, label).item())
    assert VQA(4, reduction="sum").tally(output, label) == VQA(4).tally(output, label)
    refuses("reduction must be one of mean, sum, got 'none'", VQA, 4, reduction="none")
