"""Finding things by name: one registry per kind, filled by importing the modules of one package.

Adding a method, a backbone, a dataset or a task is adding one file to its package (or naming an importable one
as ``"my_package.my_module:Name"``); no list is edited anywhere.
"""

import importlib
import pkgutil
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, TypeVar

__all__ = [
    "Registry",
    "algorithms",
    "datasets",
    "models",
    "register_dataset",
    "register_model",
    "register_task",
    "tasks",
]

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Names -> constructors of one kind of thing.

    Args:
        kind: what it holds, for error messages ("model").
        package: the package whose modules register themselves when imported.
        base: where given, no decorator is needed: the class in a module that extends a class of this name is
            registered under the module's name.
    """

    def __init__(self, kind: str, package: str, base: str | None = None) -> None:
        self.kind, self.package, self.base = kind, package, base
        self._entries: dict[str, Callable[..., Any]] = {}
        self._loaded = False

    def register(self, factory: Factory) -> Factory:
        """Decorator: registers a function or class under its own ``name`` attribute or ``__name__``."""
        name = getattr(factory, "name", None)
        self._entries[name if isinstance(name, str) else factory.__name__] = factory
        return factory

    def add(self, name: str, factory: Callable[..., Any]) -> None:
        """Registers ``factory`` under ``name``."""
        self._entries[name] = factory

    def names(self, pattern: str = "*") -> list[str]:
        """The registered names that match a glob, sorted."""
        self._load()
        return sorted(name for name in self._entries if fnmatch(name, pattern))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The constructor of that name, or of ``"module:attribute"``.

        Raises:
            ValueError: nothing has that name (the message lists what there is).
        """
        if ":" in name:
            module, _, attribute = name.partition(":")
            try:
                return getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"no {self.kind} at {name!r}: {error}") from error
        self._load()
        if name not in self._entries:
            near = get_close_matches(name, self._entries, 2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            raise ValueError(f"no {self.kind} is called {name!r}{hint} There are: {', '.join(self.names())}")
        return self._entries[name]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(self.package)
            for found in pkgutil.iter_modules(package.__path__):
                module = importlib.import_module(f"{self.package}.{found.name}")
                if self.base is not None:
                    for value in vars(module).values():
                        if isinstance(value, type) and self._is_entry(value, module.__name__):
                            self._entries[found.name] = value

    def _is_entry(self, value: type, module: str) -> bool:
        return value.__module__ == module and any(c.__name__ == self.base for c in value.__mro__[1:])


algorithms = Registry("algorithm", "confed.algorithms", base="Algorithm")
models = Registry("model", "confed.models")
datasets = Registry("dataset", "confed.data")
tasks = Registry("task", "confed.tasks")
register_model = models.register
register_dataset = datasets.register
register_task = tasks.register
