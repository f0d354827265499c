"""Commands of pip in messages, as they fit how confed was installed."""

import gc
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import confed
from confed.system import packages
from confed.system.collector import collector_at_rest
from refusals import refuses

TEXT = "tables need pandas: pip install '.[notebook]' -c constraints.txt"
PINS = Path(confed.__file__).parent / "constraints.txt"


class Installed:
    """A distribution with a record of where it came from."""

    def __init__(self, origin: object) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "file:///checkout", "dir_info": {"editable": True}}, TEXT),
        ({"url": "https://example.org/c.git", "vcs_info": {"vcs": "git"}}, TEXT),
        (
            {"url": "file:///my%20wheels/c-1-py3.whl", "archive_info": {}},
            f"tables need pandas: pip install '/my wheels/c-1-py3.whl[notebook]' -c {PINS}",
        ),
        (
            {"url": "https://example.org/c-1.whl", "archive_info": {}},
            f"tables need pandas: pip install 'NAME[notebook] @ https://example.org/c-1.whl' -c {PINS}",
        ),
        (None, f"tables need pandas: pip install 'NAME[notebook]' -c {PINS}"),
    ],
)
def test_command_names_where_confed_came_from(origin: object, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "DISTRIBUTION", "NAME")
    monkeypatch.setattr(packages, "distribution", lambda name: Installed(origin))
    assert packages.for_this_installation(TEXT) == expected
    assert packages.for_this_installation("no command") == "no command"


def test_package_of_its_own_and_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "distribution", lambda name: Installed(None))
    assert packages.for_this_installation("pip install rich -c constraints.txt") == f"pip install rich -c {PINS}"

    def none(name: str) -> Installed:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", none)
    assert packages.for_this_installation(TEXT) == TEXT


# Garbage collector at rest ----------------------------------------------------------------------------------------


def test_the_collector_rests_and_is_as_before_afterwards() -> None:
    def failing() -> None:
        with collector_at_rest():
            assert not gc.isenabled()
            with collector_at_rest():
                pass
            assert not gc.isenabled()  # the outer block goes on
            raise ValueError("faulty")

    refuses("faulty", failing)
    assert gc.isenabled()
