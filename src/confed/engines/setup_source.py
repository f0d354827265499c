"""Setups for processes that share no memory with the one that started them."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from confed.engines.perform import Setup


@dataclass(frozen=True)
class SetupSource:
    """Function call that makes a run's :class:`Setup`, as text that another process can carry out.

    A setup holds data and functions, which only pickle could send. What is sent instead is this: names and JSON.
    """

    function: str  # "module:function", which every process can import
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # its keywords; JSON values

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SetupSource":
        return cls(**json.loads(text))

    def setup(self) -> Setup:
        """A setup of this process's own."""
        module, _, name = self.function.partition(":")
        made = getattr(importlib.import_module(module), name)(**self.arguments)
        if not isinstance(made, Setup):
            raise TypeError(f"{self.function} must make a Setup, got {type(made).__name__}")
        return made
