"""BlazeFL: clients in its pools of threads or of processes (values in shared memory); a way is ``threads 2``."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from blazefl.core import IPCMode, ProcessPoolClientTrainer, ThreadPoolClientTrainer
from blazefl.core.utils import SHMHandle
from torch import Tensor

from networks import learned, network_of, tensors, train
from work import Work, begun

WORK: list[Work] = []
LOCAL = threading.local()


@dataclass
class Package:
    """Values that travel; ``place`` is the client's in the round's cohort."""

    place: int
    values: dict[str, Any]


def epoch(round: int, place: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """A client's epoch in this thread's network."""
    work = WORK[0]
    if not hasattr(LOCAL, "model"):
        LOCAL.model = network_of(work)
    parameters = learned(LOCAL.model)
    with torch.no_grad():
        for name, tensor in values.items():
            parameters[name].copy_(tensor)
    train(LOCAL.model, work.size, map(tensors, work.batches(round, place)))
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


class Uplink:
    """The packages of a round, in the order of its clients."""

    cache: list[Package]

    def uplink_package(self) -> list[Package]:
        """Hands over what clients sent."""
        packages, self.cache = self.cache, []
        return packages


class Threads(Uplink, ThreadPoolClientTrainer[Package, Any]):
    """Clients in threads."""

    def __init__(self, count: int) -> None:
        self.num_parallels, self.device, self.device_count = count, "cpu", 0
        self.cache, self.stop_event = [], threading.Event()

    def worker(self, cid: int, device: str, payload: Any, stop_event: threading.Event) -> Package:
        """One client."""
        return Package(cid, epoch(*payload[:1], cid, payload[1]))


class Processes(Uplink, ProcessPoolClientTrainer[Package, Any, int]):
    """Clients in forked processes, which inherit the data."""

    def __init__(self, count: int) -> None:
        import torch.multiprocessing as mp

        self.num_parallels, self.device, self.device_count = count, "cpu", 0
        self.cache, self.ipc_mode = [], IPCMode.SHARED_MEMORY
        self.stop_event = mp.Manager().Event()

    def get_client_config(self, cid: int) -> int:
        """Its place in the cohort."""
        return cid

    def prepare_uplink_package_buffer(self) -> Package:
        """Room for what a client sends."""
        work = WORK[0]
        room = {name: torch.from_numpy(array.copy()) for name, array in work.initial.items() if work.learns(name)}
        return Package(-1, room)

    @staticmethod
    def worker(
        config: int, payload: Any, device: str, stop_event: threading.Event, *, shm_buffer: Package | None = None
    ) -> Package:
        """One client."""
        assert shm_buffer is not None
        for name, tensor in epoch(payload[0], config, payload[1]).items():
            shm_buffer.values[name].copy_(tensor)
        return Package(config, dict.fromkeys(shm_buffer.values, SHMHandle()))


def main() -> None:
    """All rounds."""
    work, way = begun()
    torch.set_num_threads(1)
    WORK.append(work)
    kind, count = way.split()
    trainer = Threads(int(count)) if kind == "threads" else Processes(int(count))
    state = {name: torch.from_numpy(array) for name, array in work.initial.items() if work.learns(name)}
    for round in range(work.size.rounds):
        trainer.local_process((round, state), list(range(work.size.cohort)))
        packages = trainer.uplink_package()
        state = {name: sum(package.values[name] for package in packages) / len(packages) for name in packages[0].values}
        if not round:
            work.began()
    work.ended({name: tensor.numpy() for name, tensor in state.items()})


if __name__ == "__main__":
    main()
