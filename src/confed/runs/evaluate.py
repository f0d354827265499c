"""Final evaluation of a run's models on all test examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from confed.data.controls import controls_of
from confed.engines.local import Setup, Simulation
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_tallies
from confed.federation.measure import values_of
from confed.federation.params import Scalar
from confed.federation.protocols import Counting
from confed.federation.state import ServerState
from confed.runs.encode import RunData
from confed.runs.modality_subsets import restriction, sets_at, sets_tried, widest, written
from confed.system import format as formats
from confed.system.events import Progress, RunProgress, ignore
from confed.tasks.vqa import summarise

MATRIX_LIMIT = 20
"""Up to this many clients every personal model is tried on every client's data; beyond, at home only."""

MOST = 1000
"""Clients whose test examples are looked at; of more, so many that are spread evenly."""

CONTROLLED = 100
"""Places of a view on which models are tried with permuted and blank inputs; of more, so many that are spread evenly.

Each takes as long as the place's own examination, once per modality and once for blank pictures.
"""

LISTED = 50
"""Clients that a note names."""

Key = tuple[str, str, str]
"""(view: "personal", "global" or "unseen"; the model's owner; the place whose data it is tried on)."""

Job = tuple[Key, Mapping[str, Tensor], Mapping[str, Scalar]]
"""What is tried where, the model's tensors, and what of the examples it is shown."""


@dataclass
class Examination:
    """Results of the final evaluation.

    Attributes:
        results: key -> metric values and the per-example tensors ``correct`` and ``prediction``.
        subsets: (view, place) -> set of modalities, such as "image+text" -> metric values where nothing else of the
            place's examples is shown, and how many examples have all of these; of models at home only.
        controls: (view, place) -> control condition (:mod:`confed.data.controls`) -> the per-example tensors under it;
            of models at home only.
        without_controls: view, or "all" -> why no controls were tried.
        personal: client -> the trained tensors of its personal model.
        notes: what a reader of the numbers must know.
    """

    results: dict[Key, tuple[dict[str, float], Mapping[str, Tensor]]] = field(default_factory=dict)
    subsets: dict[tuple[str, str], dict[str, tuple[dict[str, float], int]]] = field(default_factory=dict)
    controls: dict[tuple[str, str], dict[str, Mapping[str, Tensor]]] = field(default_factory=dict)
    without_controls: dict[str, str] = field(default_factory=dict)
    personal: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def examine(
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    run_data: RunData,
    progress: Progress = ignore,
    subsets: bool = False,
    controls: bool = False,
) -> Examination:
    """Evaluation of the final models on all test examples; ``subsets``: with every set of modalities, too."""
    setup, found = simulation.setup, Examination()
    algorithm = setup.algorithm
    seen = [name for name, data in run_data.clients.items() if len(data.tables[2])]
    unseen = [name for name, data in run_data.unseen.items() if name in setup.observers and len(data.tables[2])]
    if len(seen) < len(run_data.clients):
        found.notes.append(_without_tests(sorted(set(run_data.clients) - set(seen))))
    if len(seen) > MOST:
        found.notes.append(f"{len(seen)} clients have test examples; every {len(seen) / MOST:.3g}th is examined")
        seen = [seen[number * len(seen) // MOST] for number in range(MOST)]
    wanted = set(seen)
    infos = {info.id: info for info in map(setup.population.info, range(len(setup.population))) if info.id in wanted}
    common = _models(found, simulation, servers, seen, unseen, infos)
    jobs: list[Job] = []
    same = not run_data.dataset.answer_sets and not run_data.dataset.tasks
    several = not algorithm.traits.centralised and algorithm.traits.has_personal
    # Every example's scores are kept of a task that counts: for each model at home, not for each pair.
    everywhere = len(seen) <= MATRIX_LIMIT and several and same and not isinstance(setup.task, Counting)
    found.notes += _on_personal(algorithm, same, several and not everywhere, len(seen) > MATRIX_LIMIT)
    partly = False
    for owner, tensors in found.personal.items():
        for place in seen if everywhere else [owner]:
            how = restriction(run_data.clients[place], infos[owner].modalities) if place != owner else {}
            partly |= bool(how) or how is None
            jobs += [(("personal", owner, place), tensors, how)] if how is not None else []
    if partly:
        found.notes.append("of other clients' examples a personal model is shown the modalities that its owner has")
    if algorithm.global_model != "none":
        jobs += [(("global", name, name), common[name], {}) for name in seen]
    if algorithm.global_model == "alone":
        jobs += [(("unseen", name, name), common[name], {}) for name in unseen]
    elif algorithm.global_model == "with own parts" and unseen:
        found.notes.append(
            "the global model answers with parts that each client keeps to itself, so it is not tried in unseen places"
        )
    measured = {"measures": True} if setup.measures else {}
    asked = [(key[2], tensors, {**how, **measured}) for key, tensors, how in jobs]
    for (key, _, _), message in zip(jobs, simulation.examine(asked, setup.rounds + 2), strict=True):
        values = summarise(read_tallies(message.scalars, "examined")) | values_of(setup.measures, message.tensors)
        found.results[key] = (values, message.tensors)
        _report(progress, setup, key[0], key[2])
    if controls:
        own = [job for job in jobs if job[0][1] == job[0][2] and (several or job[0][0] != "personal")]
        if not several:
            found.without_controls["personal"] = _one_model(algorithm)
        _with_controls(found, simulation, own, run_data, progress)
    if subsets and len(seen) <= MATRIX_LIMIT:
        at_home = [job for job in jobs if job[0][1] == job[0][2] and (several or job[0][0] != "personal")]
        _with_less(found, simulation, at_home, run_data, progress)
    return found


def _models(
    found: Examination,
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    seen: Sequence[str],
    unseen: Sequence[str],
    infos: Mapping[str, ClientInfo],
) -> dict[str, Mapping[str, Tensor]]:
    """The global model as each place has it; the clients' own are put into ``found.personal``."""
    setup = simulation.setup
    algorithm = setup.algorithm
    common: dict[str, Mapping[str, Tensor]] = {}
    absent: list[str] = []
    for name in [*seen, *unseen]:
        shared = simulation.shared(servers, infos[name] if name in infos else simulation.observer(name))
        state = simulation.store.load(name) if name in infos else None
        private = {} if state is None else state.tensors.get("private", {})
        beside = {} if algorithm.global_model == "alone" else private
        common[name] = {**shared, **beside, **algorithm.initial_private(shared)}
        if name not in seen:
            continue
        own = None if state is None else state.tensors.get("personal")
        if own is None and setup.keep_personal:
            # A client that never took part has what the server would send it, and initial values where nothing is
            # sent; a pooled run's one model serves all clients.
            absent += [] if algorithm.traits.centralised or not algorithm.traits.has_personal else [name]
            found.personal[name] = {**private, **common[name]}
        elif own is not None:
            found.personal[name] = {**private, **own}
    if absent:
        model = "shared part with untrained private values" if algorithm.global_model == "none" else "global model"
        those = formats.counted(len(absent), "client")
        found.notes.append(f"{those} never took part; the {model} stands in for their own")
    return common


def _report(progress: Progress, setup: Setup, model: str, place: str, how: str = "") -> None:
    """Progress report of one model's evaluation at one client or unseen place."""
    text = f"evaluated the {model} model on {place}{how}"
    progress(RunProgress(setup.rounds, setup.rounds, "evaluated", text))


def _with_less(
    found: Examination,
    simulation: Simulation,
    at_home: Sequence[Job],
    run_data: RunData,
    progress: Progress,
) -> None:
    """Evaluation of models at their own client with every set of modalities."""
    broad = widest(run_data.unseen)
    jobs: list[tuple[Key, str, Mapping[str, Tensor]]] = []
    for key, tensors, _ in at_home:
        if key[0] == "unseen" and key[2] not in broad:
            continue
        sets = sets_at((run_data.unseen if key[0] == "unseen" else run_data.clients)[key[2]])
        for tried in sets_tried(sets, tensors):
            if sets == [tried]:  # all that there is: tried already
                values, kept = found.results[key]
                found.subsets.setdefault((key[0], key[2]), {})[written(tried)] = values, len(kept["correct"])
            else:
                jobs.append((key, written(tried), tensors))
    trials = [(key[2], tensors, {"modalities": tried, "complete": True}) for key, tried, tensors in jobs]
    for (key, tried, _), message in zip(jobs, simulation.examine(trials, simulation.setup.rounds + 2), strict=True):
        count = len(message.tensors["correct"])
        if count:  # what is asked for, such as a caption, is not shown
            values = summarise(read_tallies(message.scalars, "examined"))
            found.subsets.setdefault((key[0], key[2]), {})[tried] = values, count
        _report(progress, simulation.setup, key[0], key[2], f" with {tried} only")


def _with_controls(
    found: Examination,
    simulation: Simulation,
    at_home: Sequence[Job],
    run_data: RunData,
    progress: Progress,
) -> None:
    """Evaluation of models at their own client under control conditions."""
    views: dict[str, list[Job]] = {}
    for job in at_home:
        views.setdefault(job[0][0], []).append(job)
    trials: list[tuple[tuple[str, str], str, Mapping[str, Tensor]]] = []
    for view, own in views.items():
        if len(own) > CONTROLLED:
            found.notes.append(
                f"{view}: {len(own)} places have test examples; every {len(own) / CONTROLLED:.3g}th is examined with "
                "permuted and blank inputs"
            )
        chosen = [own[number * len(own) // CONTROLLED] for number in range(CONTROLLED)]
        for (_, _, place), tensors, _ in own if len(own) <= CONTROLLED else chosen:
            table = (run_data.unseen if view == "unseen" else run_data.clients)[place].tables[2]
            trials += [((view, place), control, tensors) for control in controls_of(table)]
    jobs = [(place, tensors, {"control": control}) for (_, place), control, tensors in trials]
    keeps = ("correct", "probabilities") if isinstance(simulation.setup.task, Counting) else ("correct",)
    for (key, control, _), message in zip(trials, simulation.examine(jobs, simulation.setup.rounds + 2), strict=True):
        kept = {name: message.tensors[name] for name in keeps if name in message.tensors}
        found.controls.setdefault(key, {})[control] = kept
        _report(progress, simulation.setup, key[0], key[1], f" with {control.replace('_', ' ')}")
    if not trials and "all" not in found.without_controls:
        found.without_controls["all"] = "no place has test examples with different inputs of any modality"


def _one_model(algorithm: Algorithm) -> str:
    if algorithm.traits.centralised:
        return "all data are in one place: the one model is tried as the global one"
    return "the method makes no personal models: the global model is everybody's"


def _without_tests(names: Sequence[str]) -> str:
    some = f"{names[:LISTED]}" + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return f"left out, for want of test examples: {some}"


def _on_personal(algorithm: Algorithm, same: bool, at_home: bool, many: bool) -> list[str]:
    """Notes on personal models that are tried at home only: answers differ (not ``same``), or clients are many."""
    lines: list[str] = []
    if not algorithm.traits.has_personal:
        lines.append("the method makes no personal models: the global model is everybody's")
    if not same:
        lines.append("clients have answers or tasks of their own: personal models are tried at home only")
    elif at_home:
        why = f"more than {MATRIX_LIMIT} clients: " if many else ""
        lines.append(f"{why}personal models are tried at home only")
    return lines
