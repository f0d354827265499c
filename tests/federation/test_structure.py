"""Heads of models, and of those that write their answers and have none."""

import torch
from torch import nn

from confed.federation.params import Scope
from confed.federation.structure import NO_HEAD, head_rules, private_head
from confed.testing.toy import ToyModel
from refusals import refuses


class Writer(nn.Module):
    """A model that writes its answers, without a head."""

    writes = "answers"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)


def test_a_model_that_writes_may_have_no_head() -> None:
    assert private_head(Writer(), (), "X", optional=True) == NO_HEAD
    assert private_head(Writer(), NO_HEAD, "X", optional=True) == NO_HEAD
    refuses("X keeps the answer head private, and this model does not say", private_head, Writer(), (), "X")
    toy = ToyModel(False, torch.Generator())
    assert private_head(toy, (), "X", optional=True) == ("head",)
    refuses("must name submodules with trained tensors, got 'tail'", private_head, toy, ("tail",), "X", optional=True)


def test_head_rules_want_a_configured_method() -> None:
    assert head_rules(("a", "b"), "X") == {"a.*": Scope.PRIVATE, "b.*": Scope.PRIVATE}
    assert head_rules(NO_HEAD, "X") == {}
    refuses(r"X does not know this model's head; call configure\(model, task\)", head_rules, (), "X")
