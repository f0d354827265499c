"""Two processes on the folder of one site: the second is refused, in one line that says who holds it."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from confed.system import folder_lock
from led_recipe import grid_of, recipe_of
from repository import SUPPORT

HOLD = """
import sys
from pathlib import Path
from confed.system.folder_lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """A folder that another process holds; what the refusal says of it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield f"another process is working in {folder}: process {holder.pid} on "
        finally:
            holder.communicate()


def test_a_supernode_on_a_folder_in_use_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("flwr")
    from confed.deployment.server import run_server
    from confed.engines.flower.transport import BUSY, FlowerTransport
    from confed.engines.remote.sites import Timeouts

    recipe, file = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0"), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    told: list[str] = []
    with held(tmp_path / "warm") as said, caplog.at_level(logging.ERROR, "confed"):
        summary = run_server(
            recipe, tmp_path / "state", FlowerTransport(grid_of(file, tmp_path)), wait=0.5,
            timeouts=Timeouts(minimum=2), progress=lambda event: told.append(str(event)),
        )  # fmt: skip
    assert set(summary["global_seen"]) == {"cold", "both"}
    assert caplog.messages[0].startswith(said)
    assert len(caplog.messages[0].splitlines()) == 1
    assert any(BUSY in text for text in told)
    assert not any(str(tmp_path) in text for text in told)


@pytest.mark.parametrize("folder", ["run", "private"])
def test_a_second_client_on_a_flare_kit_or_its_private_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    pytest.importorskip("nvflare")
    from confed.deployment.flare import server
    from confed.deployment.flare.provision import provision_flare
    from confed.deployment.provision import Federation

    monkeypatch.setattr(server, "ENDING", 0.0)
    monkeypatch.setattr(server, "supervised", lambda *_: pytest.fail("FLARE was started"))
    provision_flare(tmp_path / "fed", Federation(("a",), "localhost", 8443, "x = 1\n"))
    kit = tmp_path / "fed" / "sites" / "a"
    with held(kit / folder) as said, pytest.raises(ValueError, match="another process") as refused:
        server.join(recipe_of("fedavg"), kit, kit / "private", threading.Event())
    assert str(refused.value).startswith(said)


def test_a_flare_job_on_a_folder_in_use_does_not_open_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvflare")
    from confed.deployment.flare import job
    from confed.deployment.flare.job import FlareSite, SiteSettings, write_settings

    (tmp_path / "local").mkdir()
    (tmp_path / "recipe.toml").write_text(recipe_of("fedavg").to_toml())
    write_settings(SiteSettings(site="warm"), tmp_path)
    place = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    monkeypatch.setattr(job, "collab", SimpleNamespace(workspace=place, site_name="warm"))
    monkeypatch.setattr(job, "ENDING", 0.0)
    endpoint = FlareSite()
    with held(tmp_path / "private") as said, pytest.raises(ValueError, match="another process") as refused:
        endpoint._open()  # pyright: ignore[reportPrivateUsage]
    assert str(refused.value).startswith(said)
    assert endpoint._open().client.id == "warm"  # pyright: ignore[reportPrivateUsage]
    # It holds the folder until its process ends.
    code = "import sys; from pathlib import Path; from confed.system import folder_lock as f; f.PATIENCE = 0.0\n"
    code += "with f.exclusive(Path(sys.argv[1])): pass"
    second = subprocess.run([sys.executable, "-c", code, str(tmp_path / "private")], capture_output=True, check=False)
    assert b"another process is working in" in second.stderr
