"""Server of a federation across machines: from a recipe and a transport to a run folder.

The rounds, the records and the folder are those of ``confed run``. What is different: clients are who introduced
themselves, their examples and their personal models are elsewhere, and one that is away is left out and not the end.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from confed.engines.local import InProcess, RoundRecord, Simulation
from confed.engines.participation import listed
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.arrivals import SiteArrivals
from confed.engines.remote.protocol import Schema, Settings, digest, schema_of, seal, settings_of
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Connection, Registered, SiteRegistry, Timeouts, Transport
from confed.engines.remote.update_bounds import Bounds, bounded_members
from confed.engines.usage import cpu_seconds
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, write_atomically
from confed.federation.client import SignatureCheck
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_counts, read_tallies
from confed.federation.frozen_features import FeatureCounts
from confed.federation.messages import Message
from confed.federation.params import Scope, layout
from confed.federation.protocols import Counting
from confed.federation.state import ServerState, Store
from confed.federation.update_privacy import UpdatePrivacy
from confed.metrics.scores import summarise
from confed.models.tokenizer import known_words
from confed.recipes.overrides import NAMED
from confed.recipes.recipe import Recipe
from confed.recipes.schema import keywords
from confed.results.folder import FINAL, MEMBERS, RunFolder, read_jsonl
from confed.results.stored import TRAINING, read_records
from confed.results.summary import Summary
from confed.runs.build import prepare
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination
from confed.runs.run import Runner
from confed.runs.summary import summarise_run
from confed.system.events import Caution, Progress, RunProgress, ignore
from confed.system.folder_lock import alone

if TYPE_CHECKING:
    from confed.engines.ray.executor import RayActors

# Final results of the sites: kept by model, so that late sites are added and nothing is replaced --------------

Values = Mapping[str, float]  # metric -> value, of one view at one site


def model_digest(servers: Mapping[str, ServerState]) -> str:
    parts = [[name, digest(b"", seal(Message(server.params)))] for name, server in sorted(servers.items())]
    return digest(json.dumps(parts).encode(), b"")


class FinalResults:
    """Results, or why there are none, of one final model at the sites: a part of ``final.json`` in the run folder."""

    def __init__(self, path: Path, round: int, model: str) -> None:
        self._path, self.round, self.model = path, round, model
        self._models: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self._sites: dict[str, dict[str, Any]] = self._models.setdefault(model, {"round": round, "sites": {}})["sites"]

    @property
    def of_other_models(self) -> list[str]:
        """Sites whose only results are of another model than this one."""
        others: set[str] = set()
        for model in self._models.values():
            others |= {name for name, site in model["sites"].items() if site["results"]}
        return sorted(name for name in others if not self.of(name))

    def of(self, site: str) -> Mapping[str, Values]:
        """View -> metrics; empty where the site was not evaluated."""
        return self._sites.get(site, {}).get("results", {})

    def reason(self, site: str) -> str:
        """Why a site was asked and has no result; empty where it was not asked."""
        return str(self._sites.get(site, {}).get("reason", ""))

    def add(self, results: Mapping[str, Mapping[str, Values]], reasons: Mapping[str, str]) -> None:
        """New results, and the reasons of sites without any, on disk when this returns."""
        for site in [*results, *reasons]:
            if not self.of(site):
                views = {view: dict(values) for view, values in results.get(site, {}).items()}
                self._sites[site] = {"results": views, "reason": "" if views else reasons.get(site, "")}
        write_atomically(self._path, json.dumps(self._models, indent=1).encode(), sync=True)


# Divergence check: jumps and non-finite values of a run's mean training loss ----------------------------------

FACTOR = 10.0  # how many times the largest of the last losses a loss must be to count as a jump
LAST = 5  # rounds that a loss is compared with


class LossCourse:
    """Mean training losses of a run's rounds."""

    def __init__(self) -> None:
        self._last: list[float] = []
        self.broken = False  # the last loss known was a jump
        # the round to go back to then; None where no checkpoint is left from before the jump
        self.sound: int | None = None

    def note(self, losses: Mapping[str, float], round: int, checkpoints: Sequence[int]) -> str | None:
        """Record of a round's losses, and at the first of several jumps of the round to go back to."""
        before, sentence = self.broken, self.jump(losses)
        if not self.broken:
            self.sound = None
        elif not before:
            # The last model that was trained from without a jump is the one before the round before.
            self.sound = next(
                (checkpoint_round for checkpoint_round in reversed(checkpoints) if checkpoint_round <= round - 2), None
            )
        return sentence

    def jump(self, losses: Mapping[str, float]) -> str | None:
        """Record of a round's losses; a text where they are not finite or jump."""
        if not losses:
            return None
        mean = sum(losses.values()) / len(losses)
        before = max(self._last, default=math.inf)
        # Losses may be next to nothing: what rises from there by less than 1 is no break.
        if math.isfinite(mean) and mean <= max(FACTOR * before, before + 1):
            self._last, self.broken = [*self._last, mean][-LAST:], False
            return None
        self.broken = True
        return f"the mean loss rose from {before:.3g} to {mean:.3g}" if self._last else f"the mean loss is {mean:.3g}"


# Runner of a recipe whose clients are sites -------------------------------------------------------------------


class SiteRunner(Runner):
    """One run whose clients are sites."""

    whole = True  # whether models are evaluated
    absent: Sequence[str] = ()  # unseen places of whose examples the server holds none
    # client -> the numbers of examples that it says it has, also where it counts as one with fewer
    examples: Mapping[str, Mapping[str, int]] = {}
    # client -> role -> the numbers of examples that its site leaves out, as pictures cannot be read there
    left_out: Mapping[str, Mapping[str, int]] = {}
    # the sites of the federation, also those that never came; they are what a mean is over
    expected: Sequence[str] = ()
    # late sites, which are handed the final model and evaluated, and no others; None for a run
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
        try:
            return super().run()
        except RuntimeError as error:
            # The newest checkpoint is what the round that failed went out from: it may be what broke it.
            earlier = self.checkpoints.rounds()[:-1]
            if not earlier or type(error) is not RuntimeError:  # a transport's own must stay what it is
                raise
            raise RuntimeError(f"{error}; should the model be what broke, {self._way_back(earlier[-1])}") from error

    def _way_back(self, round: int) -> str:
        return (
            f"the checkpoint of round {round} is kept: to go on from it, remove the later ones in "
            f"{self.checkpoints.root} and start the server again, without the site that sent what broke the model"
        )

    def _after(self, simulation: Simulation, record: RoundRecord) -> None:
        super()._after(simulation, record)
        self.remote.remember()
        if shortened := dict(self.remote.shortened):
            self.remote.shortened.clear()
            self.bounded.update(shortened)
            self.folder.append(self.folder.metrics, {"event": "bound", "round": record.round, "clients": shortened})
            for name, what in shortened.items():
                self.progress(Caution(f"client {name!r}: {what}"))
        jump, sound = self.course.note(record.losses, record.round, self.checkpoints.rounds()), self.course.sound
        self.always.intersection_update(self.joins)
        self.always.update(() if sound is None else (sound,))
        if jump is not None:
            self.progress(Caution(jump + ("" if sound is None else f"; {self._way_back(sound)}")))

    def executor(self, workspace: Workspace) -> InProcess | Workers | Remote:
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
        examination = Examination(
            notes=["across machines: personal models, and answers to single questions, are at the sites"]
        )
        examination.notes += [f"bounded: {name}: {sentence}" for name, sentence in sorted(self.bounded.items())]
        if self.absent:
            places = listed(self.absent)
            examination.notes.append(f"not tried on unseen places, as their examples are not here: {places}")
        if not self.whole:
            why = "a part of the model is the server's, and was not sent to the sites"
            examination.notes.append(f"not evaluated: {why}")
            return examination
        final = FinalResults(self.folder.root / FINAL, self.setup.rounds, model_digest(servers))
        present = [info.id for info in simulation.present(self.setup.rounds + 2)]
        # What a site has said of this model stays; it is not asked twice, as its policy may count what it answers.
        to_ask = [n for n in present if not final.of(n) and (self.newcomers is None or n in self.newcomers)]
        self.remote.answered = sum(bool(final.of(name)) for name in present)
        measured = self._measured(simulation, servers, to_ask)
        silent = dict.fromkeys(to_ask, "it told nothing of the metric") | simulation.unanswered
        final.add({name: measured[name] for name in to_ask if name in measured}, {n: silent[n][:300] for n in to_ask})
        places = {name: final.of(name) for name in present} | {n: measured.get(n, {}) for n in self.setup.observers}
        for place, views in places.items():
            for view, values in views.items():
                examination.results[view, place, place] = (dict(values), {})
        self._note_membership(examination, final)
        return examination

    def _measured(
        self, simulation: Simulation, servers: Mapping[str, ServerState], to_ask: Sequence[str]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Site, or unseen place whose examples are here -> view -> metrics."""
        counts: dict[tuple[str, str], dict[str, Tensor]] = {}

        def counted(view: str, place: str, tensors: Mapping[str, Tensor]) -> None:
            counts[view, place] = dict(tensors)

        measured: dict[str, dict[str, dict[str, float]]] = {}
        evaluated = simulation.evaluate(
            servers, self.setup.rounds + 2, split="test", most=None, among=to_ask, counted=counted
        )
        for view, places in evaluated.items():
            for place, tallies in places.items():
                values, task = summarise(tallies), self.setup.task_of(place)
                if isinstance(task, Counting) and (view, place) in counts:
                    values |= task.values(counts[view, place])
                if task.metric in values:
                    measured.setdefault(place, {})[view] = values
        return measured

    def _note_membership(self, examination: Examination, final: FinalResults) -> None:
        """Over which sites the means are, with the round and the model of each, and why others are in none."""
        took_part, records = Counter[str](), read_records(self.folder.root)
        sent = records.by_round(TRAINING, "bytes_up")
        for facts in records.rounds:
            if facts["event"] == "round":
                took_part.update(sent.get(facts["round"], {}).keys() - facts["errors"].keys())
        sites = [name for name in self.expected if self.participation.holds(name, self.setup.rounds)]
        missing = {n: final.reason(n) or "it was away, and has not come since" for n in sites if not final.of(n)}
        shown = {"round": final.round, "model": final.model}
        evaluated = {n: {**shown, "rounds_taken_part": took_part[n]} for n in sites if n not in missing}
        self.membership = {"evaluated": evaluated, "missing": missing}
        examination.notes += [f"{name} was not evaluated: {reason}" for name, reason in missing.items()]
        if others := final.of_other_models:
            examination.notes.append(
                f"{FINAL} has results of another final model, which do not count: {', '.join(others)}"
            )
        if over := Summary({"membership": self.membership}).membership:
            those = f" ({', '.join(evaluated)})" if evaluated else ""
            examination.notes.append(f"every mean over clients is over {over}{those}")
            self.progress(
                Caution(f"{examination.notes[-1]}; `confed server --deliver` hands the final model to late ones")
            )

    def _start(self, simulation: Simulation, workspace: Workspace) -> tuple[Mapping[str, ServerState], int]:
        self.remote.begin(max(self.checkpoints.rounds(), default=0), self.checkpoints.rounds() or (0,))
        servers, start = super()._start(simulation, workspace)
        # a damaged checkpoint may have been left aside for an older one.
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
        self.remote.checkpoints = self.checkpoints.rounds() or (0,)

    def _finish(
        self, examined: Examination, workspace: Workspace, peak: int, features: FeatureCounts | None
    ) -> dict[str, Any]:
        summary = summarise_run(
            self.recipe, self.setup, self.run_data, self.folder, workspace, examined,
            self._write_records(examined, {}), self.ledger,
            cpu=cpu_seconds() - self.cpu, peak=peak, resumed=self.resumed,
        )  # fmt: skip
        # Answers to single questions are not here; what reads this file finds none.
        self.folder.write_tensors(self.folder.predictions, {})
        # What the server itself could not read of data that lie here, too, no site has left out.
        observers_left_out = {
            name: roles for name, roles in summary.pop("left_out", {}).items() if name in self.setup.observers
        }
        if out := observers_left_out | {name: dict(roles) for name, roles in self.left_out.items()}:
            summary["left_out"] = out
        if self.run_data.dataset.elsewhere is not None:
            summary["examples"] = {name: dict(numbers) for name, numbers in self.examples.items()}
        if self.membership:
            summary["membership"] = self.membership
        summary["federation"] = self._sites()
        self.folder.write_json(self.folder.summary, summary)
        over = Summary(summary).membership
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


# Server of a federation across machines -----------------------------------------------------------------------

REPLIES = ".replies"  # what the name of the folder beside the run folder ends with in which replies wait for their turn
PIECES = ".pieces"  # and of the one with the bodies of messages that are on their way
ELSEWHERE = ("pretrained", "vocabulary")
"""Options of models that say where files lie; what is in the files is compared, not where they are."""


def common_ground(recipe: Recipe, run_data: RunData) -> Settings:
    """Settings of a recipe and properties of its data that all parties must share; not where the data lie."""
    dataset, settings = run_data.dataset, dict[str, tuple[Any, bool]]()
    for section in ("model", "task"):
        options = recipe.sections[section]
        declared = keywords(NAMED[section][options["name"]])
        for name in options.keys() - set(ELSEWHERE):
            default = declared[name].make() if name in declared else None
            settings |= settings_of(f"{section}.{name}", options[name], default)
    facts = {
        "answers": list(dataset.answers),
        "types": list(run_data.types),
        "tokens": run_data.tokenizer.vocab_size,
        "words": list(known_words(run_data.tokenizer)),
        "pools": {name: list(pool) for name, pool in dataset.answer_sets.items()},
        "tasks": dict(dataset.tasks),
    }
    for name, fact in facts.items():
        settings |= settings_of(f"data.{name}", fact)
    return settings


@alone
def run_server(
    recipe: Recipe,
    root: Path,
    transport: Transport,
    *,
    names: Collection[str] = (),
    wait: float = 600.0,
    coming: Sequence[str] = (),
    timeouts: Timeouts | None = None,
    whole: bool = False,
    bounds: Bounds | None = None,
    signatures: SignatureCheck | None = None,
    deliver: bool = False,
    pieces: bool = True,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Run of a recipe with sites as clients, begun or continued in a run folder."""
    # Sample questions are shown from clients' data, which a server does not have.
    if recipe.run.measures:
        raise ValueError(
            "run.measures reads test examples one by one, which stay at the sites of a federation across machines: "
            f"leave it out, got {', '.join(recipe.run.measures)}"
        )
    recipe = recipe.with_run(gallery=0, workers=1)
    if isinstance(privacy := recipe.construct("algorithm").update_privacy, UpdatePrivacy) and privacy.at == "server":
        # a round that is done again would show a second model with other noise, which no ledger counts.
        recipe = recipe.with_run(checkpoint_every=1, checkpoint_seconds=0.0)
    setup, run_data = prepare(recipe)
    setup = replace(setup, signatures=signatures)
    absent = list(run_data.unseen) if run_data.dataset.elsewhere is not None else []
    if run_data.dataset.elsewhere is not None:
        setup, run_data = replace(setup, observers={}), replace(run_data, unseen={})
    expected = _expected_sites(setup, names)
    if deliver and not RunFolder(root).summary.is_file():
        raise ValueError(f"{root} must hold a finished run for --deliver: start the server without --deliver")
    leader = _Leader(
        recipe, setup, run_data, _folder(root, recipe), expected, bool(names), wait, coming, whole, absent, progress
    )

    def listed_now() -> list[str]:
        return [name for name in _expected_sites(setup, ()) if not names or name in names]

    late = LateSites(expected, wait) if deliver else None
    what = f"waiting for {len(expected)} sites" if late is None else "waiting for late sites"
    progress(RunProgress(0, setup.rounds, "starting", what))
    while late is None or late.missing(leader.folder):
        remote = Remote(
            setup, transport, timeouts=timeouts, common=common_ground(recipe, run_data), audit=root / "audit.jsonl",
            progress=progress, spool=root.with_name(f"{root.name}{REPLIES}"), judge=EvaluationValidator(setup),
            bounds=Bounds() if bounds is None else bounds, memory=root,
            pieces=root.with_name(f"{root.name}{PIECES}") if pieces else None,
        )  # fmt: skip
        with closing(remote):
            newcomers = None if late is None else late.gather(remote.sites)
            if newcomers == []:
                break
            try:
                summary = leader.lead(remote, newcomers, listed_now)
            except SitesAdded as added:
                members = {*leader.expected, *added.names}
                leader = replace(leader, expected=[n for n in listed_now() if n in members], coming=added.names)
                continue
        if late is None:
            return summary
    return json.loads(leader.folder.summary.read_text(encoding="utf-8"))


def _expected_sites(setup: Setup, names: Collection[str]) -> list[str]:
    """The sites that a server waits for, in the order of the clients."""
    clients = [setup.population.info(number).id for number in range(len(setup.population))]
    if setup.algorithm.traits.centralised:
        raise ValueError(f"{type(setup.algorithm).__name__} needs all data in one place; no federation can run it")
    for name in names:
        if name not in clients:
            raise ValueError(f"the recipe's data have no client {name!r}; there are {listed(clients)}")
    return [name for name in clients if not names or name in names]


class LateSites:
    """Sites that a server which only hands out final models waits for, each connection of which it serves once."""

    def __init__(self, expected: Sequence[str], wait: float) -> None:
        self._expected, self._wait = expected, wait
        self._served: set[tuple[int, Connection]] = set()

    def missing(self, folder: RunFolder) -> bool:
        """Whether the summary has no results of some site."""
        membership = json.loads(folder.summary.read_text(encoding="utf-8")).get("membership", {})
        return not set(self._expected) <= set(membership.get("evaluated", ()))

    def gather(self, sites: SiteRegistry) -> list[str]:
        """The sites that have come anew, waited for; none after so many seconds without any."""
        began = time.monotonic()
        while True:
            sites.look(always=True)
            lines = {name: sites.lines[name] for name in self._expected if name in sites.lines}
            if newcomers := [name for name, line in lines.items() if line not in self._served]:
                self._served.update(lines.values())
                return newcomers
            if time.monotonic() - began >= self._wait:
                return []
            time.sleep(sites.timeouts.interval)


class SitesAdded(Exception):
    """Sites of the list that are no members yet are connected: the run goes on with them from the last round."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(*names)
        self.names = names


@dataclass(frozen=True)
class _Leader:
    """A run that is led from its members' introductions to their farewell."""

    recipe: Recipe
    setup: Setup
    run_data: RunData
    folder: RunFolder
    expected: Sequence[str]
    named: bool  # whether the sites are those of a list, all of which a mean is over
    wait: float
    coming: Sequence[str]
    whole: bool
    absent: Sequence[str]
    progress: Progress

    def lead(
        self, remote: Remote, newcomers: Sequence[str] | None, listed_now: Callable[[], list[str]]
    ) -> dict[str, Any]:
        """A whole run, or the delivery of its final models to newcomers; a SitesAdded where one came in between."""
        members, left_out = self._members(remote, newcomers)
        counted, heavy = bounded_members(members, _weight_bound(self.setup.algorithm, remote.bounds))
        for name, sentence in heavy.items():
            remote.sites.note(name, remote.sites.status[name].state, f"it {sentence}")
            self.progress(RunProgress(0, self.setup.rounds, "starting", f"{name!r} {sentence}"))
        member_names = frozenset(info.id for info in members)
        remote.sites.members = member_names
        here = replace(self.setup, population=Registered(counted))
        if (privacy := self.setup.algorithm.update_privacy) is not None:
            # The server's noise is independent of the seed, which all sites know.
            hidden = replace(privacy, repeatable=False)
            here = replace(here, algorithm=replace(self.setup.algorithm, update_privacy=hidden))
        runner = SiteRunner(self.recipe, here, self.run_data, self.folder, self.progress, remote)
        runner.whole = self.whole or not _has_server_parts(self.setup, members)
        if newcomers is not None and not runner.whole:
            raise ValueError(
                "--deliver needs --whole here: a part of the model is the server's, and sites get none of it"
            )
        runner.absent, runner.newcomers = self.absent, newcomers
        runner.expected = self.expected if self.named else [info.id for info in members]
        runner.examples = {info.id: {"train": info.num_examples} for info in members}
        runner.left_out = left_out
        runner.bounded.update({name: f"it {sentence}" for name, sentence in heavy.items()})

        added: list[str] = []

        def a_site_was_added() -> bool:
            remote.sites.look()
            # One on the list may have come too late for the first round, or while a server that was killed was down.
            new = [name for name in listed_now() if name not in member_names]
            added.extend(name for name in new if name in remote.sites.lines)
            return bool(added)

        runner.stopping = a_site_was_added
        try:
            summary = runner.run()
        except KeyboardInterrupt:  # of that, or of who runs the server, which ends it
            if not added:
                raise
            remote.remember()
            raise SitesAdded(added) from None
        remote.remember()
        remote.take_leave()
        return summary

    def _members(
        self, remote: Remote, newcomers: Sequence[str] | None
    ) -> tuple[list[ClientInfo], Mapping[str, Mapping[str, int]]]:
        """The run's members, waited for where it begins, and the examples that they leave out."""
        earlier, earlier_left_out = _stored_members(self.folder.root)
        if self.coming:
            remote.sites.gather(self.coming, self.wait)
        if newcomers is None:
            wait = 0.0 if earlier or self.coming else self.wait
            connected = {info.id: info for info in remote.sites.gather(self.expected, wait)}
        else:
            connected = {name: remote.sites.clients[name] for name in newcomers}
        # Weights and shares stay those that the run began with, whatever a site says later.
        known = {**connected, **earlier}
        all_left_out = {**earlier_left_out, **remote.sites.left_out}
        members = [known[name] for name in self.expected if name in known]
        left_out = {name: all_left_out[name] for name in self.expected if all_left_out.get(name)}
        _write_members(self.folder.root, members, left_out)
        return members, left_out


# Under secure aggregation a site checks its weight; in sessions its number of batches follows from its examples.
def _weight_bound(algorithm: Algorithm, bounds: Bounds) -> float:
    """The bound on weights, or 0 where a site and the server must go by the same number of examples."""
    return 0.0 if algorithm.secure_sum is not None or algorithm.traits.in_sessions else bounds.weight


class EvaluationValidator:
    """Check that a site's reply to an evaluation fits the task: its sums, weights and counts."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._counts: Schema | None = None

    def __call__(self, client: ClientInfo, message: Message) -> None:
        """Check of one reply; any error that it raises means that the reply cannot be used."""
        task = self._setup.task_of(client.id)
        for view in ("global", "personal"):
            summarise(read_tallies(message.scalars, view))
            if isinstance(task, Counting) and (counts := read_counts(message.tensors, view)):
                # Counts of all sites are added up, so they must look alike.
                self._counts = self._counts or schema_of(counts)
                if schema_of(counts) != self._counts:
                    raise ValueError("its counts are none of this task's")
                task.values(counts)


def _folder(root: Path, recipe: Recipe) -> RunFolder:
    folder = RunFolder(root)
    root.chmod(0o700)  # what sites sent is in it
    if not folder.recipe.is_file():
        return RunFolder.create(root, recipe.to_toml())
    if folder.recipe.read_text(encoding="utf-8") != recipe.to_toml():
        raise ValueError(f"{root} holds a run of another recipe; give another folder")
    return folder


def _stored_members(root: Path) -> tuple[dict[str, ClientInfo], dict[str, dict[str, int]]]:
    """Members of a run that has begun, and role -> examples that sites left out; sites with some only."""
    path = root / MEMBERS
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    members = {m["id"]: ClientInfo(m["id"], m["num_examples"], tuple(m["modalities"]), m["head"]) for m in stored}
    return members, {m["id"]: m["left_out"] for m in stored if m.get("left_out")}


def _write_members(root: Path, members: Sequence[ClientInfo], left_out: Mapping[str, Mapping[str, int]]) -> None:
    lines = [
        {"id": m.id, "num_examples": m.num_examples, "modalities": list(m.modalities), "head": m.head}
        | ({"left_out": dict(left_out[m.id])} if m.id in left_out else {})
        for m in members
    ]
    write_atomically(root / MEMBERS, json.dumps(lines, indent=1).encode())


def _has_server_parts(setup: Setup, members: Sequence[ClientInfo]) -> bool:
    workspace = Workspace(setup.model())
    return any(
        Scope.SERVER in layout(workspace.tensors, setup.algorithm.rules(m), partial=True).values() for m in members
    )
