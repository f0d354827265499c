"""Options that several verbs share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from confed.cli.app import argument, option
from confed.cli.completion import complete_key, complete_method, complete_recipe

RecipeName = Annotated[
    str, argument("A file, or a packaged recipe's name (confed list recipes).", autocompletion=complete_recipe)
]
Overrides = Annotated[
    list[str] | None,
    argument(
        "section.key=TOML, such as algorithm.lam=0.5; ~section.key takes a key away.",
        metavar="[KEY=VALUE]...",
        autocompletion=complete_key,
    ),
]
Methods = Annotated[str | None, option("Rows: a,b,c, or all. [default: the recipe's]", autocompletion=complete_method)]
Workers = Annotated[int | None, option("Runs at a time. [default: one per core; one on a GPU]")]
Plan = Annotated[bool, option("Measure a few steps and print what it will take.", "--plan")]

Unsigned = Annotated[bool, option("Skip the check of the coordinator's signature.", "--unsigned")]
Site = Annotated[str, option("Name of this site, a client of the data.")]
SiteKey = Annotated[Path, option("This site's private key.")]
Private = Annotated[Path, option("Folder for what must not leave this machine.")]
SiteData = Annotated[list[str] | None, option("key=value for [data], such as root=DIR; repeatable.")]


@dataclass(frozen=True)
class Judged:
    references: tuple[str, ...] = ()  # what they are compared with; none for the usual ones
    margin: float = 0.01  # of equality, a fraction
    # the method whose relative improvement over each of the others is shown, client by client; "" for none
    relative: str = ""
    gates: bool = False  # as a benchmark, whose gates are judged in place of methods
