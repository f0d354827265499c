"""Rows of tensors by the digest of their example: in memory up to a budget, then in memory-mapped files.

All files of one folder hold what the same weights made of examples. A file is written under another name first, so
that several processes may share a folder; it is never changed. Files that are cut, of another version or damaged are
left aside, and one sentence says so.
"""

import json
import math
import mmap
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from confed.federation import batches
from confed.federation.protocols import Batch, FromRows
from confed.federation.stages import Staged

# Files of rows by the digest of their example: safetensors ----------------------------------------------------

VERSION = "confed features 1"  # what a file must be; another version is not read
DIGEST_BYTES = 16  # length of an example's digest


class Field(NamedTuple):
    """One tensor of a state."""

    dtype: torch.dtype  # of the tensor
    shape: tuple[int, ...]  # of the rows of one example

    @property
    def bytes(self) -> int:
        """Size of one example's rows."""
        return self.dtype.itemsize * prod(self.shape)


Layout = tuple[Field, ...]  # the tensors of a state


class Block:
    """Rows of one layout, in memory or in a file."""

    def __init__(self, fields: Sequence[Tensor], digests: list[bytes], origins: Tensor) -> None:
        self.fields, self.digests = fields, digests
        self.origins = origins  # numbers of the circumstances under which each row was computed
        self.layout = layout_of(fields)

    def sound(self, rows: Tensor) -> bool:
        """Whether rows are what was written."""
        return True


class Memory(Block):
    """Rows in memory that is reserved at once and taken when it is written."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        # Pages of an anonymous mapping are taken when they are first written.
        fields = [
            torch.frombuffer(_reserved(capacity * f.bytes), dtype=f.dtype, count=capacity * prod(f.shape)).view(
                capacity, *f.shape
            )
            for f in layout
        ]
        super().__init__(fields, [], torch.empty(capacity, dtype=torch.int32))
        self.capacity = capacity
        self.saved = 0  # number of its first rows that are in files

    def add(self, digests: Sequence[bytes], rows: Sequence[Tensor], origin: int) -> None:
        """Copies rows."""
        first, last = len(self.digests), len(self.digests) + len(digests)
        for column, given in zip(self.fields, rows, strict=True):
            column[first:last] = given
        self.origins[first:last] = origin
        self.digests.extend(digests)


class Shard(Block):
    """Rows in one file, mapped and not read yet."""

    def __init__(self, path: Path, number_of: Callable[[str], int] = lambda circumstances: 0) -> None:
        self.path = path
        try:
            opened: Any = safe_open(path, framework="pt")
            with opened as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("format") != VERSION:
                    raise ValueError(f"expected the format {VERSION!r}, got {metadata.get('format')!r}")
                fields = [file.get_tensor(f"field.{number}") for number in range(len(file.keys()) - 3)]
                digests, origins = file.get_tensor("digests"), file.get_tensor("origins")
                self._checks: Tensor = file.get_tensor("checks")
                numbers = torch.tensor([number_of(text) for text in json.loads(metadata["circumstances"])])
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(str(error)) from error
        n = len(digests)
        counts = {len(tensor) for tensor in (*fields, self._checks, origins)}
        if digests.shape != (n, DIGEST_BYTES) or digests.dtype != torch.uint8 or counts != {n} or not n:
            raise ValueError("its parts have different numbers of rows")
        flat = digests.numpy().tobytes()
        each = [flat[i : i + DIGEST_BYTES] for i in range(0, len(flat), DIGEST_BYTES)]
        super().__init__(fields, each, numbers[origins.long()])
        self._sound = torch.zeros(n, dtype=torch.bool)

    def sound(self, rows: Tensor) -> bool:
        """Whether rows are what was written; each is read once for this."""
        unread: Any = rows[~self._sound[rows]]
        for row in unread.tolist():
            if _check(self.fields, row) != int(self._checks[row]):
                return False
            self._sound[row] = True
        return True


class FeatureFiles:
    """The files of one folder."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        say: Callable[[str], None],
        number_of: Callable[[str], int] = lambda circumstances: 0,
    ) -> None:
        self.folder, self.limit, self.say, self._number_of = folder, limit, say, number_of
        self._seen = set[str]()
        self._modified = -1
        self._writes = True

    def new(self) -> list[Shard]:
        """The files that have come since the last look."""
        try:
            modified = self.folder.stat().st_mtime_ns
            if modified == self._modified:
                return []
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.say(f"the kept features in {self.folder} cannot be read ({error.strerror}); they are computed again")
            return []
        self._modified = modified
        opened = map(self._open, [name for name in names if name not in self._seen])
        return list(chain.from_iterable(opened))

    def _open(self, name: str) -> list[Shard]:
        """A file, if it is sound."""
        self._seen.add(name)
        try:
            return [Shard(self.folder / name, self._number_of)]
        except ValueError as error:
            self.say(f"kept features in {self.folder / name} are left aside and computed again: {error}")
            return []

    def write(self, memory: Memory, circumstances: Sequence[str]) -> list[Shard] | None:
        """Writes rows that are in no file yet; None where that cannot be done, which is said once."""
        if not self._writes:
            return None
        part = slice(memory.saved, len(memory.digests))
        rows, flat = [field[part].contiguous() for field in memory.fields], b"".join(memory.digests[part])
        count = len(memory.digests) - memory.saved
        # Two processes that computed the same examples write the same file.
        path = self.folder / f"{sha256(flat).hexdigest()[:32]}.safetensors"
        partial_file = self.folder / f"{path.name}.{os.getpid()}.part"
        tensors = {f"field.{number}": tensor for number, tensor in enumerate(rows)}
        tensors["digests"] = torch.frombuffer(bytearray(flat), dtype=torch.uint8).view(-1, DIGEST_BYTES)
        tensors["checks"] = torch.tensor([_check(rows, row) for row in range(count)], dtype=torch.int64)
        tensors["origins"] = memory.origins[part].contiguous()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not room_for(self.folder.parent, row_bytes(memory.layout) * count, self.limit, keep=self.folder):
                self._writes = False
                kept = self.folder.parent
                self.say(f"kept features in {kept} have reached {self.limit:,} bytes; no more are written")
                return None
            try:
                save_file(tensors, partial_file, {"format": VERSION, "circumstances": json.dumps(list(circumstances))})
                partial_file.chmod(0o600)
                partial_file.replace(path)
            finally:
                partial_file.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self._writes = False
            self.say(f"features cannot be kept in {self.folder} ({error}); this run goes on without")
            return None
        memory.saved = len(memory.digests)
        return self._open(path.name)


def room_for(folder: Path, size: int, limit: int, keep: Path) -> bool:
    """Whether ``size`` more bytes fit below a limit, once the folders that were used longest ago are removed."""
    total, folders = 0, list[tuple[float, int, Path]]()
    for each in folder.iterdir():
        if each.is_dir():
            held = sum(path.stat().st_size for path in each.iterdir() if path.is_file())
            total += held
            if each != keep:
                folders.append((each.stat().st_mtime, held, each))
    for _, held, each in sorted(folders):
        if total + size <= limit:
            break
        shutil.rmtree(each)
        total -= held
    return total + size <= limit


def _check(fields: Sequence[Tensor], row: int) -> int:
    value = 0
    for field in fields:
        array: Any = field[row].contiguous().view(-1).view(torch.uint8).numpy()
        value = zlib.crc32(array, value)
    return value


def _reserved(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, max(size, 1))
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Place(NamedTuple):
    """Where the rows of an example are kept."""

    block: Block
    row: int


def row_bytes(layout: Layout) -> int:
    """Size of what is kept of one example."""
    return sum(field.bytes for field in layout)


class FeatureStore:
    """Rows by digest."""

    def __init__(self, memory: int, files: FeatureFiles | None = None) -> None:
        self.memory, self.used = memory, 0
        self._memories: dict[Layout, Memory] = {}
        self._shards: list[Shard] = []
        self._places: dict[bytes, Place] = {}
        self.files: FeatureFiles | None = None
        self.keep_in(files)

    def __len__(self) -> int:
        return sum(len(memory.digests) for memory in self._memories.values())

    def keep_in(self, files: FeatureFiles | None) -> None:
        """Has rows written to files, and reads those that are there."""
        self.files = files
        self._enter([] if files is None else files.new())

    def _enter(self, shards: Sequence[Shard]) -> None:
        self._shards += shards
        for shard in shards:
            for row, digest in enumerate(shard.digests):
                self._places.setdefault(digest, Place(shard, row))

    def find(self, digests: Sequence[bytes]) -> list[Place] | None:
        """Where examples are kept; None unless all of them are."""
        try:
            return [self._places[digest] for digest in digests]
        except KeyError:
            if self.files is None or not (shards := self.files.new()):
                return None
            self._enter(shards)
            return self.find(digests)

    def origins(self, places: Sequence[Place]) -> list[int]:
        """Numbers of the circumstances under which rows were computed."""
        origins = torch.empty(len(places), dtype=torch.int64)
        for block, positions, rows in _by_block(places):
            origins[positions] = block.origins[rows].long()
        numbers: Any = origins
        return numbers.tolist()

    def rows(self, layout: Layout, places: Sequence[Place]) -> list[Tensor] | None:
        """What is kept of examples, each (B, ...) in the layout's order; None where a file turns out to be damaged."""
        parts = _by_block(places)
        for block, _, rows in parts:
            if block.layout != layout or not block.sound(rows):
                self.discard([Place(block, 0)])
                return None
        if len(parts) == 1:
            block, _, rows = parts[0]
            return [field[rows] for field in block.fields]
        gathered = [torch.empty(len(places), *field.shape, dtype=field.dtype) for field in layout]
        for block, positions, rows in parts:
            for whole, field in zip(gathered, block.fields, strict=True):
                whole[positions] = field[rows]
        return gathered

    def add(self, digests: Sequence[bytes], layout: Layout, rows: Sequence[Tensor], origin: int) -> bool:
        """Keeps rows of examples that are not kept yet; False where there is no room left."""
        new = {d: i for i, d in reversed(list(enumerate(digests))) if d not in self._places}
        if not new:
            return True
        if len(new) < len(digests):
            rows = [tensor[list(new.values())] for tensor in rows]
            digests = list(new)
        size = row_bytes(layout) * len(digests)
        if self.used + size > self.memory and not self._make_room(size):
            return False
        memory = self._memories.get(layout)
        if memory is None or len(memory.digests) + len(digests) > memory.capacity:
            try:
                memory = self._memories[layout] = Memory(layout, max(self.memory // max(row_bytes(layout), 1), 1))
            except (OSError, ValueError, MemoryError):  # the system does not reserve so much
                self.memory = self.used
                return False
        start = len(memory.digests)
        memory.add(digests, rows, origin)
        self._places.update((digest, Place(memory, start + i)) for i, digest in enumerate(digests))
        self.used += size
        return True

    def discard(self, places: Sequence[Place]) -> None:
        """Files in which rows are, damaged or stale, are not used any more, and removed where that can be done."""
        for shard in {place.block for place in places if isinstance(place.block, Shard)}:
            self._shards.remove(shard)
            self._places = {digest: place for digest, place in self._places.items() if place.block is not shard}
            if self.files is not None:
                self.files.say(f"kept features in {shard.path} are damaged or stale; they are computed again")
            with suppress(OSError):
                shard.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forgets everything in memory."""
        self._memories.clear()
        self._places.clear()
        shards, self._shards = self._shards, []
        self._enter(shards)
        self.used = 0

    def save(self, circumstances: Sequence[str]) -> bool:
        """Writes rows that no file has yet; False where nothing can be written."""
        if self.files is None:
            return False
        for memory in self._memories.values():
            if memory.saved < len(memory.digests):
                shards = self.files.write(memory, circumstances)
                if shards is None:
                    return False
                self._enter(shards)
        return True

    def _make_room(self, size: int) -> bool:
        """Memory is emptied where all that it holds is in files."""
        saved = all(memory.saved == len(memory.digests) for memory in self._memories.values())
        if self.files is None or size > self.memory or not saved or not self.used:
            return False
        self.clear()
        return True


def _by_block(places: Sequence[Place]) -> list[tuple[Block, Tensor, Tensor]]:
    """Blocks, each with the positions of its places, and their rows."""
    positions: dict[Block, list[int]] = {}
    for position, place in enumerate(places):
        positions.setdefault(place.block, []).append(position)
    parts = list[tuple[Block, Tensor, Tensor]]()
    for block, chosen in positions.items():
        parts.append((block, torch.tensor(chosen), torch.tensor([places[position].row for position in chosen])))
    return parts


Constants = tuple[type | None, tuple[int | None, ...]]  # type of a state, and its whole numbers where it has no tensors


class Seen(Mapping[str, Tensor]):
    """A batch that notes which of its keys are read or asked for."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self.read = batch, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return self._batch[key]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read.add(key)
        return key in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def tensors_before(model: nn.Module, cut: int) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that the first ``cut`` stages read, with the dictionary of their module and their key in it."""
    assert isinstance(model, Staged)
    stages = model.stages[:cut]
    within: Any = model
    for prefix, held in within.named_modules():
        for container in (held._parameters, held._buffers):
            for key, tensor in container.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and any(stage.reads(name) for stage in stages):
                    yield container, key, tensor


def count(batch: Batch) -> int:
    """Number of examples; of a table's rows without reading one."""
    return len(batch.rows) if isinstance(batch, FromRows) else batches.rows(batch)


def shapes(inputs: Iterable[str], batch: Batch) -> Hashable:
    """Types and shapes of an example's tensors."""
    tensors = {key: batch[key] for key in inputs if key in batch}
    return tuple((key, str(tensor.dtype), tuple(tensor.shape[1:])) for key, tensor in tensors.items())


def digests(inputs: Iterable[str], batch: Batch, kind: Hashable) -> Iterator[bytes]:
    """What stands for each example: a digest of everything that the stages may read of it."""
    common = sha256(repr(kind).encode())
    number = count(batch)
    arrays = [batch[key].contiguous().view(number, -1).view(torch.uint8).numpy() for key in inputs if key in batch]
    for row in range(number):
        digest = common.copy()
        for array in arrays:
            digest.update(array[row])
        yield digest.digest()[:DIGEST_BYTES]


def tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a state."""
    return [state] if isinstance(state, Tensor) else [item for item in state if isinstance(item, Tensor)]


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """The layout of tensors (B, ...)."""
    return tuple(Field(t.dtype, tuple(t.shape[1:])) for t in tensors)


def packed(state: Any, number: int) -> tuple[list[Tensor], Constants] | None:
    """A state as tensors (B, ...), and what of it is no tensor; None where that cannot be."""
    tensors = tensors_in(state)
    # Layers may round differently where values lie otherwise in memory.
    if any(len(tensor) % number or not tensor.is_contiguous() for tensor in tensors):
        return None
    each = tuple(len(tensor) // number for tensor in tensors)
    parts = [
        t.detach() if n == 1 else t.detach().view(number, n, *t.shape[1:]) for t, n in zip(tensors, each, strict=True)
    ]
    if isinstance(state, Tensor):
        return parts, (None, each)
    whole = tuple(None if isinstance(item, Tensor) else int(item) for item in state)
    return parts, (state.__class__, (*whole, *each))


def unpacked(tensors: Sequence[Tensor], constants: Constants) -> Any:
    """The state of which :func:`packed` made these parts."""
    kind, numbers = constants
    each = numbers[-len(tensors) :]
    whole = [t if n == 1 else t.flatten(0, 1) for t, n in zip(tensors, each, strict=True)]
    if kind is None:
        return whole[0]
    parts = iter(whole)
    return kind(*(next(parts) if number is None else number for number in numbers[: -len(tensors)]))


def stacked(client_states: Sequence[Any]) -> tuple[Any, Any]:
    """States of batches of one shape as one, with a dimension in front, and what ``vmap`` maps over: 0 or None."""
    first = client_states[0]
    if isinstance(first, Tensor):
        return torch.stack(list(client_states)), 0
    columns = [torch.stack(c) if isinstance(c[0], Tensor) else c[0] for c in zip(*client_states, strict=True)]
    return first.__class__(*columns), first.__class__(*(0 if isinstance(p, Tensor) else None for p in first))


def joined(client_states: Sequence[Any]) -> Any:
    """States of several batches as that of one batch with all their examples; see :func:`stacked`."""
    first = client_states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(client_states))
    columns = zip(*client_states, strict=True)
    return first.__class__(*(torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns))


def gap(stored: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Largest difference over the largest value; 0 for equal bits alone."""
    worst = 0.0
    for a, b in zip(stored, plain, strict=True):
        if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            continue
        if not a.is_floating_point():
            return math.inf
        apart = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        # -0 and 0 are equal numbers and no equal bits; NaN is as far from everything as can be.
        worst = max(worst, math.inf if math.isnan(apart) else max(apart, 5e-324))
    return worst
