"""Features of frozen layers in the simulator: files in a cache folder, counts of all processes."""

import json
import sys
from collections.abc import Callable, Iterable
from hashlib import sha256
from inspect import isroutine
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from confed.engines.perform import Setup, Workspace
from confed.federation.feature_files import FeatureFiles
from confed.federation.feature_store import FeatureStore
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures, tensors_before
from confed.federation.stages import Staged, frozen_stages, staged_part
from confed.system.release import VERSION

__all__ = ["WRITTEN_AFTER", "added", "attach", "keep_features"]

WRITTEN_AFTER = 1.0
"""Seconds of computing after which features are written to files; what takes less is computed again."""


def keep_features(setup: Setup, workspace: Workspace, processes: int = 1) -> FrozenFeatures | FeatureCounts:
    """Keeps features of the frozen layers of a process's model from now on.

    Args:
        setup: the run.
        workspace: the process's model.
        processes: among how many the memory is divided.

    Returns:
        What keeps them, or counts that say why nothing does.
    """
    settings = setup.features
    if settings is None:
        return FeatureCounts(reason="run.features is 'off'")
    if setup.compile:
        return FeatureCounts(reason="run.compile is true: a compiled pass has no stages")

    def files(kept: FrozenFeatures) -> FeatureFiles | None:
        if settings.folder is None:
            return None
        found = staged_part(workspace.model)
        assert found is not None
        return FeatureFiles(settings.folder / _address(found[1], kept.cut), settings.disk, kept.note)

    kept = attach(workspace.model, workspace.frozen, settings.memory // processes, files, tolerance=settings.tolerance)
    return kept if isinstance(kept, FrozenFeatures) else FeatureCounts(reason=kept)


def attach(
    model: nn.Module,
    frozen: frozenset[str],
    memory: int,
    files: Callable[[FrozenFeatures], FeatureFiles | None] = lambda _: None,
    tolerance: float = 0.0,
) -> FrozenFeatures | str:
    """Keeps what a model's frozen stages make from now on, or says why that is not done.

    Args:
        model: the model; a part of it may be what has stages.
        frozen: names of its tensors that nothing changes.
        memory: bytes for what is kept.
        files: makes the files of a cache.
        tolerance: see :class:`FrozenFeatures`.
    """
    found = staged_part(model)
    if found is None:
        return f"{type(model).__name__} does not say which stages its pass has"
    start, part = found
    assert isinstance(part, nn.Module)
    names = [name for name in part.state_dict(keep_vars=True) if f"{start}{name}" not in frozen]
    cut = min(frozen_stages(part, names), len(part.stages) - 1)
    if not cut:
        return f"the first stage ({part.stages[0].name}) is trained"
    held = [tensor for _, _, tensor in tensors_before(part, cut)]
    if any(tensor.device.type != "cpu" for tensor in held):
        return "only on a processor are features kept"
    kept = FrozenFeatures(part, cut, FeatureStore(memory), tolerance=tolerance)
    kept.store.files = files(kept)
    part.frozen_features = kept
    return kept


def added(counts: Iterable[FeatureCounts]) -> FeatureCounts:
    """Counts of all processes of a run."""
    total = FeatureCounts()
    for each in counts:
        total.stage = total.stage or each.stage
        total.reason = total.reason or each.reason
        total.computed += each.computed
        total.reused += each.reused
        total.held += each.held
        total.exact &= each.exact
        total.difference = max(total.difference, each.difference)
        total.notes += [note for note in each.notes if note not in total.notes]
    return total


@runtime_checkable
class _Configuration(Protocol):
    """A model's configuration, as the library ``transformers`` has it."""

    def to_dict(self) -> dict[str, Any]: ...


def _address(model: Staged, cut: int) -> str:
    """Digest of all that decides what the first stages of a model make of an example."""
    assert isinstance(model, nn.Module)
    library = sys.modules.get("transformers")
    versions = [VERSION, torch.__version__, str(library.__version__) if library is not None else ""]
    machine = [torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    known = sha256(json.dumps([versions, machine, [stage.name for stage in model.stages[:cut]]]).encode())
    described = [f"{name} {type(module).__name__} {_settings(module)}" for name, module in model.named_modules()]
    known.update("\n".join(described).encode())
    for _, key, tensor in tensors_before(model, cut):
        known.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        known.update(array)
    return known.hexdigest()[:32]


def _settings(module: nn.Module) -> str:
    """The plain values among a module's attributes, which are no part of its tensors, and its configuration."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, bool | int | float | str | tuple)
    }
    configurations = [value.to_dict() for value in vars(module).values() if isinstance(value, _Configuration)]
    return json.dumps([plain, configurations], default=_name, sort_keys=True)


def _name(value: object) -> str:
    return value.__qualname__ if isinstance(value, type) or isroutine(value) else type(value).__qualname__
