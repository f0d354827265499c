"""Processes that tests start import what the tests do."""

import os

import pytest

from repository import SUPPORT


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH")))))
