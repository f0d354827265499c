"""Rows of tensors by the digest of their example: in memory up to a budget, then in memory-mapped files.

All files of one folder hold what the same weights made of examples. A file is written under another name first, so
that several processes may share a folder; it is never changed. Files that are cut, of another version or damaged are
left aside, and one sentence says so.
"""

import json
import math
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from confed.federation.batches import rows
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


class Shard:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opened: Any = safe_open(path, framework="pt")
            with opened as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("format") != VERSION:
                    raise ValueError(f"expected the format {VERSION!r}, got {metadata.get('format')!r}")
                count = len(file.keys()) - 3
                # tensors of the layout, mapped and not read yet
                self.fields: list[Tensor] = [file.get_tensor(f"field.{number}") for number in range(count)]
                digests: Tensor = file.get_tensor("digests")
                self._checks: Tensor = file.get_tensor("checks")
                self._origins: Tensor = file.get_tensor("origins")
                self._circumstances: list[str] = json.loads(metadata["circumstances"])
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(str(error)) from error
        n = len(digests)
        shapes = {len(tensor) for tensor in (*self.fields, self._checks, self._origins)}
        if digests.shape != (n, DIGEST_BYTES) or digests.dtype != torch.uint8 or shapes != {n} or not n:
            raise ValueError("its parts have different numbers of rows")
        flat = digests.numpy().tobytes()
        self.digests = [flat[i : i + DIGEST_BYTES] for i in range(0, len(flat), DIGEST_BYTES)]  # of its examples
        self.layout: Layout = tuple(Field(t.dtype, tuple(t.shape[1:])) for t in self.fields)  # of its rows
        self._sound = torch.zeros(n, dtype=torch.bool)

    def sound(self, rows: Sequence[int]) -> bool:
        """Whether rows are what was written; each is read once for this."""
        for row in rows:
            if not self._sound[row]:
                if _check(self.fields, row) != int(self._checks[row]):
                    return False
                self._sound[row] = True
        return True

    def circumstance(self, row: int) -> str:
        """Under which circumstances a row was computed."""
        return self._circumstances[int(self._origins[row])]


class FeatureFiles:
    """The files of one folder."""

    def __init__(self, folder: Path, limit: int, say: Callable[[str], None]) -> None:
        self.folder, self.limit, self._say = folder, limit, say
        self.entries: dict[bytes, tuple[Shard, int]] = {}  # digest -> file and row
        self._seen = set[str]()
        self._modified = -1
        self._writes = True
        self.refresh()

    def refresh(self) -> bool:
        """Opens files that are new; whether there were some."""
        try:
            modified = self.folder.stat().st_mtime_ns
            if modified == self._modified:
                return False
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._say(f"the kept features in {self.folder} cannot be read ({error.strerror}); they are computed again")
            return False
        self._modified = modified
        new = [name for name in names if name not in self._seen]
        for name in new:
            self._open(name)
        return bool(new)

    def _open(self, name: str) -> None:
        self._seen.add(name)
        try:
            shard = Shard(self.folder / name)
        except ValueError as error:
            self._say(f"kept features in {self.folder / name} are left aside and computed again: {error}")
            return
        for row, digest in enumerate(shard.digests):
            self.entries.setdefault(digest, (shard, row))

    def discard(self, shard: Shard) -> None:
        """The rows of a file are forgotten, and the file is removed where that can be done."""
        self.entries = {digest: entry for digest, entry in self.entries.items() if entry[0] is not shard}
        self._say(f"kept features in {shard.path} are damaged or stale; they are computed again")
        try:
            shard.path.unlink(missing_ok=True)
        except OSError:
            return

    def write(
        self,
        digests: Sequence[bytes],
        layout: Layout,
        rows: Sequence[Tensor],
        origins: Tensor,
        circumstances: Sequence[str],
    ) -> bool:
        """Writes one file; False where that cannot be done, which is said once."""
        if not self._writes:
            return False
        size = row_bytes(layout) * len(digests)
        flat = b"".join(digests)
        # Two processes that computed the same examples write the same file.
        path = self.folder / f"{sha256(flat).hexdigest()[:32]}.safetensors"
        partial_file = self.folder / f"{path.name}.{os.getpid()}.part"
        tensors = {f"field.{number}": tensor.contiguous() for number, tensor in enumerate(rows)}
        tensors["digests"] = torch.frombuffer(bytearray(flat), dtype=torch.uint8).view(-1, DIGEST_BYTES)
        tensors["checks"] = torch.tensor([_check(rows, row) for row in range(len(digests))], dtype=torch.int64)
        tensors["origins"] = origins.contiguous()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not room_for(self.folder.parent, size, self.limit, keep=self.folder):
                self._writes = False
                self._say(
                    f"kept features in {self.folder.parent} have reached {self.limit:,} bytes; no more are written"
                )
                return False
            try:
                save_file(tensors, partial_file, {"format": VERSION, "circumstances": json.dumps(list(circumstances))})
                partial_file.chmod(0o600)
                partial_file.replace(path)
            finally:
                partial_file.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self._writes = False
            self._say(f"features cannot be kept in {self.folder} ({error}); this run goes on without")
            return False
        # Rows that were written are in memory; the file's own are for when that is used up.
        self._open(path.name)
        return True


def room_for(folder: Path, size: int, limit: int, keep: Path) -> bool:
    """Whether ``size`` more bytes fit below a limit, once the folders that were used longest ago are removed."""
    total, folders = 0, list[tuple[float, int, Path]]()
    for each in folder.iterdir():
        if each.is_dir():
            files = [path for path in each.iterdir() if path.is_file()]
            held = sum(path.stat().st_size for path in files)
            total += held
            if each != keep:
                folders.append((each.stat().st_mtime, held, each))
    for _, held, each in sorted(folders):
        if total + size <= limit:
            break
        for path in each.iterdir():
            path.unlink(missing_ok=True)
        each.rmdir()
        total -= held
    return total + size <= limit


def _check(fields: Sequence[Tensor], row: int) -> int:
    value = 0
    for field in fields:
        array: Any = field[row].contiguous().view(-1).view(torch.uint8).numpy()
        value = zlib.crc32(array, value)
    return value


# Rows of tensors by the digest of their example: in memory up to a budget -------------------------------------


class Place(NamedTuple):
    """Where the rows of an example are kept."""

    block: "Memory | Shard"  # memory or a file
    row: int  # number within it


def row_bytes(layout: Layout) -> int:
    """Size of what is kept of one example."""
    return sum(field.bytes for field in layout)


class Memory:
    """Rows of one layout in memory that is reserved at once and taken when it is written."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.layout, self.capacity, self.count = layout, capacity, 0
        self.digests: list[bytes] = []
        self.origins = torch.empty(capacity, dtype=torch.int32)
        # Pages of an anonymous mapping are taken when they are first written.
        self.fields = [
            torch.frombuffer(_reserved(capacity * f.bytes), dtype=f.dtype, count=capacity * prod(f.shape)).view(
                capacity, *f.shape
            )
            for f in layout
        ]

    def add(self, digests: Sequence[bytes], rows: Sequence[Tensor], origin: Tensor) -> int:
        """Copies rows; the number of the first one."""
        first, last = self.count, self.count + len(digests)
        for column, given in zip(self.fields, rows, strict=True):
            column[first:last] = given
        self.origins[first:last] = origin
        self.digests.extend(digests)
        self.count = last
        return first


class FeatureStore:
    """Rows by digest."""

    def __init__(self, memory: int, files: FeatureFiles | None = None) -> None:
        self.memory, self.files = memory, files
        self.used = 0
        self._memories: dict[Layout, Memory] = {}
        self._places: dict[bytes, Place] = {}
        self._unsaved: dict[Layout, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, digests: Sequence[bytes]) -> list[Place] | None:
        """Where examples are kept; None unless all of them are."""
        places = [self._places.get(digest) for digest in digests]
        if self.files is not None and None in places:
            places = [place or self._filed(digest) for place, digest in zip(places, digests, strict=True)]
            if None in places and self.files.refresh():
                places = [place or self._filed(digest) for place, digest in zip(places, digests, strict=True)]
        stored_places = [place for place in places if place is not None]
        return stored_places if len(stored_places) == len(digests) else None

    def _filed(self, digest: bytes) -> Place | None:
        assert self.files is not None
        entry = self.files.entries.get(digest)
        return None if entry is None else Place(*entry)

    def origins(self, places: Sequence[Place]) -> list[int | str]:
        """Under which circumstances rows were computed: numbers of this process, or texts of files."""
        blocks = {id(place.block): place.block for place in places}
        if len(blocks) == 1 and isinstance(block := next(iter(blocks.values())), Memory):
            rows = torch.tensor([place.row for place in places])
            numbers: Any = block.origins[rows]
            return numbers.tolist()
        return [
            int(p.block.origins[p.row]) if isinstance(p.block, Memory) else p.block.circumstance(p.row) for p in places
        ]

    def rows(self, layout: Layout, places: Sequence[Place]) -> list[Tensor] | None:
        """What is kept of examples, each (B, ...) in the layout's order; None where a file turns out to be damaged."""
        blocks: dict[int, tuple[Memory | Shard, list[int]]] = {}
        for position, place in enumerate(places):
            blocks.setdefault(id(place.block), (place.block, []))[1].append(position)
        for block, positions in blocks.values():
            if block.layout != layout or (
                isinstance(block, Shard) and not block.sound([places[p].row for p in positions])
            ):
                self.discard([Place(block, 0)])
                return None
        if len(blocks) == 1:
            block = next(iter(blocks.values()))[0]
            chosen = torch.tensor([place.row for place in places])
            return [field[chosen] for field in block.fields]
        gathered = [torch.empty(len(places), *field.shape, dtype=field.dtype) for field in layout]
        for block, positions in blocks.values():
            chosen, where = torch.tensor([places[p].row for p in positions]), torch.tensor(positions)
            for whole, field in zip(gathered, block.fields, strict=True):
                whole[where] = field[chosen]
        return gathered

    def add(self, digests: Sequence[bytes], layout: Layout, rows: Sequence[Tensor], origin: int) -> bool:
        """Keeps rows of examples that are not kept yet; False where there is no room left."""
        filed = self.files.entries if self.files is not None else {}
        new = {d: i for i, d in reversed(list(enumerate(digests))) if d not in self._places and d not in filed}
        if not new:
            return True
        if len(new) < len(digests):
            rows = [tensor[list(new.values())] for tensor in rows]
            digests = list(new)
        size = row_bytes(layout) * len(digests)
        if self.used + size > self.memory and not self._make_room(size):
            return False
        memory = self._memories.get(layout)
        if memory is None or memory.count + len(digests) > memory.capacity:
            try:
                memory = self._memories[layout] = Memory(layout, max(self.memory // max(row_bytes(layout), 1), 1))
            except (OSError, ValueError, MemoryError):  # the system does not reserve so much
                self.memory = self.used
                return False
        start = memory.add(digests, rows, torch.tensor(origin, dtype=torch.int32))
        self._places.update((digest, Place(memory, start + i)) for i, digest in enumerate(digests))
        self.used += size
        return True

    def discard(self, places: Sequence[Place]) -> None:
        """The files in which rows are, damaged or stale, are not used any more."""
        for shard in {id(place.block): place.block for place in places}.values():
            if self.files is not None and isinstance(shard, Shard):
                self.files.discard(shard)

    def clear(self) -> None:
        """Forgets everything in memory."""
        self._memories.clear()
        self._unsaved.clear()
        self._places.clear()
        self.used = 0

    def save(self, circumstances: Sequence[str]) -> bool:
        """Writes rows that no file has yet; False where nothing can be written."""
        if self.files is None:
            return False
        for layout, memory in self._memories.items():
            first = self._unsaved.get(layout, 0)
            if first == memory.count:
                continue
            rows = [field[first : memory.count] for field in memory.fields]
            origins = memory.origins[first : memory.count]
            if not self.files.write(memory.digests[first:], layout, rows, origins, circumstances):
                return False
            self._unsaved[layout] = memory.count
        return True

    def _make_room(self, size: int) -> bool:
        """Memory is emptied where all that it holds is in files."""
        saved = all(self._unsaved.get(layout, 0) == memory.count for layout, memory in self._memories.items())
        if self.files is None or size > self.memory or not saved or not self.used:
            return False
        self.clear()
        return True


def _reserved(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, max(size, 1))
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
    return len(batch.rows) if isinstance(batch, FromRows) else rows(batch)


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
