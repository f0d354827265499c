"""What the global model is at a client that keeps values of its own."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from confed.federation.client_info import ClientInfo
from confed.federation.state import ClientState, MemoryStore
from confed.runs.evaluate import Examination, _models


@pytest.mark.parametrize(("answers", "expected"), [("alone", 1.0), ("with own parts", 5.0)])
def test_private_values_are_in_the_global_model_only_where_it_cannot_answer_without(
    answers: str, expected: float
) -> None:
    store = MemoryStore()
    store.save("a", ClientState(tensors={"private": {"w": torch.tensor(5.0)}}))
    algorithm = SimpleNamespace(global_model=answers, initial_private=lambda shared: {})
    simulation = SimpleNamespace(
        setup=SimpleNamespace(algorithm=algorithm, keep_personal=False),
        store=store,
        shared=lambda servers, info: {"w": torch.tensor(1.0)},
    )
    models = _models(Examination(), cast(Any, simulation), {}, ["a"], [], {"a": ClientInfo("a", 3)})
    assert float(models["a"]["w"]) == expected
