"""Handshake before the first round: method, settings, version and values that all parties must share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from confed.engines.perform import Setup, Workspace
from confed.engines.remote.protocol import printable
from confed.federation.params import Scalar
from confed.system.release import VERSION

_MEANINGS = {
    "version": "the version of confed",
    "terms": "the recipe (method, model with its revision, task, local training, run), with its answers and words,",
    "tensors": "the names and shapes of the model's tensors",
    "values": "the values that the model starts from, such as those of its frozen backbone (a revision has its own),",
}


@dataclass(frozen=True)
class Fingerprint:
    """Digests of what all parties must share.

    Attributes:
        terms: of the method and its settings, and of what the caller of :func:`fingerprint` adds.
        tensors: of the names, shapes and dtypes of the model's tensors.
        values: of the values that every party starts from, frozen ones included.
    """

    version: str
    terms: str
    tensors: str
    values: str

    def scalars(self) -> dict[str, Scalar]:
        """As they are sent."""
        return asdict(self)

    def differences(self, other: Mapping[str, Scalar], mine: str, others: str) -> str | None:
        """In which way the other party's differs, in words; None if it does not."""
        lines = [
            f"{meaning} must be the same: {mine} has {value_here}, {others} has "
            f"{printable(str(other.get(name, 'none')), 64)}"
            for name, meaning in _MEANINGS.items()
            if (value_here := self.scalars()[name]) != other.get(name)
        ]
        return "; ".join(lines) or None


def fingerprint(setup: Setup, workspace: Workspace, common: str = "") -> Fingerprint:
    """A run's fingerprint."""
    terms = (setup.algorithm, setup.local, setup.rounds, setup.seed, setup.keep_personal, common)
    tensors = {**workspace.tensors, **workspace.initial}
    names, values = blake2b(digest_size=16), blake2b(digest_size=16)
    for name in sorted(tensors):
        names.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        values.update(_bytes(tensors[name]))
    return Fingerprint(
        VERSION, blake2b(repr(terms).encode(), digest_size=16).hexdigest(), names.hexdigest(),
        values.hexdigest(),
    )  # fmt: skip


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
