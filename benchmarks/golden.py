"""Bits of small runs in this tree and at another commit, on one machine: what a change that moves code may not change.

python benchmarks/golden.py --against COMMIT [--only WORD]

Each run is made twice by the command line, with one thread and one set of instructions, and what it leaves is compared
byte by byte: models, states of clients and servers, predictions, losses and evaluations. Exit status 1 where a file
differs or is missing.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from confed.federation.directory_store import records

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("run.rounds=2", "local.epochs=1", "run.gallery=0", "run.controls=none", "run.workers=1")
FEW = ("data.train=24", "data.validation=8", "data.test=8")
SCENES = ("fedvqa_scenes", *SMALL, *FEW, "model.name=vilt_tiny")
LABELS = ("fedlgt_scenes", *SMALL, "model.pretrained=false", "run.cohort=3", "data.clients=6")
CHAT = ("chat_scenes", *SMALL, *FEW)
MODALITIES = ("modalities", *SMALL)

METHODS = (
    "fedavg", "fedp3", "moon", "fedkd", "ditto", "central", "scaffold", "feddyn", "fedrep", "fedadam", "fedavg_ft",
)  # fmt: skip

RUNS: dict[str, tuple[str, ...]] = {
    **{f"vqa {name}": (*SCENES, "--methods", name) for name in METHODS},
    "vqa stacked": (*SCENES, "--methods", "fedavg", "run.batch_clients=4"),
    "vqa workers": (*SCENES, "--methods", "fedavg", "run.workers=2"),
    "vqa buffered": (*SCENES, "--methods", "fedavg", "run.async.buffer=2", "run.cohort=3"),
    "vqa kept features": ("fedvqa_scenes", *SMALL, *FEW, "--methods", "fedavg"),
    "vqa adapters": (*SCENES, "--methods", "fedpeft", "model.trainable=adapters"),
    "prompts": ("prompts_scenes", *SMALL, "--methods", "promptfl"),
    "labels fedlgt": (*LABELS, "--methods", "fedlgt"),
    "captions": ("captions_scenes", *SMALL, *FEW, "--methods", "fedavg"),
    "chat fedavg": (*CHAT, "--methods", "fedavg"),
    "chat feddat": (*CHAT, "--methods", "feddat", "model.trainable=adapters"),
    "split bicsl": ("bicsl_scenes", *SMALL, *FEW, "--methods", "bicsl"),
    "modalities": (*MODALITIES, "--methods", "fedavg"),
    "retrieval": ("retrieval_scenes", *SMALL, "--methods", "fedavg"),
    "federation": (),
}  # fmt: skip
FEDERATION = "import sys, pathlib, golden; golden.federation(pathlib.Path(sys.argv[1]))"
"""A server with its sites in one process, as the folder of the golden pages is made."""
COMPARED = ("models", "checkpoint", "predictions.safetensors", "metrics.jsonl")


def digests_of(folder: Path) -> dict[str, str]:
    """Name of each compared file of a run's or study's folder -> digest of its bytes."""
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in inside if not set(COMPARED).isdisjoint(path.relative_to(folder).parts)]
    digests = dict[str, str]()
    for path in paths:
        name, data = path.relative_to(folder).as_posix(), path.read_bytes()
        if path.suffix != ".states":
            a_state = path.parent.parent.parent.name == "clients"  # in a file of its own, by an earlier commit
            digests[f"{path.relative_to(folder).parents[2].as_posix()}/{path.parent.name}" if a_state else name] = (
                hashlib.sha256(data).hexdigest()
            )
            continue
        # Space of states that nobody needs is given back sooner or later, and earlier commits sealed these files.
        for client, (begin, length) in records(path):
            digests[f"{Path(name).parent}/{client}"] = hashlib.sha256(data[begin : begin + length]).hexdigest()
    return digests


def digests(tree: Path, arguments: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Digests of a run that a tree's own code makes."""
    modules = (tree / "src", tree / "tests" / "support", ROOT / "tests" / "golden")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, modules)), "CONFED_CPU": "avx2", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder.parent / f"{folder.name}-cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "confed.cli", "run", *arguments, "--out", str(folder), "--quiet"]
    if not arguments:
        command = [sys.executable, "-c", FEDERATION, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"it ended": (done.stderr or done.stdout).strip().splitlines()[-1]}
    return digests_of(folder)


def compare(name: str, trees: tuple[Path, Path], scratch: Path) -> bool:
    """Whether a run leaves the same files in two trees; one line says so."""
    here, there = (digests(tree, RUNS[name], scratch / f"{name}-{side}") for side, tree in enumerate(trees))
    failed = [result["it ended"] for result in (here, there) if "it ended" in result]
    differing = sorted(file for file in here.keys() | there.keys() if here.get(file) != there.get(file))
    verdict = f"{len(here)} files with equal bits"
    if differing:
        verdict = f"{len(differing)} of {len(here)} files differ: {', '.join(differing[:3])}"
    if failed:
        verdict = f"did not run: {failed[0]}"
    print(f"{name}: {verdict}", flush=True)
    return not (differing or failed)


def main() -> None:
    """Compares all runs, or those whose name has a word."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--against", required=True, help="a commit")
    arguments.add_argument("--only", default="", help="a word in the names of the runs")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        other = scratch / "other"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", str(other), given.against], cwd=ROOT, check=True
        )
        try:
            names = [name for name in RUNS if given.only in name]
            equal = [compare(name, (ROOT, other), scratch) for name in names]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    print(f"{sum(equal)} of {len(equal)} runs have equal bits")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
