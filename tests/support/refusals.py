"""Bad input on one line."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """A call with such arguments is a ValueError with these words, a pattern."""
    with pytest.raises(ValueError, match=words):
        call(*arguments, **named)
