"""What gradients of a client's last layers say of its answers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.protocols import Batch, Output
from confed.privacy.cut import CutPrivacy
from confed.release.probes.answers import SentGradients, matched, observe_gradients

ANSWERS, WIDTH = 5, 4


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.middle, self.top = nn.Linear(3, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, ANSWERS)

    def forward(self, batch: Batch) -> Output:
        z = self.middle(self.bottom(batch["x"]))
        return Output(self.top(z), z)


def _loss(output: Output, batch: Batch) -> Tensor:
    return functional.cross_entropy(output.logits, batch["label"])


def _batches(sizes: tuple[int, ...] = (6, 3)) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, 3, generator=rng), "label": torch.arange(n) % ANSWERS} for n in sizes]


def test_rows_are_those_of_the_formula() -> None:
    model, batches = _Model(), _batches()
    seen = observe_gradients(model, model.top, _loss, batches)
    expected: list[Tensor] = []
    for batch in batches:
        with torch.no_grad():
            z = model.middle(model.bottom(batch["x"]))
            wrong = model.top(z).softmax(1) - functional.one_hot(batch["label"], ANSWERS)
            expected.append(wrong @ model.top.weight / len(z))
    torch.testing.assert_close(seen.rows, torch.cat(expected))
    assert seen.labels.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    torch.testing.assert_close(seen.directions.norm(dim=1), torch.ones(9))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_are_clipped_and_noised_as_they_are_sent() -> None:
    model = _Model()
    clipped = observe_gradients(model, model.top, _loss, _batches(), privacy=CutPrivacy(gradient_clip=1e-3))
    assert float(clipped.rows.norm(dim=1).max()) <= 1e-3 * (1 + 1e-5)
    guard = CutPrivacy(gradient_clip=1e-3, gradient_noise=2.0)
    noised = observe_gradients(model, model.top, _loss, _batches((400,)), privacy=guard)
    assert math.isclose(float(noised.rows.std()), 2e-3, rel_tol=0.1)


def test_activations_are_noised_before_the_server_reads_them() -> None:
    model, batches = _Model(), _batches((400,))
    released = observe_gradients(model, model.top, _loss, batches, middle=model.middle, privacy=CutPrivacy(clip=1e-6))
    with torch.no_grad():
        # Rows of length one millionth: the server's layer answers with its bias alone.
        torch.testing.assert_close(released.z, model.middle.bias.expand(400, -1), atol=1e-5, rtol=0)
    guard = CutPrivacy(clip=1.0, noise=4.0)
    noised = observe_gradients(model, model.top, _loss, batches, middle=model.middle, privacy=guard)
    plain = observe_gradients(model, model.top, _loss, batches, middle=model.middle)
    expected = 4.0 * model.middle.weight.detach().norm(dim=1).mean()
    assert math.isclose(float((noised.z - plain.z).std(0).mean()), float(expected), rel_tol=0.1)
    assert not torch.allclose(noised.rows, plain.rows)


def test_who_knows_the_last_layers_finds_every_answer() -> None:
    model = _Model()
    seen = observe_gradients(model, model.top, _loss, _batches((64,)))
    assert torch.equal(matched(seen, model.top, _loss, ANSWERS), seen.labels)
    clipped = SentGradients(seen.rows * 1e-3, seen.z, seen.labels)
    assert torch.equal(matched(clipped, model.top, _loss, ANSWERS), seen.labels)


def test_learning_goes_on_after_the_rows_were_recorded() -> None:
    model, steps = _Model(), list[int]()
    observe_gradients(model, model.top, _loss, _batches(), learn=lambda batch: steps.append(len(batch["label"])))
    assert steps == [6, 3]
