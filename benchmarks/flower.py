"""What a real federation costs beside its training: time per round and bytes, on this machine's loopback.

A server and four sites in processes of their own, TLS and keys, the mini ViLT with FedAvg. The overhead of a round is
its time minus that of the slowest site's training in it; processes share the machine's cores, so the training itself
takes longer than alone. Bytes of messages are with their heads; the ledgers count bodies, and the server's must be the
simulator's.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from confed.deployment.demo import demonstrate
from confed.recipes.recipe import load_recipe
from confed.results.folder import read_jsonl
from confed.runs.build import load_data
from confed.runs.run import run
from measure import finish

SETTINGS = (
    "algorithm.name=fedavg", "study.methods=[]", "study.table=[]", "model.name=vilt_mini", "model.pretrained=false",
    "data.validation=20", "data.test=20", "local.epochs=1", "run.evaluate_every=0", "run.workers=1", "run.gallery=0",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", type=int, default=100, help="training questions per site")
    arguments, _ = parser.parse_known_args()
    settings = [*SETTINGS, f"run.rounds={arguments.rounds}", f"data.train={arguments.train}"]
    recipe = load_recipe("fedvqa_scenes", settings)
    # The simulator takes the same clients: with more the mean is another one, and losses in messages have other digits.
    without = list(load_data(recipe).clients)[arguments.sites :]
    recipe = recipe.with_run(without=tuple(without))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        demonstrate(recipe, root / "federation", arguments.sites, print)
        state = root / "federation" / "server" / "state"
        summary = json.loads((state / "summary.json").read_text())
        simulated = run(recipe, root / "simulated")
        audit = read_jsonl(state / "audit.jsonl")
        timings = {line["round"] - 1: line["seconds"] for line in read_jsonl(state / "timings.jsonl")}
        slowest = dict.fromkeys(timings, 0.0)
        for site in (root / "federation" / "sites").iterdir():
            for line in read_jsonl(site / "private" / "audit.jsonl"):
                part = line["id"].split("/")[1] if line["way"] == "out" else ""
                number = int(part) if part.isdigit() else -1  # hello and goodbye are no rounds
                if number in slowest:  # later ones are the final evaluation
                    slowest[number] = max(slowest[number], line["seconds"])
    ways, names = ("bytes_up", "bytes_down"), list(summary["personal"])
    places = [(way, str(number + 1), name) for way in ways for number in timings for name in names]
    ledger, expected = (sum(side[way][number][name] for way, number, name in places) for side in (summary, simulated))
    assert ledger == expected, f"the server counted {ledger} bytes, the simulator {expected}"
    finish(
        "flower",
        float("inf"),
        sites=arguments.sites,
        rounds=arguments.rounds,
        seconds_per_round=statistics.median(timings.values()),
        slowest_site_seconds=statistics.median(slowest.values()),
        overhead_seconds=statistics.median(timings[n] - slowest[n] for n in timings),
        overhead_lowest=min(timings[n] - slowest[n] for n in timings),
        bytes_in_messages=sum(line["bytes"] for line in audit if line["action"] == "fit"),
        bytes_in_ledger=ledger,
        server_peak_memory_bytes=summary["peak_memory_bytes"],
    )


if __name__ == "__main__":
    main()
