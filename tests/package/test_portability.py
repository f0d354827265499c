"""``confed run`` on systems that lack modules, functions and signals of Unix, as Windows does."""

import subprocess
import sys
from pathlib import Path

import pytest

from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from repository import ROOT

TINY = (
    "study.methods=[]", "algorithm.name=fedavg", "data.name=toy_federation:squares", "data.train=8", "data.test=4",
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=1", "run.gallery=1",
    "run.evaluate_every=1", "run.controls=none",
)  # fmt: skip
# What Windows lacks; other libraries find it here, as they ask which system it is.
BLOCKED = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "crypt", "nis", "spwd")
FUNCTIONS = (
    "fork", "forkpty", "register_at_fork", "sched_getaffinity", "getuid", "geteuid", "getgid", "getloadavg", "uname",
    "killpg", "getpgid", "setsid", "wait3", "wait4", "O_DIRECTORY", "O_CLOEXEC", "mkfifo", "chown", "fchmod", "sysconf",
)  # fmt: skip
SIGNALS = ("SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT", "SIGTSTP", "SIGPIPE", "SIGKILL")
LIKE_WINDOWS = f"""
import builtins, os, signal, sys, types

found = builtins.__import__

def find(name, globals=None, *rest, **named):
    if name in {BLOCKED} and (globals or {{}}).get("__name__", "").partition(".")[0] == "confed":
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return found(name, globals, *rest, **named)

builtins.__import__ = find

class Lacking(types.ModuleType):
    def __getattribute__(self, name):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if name in {FUNCTIONS + SIGNALS} and caller.partition(".")[0] == "confed":
            raise AttributeError(f"module has no attribute {{name!r}}")
        return super().__getattribute__(name)

os.__class__ = signal.__class__ = Lacking
sys.path[:0] = sys.argv[1].split(",")

if __name__ == "__main__":
    from confed.cli import main
    main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(("run.workers=1",), id="one process"),
        # What Windows has in place of forks; each child lacks the same.
        pytest.param(("run.workers=2", "run.start_method=spawn"), id="spawned", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_runs_without_unix_modules(tmp_path: Path, processes: tuple[str, ...]) -> None:
    script, folder = tmp_path / "like_windows.py", tmp_path / "there"
    script.write_text(LIKE_WINDOWS)
    ours = ",".join(str(ROOT / part) for part in ("src", "tests/support"))
    command = [sys.executable, str(script), ours, "run", "fedvqa_scenes", *TINY, *processes, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run(load_recipe("fedvqa_scenes", [*TINY, "run.workers=1"]), tmp_path / "here")
    assert (folder / "report.html").is_file()
    assert not (folder / "lock.json").exists()
    for name in ("metrics.jsonl", "predictions.safetensors", "models/global/trained.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
