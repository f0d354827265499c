"""Regularisers of prompts against hand calculations."""

import math

import torch

from confed.losses.prompts import knowledge_guidance, score_consistency, text_consistency, text_contrast

ONE = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
OTHER = torch.tensor([[0.0, 1.0], [0.0, 1.0]])


def test_knowledge_guidance_is_the_mean_squared_distance() -> None:
    assert knowledge_guidance(ONE, OTHER).item() == 1.0  # 2 and 0
    assert math.isclose(knowledge_guidance(ONE, OTHER).item(), 2 * (1 - (ONE * OTHER).sum(1).mean().item()))


def test_text_consistency_is_the_mean_absolute_difference() -> None:
    assert text_consistency(ONE, OTHER).item() == 0.5


def test_score_consistency_is_the_divergence() -> None:
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    wanted = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert math.isclose(score_consistency(q.log()[None], p.log()[None]).item(), wanted, rel_tol=1e-6)


def test_text_contrast_of_equal_similarities_is_log_two() -> None:
    assert math.isclose(text_contrast(ONE, OTHER, OTHER, 0.5).item(), math.log(2), rel_tol=1e-6)
    near = text_contrast(ONE, ONE, OTHER, 1.0).item()
    wanted = (math.log(1 + math.exp(-1.0)) + math.log(2)) / 2
    assert math.isclose(near, wanted, rel_tol=1e-6)
