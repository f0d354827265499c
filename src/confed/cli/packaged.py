"""What packaged recipes say of themselves: head comments, rows, times, and with what they run things."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from confed.recipes.recipe import packaged_recipes


@dataclass(frozen=True)
class Packaged:
    """A packaged recipe as its file has it.

    Attributes:
        content: section -> key -> value.
    """

    name: str
    text: str
    content: Mapping[str, Any]

    @property
    def comment(self) -> str:
        """The head comment, without the line about the time."""
        found = re.match(r"(?:#[^\n]*\n)*", self.text)
        lines = [line[1:].removeprefix(" ") for line in found[0].splitlines()] if found else []
        return "\n".join(line for line in lines if not line.startswith("Time: ")).strip()

    @property
    def summary(self) -> str:
        """The first sentence of the head comment."""
        words = " ".join(self.comment.split())
        return re.split(r"(?<=[a-z0-9)])(?<! al)\.\s", words + " ", maxsplit=1)[0].strip().rstrip(".:")

    @property
    def time(self) -> str:
        """Duration per method and seed: the line "# Time: ..." of the head; empty where there is none."""
        line = re.search(r"^# Time: (.+)$", self.text, re.MULTILINE)
        return line[1] if line else ""

    @property
    def rows(self) -> dict[str, str]:
        """Row -> name of its method, of the study's rows and those of its full table."""
        study, overrides = self.content.get("study", {}), self.content.get("methods", {})
        names = list(dict.fromkeys([*study.get("methods", ()), *study.get("table", ())]))
        names = names or [self.content.get("algorithm", {}).get("name", "")]
        return {row: overrides.get(row, {}).get("name", row) for row in names}

    @property
    def methods(self) -> list[str]:
        """Rows that ``confed run`` has."""
        listed = self.content.get("study", {}).get("methods")
        return list(listed) if listed else [self.content.get("algorithm", {}).get("name", "")]

    @property
    def models(self) -> dict[str, str]:
        """Row of a model -> name of the model; the recipe's own under the empty text."""
        variants = self.content.get("models", {})
        listed = {
            row: variants.get(row, {}).get("name", row) for row in self.content.get("study", {}).get("models", ())
        }
        return {"": self.content.get("model", {}).get("name", ""), **listed}

    def names(self, section: str) -> str:
        """The name that a section gives."""
        return str(self.content.get(section, {}).get("name", ""))

    @property
    def missing(self) -> list[str]:
        """Keys of ``[data]`` that must be given on the command line, such as ``root``."""
        from inspect import Parameter, signature

        from confed import registry

        given = self.content.get("data", {})
        parameters = signature(registry.datasets[self.names("data")]).parameters.values()
        return [p.name for p in parameters if p.default is Parameter.empty and p.name not in given]


@cache
def packaged() -> tuple[Packaged, ...]:
    """All packaged recipes."""
    texts = {
        name: (files("confed.recipes") / f"{name}.toml").read_text(encoding="utf-8") for name in packaged_recipes()
    }
    return tuple(Packaged(name, text, tomllib.loads(text)) for name, text in texts.items())
