"""AFL against ridge regression on pooled features, its protections, and its refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.algorithms.afl import AFL, moments, ridge_head, targets
from confed.data.examples import TableData
from confed.data.table import Table
from confed.models import create_model
from confed.models.tokenizer import WordTokenizer
from confed.testing.toy import WIDTH, toy_setup
from confed.testing.trial import run
from refusals import refuses

EXAMPLES = 240


def pooled_solution(features: Tensor, label: Tensor, ridge: float) -> np.ndarray:
    """Ridge regression by least squares on the examples and sqrt(N gamma) I beneath them, (D + 1, C)."""
    x = np.c_[features.double().numpy(), np.ones(len(features))]
    y = np.eye(3)[label.numpy()]
    gamma = ridge * np.trace(x.T @ x / len(x)) / x.shape[1]
    stacked = np.r_[x, np.sqrt(len(x) * gamma) * np.eye(x.shape[1])]
    return np.linalg.lstsq(stacked, np.r_[y, np.zeros((x.shape[1], 3))], rcond=None)[0]


def rows() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, WIDTH, generator=rng)
    return x, (x @ torch.randn(WIDTH, 3, generator=rng)).argmax(1)


def clients(count: int, dtype: torch.dtype = torch.float32) -> dict[str, TableData]:
    """The same examples shared out, sorted by class and in unequal parts."""
    x, label = rows()
    x = x.to(dtype)
    order = torch.argsort(label, stable=True)
    cuts = np.unique(np.r_[0, np.sort(np.random.default_rng(count).choice(EXAMPLES - 1, count - 1, False)) + 1])
    found: dict[str, TableData] = {}
    for number, (begin, end) in enumerate(zip(cuts, [*cuts[1:], EXAMPLES], strict=True)):
        own = order[begin:end]
        pictures = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
        table = Table(pictures, torch.zeros(len(own), dtype=torch.int64), {"x": x[own], "label": label[own]})
        found[f"client-{number}"] = TableData(table, table, table)
    return found


def solution(method: AFL, count: int) -> tuple[Any, Tensor]:
    setup = toy_setup(method, clients=clients(count, torch.float64), rounds=1)
    setup = replace(setup, build=lambda build=setup.build: build().double())  # features do not depend on the batch then
    outcome = run(setup)
    return setup, outcome.servers["main"].slots["analytic"]["solution"]


@pytest.mark.parametrize("count", [1, 7, 60])
def test_head_is_that_of_pooled_examples(count: int) -> None:
    setup, found = solution(AFL(ridge=1e-2), count)
    x, label = rows()
    with torch.no_grad():
        features = setup.model().eval()({"x": x.double()}).features
    wanted = pooled_solution(features, label, 1e-2)
    assert np.abs(found.numpy() - wanted).max() < 1e-9


def test_deployed_model_answers_with_the_head_on_frozen_features() -> None:
    setup, found = solution(AFL(), 7)
    outcome = run(setup)
    model = setup.model().eval()
    model.load_state_dict(dict(outcome.servers["main"].params), strict=False)
    x, label = rows()
    x = x.double()
    with torch.no_grad():
        output = setup.algorithm.deployed_model(model)({"x": x})
        scores = torch.cat([model({"x": x}).features, torch.ones(EXAMPLES, 1)], 1) @ found
    torch.testing.assert_close(output.logits.double() / 10, scores, rtol=1e-4, atol=1e-5)
    assert (output.logits.argmax(1) == label).float().mean() > 0.6  # chance is 1/3


def test_ill_conditioned_gram_matrix_names_the_ridge_that_helps() -> None:
    gram, cross = moments(torch.ones(20, 3), torch.ones(20, 2), intercept=True)
    refuses(r"Gram matrix of 4 features is ill-conditioned.*algorithm.ridge to at least", ridge_head, gram, cross, 0.0)
    with pytest.raises(ValueError, match="at least") as error:
        ridge_head(gram, cross, 1e-15)
    least = float(str(error.value).rsplit(" ", 1)[1])
    assert torch.isfinite(ridge_head(gram, cross, least)).all()


def test_moments_made_indefinite_by_noise_are_solved() -> None:
    gram = torch.diag(torch.tensor([2.0, 1.0, -0.5], dtype=torch.float64))
    head = ridge_head(gram, torch.eye(3, dtype=torch.float64), 0.1)
    torch.testing.assert_close(head.diagonal(), 1 / torch.tensor([2.1, 1.1, 0.1], dtype=torch.float64))


@pytest.mark.parametrize("name", ["vilt_mini", "vit_mini", "resnet_multilabel_mini", "ctran_mini"])
def test_backbones_give_their_features(name: str) -> None:
    words = WordTokenizer(["which", "colour", "is", "this"])
    model = create_model(name, answers=("red", "blue", "green"), vocab_size=words.vocab_size, pretrained=False, seed=0)
    method = AFL().configure(model, None)  # type: ignore[arg-type]
    method.add_modules(model, torch.Generator().manual_seed(0))
    text, mask = words(["which colour is this"] * 2)
    pictures = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        output = method.deployed_model(model.eval())({"image": pictures, "text": text, "text_mask": mask})
    assert output.logits.shape == (2, 3)
    assert output.features.shape == (2, method.shape[0] - 1)


def test_several_right_answers_are_soft_targets() -> None:
    batch = {"label": torch.tensor([0]), "target": torch.tensor([[0.3, 0.9, 0.0]])}
    assert targets(batch, 3).tolist() == [[1.0, 0.0, 0.0]]
    assert targets(batch, 3, single=False)[0].tolist() == pytest.approx([0.3, 0.9, 0.0])
