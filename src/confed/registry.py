"""Finding things by name: one registry per kind, filled by importing the modules of one package.

Adding a method, a backbone, a dataset or a task is adding one file to its package (or naming an importable one
as ``"my_package.my_module:Name"``); no list is edited anywhere.

Importing a module runs its code, and recipes come from other people: in run folders, exports and federations. A name
with a module is therefore refused, before anything is imported, unless the user has allowed that module: with the
option ``--allow-code MODULE`` of the command, the environment variable ``CONFED_ALLOW_CODE`` (names with commas between
them), a line ``allow_code = ["my_module"]`` in ``~/.config/confed/settings.toml``, or :func:`allow_code` in Python. A
package's name allows its submodules.
"""

import importlib
import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

Factory = TypeVar("Factory", bound=Callable[..., Any])

GRANTS = ("network", "disk")
"""What a recipe that came from elsewhere can be granted; see :mod:`confed.runs.grants`."""
_GRANTED: list[str] = []
ALLOWED = "CONFED_ALLOW_CODE"
"""The environment variable with the modules that recipes may name; processes that are started inherit it."""

SESSION = "session:"
"""Begins the names of objects that only this process has (:mod:`confed.recipes.objects`)."""


# Which modules a recipe may name ------------------------------------------------------------------------------


def allow_code(*modules: str) -> None:
    """Lets recipes of this process, and of those that it starts, name things of these modules.

    Args:
        modules: names of modules or packages that are trusted, such as "my_module"; "__main__" for what a script or a
            notebook defines itself.

    Raises:
        ValueError: this is no module's name.
    """
    for module in modules:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            raise ValueError(f"allow_code takes names of modules such as 'my_package.my_module', got {module!r}")
    os.environ[ALLOWED] = ",".join(dict.fromkeys((*_listed(os.environ.get(ALLOWED, "")), *modules)))


@contextmanager
def allowing_code(modules: Sequence[str] = ()) -> Iterator[None]:
    """Within it these modules are allowed as well; afterwards those that were allowed before."""
    before = os.environ.get(ALLOWED)
    try:
        if modules:
            allow_code(*modules)
        yield
    finally:
        if before is None:
            os.environ.pop(ALLOWED, None)
        else:
            os.environ[ALLOWED] = before


def allowed_code() -> tuple[str, ...]:
    """The modules that recipes may name here: those of this process, and those of the user's settings.

    A settings file that cannot be read is a ValueError.
    """
    return (*_listed(os.environ.get(ALLOWED, "")), *_settings())


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _settings_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "confed" / "settings.toml"


def _settings() -> list[str]:
    """The list in the user's own settings; no other file is read."""
    file = _settings_file()
    if not file.is_file():
        return []
    try:
        listed = tomllib.loads(file.read_text(encoding="utf-8")).get("allow_code", [])
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be a readable TOML file: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{file}: allow_code must be a list of modules' names, got {listed!r}")
    return listed


def trusted(kind: str, name: str) -> Any:
    """What ``"module:attribute"`` names; the module is imported only if the user has allowed it."""
    module, _, attribute = name.partition(":")
    allowed = allowed_code()
    if not _inside(module, allowed):
        raise ValueError(_refusal(f"the {kind} {name!r} is code of the module {module!r}", module))
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        hint = (
            ": is its folder on PYTHONPATH? The folder that the command is given in is not by itself; put PYTHONPATH=. "
            "before the command"
            if isinstance(error, ModuleNotFoundError) and module.split(".")[0] == str(error.name).split(".")[0]
            else ""
        )
        raise ValueError(f"no {kind} at {name!r}: {error}{hint}") from error
    # A module also holds what it imports itself, such as functions of the operating system.
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and home != module and not _inside(home, allowed):
        raise ValueError(_refusal(f"the {kind} {name!r} is defined in another module, {home!r}", home))
    return value


def _inside(module: str, allowed: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _refusal(what: str, module: str) -> str:
    """Why a name is refused, and how the user can allow it."""
    return (
        f"{what}, which you have not allowed: where you trust it, add --allow-code {module}, set {ALLOWED}={module}, "
        f'call confed.allow_code("{module}") in Python, or write allow_code = ["{module}"] into {_settings_file()}'
    )


# What recipes from elsewhere may reach ------------------------------------------------------------------------


def grant(*kinds: str) -> None:
    """Grants for recipes that came from elsewhere, in place of those that this process gave before."""
    if unknown := [kind for kind in kinds if kind not in GRANTS]:
        raise ValueError(f"--grant must be {' or '.join(GRANTS)}, got {unknown[0]!r}; code: --allow-code MODULE")
    _GRANTED[:] = kinds


def granted() -> frozenset[str]:
    """What recipes that came from elsewhere may reach: as this process said, or ``CONFED_GRANT`` in the environment."""
    return frozenset([*_GRANTED, *_listed(os.environ.get("CONFED_GRANT", ""))])


# The registries -----------------------------------------------------------------------------------------------


class Registry:
    """Names -> constructors of one kind of thing."""

    def __init__(self, kind: str, package: str, base: str | None = None) -> None:
        self.kind, self.package, self.base = kind, package, base
        self._entries: dict[str, Callable[..., Any]] = {}
        self._loaded = set[str]()

    @overload
    def register(self, factory: Factory, *, spec: object = None) -> Factory: ...

    @overload
    def register(self, factory: None = None, *, spec: object = None) -> Callable[[Factory], Factory]: ...

    def register(self, factory: Any = None, *, spec: object = None) -> Any:
        """Decorator: registers a function or class under its own ``name`` attribute or ``__name__``."""
        if factory is None:
            return partial(self.register, spec=spec)
        if spec is not None:
            factory.spec = spec
        if not factory.__module__.startswith(self.package):
            self._load()  # first, so that nothing that is imported later takes the place of the user's
        name = getattr(factory, "name", None)
        self._entries[name if isinstance(name, str) else factory.__name__] = factory
        return factory

    def add(self, name: str, factory: Callable[..., Any]) -> None:
        """Registers ``factory`` under ``name``."""
        self._entries[name] = factory

    def names(self, pattern: str = "*") -> list[str]:
        """The registered names that match a glob, sorted."""
        self._load()
        return sorted(name for name in self._entries if fnmatch(name, pattern) and not name.startswith(SESSION))

    def name_of(self, factory: object) -> str | None:
        """The name under which something is registered; None if it is not."""
        self._load()
        return next((name for name, entry in self._entries.items() if entry is factory), None)

    def is_own(self, name: str) -> bool:
        """Whether what has this name is the user's, and does not come with confed."""
        return ":" in name or not str(self[name].__module__).startswith(f"{self.package}.")

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The constructor of that name, or of ``"module:attribute"``."""
        if name.startswith(SESSION) and name not in self._entries:
            raise ValueError(
                f"the {self.kind} {name!r} is an object of the Python session that wrote the recipe: make the same "
                "confed.Recipe(...) here first"
            )
        if ":" in name and not name.startswith(SESSION):
            return self._imported(name)
        for beginning in (name, ""):
            if name not in self._entries:
                self._load(beginning)
        if name not in self._entries:
            near = get_close_matches(name, self._entries, 2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            raise ValueError(f"no {self.kind} is called {name!r}{hint} There are: {', '.join(self.names())}")
        return self._entries[name]

    def _imported(self, name: str) -> Callable[..., Any]:
        """What ``"module:attribute"`` names, where the user trusts the module."""
        module, _, attribute = name.partition(":")
        if module.startswith(f"{self.package}."):  # the long name of something registered
            self._load()
            value = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
            if (registered := self.name_of(value)) is not None:
                return self._entries[registered]
        return trusted(self.kind, name)

    def _load(self, name: str = "") -> None:
        """Imports all modules; or those alone that are called as a name begins, where what has it is likely to be."""
        package = importlib.import_module(self.package)
        for file in pkgutil.iter_modules(package.__path__):
            if file.name in self._loaded or (name and not name.startswith(file.name)):
                continue
            self._loaded.add(file.name)
            module = importlib.import_module(f"{self.package}.{file.name}")
            classes = [value for value in vars(module).values() if isinstance(value, type)] if self.base else []
            for value in classes:
                if value.__module__ == module.__name__ and self.base in [c.__name__ for c in value.__mro__[1:]]:
                    self._entries[file.name] = value


algorithms = Registry("algorithm", "confed.algorithms", base="Algorithm")
models = Registry("model", "confed.models")
datasets = Registry("dataset", "confed.datasets")
tasks = Registry("task", "confed.tasks")
measures = Registry("measure", "confed.measures")
register_model = models.register
register_dataset = datasets.register
register_task = tasks.register
register_measure = measures.register
