"""DP-FPL: gradients of single examples, clipping, noise, the projection, what is sent, and both epsilons."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from confed.algorithms.dpfpl import DPFPL, context_gradients, factors, projected
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.privacy.accountant import epsilon
from confed.privacy.examples import ExamplePrivacy
from confed.recipes.recipe import load_recipe
from confed.report.report import write_report
from confed.runs.checks import check_local
from confed.runs.run import prepare
from confed.runs.run import run as run_recipe
from confed.testing.toy import ToyTask, toy_setup
from confed.testing.trial import run
from refusals import refuses

WIDE = ExamplePrivacy(clip=1e9)
RNG = torch.Generator().manual_seed(1)
BATCH = {"x": torch.randn(5, 6, generator=RNG), "label": torch.tensor([0, 2, 1, 1, 0])}


def gradients(context: Tensor) -> tuple[Tensor, Any]:
    model: Any = toy_setup(DPFPL()).model()
    return context_gradients(model, ToyTask(), BATCH, context), model


def test_gradients_of_examples_are_those_of_batches_of_one() -> None:
    found, model = gradients(torch.ones(2, 5))
    for i, one in enumerate(found):
        context = torch.ones(2, 5, requires_grad=True)
        texts = model.class_features(context, torch.arange(3))
        scores = model.similarity_scores(model.image_features({"x": BATCH["x"][i : i + 1]}) @ texts.T)
        torch.nn.functional.cross_entropy(scores, BATCH["label"][i : i + 1]).backward()
        torch.testing.assert_close(one, context.grad)


def test_one_example_moves_the_mean_by_two_clips_at_most() -> None:
    privacy = ExamplePrivacy(clip=0.5)
    rows = [torch.randn(4, 3, 2, generator=RNG), torch.randn(4, 6, generator=RNG)]
    rows[0][0], rows[1][0] = 1000 * rows[0][0], 1000 * rows[1][0]
    other = [torch.cat([-row[:1], row[1:]]) for row in rows]
    one, two = (torch.cat([t.flatten() for t in privacy.release(r, 4, None)]) for r in (rows, other))
    moved = float((one - two).norm())
    assert 0.99 * 2 * 0.5 / 4 < moved <= 2 * 0.5 / 4 + 1e-6
    # The clipped mean of a batch, as in the released code, moves by 2 C whatever the size of the batch.
    means = [torch.cat([r.flatten(1) for r in x], 1).mean(0) for x in (rows, other)]
    apart = [m * min(1, 0.5 / float(m.norm())) for m in means]
    assert float((apart[0] - apart[1]).norm()) > 0.99 * 2 * 0.5


def test_short_gradients_pass_and_long_ones_are_cut() -> None:
    found = ExamplePrivacy(clip=1.0).release([torch.tensor([[0.3, 0.4], [3.0, 4.0]])], 2, None)[0]
    torch.testing.assert_close(found, torch.tensor([0.9, 1.2]) / 2)


def test_noise_has_the_spread_that_the_accountant_reads() -> None:
    privacy = ExamplePrivacy(clip=0.5, noise=3.0)
    found = privacy.release([torch.zeros(8, 100, 200)], 8, torch.Generator().manual_seed(0))[0]
    assert float(found.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert not torch.equal(found, privacy.release([torch.zeros(8, 100, 200)], 8, None)[0])


def test_projection_keeps_rows_and_columns_of_the_factors() -> None:
    prompt, gradient = torch.randn(5, 7, generator=RNG), torch.randn(5, 7, generator=RNG)
    u, v = factors(prompt, 2, RNG)
    torch.testing.assert_close(u.T @ u, torch.eye(2))
    torch.testing.assert_close(v @ v.T, torch.eye(2))
    kept = projected(gradient @ v.T, u.T @ gradient, u, v)
    away = gradient - kept
    assert (u.T @ away).abs().max() < 1e-5
    assert (away @ v.T).abs().max() < 1e-5
    whole_u, whole_v = factors(prompt, 9, RNG)
    torch.testing.assert_close(projected(gradient @ whole_v.T, whole_u.T @ gradient, whole_u, whole_v), gradient)


def test_without_clip_and_noise_the_step_is_plain() -> None:
    """One SGD step on all examples, p_G as PromptFL's from the sum of both prompts, p_L by the same gradient."""
    local = Local(epochs=1, batch_size=64, lr=0.1, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(DPFPL(rank=9, example_privacy=WIDE), rounds=1, local=local)
    outcome = run(setup)
    start: Any = setup.model()
    both = start.context.vectors.detach() + start.private_context.vectors.detach()
    for name, state in outcome.states.items():
        batch = next(iter(setup.population.data(name).test(64)))
        step = 0.1 * context_gradients(start, ToyTask(), batch, both).mean(0)
        private = state.tensors["private"]["private_context.vectors"]
        torch.testing.assert_close(private, start.private_context.vectors.detach() - step)
        torch.testing.assert_close(state.tensors["personal"][CONTEXT], start.context.vectors.detach() - step)


def test_noise_repeats_by_seed_where_it_may() -> None:
    def context(repeatable: bool, noise: float = 1.0) -> Tensor:
        privacy = ExamplePrivacy(noise=noise, repeatable=repeatable)
        return run(toy_setup(DPFPL(example_privacy=privacy), rounds=1)).servers["main"].params[CONTEXT]

    assert torch.equal(context(True), context(True))
    assert not torch.equal(context(False), context(False))
    assert not torch.equal(context(True), context(True, 0.0))


def test_every_step_draws_noise_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[list[Tensor]] = []
    given: list[tuple[list[tuple[int, ...]], int]] = []
    real = ExamplePrivacy.release

    def noise_alone(self: ExamplePrivacy, rows: Any, size: int, rng: Any) -> list[Tensor]:
        given.append(([tuple(r.shape[1:]) for r in rows], size))
        released.append(real(self, [torch.zeros_like(r) for r in rows], size, rng))
        return released[-1]

    monkeypatch.setattr(ExamplePrivacy, "release", noise_alone)
    local = Local(epochs=2, batch_size=5, lr=0.05)
    run(toy_setup(DPFPL(rank=1, example_privacy=ExamplePrivacy(noise=1.0)), rounds=2, local=local))
    assert len(released) >= 2 * 2 * 3
    for part in zip(*released, strict=True):
        assert len({tuple(noise.flatten().tolist()) for noise in part}) == len(released)
    assert {str(shapes) for shapes, _ in given} == {str([(2, 5), (2, 1), (1, 5)])}
    assert {size for _, size in given} == {5}


def test_iterations_and_class_lists_from_labels_are_refused() -> None:
    refuses(r"local\.iterations must be 0 for DP-FPL", check_local, DPFPL(), Local(iterations=3))
    told = ["algorithm.name=dpfpl", "algorithm.example_privacy.noise=1.0", "data.offer=own", "~study.lr"]
    recipe = load_recipe("prompts_scenes", [*told, "study.methods=[]", "data.partition=classes", "data.classes=8"])
    refuses(r"which no noise hides: set data\.offer = 'base'", prepare, recipe)


def test_claimed_epsilon_turns_the_released_codes_formula_round() -> None:
    """std = sqrt(T ln(1 / delta)) / named * C / B there, z C / B here."""
    named, rounds = 0.4, 100
    z = math.sqrt(rounds * math.log(1e5)) / named
    method = DPFPL(example_privacy=ExamplePrivacy(noise=z))
    assert method.claimed_epsilon(rounds) == pytest.approx({"released code of DP-FPL": named})


def test_both_epsilons_are_in_summary_and_report(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    told = (
        "algorithm.name=dpfpl", "algorithm.example_privacy.noise=4.0", "study.methods=[]", "model.source=tiny:clip",
        "data.shots=1", "data.classes=4", "data.test_per_class=1", "data.validation_shots=1",
        "run.rounds=3", "local.epochs=2", "local.batch_size=4",
        "run.gallery=0", "~study.lr", "model.context=2",
    )  # fmt: skip
    found = run_recipe(load_recipe("prompts_scenes", told), tmp_path / "run")["example_privacy"]
    assert set(found["steps"].values()) == {6}
    assert set(found["epsilon"].values()) == {epsilon(4.0, 6, 1e-5)}
    assert found["claimed"] == {"released code of DP-FPL": pytest.approx(math.sqrt(3 * math.log(1e5)) / 4)}
    html = write_report(tmp_path / "run").read_text()
    assert "ε named by the released code of DP-FPL" in html
    assert f"{epsilon(4.0, 6, 1e-5):.3g}" in html


def test_a_clip_of_nothing_is_refused() -> None:
    refuses(r"example_privacy\.clip must be positive", replace, WIDE, clip=0.0)
