"""What a step of split learning costs beside its computation: BiCSL between processes of this machine.

A server and the sites in processes of their own, TLS and keys, over Flower's or NVIDIA FLARE's network
(``--engine``). A step is one call and reply of a session with a site. The overhead is the time of a step in the
federation minus that of one in the simulator, where the sites take turns in one process. What a call takes at the site
includes writing down what the server sent, and the reply: a site that is killed goes on from there.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

from confed.deployment.demo import demonstrate
from confed.recipes.recipe import load_recipe
from confed.results.folder import read_jsonl
from confed.runs.run import run
from measure import finish

SETTINGS = (
    "study.methods=[]", "study.models=[]", "data.validation=4", "data.test=8", "model.name=butd_mini", "task.width=8",
    "task.hidden=8", "task.embedding=8", "local.batch_size=8", "local.epochs=1", "run.gallery=0", "run.workers=1",
    "run.evaluate_every=0",
)  # fmt: skip


def steps(engine: Literal["flower", "flare"], sites: int = 1, rounds: int = 4, train: int = 128) -> dict[str, Any]:
    """Milliseconds per step in the federation and in the simulator, and of a call at a site."""
    size = [f"data.clients={sites}", f"run.rounds={rounds}", f"data.train={train}"]
    recipe = load_recipe("bicsl_scenes", [*SETTINGS, *size])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        demonstrate(recipe, root / "federation", sites, lambda event: None, engine)
        run(recipe, root / "simulated")
        server = root / "federation" / "server" / "state"
        away, here = (
            [line["seconds"] for line in read_jsonl(place / "timings.jsonl")] for place in (server, root / "simulated")
        )
        site = next((root / "federation" / "sites").iterdir()) / "private" / "audit.jsonl"
        answered = [1000 * line["seconds"] for line in read_jsonl(site) if line["way"] == "out"]
        traffic = next(line for line in read_jsonl(server / "metrics.jsonl") if line["event"] == "round")["traffic"]
    calls = sum(own["calls"] for own in traffic.values()) / sites
    milliseconds = [1000 * seconds / calls for seconds in away]
    simulated = 1000 * statistics.median(here) / calls
    return {
        "calls_per_round": calls, "milliseconds_per_step": statistics.median(milliseconds), "least": min(milliseconds),
        "milliseconds_in_the_simulator": simulated, "milliseconds_of_a_call_at_the_site": statistics.median(answered),
        "overhead_milliseconds": statistics.median(milliseconds) - simulated,
    }  # fmt: skip


def main() -> None:
    """Runs both, and prints milliseconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("flower", "flare"), default="flower")
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--train", type=int, default=128, help="training questions per site, in batches of 8")
    given, _ = parser.parse_known_args()
    found = steps(given.engine, given.sites, given.rounds, given.train)
    finish(f"steps over {given.engine}", 25.0, sites=given.sites, **found)


if __name__ == "__main__":
    main()
