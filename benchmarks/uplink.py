"""What fewer bytes cost: bytes and accuracy with 8 and 4 bits and the largest tenth, beside whole updates.

FedAvg on three built-in benchmarks, shortened, over five seeds: questions about pictures of four places (a small ViLT
whose upper layers learn), clients with pictures, texts and sounds (a small Transformer), and tags of texts (C-Tran).
Per way the bytes that all clients sent, over those of whole updates, and the difference of the headline in points with
its 95 % interval (paired t over seeds). The last way compresses both directions, and its bytes are of both. The
headline is of the global model on the clients' test examples, mean over clients: accuracy, and F1 per example of tags.

    python benchmarks/uplink.py [--seeds 5] [--only NAME]
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from confed.engines.local import Simulation, simulate
from confed.engines.perform import Setup
from confed.federation.compression import Compression
from confed.federation.state import MemoryStore
from confed.metrics.statistics import paired_t
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare

SHORT = ("study.methods=[]", "algorithm.name=fedavg", "run.workers=1", "run.keep_personal=false")
BENCHMARKS: Mapping[str, tuple[str, Sequence[str]]] = {
    "questions": (
        "fedvqa_scenes",
        ("run.rounds=4", "local.epochs=1", "data.train=150", "data.validation=8", "data.test=150"),
    ),
    "modalities": ("modalities", ("run.rounds=6", "data.train=100", "data.validation=8", "data.test=100")),
    "tags": (
        "fedlgt_texts",
        ("run.rounds=5", "model.learn_labels=true", "data.clients=6", "data.train=60", "data.validation=10"),
    ),
}
"""Name -> recipe and settings."""

WHOLE = (Compression(), Compression())
WAYS: Mapping[str, tuple[Compression, Compression]] = {
    "32 bits": WHOLE,
    "8 bits": (Compression(8), Compression()),
    "4 bits": (Compression(4), Compression()),
    "largest 10 %": (Compression(top=0.1), Compression()),
    "8 bits up and down": (Compression(8), Compression(8)),
}
"""Way -> how updates travel, and how models do."""


def cell(setup: Setup, headline: str) -> tuple[float, int, int]:
    """Headline in points, and bytes up and down, of one run."""
    up, down = 0, 0
    with Simulation(setup, MemoryStore()) as simulation:
        servers = simulation.start(simulation.executor.workspace)  # pyright: ignore
        for record in simulate(simulation, servers):
            servers = record.servers
            up, down = up + sum(record.bytes_up.values()), down + sum(record.bytes_down.values())
        tallies = simulation.evaluate(servers, setup.rounds, split="test")["global"]
    shares = [total / weight for total, weight in (tally[headline] for tally in tallies.values())]
    return 100 * sum(shares) / len(shares), up, down


def row(way: str, runs: Sequence[tuple[float, int, int]], whole: Sequence[tuple[float, int, int]]) -> str:
    """Cells of one way, as a table of Markdown has them."""
    both = not WAYS[way][1].plain
    sent, of = (sum(up + (down if both else 0) for _, up, down in some) for some in (runs, whole))
    mean = sum(headline for headline, _, _ in runs) / len(runs)
    line = f"{way} | {sent / len(runs) / 1e3:,.0f} kB | {sent / of:.3f} | {mean:.1f} |"
    if runs is whole or len(runs) < 2:
        return f"{line} |"
    test = paired_t([headline for headline, _, _ in runs], [headline for headline, _, _ in whole])
    return f"{line} {test.difference:+.2f} [{test.low:+.2f}, {test.high:+.2f}] |"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(BENCHMARKS), default=None)
    given = parser.parse_args()
    print("| benchmark | way | bytes a run | share | headline | difference, 95 % interval |")
    print("|---|---|---:|---:|---:|---:|")
    for name in BENCHMARKS if given.only is None else (given.only,):
        recipe, settings = BENCHMARKS[name]
        cells: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
        began = time.process_time()
        for seed in range(given.seeds):
            setup, _ = prepare(load_recipe(recipe, [*SHORT, *settings, f"run.seed={seed}"]))
            for way, (uplink, downlink) in WAYS.items():
                headline = "accuracy" if name != "tags" else "example_f1"
                cells[way].append(cell(replace(setup, uplink=uplink, downlink=downlink), headline))
        for way, runs in cells.items():
            print(f"| {name} | {row(way, runs, cells['32 bits'])}", flush=True)
        print(
            f"{name}: {(time.process_time() - began) / given.seeds / len(WAYS):.1f} s of processor time per run",
            flush=True,
        )


if __name__ == "__main__":
    main()
