"""What a start imports: modules are slow to import (transformers takes longer than PyTorch) and hold memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
import json, sys
import confed.runs.run
from confed.cli import main

def stop(*arguments):
    print(json.dumps(sorted(sys.modules)))
    raise KeyboardInterrupt

confed.runs.run.simulate = stop
main(sys.argv[1:])
"""


def modules(code: str, *arguments: object) -> list[set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines, done.stderr
    return [set(json.loads(line)) for line in lines]


def loaded(there: set[str], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in there]


def test_help_and_lists_need_no_numerical_library():
    imported, there = modules(LISTS, "methods", "models", "tasks", "datasets", "recipes", "runs")
    assert "typer" not in imported
    assert loaded(there, (*NEVER, *TRANSFORMERS, "numpy", "PIL", "pydantic", "safetensors", "torch")) == []


@pytest.mark.parametrize(
    ("recipe", "families"),
    [
        ("fedvqa_scenes", {"vilt"}),
        pytest.param("captions_scenes", None, marks=pytest.mark.slow),
        pytest.param("fedlgt_scenes", {"resnet"}, marks=pytest.mark.slow),
    ],
)
def test_a_first_round_imports_what_the_network_needs(tmp_path: Path, recipe: str, families: set[str] | None):
    small = ("data.train=8", "data.validation=4", "data.test=4", "run.workers=1", "run.evaluate_every=0")
    (there,) = modules(FIRST_ROUND, "run", recipe, "study.methods=[]", *small, "--out", tmp_path / "run")
    assert loaded(there, NEVER) == []
    if families is None:
        assert loaded(there, TRANSFORMERS) == []
    else:
        # Classes of one family of models, and no other's; "auto" is what transformers' own modules import.
        found = {name.split(".")[2] for name in there if name.startswith("transformers.models.")}
        assert families <= found <= {*families, "auto", "encoder_decoder"}
