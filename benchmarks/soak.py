"""A federation for long on a bad line: whether its model stays the simulator's, and how many bytes it takes.

A server and sites in processes of their own, TLS and keys. Between them is a shaping proxy of this process, on
loopback, which carries so many bits a second each way over every connection, later by half a round trip, resets
connections after random times, and lets some of them hang: nothing comes any more, and nobody says so. Sites and
server are killed (SIGKILL) at random times and started again a second later. The server needs all sites in every round,
so that the participation is the simulator's. The same federation is run once over a straight line first: the yardsticks
are all rounds unattended, equal bits of the final model, at most 1.2 times the bytes, and memory that does not grow:
of the server and of the largest site, with the processes that they started, the most in a round. A process that was
started again is small at first; hence the slope of the server's is of a line through the second half of the rounds of
the start that lasted longest.

Times are a tenth of those in the field, and so is the model: 7 MB in place of 70 take 14 s at 4 Mbit/s; connections
live for 20 s in the mean, and a process is killed every minute, as if it were 200 s and ten minutes there. Where a
machine is busy with other things, less work is done between two ends and two kills; ``--calm`` makes them rarer by a
factor.

    python benchmarks/soak.py --engine flower --sites 8 --rounds 20 --seed 0
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from confed.deployment.demo import free_port, parties
from confed.deployment.provision import Federation
from confed.deployment.transports import transport_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import GRANTS
from confed.results.folder import read_jsonl
from confed.runs.build import load_data
from confed.runs.run import run
from measure import finish

SETTINGS = (
    "algorithm.name=fedavg", "study.methods=[]", "study.table=[]", "model.name=vilt_tiny", "model.layers=2",
    'data.preset="random"', 'data.types="answers"', "data.validation=10",
    "data.test=10", "local.epochs=1", "run.evaluate_every=0", "run.workers=1", "run.gallery=0",
)  # fmt: skip
CHUNK = 8192  # bytes that the proxy reads at once


@dataclass(frozen=True)
class Weather:
    """What the line and the processes have to bear; the defaults are a straight line and no kills."""

    rate: float = 0.0  # bytes a second, each way, of a connection; 0 for all that come
    delay: float = 0.0  # seconds one way
    life: float = 0.0  # mean seconds until a connection ends; 0 for no end
    hangs: float = 0.0  # share of these that hang, in place of a reset
    kills: float = 0.0  # mean seconds between two kills; 0 for none
    most: int = 10**9  # kills at most


GROWTH = 0.01  # of the most memory so far, that a round may add
BAD = Weather(rate=5e5, delay=0.04, life=20.0, hangs=0.05, kills=60.0)


@dataclass
class BadLine:
    """A proxy in front of a port, in a thread."""

    port: int
    weather: Weather
    seed: int
    carried: int = 0  # bytes, both ways, with what TLS adds
    connections: int = 0
    ended: int = 0
    entrance: int = 0
    ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._writers = set[asyncio.StreamWriter]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._enter, "127.0.0.1", 0, limit=CHUNK))
        self.entrance = server.sockets[0].getsockname()[1]
        self.ready.set()
        self._loop.run_forever()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        carrying = asyncio.all_tasks(self._loop)  # which end with their connections
        self._loop.run_until_complete(asyncio.gather(*carrying, return_exceptions=True))
        self._loop.close()

    async def _enter(self, site: asyncio.StreamReader, to_site: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self.port, limit=CHUNK)
        except OSError:  # the server was killed
            to_site.transport.abort()
            return
        self.connections += 1
        self._writers |= {to_site, to_server}
        hanging = asyncio.Event()
        if self.weather.life:
            hangs = self._random.random() < self.weather.hangs
            after = self._random.expovariate(1 / self.weather.life)
            self._loop.call_later(after, self._end, hanging if hangs else None, to_site, to_server)
        await asyncio.gather(self._carry(site, to_server, hanging), self._carry(server, to_site, hanging))

    def _end(self, hanging: asyncio.Event | None, *writers: asyncio.StreamWriter) -> None:
        if all(writer.is_closing() for writer in writers):
            return
        self.ended += 1
        if hanging is not None:
            hanging.set()
            return
        for writer in writers:
            writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, hanging: asyncio.Event) -> None:
        try:
            while data := await source.read(CHUNK):
                if hanging.is_set():
                    continue
                self.carried += len(data)
                if self.weather.rate:
                    await asyncio.sleep(len(data) / self.weather.rate)
                self._loop.call_later(self.weather.delay, self._pass_on, target, data)
        except OSError:
            target.transport.abort()
            return
        self._loop.call_later(self.weather.delay, target.close)

    @staticmethod
    def _pass_on(target: asyncio.StreamWriter, data: bytes) -> None:
        if not target.is_closing():
            target.write(data)


class Processes:
    """A server and sites that are started again when they were killed."""

    def __init__(self, commands: dict[str, tuple[Sequence[str], Path]]) -> None:
        self._commands = commands
        self._environment = {
            **os.environ, "CONFED_GRANT": ",".join(GRANTS), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
        }  # fmt: skip
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # round -> most memory in MB that was seen in it, of the largest site, and of the server by its starts
        self.largest_site = dict[int, float]()
        self.server_starts = list[dict[int, float]]()
        for name in commands:
            self.start(name)

    def start(self, name: str) -> None:
        command, folder = self._commands[name]
        if name == "server":
            self.server_starts.append({})
        with (folder / "log.txt").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """The end of a process and of those that it started."""
        for member in reversed([psutil.Process(self.running[name].pid), *self.family(name)]):
            try:
                member.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.running[name].wait()

    def family(self, name: str) -> list[psutil.Process]:
        try:
            return psutil.Process(self.running[name].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def look(self, round: int) -> None:
        """Notes how much memory the server and its largest site have."""
        for name, process in self.running.items():
            try:
                members = [psutil.Process(process.pid), *self.family(name)]
                size = sum(member.memory_info().rss for member in members) / 2**20
            except psutil.NoSuchProcess:
                continue
            seen = self.server_starts[-1] if name == "server" else self.largest_site
            seen[round] = max(seen.get(round, 0.0), size)

    def close(self) -> None:
        for name, process in self.running.items():
            if process.poll() is None:
                self.kill(name)


def recipe_of(rounds: int, sites: int, train: int, width: int) -> Recipe:
    """FedAvg of a small transformer, with so many clients of the data."""
    sizes = [f"run.rounds={rounds}", f"data.train={train}", f"data.clients={sites}", f"model.width={width}"]
    return load_recipe("fedvqa_scenes", [*SETTINGS, *sizes])


def led(
    recipe: Recipe,
    root: Path,
    engine: Literal["flower", "flare"],
    sites: int,
    weather: Weather,
    seed: int,
    limit: float = 3600.0,
) -> dict[str, Any]:
    """One federation, to its end; bytes, ended connections, kills and seconds."""
    names = tuple(list(load_data(recipe).clients)[:sites])
    port = free_port()
    line = BadLine(port, weather, seed)
    transport_of(engine).provision(root, Federation(names, "localhost", port, recipe.to_toml()))
    for kit in root.glob("sites/*/startup/fed_client.json"):  # FLARE's kits name the server
        kit.write_text(kit.read_text().replace(str(port), str(line.entrance)))
    commands, joining = parties(root, port, engine), parties(root, line.entrance, engine)
    lead, folder = commands["server"]
    commands = {**joining, "server": ([*lead, "--minimum", str(sites), "--away", "5"], folder)}
    moments, kills = random.Random(seed + 1), list[str]()
    began = time.monotonic()
    next_kill = began + 30 + moments.expovariate(1 / weather.kills) if weather.kills else float("inf")
    processes = Processes(commands)
    try:
        while (code := processes.running["server"].poll()) is None:
            if time.monotonic() - began > limit:
                raise TimeoutError(f"not over after {limit:g} s: {(folder / 'log.txt').read_text()[-2000:]}")
            if time.monotonic() > next_kill and len(kills) < weather.most:
                kills.append(moments.choice(list(commands)))
                processes.kill(kills[-1])
                time.sleep(1.0)
                processes.start(kills[-1])
                next_kill = time.monotonic() + moments.expovariate(1 / weather.kills)
            processes.look(len(rounds_in(root)))
            time.sleep(0.5)
    finally:
        processes.close()
        line.close()
    if code:
        raise RuntimeError(f"the server ended with code {code}: {(folder / 'log.txt').read_text()[-2000:]}")
    rounds = rounds_in(root)
    return {
        "bytes": line.carried, "connections": line.connections, "ended": line.ended, "kills": kills,
        "rounds": len(rounds), "left_out": sum(len(entry["errors"]) for entry in rounds),
        "seconds": time.monotonic() - began, "largest_site": processes.largest_site,
        "server_starts": processes.server_starts,
    }  # fmt: skip


def rounds_in(root: Path) -> list[dict[str, Any]]:
    """The records of the rounds that are over."""
    metrics = root / "server" / "state" / "metrics.jsonl"
    return [entry for entry in read_jsonl(metrics) if entry["event"] == "round"] if metrics.is_file() else []


def growth(memory: dict[int, float]) -> float:
    """Megabytes that a round adds, by a line through the second half of the rounds; 0 where these are too few."""
    settled = list(memory)[len(memory) // 2 :]
    return float(np.polyfit(settled, [memory[round] for round in settled], 1)[0]) if len(settled) > 2 else 0.0


def whole_megabytes(memory: dict[int, float]) -> list[int]:
    return [round(megabytes) for megabytes in memory.values()]


def soak(
    engine: Literal["flower", "flare"],
    root: Path,
    sites: int,
    rounds: int,
    train: int,
    width: int,
    weather: Weather,
    seed: int,
) -> dict[str, Any]:
    """A federation in bad weather beside one in good weather and the simulator's run."""
    recipe = recipe_of(rounds, sites, train, width)
    run(recipe, root / "simulated")
    straight = led(recipe, root / "straight", engine, sites, Weather(), seed)
    bad = led(recipe, root / "bad", engine, sites, weather, seed)
    model = Path("models") / "global" / "trained.safetensors"
    expected = (root / "simulated" / model).read_bytes()
    equal = [(root / name / "server" / "state" / model).read_bytes() == expected for name in ("straight", "bad")]
    return {
        "rounds": bad["rounds"], "left_out": bad["left_out"], "equal_bits": all(equal), "model_bytes": len(expected),
        "bytes_straight": straight["bytes"], "bytes_bad": bad["bytes"], "ratio": bad["bytes"] / straight["bytes"],
        "connections": bad["connections"], "connections_ended": bad["ended"], "kills": len(bad["kills"]),
        "server_kills": bad["kills"].count("server"), "seconds_straight": straight["seconds"],
        "seconds_bad": bad["seconds"],
        "server_mb": max(most for memory in bad["server_starts"] for most in memory.values()),
        "server_mb_per_round": growth(max(bad["server_starts"], key=len)),
        "server_mb_by_round": [whole_megabytes(memory) for memory in bad["server_starts"]],
        "server_straight": whole_megabytes(straight["server_starts"][0]),
        "site_mb": max(bad["largest_site"].values()), "site_mb_per_round": growth(bad["largest_site"]),
        "site_mb_by_round": whole_megabytes(bad["largest_site"]),
        "site_straight": whole_megabytes(straight["largest_site"]),
    }  # fmt: skip


def main() -> None:
    """Runs a soak, and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("flower", "flare"), default="flower")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--train", type=int, default=40, help="training questions per site")
    parser.add_argument("--width", type=int, default=336, help="of the model, which has 7 MB with 336")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", type=float, default=1.0, help="factor on the times between ends and between kills")
    given, _ = parser.parse_known_args()
    weather = replace(BAD, life=BAD.life * given.calm, kills=BAD.kills * given.calm)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(
            given.engine, Path(folder), given.sites, given.rounds, given.train, given.width, weather, given.seed
        )  # fmt: skip
    finish(f"soak over {given.engine}", 1.2, sites=given.sites, seed=given.seed, calm=given.calm, **found)
    assert found["equal_bits"], "the final model is not the simulator's"
    for party in ("server", "site"):
        assert found[f"{party}_mb_per_round"] <= GROWTH * found[f"{party}_mb"], f"the memory of the {party} grows"


if __name__ == "__main__":
    main()
