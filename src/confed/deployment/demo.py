"""Demonstration of a whole federation on this machine: processes, TLS, keys and sockets, removed when it is over."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confed.deployment.provision import Federation
from confed.deployment.site import KEPT
from confed.deployment.transports import Engine, transport_of
from confed.recipes.recipe import Recipe
from confed.registry import GRANTS
from confed.runs.build import prepare
from confed.system.events import Note, Progress

Party = subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parties(root: Path, port: int, engine: Engine = "flower") -> dict[str, tuple[Sequence[str], Path]]:
    """Commands of a federation's server and sites, and the folder of each."""
    lead, join = transport_of(engine).commands(port)
    confed = [sys.executable, "-m", "confed.cli"]
    commands: dict[str, tuple[Sequence[str], Path]] = {}
    commands["server"] = ([*confed, "server", "recipe.toml", *lead.split()], root / "server")
    for folder in sorted((root / "sites").iterdir()):
        options = [folder.name if word == "SITE" else word for word in join.split()]
        commands[folder.name] = ([*confed, "client", "recipe.toml", *options], folder)
    return commands


@contextmanager
def started(commands: Mapping[str, tuple[Sequence[str], Path]]) -> Iterator[dict[str, Party]]:
    """Processes that run for as long as the ``with`` block lasts; their output goes to ``log.txt`` in their folders."""
    # The recipe is this machine's own, so that its sites get what it asks for.
    # All parties are on this machine, so that no proxy is asked.
    environment = {
        **os.environ, "CONFED_GRANT": ",".join(GRANTS), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip
    running: dict[str, Party] = {}
    try:
        for name, (command, folder) in commands.items():
            with (folder / "log.txt").open("ab") as log:
                # In separate sessions: this process handles Ctrl-C, and then ends them.
                running[name] = subprocess.Popen(
                    command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def demonstrate(
    recipe: Recipe, root: Path, sites: int, progress: Progress, engine: Engine = "flower"
) -> dict[str, Any]:
    """Demonstration of a federation of the first clients of a recipe's data, to the end of its run."""
    setup, _ = prepare(recipe)
    names = tuple(setup.population.info(number).id for number in range(len(setup.population)))
    if not 1 <= sites <= len(names):
        raise ValueError(f"the recipe's data have {len(names)} clients, got --sites {sites}")
    port = free_port()
    federation = Federation(names[:sites], "localhost", port, recipe.to_toml())
    transport_of(engine).provision(root, federation)
    progress(Note(f"made certificates, keys and a folder for each of {', '.join(names[:sites])} in {root}"))
    commands = parties(root, port, engine)
    lead, where = commands["server"]
    commands["server"] = ([*lead, "--minimum", str(sites)], where)
    began = time.monotonic()
    with started(commands) as running:
        progress(Note(f"started {len(running)} processes; the server listens on port {port}"))
        told = 0
        while (code := running["server"].poll()) is None:
            told = _follow(where / "log.txt", told, progress)
            if broken := [name for name, site in running.items() if name != "server" and site.poll()]:
                raise RuntimeError(f"site {broken[0]} ended: {_end(root / 'sites' / broken[0] / 'log.txt')}")
            time.sleep(0.3)
    _follow(where / "log.txt", told, progress)
    if code != 0:
        raise RuntimeError(f"the server ended with code {code}: {_end(where / 'log.txt')}")
    progress(Note(f"done in {time.monotonic() - began:.0f} s; all processes have ended"))
    private = root / "sites" / names[0] / "private"
    if (private / KEPT).is_dir():
        text = (
            f"every site has the global model and its own: confed predict {private} --image FILE --question TEXT, or "
            f"confed export {private} DIR"
        )
        progress(Note(text))
    return json.loads((where / "state" / "summary.json").read_text(encoding="utf-8"))


def _follow(log: Path, told: int, progress: Progress) -> int:
    """Tells the lines that are new in a log; returns how far it got."""
    data = log.read_bytes()
    whole = data.rfind(b"\n") + 1
    for line in data[told:whole].decode(errors="replace").splitlines():
        if line.startswith(("round", "site", "warning", "handed in", "FLARE", "going on")):
            progress(Note(f"  server: {line}"))
    return max(told, whole)


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1500:]
