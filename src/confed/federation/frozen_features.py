"""Outputs of frozen layers, computed once per example: rounds, evaluations and teachers continue from there.

The stages of a model (:mod:`confed.federation.stages`) in front of its first trained tensor make the same of an example
whenever they are asked. What they make is kept under a digest of the bytes that they read, so that nothing needs to
know where a batch comes from: a mirrored picture or an altered question is another example.

Numbers do not change. Layers may round differently in batches of another size, in training mode or without gradients;
therefore what was computed under some circumstances is used under others only after a whole batch was computed under
both and had the same bits. Circumstances keep nothing where results differ when they are computed twice, as with
dropout, or with the examples in another order: kernels take several rows at once, and the last ones by themselves.
Where all frozen stages compute examples alone, neither size nor order matters, and a batch computes what it lacks.
A tensor of the frozen stages that was changed ends it all.
"""

import math
import time
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confed.federation import feature_store as states
from confed.federation.feature_store import (
    Constants,
    FeatureStore,
    Layout,
    Place,
    Seen,
    count,
    row_bytes,
    tensors_before,
)
from confed.federation.protocols import Batch, FromRows
from confed.federation.stages import Staged

# Settings of keeping features of frozen layers, and counts of what that saved ---------------------------------


@dataclass(frozen=True)
class FeatureSettings:
    """How features of frozen layers are kept."""

    memory: int  # bytes in the memory of one process
    folder: Path | None = None  # cache folder on disk; None for memory alone
    disk: int = 0  # bytes that the cache folder may hold
    tolerance: float = 0.0  # relative difference between features from batches of different sizes that counts as none


@dataclass
class FeatureCounts:
    """What was computed and what was saved, by one process."""

    stage: str = ""  # the last frozen stage; empty where nothing is kept
    computed: int = 0  # examples that went through the frozen stages
    reused: int = 0  # examples that did not have to
    held: int = 0  # bytes in memory
    exact: bool = True  # whether all that was used had the very bits that would have been computed
    difference: float = 0.0  # largest relative difference that was accepted
    reason: str = ""  # why nothing is kept, or no longer
    notes: list[str] = field(default_factory=list[str])  # what was found on the way


# Outputs of frozen layers, computed once per example: rounds --------------------------------------------------


PATIENCE = 8  # batches in vain after which circumstances are given up, and batches after which costs are compared
FEW = 8  # the first batch is tried in at most so many further orders: backwards, and moved on by fewer places than this
SLOWER = 3  # comparisons of costs in a row, that were in favour of computing, after which nothing is kept
STALE = 1e-3  # difference that is no rounding: what a file holds was not made by these weights


class FrozenFeatures:
    """What the first stages of a model made of examples."""

    def __init__(self, model: nn.Module, cut: int, store: FeatureStore, *, tolerance: float = 0.0) -> None:
        assert isinstance(model, Staged)
        self.cut, self.store, self.tolerance = cut, store, tolerance
        # how often the examples that come now are read in all; None where this is not known
        self.passes: int | None = None
        self.counts = FeatureCounts(stage=model.stages[cut - 1].name)  # what was saved
        self._inputs = dict.fromkeys(chain.from_iterable(stage.inputs for stage in model.stages[:cut]))
        self._alone = all(stage.alone for stage in model.stages[:cut])
        self._held = list(tensors_before(model, cut))
        self._versions = [container[key]._version for container, key, _ in self._held]
        self._numbers: dict[Hashable, int] = {}  # circumstances -> their number; texts are those of files
        self._like: list[int] = []  # number -> that of circumstances with the same bits
        self._settled, self._refused, self._tried = set[int](), set[int](), set[int]()
        self._layouts: dict[Hashable, tuple[Layout, Constants]] = {}
        self._misses: dict[int, int] = {}
        self._full = False
        self._known: WeakKeyDictionary[object, dict[Hashable, dict[int, bytes]]] = WeakKeyDictionary()
        self._shapes_of: WeakKeyDictionary[object, Hashable] = WeakKeyDictionary()
        self._computing, self._serving, self._slower = [0, 0.0], [0, 0.0], 0
        self._unsaved = 0.0
        self._given: tuple[Batch, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model keeps nothing: its frozen tensors may become others."""

    def start(self, model: Staged, batch: Batch, last: int) -> tuple[Any, int]:
        """Where the pass of a batch begins: the state after ``cut`` stages and ``cut``, or None and 0."""
        if self._given is not None and self._given[0] is batch and self.cut <= last:
            return self._given[1], self.cut
        if self.counts.reason or self.cut > last or not count(batch) or not self._plain(model, batch):
            return None, 0
        return self._looked_up(model, batch)

    def _looked_up(self, model: Staged, batch: Batch) -> tuple[Any, int]:
        kind, number = self._circumstance(model, batch)
        if number in self._refused:
            return None, 0
        began = time.perf_counter()
        digests = self._digests(batch, kind)
        places = self.store.find(digests) if kind in self._layouts else None
        stored = None if places is None else self._state(kind, places)
        grows = self._alone and number in self._tried and self._worth(number)
        lacking = self._lacking(digests) if grows and places is None else []
        if 0 < len(lacking) < len(digests):
            self._looked_up(model, {key: batch[key][lacking] for key in self._inputs if key in batch})
            return self._looked_up(model, batch)
        if places is None or stored is None:
            return self._first(model, batch, kind, number, digests)
        if number not in self._settled or not self._alike(number, places):
            plain = self._compute(model, batch, count(batch))
            self._compare(kind, number, places, stored, plain)
            return plain, self.cut
        self._serving[0] += len(digests)
        self._serving[1] += time.perf_counter() - began
        self.counts.reused += len(digests)
        self._misses[number] = 0
        if self._serving[0] < PATIENCE * len(digests):
            return stored, self.cut
        self._weigh()
        return stored, self.cut

    def _lacking(self, digests: Sequence[bytes]) -> list[int]:
        """Rows of the first occurrence of each example that is not kept; none where no more can be."""
        first_rows: dict[bytes, int] = {}
        for row, digest in enumerate(digests):
            first_rows.setdefault(digest, row)
        return [] if self._full else [row for digest, row in first_rows.items() if self.store.find([digest]) is None]

    @property
    def active(self) -> bool:
        """See :class:`confed.federation.stages.KeptStates`."""
        return not self.counts.reason

    def state(self, model: Staged, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.KeptStates`."""
        state, first = self.start(model, batch, self.cut)
        return model.forward_stages(state, first, self.cut, batch)

    @contextmanager
    def given(self, batch: Batch, state: Any) -> Generator[None]:
        """See :class:`confed.federation.stages.KeptStates`."""
        self._given = batch, state
        try:
            yield
        finally:
            self._given = None

    def save(self, least: float = 0.0) -> None:
        """Writes what is not in files yet, if computing it took at least so many seconds."""
        if self.store.files is not None and self._unsaved >= least and self.store.save(list(map(str, self._numbers))):
            self._unsaved = 0.0

    # What may be kept ---------------------------------------------------------------------------------------

    def _plain(self, model: Staged, batch: Batch) -> bool:
        """Whether this is a pass as training and evaluation make it, over the tensors as they were."""
        if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
            return False
        if not isinstance(batch, FromRows):
            for key in self._inputs:
                tensor = batch.get(key)
                if tensor is not None and (tensor.requires_grad or tensor.device.type != "cpu"):
                    return False
        for (container, key, tensor), version in zip(self._held, self._versions, strict=True):
            if container[key] is not tensor:
                return False  # other values for the time of this pass
            if tensor._version != version:
                self._end("a tensor of the frozen layers was changed")
                return False
        return True

    def _circumstance(self, model: Staged, batch: Batch) -> tuple[Hashable, int]:
        """Kind of state, and number of what may decide how layers round."""
        cast = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else ""
        kind = (model.stage_variant, cast, self._shapes(batch))
        assert isinstance(model, nn.Module)
        size = 0 if self._alone else count(batch)
        return kind, self.number_of((kind, size, model.training, torch.is_grad_enabled()))

    def _shapes(self, batch: Batch) -> Hashable:
        """Types and shapes of the tensors that the stages may read; of a table's rows they are all alike."""
        if not isinstance(batch, FromRows) or not batch.same_rows(self._inputs):
            return states.shapes(self._inputs, batch)
        if batch.source not in self._shapes_of:
            self._shapes_of[batch.source] = states.shapes(self._inputs, batch)
        return self._shapes_of[batch.source]

    def _digests(self, batch: Batch, kind: Hashable) -> list[bytes]:
        """Digests of the examples; those of a table's rows are computed once."""
        if not isinstance(batch, FromRows) or not batch.same_rows(self._inputs):
            return list(states.digests(self._inputs, batch, kind))
        digests_of_rows = self._known.setdefault(batch.source, {}).setdefault(kind, {})
        taken: Any = batch.rows
        numbers: list[int] = taken.tolist()
        try:
            return [digests_of_rows[number] for number in numbers]
        except KeyError:
            digests = list(states.digests(self._inputs, batch, kind))
            digests_of_rows.update(zip(numbers, digests, strict=True))
            return digests

    def _worth(self, number: int) -> bool:
        """Whether examples are read more often than keeping them computes them: once, and once for each check."""
        checks = 2
        if number in self._settled:
            checks = 0
        elif number in self._tried:
            checks = 1
        return self.passes is None or self.passes > 1 + checks

    def number_of(self, circumstances: Hashable) -> int:
        """Number of circumstances of this process, or of a file, which have to be tried here."""
        if circumstances not in self._numbers:
            self._numbers[circumstances] = len(self._like)
            self._like.append(len(self._like))
        return self._numbers[circumstances]

    def _first(
        self, model: Staged, batch: Batch, kind: Hashable, number: int, digests: Sequence[bytes]
    ) -> tuple[Any, int]:
        """A batch with examples that are not kept; they are from now on, where that is worth it."""
        if not self._worth(number):
            return None, 0
        if number not in self._tried:
            self._tried.add(number)
            state = self._twice(model, batch, number)
        else:
            state = self._compute(model, batch, count(batch))
        if number in self._refused or self._full:
            return state, self.cut
        parts = states.packed(state, len(digests))
        if parts is None:
            self._end("a state has tensors whose rows are not those of its examples, one after the other in memory")
            return state, self.cut
        tensors, constants = parts
        layout = states.layout_of(tensors)
        if self._layouts.setdefault(kind, (layout, constants)) != (layout, constants):
            self._end("states of equal batches differ in shape")
            return state, self.cut
        if row_bytes(layout) > self.store.memory:
            self._end(f"the budget of {self.store.memory:,} bytes holds no example, each takes {row_bytes(layout):,}")
            return state, self.cut
        if not self._kept(digests, layout, tensors, number):
            self._full = True
            self.note(f"the budget is used up with {len(self.store):,} examples; the others are computed each time")
        self.counts.held = self.store.used
        return state, self.cut

    def _kept(self, digests: Sequence[bytes], layout: Layout, tensors: Sequence[Tensor], number: int) -> bool:
        if self.store.add(digests, layout, tensors, number):
            return True
        self.save()
        return self.store.add(digests, layout, tensors, number)

    def _compute(self, model: Staged, batch: Batch, examples: int) -> Any:
        began = time.perf_counter()
        state = model.forward_stages(None, 0, self.cut, batch)
        seconds = time.perf_counter() - began
        self._computing[0] += examples
        self._computing[1] += seconds
        self._unsaved += seconds
        self.counts.computed += examples
        return state

    def _twice(self, model: Staged, batch: Batch, number: int) -> Any:
        """The state of the first batch under some circumstances; these are refused where other passes differ."""
        seen = Seen(batch)
        before = torch.get_rng_state()
        state = self._compute(model, seen, count(batch))
        after = torch.get_rng_state()
        undeclared = sorted(seen.read - self._inputs.keys())
        if undeclared:
            self._end(f"the frozen layers read {', '.join(undeclared)}, which the model does not declare")
            self._refused.add(number)
        elif not torch.equal(before, after):
            self._refuse(number, "the frozen layers draw random numbers in training, such as dropout")
        elif not self._plain(model, batch):
            self._refused.add(number)
        elif self._learns(model, batch, state):
            self._end("what the frozen layers give depends on a tensor that is trained")
        elif not self._alone:
            self._reorder(model, {key: batch[key] for key in seen.read if key in batch}, number, state)
            torch.set_rng_state(after)
        return state

    def _learns(self, model: Staged, batch: Batch, state: Any) -> bool:
        """Whether a state has a gradient: something in the frozen stages learns, such as a hook."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                state = model.forward_stages(None, 0, self.cut, batch)
        return any(tensor.requires_grad for tensor in states.tensors_in(state))

    def _reorder(self, model: Staged, batch: Batch, number: int, state: Any) -> None:
        """Circumstances are refused where an example's state depends on its place in the batch, or on nothing."""
        examples = count(batch)
        first = states.packed(state, examples)
        if first is None:
            return  # refused for this in any case
        # Kernels take several rows at once and round the remainder otherwise, some for some values only: several rows
        # visit each place.
        places = torch.arange(examples)
        for order in [places.flip(0), *(places.roll(by) for by in range(1, min(examples, FEW)))]:
            moved = {key: tensor[order] for key, tensor in batch.items()}
            again = states.packed(model.forward_stages(None, 0, self.cut, moved), examples)
            apart = math.inf if again is None else states.gap(again[0], [tensor[order] for tensor in first[0]])
            if apart == 0:
                continue
            same = states.tensors_in(model.forward_stages(None, 0, self.cut, batch))
            if states.gap(states.tensors_in(state), same) != 0:
                self._refuse(number, "the frozen layers give other values when they are computed twice")
            elif apart > self.tolerance:
                self._refuse(number, f"layers round differently by the place in batches of {examples}; not kept")
            else:
                self._accept(apart)

    # Which circumstances count as the same ------------------------------------------------------------------

    def _state(self, kind: Hashable, places: Sequence[Place]) -> Any:
        layout, constants = self._layouts[kind]
        tensors = self.store.rows(layout, places)
        return None if tensors is None else states.unpacked(tensors, constants)

    def _alike(self, number: int, places: Sequence[Place]) -> bool:
        return all(self._like[origin] == self._like[number] for origin in set(self.store.origins(places)))

    def _compare(self, kind: Hashable, number: int, places: Sequence[Place], stored: Any, plain: Any) -> None:
        """Comparison of what is kept of a batch with what is computed now, by where the rows come from."""
        origins = self.store.origins(places)
        here, kept_states = states.packed(plain, len(places)), states.packed(stored, len(places))
        if (
            here is None
            or kept_states is None
            or here[1] != kept_states[1]
            or states.layout_of(here[0]) != states.layout_of(kept_states[0])
        ):
            self._end("states of equal batches differ in shape")
            return
        settled = True
        for origin in set(origins):
            chosen = torch.tensor([i for i, o in enumerate(origins) if o == origin])
            apart = states.gap([t[chosen] for t in kept_states[0]], [t[chosen] for t in here[0]])
            if apart <= self.tolerance:
                self._accept(apart)
                before = self._like[origin]
                self._like = [self._like[number] if like == before else like for like in self._like]
                continue
            settled = False
            if apart > STALE:
                self.store.discard([place for place, o in zip(places, origins, strict=True) if o == origin])
        if settled:
            self._settled.add(number)
            return
        self._misses[number] = self._misses.get(number, 0) + 1
        if self._misses[number] >= PATIENCE:
            self._refuse(number, f"layers round differently in batches of {len(places)}, which are computed each time")

    def _accept(self, apart: float) -> None:
        self.counts.difference = max(self.counts.difference, apart)
        self.counts.exact &= apart == 0

    def _weigh(self) -> None:
        """Keeping ends where it takes longer than computing several times in a row, as interruptions count too."""
        serving, computing = (seconds / max(count, 1) for count, seconds in (self._serving, self._computing))
        self._slower = self._slower + 1 if serving > computing else 0
        if self._slower == SLOWER:
            self._end("reading what is kept takes longer than computing it")
        self._serving = [0, 0.0]

    def _refuse(self, number: int, why: str) -> None:
        self._refused.add(number)
        self.note(why)

    def _end(self, why: str) -> None:
        self.counts.reason = why
        self.store.clear()
        self.counts.held = 0

    def note(self, text: str) -> None:
        """Remembers a sentence once."""
        if text not in self.counts.notes:
            self.counts.notes.append(text)
