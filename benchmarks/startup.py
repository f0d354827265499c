"""Processor seconds of a whole ``confed run`` with evaluation and report: mini ViLT, one round of few examples.

``first``: processor seconds from the start of ``confed run RECIPE`` until round 1 can begin, with 8 examples per
client, without evaluation and without the time in which the built-in data are drawn; beside importing PyTorch, its
first optimiser (for which PyTorch imports its compiler), the model classes of transformers, and ``confed --help``.
Each recipe stands beside its floor: a script without confed that imports PyTorch, makes a network of the same
classes of transformers, if the recipe's has any, and an optimiser of its parameters. ``beyond_floor`` is what confed
adds, both measured in turn.
"""

import resource
import statistics
import subprocess
import sys

from measure import finish

COMMAND = """
import sys
from confed.cli import main
import tempfile, pathlib
sys.argv = ["confed", "run", "fedvqa_scenes", "study.methods=[]", "algorithm.name=fedavg", "run.rounds=1",
    "data.train=64", "data.validation=8", "data.test=8", "run.workers=1", "run.evaluate_every=0", "run.gallery=0",
    "--json", "--out", str(pathlib.Path(tempfile.mkdtemp()) / "run")]
main()
"""

STARTS = {
    "torch": "import torch",
    "optimizer": "import torch; torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)",
    "transformers": "import torch; import transformers.models.vilt.modeling_vilt",
    "floor of vilt": """
import torch
from transformers import ViltConfig, ViltModel
model = ViltModel(ViltConfig(vocab_size=120, hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=384, image_size=64, patch_size=8))
torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    "floor of resnet": """
import torch
from transformers import ResNetConfig, ResNetModel
model = ResNetModel(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1]))
torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    "help": "from confed.cli import main; main(['--help'])",
    **{
        recipe: f"""
import os, pathlib, sys, tempfile, time
from confed.cli import main
from confed.system.collector import collector_at_rest
with collector_at_rest():  # as the command itself does
    import confed.runs.build, confed.runs.run
make, seconds = confed.runs.build.load_data, []
def timed(*arguments):
    began = time.process_time()
    made = make(*arguments)
    seconds.append(time.process_time() - began)
    return made
def begin(*arguments):
    print("data", sum(seconds), file=sys.__stdout__, flush=True)
    os._exit(0)
confed.runs.build.load_data, confed.runs.run.simulate = timed, begin
main(["run", "{recipe}", "study.methods=[]", "data.train=8", "data.validation=4", "data.test=4", "run.workers=1",
    "run.evaluate_every=0", "--out", str(pathlib.Path(tempfile.mkdtemp()) / "run")])
"""
        for recipe in ("captions_scenes", "fedvqa_scenes", "fedlgt_scenes")
    },
}


FLOORS = {"captions_scenes": "torch", "fedvqa_scenes": "floor of vilt", "fedlgt_scenes": "floor of resnet"}


def processor_seconds(code: str) -> float:
    """User and system time of one process, without what it says that its data took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=sys.path[0])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    data = sum(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("data "))
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - data


def first() -> None:
    found: dict[str, list[float]] = {kind: [] for kind in STARTS}
    for repeat in range(3):
        for kind, code in STARTS.items():
            took = processor_seconds(code)
            if repeat:  # the first one compiles what was never imported
                found[kind].append(took)
    for kind, times in found.items():
        more = _more(times, found["torch"])
        floor = {"beyond_floor": _more(times, found[FLOORS[kind]])} if kind in FLOORS else {}
        finish(
            f"start_{kind}", 1.0, ratio=more, unit="processor seconds more than import torch",
            seconds=statistics.median(times), lowest=min(times), highest=max(times), **floor,
        )  # fmt: skip


def _more(times: list[float], than: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(times, than, strict=True))


def main() -> None:
    processor_seconds(COMMAND)
    times = [processor_seconds(COMMAND) for _ in range(3)]
    finish("startup", float("inf"), whole_command_with_report_seconds=statistics.median(times))


if __name__ == "__main__":
    first() if sys.argv[1:2] == ["first"] else main()
