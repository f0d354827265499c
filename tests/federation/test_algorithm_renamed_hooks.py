"""Hooks of methods that had other names before."""

import re
from dataclasses import dataclass

import pytest

from confed.federation.algorithm import Algorithm


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("suit", "configure"),
        ("extend", "add_modules"),
        ("refuses", "unsupported_reason"),
        ("published", "with_public_data"),
    ],
)
def test_method_with_an_old_hook_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Mine.{old} is now called {new}: rename it")):
        type("Mine", (Algorithm,), {"__qualname__": "Mine", old: lambda self: None})


def test_hyper_parameter_may_have_the_name_of_an_old_hook() -> None:
    @dataclass(frozen=True)
    class Mine(Algorithm):
        extend: float = 2.0

    assert Mine().extend == 2.0
