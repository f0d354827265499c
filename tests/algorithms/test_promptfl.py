"""PromptFL: regularisers, refusals."""

from typing import Any

import pytest
import torch

from confed.algorithms.promptfl import PromptFL
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.testing.toy import toy_setup
from confed.testing.trial import run


@pytest.mark.parametrize("options", [{"knowledge": 2.0}, {"consistency": 0.5}], ids=str)
def test_one_step_is_down_the_gradient_of_the_written_out_loss(options: dict[str, float]) -> None:
    local = Local(epochs=1, batch_size=64, lr=0.1, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(PromptFL(**options), rounds=1, local=local)
    model: Any = setup.model()
    for name, state in run(setup).states.items():
        batch = next(iter(setup.population.data(name).test(64)))
        context = model.context.vectors.detach().clone().requires_grad_()
        texts, plain = model.class_features(context, torch.arange(3)), model.handwritten_features(torch.arange(3))
        seen = model.image_features(batch)
        logged, wanted = (5 * seen @ texts.T).log_softmax(1), (5 * seen @ plain.T).softmax(1)
        loss = -logged[torch.arange(len(seen)), batch["label"]].mean()
        loss = loss + options.get("knowledge", 0.0) * (texts - plain).square().sum(1).mean()
        divergence = (wanted * (wanted.log() - logged)).sum(1).mean()
        loss = loss + options.get("consistency", 0.0) * (25 * (texts - plain).abs().mean() + divergence)
        loss.backward()
        stepped = model.context.vectors.detach() - 0.1 * context.grad
        torch.testing.assert_close(state.tensors["personal"][CONTEXT], stepped)
