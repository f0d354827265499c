"""The section ``[run]`` of a recipe: how a run is carried out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from confed.federation.compression import Compression
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, Range, check_fields

SEEDS = Range(-(2**62), 2**62)
"""What torch's generators take, with room for the seeds of a study, which are counted from the first."""


@dataclass(frozen=True)
class Asynchronous:
    """Asynchronous rounds (:mod:`confed.engines.buffered`).

    Attributes:
        buffer: updates that the server waits for before it makes a step, while ``cohort`` clients train at any time; 0
            for synchronous rounds.
        staleness: exponent a by which an update that began τ rounds ago counts (1 + τ)^-a.
        delays: what training times are drawn from, in the simulator.
    """

    buffer: Annotated[int, NOT_NEGATIVE] = 0
    staleness: Annotated[float, NOT_NEGATIVE] = 0.5
    delays: Literal["half-normal", "exponential", "examples", "equal"] = "half-normal"

    def __post_init__(self) -> None:
        check_fields(self, "run.async")


@dataclass(frozen=True)
class KeptFeatures:
    """Outputs of frozen layers that are computed once per example and kept.

    Attributes:
        keep: whether they are: "auto", in memory and, where they take more than a second, in files for other processes
            and later runs; "memory"; "off". No number changes.
        memory: gigabytes of memory for them, in all processes together.
        disk: gigabytes of files, of all runs of this user together; the oldest ones make room.
        tolerance: largest relative difference at which an output computed in a batch of another size is used; 0: none
            but the same bits.
    """

    keep: Literal["auto", "memory", "off"] = "auto"
    memory: Annotated[float, NOT_NEGATIVE] = 1.0
    disk: Annotated[float, NOT_NEGATIVE] = 4.0
    tolerance: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "run.features")


@dataclass(frozen=True)
class RunSection:
    """How a run is carried out.

    Attributes:
        rounds: communication rounds T.
        cohort: clients per round, a whole number; a share of those present if below 1; all of them if 0.
        async_: asynchronous rounds.
        uplink: what clients leave out of their updates (:mod:`confed.federation.compression`).
        downlink: what servers leave out of the models that they send to clients that train.
        sampling: how cohorts are drawn: "uniform", or "size": with probabilities proportional to the clients' numbers
            of training examples, one after the other without replacement.
        joins: client -> the first round, from 1, in which it may take part; the others are there from the start.
        leaves: client -> the first round, from 1, in which it no longer takes part.
        without: clients of the data that have no part in the run: as if they had never been.
        seed: of data sampling, fresh initial values, cohorts, orders and dropout.
        engine: "local", or "ray": clients are computed by actors on the nodes of a Ray cluster.
        address: of that cluster: HOST:PORT of its head, "auto" for the one that this machine belongs to, or "" to start
            Ray on this machine for the run.
        workers: processes or actors that compute clients; 0 means one per free core, at most one per client; on a
            cluster one per core, or per GPU with ``device``.
        start_method: how these start: "fork", "spawn", or "auto": spawn on Windows, on macOS and after CUDA was used,
            else fork.
        threads: threads per process. On few cores one thread and several workers beat several threads.
        device: "cpu", "cuda" or "auto"; with several GPUs, workers are spread over them.
        device_data: gigabytes of the GPU's memory for clients' examples, in all processes of this machine together.
            What fits is moved once, and batches are gathered there; the rest is moved batch by batch, as with 0. No
            number changes. Not in Ray's actors and at sites.
        checkpoint_every: rounds between checkpoints; 0 for none.
        checkpoint_seconds: least time between checkpoints.
        keep_checkpoints: how many stay on disk; "joins" for two, and besides the last ones before clients joined, from
            which ``confed forget`` can start.
        evaluate_every: rounds between evaluations on validation data; 0 for none but the last.
        evaluate_examples: validation examples per client in those; 0 for all.
        keep_personal: clients keep their own version of the shared tensors after every round.
        gallery: sample questions per place in the report.
        controls: "all": the final models are also tried with permuted and blank inputs, and beside answers that see no
            picture (controls); "none" saves that time.
        batch_clients: how many clients of a cohort are trained at once, and how many own models evaluated, their
            parameters stacked (together): faster where models are small. Results are those of one
            by one but for rounding. In one process; methods, models and settings that cannot have it are trained one by
            one, and the run says why. "auto": a number that follows from the recipe, above 1 where that is known to be
            twice as fast; ``--plan`` says which, and the run keeps it (:mod:`confed.runs.at_once`). 1 gives the bits of
            versions before.
        compile: models are compiled (``torch.compile``): takes a minute or more before the first step and pays in long
            runs on a GPU. Numbers differ by rounding; features of frozen layers are not kept; not with
            ``batch_clients``.
        features: outputs of frozen layers, computed once per example and kept.
        modality_matrix: the final models are also tried with every set of modalities, where examples have several.
        measures: further measures of the final models on test examples (:class:`confed.federation.measure.Measure`),
            such as "top-5" and "macro-F1"; each with columns, a figure, frames and paired tests.
    """

    rounds: Annotated[int, AT_LEAST_ONE] = 6
    cohort: Annotated[float, NOT_NEGATIVE] = 0.0
    sampling: Literal["uniform", "size"] = "uniform"
    async_: Asynchronous = Asynchronous()
    uplink: Compression = field(default=Compression())
    downlink: Compression = field(default=Compression())
    seed: Annotated[int, SEEDS] = 0
    workers: Annotated[int, NOT_NEGATIVE] = 0
    engine: Literal["local", "ray"] = "local"
    address: str = ""
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    threads: Annotated[int, AT_LEAST_ONE] = 1
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    device_data: Annotated[float, NOT_NEGATIVE] = 0.0
    checkpoint_every: Annotated[int, NOT_NEGATIVE] = 1
    checkpoint_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    keep_checkpoints: Annotated[int | Literal["joins"], AT_LEAST_ONE] = 2
    evaluate_every: Annotated[int, NOT_NEGATIVE] = 1
    evaluate_examples: Annotated[int, NOT_NEGATIVE] = 200
    keep_personal: bool = True
    gallery: Annotated[int, NOT_NEGATIVE] = 3
    controls: Literal["all", "none"] = "all"
    modality_matrix: bool = True
    batch_clients: Annotated[int | Literal["auto"], AT_LEAST_ONE] = "auto"
    compile: bool = False
    features: KeptFeatures = KeptFeatures()
    joins: Mapping[str, int] = field(default_factory=dict[str, int])
    leaves: Mapping[str, int] = field(default_factory=dict[str, int])
    without: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "run")
        check_fields(self.uplink, "run.uplink")
        check_fields(self.downlink, "run.downlink")
        if self.address and self.engine != "ray":
            raise ValueError(
                f"run.address is that of a Ray cluster and needs run.engine = 'ray', got {self.engine!r} with "
                f"{self.address!r}"
            )
        stacks = self.batch_clients not in ("auto", 1)
        if stacks and (self.workers > 1 or self.engine != "local"):
            raise ValueError(
                f"run.batch_clients = {self.batch_clients} trains clients at once in one process and needs "
                f"run.workers = 1 and run.engine = 'local', got {self.workers} and {self.engine!r}"
            )
        if stacks and self.compile:
            raise ValueError(
                f"run.compile = true compiles the model of one client, and run.batch_clients must be 1 then, got "
                f"{self.batch_clients}"
            )
        if self.cohort > 1 and self.cohort != int(self.cohort):
            raise ValueError(f"run.cohort must be a whole number of clients, or a share below 1, got {self.cohort}")
        if self.async_.buffer and self.sampling == "size":
            raise ValueError("run.sampling must be 'uniform' in asynchronous rounds (run.async.buffer), got 'size'")
        if self.keep_checkpoints == "joins" and not self.checkpoint_every:
            raise ValueError("run.keep_checkpoints = 'joins' needs run.checkpoint_every of at least 1, got 0")
        for client, first in self.joins.items():
            if not 1 <= first <= self.rounds:
                raise ValueError(f"run.joins.{client} must be a round from 1 to {self.rounds}, got {first}")
        for client, end in self.leaves.items():
            first = self.joins.get(client, 1)
            if not first < end <= self.rounds:
                raise ValueError(
                    f"run.leaves.{client} must be a round after {first}, in which it joins, and at most {self.rounds}, "
                    f"got {end}"
                )

    @property
    def newest_checkpoints(self) -> int:
        """Number of the newest checkpoints that stay on disk."""
        return 2 if self.keep_checkpoints == "joins" else self.keep_checkpoints

    def cohort_size(self, population: int) -> int:
        """Clients per round out of ``population``."""
        size = self.cohort or population
        return max(1, round(size * population)) if size < 1 else min(int(size), population)
