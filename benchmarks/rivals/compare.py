"""confed beside other libraries on the same work: one command that measures, one that draws the table.

    python benchmarks/rivals/compare.py measure --environments ENVS.toml --out results.jsonl --minutes 12
    python benchmarks/rivals/compare.py measure --works W2 W3 --participants "plain" "confed, defaults" --repeats 5
    python benchmarks/rivals/compare.py bits --environments ENVS.toml --out results.jsonl
    python benchmarks/rivals/compare.py table results.jsonl

Each participant is a process of its own, in its own environment: the file names the interpreter of each script
(``pfl_research = "/path/bin/python"``); one without a line runs in this one, where its library must be installed. What
fails is said in its cell. Participants take turns, up to ``--repeats`` times; who would end after ``--minutes``, judged
by the times before, is left out, and how long it will take is said at the start. Processor time and wall-clock time are
those of all rounds after the first, of all processes together; peak memory is the sum of their shares (PSS), read every
0.1 s; the cold start is from the start of the process to the end of round 1. The final values of all are judged by one
function, and a loss that differs from the plain loop's beyond five digits is said in place of a comparison.
"""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from networks import final_loss
from work import SIZES, Work, prepare

HERE = Path(__file__).parent
ALL, SMALL = tuple(SIZES), ("W1", "W2", "W3", "W5")

PARTICIPANTS = {
    "plain": ("plain", "", ALL),
    "confed, one by one": ("ours", "one", ALL),
    "confed, all at once": ("ours", "at_once", SMALL),
    "confed, defaults": ("ours", "defaults", ALL),
    "pfl": ("pfl_research", "", ALL),
    "FedJAX, jit": ("fedjax_library", "jit", SMALL),
    "FedJAX, vmap": ("fedjax_library", "vmap", SMALL),
    "BlazeFL, one thread": ("blazefl_library", "threads 1", ALL),
    "BlazeFL, 2 threads": ("blazefl_library", "threads 2", ALL),
    "BlazeFL, 2 processes": ("blazefl_library", "processes 2", ALL),
    "Flower": ("flower_simulation", "2", ALL),
    "PFLlib": ("pfllib_checkout", "", ("W2", "W3")),
}
"""Name -> script, way, and the work that it can do."""

SECONDS = {"W1": 8.0, "W2": 5.0, "W3": 8.0, "W4": 10.0, "W5": 7.0, "Flower": 30.0}
"""Seconds of a participant's process for a work on two idle cores, and what one takes beside that."""

CLAIMS = {
    "confed": [("ours", "defaults"), *(("ours", f"workers {n}") for n in (1, 2, 4)), ("ours", "killed")],
    "BlazeFL": [("blazefl_library", f"{kind} {n}") for kind in ("threads", "processes") for n in (1, 2, 4)],
}
"""Libraries that promise equal bits however work is divided -> what is run."""


class Watched:
    """A participant's process and its descendants: processor time, wall-clock time and peak memory."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self.started, self.peak, self.over = time.perf_counter(), 0, threading.Event()
        self.root, self.errors = psutil.Process(self.process.pid), list[str]()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._sample, self._drain)]
        for thread in self.threads:
            thread.start()

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self.root, *self.root.children(recursive=True)]
        return []

    def _sample(self) -> None:
        while not self.over.wait(0.1):
            total = 0
            for process in self._tree():
                with suppress(psutil.Error, OSError):
                    total += process.memory_full_info().pss
            self.peak = max(self.peak, total)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.readlines()[-20:]

    def reading(self) -> tuple[float, float]:
        """Processor seconds of all processes so far, those that have ended included, and seconds since the start."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
        return total, time.perf_counter() - self.started

    def reached(self, what: str) -> tuple[float, float] | None:
        """The reading when the participant says that it is there, before it goes on; None where it ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == f"rivals: {what}":
                return self.reading()
        return None

    def go_on(self) -> None:
        """Lets the participant go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Waits for the end; returns what it said last where it failed."""
        code = self.process.wait()
        self.over.set()
        for thread in self.threads:
            thread.join()
        with suppress(ProcessLookupError):  # what it started and left behind, such as Ray's
            os.killpg(self.process.pid, signal.SIGKILL)
        named = [line.strip() for line in self.errors if "Error" in line.partition(":")[0]]
        return "" if not code else (named or self.errors or ["no word"])[-1][:200]


def environment() -> dict[str, str]:
    """One thread per process, and nobody is called."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    silent = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **threads, **silent, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def measured(folder: Path, script: str, way: str, interpreter: str) -> dict[str, Any]:
    """Figures of one participant's process, and nothing that it leaves."""
    try:
        return _measured(folder, script, way, interpreter)
    finally:
        (folder / "final.npz").unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _measured(folder: Path, script: str, way: str, interpreter: str) -> dict[str, Any]:
    watched = Watched([interpreter, str(HERE / f"{script}.py"), str(folder), way], environment())
    first = watched.reached("began")
    if first is None:
        return {"failed": watched.end()}
    watched.go_on()
    last = watched.reached("ended")
    if last is None:
        return {"failed": watched.end()}
    watched.go_on()
    if failed := watched.end():
        return {"failed": failed}
    with np.load(folder / "final.npz") as file:
        final = dict(file)
    return {
        "cold_processor_s": first[0], "cold_s": first[1], "processor_s": last[0] - first[0],
        "wall_s": last[1] - first[1], "peak_mb": watched.peak / 1e6, "loss": final_loss(Work(folder), final),
        "digest": digest(folder),
    }  # fmt: skip


def digest(folder: Path) -> str:
    """Of the final values' bits."""
    with np.load(folder / "final.npz") as file:
        return hashlib.sha256(b"".join(file[name].tobytes() for name in sorted(file))).hexdigest()[:16]


def versions(script: str, interpreter: str) -> str:
    """Versions of a participant's libraries."""
    names = {
        "ours": "torch", "plain": "torch", "pfl_research": "pfl torch", "fedjax_library": "fedjax jax",
        "blazefl_library": "blazefl torch", "flower_simulation": "flwr ray torch", "pfllib_checkout": "torch",
    }[script]  # fmt: skip
    code = (
        "import sys, importlib.metadata as m; print('Python', sys.version.split()[0], "
        f"*(f'{{n}} {{m.version(n)}}' for n in {names.split()}))"
    )
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def kept(out: Path, line: dict[str, Any]) -> None:
    """Appends a result."""
    sys.path.insert(0, str(HERE.parent))
    from measure import machine

    text = json.dumps({"date": datetime.date.today().isoformat(), **line, "machine": machine()})
    print(text, flush=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def interpreters(path: Path | None) -> defaultdict[str, str]:
    """Interpreter of each script; this one where the file has no line."""
    named = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    return defaultdict(lambda: sys.executable, named)


@contextmanager
def prepared(name: str) -> Iterator[Path]:
    """A folder with the work, for one participant after the other."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        prepare(name, folder)
        yield folder


def measure(given: argparse.Namespace) -> None:
    """All participants in turn, again and again."""
    python = interpreters(given.environments)
    cells = [(name, p) for name in given.works for p in given.participants if name in PARTICIPANTS[p][2]]
    seconds = {(name, p): SECONDS[name] + SECONDS.get(p, 0.0) for name, p in cells}
    once, until = sum(seconds.values()), time.monotonic() + 60 * given.minutes
    whole = min(given.minutes, given.repeats * once / 60)
    print(f"{len(cells)} participants, {once:.0f} s for each to do its work once on two idle cores; ", end="")
    print(f"{given.repeats} repeats or what fits into {given.minutes:g} minutes: about {whole:.1f} minutes", flush=True)
    with ExitStack() as folders:
        folder_of = {name: folders.enter_context(prepared(name)) for name in given.works}
        for repeat, (name, participant) in product(range(given.repeats), cells):
            began = time.monotonic()
            if began + seconds[name, participant] > until:
                continue
            script, way, _ = PARTICIPANTS[participant]
            figures = measured(folder_of[name], script, way, python[script])
            seconds[name, participant] = time.monotonic() - began
            line = {"work": name, "participant": participant, "repeat": repeat, "load": os.getloadavg()[0]}
            kept(given.out, {**line, **figures, "versions": versions(script, python[script])})


def bits(given: argparse.Namespace) -> None:
    """Digests of what the libraries that promise equal bits learn, however the work is divided, and after a kill."""
    python = interpreters(given.environments)
    for name, library in product(given.works, CLAIMS):
        with prepared(name) as folder:
            for script, way in CLAIMS[library]:
                if way == "killed":
                    kill(folder, script, python[script])
                figures = measured(folder, script, "defaults" if way == "killed" else way, python[script])
                line = {"work": name, "library": library, "way": way, "digest": figures.get("digest")}
                kept(given.out, {**line, "failed": figures.get("failed", "")})


def kill(folder: Path, script: str, interpreter: str) -> None:
    """Begins the work and kills it somewhere behind its first round."""
    watched = Watched([interpreter, str(HERE / f"{script}.py"), str(folder), "defaults"], environment())
    assert watched.reached("began") is not None, watched.end()
    watched.go_on()
    time.sleep(0.3)
    os.killpg(watched.process.pid, signal.SIGKILL)
    watched.end()


# The table ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median with its range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(given: argparse.Namespace) -> None:
    """Prints a table per work, of ratios to the plain loop in the same repeat, and one of equal bits."""
    lines = [json.loads(line) for line in given.results.read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if "participant" in line]
    for name in sorted({line["work"] for line in timed}):
        draw(name, [line for line in timed if line["work"] == name])
    for work, library in sorted({(line["work"], line["library"]) for line in lines if "library" in line}):
        ways = [line for line in lines if (line["work"], line.get("library")) == (work, library)]
        equal = len({line["digest"] for line in ways}) == 1 and all(line["digest"] for line in ways)
        print(f"{work}, {library}: {'equal' if equal else 'NOT equal'} bits with {', '.join(w['way'] for w in ways)}")


def draw(name: str, lines: Sequence[dict[str, Any]]) -> None:
    """One work's table."""
    done = [line for line in lines if "failed" not in line]
    plain = {line["repeat"]: line for line in done if line["participant"] == "plain"}
    one = lines[0]
    print(f"\n{name}: {SIZES[name].title} ({one['date']}, {one['machine']})\n")
    seconds = statistics.median(line["processor_s"] for line in plain.values())
    loads = [line["load"] for line in lines]
    print(f"Ratios to the plain loop, which took {seconds:.2f} s of processor time after round 1;", end=" ")
    print(f"load {min(loads):.0f} to {max(loads):.0f}.\n")
    print("| | processor time | wall | peak, MB | cold start, s of processor | |\n|---|---:|---:|---:|---:|---|")
    for participant in dict.fromkeys(line["participant"] for line in lines):
        own = [line for line in done if line["participant"] == participant]
        said = next(line for line in lines if line["participant"] == participant)
        if not own:
            print(f"| {participant} | – | – | – | – | {said['failed']} |")
            continue
        ratios = {key: [line[key] / plain[line["repeat"]][key] for line in own] for key in ("processor_s", "wall_s")}
        loss = statistics.median(line["loss"] for line in plain.values())
        differs = max(abs(line["loss"] / loss - 1) for line in own)
        note = "" if differs < 1e-5 else f"final loss {own[0]['loss']:.6g}, the plain loop's {loss:.6g}: not compared"
        cells = [f"{spread([line['peak_mb'] for line in own], 0)}", spread([line["cold_processor_s"] for line in own])]
        times = [spread(ratios[key]) if not note else "–" for key in ("processor_s", "wall_s")]
        print(f"| {participant} | {' | '.join(times + cells)} | {note or said['versions']} |")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "bits", "table"))
    parser.add_argument("results", nargs="?", type=Path, help="of table: the file with results")
    parser.add_argument("--works", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--participants", nargs="+", choices=PARTICIPANTS, default=list(PARTICIPANTS))
    parser.add_argument("--repeats", type=int, default=3, help="of measure: how often at most")
    parser.add_argument("--minutes", type=float, default=12.0, help="of measure: nobody begins who would end later")
    parser.add_argument("--environments", type=Path, help="TOML: script = interpreter")
    parser.add_argument("--out", type=Path, default=Path("rivals.jsonl"))
    given = parser.parse_args()
    {"measure": measure, "bits": bits, "table": table}[given.what](given)


if __name__ == "__main__":
    main()
