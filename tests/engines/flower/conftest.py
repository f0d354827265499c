"""A federation's folders, for tests with TLS and keys."""

from pathlib import Path

import pytest

from confed.deployment.provision import Federation, provision
from flower_sites import CLIENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    provision(root, Federation(CLIENTS, "localhost", 8443, "name = 'toy'\n"))
    return root
