"""Serialisation of messages and states: safetensors with scalars as JSON in the header, no pickle."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from confed.federation.messages import Message
from confed.federation.params import Scalar
from confed.federation.reading import faults_of
from confed.federation.state import ClientState

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
STORABLE = tuple(_DTYPES)  # dtypes that messages, states and files hold
_encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # making an encoder takes longer
# safetensors lays tensors out by decreasing rank of their dtype, then by name.
_RANK = {t: r for r, t in enumerate(["BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64"])}


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Contiguous CPU tensors that share no memory, as the format demands.
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def encode(message: Message) -> bytes:
    """Serialised message."""
    metadata = {"scalars": json.dumps(dict(message.scalars))} if message.scalars else None
    return save(_unshared(_flat(message.tensors)), metadata)


def decode(data: bytes) -> Message:
    """Message from its serialised bytes.

    Bytes that are not a message are a ValueError.
    """  # noqa: DOC501 (faults_of makes the TypeError a ValueError)
    with faults_of("the bytes", "a message"):
        tensors = _tensors(data)
        scalars = json.loads(_metadata(data).get("scalars", "{}"))
        if not isinstance(scalars, dict):
            raise TypeError(f"a message's scalars must be named, got {scalars!r:.80}")
        return Message(tensors, cast(dict[str, Scalar], scalars))


def encode_state(state: ClientState) -> bytes:
    """A client's state as bytes.

    All tensors of a dtype lie in one, end to end, as safetensors spends more on each tensor than on its bytes; the
    index in the header has every tensor's group, name, dtype and shape.
    """
    ends = dict[str, list[Tensor]]()
    index = list[tuple[str, str, str, list[int]]]()
    for group, tensors in state.tensors.items():
        for name, tensor in tensors.items():
            dtype = _DTYPES[tensor.dtype]
            index.append((group, name, dtype, list(tensor.shape)))
            ends.setdefault(dtype, []).append(tensor.detach().cpu().reshape(-1))
    metadata = {
        "groups": json.dumps(list(state.tensors)),
        "index": json.dumps(index),
        "scalars": json.dumps(state.scalars),
    }
    packed = {dtype: torch.cat(ends[dtype]) for dtype in sorted(ends, key=_RANK.__getitem__, reverse=True)}
    # In the order of their names: equal states are equal bytes.
    header: dict[str, object] = {"__metadata__": {"digest": _digest(packed, metadata), **metadata}}
    begin = 0
    for dtype, values in packed.items():
        end = begin + values.nbytes
        header[dtype] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [begin, end]}
        begin = end
    text = _encoded(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *map(_bytes, packed.values())])


def decode_state(data: bytes) -> ClientState:
    """A client's state from its bytes.

    Bytes that are not a client's state are a ValueError.
    """
    with faults_of("the bytes", "a client's state"):
        return _state(data)


def _state(data: bytes) -> ClientState:
    packed, metadata = _tensors(data), _metadata(data)
    try:
        return _unpacked(packed, metadata)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # Of an index that does not describe the tensors, or of metadata of another form.
        raise ValueError(f"a damaged client's state: {type(error).__name__}: {str(error)[:200]}") from error


def _unpacked(packed: Mapping[str, Tensor], metadata: dict[str, str]) -> ClientState:
    if "index" not in metadata:
        raise ValueError("not a client's state: the header has no index")
    index = json.loads(metadata["index"])
    if any(len(entry) != 4 for entry in index):
        raise ValueError("a client's state in an earlier form, which this version of confed does not read")
    if metadata.pop("digest", None) != _digest(packed, metadata):
        raise ValueError("a damaged client's state: its digest differs from the one recorded")
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in json.loads(metadata["groups"])}
    begins = dict.fromkeys(packed, 0)
    for group, name, dtype, shape in index:
        end = begins[dtype] + math.prod(shape)
        # a copy each: a tensor that is kept must not keep all the others.
        groups[group][name] = packed[dtype][begins[dtype] : end].reshape(shape).clone()
        begins[dtype] = end
    if any(begins[dtype] != len(values) for dtype, values in packed.items()):
        raise ValueError("a damaged client's state: its index leaves values out")
    return ClientState(dict(groups), json.loads(metadata["scalars"]))


def size(message: Message) -> int:
    """Bytes of ``encode(message)``, computed from the header alone."""
    shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in message.tensors.items())
    return _payload(shapes, json.dumps(dict(message.scalars)) if message.scalars else "")


@lru_cache(maxsize=256)
def _entries(shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[int, int]:
    header: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in sorted(shapes, key=lambda e: (-_RANK[_DTYPES[e[1]]], e[0])):
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + count]}
        offset += count
    return len(_encoded(header).encode()), offset


def _payload(shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], scalars: str) -> int:
    length, data = _entries(shapes)
    if scalars:
        # In a text of JSON these alone are written with a backslash in front.
        escaped = scalars.count('"') + scalars.count("\\")
        length += len('"__metadata__":{"scalars":""}') + len(scalars) + escaped + (1 if shapes else 0)
    return 8 + -(-length // 8) * 8 + data


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensors[name] = tensor.clone()
        seen.add(pointer)
    return tensors


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name in sorted(tensors):
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensors(data: bytes) -> dict[str, Tensor]:
    try:
        return load(data)
    except Exception as error:  # safetensors raises its own types and, for short input, built-in ones
        raise ValueError(f"not a safetensors file of {len(data)} bytes: {error}") from error


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__") or {}
