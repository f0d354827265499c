"""What a start imports: modules are slow to import (transformers takes longer than PyTorch) and hold memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from repository import ROOT

NEVER = (
    "bitsandbytes", "confed.report", "datasets", "flwr", "h5py", "matplotlib", "num2words", "nvflare", "optuna",
    "pandas", "pyarrow", "ray", "sklearn", "torchvision",
)  # fmt: skip
"""Not before the first round, in any run of a packaged network."""

TRANSFORMERS = ("accelerate", "peft", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor", "transformers")
"""Not before the first round where the network is confed's own."""

LISTS = """
import json, sys
import confed
print(json.dumps(sorted(sys.modules)))
from confed.cli import main
for words in (["--help"], *(["list", kind] for kind in sys.argv[1:])):
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
print(json.dumps(sorted(sys.modules)))
"""
FIRST_ROUND = """
import json, os, sys
import confed.runs.run
from confed.cli import main

def stop(*arguments):
    print(json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)

confed.runs.run.simulate = stop
main(sys.argv[1:])
"""


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
import builtins, json, os, signal, sys, types

found = builtins.__import__

def find(name, globals=None, *rest, **named):
    if name in {BLOCKED} and (globals or {{}}).get("__name__", "").partition(".")[0] == "confed":
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return found(name, globals, *rest, **named)

builtins.__import__ = find

class Lacking(types.ModuleType):
    def __getattribute__(self, name):
        if name in {FUNCTIONS + SIGNALS}:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] == "confed":
                raise AttributeError(f"module has no attribute {{name!r}}")
        return super().__getattribute__(name)

os.__class__ = signal.__class__ = Lacking
sys.path[:0] = sys.argv[1].split(",")

def simulate(*arguments):
    print(json.dumps(sorted(sys.modules)))
    return train(*arguments)

if __name__ == "__main__":
    import confed.runs.run
    from confed.cli import main
    train, confed.runs.run.simulate = confed.runs.run.simulate, simulate
    main(sys.argv[2:])
"""


def modules(*arguments: object) -> list[set[str]]:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def loaded(there: set[str], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in there]


def model_families(there: set[str]) -> set[str]:
    """Of transformers: what is loaded; "auto" is what its own modules import."""
    return {name.split(".")[2] for name in there if name.startswith("transformers.models.")}


def test_help_and_lists_need_no_numerical_library():
    imported, there = modules("-c", LISTS, "methods", "models", "tasks", "datasets", "recipes", "runs")
    assert "typer" not in imported
    assert loaded(there, (*NEVER, *TRANSFORMERS, "numpy", "PIL", "pydantic", "safetensors", "torch")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "families"), [("fedvqa_scenes", {"vilt"}), ("captions_scenes", None), ("fedlgt_scenes", {"resnet"})]
)
def test_a_first_round_imports_what_the_network_needs(tmp_path: Path, recipe: str, families: set[str] | None):
    small = ("data.train=8", "data.validation=4", "data.test=4", "run.workers=1", "run.evaluate_every=0")
    (there,) = modules("-c", FIRST_ROUND, "run", recipe, "study.methods=[]", *small, "--out", tmp_path / "run")
    assert loaded(there, NEVER) == []
    if families is None:
        assert loaded(there, TRANSFORMERS) == []
    else:
        assert families <= model_families(there) <= {*families, "auto", "encoder_decoder"}


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(("run.workers=1",), id="one process"),
        # What Windows has in place of forks; each child lacks the same.
        pytest.param(("run.workers=2", "run.start_method=spawn"), id="spawned", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_runs_without_unix_modules(tmp_path: Path, processes: tuple[str, ...]):
    """Nor does its first round import what it does not need."""
    script, folder = tmp_path / "like_windows.py", tmp_path / "there"
    script.write_text(LIKE_WINDOWS)
    ours = ",".join(str(ROOT / part) for part in ("src", "tests/support"))
    (there,) = modules(script, ours, "run", "fedvqa_scenes", *TINY, *processes, "--out", folder)
    assert loaded(there, NEVER) == []
    assert {"vilt"} <= model_families(there) <= {"vilt", "auto", "encoder_decoder"}
    run(load_recipe("fedvqa_scenes", [*TINY, "run.workers=1"]), tmp_path / "here")
    assert (folder / "report.html").is_file()
    assert not (folder / "lock.json").exists()
    for name in ("metrics.jsonl", "predictions.safetensors", "models/global/trained.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
