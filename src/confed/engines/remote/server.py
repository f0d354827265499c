"""The server's end of a federation across machines: calls go out as requests, replies come back as they arrive.

The executor :class:`Remote` stands where the simulator has :class:`confed.engines.executor.InProcess`, so that the
rounds, the methods and the accounting are the same. It knows no network: a :class:`Transport` carries bytes. What goes
wrong on the way is an error in the client's reply; a site that is away, or was restarted, is asked again for a while
first.

A method of the server reads replies one by one. An exception that it raises while it has one of them in hand, although
the reply is what method and task declare, is taken for an error of the site that sent it. The part of the round is then
driven again from the state that it began with: the replies that have come already wait on disk, that site's counts as
failed, and no other site is asked a second time.
"""

import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from confed.engines.dispatch import Dispatcher
from confed.engines.local import InProcess, check_finite
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.journal_chains import Countersignatures
from confed.engines.remote.pieces import SMALLEST, PieceTransport
from confed.engines.remote.protocol import (
    NAME,
    Answer,
    Limits,
    Refused,
    Request,
    Settings,
    fingerprint,
    open_body,
    printable,
    schema_of,
    seal,
    version_of,
)
from confed.engines.remote.sites import (
    Norms,
    PendingCall,
    SiteBatch,
    SiteRegistry,
    Timeouts,
    Transport,
    patiently,
)
from confed.engines.remote.update_bounds import FEWEST, Bounds, NormHistory, largest_of, most_of, norm_of, scaled
from confed.engines.usage import Timeline
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import private_folder
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params, Scalar, Scope
from confed.federation.protocols import Counting
from confed.federation.reports import LOSS
from confed.federation.state import ServerState, Store
from confed.privacy.protections import ANALYSIS, ValueBound, check_reply
from confed.system.events import Progress, ignore

# Retry of a part of a round without the site whose reply the method could not handle --------------------------

Done = TypeVar("Done")


class Attempts:
    """Replies that the server has received in one part of a round; a folder that :meth:`close` removes."""

    def __init__(
        self, steps: Mapping[tuple[str, int], int], bases: Mapping[str, int], spool: Path | None, single: bool
    ) -> None:
        self.steps, self.bases, self.single = dict(steps), dict(bases), single
        self.batches: list[SiteBatch] = []  # the calls of the attempt under way
        # the call whose reply the method has in hand, if that reply is no error
        self.handled: PendingCall | None = None
        self.refused: dict[str, str] = {}  # request -> why its reply counts as failed
        self._read: PendingCall | None = None
        self._end = ""
        self._outcomes: dict[str, tuple[Call, Path | str]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="confed-replies-", dir=spool)

    def close(self) -> None:
        self._folder.cleanup()

    def begin(self, batch: SiteBatch) -> None:
        """Start of calls that are asked for together."""
        self.batches.append(batch)
        self.handled = None
        self.single |= any(call.session for call in batch.calls)

    def folder(self) -> str:
        """A new folder for the replies to calls that are asked for together; all are removed in the end."""
        return tempfile.mkdtemp(dir=self._folder.name)

    def keep(self, ask: PendingCall, result: Path | str) -> None:
        """Record of the reply to a call, or of its error."""
        if not self.single:
            self._outcomes[ask.request.id] = ask.call, result

    def outcome_of(self, ask: PendingCall) -> Path | str | None:
        """Outcome of the call in an earlier attempt; None where it is a new one."""
        if ask.request.id not in self._outcomes:
            return None
        before, result = self._outcomes[ask.request.id]
        if before.action != ask.call.action or not _equal(before.message, ask.call.message):
            raise RuntimeError(
                f"{self._end}; the round cannot be driven again, as the method asks {ask.call.client.id!r} for "
                "something else than before"
            )
        return result

    def reading(self, ask: PendingCall) -> None:
        """Mark the reply to this call as the one that is read from disk."""
        self._read = ask

    def handed(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        """The same replies; between two of them the one that the method handles is known."""
        for reply in replies:
            self.handled = self._read if reply.error is None else None
            yield reply
            self.handled = None

    def leave_out(self, ask: PendingCall, method: str, error: Exception) -> None:
        """Mark the reply to this call as failed in all further attempts."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        sentence = (
            f"{method} could not handle its reply to {ask.call.action!r}: {type(error).__name__}: {error} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        self._end = f"round {ask.request.round + 1} ended at the reply of {ask.call.client.id!r}: {sentence}"
        if self.single:
            raise RuntimeError(self._end) from error
        self.refused[ask.request.id] = sentence


def _equal(one: Message, other: Message) -> bool:
    if one.scalars != other.scalars or one.tensors.keys() != other.tensors.keys():
        return False
    pairs: list[tuple[Any, Any]] = [(t, other.tensors[name]) for name, t in one.tensors.items()]
    return all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


# Checks of a reply's scalars and counts against what method and task declare ----------------------------------

VIEWS = ("global", "personal")  # the models that a site evaluates
METRICS = 256  # names of metrics in a tally of a task that does not declare its own, at most
WEIGHT = 2.0**53  # what an evaluation may weigh, at most: numbers of examples and of words are exact below
ROUNDING = 1e-6  # what sums of single-precision values may lie outside of their range, relative to their weight


def check_content(algorithm: Algorithm, task: Any, action: str, message: Message) -> None:
    """Checks what a reply tells besides tensors of the model."""
    if action == "evaluate":
        _check_tallies(task, message.scalars)
        _check_counts(task, message.tensors)
        return
    declared = algorithm.reports(action)
    for name, value in message.scalars.items():
        if name not in declared:
            raise Refused(
                f"the scalar {name[:80]!r} of {action!r} is not declared by the method (Algorithm.reports), which has "
                f"{', '.join(sorted(declared)) or 'none'}"
            )
        if problem := declared[name].problem(value):
            raise Refused(f"the scalar {name!r} of {action!r} {problem}")


def _check_tallies(task: Any, scalars: Mapping[str, Scalar]) -> None:
    declared = getattr(task, "measures", None)
    if declared is None and len(scalars) > 2 * len(VIEWS) * METRICS:
        raise Refused(f"an evaluation has at most {METRICS} metrics, got {len(scalars)} sums and weights")
    for key, value in scalars.items():
        view, _, rest = key.partition(":")
        name, _, tally_name = rest.rpartition(":")
        if view not in VIEWS or not name or tally_name not in ("sum", "weight"):
            raise Refused(f"{key[:80]!r} is no sum or weight of an evaluation")
        if not name.isprintable() or len(name) > NAME or (declared is not None and name not in declared):
            raise Refused(f"{name[:80]!r} is no metric of the task {type(task).__name__}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"the scalar {key[:80]!r} of 'evaluate' must be a number, got {str(value)[:80]!r}")
        if tally_name == "weight":
            if f"{view}:{name}:sum" not in scalars:
                raise Refused(f"{key[:80]!r} came without its sum")
            continue
        weight = scalars.get(f"{view}:{name}:weight")
        if weight is None or isinstance(weight, bool | str):
            raise Refused(f"{key[:80]!r} came without its weight")
        if not 0 <= weight <= WEIGHT:
            raise Refused(f"the weight of {name[:80]!r} must be from 0 to 2^53, got {weight:g}")
        low, high = (LOSS.low, LOSS.high) if declared is None else declared[name]
        slack = ROUNDING * (1 + weight)
        if not low * weight - slack <= value <= high * weight + slack:
            raise Refused(f"{name[:80]!r} must be from {low:g} to {high:g}, got {value:g} over {weight:g}")


def _check_counts(task: Any, tensors: Params) -> None:
    if not isinstance(task, Counting):
        return
    shapes = task.count_shapes
    for key, count in tensors.items():
        view, _, name = key.partition(":")
        if view not in VIEWS or name not in shapes:
            raise Refused(f"{key[:80]!r} is no count of the task {type(task).__name__}")
        if count.dtype != torch.int64 or tuple(count.shape) != tuple(shapes[name]):
            raise Refused(
                f"the count {name!r} must be torch.int64 of shape {tuple(shapes[name])}, got {count.dtype} of shape "
                f"{tuple(count.shape)}"
            )
        if count.numel() and not 0 <= int(count.min()) <= int(count.max()) <= 2**48:
            raise Refused(f"the count {name!r} must be from 0 to 2^48")


# Pauses between looks at what has arrived ---------------------------------------------------------------------

SHORTEST = 0.005  # seconds of the first pause: a look costs well under a millisecond where little is on its way
SHARE = 0.1  # of the time waited so far: what a reply that comes now waits for at most


class Pauses:
    """Pauses that grow with the time waited, so that short answers are met soon and long ones seldom looked for."""

    def __init__(self, longest: float, wait: Callable[[float], bool] = lambda _: False) -> None:
        self._longest, self._wait, self._began = longest, wait, time.monotonic()

    def sleep(self) -> None:
        """The next pause."""
        if not self._wait(self._longest):
            time.sleep(min(self._longest, max(SHORTEST, SHARE * (time.monotonic() - self._began))))


# The server's end of a federation across machines: calls go out as requests -----------------------------------

LINE = 500  # characters of what went wrong at a site that logs and the run folder hold
WORKED = 60.0  # seconds after which a request that is lost is none that ends its site's process
TRIES = 3  # how often in a row a site may lose a request, soon and without a piece of it, before it is left out


class Remote(Dispatcher):
    """Answers calls by asking sites."""

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        *,
        timeouts: Timeouts | None = None,
        common: Settings | None = None,
        limits: Limits | None = None,
        audit: Path | None = None,
        progress: Progress = ignore,
        spool: Path | None = None,
        judge: Callable[[ClientInfo, Message], None] = lambda info, message: None,
        workspace: Workspace | None = None,
        bounds: Bounds | None = None,
        memory: Path | None = None,
        pieces: Path | None = None,
    ) -> None:
        self.timeline = Timeline(0)
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self._setup, self._local = setup, InProcess(setup, workspace)
        self._judge, self._schema = judge, schema_of(self._local.workspace.tensors)
        self._limits = limits = Limits.of(self._schema) if limits is None else limits  # as given, or from the model
        # the absolute bound on values
        self._values = ValueBound.of(self._local.workspace.tensors.values(), setup.algorithm.traits.sums)
        transport.set_max_reply_bytes(limits.head + limits.body)
        # bodies on their way, in a folder that outlives this process; None where messages travel whole
        self._pieces = None if pieces is None else PieceTransport(transport, pieces, limits)
        common_ground = fingerprint(setup, self._local.workspace, common)
        self.sites = SiteRegistry(
            self._pieces or transport, common_ground, self.timeouts, limits, audit, progress, Countersignatures(memory)
        )
        # rounds whose checkpoints the server may go back to; sites keep what belongs to them
        self.checkpoints: Sequence[int] = (0,)
        self.spool = spool
        # puts outcomes that are known beforehand into calls that are asked for together; nothing by default
        self.fill: Callable[[SiteBatch], None] = lambda batch: None
        if spool is not None:  # leftovers of a process that was killed
            shutil.rmtree(spool, ignore_errors=True)
            private_folder(spool)
        self._work = frozenset(setup.algorithm.actions()).difference(ANALYSIS)
        self.bounds = Bounds(0, 0) if bounds is None else bounds
        # client -> what was done to its update, as it went too far; readers empty it
        self.shortened: dict[str, str] = {}
        self.answered = 0  # sites that have answered the same before and count towards the minimum
        self._history = NormHistory(None if memory is None else memory / "norms.json")
        self._keep = False
        self._start = 0
        self._bases: dict[str, int] = {}
        self._steps: dict[tuple[str, int], int] = {}
        self._attempts: Attempts | None = None

    def begin(self, start: int, checkpoints: Sequence[int]) -> None:
        """Start of a run, or of its continuation: sites go back to the same round."""
        self._start, self.checkpoints = start, checkpoints
        self._history.begin(start)
        self._bases.clear()
        self._steps.clear()

    def check(self, name: str, server: ServerState) -> None:
        """Check that a server's state is one that sites take, before it is kept."""
        check_finite(name, server)
        for group, tensors in {"parameters": server.params, **server.slots}.items():
            if (problem := self._values.problem(tensors)) is not None:
                raise RuntimeError(
                    f"server {name!r}: of its {group} after round {server.round} {problem}, which every site refuses; "
                    "the last checkpoint is sound"
                )

    def remember(self) -> None:
        """End of a round: what is remembered of its sites is on disk when this returns."""
        self._history.save()
        self.sites.heads.sign()

    def pauses(self) -> Pauses:
        """Pauses between looks at what has arrived, from now on."""
        return Pauses(self.timeouts.interval, self.sites.transport.wait)

    def close(self) -> None:
        """Removes what is left of the replies on disk."""
        if self.spool is not None:
            shutil.rmtree(self.spool, ignore_errors=True)

    def take_leave(self) -> None:
        """End of the run: the sites are told, and bodies that were on their way are removed."""
        self.sites.farewell(10.0)
        if self._pieces is not None:
            self._pieces.close()

    def attempt(self, act: Callable[[], Done]) -> Done:
        """A part of a round, repeated without the site whose reply the method handled when an error ended it."""
        algorithm = self._setup.algorithm
        with closing(Attempts(self._steps, self._bases, self.spool, algorithm.secure_sum is not None)) as attempts:
            self._attempts = attempts
            try:
                while True:
                    try:
                        return act()
                    except (OSError, MemoryError):  # of this machine
                        raise
                    except Exception as error:
                        if attempts.handled is None:
                            raise
                        attempts.leave_out(attempts.handled, type(algorithm).__name__, error)
                    self._begin_again(attempts)
            finally:
                self._attempts = None

    def _begin_again(self, attempts: Attempts) -> None:
        for batch in attempts.batches:  # what is on its way is not asked for a second time
            pauses = self.pauses()
            while batch.waiting or batch.running:
                self.step(batch)
                pauses.sleep()
        attempts.batches, attempts.handled = [], None
        self._steps, self._bases = dict(attempts.steps), dict(attempts.bases)

    # Calls ---------------------------------------------------------------------------------------------------

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        if any(call.client.id in self._setup.observers for call in calls):
            return self._some_here(calls, store, round)
        replies = super().__call__(calls, store, round)
        return replies if self._attempts is None else self._attempts.handed(replies)

    def _some_here(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Places that take no part are the server's own: it answers for them."""
        away = [call for call in calls if call.client.id not in self._setup.observers]
        replies = self(away, store, round) if away else iter(())
        for call in calls:
            here = call.client.id in self._setup.observers
            yield from self._local([call], store, round) if here else (next(replies),)

    @contextmanager
    def _opened(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[SiteBatch]:
        # Replies wait there until their turn comes, or until the part of the round is over.
        folder: AbstractContextManager[str]
        if self._attempts is None:
            folder = tempfile.TemporaryDirectory(prefix="confed-replies-", dir=self.spool)
        else:
            folder = nullcontext(self._attempts.folder())
        with folder as spool:
            batch = SiteBatch(calls, round, spool=Path(spool), compared=self._compares(calls))
            if self._attempts is not None:
                self._attempts.begin(batch)
            self.fill(batch)
            yield batch

    def _feed(self, batch: SiteBatch) -> None:
        self.step(batch)

    def _await(self, batch: SiteBatch, position: int) -> None:
        measures = batch.compared and batch.norms is None
        wanted, pauses = set(range(len(batch.calls))) if measures else {position}, self.pauses()
        while not wanted <= batch.done.keys():
            self.step(batch)
            if not wanted <= batch.done.keys():
                pauses.sleep()
        if measures:
            batch.norms = self._measured(batch)

    def _reply(self, batch: SiteBatch, position: int) -> Reply:
        ask, result = batch.done.pop(position)
        norms = batch.norms
        if norms is None:
            reply = self._counted(batch, ask, result)
            if reply.error is not None or not ask.call.session or self.bounds.update == 0:
                return reply
            # In a session the scale of its values is compared with that of those before.
            return self._bounded(ask, reply, {reply.client.id: largest_of(reply.message)})
        if position in norms.failed:
            return norms.failed[position]
        reply = self._bounded(ask, self._read(ask, result), norms.of)
        if reply.error is not None:  # what the site keeps of this round does not count
            self._bases.pop(reply.client.id, None)
            if reply.client.id in norms.bases:
                self._bases[reply.client.id] = norms.bases[reply.client.id]
        return reply

    def _counted(self, batch: SiteBatch, ask: PendingCall, result: Path | str) -> Reply:
        """A reply as it is; too many that cannot be used end the run."""
        reply = self._read(ask, result)
        if reply.error is not None and ask.call.action in self._work and not ask.call.session:
            batch.count_out(reply, self.timeouts.minimum)
        return reply

    def _size(self, call: Call, message: Message) -> float:
        """Norm of an update, also of values of the model that were not sent; of activations their largest value."""
        if call.session:
            return largest_of(message)
        expected = {} if call.expects is None else call.expects
        unsent = {name: tensor for name, tensor in expected.items() if name in self._local.workspace.tensors}
        start = replace(call, message=Message({**unsent, **call.message.tensors}))
        return norm_of(start, message, self._setup.algorithm.traits.changes)

    def _compares(self, calls: Sequence[Call]) -> bool:
        """Whether replies are compared with each other: updates, or the first of their kind in a session."""
        session = self.bounds.update > 0 and len(calls) > 1 and all(call.session for call in calls)
        unusual = session and not self._history.knows(calls[0].action)
        return unusual or self.bounds.apply_to(self._setup.algorithm, calls)

    def _measured(self, batch: SiteBatch) -> Norms:
        """Norms of all updates of a round.

        They are read twice, as their median is known only when all have come and they would not fit into memory.
        """
        norms = Norms(bases=dict(self._bases))
        for position, (ask, result) in sorted(batch.done.items()):
            self._keep = True
            try:
                reply = self._counted(batch, ask, result)
            finally:
                self._keep = False
            if reply.error is None:
                norms.of[reply.client.id] = self._size(ask.call, reply.message)
            else:
                norms.failed[position] = reply
        self._history.meet(batch.calls)
        return norms

    def _bounded(self, ask: PendingCall, reply: Reply, sizes: Mapping[str, float]) -> Reply:
        """A reply that goes not much further than most; else a part of it, or its error where there is none to take."""
        call, algorithm, factor = ask.call, self._setup.algorithm, self.bounds.update
        name, few = call.client.id, call.session or len(sizes) < FEWEST
        size, most = sizes[name], self._history.most(call, sizes, factor) if few else most_of(sizes, factor)
        if size <= most or not few:
            self._history.note(call.action, name, ask.request.round, min(size, most))
        if size <= most or reply.error is not None:
            return reply
        sentence = f"its update had the norm {size:.3g}, more than {most:.3g}"
        sentence += ", as the smaller ones of all sites so far" if few else f": {factor:g} times the median"
        if call.session:
            sentence = f"its reply to {call.action!r} held values up to {size:.3g}, more than {most:.3g}"
            sentence += ", as sites sent so far"
        try:
            if few or not math.isfinite(size) or algorithm.unsupported_reason("robust"):
                raise ValueError("no part of it can be taken")  # most sites cannot vouch for the bound
            reply = replace(reply, message=scaled(call, reply.message, algorithm.traits.changes, most / size))
            self.shortened[name] = f"{sentence}; it was scaled down to that"
        except ValueError:
            self.shortened[name] = f"{sentence}; it was left out"
            return self._failed(reply.client, f"ValueError: update refused: {sentence}")
        self.sites.note(name, self.sites.status[name].state, self.shortened[name])
        return reply

    def step(self, batch: SiteBatch) -> None:
        """Sends what can be sent, takes in what has arrived, and gives up what takes too long."""
        self.sites.look()
        now = time.monotonic()
        for position in batch.ready():
            ask = self._ask(batch.calls[position], batch.round)
            batch.begin(position, ask)
            # What came of it in an earlier attempt at the same part of the round.
            if self._attempts is not None and (result := self._attempts.outcome_of(ask)) is not None:
                batch.finish(position, (ask, result))
                batch.lost += isinstance(result, str)
        for position, ask in list(batch.running.items()):
            self._advance(batch, position, ask, now)

    def _ask(self, call: Call, round: int) -> PendingCall:
        name = call.client.id
        step = self._steps.get((name, round), 0)
        self._steps = {key: n for key, n in self._steps.items() if key[1] >= round} | {(name, round): step + 1}
        version = version_of(round, step)
        base = self._bases.get(name, version_of(self._start, 0) - 1)
        versions = tuple(version_of(finished, 0) - 1 for finished in self.checkpoints)
        identity = f"{self.sites.run}/{round}/{step}/{name}"
        signed = self.sites.heads.signed(name)
        request = Request(identity, name, call.action, round, version, base, versions, call.session, signed)
        return PendingCall(call, request)

    def _advance(self, batch: SiteBatch, position: int, ask: PendingCall, now: float) -> None:
        name = ask.call.client.id
        line = self.sites.lines.get(name)
        if ask.sent is not None:
            reply = self.sites.transport.receive(ask.sent)
            if isinstance(reply, tuple):
                self._take_in(batch, position, ask, *reply)
            elif isinstance(reply, str) or line != ask.to:
                moved = 0 if self._pieces is None else self._pieces.moved(ask.sent)
                # A bad line that something passes, and a site that worked for long, are no request that kills its site.
                if moved >= ask.moved + SMALLEST or now - ask.began > WORKED:
                    ask.lost, ask.moved = 0, moved
                self._forget(ask)
                ask.lost, why = ask.lost + 1, reply or "ConnectionError: the connection was lost"
                if ask.lost >= TRIES:
                    ask.lost = 0
                    self._give_up(batch, position, ask, why)
                else:  # the site is asked again, and answers from its memory what it has answered already
                    self.sites.note(name, self._idle(name), why)
            elif now > ask.late:
                self._give_up(batch, position, ask, f"TimeoutError: no reply within {self.timeouts.deadline:g} s")
            return
        if line is None:
            if now - self.sites.missing.setdefault(name, now) >= self.timeouts.away:
                self._give_up(batch, position, ask, "ConnectionError: the site is not connected")
            return
        # Made when it is sent, and not kept: of the same message to many sites one copy is in memory at a time.
        at_once = 0 if self._pieces is None else self._pieces.at_once(line[0])
        head, body = replace(ask.request, at_once=at_once).to_bytes(), seal(ask.call.sent)
        ask.sent = self.sites.transport.send(line[0], ask.call.action, head, body, self.timeouts.deadline)
        if ask.sent is not None:
            ask.to, ask.began, ask.late = line, now, ask.late or now + self.timeouts.deadline
            ask.journals = self.sites.heads.known(name)
            self.sites.log("out", name, ask.call.action, head, body)
            self.sites.note(name, f"round {batch.round + 1}: {ask.call.action}")

    def _give_up(self, batch: SiteBatch, position: int, ask: PendingCall, why: str) -> None:
        """Leaves a site out; where too few would be left, the server goes on waiting for it."""
        name = ask.call.client.id
        wanted = 0 if batch.optional else min(self.timeouts.minimum - self.answered, len(batch.calls))
        self._forget(ask)
        if not ask.call.session and len(batch.calls) - batch.lost - 1 < wanted:
            why += "; the round cannot go on without it"
            ask.late = 0.0
        else:
            batch.lost += 1
            self._end(batch, position, ask, why)
        self.sites.note(name, self._idle(name), why)

    def forget(self, batch: SiteBatch) -> None:
        """End of the wait for replies to calls."""
        for ask in batch.running.values():
            self._forget(ask)

    def _forget(self, ask: PendingCall) -> None:
        if ask.sent is not None:
            self.sites.transport.forget(ask.sent)
        ask.sent = None

    def _idle(self, name: str) -> str:
        return "idle" if name in self.sites.lines else "away"

    def _take_in(self, batch: SiteBatch, position: int, ask: PendingCall, head: bytes, body: bytes) -> None:
        """Puts a reply on disk until its turn comes."""
        name = ask.call.client.id
        self.sites.log("in", name, ask.call.action, head, body)
        path = batch.spool / str(position)
        with patiently(lambda: path.open("wb")) as file:
            file.writelines((len(head).to_bytes(8, "little"), head, body))
        self._end(batch, position, ask, path)
        self.sites.note(name, "idle")

    def _end(self, batch: SiteBatch, position: int, ask: PendingCall, result: Path | str) -> None:
        batch.finish(position, (ask, result))
        if self._attempts is not None:
            self._attempts.keep(ask, result)

    def _read(self, ask: PendingCall, result: Path | str) -> Reply:
        """The reply, or its error; nothing of a refused reply reaches the method."""
        client = ask.call.client
        if self._attempts is not None:
            self._attempts.reading(ask)
            if ask.request.id in self._attempts.refused:
                return self._failed(client, self._attempts.refused[ask.request.id])
        if isinstance(result, str):
            return Reply(client, Message(), printable(result, LINE))
        try:
            return self._checked(ask, result)
        except OSError:  # of this machine's disk
            raise
        except Exception as error:  # a fault of ours, which this site's reply has brought to light: it ends no run
            return self._failed(client, f"ValueError: update refused: {type(error).__name__}: {error}")

    def _checked(self, ask: PendingCall, result: Path) -> Reply:
        """A reply that has come, checked against all that is declared of it."""
        call, client = ask.call, ask.call.client
        with patiently(lambda: result.open("rb")) as file:
            head, body = file.read(int.from_bytes(file.read(8), "little")), file.read()
        if not self._keep and (self._attempts is None or self._attempts.single):
            result.unlink()
        try:
            answer = Answer.from_bytes(head, self._limits)
            if answer.id != ask.request.id:
                raise Refused(f"the reply is to {answer.id[:120]!r}, the request was {ask.request.id!r}")
            if answer.error is not None:
                return self._failed(client, answer.error)
            message = self._message(call, body)
        except ValueError as error:
            return self._failed(client, f"ValueError: update refused: {error}")
        try:
            if call.action == "evaluate":
                self._judge(client, message)
        except Exception as error:  # whatever sums and counts of a site's making may lead to
            why = printable(str(error), 200)
            return self._failed(client, f"ValueError: evaluation refused: {type(error).__name__}: {why}")
        reply = check_reply(call, Reply(client, message, wire_bytes=len(body)))
        if reply.error is not None:
            return self._failed(client, reply.error)
        if not call.session:
            self.sites.heads.note(client.id, answer.journals, ask.journals)
        if answer.saved:
            self._bases[client.id] = ask.request.version
        return reply

    def _message(self, call: Call, body: bytes) -> Message:
        """A body that has come, as the method means it; what is not as declared is a ValueError."""
        scopes = self._local.workspace.scopes(self._setup.algorithm, call.client)
        shared = frozenset(name for name, scope in scopes.items() if scope is Scope.SHARED)
        uplink, expects = self._setup.uplink_of(call), call.expects
        wire = expects if uplink is None or expects is None else uplink.layout(expects)
        message = open_body(body, self._limits, self._schema, shared, None if wire is None else schema_of(wire))
        message = message if uplink is None else uplink.opened(call, message)
        check_content(self._setup.algorithm, self._setup.task_of(call.client.id), call.action, message)
        self._values.check(message.tensors)  # what sites refuse, no server averages
        return message

    def _failed(self, client: ClientInfo, error: str) -> Reply:
        error = printable(error, LINE)  # it goes into logs and into the run folder, and a site may have written in it
        self.sites.note(client.id, self.sites.status[client.id].state, error)
        return Reply(client, Message(), error)
