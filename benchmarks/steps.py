"""What a step of split learning costs beside its computation: BiCSL between processes of this machine.

A server and the sites in processes of their own, TLS and keys, over Flower's or NVIDIA FLARE's network
(``--engine``). A step is one call and reply of a session with a site. The overhead is the time of a step in the
federation minus that of one in the simulator, where the sites take turns in one process. What a call takes at the site
includes reading and writing its state: a site that is killed goes on from there.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

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


def main() -> None:
    """Runs both, and prints seconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("flower", "flare"), default="flower")
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--train", type=int, default=128, help="training questions per site, in batches of 8")
    arguments, _ = parser.parse_known_args()
    size = [f"data.clients={arguments.sites}", f"run.rounds={arguments.rounds}", f"data.train={arguments.train}"]
    recipe = load_recipe("bicsl_scenes", [*SETTINGS, *size])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        demonstrate(recipe, root / "federation", arguments.sites, print, arguments.engine)
        run(recipe, root / "simulated")
        server = root / "federation" / "server" / "state"
        away, here = (
            [line["seconds"] for line in read_jsonl(place / "timings.jsonl")] for place in (server, root / "simulated")
        )
        site = next((root / "federation" / "sites").iterdir()) / "private" / "audit.jsonl"
        answered = [1000 * line["seconds"] for line in read_jsonl(site) if line["way"] == "out"]
        traffic = next(line for line in read_jsonl(server / "metrics.jsonl") if line["event"] == "round")["traffic"]
    steps = sum(own["calls"] for own in traffic.values()) / arguments.sites
    milliseconds = [1000 * seconds / steps for seconds in away]
    simulated = 1000 * statistics.median(here) / steps
    finish(
        f"steps over {arguments.engine}", 25.0, sites=arguments.sites, calls_per_round=steps,
        milliseconds_per_step=statistics.median(milliseconds), least=min(milliseconds),
        milliseconds_in_the_simulator=simulated, milliseconds_of_a_call_at_the_site=statistics.median(answered),
        overhead_milliseconds=statistics.median(milliseconds) - simulated,
    )  # fmt: skip


if __name__ == "__main__":
    main()
