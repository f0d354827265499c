"""Plan of a run: what it will compute, send and keep, before it is started.

Two short federations are measured in a temporary folder: the recipe's own model, method and clients, with a few
batches of every client's examples (:data:`BATCHES`), for two rounds, an evaluation and the final examination. Whatever
a client costs (calls, bytes, seconds) is taken to be a fixed amount and an amount per example, which follow from these
two. Of many clients a few are measured, and their replies are repeated for the others. Memory is the peak that was
measured.
"""

import heapq
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

import torch

from confed.data.examples import TableData
from confed.engines.local import (
    MOST,
    InProcess,
    Membership,
    Participation,
    RoundRecord,
    Setup,
    Workspace,
    simulate,
)
from confed.engines.participation import Population
from confed.engines.usage import Timeline, keep_freed_memory, peak_memory, reset_peak
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Reply
from confed.federation.protocols import ClientData
from confed.federation.state import MemoryStore, Store
from confed.recipes.recipe import Recipe
from confed.runs.at_once import clients_at_once
from confed.runs.build import check_device, cohorts_of, participation_of, prepare, simulation_of
from confed.runs.encode import RunData
from confed.runs.evaluate import evenly, examine

BATCHES = (2, 6)  # batches of training examples per client in the two short federations; of others, one and three
ROUNDS = 50  # rounds whose cohorts are looked at; of more, so many that are spread evenly

ROW_BYTES = 68
"""Bytes of a test example in ``records/`` and in ``predictions.safetensors``: score, answer, right answer, name."""

MEASURED = 4
"""Clients that are measured in every step, if one takes less than :data:`SLOW` seconds; one otherwise."""

SLOW = 10.0


@dataclass(frozen=True)
class RunPlan:
    """What a run will take."""

    label: str
    clients: int
    cohort: float  # clients of a round, on average
    rounds: int
    calls: int
    bytes_up: int  # sent by clients in all rounds
    bytes_down: int  # sent to clients in all rounds
    memory: int  # largest resident memory of a process, in bytes, as measured here
    device_memory: int  # the same of the GPU; 0 without one
    disk: int  # bytes of checkpoints, models and predictions at the end of the run
    preparing: float  # seconds until the first round
    serving: float  # seconds of the server in a round, its checkpoint included
    clients_seconds: tuple[float, ...]  # seconds of each client of a typical round
    evaluating: tuple[float, ...]  # seconds of each place in an evaluation between rounds
    evaluations: int  # how many of these there are
    finishing: tuple[float, ...]  # seconds of each client in what a method does after the last round
    examining: tuple[float, ...]  # seconds of each trial of a final model
    device_data: int = 0  # bytes of the GPU that clients' examples may take (run.device_data); 0 without one
    at_once: str = ""  # how many clients are trained at once, and why; times are those of one after the other

    def round_seconds(self, workers: int = 1) -> float:
        """Seconds of a round without evaluation, with so many processes on as many cores."""
        return self.serving + makespan(self.clients_seconds, workers)

    def seconds(self, workers: int = 1) -> float:
        """Seconds of the run, with so many processes on as many cores."""
        between = self.evaluations * makespan(self.evaluating, workers)
        after = makespan(self.finishing, workers) + makespan(self.examining, workers)
        return self.preparing + self.rounds * self.round_seconds(workers) + between + after


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Seconds until all jobs are done, if each goes, in order, to the first of the workers that is free."""
    free = [0.0] * max(min(workers, len(seconds)), 1)
    for job_seconds in seconds:
        heapq.heapreplace(free, free[0] + job_seconds)
    return max(free)


def plan_run(recipe: Recipe, clock: Callable[[], float] = time.perf_counter) -> RunPlan:
    """Plan of a single-run recipe; nothing is kept."""
    torch.set_num_threads(recipe.run.threads)
    keep_freed_memory()
    check_device(recipe)
    reset_peak()
    began = clock()
    setup, run_data = prepare(recipe)
    if run_data.dataset.elsewhere is not None:
        raise ValueError(f"a card stands for the data {run_data.dataset.name!r}: there are no examples to measure with")
    workspace = Workspace(setup.model(), setup.device)
    preparing = clock() - began
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trials = [measure(recipe, setup, run_data, workspace, size, clock) for size in BATCHES]
    device_memory = torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0
    at_once = str(clients_at_once(recipe.run, setup, workspace))
    return _plan(recipe, setup, run_data, trials, preparing, peak_memory(), device_memory, at_once)


# Measurements of a short federation -----------------------------------------------------------------------------------


@dataclass
class Step:
    """What was measured of one step: a round, an evaluation, the finish or the examination."""

    calls: list[str] = field(default_factory=list[str])  # client of every call, in order
    # Client -> seconds of its calls, of those that were measured.
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    counts: Counter[str] = field(default_factory=Counter[str])  # client -> how many of its calls were measured
    # Of a round: "calls", and bytes "up" from clients and "down" to them.
    totals: dict[str, int] = field(default_factory=dict[str, int])
    serving: float = 0.0  # seconds beside those of clients


@dataclass
class Trial:
    """What was measured with clients of a certain size."""

    sizes: Callable[[str], tuple[int, int, int]]
    first: Step
    later: Step
    evaluation: Step
    finish: Step
    examination: Step
    state_bytes: float
    server_bytes: int
    personal_bytes: float
    personal: int


class _Clock:
    """Executor that times calls in this process, and repeats replies of some clients for others."""

    def __init__(self, setup: Setup, workspace: Workspace, most: int | None, clock: Callable[[], float]) -> None:
        self._inner, self._most, self._clock = InProcess(setup, workspace), most, clock
        self._setup = setup
        self.timeline, self.step = Timeline(0), Step()

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`confed.engines.executor.Executor`."""
        replies: dict[tuple[object, ...], list[Reply]] = {}
        for number, call in enumerate(calls):
            kind = replies.setdefault((call.action, call.client.head, call.client.modalities), [])
            self.step.calls.append(call.client.id)
            if self._most is not None and len(kind) >= self._most and not call.session:
                repeated = kind[number % len(kind)]
                if not self._setup.downlink.plain:  # it has the round's model, as whoever took part
                    store.save(call.client.id, store.load(repeated.client.id))
                yield Reply(call.client, repeated.message)
                continue
            began = self._clock()
            (reply,) = self._inner([call], store, round)
            took = self._clock() - began
            if reply.error is not None:
                raise RuntimeError(f"client {call.client.id!r} failed in a measured round: {reply.error}")
            if took > SLOW and self._most is not None:
                self._most = 1
            self.step.seconds[call.client.id] += took
            self.step.counts[call.client.id] += 1
            kind.append(reply)
            yield reply


class _Fewer:
    """A population with the first examples of its clients only."""

    def __init__(self, population: Population, shorten: Callable[[ClientData], ClientData]) -> None:
        self._population, self._shorten = population, shorten

    def __len__(self) -> int:
        return len(self._population)

    def info(self, number: int) -> ClientInfo:
        """See :class:`confed.engines.participation.Population`."""
        return self._population.info(number)

    def data(self, client_id: str) -> ClientData:
        """See :class:`confed.engines.participation.Population`."""
        return self._shorten(self._population.data(client_id))


def measure(
    recipe: Recipe, setup: Setup, run_data: RunData, workspace: Workspace, batches: int, clock: Callable[[], float]
) -> Trial:
    """Two rounds, an evaluation, the finish and the examination of a federation with a few batches per client."""
    train, others = batches * setup.local.batch_size, batches // 2 * setup.local.eval_batch_size

    def shorten(data: ClientData) -> ClientData:
        return data.shortened(train, others) if isinstance(data, TableData) else data

    observers = {name: shorten(data) for name, data in setup.observers.items()}
    short = replace(
        setup, population=_Fewer(setup.population, shorten), observers=observers, rounds=max(setup.rounds, 2)
    )
    everyone = setup.algorithm.secure_sum is not None  # of repeated masks no sum can be made
    executor = _Clock(short, workspace, None if everyone else MEASURED, clock)
    with tempfile.TemporaryDirectory(prefix="confed-plan-") as place:
        checkpoints = Checkpoints(Path(place) / "checkpoint", recipe.run.newest_checkpoints)
        store: Store = checkpoints.store if recipe.run.checkpoint_every else MemoryStore()
        simulation = simulation_of(recipe.run, short, run_data.clients, store, executor)
        rounds: list[Step] = []
        servers = simulation.start(workspace)
        began = clock()
        for record in islice(simulate(simulation, servers), 2):
            servers, step = record.servers, _taken(executor)
            step.totals = _totals(record)
            if recipe.run.checkpoint_every:
                checkpoints.save(Checkpoint(record.round, servers, 0))
            step.serving = max(clock() - began - sum(step.seconds.values()), 0.0)
            rounds.append(step)
            began = clock()
        limit = recipe.run.evaluate_examples
        simulation.evaluate(servers, 2, split="validation", limit=limit)
        evaluation = _taken(executor)
        ends = list(simulate(simulation, servers, short.rounds))
        finish = _taken(executor)
        for record in ends:
            servers, finish.totals = record.servers, _totals(record)
        began = clock()
        subsets, controls = recipe.run.modality_matrix, recipe.run.controls != "none"
        examined = examine(simulation, servers, run_data, subsets=subsets, controls=controls)
        examination = _taken(executor)
        examination.serving = max(clock() - began - sum(examination.seconds.values()), 0.0)
        states = checkpoints.store.sizes()
        server = sum(path.stat().st_size for path in (Path(place) / "checkpoint").glob("round-000002/*"))
    personal: list[int] = []
    for tensors in examined.personal.values():
        personal.append(sum(tensor.nbytes for tensor in tensors.values()))

    def sizes(name: str) -> tuple[int, int, int]:
        return sizes_of(short.data(name))

    return Trial(
        sizes, rounds[0], rounds[-1], evaluation, finish, examination, mean_of(states), server, mean_of(personal),
        len(personal),
    )  # fmt: skip


def _totals(record: RoundRecord) -> dict[str, int]:
    """Calls and bytes of a round."""
    calls = sum(traffic.calls for traffic in record.traffic.values())
    return {"calls": calls, "up": sum(record.bytes_up.values()), "down": sum(record.bytes_down.values())}


def _taken(clock: _Clock) -> Step:
    """What the clock has measured since it was last asked."""
    step, clock.step = clock.step, Step()
    return step


def sizes_of(data: ClientData) -> tuple[int, int, int]:
    """Numbers of training, validation and test examples."""
    return tuple(map(len, data.tables)) if isinstance(data, TableData) else (len(data), 0, 0)  # pyright: ignore[reportReturnType]


def mean_of(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


# What follows from two of them for the run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """An amount as a fixed part and a part per example."""

    fixed: float
    each: float

    def __call__(self, examples: float) -> float:
        return self.fixed + self.each * examples


def _line(points: Sequence[tuple[float, float]]) -> _Line:
    """The line through two points (examples, amount), none of its parts negative; of equal examples, their mean."""
    (x, y), (u, v) = points
    if u <= x:
        return _Line(0.0, (y + v) / (x + u)) if x + u else _Line((y + v) / 2, 0.0)
    each = max((v - y) / (u - x), 0.0)
    return _Line(max(y - each * x, 0.0), each)


Steps = Sequence[tuple[Trial, Step]]  # the same step of every trial


def _per_call(steps: Steps, role: int, limit: int = 0) -> _Line:
    """Seconds of a call, by the client's examples in a role, of which at most ``limit`` count if it is not 0."""
    points: list[tuple[float, float]] = []
    for trial, step in steps:
        sizes = [min(trial.sizes(name)[role], limit or 1 << 62) for name in step.seconds]
        points.append((mean_of(sizes), mean_of([step.seconds[name] / step.counts[name] for name in step.seconds])))
    return _line(points)


def _per_round(steps: Steps) -> _Line:
    """Seconds of a client in a round, by its training examples."""
    points: list[tuple[float, float]] = []
    for trial, step in steps:
        points.append((_mean_size(trial, step.seconds), mean_of(list(step.seconds.values()))))
    return _line(points)


def _amount(steps: Steps, name: str) -> _Line:
    """Calls or bytes of a client in a round, by its training examples."""
    points: list[tuple[float, float]] = []
    for trial, step in steps:
        clients = dict.fromkeys(step.calls)
        points.append((_mean_size(trial, clients), step.totals[name] / max(len(clients), 1)))
    (x, y), (u, v) = points
    return _Line(y, 0.0) if x == u or y == v else _line(points)


def _mean_size(trial: Trial, clients: Iterable[str]) -> float:
    """Mean number of training examples."""
    return mean_of([trial.sizes(client)[0] for client in clients])


def _plan(
    recipe: Recipe, setup: Setup, run_data: RunData, trials: Sequence[Trial], preparing: float, memory: int,
    device_memory: int, at_once: str,
) -> RunPlan:  # fmt: skip
    run, traits = recipe.run, setup.algorithm.traits
    clients = () if traits.centralised else run_data.clients
    cohorts = _cohorts(recipe, setup, participation_of(run, clients))
    cohort = mean_of(list(map(len, cohorts)))
    firsts, laters = [(trial, trial.first) for trial in trials], [(trial, trial.later) for trial in trials]
    totals: dict[str, float] = {}
    for name in ("calls", "up", "down"):
        first, later = _amount(firsts, name), _amount(laters, name)
        per_round = mean_of([sum(map(later, sizes)) for sizes in cohorts])
        totals[name] = sum(map(first, cohorts[0])) + (run.rounds - 1) * per_round
        totals[name] += trials[1].finish.totals.get(name, 0)
    limit = run.evaluate_examples

    @cache
    def whole(name: str) -> tuple[int, int, int]:
        return sizes_of(setup.data(name))

    evaluating = _per_call([(trial, trial.evaluation) for trial in trials], 1, limit)
    examining = _per_call([(trial, trial.examination) for trial in trials], 2)
    finishing = _per_call([(trial, trial.finish) for trial in trials], 0)
    typical = sorted(cohorts, key=sum)[len(cohorts) // 2]
    every = run.evaluate_every
    ends = 1 if trials[1].finish.calls else 0
    last = 0 if not every or run.rounds % every == 0 else 1
    evaluations = (1 + run.rounds // every + last + ends) if every else 0
    serving = _line([(_mean_size(trial, dict.fromkeys(trial.later.calls)), trial.later.serving) for trial in trials])
    return RunPlan(
        label=setup.algorithm.title,
        clients=len(setup.population) if not traits.centralised else len(run_data.clients),
        cohort=cohort,
        rounds=run.rounds,
        calls=round(totals["calls"]),
        bytes_up=0 if traits.centralised else round(totals["up"]),
        bytes_down=0 if traits.centralised else round(totals["down"]),
        memory=memory,
        device_memory=device_memory,
        disk=_disk(recipe, trials[1], whole, len(setup.population), cohort),
        preparing=preparing,
        serving=serving(mean_of(list(map(mean_of, cohorts)))),
        clients_seconds=tuple(map(_per_round(laters), typical)),
        evaluating=tuple(evaluating(min(whole(name)[1], limit or 1 << 62)) for name in trials[1].evaluation.calls),
        evaluations=evaluations,
        finishing=tuple(finishing(whole(name)[0]) for name in trials[1].finish.calls),
        examining=(trials[1].examination.serving, *(examining(whole(name)[2]) for name in trials[1].examination.calls)),
        device_data=0 if setup.device == "cpu" else setup.device_data,
        at_once=at_once,
    )


def _cohorts(recipe: Recipe, setup: Setup, participation: Participation) -> list[list[int]]:
    """Numbers of training examples of the clients of each round that is looked at."""
    run = recipe.run
    size, buffered = cohorts_of(run, setup.algorithm)
    federation = Membership(setup, size, participation, run.sampling == "size")
    if buffered is not None:  # as many updates as the buffer holds, of whichever clients
        typical = [info.num_examples for info in federation.clients(MOST)]
        return [[round(mean_of(typical))] * run.async_.buffer]
    cohorts: list[list[int]] = []
    for number in evenly(range(run.rounds), ROUNDS):
        cohorts.append([info.num_examples for info in federation.sample(number)[1]])
    return cohorts


def _disk(
    recipe: Recipe, trial: Trial, whole: Callable[[str], tuple[int, int, int]], population: int, cohort: float
) -> int:
    """Bytes of checkpoints, models and predictions at the end."""
    run = recipe.run
    share = min(cohort / max(population, 1), 1.0)
    trained = population * (1 - (1 - share) ** run.rounds)  # clients that are expected to take part at least once
    checkpoints = min(run.newest_checkpoints, run.rounds)
    # Beside the versions of the checkpoints a client's store keeps the one before.
    versions = min(checkpoints + 1, run.rounds * share) if share < 1 else min(checkpoints + 1, run.rounds)
    states = trained * max(versions, 1.0) * trial.state_bytes if run.checkpoint_every else 0.0
    servers = checkpoints * trial.server_bytes if run.checkpoint_every else 0
    rows = sum(whole(name)[2] for name in dict.fromkeys(trial.examination.calls)) * ROW_BYTES
    return round(states + servers + trial.personal * trial.personal_bytes + trial.server_bytes + rows)
