"""Final evaluation of a run's models on all test examples, also with subsets of the modalities.

With subsets a model is tried at home only, with every set of modalities that some of the test examples there have and
that its owner's data taught it to read. Examples that lack one of a set's modalities have no part in that set's number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import TypeVar

from torch import Tensor

from confed.data.controls import controls_of
from confed.data.examples import TableData
from confed.engines.local import Setup, Simulation
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_tallies
from confed.federation.measure import values_of
from confed.federation.messages import Message
from confed.federation.ownership import MODALITIES, modalities_of
from confed.federation.params import Scalar
from confed.federation.protocols import Counting
from confed.federation.state import ServerState
from confed.metrics.scores import summarise
from confed.runs.encode import RunData
from confed.system import format as formats
from confed.system.events import Progress, RunProgress, ignore

MATRIX_LIMIT = 20  # up to this many clients every personal model is tried on every client's data; beyond, at home only
MOST = 1000  # clients whose test examples are looked at; of more, so many that are spread evenly

CONTROLLED = 100
"""Places of a view on which models are tried with permuted and blank inputs; of more, so many that are spread evenly.

Each takes as long as the place's own examination, once per modality and once for blank pictures.
"""

LISTED = 50  # clients that a note names
Set = tuple[str, ...]  # modalities, in the fixed order

Key = tuple[str, str, str]
"""(view: "personal", "global" or "unseen"; the model's owner; the place whose data it is tried on)."""

Job = tuple[Key, str, Mapping[str, Tensor], Mapping[str, Scalar]]
"""What is tried where, under which condition, the model's tensors, and what of the examples it is shown."""

Item = TypeVar("Item")


@dataclass
class Examination:
    """Results of the final evaluation."""

    # Metric values, and the per-example tensors "correct" and "prediction".
    results: dict[Key, tuple[dict[str, float], Mapping[str, Tensor]]] = field(default_factory=dict)
    # (view, place) -> set of modalities, such as "image+text" -> metric values where nothing else of the place's
    # examples is shown, and how many examples have all of these; of models at home only.
    subsets: dict[tuple[str, str], dict[str, tuple[dict[str, float], int]]] = field(default_factory=dict)
    # (view, place) -> control condition (confed.data.controls) -> the per-example tensors under it, likewise.
    controls: dict[tuple[str, str], dict[str, Mapping[str, Tensor]]] = field(default_factory=dict)
    without_controls: dict[str, str] = field(default_factory=dict)  # view, or "all" -> why no controls were tried
    personal: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)  # client -> trained tensors of its model
    notes: list[str] = field(default_factory=list)  # what a reader of the numbers must know


def evenly(items: Sequence[Item], count: int) -> Sequence[Item]:
    """So many of the items, spread evenly over them; all where there are no more."""
    return [items[number * len(items) // count] for number in range(count)] if len(items) > count else items


def examine(
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    run_data: RunData,
    progress: Progress = ignore,
    subsets: bool = False,
    controls: bool = False,
) -> Examination:
    """Evaluation of the final models on all test examples; ``subsets``: with every set of modalities, too."""
    setup, examined = simulation.setup, Examination()
    algorithm = setup.algorithm
    seen = [name for name, data in run_data.clients.items() if len(data.tables[2])]
    unseen = [name for name, data in run_data.unseen.items() if name in setup.observers and len(data.tables[2])]
    if len(seen) < len(run_data.clients):
        names = sorted(set(run_data.clients) - set(seen))
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        examined.notes.append(f"left out, for want of test examples: {names[:LISTED]}{more}")
    if len(seen) > MOST:
        examined.notes.append(f"{len(seen)} clients have test examples; every {len(seen) / MOST:.3g}th is examined")
    seen = evenly(seen, MOST)
    wanted = set(seen)
    infos = {info.id: info for info in map(setup.population.info, range(len(setup.population))) if info.id in wanted}
    common = _models(examined, simulation, servers, seen, unseen, infos)
    several = not algorithm.traits.centralised and algorithm.traits.has_personal
    jobs = _personal_jobs(examined, setup, run_data, seen, infos, several)
    if algorithm.global_model != "none":
        jobs += [(("global", name, name), "", common[name], {}) for name in seen]
    if algorithm.global_model == "alone":
        jobs += [(("unseen", name, name), "", common[name], {}) for name in unseen]
    elif algorithm.global_model == "with own parts" and unseen:
        examined.notes.append(
            "the global model answers with parts that each client keeps to itself, so it is not tried in unseen places"
        )
    measured = {"measures": True} if setup.measures else {}
    trials = [(key, "", tensors, {**shown, **measured}) for key, _, tensors, shown in jobs]
    for key, _, message in _tried(simulation, trials, progress):
        values = summarise(read_tallies(message.scalars, "examined")) | values_of(setup.measures, message.tensors)
        examined.results[key] = values, message.tensors
    at_home = [job for job in jobs if job[0][1] == job[0][2] and (several or job[0][0] != "personal")]
    if controls and not several:
        examined.without_controls["personal"] = (
            "all data are in one place: the one model is tried as the global one"
            if algorithm.traits.centralised
            else "the method makes no personal models: the global model is everybody's"
        )
    if controls:
        _with_controls(examined, simulation, at_home, run_data, progress)
    if subsets and len(seen) <= MATRIX_LIMIT:
        _with_less(examined, simulation, at_home, run_data, progress)
    return examined


def _personal_jobs(
    examined: Examination, setup: Setup, run_data: RunData, seen: Sequence[str], infos: Mapping[str, ClientInfo],
    several: bool,
) -> list[Job]:  # fmt: skip
    """Personal models on data of every client, or at home only."""
    same = not run_data.dataset.answer_sets and not run_data.dataset.tasks
    # Every example's scores are kept of a task that counts: for each model at home, not for each pair.
    everywhere = len(seen) <= MATRIX_LIMIT and several and same and not isinstance(setup.task, Counting)
    at_home = several and not everywhere
    examined.notes += _on_personal(setup.algorithm, same, at_home, len(seen) > MATRIX_LIMIT)
    partly, jobs = False, list[Job]()
    for owner, tensors in examined.personal.items():
        for place in seen if everywhere else [owner]:
            shown = restriction(run_data.clients[place], infos[owner].modalities) if place != owner else {}
            partly |= bool(shown) or shown is None
            jobs += [] if shown is None else [(("personal", owner, place), "", tensors, shown)]
    if partly:
        examined.notes.append("of other clients' examples a personal model is shown the modalities that its owner has")
    return jobs


def _models(
    examined: Examination,
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    seen: Sequence[str],
    unseen: Sequence[str],
    infos: Mapping[str, ClientInfo],
) -> dict[str, Mapping[str, Tensor]]:
    """The global model as each place has it; the clients' own are put into ``examined.personal``."""
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
        personal = None if state is None else state.tensors.get("personal")
        if personal is None and setup.keep_personal:
            # A client that never took part has what the server would send it, and initial values where nothing is
            # sent; a pooled run's one model serves all clients.
            absent += [] if algorithm.traits.centralised or not algorithm.traits.has_personal else [name]
            examined.personal[name] = {**private, **common[name]}
        elif personal is not None:
            examined.personal[name] = {**private, **personal}
    if absent:
        model = "shared part with untrained private values" if algorithm.global_model == "none" else "global model"
        those = formats.counted(len(absent), "client")
        examined.notes.append(f"{those} never took part; the {model} stands in for their own")
    return common


def _tried(simulation: Simulation, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Key, str, Message]]:
    """What each job shows of which model, under which condition, with progress."""
    setup = simulation.setup
    trials = [(key[2], tensors, shown) for key, _, tensors, shown in jobs]
    for (key, condition, _, _), message in zip(jobs, simulation.examine(trials, setup.rounds + 2), strict=True):
        yield key, condition, message
        with_what = f" with {condition.replace('_', ' ')}" if condition else ""
        text = f"evaluated the {key[0]} model on {key[2]}{with_what}"
        progress(RunProgress(setup.rounds, setup.rounds, "evaluated", text))


def _with_less(
    examined: Examination, simulation: Simulation, at_home: Sequence[Job], run_data: RunData, progress: Progress
) -> None:
    """Evaluation of models at their own client with every set of modalities."""
    broad = widest(run_data.unseen)
    jobs: list[Job] = []
    for key, _, tensors, _ in at_home:
        if key[0] == "unseen" and key[2] not in broad:
            continue
        sets = sets_at((run_data.unseen if key[0] == "unseen" else run_data.clients)[key[2]])
        for tried in sets_tried(sets, tensors):
            if sets == [tried]:  # all that there is: tried already
                values, rows = examined.results[key]
                examined.subsets.setdefault((key[0], key[2]), {})[written(tried)] = values, len(rows["correct"])
            else:
                shown = {"modalities": written(tried), "complete": True}
                jobs.append((key, f"{written(tried)} only", tensors, shown))
    for key, condition, message in _tried(simulation, jobs, progress):
        count = len(message.tensors["correct"])
        if count:  # what is asked for, such as a caption, is not shown
            values = summarise(read_tallies(message.scalars, "examined"))
            tried = condition.removesuffix(" only")
            examined.subsets.setdefault((key[0], key[2]), {})[tried] = values, count


def _with_controls(
    examined: Examination, simulation: Simulation, at_home: Sequence[Job], run_data: RunData, progress: Progress
) -> None:
    """Evaluation of models at their own client under control conditions."""
    jobs: list[Job] = []
    for view in dict.fromkeys(job[0][0] for job in at_home):
        of_view = [job for job in at_home if job[0][0] == view]
        if len(of_view) > CONTROLLED:
            examined.notes.append(
                f"{view}: {len(of_view)} places have test examples; every {len(of_view) / CONTROLLED:.3g}th is "
                "examined with permuted and blank inputs"
            )
        for key, _, tensors, _ in evenly(of_view, CONTROLLED):
            table = (run_data.unseen if view == "unseen" else run_data.clients)[key[2]].tables[2]
            jobs += [(key, control, tensors, {"control": control}) for control in controls_of(table)]
    names = ("correct", "probabilities") if isinstance(simulation.setup.task, Counting) else ("correct",)
    for key, control, message in _tried(simulation, jobs, progress):
        rows = {name: message.tensors[name] for name in names if name in message.tensors}
        examined.controls.setdefault((key[0], key[2]), {})[control] = rows
    if not jobs and "all" not in examined.without_controls:
        examined.without_controls["all"] = "no place has test examples with different inputs of any modality"


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


# Subsets of the modalities -------------------------------------------------------------------------------------


def written(names: Sequence[str]) -> str:
    """Name of a set of modalities, such as "image+text"."""
    return "+".join(names)


def sets_at(data: TableData) -> list[Set]:
    """The sets of modalities of a place's test examples; none where examples cannot lack any."""
    table = data.tables[2]
    return [] if table.present is None else table.sets()


def sets_tried(sets: Iterable[Set], tensors: Mapping[str, Tensor]) -> list[Set]:
    """Every set that a model can be shown of examples with the given sets, the smallest first."""
    reads, every = modalities_of(tensors), set[Set]()
    for names in sets:
        read = [name for name in names if name in reads]
        for size in range(1, len(read) + 1):
            every.update(combinations(read, size))
    return sorted(every, key=lambda names: (len(names), list(map(MODALITIES.index, names))))


def widest(places: Mapping[str, TableData]) -> list[str]:
    """The places whose test examples have sets that are part of no other place's."""
    sets_of = {name: sets_at(data) for name, data in places.items()}

    def is_within(name: str, other: str) -> bool:
        pairs = product(sets_of[name], sets_of[other])
        covered = {names for names, others in pairs if set(names) < set(others)}
        return name != other and covered == set(sets_of[name])

    narrow = {name for name, other in product(places, places) if is_within(name, other)}
    return [name for name in places if sets_of[name] and name not in narrow]


def restriction(data: TableData, owned: Sequence[str]) -> Mapping[str, Scalar] | None:
    """Restriction of examples to a set of modalities, as scalars of the action ``examine``."""
    present = set(chain.from_iterable(sets_at(data)))
    left = [name for name in MODALITIES if name in present and name in owned]
    if not owned or len(left) == len(present):
        return {}
    return {"modalities": written(left)} if left else None
