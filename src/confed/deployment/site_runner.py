"""Runner of a recipe whose clients are sites: what a run across machines does in another way than ``confed run``."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from confed.deployment.final_results import FinalResults, model_digest
from confed.deployment.loss_watch import LossCourse
from confed.engines.local import InProcess, RoundRecord, Simulation
from confed.engines.perform import Setup, Workspace
from confed.engines.population import listed
from confed.engines.remote.arrivals import SiteArrivals
from confed.engines.remote.server import Remote
from confed.engines.usage import cpu_seconds
from confed.engines.workers import Workers
from confed.federation.checkpoint import Checkpoint
from confed.federation.frozen_features import FeatureCounts
from confed.federation.protocols import Counting
from confed.federation.state import ServerState, Store
from confed.recipes.recipe import Recipe
from confed.results.folder import FINAL, RunFolder, read_jsonl
from confed.results.headline import membership
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination
from confed.runs.run import Runner
from confed.runs.summary import summarise_run
from confed.system.events import Caution, Progress
from confed.tasks.vqa import summarise

if TYPE_CHECKING:
    from confed.engines.ray.executor import RayActors

__all__ = ["SiteRunner"]


class SiteRunner(Runner):
    """One run whose clients are sites.

    Args:
        recipe: the recipe.
        setup: made from the recipe, with the sites as clients.
        run_data: the data of the recipe that are here.
        folder: the run folder.
        progress: called with every progress event.
        remote: the sites.

    Attributes:
        whole: whether models are evaluated.
        absent: unseen places of whose examples the server holds none.
        examples: client -> the numbers of examples that it says it has, also where it counts as one with fewer.
        left_out: client -> role -> the numbers of examples that its site leaves out, as pictures cannot be read there.
        expected: the sites of the federation, also those that never came; they are what a mean is over.
        newcomers: late sites, which are handed the final model and evaluated, and no others; None for a run.
    """

    whole = True
    absent: Sequence[str] = ()
    examples: Mapping[str, Mapping[str, int]] = {}
    left_out: Mapping[str, Mapping[str, int]] = {}
    expected: Sequence[str] = ()
    newcomers: Sequence[str] | None = None

    def __init__(
        self, recipe: Recipe, setup: Setup, run_data: RunData, folder: RunFolder, progress: Progress, remote: Remote
    ) -> None:
        super().__init__(recipe, setup, run_data, folder, progress)
        self.remote = remote
        self.bounded: dict[str, str] = {}
        self.course = LossCourse()
        self.joins = frozenset(self.always)
        self.membership: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """See :class:`confed.runs.run.Runner`.

        Raises:
            RuntimeError: a round failed; names the checkpoint to go back to where the model may be what broke.
        """
        try:
            return super().run()
        except RuntimeError as error:
            # The newest checkpoint is what the round that failed went out from: it may be what broke it.
            kept = self.checkpoints.rounds()[:-1]
            if not kept or type(error) is not RuntimeError:  # a transport's own must stay what it is
                raise
            raise RuntimeError(f"{error}; should the model be what broke, {self._way_back(kept[-1])}") from error

    def _way_back(self, round: int) -> str:
        return (
            f"the checkpoint of round {round} is kept: to go on from it, remove the later ones in "
            f"{self.checkpoints.root} and start the server again, without the site that sent what broke the model"
        )

    def _after(self, simulation: Simulation, record: RoundRecord) -> None:
        super()._after(simulation, record)
        self.remote.remember()
        if said := dict(self.remote.shortened):
            self.remote.shortened.clear()
            self.bounded.update(said)
            self.folder.append(self.folder.metrics, {"event": "bound", "round": record.round, "clients": said})
            for name, what in said.items():
                self.progress(Caution(f"client {name!r}: {what}"))
        jump, sound = self.course.note(record.losses, record.round, self.checkpoints.rounds()), self.course.sound
        self.always.intersection_update(self.joins)
        self.always.update(() if sound is None else (sound,))
        if jump is not None:
            self.progress(Caution(jump + ("" if sound is None else f"; {self._way_back(sound)}")))

    def executor(self, workspace: Workspace) -> InProcess | Workers | Remote:
        """The sites."""
        del workspace
        return self.remote

    def simulation(self, store: Store, executor: "InProcess | Workers | Remote | RayActors") -> Simulation:
        """A federation in which sites may be away."""
        simulation = super().simulation(store, executor)
        simulation.lenient = True
        simulation.attempt, simulation.check = self.remote.attempt, self.remote.check
        if (drawn := simulation.arrivals) is not None:
            simulation.arrivals = SiteArrivals(self.remote, self.setup, drawn.settings, drawn.concurrency)
        return simulation

    def examine(self, simulation: Simulation, servers: Mapping[str, ServerState]) -> Examination:
        """Sums over every site's test examples; single examples, and personal models, stay at the sites."""
        found = Examination(
            notes=["across machines: personal models, and answers to single questions, are at the sites"]
        )
        found.notes += [f"bounded: {name}: {said}" for name, said in sorted(self.bounded.items())]
        if self.absent:
            found.notes.append(f"not tried on unseen places, as their examples are not here: {listed(self.absent)}")
        if not self.whole:
            found.notes.append("not evaluated: a part of the model is the server's, and was not sent to the sites")
            return found
        final = FinalResults(self.folder.root / FINAL, self.setup.rounds, model_digest(servers))
        present = [info.id for info in simulation.present(self.setup.rounds + 2)]
        # What a site has said of this model stays; it is not asked twice, as its policy may count what it answers.
        asked = [n for n in present if not final.of(n) and (self.newcomers is None or n in self.newcomers)]
        self.remote.answered = sum(bool(final.of(name)) for name in present)
        measured = self._measured(simulation, servers, asked)
        silent = dict.fromkeys(asked, "it told nothing of the metric") | simulation.unanswered
        final.add({name: measured[name] for name in asked if name in measured}, {n: silent[n][:300] for n in asked})
        places = {name: final.of(name) for name in present} | {n: measured.get(n, {}) for n in self.setup.observers}
        for place, views in places.items():
            for view, values in views.items():
                found.results[view, place, place] = (dict(values), {})
        self._note_membership(found, final)
        return found

    def _measured(
        self, simulation: Simulation, servers: Mapping[str, ServerState], asked: Sequence[str]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Site, or unseen place whose examples are here -> view -> metrics."""
        counts: dict[tuple[str, str], dict[str, Tensor]] = {}

        def counted(view: str, place: str, tensors: Mapping[str, Tensor]) -> None:
            counts[view, place] = dict(tensors)

        measured: dict[str, dict[str, dict[str, float]]] = {}
        evaluated = simulation.evaluate(
            servers, self.setup.rounds + 2, split="test", most=None, among=asked, counted=counted
        )
        for view, places in evaluated.items():
            for place, tallies in places.items():
                values, task = summarise(tallies), self.setup.task_of(place)
                if isinstance(task, Counting) and (view, place) in counts:
                    values |= task.values(counts[view, place])
                if task.metric in values:
                    measured.setdefault(place, {})[view] = values
        return measured

    def _note_membership(self, found: Examination, final: FinalResults) -> None:
        """Over which sites the means are, with the round and the model of each, and why others are in none."""
        took_part = Counter(
            name
            for line in read_jsonl(self.folder.metrics)
            if line["event"] == "round"
            for name in line["bytes_up"].keys() - line["errors"].keys()
        )
        sites = [name for name in self.expected if self.participation.holds(name, self.setup.rounds)]
        missing = {n: final.reason(n) or "it was away, and has not come since" for n in sites if not final.of(n)}
        shown = {"round": final.round, "model": final.model}
        evaluated = {n: {**shown, "rounds_taken_part": took_part[n]} for n in sites if n not in missing}
        self.membership = {"evaluated": evaluated, "missing": missing}
        found.notes += [f"{name} was not evaluated: {reason}" for name, reason in missing.items()]
        if others := final.of_other_models:
            found.notes.append(f"{FINAL} has results of another final model, which do not count: {', '.join(others)}")
        if over := membership({"membership": self.membership}):
            those = f" ({', '.join(evaluated)})" if evaluated else ""
            found.notes.append(f"every mean over clients is over {over}{those}")
            self.progress(Caution(f"{found.notes[-1]}; `confed server --deliver` hands the final model to late ones"))

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        self.remote.begin(max(self.checkpoints.rounds(), default=0), self.checkpoints.rounds() or (0,))
        servers, start = super()._start(simulation, workspace)
        # A damaged checkpoint may have been left aside for an older one.
        self.remote.begin(start, self.checkpoints.rounds() or (0,))
        if self.newcomers is not None and start < self.setup.rounds:
            raise ValueError(
                f"{self.folder.root} must hold a finished run for --deliver, its newest sound checkpoint is of round "
                f"{start} of {self.setup.rounds}: start the server without --deliver"
            )
        self._recall()
        return servers, start

    def _recall(self) -> None:
        """Losses and bounds of the rounds before a restart, which the next ones are compared with and go beside."""
        for line in read_jsonl(self.folder.metrics):
            if line["event"] in ("round", "finish"):
                self.course.note(line["loss"], line["round"], self.checkpoints.rounds())
            elif line["event"] == "bound":
                self.bounded.update(line["clients"])
        if self.course.sound is not None:
            self.always.add(self.course.sound)

    def _evaluate(self, simulation: Simulation, servers: Mapping[str, ServerState], round: int) -> None:
        if self.whole:
            super()._evaluate(simulation, servers, round)

    def _checkpoint_if_due(self, checkpoint: Checkpoint) -> None:
        super()._checkpoint_if_due(checkpoint)
        self.remote.kept = self.checkpoints.rounds() or (0,)

    def _finish(
        self, examined: Examination, workspace: Workspace, peak: int, features: FeatureCounts | None
    ) -> dict[str, Any]:
        summary = summarise_run(
            self.recipe, self.setup, self.run_data, self.folder, workspace, examined,
            cpu=cpu_seconds() - self.cpu, peak=peak, resumed=self.resumed,
        )  # fmt: skip
        # Answers to single questions are not here; what reads this file finds none.
        self.folder.write_tensors(self.folder.predictions, {})
        # What the server itself could not read of data that lie here, too, no site has left out.
        own = {name: roles for name, roles in summary.pop("left_out", {}).items() if name in self.setup.observers}
        if out := own | {name: dict(roles) for name, roles in self.left_out.items()}:
            summary["left_out"] = out
        if self.run_data.dataset.elsewhere is not None:
            summary["examples"] = {name: dict(numbers) for name, numbers in self.examples.items()}
        if self.membership:
            summary["membership"] = self.membership
        summary["federation"] = self._sites()
        self.folder.write_json(self.folder.summary, summary)
        over = membership(summary)
        self._report(self.setup.rounds, "done", f"done, means over {over}" if over else "done")
        return summary

    def _sites(self) -> dict[str, Any]:
        """States of sites, with the bytes that the summary before a restart has counted."""
        path = self.folder.summary
        sites = json.loads(path.read_text(encoding="utf-8")).get("federation", {}) if path.is_file() else {}
        for name, status in self.remote.sites.status.items():
            before = sites.get(name, {"up": 0, "down": 0})
            sites[name] = asdict(status) | {way: before[way] + getattr(status, way) for way in ("up", "down")}
        return sites
