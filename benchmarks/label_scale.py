"""FLAIR's size: 41,131 users of 8 pictures with 17 labels, 50 of them in a round, drawn by their number of pictures.

Pictures are made up when they are asked for; everything else is as in a run from a recipe: data that are made when a
user is asked for, client states and a checkpoint on disk after every round. Each measurement has a process of its own.

``start``: from the start of the process until round 1 can begin, with 1,000 users too, to see what a user costs, and
how long it takes to import PyTorch and the classes of transformers that the model is made of, and nothing else.
``published``: rounds of FedLGT and FedBN with ``ctran_mini``, 5 epochs, batches of 16; what drawing the cohort, finding
its data and keeping states take of them; examples run through the frozen global model, counted by a hook. FedLGT
without personal models, as in the recipe for FLAIR, and with one of 1 MB per user.
``flat``: 100 rounds of FedBN with a tiny network, whose users keep their normalisation layers; resident memory after
every round, as a line through the last 50, when Python's lists of free objects have filled up; whose states are on
disk; and from the start of another process until the interrupted run can continue.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from measure import finish

USERS, EACH, COHORT, ROUNDS, LABELS = 41_131, 8, 50, 100, 17
RECIPE = """
[algorithm]
name = "{method}"
[model]
name = "{model}"
[task]
name = "multilabel"
known = {known}
[data]
name = "many_users"
users = {users}
[local]
optimizer = "adam"
epochs = 5
batch_size = 16
lr = 1e-3
[run]
rounds = {rounds}
cohort = 50
sampling = "size"
workers = 1
keep_personal = {keep}
"""


class MadeUp:
    """M pictures of noise, of which 64 are different; see :class:`confed.data.picture_tables.Pictures`."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, count: int) -> None:
        self.shape = (count, 64, 64, 3)
        self._some = np.random.default_rng(0).integers(0, 256, (64, 64, 64, 3)).astype(np.uint8)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._some[np.asarray(index) % 64]


def many_users(*, users: int = USERS, seed: int = 0) -> Any:
    """As :func:`confed.datasets.flair.flair` makes them, from arrays instead of files; tests are of other people."""
    from confed.data.examples import Examples, FederatedDataset, Split
    from confed.data.lazy import Lazy
    from confed.data.ml_files.table import MultiLabelTable
    from confed.data.ragged import PackedTexts, Ragged, offsets_of

    rng, rows = np.random.default_rng(seed), users * EACH + 256
    lengths = rng.integers(0, 5, rows)
    numbers = rng.random((rows, LABELS)).argsort(1)[np.arange(LABELS) < lengths[:, None]].astype(np.int32)
    names = PackedTexts.of(str(row) for row in range(rows))
    owners = PackedTexts.of(f"{number:05d}@flickr" for number in range(users))
    labels, ends = tuple(f"label {number}" for number in range(LABELS)), EACH * np.arange(users + 1)
    table = MultiLabelTable(labels, Ragged(numbers, offsets_of(lengths)), names, names, None, owners, ends)
    pictures = MadeUp(rows)

    def examples(chosen: np.ndarray) -> Examples:
        return Examples.labelled(table, pictures, chosen.astype(np.int64))

    def split(user: str, own: np.ndarray) -> Split:
        del user
        return Split(examples(own), examples(own[:0]), examples(own[:0]))

    own = table.of_users()
    clients = Lazy(own, lambda user: split(user, own[user]), np.full(users, EACH))
    return FederatedDataset("many_users", labels, clients, {"test": examples(np.arange(users * EACH, rows))})


class Tiny(nn.Module):
    """Mean colours, normalised over the batch, and a layer of scores."""

    def __init__(self, labels: int, rng: torch.Generator) -> None:
        super().__init__()
        self.norm, self.classifier = nn.BatchNorm1d(3), nn.Linear(3, labels)
        with torch.no_grad():
            self.classifier.weight.copy_(torch.randn(labels, 3, generator=rng))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        from confed.federation.protocols import Output

        features = self.norm(batch["image"][:, :, ::8, ::8].float().mean((2, 3)) / 255)
        return Output(self.classifier(features), features)


def tiny(answers: Any, vocab_size: int = 0, *, max_length: int = 16, seed: int = 0) -> Tiny:
    """Its constructor."""
    del vocab_size, max_length
    return Tiny(len(answers), torch.Generator().manual_seed(seed))


class Clocked:
    """Processor time spent in some functions, and how often they were called."""

    def __init__(self) -> None:
        self.seconds, self.calls = dict[str, float](), dict[str, int]()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Clocks one attribute of an object or a class from now on; the parts must not call each other."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began
                self.calls[part] = self.calls.get(part, 0) + 1

        setattr(owner, name, timed)


class Federation:
    """What a recipe describes, ready for its first round or for the one after its newest checkpoint."""

    def __init__(
        self, root: Path, *, method: str, model: str, known: float, users: int, rounds: int, keep: str = "true"
    ) -> None:
        from confed.engines.local import InProcess, Participation, Simulation
        from confed.engines.perform import Workspace
        from confed.engines.usage import keep_freed_memory
        from confed.federation.checkpoint import Checkpoints
        from confed.models.tokenizer import WordTokenizer
        from confed.recipes.recipe import load_recipe
        from confed.registry import datasets, models
        from confed.runs.build import prepare

        torch.set_num_threads(1)
        keep_freed_memory()
        tiny.tokenizer = WordTokenizer  # type: ignore[attr-defined]
        models.add("tiny", tiny), datasets.add("many_users", many_users)
        file = root / "recipe.toml"
        file.write_text(RECIPE.format(method=method, model=model, known=known, users=users, rounds=rounds, keep=keep))
        self.setup, _ = prepare(load_recipe(file))
        self.workspace = Workspace(self.setup.model())
        self.checkpoints = Checkpoints(root / "checkpoint")
        store, executor = self.checkpoints.store, InProcess(self.setup, self.workspace)
        self.simulation = Simulation(self.setup, store, executor, COHORT, Participation(), by_size=True)
        self.begun = 0
        if self.checkpoints.rounds():
            checkpoint, _ = self.checkpoints.latest()
            self.servers, self.begun = checkpoint.servers, checkpoint.round
        else:
            store.rewind(0)
            self.servers = self.simulation.start(self.workspace)
        self.simulation.sample(self.begun)

    def rounds(self) -> Any:
        """The rounds, each with its checkpoint."""
        from confed.engines.local import simulate
        from confed.federation.checkpoint import Checkpoint

        for record in simulate(self.simulation, self.servers, self.begun):
            assert not record.errors, record.errors
            self.checkpoints.save(Checkpoint(record.round, record.servers, 0))
            yield record


def resident() -> float:
    """Resident memory, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def imports(root: Path) -> dict[str, float]:
    """The libraries alone."""
    del root
    from transformers import ResNetConfig, ResNetModel

    del ResNetConfig, ResNetModel
    return {"processor_seconds": time.process_time(), "resident_mib": resident()}


def start(root: Path, users: str) -> dict[str, float]:
    """Until round 1 can begin."""
    Federation(root, method="fedlgt", model="ctran_mini", known=0.75, users=int(users), rounds=ROUNDS)
    return {"processor_seconds": time.process_time(), "resident_mib": resident()}


def published(root: Path, method: str, keep: str) -> dict[str, float]:
    """Three rounds with ``ctran_mini``, of which the first does not count."""
    from confed.engines.participation import Members
    from confed.federation.client import Client

    federation = Federation(root, method=method, model="ctran_mini", known=0.75, users=USERS, rounds=3, keep=keep)
    clock, seen = Clocked(), {"trained": 0, "frozen": 0}
    store, simulation = federation.checkpoints.store, federation.simulation
    clock.watch(simulation, "sample", "cohort")
    clock.watch(Members, "data", "data")
    for name in ("begin", "load", "save"):
        clock.watch(store, name, f"state {name}")
    clock.watch(Client, "remember", "state kept")
    clock.watch(federation.checkpoints, "save", "checkpoint")

    def count(module: nn.Module, arguments: Any, output: Any) -> None:
        del arguments
        seen["trained" if module.training else "frozen"] += len(output.logits)

    federation.workspace.model.register_forward_hook(count)
    rounds = federation.rounds()
    next(rounds)
    clock.seconds.clear()
    clock.calls.clear()
    seen.update(trained=0, frozen=0)
    began = time.process_time()
    for _ in rounds:
        pass
    whole, spent = time.process_time() - began, sum(clock.seconds.values())
    return {
        "seconds_per_round": whole / 2,
        "share": spent / whole,
        "clients": clock.calls["data"],
        "examples": clock.calls["data"] * EACH,
        "trained_on": seen["trained"],
        "run_through_the_frozen_model": seen["frozen"],
        **{f"seconds_{part.replace(' ', '_')}": seconds for part, seconds in clock.seconds.items()},
    }


def flat(root: Path) -> dict[str, float]:
    """100 rounds with private normalisation."""
    federation = Federation(root, method="fedbn", model="tiny", known=0, users=USERS, rounds=ROUNDS)
    memory = np.zeros(ROUNDS)  # nothing of the benchmark's own may grow
    began = time.process_time()
    for record in federation.rounds():
        memory[record.round - 1] = resident()
    seconds = time.process_time() - began
    took_part = {client.id for round in range(ROUNDS) for client in federation.simulation.sample(round)[1]}
    x, y = np.arange(51, ROUNDS + 1), memory[50:]
    slope, level = np.polyfit(x, y, 1)
    error = np.sqrt(((y - slope * x - level) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    stored = federation.checkpoints.store.clients()
    assert set(stored) == took_part, "states on disk must be those of the clients that took part"
    return {
        "mib_per_round": slope, "standard_error": error,
        "mib_after_10": memory[9], "mib_after_50": memory[49], "mib_after_100": memory[-1],
        "seconds_per_round": seconds / ROUNDS, "took_part": len(took_part), "with_a_state": len(stored),
    }  # fmt: skip


def resumed(root: Path) -> dict[str, float]:
    """Until the run can continue after 100 rounds."""
    federation = Federation(root, method="fedbn", model="tiny", known=0, users=USERS, rounds=ROUNDS + 1)
    seconds = time.process_time()
    assert federation.begun == ROUNDS
    assert len(list(federation.rounds())) == 1
    return {"processor_seconds": seconds, "resident_mib": resident()}


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "imports": imports, "start": start, "published": published, "flat": flat, "resumed": resumed
}  # fmt: skip


def measured(part: str, root: Path, *arguments: str) -> dict[str, Any]:
    """One part in a new process."""
    command = [sys.executable, __file__, part, str(root), *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=sys.path[0]).stdout)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = measured("imports", Path(folder))
        finish("label_imports", 5.0, ratio=found["processor_seconds"], unit="seconds", **found)
        for users in (1000, USERS):
            found = measured("start", Path(folder), str(users))
            finish(f"label_start_{users}", 5.0, ratio=found["processor_seconds"], unit="seconds", **found)
    # FedBN has no global model, so that personal models must be kept.
    for name, method, keep in (
        ("fedlgt", "fedlgt", "false"),
        ("fedlgt_kept", "fedlgt", "true"),
        ("fedbn", "fedbn", "true"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            found = measured("published", Path(folder), method, keep)
            finish(f"label_round_{name}", 0.02, ratio=found["share"], **found)
    with tempfile.TemporaryDirectory() as folder:
        found = measured("flat", Path(folder))
        finish("label_flat", 2.0, ratio=abs(found["mib_per_round"]) / max(found["standard_error"], 1e-9), **found)
        found = measured("resumed", Path(folder))
        finish("label_resumed", 5.0, ratio=found["processor_seconds"], unit="seconds", **found)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]), default=float))
    else:
        main()
