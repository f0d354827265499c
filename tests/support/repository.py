"""Where the repository and the modules that tests share are, and its scripts as modules."""

import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


@cache
def script_module(path: str) -> ModuleType:
    """The module of a script, by its path from the repository's root."""
    name = f"script_{Path(path).stem}"
    loader = SourceFileLoader(name, str(ROOT / path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    loader.exec_module(module)
    return module
