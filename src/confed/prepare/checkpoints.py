"""Conversion of published checkpoints to safetensors files. The only part of confed that opens files made by pickle.

``torch.load`` runs here with ``weights_only=True``: it rebuilds tensors and plain containers and refuses
anything else, so a file cannot make it run code.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.data.refusals import existing, expecting, refuse
from confed.federation.file_names import Name
from confed.federation.reading import faults_of, read_bounded
from confed.models.albef import Albef, fit, rename_albef, sizes_of
from confed.models.pretrained import write_weights
from confed.models.scene_classifier import Architecture, build_scene_classifier, config_of

_PATTERNS = (
    (r"conv1\.weight", r"resnet.embedder.embedder.convolution.weight"),
    (r"bn1\.(\w+)", r"resnet.embedder.embedder.normalization.\1"),
    (r"fc\.(weight|bias)", r"classifier.1.\1"),
)
_BLOCK = re.compile(r"layer([1-4])\.(\d+)\.(?:(conv|bn)([1-3])|(downsample)\.([01]))\.(\w+)")


def convert_places365(source: Path, out: Path, architecture: Architecture | None = None) -> dict[str, Any]:
    """A published Places365 ResNet as a safetensors file that the scene classifier reads."""
    checkpoint, state = _tensors_of(source, out, "state_dict")
    arch = architecture or checkpoint.get("arch")
    if not isinstance(arch, str):
        refuse(source, "a checkpoint that says its architecture", arch, remedy="give --arch resnet18 or resnet50")
    tensors = _fit(source, _by_name(source, state, "state_dict"), arch)
    values = sum(t.numel() for n, t in tensors.items() if n.rpartition(".")[2] in ("weight", "bias"))
    return {"architecture": arch, "parameters": values, **_write(source, out, arch, tensors, config_of(arch))}


def convert_albef(source: Path, out: Path, heads: int | None = None) -> dict[str, Any]:
    """A published ALBEF as a safetensors file for :func:`confed.models.albef.albef`."""
    _, state = _tensors_of(source, out, "model")
    state = _by_name(source, state, "model")
    with expecting(source, "an ALBEF", ValueError, remedy=""):
        renamed = rename_albef(state)
        config = sizes_of(renamed, heads)
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in renamed.items()}
    with torch.device("meta"):
        expected = Albef(config, torch.Generator(device="cpu"))
    fit(expected, tensors, str(source))
    _check_finite(source, tensors)
    has_decoder = any(name.removeprefix("module.").startswith("text_decoder.") for name in state)
    return {
        "image_size": config.image_size,
        "decoder": "published" if has_decoder else "from the question encoder",
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        **_write(source, out, "albef", tensors, dataclasses.asdict(config)),
    }


def convert_model(source: Path, out: Path) -> dict[str, Any]:
    """A folder of ``transformers`` whose weights are pickles, as one with safetensors, which runs read."""
    from safetensors.torch import save_file

    index = source / "pytorch_model.bin.index.json"
    with faults_of(index, "an index of parts"):
        listed = json.loads(read_bounded(index))["weight_map"].values() if index.is_file() else ["pytorch_model.bin"]
        parts = sorted({str(Name(name, f"{index}: a part")) for name in listed})
    if out.exists():
        refuse(out, "a name that nothing has", found="a folder that exists already")
    tensors: dict[str, Tensor] = {}
    for checkpoint_part in parts:
        for name, tensor in _read(source / checkpoint_part).items():
            if not isinstance(tensor, Tensor):
                refuse(source / checkpoint_part, "tensors by name", found=f"{type(tensor).__name__} as {name!r}")
            tensors[str(name)] = tensor.contiguous().clone()
    unfinished = out.with_name(out.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for pattern in ("*.json", "*.txt", "*.model", "*.jinja"):
        for file in source.glob(pattern):
            if file != index:
                shutil.copyfile(file, unfinished / file.name)
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    unfinished.replace(out)
    values = sum(tensor.numel() for tensor in tensors.values())
    return {"tensors": len(tensors), "parameters": values, "sha256": _sha256(out / "model.safetensors")}


def _tensors_of(source: Path, out: Path, key: str) -> tuple[Mapping[str, Any], Any]:
    """A checkpoint and its state, which may be all of it."""
    if out.suffix != ".safetensors":
        refuse("the file to write", "a name that ends in .safetensors", found=out)
    checkpoint = _read(source)
    return checkpoint, checkpoint.get(key, checkpoint)


def _by_name(source: Path, state: Any, key: str) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        refuse(source, f"tensors by name under {key!r}", found=type(state).__name__)
    return {str(name): tensor for name, tensor in state.items()}


def _write(
    source: Path, out: Path, architecture: str, tensors: dict[str, Tensor], config: Mapping[str, Any]
) -> dict[str, str]:
    """Writes tensors and, beside them, their configuration; digests of what was read and written."""
    digest = _sha256(source)
    write_weights(out, tensors, {"architecture": architecture, "source_sha256": digest})
    text = json.dumps(config, indent=1, sort_keys=True)
    out.with_name(f"{out.stem}.config.json").write_text(text + "\n", encoding="utf-8")
    return {"source_sha256": digest, "sha256": _sha256(out)}


def rename_resnet(name: str) -> str:
    """Name in ``transformers`` of a tensor that torchvision's ResNet calls ``name``; a fault is a ValueError."""
    plain = name.removeprefix("module.")
    for pattern, replacement in _PATTERNS:
        if re.fullmatch(pattern, plain):
            return re.sub(pattern, replacement, plain)
    match = _BLOCK.fullmatch(plain)
    if match is None:
        refuse("a tensor", "a name of ResNet's", name)
    stage, block, kind, number, _, layer, last = match.groups()
    where = f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}"
    if kind:
        return f"{where}.layer.{int(number) - 1}.{'convolution' if kind == 'conv' else 'normalization'}.{last}"
    return f"{where}.shortcut.{'convolution' if layer == '0' else 'normalization'}.{last}"


def _read(source: Path) -> Mapping[str, Any]:
    existing(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    except Exception as error:
        # Not in the words of torch, which suggests to read the file without this protection.
        raise ValueError(f"{source}: refused, {_reason(error)}") from None
    if not isinstance(content, Mapping):
        refuse(source, "a mapping with 'state_dict'", found=type(content).__name__)
    return content


def _reason(error: Exception) -> str:
    """Reason why torch did not read a file; none of it was run."""
    name = re.search(r"GLOBAL ([\w.]+) was not an allowed global", str(error))
    if name:
        return f"since it asks for {name[1]}: only tensors and plain values are read, and nothing of it was run"
    return "or not readable: no checkpoint of tensors and plain values, but another kind of file or a damaged one"


def _fit(source: Path, state: Mapping[str, Tensor], arch: str) -> dict[str, Tensor]:
    """The tensors under their new names, complete and of the right shapes."""
    wanted = build_scene_classifier(arch).state_dict()
    with expecting(source, f"the tensors of a {arch}", ValueError, remedy=""):
        renamed = {rename_resnet(name): tensor for name, tensor in state.items()}
    # Counters of batch normalisation came with PyTorch 0.4.1; older checkpoints lack them, and nothing reads them.
    counters = {
        name: torch.zeros(t.shape, dtype=t.dtype) for name, t in wanted.items() if name.endswith("num_batches_tracked")
    }
    renamed = {**counters, **renamed}
    if renamed.keys() != wanted.keys():
        lacking, extra = sorted(wanted.keys() - renamed.keys())[:3], sorted(renamed.keys() - wanted.keys())[:3]
        refuse(source, f"the tensors of a {arch}", found=f"none of {lacking}, and {extra} (the first three)")
    for name, tensor in renamed.items():
        if tensor.shape != wanted[name].shape:
            expected = f"{name} of a {arch} of shape {tuple(wanted[name].shape)}"
            refuse(source, expected, found=tuple(tensor.shape))
    _check_finite(source, renamed)
    return {name: tensor.to(wanted[name].dtype).contiguous().clone() for name, tensor in renamed.items()}


def _check_finite(source: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            refuse(source, "finite values", found=f"others in {name}")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
