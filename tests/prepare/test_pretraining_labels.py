"""What the small ResNet learns from, its measure, and its packaged weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from confed.data.table import Table
from confed.datasets.scenes.graph import COLOURS, NOUNS, ROLES, fingerprint, objects
from confed.federation.protocols import Batch, Output
from confed.models.ctran import ctran_mini
from confed.models.pretrained import States, describe, weights_file
from confed.models.resnet import resnet_multilabel_mini
from confed.prepare.pretraining import MINIS, accuracy
from confed.prepare.pretraining.tags import EMPTY, LABELS, CellNames, macro_average_precision, public_pictures


def test_labels_are_the_words_for_what_stands_in_public_pictures():
    table, tags = public_pictures(40, seed=3)
    assert (*NOUNS, *COLOURS) == LABELS
    assert isinstance(table.images, torch.Tensor)
    assert table.images.shape == (40, 3, 64, 64)
    assert set((fingerprint(tags) % 16).tolist()) <= set(ROLES["public"])
    for picture in range(40):
        things = objects(tags, picture)
        words = {thing.noun for thing in things} | {thing.colour for thing in things}
        found = table.columns["labels"][picture]
        assert {LABELS[number] for number in found.nonzero()[:, 0].tolist()} == words
    again, _ = public_pictures(40, seed=3)
    assert torch.equal(table.batch(torch.arange(40))["image"], again.batch(torch.arange(40))["image"])


class Fixed(nn.Module):
    """Scores that are in the batch."""

    def forward(self, batch: Batch) -> Output:
        return Output(batch["scores"], batch["scores"])


def test_the_measure_is_the_mean_of_average_precisions():
    # Every class has the same two positives out of four; its first one is ranked first or second, the other one last.
    truth = torch.zeros(4, 30)
    truth[[0, 3]] = 1
    scores = torch.tensor([3.0, 2.0, 1.0, 0.0]).unsqueeze(1).repeat(1, 30)
    scores[1, 22:] = 4.0  # colours: a negative comes first
    table = Table(None, torch.arange(4), {"labels": truth, "scores": scores})
    nouns, colours = (1 + 2 / 4) / 2, (1 / 2 + 2 / 4) / 2
    model = Fixed().train()
    found = macro_average_precision(model, table, batch_size=3)
    assert found == pytest.approx({"nouns": nouns, "colours": colours, "overall": (22 * nouns + 8 * colours) / 30})
    assert accuracy(model, table, ()) == found
    assert model.training
    assert macro_average_precision(model, table, torch.arange(0)) == {}
    first = macro_average_precision(model, table, torch.tensor([0, 2]))  # one positive, ranked first
    assert first["overall"] == pytest.approx(1.0)


def test_cells_are_named_from_the_four_positions_that_they_cover():
    rng = torch.Generator().manual_seed(0)
    names = CellNames(5, rng)
    plane = torch.randn(2, 5, 8, 8, generator=rng)
    cells = {"noun": torch.zeros(2, 16, dtype=torch.int64), "colour": torch.zeros(2, 16, dtype=torch.int64)}
    cells["noun"][0, 6], cells["colour"][0, 6] = 4, 2
    cells["noun"][1, 15], cells["colour"][1, 15] = 22, 8
    expected = 0.0
    for kind in ("noun", "colour"):
        layer: Any = names.layers[kind]
        total = weights = 0.0
        for picture in range(2):
            for cell in range(16):
                row, column = 2 * (cell // 4), 2 * (cell % 4)
                hidden = plane[picture, :, row : row + 2, column : column + 2].mean((1, 2)).detach().numpy()
                scores = layer.weight.detach().numpy() @ hidden + layer.bias.detach().numpy()
                target = int(cells[kind][picture, cell])
                weight = EMPTY if target == 0 else 1.0
                total -= weight * (scores[target] - math.log(np.exp(scores).sum()))
                weights += weight
        expected += total / weights
    states = States(late=plane.flatten(2).transpose(1, 2))
    assert names.losses(states, cells).item() == pytest.approx(expected, rel=1e-5)


def test_the_packaged_weights_fill_body_and_head():
    file = weights_file("resnet_multilabel_mini")
    facts = describe(file)
    assert facts["metric"] == "C-AP"
    assert facts["answers"] == list(LABELS)
    assert facts["accuracy"]["overall"] >= MINIS["resnet_multilabel_mini"].bar
    whole, other = (resnet_multilabel_mini(labels, pretrained=True) for labels in (LABELS, LABELS[::-1]))
    named, counted = (
        resnet_multilabel_mini(LABELS, pretrained=file, seed=5),
        resnet_multilabel_mini(30, pretrained=True),
    )
    body = {name: value for name, value in whole.state_dict().items() if name.startswith("resnet.")}
    for model in (other, named, counted, ctran_mini(LABELS, pretrained=True)):
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in body.items())
    assert torch.equal(whole.classifier.weight, named.classifier.weight)
    fresh = resnet_multilabel_mini(LABELS, pretrained=False)
    for model in (other, counted):  # labels in another order, or without names, are another head
        assert torch.equal(model.classifier.weight, fresh.classifier.weight)
    assert not torch.equal(whole.classifier.weight, fresh.classifier.weight)
    frozen = resnet_multilabel_mini(LABELS, pretrained=True, norm="frozen").eval()
    batch = {"image": public_pictures(3, 9)[0].batch(torch.arange(3))["image"]}
    torch.testing.assert_close(frozen(batch).logits, whole.eval()(batch).logits, rtol=1e-4, atol=1e-4)
