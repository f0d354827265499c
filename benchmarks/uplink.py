"""What fewer bytes cost: bytes and accuracy with 8 and 4 bits and the largest tenth, beside whole updates.

FedAvg on three built-in benchmarks over five seeds: questions about pictures (a small ViLT whose upper layers learn),
classes of pictures (LoRA in both towers of a small CLIP) and answers that a small vision-language model writes (LoRA).
Per way the bytes that all clients sent, over those of whole updates, and the difference of the headline in points with
its 95 % interval (paired t over seeds). The last way compresses both directions, and its bytes are of both. The metric
is accuracy on the clients' test examples: of the global model, and of the models of the clients' own where they write.

    python benchmarks/uplink.py [--seeds 5] [--folder DIR] [--only NAME]
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import confed
from confed.metrics.statistics import paired_t

QUICK = (
    ("run.workers", 1),
    ("run.gallery", 0),
    ("run.controls", "none"),
    ("run.modality_matrix", False),
)
BENCHMARKS: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "questions": ("fedvqa_scenes", "fedavg", "global_seen_mean", {"run.rounds": 4, "run.evaluate_every": 0}),
    "classes": ("prompts_scenes", "lora", "global_seen_mean", {"run.rounds": 4, "data.shots": 64}),
    "chat": ("chat_scenes", "fedavg", "personal_mean", {"run.rounds": 4}),
}
"""Name -> recipe, row of its study, key of the headline in the summary, and settings."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "32 bits": {},
    "8 bits": {"run.uplink.bits": 8},
    "4 bits": {"run.uplink.bits": 4},
    "largest 10 %": {"run.uplink.top": 0.1},
    "4 bits of the largest 10 %": {"run.uplink.bits": 4, "run.uplink.top": 0.1},
    "8 bits up and down": {"run.uplink.bits": 8, "run.downlink.bits": 8},
}


def cell(benchmark: str, way: str, seed: int, root: Path) -> dict[str, float]:
    """Headline in points and bytes of one run."""
    recipe, row, headline, settings = BENCHMARKS[benchmark]
    folder = root / benchmark / way.replace(" ", "-").replace("%", "percent") / f"seed-{seed}"
    overrides = {**dict(QUICK), **settings, **WAYS[way], "run.seed": seed}
    summary = confed.run(recipe, overrides, method=row, folder=folder, progress=False).summary
    sent = {key: sum(sum(line.values()) for line in summary[key].values()) for key in ("bytes_up", "bytes_down")}
    return {"headline": 100 * summary[headline], **sent, "seconds": summary["cpu_seconds"]}


def table(benchmark: str, cells: Mapping[str, list[dict[str, float]]]) -> str:
    """Rows of one benchmark, as a table of Markdown has them."""
    whole, lines = cells["32 bits"], list[str]()
    for way, runs in cells.items():
        keys = ("bytes_up", "bytes_down") if "down" in way else ("bytes_up",)
        sent, of = (sum(run[key] for run in some for key in keys) for some in (runs, whole))
        headline = sum(run["headline"] for run in runs) / len(runs)
        line = f"| {benchmark} | {way} | {sent / len(runs) / 1e3:,.0f} kB | {sent / of:.3f} | {headline:.1f} |"
        if way != "32 bits" and len(runs) > 1:
            test = paired_t([run["headline"] for run in runs], [run["headline"] for run in whole])
            line += f" {test.difference:+.2f} [{test.low:+.2f}, {test.high:+.2f}] |"
        else:
            line += " |"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="of the runs; one that holds some goes on")
    parser.add_argument("--only", choices=list(BENCHMARKS), default=None)
    given = parser.parse_args()
    root = given.folder or Path(tempfile.mkdtemp(prefix="uplink-"))
    result: dict[str, Any] = {}
    print("| benchmark | way | bytes a run | share | headline | difference, 95 % interval |")
    print("|---|---|---:|---:|---:|---:|")
    for benchmark in BENCHMARKS if given.only is None else (given.only,):
        cells: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in range(given.seeds):  # a seed's data are read once for all ways
            for way, runs in cells.items():
                runs.append(cell(benchmark, way, seed, root))
        result[benchmark] = cells
        print(table(benchmark, cells), flush=True)
    (root / "uplink.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
