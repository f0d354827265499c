"""Runner of a recipe whose clients are sites: what a run across machines does in another way than ``confed run``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
from confed.results.folder import RunFolder, read_jsonl
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
    """

    whole = True
    absent: Sequence[str] = ()
    examples: Mapping[str, Mapping[str, int]] = {}
    left_out: Mapping[str, Mapping[str, int]] = {}

    def __init__(
        self, recipe: Recipe, setup: Setup, run_data: RunData, folder: RunFolder, progress: Progress, remote: Remote
    ) -> None:
        super().__init__(recipe, setup, run_data, folder, progress)
        self.remote = remote
        self.bounded: dict[str, str] = {}
        self.course = LossCourse()
        self.joins = frozenset(self.always)

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
        counts: dict[tuple[str, str], dict[str, Tensor]] = {}

        def counted(view: str, place: str, tensors: Mapping[str, Tensor]) -> None:
            counts[view, place] = dict(tensors)

        views = simulation.evaluate(servers, self.setup.rounds + 2, split="test", most=None, counted=counted)
        for view, places in views.items():
            for place, tallies in places.items():
                values = summarise(tallies)
                task = self.setup.task_of(place)
                if isinstance(task, Counting) and (view, place) in counts:
                    values |= task.values(counts[view, place])
                if task.metric in values:
                    found.results[view, place, place] = (values, {})
        missing = [info.id for info in simulation.clients() if not any(key[2] == info.id for key in found.results)]
        for name in [name for name in missing if name in simulation.unanswered]:
            found.notes.append(f"{name} was not evaluated: {simulation.unanswered[name][:300]}")
            missing.remove(name)
        if missing:
            found.notes.append(f"not evaluated, for they were away or told nothing of the metric: {listed(missing)}")
        return found

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        self.remote.begin(max(self.checkpoints.rounds(), default=0), self.checkpoints.rounds() or (0,))
        servers, start = super()._start(simulation, workspace)
        # A damaged checkpoint may have been left aside for an older one.
        self.remote.begin(start, self.checkpoints.rounds() or (0,))
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
        summary["federation"] = {name: asdict(status) for name, status in self.remote.sites.status.items()}
        self.folder.write_json(self.folder.summary, summary)
        self._report(self.setup.rounds, "done", "done")
        return summary
