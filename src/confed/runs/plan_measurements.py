"""Measurements of a short federation, from which :mod:`confed.runs.plan` computes what a run will take.

The federation has the recipe's own model, method and clients, with a few batches of every client's examples. Of many
clients a few are measured, and their replies are repeated for the others.
"""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from confed.data.examples import TableData
from confed.engines.local import InProcess, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.participation import Population
from confed.engines.usage import Timeline
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Reply
from confed.federation.protocols import ClientData
from confed.federation.state import MemoryStore, Store
from confed.recipes.recipe import Recipe
from confed.runs.cohorts import cohorts_of, participation_of
from confed.runs.encode import RunData
from confed.runs.evaluate import examine

MEASURED = 4
"""Clients that are measured in every step, if one takes less than :data:`SLOW` seconds; one otherwise."""

SLOW = 10.0


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
        self.timeline, self.step = Timeline(0), Step()

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`confed.engines.executor.Executor`."""
        replies: dict[tuple[object, ...], list[Reply]] = {}
        for number, call in enumerate(calls):
            kind = replies.setdefault((call.action, call.client.head, call.client.modalities), [])
            self.step.calls.append(call.client.id)
            if self._most is not None and len(kind) >= self._most and not call.session:
                yield Reply(call.client, kind[number % len(kind)].message)
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
    """Two rounds, an evaluation, the finish and the examination of a federation with a few batches per client.

    A client that fails is a RuntimeError.
    """
    train, others = batches * setup.local.batch_size, batches // 2 * setup.local.eval_batch_size

    def shorten(data: ClientData) -> ClientData:
        return data.shortened(train, others) if isinstance(data, TableData) else data

    observers = {name: shorten(data) for name, data in setup.observers.items()}
    short = replace(
        setup, population=_Fewer(setup.population, shorten), observers=observers, rounds=max(setup.rounds, 2)
    )
    everyone = setup.algorithm.secure_sum is not None  # of repeated masks no sum can be made
    executor = _Clock(short, workspace, None if everyone else MEASURED, clock)
    participation = participation_of(recipe.run, () if setup.algorithm.traits.centralised else run_data.clients)
    with tempfile.TemporaryDirectory(prefix="confed-plan-") as place:
        checkpoints = Checkpoints(Path(place) / "checkpoint", recipe.run.newest_checkpoints)
        store: Store = checkpoints.store if recipe.run.checkpoint_every else MemoryStore()
        by_size = recipe.run.sampling == "size"
        size, buffered = cohorts_of(recipe.run, setup.algorithm)
        simulation = Simulation(short, store, executor, size, participation, by_size, buffered=buffered)
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
