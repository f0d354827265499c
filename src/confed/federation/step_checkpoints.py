"""Checkpoints within a client's round: trained tensors, optimiser, random numbers and position, every so often.

A site that is killed does its request again: whatever came before training is computed again, and training goes on
from the last checkpoint, with the bits that it would have had. A method says by
:attr:`confed.federation.traits.Traits.steps_alone` that its objective keeps nothing between steps.
"""

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from confed.federation.atomic import private_folder, write_atomically
from confed.federation.params import copy_into
from confed.federation.state import ClientState
from confed.federation.wire import decode_state, encode_state

EVERY = "60 s"  # from one checkpoint to the next
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def read_interval(text: str) -> tuple[float, int]:
    """Seconds and steps from one checkpoint to the next, one of them 0, of "60", "5 min" or "500 steps"."""
    if (steps := re.fullmatch(r"(\d+) *steps?", text.strip())) is not None:
        return 0.0, int(steps[1])
    if (time_between := re.fullmatch(r"(\d+(?:\.\d*)?) *(s|min|h)?", text.strip())) is not None:
        return float(time_between[1]) * SECONDS[time_between[2] or "s"], 0
    raise ValueError(f"checkpoint must be seconds or steps, such as '60 s', '5 min' or '500 steps', got {text!r}")


@dataclass
class Position:
    """How far training has come: steps, updates of the parameters, and the sum of their losses."""

    step: int
    updates: int
    total: Tensor


class TrainingCheckpoint:
    """The checkpoint of one training, in a file."""

    def __init__(self, path: Path, every: tuple[float, int], tensors: Mapping[str, Tensor]) -> None:
        self._path, self._every, self._tensors = path, every, tensors
        self._written, self._step = time.monotonic(), 0  # when the last one was, and behind which step
        self._state: ClientState | None = None

    def position(self, optimizer: torch.optim.Optimizer, device: torch.device) -> Position:
        """Where training goes on, with tensors and optimiser as they were there; the beginning without a checkpoint."""
        try:
            self._state = decode_state(self._path.read_bytes())
        except (OSError, ValueError):  # none, or one that was cut
            return Position(0, 0, torch.zeros((), device=device))
        saved, scalars = self._state.tensors, self._state.scalars
        copy_into([self._tensors[name] for name in saved["tensors"]], list(saved["tensors"].values()))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved["optimizer"].items():
            number, _, key = name.partition("/")
            moments.setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        self._step = int(scalars["step"])
        return Position(self._step, int(scalars["updates"]), saved["loss"]["total"].to(device))

    def resume_random_numbers(self) -> None:
        """Torch's global generators as they were at the checkpoint, once."""
        if self._state is None:
            return
        cpu, *others = self._state.tensors["random"].values()
        torch.set_rng_state(cpu)
        self._state = None
        for number, state in enumerate(others):
            torch.cuda.set_rng_state(state, number)

    def save_if_due(self, position: Position, optimizer: torch.optim.Optimizer) -> None:
        """A new checkpoint, where the last is older than it may be."""
        seconds, steps = self._every
        if position.step - self._step < steps or time.monotonic() - self._written < seconds:
            return
        moments: dict[str, Tensor] = {}
        for number, entries in optimizer.state_dict()["state"].items():
            moments |= {f"{number}/{key}": value for key, value in entries.items() if value is not None}
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        random = {str(number): state for number, state in enumerate([torch.get_rng_state(), *cuda])}
        groups = {"tensors": dict(self._tensors), "optimizer": moments, "random": random}
        state = ClientState(
            {**groups, "loss": {"total": position.total}}, {"step": position.step, "updates": position.updates}
        )
        write_atomically(self._path, encode_state(state), sync=True)
        self._written, self._step = time.monotonic(), position.step


class StepCheckpoints:
    """The checkpoints of the request that a site has in hand; those of another one are removed."""

    training = TrainingCheckpoint

    def __init__(self, folder: Path, every: tuple[float, int]) -> None:
        self._folder, self._every = folder, every
        self._request, self._trainings = folder, 0

    def enter(self, request: str) -> None:
        """A request, by its digest."""
        self._request, self._trainings = self._folder / request, 0
        private_folder(self._folder)
        for other in self._folder.iterdir():
            if other != self._request:
                shutil.rmtree(other)

    def next_training(self, tensors: Mapping[str, Tensor]) -> TrainingCheckpoint:
        """The checkpoint of the next training of the request; a method may train more than once."""
        self._trainings += 1
        private_folder(self._request)
        return self.training(self._request / str(self._trainings), self._every, tensors)

    def leave(self) -> None:
        """The reply is on disk, and nothing is to be done again."""
        shutil.rmtree(self._folder, ignore_errors=True)
