"""SIGKILL at random moments of tiny runs and studies, then `confed resume` until done, compared with undisturbed ones.

For each case one folder is made without disturbance. Others are killed several times each, at any moment of their
processor's work from the first line of the command to its report, and gone on with. At the end the folders must hold
the same files: models, client states, predictions and histories with the same content, summaries the same but for
times, sizes in memory and the note on going on; no temporary file, no lock and no process of a killed run is left.

    python benchmarks/kill_runs.py --seed 1 --count 100

Every command is a fork of one process that has imported everything, which saves the seconds of an import each time;
with --fresh it is a Python of its own.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confed.federation.directory_store import DirectoryStore
from confed.federation.state import ClientState

SCENES = (
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=24", "data.validation=4", "data.test=8",
    "local.epochs=1", "run.rounds=4", "run.gallery=0",
)  # fmt: skip
ONE = ("fedvqa_scenes", *SCENES, "data.unseen=[]", "run.without=['home', 'commercial']", "study.methods=[]")
SPLIT = (
    "bicsl_scenes", "data.train=32", "data.validation=4", "data.test=8", "data.clients=2", "model.name=butd_mini",
    "task.width=8", "task.hidden=8", "task.embedding=8", "local.batch_size=8", "run.rounds=4", "run.gallery=0",
    "study.methods=[]", "study.models=[]",
)  # fmt: skip

CASES: dict[str, tuple[str, ...]] = {
    "fedavg": ("run", *ONE, "algorithm.name=fedavg", "run.workers=1"),
    "scaffold": ("run", *ONE, "algorithm.name=scaffold", "run.workers=1"),
    "secure_sum": ("run", *ONE, "algorithm.name=fedavg", "algorithm.secure_sum={}", "run.workers=1"),
    "feddat": ("run", *ONE, "algorithm.name=feddat", "model.trainable=adapters", "run.workers=1"),
    "bicsl": ("run", *SPLIT, "run.workers=1"),
    "study": (
        "run", "fedvqa_scenes", *SCENES, "data.unseen=[]", "run.without=['home', 'commercial']", "run.rounds=2",
        "--methods", "fedavg,fedper", "--workers", "2",
    ),
}  # fmt: skip
"""Name -> the command that begins it, without its folder."""

TIMES = {"seconds", "cpu_seconds", "seconds_per_round", "peak_memory_bytes", "features"}
"""Keys of summaries that may differ between two runs: what is found in the cache of features depends on others, too."""

UNCOMPARED = {"timings.jsonl", "timeline.jsonl", "report.html", "report.md", "begun.json"}
"""Files with times in them; that they are there is compared."""


def main() -> int:
    """Kills, compares and prints; returns the exit status."""
    options = _options()
    rng, root = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="confed-kills-"))
    ends, findings, total, before_folder = time.monotonic() + options.minutes * 60, list[str](), 0, 0
    print(f"seed {options.seed}, {options.count} kills, {'fresh' if options.fresh else 'forked'} processes, {root}")
    for number, name in enumerate(options.cases):
        command = CASES[name]
        whole = root / name / "undisturbed"
        whole.parent.mkdir()
        seconds = _finish([*command, "--out", str(whole)], root / f"{name}.log", options.fresh)
        if not options.fresh:  # a second time, as the first one imported what later forks have already
            again = root / name / "again"
            seconds = _finish([*command, "--out", str(again)], root / f"{name}.log", False)
            findings += [f"{name}, undisturbed twice: {text}" for text in differences(whole, again)]
        share = (options.count - total) // (len(options.cases) - number)
        # Time too is dealt out evenly, or the last cases would get none of it.
        until = time.monotonic() + (ends - time.monotonic()) / (len(options.cases) - number)
        kills, runs = 0, 0
        while kills < share and time.monotonic() < until:
            folder = root / name / f"killed-{runs}"
            wanted = min(options.per_run, share - kills)
            made, early, problems = _killed(command, folder, wanted, seconds, rng, root / f"{name}.log", options.fresh)
            kills, runs, before_folder = kills + made, runs + 1, before_folder + early
            problems += differences(whole, folder) if not problems else []
            findings += [f"{name}, {folder.name}: {text}" for text in problems]
            if not problems:
                _remove(folder)
        total += kills
        print(f"{name}: {kills} kills of {runs} runs that take {seconds:.1f} s", flush=True)
    print(f"{total} kills ({before_folder} before there was a recipe in the folder), {len(findings)} findings")
    for finding in findings:
        print(f"  {finding}")
    if not findings:
        _remove(root)
    return 1 if findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments (default: the time)")
    parser.add_argument("--count", type=int, default=100, help="kills in all")
    parser.add_argument("--per-run", type=int, default=6, help="kills of one run, at most")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no new run is begun")
    parser.add_argument("--fresh", action="store_true", help="a new Python for every command")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return options


# Commands ------------------------------------------------------------------------------------------------------


def _begin(command: Sequence[str], log: Path, fresh: bool) -> int:
    """Begins a command in a session of its own; returns the process."""
    gc.collect()
    if process := os.fork():
        return process
    status = 70
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if fresh:
            code = "import sys; from confed.cli import main; sys.argv = ['confed', *sys.argv[1:]]; main()"
            os.execv(sys.executable, [sys.executable, "-c", code, *command])
        from confed.cli import main as confed

        sys.argv = ["confed", *command]
        try:
            confed()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        loaded = sorted(name for name in sys.modules if not name.startswith("_"))
        log.with_suffix(".modules").write_text("\n".join(loaded), encoding="utf-8")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _finish(command: Sequence[str], log: Path, fresh: bool) -> float:
    """Lets a command run to its end; returns its seconds. What it imported is imported here too.

    Raises:
        SystemExit: it failed.
    """
    began = time.monotonic()
    _, status = os.waitpid(_begin(command, log, fresh), 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"confed {' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    modules = log.with_suffix(".modules")
    for name in modules.read_text(encoding="utf-8").split() if modules.is_file() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return seconds


def _killed(
    command: Sequence[str], folder: Path, kills: int, seconds: float, rng: random.Random, log: Path, fresh: bool
) -> tuple[int, int, list[str]]:
    """Runs a command, killed so many times on its way, to its end.

    Returns:
        Kills made (fewer, if the run was done before), those of them before there was a recipe, and what went wrong.
    """
    made, early, problems = 0, 0, list[str]()
    while True:
        begun = (folder / "recipe.toml").is_file() or (folder / "summary.json").is_file()
        arguments = ["resume", str(folder)] if begun else [*command, "--out", str(folder)]
        process = _begin(arguments, log, fresh)
        killed = made < kills and _kill(process, rng.uniform(0.0, 0.7 * seconds))
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if left := _left(process):
            problems.append(f"processes {left} live on {'after a kill' if killed else 'after the end'}")
        if code == 0:
            return made, early, problems
        if code != -signal.SIGKILL:
            told = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            return made, early, [*problems, f"after {made} kills confed {arguments[0]} ended with {code}: {told}"]
        made += 1
        early += not (folder / "recipe.toml").is_file()


def _kill(process: int, after: float) -> bool:
    """Kills a process after some seconds, unless it ends before; whether it did."""
    until = time.monotonic() + after
    while time.monotonic() < until:
        # Looked at and not collected: the caller wants the status too.
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    return True


def _left(session: int, patience: float = 10.0) -> list[int]:
    """The processes of a session that are still there after some seconds; they are ended."""
    until = time.monotonic() + patience
    while (there := _of_session(session)) and time.monotonic() < until:
        time.sleep(0.02)
    for process in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return there


def _of_session(session: int) -> list[int]:
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                after_name = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(after_name[3]) == session and after_name[0] != "Z":
                    found.append(int(entry.name))
    return found


# Comparing -----------------------------------------------------------------------------------------------------


def differences(expected: Path, got: Path) -> list[str]:
    """What differs between two folders of the same runs, one line each; also what is left over in the second."""
    names = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    found = {str(path.relative_to(got)) for path in got.rglob("*") if path.is_file()}
    problems = [f"{name} is missing" for name in sorted(names - found) if not name.endswith(".states")]
    problems += [f"{name} is left over" for name in sorted(found - names) if not name.endswith(".states")]
    # Folders of a checkpoint that was being written are left-overs as well.
    problems += [f"{path} is left over" for path in sorted(got.rglob(".*.tmp")) if path.is_dir()]
    for folder in {(expected / name).parent for name in names if name.endswith(".states")}:
        # Space of states that nobody needs is given back sooner or later: the states count, not the files.
        if _states(folder) != _states(got / folder.relative_to(expected)):
            problems.append(f"states in {folder.relative_to(expected)} differ")
    for name in sorted(name for name in names & found if not name.endswith(".states")):
        if Path(name).name not in UNCOMPARED and _content(expected / name) != _content(got / name):
            problems.append(f"{name} differs")
    return problems


def _states(folder: Path) -> dict[str, Any]:
    """Each client's newest state."""
    store = DirectoryStore(folder)
    store.begin(10**6)
    return {client: _values(store.load(client)) for client in store.clients()}


def _values(state: ClientState) -> Any:
    # The order of the entries in the header of a file is random; the tensors and scalars are not.
    tensors = {
        (group, name): (str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).numpy().tobytes())
        for group, own in state.tensors.items()
        for name, tensor in own.items()
    }
    return tensors, json.dumps(state.scalars, sort_keys=True)


def _content(path: Path) -> Any:
    """What of a file two equal runs have in common."""
    data = path.read_bytes()
    if path.name == "summary.json":
        return _without_times(json.loads(data))
    return hashlib.sha256(data).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        items: dict[str, Any] = value
        return {key: _without_times(own) for key, own in items.items() if key not in TIMES}
    if isinstance(value, list):
        texts: list[Any] = value
        return [_without_times(own) for own in texts if not str(own).startswith("resumed: ")]
    return value


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
