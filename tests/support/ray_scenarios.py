"""Runs on Ray in a process of their own: ``python ray_scenarios.py NAME`` prints what came out as JSON.

Ray leaves threads behind in the process that has used it, and other tests fork theirs.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confed.algorithms.scaffold import Scaffold
from confed.engines.local import InProcess, RoundRecord, Simulation, Workspace, simulate
from confed.engines.ray.executor import RayActors
from confed.engines.ray.placement import Wanted
from confed.engines.setup_source import SetupSource
from confed.engines.usage import Timeline
from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import MemoryStore, Store
from confed.federation.traits import Traits
from confed.federation.wire import encode_state
from repository import ROOT, SUPPORT
from setup_sources import source
from tiny_runs import SQUARES_STUDY

STATEFUL = ("scaffold", "ditto", "feddyn", "fedper", "moon", "feddc")
"""Methods whose clients keep something between rounds, or whose objective needs what they kept."""


def scenario(name: str, timeout: float = 280) -> dict[str, Any]:
    """What a scenario prints, run in a process of its own."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", SUPPORT))), "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",  # kernels sum in another order with other numbers of threads
        "CONFED_ALLOW_CODE": "ray_scenarios,setup_sources,toy_federation,matrix_cases",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def outcome(made: SetupSource, executor: Any = None) -> dict[str, Any]:
    """Errors of the rounds, and a digest of losses, servers' tensors and clients' states."""
    setup, store = made.setup(), MemoryStore()
    executor = InProcess(setup) if executor is None else executor
    simulation = Simulation(setup, store, executor)
    records: list[RoundRecord] = list(simulate(simulation, simulation.start(Workspace(setup.model()))))
    found = hashlib.sha256(repr([sorted(record.losses.items()) for record in records]).encode())
    for _, server in sorted(records[-1].servers.items()):
        for name, tensor in sorted(server.params.items()):
            found.update(name.encode() + tensor.numpy().tobytes())
    states = [encode_state(store.load(f"client-{number}")) for number in range(5)]
    for state in states:
        found.update(state)
    errors = {f"{record.round}/{client}": why for record in records for client, why in record.errors.items()}
    return {"digest": found.hexdigest(), "errors": errors, "states": len(set(states))}


def actors(made: SetupSource, count: int = 2, address: str = "", **named: Any) -> RayActors:
    return RayActors(made, Wanted(count), address, cores=2, **named)


def refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def local() -> Mapping[str, Any]:
    """One Ray on this machine, two actors: the same bits, an actor that is killed, what is refused."""
    import ray

    began = time.perf_counter()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    started = time.perf_counter() - began
    made, said = source("scaffold"), []
    executor = actors(made, progress=lambda event: said.append(event.text))
    found = {
        "started": started,
        "one": outcome(made),
        "ray": outcome(made, executor),
        "described": executor.described(),
    }
    setup = made.setup()
    victim = executor.crew.actors[executor.crew.ready[0]]
    ray.kill(victim.handle)
    message = Message({n: t for n, t in setup.build().state_dict().items() if "stem" not in n})
    calls = [Call(setup.population.info(n), "evaluate", message, None) for n in range(5)]
    replies = list(executor(calls, MemoryStore(), 0))
    found["killed"] = {"errors": [reply.error for reply in replies], "lost": executor.crew.lost, "said": said}
    found["usage"] = {"cpu": executor.cpu_seconds, "peak": executor.peak_memory}
    executor.close()
    return found


def refusals() -> Mapping[str, Any]:
    """Versions, data and memory of nodes that cannot be, and hardware that differs."""
    import ray

    from confed.engines.ray import crew

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    made, own = source("fedavg", 1), crew.fingerprint
    found = {
        "memory": refusal(lambda: RayActors(made, Wanted(1, memory=2**60))),
        "gpu": refusal(lambda: RayActors(made, Wanted(1, gpu=True))),
        "data": refusal(lambda: actors(SetupSource("setup_sources:broken"), 1)),
    }
    for name, key in (("version", "torch"), ("source", "source")):
        crew.fingerprint = lambda threads, key=key: {**own(threads), key: "9.9"}
        found[name] = refusal(lambda: actors(made, 1))
    crew.fingerprint = lambda threads: {**own(threads), "processor": "another one"}
    said: list[str] = []
    executor = actors(made, 1, progress=lambda event: said.append(event.text))
    list(executor([], MemoryStore(), 0))
    found |= {"described": executor.described(), "said": said}
    executor.close()
    return found


def _cluster(nodes: int) -> tuple[Any, list[Any]]:
    """A head without cores, and nodes with two cores each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    return cluster, [cluster.add_node(num_cpus=2, object_store_memory=150 * 2**20) for _ in range(nodes)]


def nodes() -> Mapping[str, Any]:
    """Four actors on two nodes, six methods whose clients keep something."""
    import ray

    cluster, _ = _cluster(2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = dict[str, Any]()
    for method in STATEFUL:
        made = source(method)
        executor = actors(made, 4)
        found[method] = {"one": outcome(made), "ray": outcome(made, executor), "described": executor.described()}
        executor.close()
    ray.shutdown()
    cluster.shutdown()
    return found


@dataclass(frozen=True)
class Slow(Scaffold):
    """SCAFFOLD whose clients take their time."""

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Sleeps first."""
        time.sleep(1.0)
        return super().fit(client, message)


class Disturbed:
    """Executor that does something once, between the first and the second reply, and waits before each later round."""

    def __init__(self, inner: RayActors, what: Callable[[], object], wait: Callable[[], object]) -> None:
        self._inner, self._what, self._wait, self.timeline = inner, what, wait, Timeline(0)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        if round:
            self._wait()
        for number, reply in enumerate(self._inner(calls, store, round)):
            yield reply
            if round == number == 0:
                self._what()


@dataclass(frozen=True)
class Deadly(Algorithm):
    """The process of one client is killed in its second round, whichever it is."""

    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Kills its own process, but never the one that has no Ray."""
        if client.info.id == "client-1" and client.round == 1 and "ray" in sys.modules:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client, message)


def kills() -> Mapping[str, Any]:
    """A node that is killed in the middle of a round, one that joins, and a call of which every actor dies."""
    import ray

    from confed.engines.ray import crew, executor

    crew.LOOK = executor.LOOK = 0.5
    cluster, two = _cluster(2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    made, said = source("ray_scenarios:Slow", 5), []
    how = actors(made, 4, progress=lambda event: said.append(event.text))
    before = {node["NodeID"] for node in ray.nodes()}

    def joining() -> None:
        """On a busy machine a node and its actors take longer to start than the rounds last."""
        until = time.monotonic() + 120
        while not any(node["Alive"] and node["NodeID"] not in before for node in ray.nodes()):
            if time.monotonic() > until:
                return
            time.sleep(0.2)
        how.crew.fill()
        if coming := list(how.crew.coming()):
            ray.wait(coming, num_returns=len(coming), timeout=max(0.0, until - time.monotonic()))

    def disturb() -> None:
        cluster.remove_node(two[0], allow_graceful=False)
        cluster.add_node(num_cpus=2, object_store_memory=150 * 2**20, wait=False)

    found = {"one": outcome(made), "ray": outcome(made, Disturbed(how, disturb, joining))}
    found |= {"said": said, "described": how.described()}
    how.close()
    deadly = source("ray_scenarios:Deadly", 3)
    how = actors(deadly, 2)
    found["deadly"] = outcome(deadly, how)
    how.close()
    ray.shutdown()
    cluster.shutdown()
    return found


def recipe() -> Mapping[str, Any]:
    """``confed run`` with one process and on Ray: the files of the run folders that differ."""
    from confed.recipes.recipe import load_recipe
    from confed.runs.run import run

    overrides = [
        "study.methods=[]", "algorithm.name=ditto", "data.name=toy_federation:squares", "data.train=8", "data.test=4",
        "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=2", "run.gallery=0",
        "run.controls=none",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "one", Path(folder) / "two"
        run(load_recipe("fedvqa_scenes", [*overrides, "run.workers=1"]), one)
        summary = run(load_recipe("fedvqa_scenes", [*overrides, "run.engine=ray", "run.workers=2"]), two)
        alike = [one / "metrics.jsonl", one / "predictions.safetensors", *(one / "models").rglob("*.safetensors")]
        differing = [
            str(p.relative_to(one)) for p in alike if p.read_bytes() != (two / p.relative_to(one)).read_bytes()
        ]
        taken = refusal(
            lambda: run(load_recipe("fedvqa_scenes", [*overrides, "run.engine=ray", "run.address=x:1"]), two)
        )
        return {
            "compared": len(alike), "differing": differing, "exact": summary["exact"], "nodes": summary["nodes"],
            "cpu": summary["cpu_seconds"], "refused": taken,
        }  # fmt: skip


def _confed(*arguments: str) -> int:
    """Exit code of a command, in this process."""
    from confed.cli.app import main

    try:
        with contextlib.redirect_stdout(sys.stderr):
            main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def study() -> Mapping[str, Any]:
    """``confed compare --on ray`` on two nodes, of which one is killed: the files that differ from one machine's."""
    from confed.engines.ray import crew, jobs

    crew.LOOK = jobs.LOOK = 0.5
    cluster, two = _cluster(2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        on_ray = SQUARES_STUDY.replace("rounds = 60", 'rounds = 40\naddress = "auto"\nengine = "ray"')
        (folder / "tiny.toml").write_text(on_ray)
        asked = ["compare", str(folder / "tiny.toml"), "--seeds", "2"]
        one, two_nodes = folder / "one", folder / "two"
        seen = dict[str, Any]()

        def disturb() -> None:
            """Kills the node of the first cell that has done three rounds and is in the middle."""
            while "killed" not in seen:
                time.sleep(0.02)
                for lock in two_nodes.glob("*/seed-*/lock.json"):
                    metrics = lock.with_name("metrics.jsonl")
                    done = metrics.read_text().count('"event": "round"') if metrics.exists() else 0
                    if 3 <= done < 30:
                        process = lock.read_text().partition("pid=")[2].split()[0]
                        raylet = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
                        victim = next(n for n in two if n.all_processes["raylet"][0].process.pid == raylet)
                        seen["killed"] = {"cell": lock.parent.parent.name, "rounds": done}
                        cluster.remove_node(victim, allow_graceful=False)
                        return

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        seen["code"] = _confed(*asked, "--out", str(two_nodes), "--on", "ray", f"run.address={cluster.address}")
        thread.join(5)
        seen["shown"] = _confed("compare", str(two_nodes))
        cluster.shutdown()
        seen["alone"] = _confed(*asked, "--out", str(one), "--workers", "1", "run.engine=local", 'run.address=""')
        kinds = ("metrics.jsonl", "predictions.safetensors", "trained.safetensors", "recipe.toml")
        alike = [path for kind in kinds for path in one.rglob(kind)]
        alike += [path for end in ("md", "csv", "tex") for path in one.glob(f"*.{end}")] + [one / "summary.json"]
        seen["compared"] = len(alike)
        seen["differing"] = [
            str(path.relative_to(one)) for path in alike
            if path.read_bytes() != (two_nodes / path.relative_to(one)).read_bytes()
        ]  # fmt: skip
        seen["left"] = [str(path) for path in two_nodes.rglob("error.txt")]
    return seen


def matrix() -> Mapping[str, Any]:
    """Every case of the equivalence matrix on one actor, against one by one: differences and numbers of errors."""
    import ray
    import torch

    import matrix_cases as cases

    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found = dict[str, dict[str, float]]()
    for name, case in cases.CASES.items():
        given = cases.setup_of(case.algorithm, case.local)
        there = cases.outcome(given, actors(SetupSource("matrix_cases:setup", {"name": name}), 1))
        found[name] = {"errors": len(there.errors), "apart": cases.apart(cases.outcome(given), there)}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    import ray_scenarios  # under this name its methods are registered in every process

    print(json.dumps(getattr(ray_scenarios, sys.argv[1])()))
