"""The page of the ways of execution is made from the tables that the code reads."""

from importlib.util import module_from_spec, spec_from_file_location

from repository import ROOT


def test_page_is_current() -> None:
    spec = spec_from_file_location("make_equivalence", ROOT / "docs" / "make_equivalence.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.check(), "run python docs/make_equivalence.py"
