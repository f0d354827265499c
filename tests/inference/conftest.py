"""The stand-in of the hub that tests of exports upload to."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import close_session
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from PIL import Image

from hub_server import TOKEN, Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which the other tests need
    disable_progress_bars()
    close_session()  # the session is made with the settings of then
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        yield found
    enable_progress_bars()
    close_session()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "grey.png"
    Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save(path)
    return path
