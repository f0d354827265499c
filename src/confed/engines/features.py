"""Features of frozen layers in the simulator: files in a cache folder, counts of all processes."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from importlib.metadata import version
from inspect import isroutine
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from confed.engines.perform import Setup, Workspace
from confed.engines.ray.speed import fingerprint
from confed.federation.feature_store import FeatureFiles, FeatureStore
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures, tensors_before
from confed.federation.stages import Staged, frozen_stages, staged_part

WRITTEN_AFTER = 1.0
"""Seconds of computing after which features are written to files; what takes less is computed again."""


def keep_features(setup: Setup, workspace: Workspace, processes: int = 1) -> FrozenFeatures | FeatureCounts:
    """Keeps features of the frozen layers of a process's model from now on."""
    settings = setup.features
    if settings is None:
        return FeatureCounts(reason="run.features is 'off'")
    if setup.compile:
        return FeatureCounts(reason="run.compile is true: a compiled pass has no stages")

    def files(kept: FrozenFeatures) -> FeatureFiles | None:
        if settings.folder is None:
            return None
        staged = staged_part(workspace.model)
        assert staged is not None
        address = _address(staged[1], kept.cut)
        if not address:
            kept.note("a part of the model has no source file, so that features are kept for this run alone")
            return None
        return FeatureFiles(settings.folder / address, settings.disk, kept.note)

    kept = attach(workspace.model, workspace.frozen, settings.memory // processes, files, tolerance=settings.tolerance)
    return kept if isinstance(kept, FrozenFeatures) else FeatureCounts(reason=kept)


def attach(
    model: nn.Module,
    frozen: frozenset[str],
    memory: int,
    files: Callable[[FrozenFeatures], FeatureFiles | None] = lambda _: None,
    tolerance: float = 0.0,
) -> FrozenFeatures | str:
    """Keeps what a model's frozen stages make from now on, or says why that is not done."""
    staged = staged_part(model)
    if staged is None:
        return f"{type(model).__name__} does not say which stages its pass has"
    start, stages = staged
    assert isinstance(stages, nn.Module)
    names = [name for name in stages.state_dict(keep_vars=True) if f"{start}{name}" not in frozen]
    cut = min(frozen_stages(stages, names), len(stages.stages) - 1)
    if not cut:
        return f"the first stage ({stages.stages[0].name}) is trained"
    held = [tensor for _, _, tensor in tensors_before(stages, cut)]
    if any(tensor.device.type != "cpu" for tensor in held):
        return "only on a processor are features kept"
    kept = FrozenFeatures(stages, cut, FeatureStore(memory), tolerance=tolerance)
    kept.store.files = files(kept)
    stages.frozen_features = kept
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
    """Digest of all that decides what the first stages of a model make of an example; "" where that is not known."""
    assert isinstance(model, nn.Module)
    files = {getattr(sys.modules.get(type(module).__module__), "__file__", None) for module in model.modules()}
    sources = [file for file in files if file is not None]
    if len(sources) < len(files):
        return ""  # a class of a notebook, say, which may have another pass next time
    arithmetic = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    arithmetic += [torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic]
    made_by = [fingerprint(torch.get_num_threads()), version("pillow"), arithmetic]
    stages = [stage.name for stage in model.stages[:cut]]
    # What a processor makes of pictures is decided by its settings, which the variant stands for.
    hasher = sha256(json.dumps([made_by, stages, model.stage_variant]).encode())
    for file in sorted(sources):
        hasher.update(Path(file).read_bytes())
    described = [f"{name} {type(module).__name__} {_settings(module)}" for name, module in model.named_modules()]
    hasher.update("\n".join(described).encode())
    for _, key, tensor in tensors_before(model, cut):
        hasher.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        hasher.update(array)
    return hasher.hexdigest()[:32]


def _settings(module: nn.Module) -> str:
    """The plain values among a module's attributes, which are no part of its tensors, and its configuration."""
    of_torch = {"training", "frozen_features", *vars(nn.Module())}
    return json.dumps({name: _plain(value) for name, value in vars(module).items() if name not in of_torch})


def _plain(value: object) -> object:
    """A value as JSON; of what is no value its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, _Configuration):  # which leaves out how attention is computed
        attention = vars(value).get("_attn_implementation_internal")
        return {"attention": str(attention), **cast("dict[str, object]", _plain(value.to_dict()))}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        return {str(key): _plain(entry) for key, entry in sorted(entries.items(), key=lambda pair: str(pair[0]))}
    return value.__qualname__ if isinstance(value, type) or isroutine(value) else type(value).__qualname__
