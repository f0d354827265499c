"""C-Tran and its baseline: equal to the same network built from torch's own parts, states, text embeddings, sizes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedbn import FedBN
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.local import Local
from confed.federation.params import Scope, layout, named_tensors
from confed.federation.protocols import Output
from confed.federation.state import MemoryStore
from confed.models import create_tokenizer
from confed.models.ctran import (
    CTran,
    EncoderLayer,
    LabelGraph,
    LabelReadout,
    co_occurrence,
    ctran,
    ctran_mini,
    log_odds,
)
from confed.models.label_embeddings import LabelEmbeddings, save_label_embeddings
from confed.models.layers import FrozenBatchNorm2d, renormalise
from confed.models.resnet import mini_resnet, resnet_multilabel, resnet_multilabel_mini
from refusals import refuses

LABELS = ("car", "tree", "sea", "ship", "sand")
C, D = len(LABELS), 64


def batch(size=3, side=64, seed=0, known=False):
    rng = torch.Generator().manual_seed(seed)
    result = {"image": torch.randint(0, 256, (size, 3, side, side), generator=rng, dtype=torch.uint8)}
    if known:
        result["known"] = torch.randint(-1, 2, (size, C), generator=rng, dtype=torch.int8)
    return result


def table(width=D, names=LABELS):
    rng = torch.Generator().manual_seed(1)
    vectors = torch.randn(len(names) + 2, width, generator=rng)
    return LabelEmbeddings(tuple(names), vectors[2:], positive=vectors[0], negative=vectors[1])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "labels.safetensors"
    save_label_embeddings(table(), path)
    return path


def torch_layer(ours, dropout=0.1):
    """The same values in torch's own layer."""
    theirs = nn.TransformerEncoderLayer(D, 4, D, dropout, "relu", batch_first=True, norm_first=False)
    pairs = {"self_attn.in_proj_": "attention.", "self_attn.out_proj.": "output."}
    state = dict(ours.state_dict())
    for their, our in pairs.items():
        state |= {their + kind: state.pop(our + kind) for kind in ("weight", "bias")}
    theirs.load_state_dict(state)
    return theirs


def reference(model, inputs, bias=None):
    """The pass as the paper has it: all tokens through all layers, a full C x C layer, and its diagonal."""
    pixels = (inputs["image"].float() / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    plane = model.resnet(pixel_values=pixels).last_hidden_state
    tokens = model.tokens.labels.repeat(len(plane), 1, 1)
    for b, row in enumerate(inputs.get("known", torch.full((len(plane), C), -1)).tolist()):
        for c, state in enumerate(row):
            if state >= 0:
                tokens[b, c] = tokens[b, c] + model.tokens.states[state]
    x = model.norm(torch.cat([plane.flatten(2).permute(0, 2, 1), tokens], 1))
    for layer in model.layers:
        theirs = torch_layer(layer).train(model.training)
        before, x = x, theirs(x, src_mask=bias)
    _, weights = theirs.self_attn(before, before, before, attn_mask=bias)  # the mean over heads
    states = x[:, -C:]
    full = F.linear(states, model.classifier.weight, model.classifier.bias)
    return torch.diagonal(full, dim1=1, dim2=2), states.mean(1), weights[:, -C:, :-C]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_equals_the_network_of_torchs_own_parts(known, text, file):
    model = ctran_mini(LABELS, embeddings=file if text else None).eval()
    inputs = batch(known=known)
    with torch.no_grad():
        ours = model(inputs)
        logits, features, weights = reference(model, inputs)
        attention = model.attention(inputs)
    assert ours.logits.shape == (3, C)
    torch.testing.assert_close(ours.logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.features, features, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention, weights, rtol=1e-4, atol=1e-6)
    assert attention.shape == (3, C, model.grid[0] * model.grid[1])
    assert model.grid == (8, 8)
    assert bool((attention.sum(-1) < 1).all())


def test_all_unknown_is_no_state_at_all_and_known_labels_matter(file):
    model = ctran_mini(LABELS, embeddings=file).eval()
    inputs = batch()
    unknown = torch.full((3, C), -1, dtype=torch.int8)
    assert torch.equal(model(inputs).logits, model(inputs | {"known": unknown}).logits)
    one = unknown.clone()
    one[1, 2] = 1
    changed = (model(inputs).logits != model(inputs | {"known": one}).logits).any(1)
    assert changed.tolist() == [False, True, False]


def test_states_of_the_paper_and_of_the_released_code(file):
    ours, swapped = (ctran_mini(LABELS, embeddings=file, swap_states=swap) for swap in (False, True))
    words, inputs = table(), batch(2)
    inputs["known"] = torch.tensor([[-1, 0, 1, -1, 0]] * 2)
    expected = words.vectors.clone()
    expected[1] += words.negative
    expected[2] += words.positive
    expected[4] += words.negative
    assert torch.equal(ours.tokens(inputs)[0], expected)
    mirrored = inputs | {"known": torch.tensor([[-1, 1, 0, -1, 1]] * 2)}
    assert torch.equal(swapped.tokens(mirrored), ours.tokens(inputs))


def test_rows_are_found_by_name_whatever_their_order(file):
    forward, backward = (ctran_mini(labels, embeddings=file) for labels in (LABELS, LABELS[::-1]))
    assert torch.equal(forward.tokens.labels, table().vectors)
    assert torch.equal(backward.tokens.labels, table().vectors.flip(0))


def test_fixed_tables_are_frozen_and_everything_else_learns(file):
    names = {"tokens.labels", "tokens.states"}
    learned, fixed, mixed = (
        ctran_mini(LABELS, **options)
        for options in ({}, {"embeddings": file}, {"embeddings": file, "learn_labels": True})
    )
    assert (learned.frozen, fixed.frozen, mixed.frozen) == (set(), names, {"tokens.states"})
    scopes = layout(named_tensors(fixed), {"*": Scope.SHARED}, frozen=fixed.frozen)
    assert {name for name, scope in scopes.items() if scope is not Scope.SHARED} == names
    assert "resnet.embedder.embedder.normalization.running_mean" in scopes  # statistics are shared
    for model in (learned, fixed, mixed):
        loss = F.binary_cross_entropy_with_logits(model(batch(known=True)).logits, torch.ones(3, C), reduction="sum")
        loss.backward()
        dead = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
        assert dead == []


def test_ctran_has_the_published_parameter_counts():
    trunk = 11_689_512 - 513_000  # ResNet-18 as published, without its 1,000 classes
    d = 512
    layer = 4 * (d * d + d) + 2 * (d * d + d) + 2 * 2 * d
    model = ctran(17)
    learning = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in model.resnet.parameters()) == trunk
    assert learning == trunk + 2 * d + 3 * layer + 17 * (d + 1) + 17 * d + 2 * d
    assert model.grid == (8, 8)
    assert model.plane(batch(1, 256)).shape == (1, 512, 8, 8)
    baseline = resnet_multilabel(17, image_size=224)
    assert sum(p.numel() for p in baseline.parameters()) == trunk + 17 * (d + 1)
    assert baseline.grid == (7, 7)
    assert sum(p.numel() for p in ctran_mini(LABELS).parameters()) < 350_000


def test_initial_values_are_the_released_ones():
    model = ctran_mini(40)
    bound = 1 / 8
    for name, value in model.named_parameters():
        if name.startswith("resnet."):
            continue
        if name.startswith("norm.") or ".norm" in name or name.endswith("attention.bias"):
            assert torch.equal(value, torch.full_like(value, float("norm" in name and name.endswith("weight")))), name
            continue
        wide = (6 / (D + 3 * D)) ** 0.5 if name.endswith("attention.weight") else bound
        assert value.abs().max() <= wide, name
        if value.numel() > 100:
            assert value.abs().max() > 0.9 * wide, name
            assert abs(value.std().item() / (wide / 3**0.5) - 1) < 0.1, name


def test_all_models_of_a_seed_start_with_the_same_body():
    model, baseline = ctran_mini(LABELS, graph=True, seed=3).eval(), resnet_multilabel_mini(LABELS, seed=3).eval()
    assert torch.equal(model.plane(batch()), baseline.plane(batch()))
    assert create_tokenizer("ctran", ("what",))(["what"])[0].ndim == 2


def test_a_layer_drops_what_torchs_own_drops():
    ours = EncoderLayer(D, 4, 0.4, torch.Generator().manual_seed(0))
    # One example: torch's own draws for several in another order.
    x = torch.randn(1, 9, D, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        theirs = torch_layer(ours, 0.4)
        torch.manual_seed(5)
        found = ours(x)
        torch.manual_seed(5)
        expected = theirs(x)
        assert not torch.allclose(found, ours.eval()(x), atol=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_acts_in_training_only():
    model = ctran_mini(LABELS, norm="group", dropout=0.1)
    inputs = batch()
    with torch.random.fork_rng():
        assert not torch.equal(model(inputs).logits, model(inputs).logits)
        model.eval()
        assert torch.equal(model(inputs).logits, model(inputs).logits)
        still = ctran_mini(LABELS, norm="group")
        assert torch.equal(still(inputs).logits, still(inputs).logits)


def test_baseline_equals_pooling_by_hand():
    model = resnet_multilabel_mini(C).eval()
    inputs = batch()
    pixels = (inputs["image"] / 255 - model.mean) / model.std
    with torch.no_grad():
        ours = model(inputs)
        pooled = model.resnet(pixel_values=pixels).pooler_output.flatten(1)
        floats = model({"image": pixels})
    torch.testing.assert_close(ours.features, pooled)
    torch.testing.assert_close(ours.logits, pooled @ model.classifier.weight.T + model.classifier.bias)
    assert torch.equal(floats.logits, ours.logits)
    assert torch.equal(model.pretraining_states(inputs).loss_logits, ours.logits)


@pytest.mark.parametrize("kind", ["frozen", "group"])
def test_frozen_and_group_normalisation_see_no_other_example(kind):
    body = mini_resnet(False, "batch", 0)
    rng = torch.Generator().manual_seed(2)
    for layer in body.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for value in (layer.weight.data, layer.bias.data, layer.running_mean, layer.running_var):
                value.uniform_(0.5, 1.5, generator=rng)
    model = CTran(body, C, torch.Generator().manual_seed(0), image_size=(64, 64), dropout=0.0)
    expected = model.eval()(batch()).logits
    renormalise(body, kind)
    model.train()
    kinds = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, FrozenBatchNorm2d, nn.GroupNorm))]
    wanted = FrozenBatchNorm2d if kind == "frozen" else nn.GroupNorm
    assert kinds
    assert all(isinstance(layer, wanted) for layer in kinds)
    whole, alone = model(batch()).logits, model({"image": batch()["image"][:1]}).logits
    torch.testing.assert_close(whole[:1], alone, rtol=1e-4, atol=1e-5)  # no example depends on another
    if kind == "frozen":
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
        assert sum(name.endswith("running_var") for name in model.frozen) == len(kinds)
    else:
        assert model.frozen == set()
        assert {layer.num_channels // layer.num_groups for layer in kinds} == {16}


def test_a_checkpoint_of_the_library_gives_the_body(tmp_path):
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, layer_type="basic", depths=[1, 1], hidden_sizes=[8, 16], num_labels=3)
    source = ResNetForImageClassification(config).eval()
    source.save_pretrained(tmp_path)
    model = ctran(LABELS, pretrained=tmp_path, norm="frozen", image_size=32, layers=1).eval()
    assert model.width == 16
    with torch.no_grad():
        pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        theirs = source.resnet(pixel_values=pixels).last_hidden_state
        torch.testing.assert_close(model.plane({"image": pixels}), theirs, rtol=1e-4, atol=1e-5)


def test_the_minis_share_a_body_from_a_file(tmp_path):
    from safetensors.torch import save_file

    source = resnet_multilabel_mini(3, seed=9).eval()
    path = tmp_path / "body.safetensors"
    save_file(source.state_dict(), path)
    model = ctran_mini(LABELS, pretrained=path, norm="frozen").eval()
    torch.testing.assert_close(model.plane(batch()), source.plane(batch()), rtol=1e-4, atol=1e-5)
    save_file({"resnet.x": torch.zeros(1)}, path)
    refuses("does not have the tensors of this ResNet", ctran_mini, LABELS, pretrained=path)


def test_the_graph_adds_nothing_at_first_and_then_what_it_says():
    plain, model = (ctran_mini(LABELS, graph=graph).eval() for graph in (False, True))
    assert torch.equal(model.graph(), torch.zeros(C, C))
    torch.testing.assert_close(model(batch()).logits, plain(batch()).logits, rtol=1e-5, atol=1e-6)
    rng = torch.Generator().manual_seed(0)
    shared = torch.rand(200, 1, generator=rng)
    labels = (torch.rand(200, C, generator=rng) < shared).float()
    model.graph.co_occurrence.copy_(co_occurrence(labels))
    model.graph.examples.fill_(200)
    with torch.no_grad():
        model.graph.scale.fill_(0.7)
    bias = torch.zeros(64 + C, 64 + C)
    bias[64:, 64:] = 0.7 * log_odds(co_occurrence(labels), 200)
    logits, _, weights = reference(model, batch(), bias)  # with gradients: torch's fast path reads masks as booleans
    torch.testing.assert_close(model(batch()).logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.attention(batch()), weights.detach(), rtol=1e-4, atol=1e-6)
    model(batch()).logits.sum().backward()
    assert model.graph.scale.grad.abs() > 0


def test_log_odds_by_counting():
    labels = np.random.default_rng(0).integers(0, 2, (50, 3))
    labels[:, 2] = labels[:, 0]  # the third label is the first
    ours = log_odds(co_occurrence(torch.from_numpy(labels)), 50)
    for i in range(3):
        for j in range(3):
            if i == j:
                assert ours[i, j] == 0
                continue
            number = {(a, b): 0.5 for a in (0, 1) for b in (0, 1)}
            for row in labels:
                number[row[i], row[j]] += 1
            expected = np.log(number[1, 1] * number[0, 0] / (number[1, 0] * number[0, 1]))
            assert ours[i, j].item() == pytest.approx(expected, rel=1e-4)
    assert ours[0, 2] > 5
    for examples in (0, 10):
        assert bool(log_odds(torch.tensor([[-0.3, 1.7], [1.7, 2.0]]), examples).isfinite().all())
    assert torch.equal(LabelGraph(4)(), torch.zeros(4, 4))
    for examples in (0, 1, 10**6):
        assert torch.equal(log_odds(LabelGraph(4).co_occurrence, examples), torch.zeros(4, 4))


def test_log_odds_see_rare_labels_among_many_examples():
    """Of 400,000 examples 30 carry the first label, 40 the second, 25 both; the third stands with neither."""
    n = 400_000
    counts = np.array([[30, 25, 0], [25, 40, 0], [0, 0, 50]])
    ours = log_odds(torch.from_numpy(counts / n).float(), torch.tensor(float(n)))
    by_hand = np.log(25.5 * (n - 45 + 0.5) / (5.5 * 15.5))
    assert ours[0, 1].item() == pytest.approx(by_hand, rel=1e-2)
    apart = np.log(0.5 * (n - 80 + 0.5) / (30.5 * 50.5))
    assert ours[0, 2].item() == pytest.approx(apart, rel=1e-2)


def test_the_mean_over_clients_is_the_co_occurrence_of_all():
    labels = (torch.rand(30, C, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    parts = labels[:7], labels[7:12], labels[12:]
    mean = sum(len(part) / 30 * co_occurrence(part) for part in parts)
    torch.testing.assert_close(mean, co_occurrence(labels))
    assert torch.equal(co_occurrence(labels).diagonal(), labels.mean(0)) or torch.allclose(
        co_occurrence(labels).diagonal(), labels.mean(0)
    )


def test_embeddings_that_do_not_fit_are_refused(file, tmp_path):
    with pytest.raises(ValueError, match=r"no row for 'shipp'; 'shipp' is spelt much like 'ship'"):
        ctran_mini((*LABELS[:3], "shipp"), embeddings=file)
    refuses("must have the model's 512 features, got 64", ctran, LABELS, embeddings=file)
    refuses("answers must be the names, got their number 5", ctran_mini, 5, embeddings=file)
    refuses("found none", ctran_mini, LABELS, embeddings=tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="the labels' states must have shape"):
        LabelReadout(C, D, torch.Generator())(torch.zeros(3, D))
    with pytest.raises(ValueError, match="labels must have shape"):
        CTran(mini_resnet(False, "batch", 0), C, torch.Generator(), embeddings=torch.zeros(C, 3))


class AllLabels:
    """A task of several labels, in three lines: this test is about the model."""

    metric = "loss"

    def loss(self, output: Output, batch):
        return F.binary_cross_entropy_with_logits(output.logits, batch["labels"])

    def tally(self, output: Output, batch):
        return {"loss": (float(self.loss(output, batch)) * len(batch["image"]), float(len(batch["image"])))}

    def predictions(self, output: Output, batch):
        return ((output.logits > 0) == (batch["labels"] > 0.5)).float().mean(1)


def federation(method, model, rows=6):
    """Two clients of one batch each, and what they shared after one round."""

    def data(seed):
        part = batch(rows, seed=seed, known=True)
        labels = (torch.rand(rows, C, generator=torch.Generator().manual_seed(seed)) < 0.4).float()
        table = Table(part["image"], torch.arange(rows), {"labels": labels, "known": part["known"]})
        return TableData(table, table, table)

    task = AllLabels()
    members = Members({"a": data(1), "b": data(2)})
    local = Local(epochs=1, batch_size=rows, lr=0.01, optimizer="sgd")
    setup = Setup(method.configure(model(), task), members, task, local, model, rounds=1, seed=0)
    with Simulation(setup, MemoryStore()) as simulation:
        (record,) = simulate(simulation, simulation.start(Workspace(setup.model())))
    assert record.errors == {}
    return record


def test_what_a_federation_sends(file):
    plain = federation(FedAvg(), lambda: ctran_mini(LABELS, embeddings=file))
    sent = plain.servers["main"].params
    assert not {"tokens.labels", "tokens.states"} & set(sent)
    fresh = ctran_mini(LABELS, embeddings=file).state_dict()
    assert set(sent) == set(fresh) - {"tokens.labels", "tokens.states"}
    moved = {name for name, value in sent.items() if not torch.equal(value, fresh[name])}
    assert moved == set(sent)
    # Private normalisation, and its frozen and group variants, which have nothing to keep private.
    private = federation(FedBN(), lambda: ctran_mini(LABELS))
    assert not any("normalization" in name for name in private.servers["main"].params)
    refuses("this model has none", FedBN().configure, ctran_mini(LABELS, norm="group"), AllLabels())


def test_the_baseline_in_a_federation():
    record = federation(FedAvg(), lambda: resnet_multilabel_mini(C))
    assert "classifier.weight" in record.servers["main"].params
