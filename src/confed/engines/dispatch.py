"""Dispatch of calls to whoever answers them: this process, workers, actors of a cluster, or sites on other machines.

There is one loop and one account of calls, in :class:`Dispatcher` and :class:`Batch`. Who answers, and how calls get
there, is in the classes that extend them. Between processes of one owner a call is bytes: a JSON head, the message and
the client's state.
"""

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import torch

from confed.engines.perform import Setup, Workspace, answer
from confed.engines.usage import Timeline
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import MemoryStore, Store
from confed.federation.wire import decode, decode_state, encode, encode_state

T = TypeVar("T")


@dataclass
class Batch:
    """Calls that a flow asked for together, by their positions."""

    calls: Sequence[Call]  # in the order of their replies
    round: int  # number of finished rounds
    waiting: list[int] = field(default_factory=list[int])  # calls that nobody answers yet, in order
    running: dict[int, Any] = field(default_factory=dict[int, Any])  # call -> who answers it
    done: dict[int, Any] = field(default_factory=dict[int, Any])  # call -> what came of it, until its turn comes

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.calls)))

    def ready(self) -> Iterator[int]:
        """Calls that can be begun: the second call to a client needs the state that the first one leaves."""
        busy = {self.calls[position].client.id for position in (*self.running, *self.done)}
        for position in list(self.waiting):
            client = self.calls[position].client.id
            if client not in busy:
                busy.add(client)
                yield position

    def begin(self, position: int, who: Any) -> None:
        self.waiting.remove(position)
        self.running[position] = who

    def finish(self, position: int, outcome: Any) -> None:
        """A call whose outcome has come, or whose error is its outcome."""
        del self.running[position]
        self.done[position] = outcome

    def put_back(self, position: int) -> None:
        """A call whose answer was lost: it waits again, before all others."""
        self.running.pop(position, None)
        self.waiting.insert(0, position)

    def position_of(self, who: Any) -> int:
        """The call that somebody answers."""
        return next(position for position, answering in self.running.items() if answering == who)


class Dispatcher(ABC):
    """Replies from elsewhere, in the order of the calls; see :class:`confed.engines.executor.Executor`."""

    timeline: Timeline

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the first calls are on their way when this returns."""
        replies = self._replies(calls, store, round)
        next(replies)
        return replies  # pyright: ignore[reportReturnType]  # after the first None there are replies only

    def _replies(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply | None]:
        with self._opened(calls, store, round) as batch:
            self._feed(batch)
            yield None
            for position in range(len(calls)):
                reply = None
                while reply is None:
                    self._await(batch, position)
                    reply = self._reply(batch, position)
                yield reply

    @abstractmethod
    def _opened(self, calls: Sequence[Call], store: Store, round: int) -> AbstractContextManager[Any]:
        """A batch for these calls; what is left of it at the end is taken away."""

    @abstractmethod
    def _feed(self, batch: Any) -> None:
        """Gives calls to those that are free."""

    @abstractmethod
    def _await(self, batch: Any, position: int) -> None:
        """Waits for the outcome of a call."""

    @abstractmethod
    def _reply(self, batch: Any, position: int) -> Reply | None:
        """The reply that the outcome of a call is; None if it was lost, and the call waits again."""

    @abstractmethod
    def close(self) -> None:
        """Releases processes, connections and files."""


# Calls and replies as bytes, for processes of one owner -----------------------------------------------------------


def call_head(call: Call, round: int) -> bytes:
    """Everything of a call but its message, as JSON."""
    head: dict[str, Any] = {"client": asdict(call.client), "action": call.action, "round": round}
    head |= {"session": call.session, "expects": None}
    if call.expects is not None:
        head["expects"] = {n: [str(t.dtype).removeprefix("torch."), t.shape] for n, t in call.expects.items()}
    return json.dumps(head).encode()


def answer_bytes(
    setup: Setup, workspace: Workspace, head: bytes, message: bytes, state: bytes
) -> tuple[bytes, bytes, bytes]:
    told: dict[str, Any] = json.loads(head)
    info = ClientInfo(**{**told["client"], "modalities": tuple(told["client"]["modalities"])})
    expects = None
    if told["expects"] is not None:
        # Only names, shapes and dtypes are compared, so tensors without memory do.
        expects = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in told["expects"].items()
        }
    store, began = MemoryStore(), time.perf_counter()
    store.states[info.id] = before = decode_state(state)
    call = Call(info, told["action"], decode(message), expects, told["session"])
    reply = answer(setup, workspace, call, store, told["round"])
    span = (began, time.perf_counter())  # of the work, in readings of this process's clock
    after = store.states[info.id]
    back = json.dumps({"error": reply.error, "span": span}).encode()
    return back, encode(reply.message), b"" if after is before else encode_state(after)


def read_answer(call: Call, parts: Sequence[bytes], store: Store) -> Reply:
    """A reply from its bytes; the client's new state, if it has one, is saved."""
    if parts[2]:
        store.save(call.client.id, decode_state(parts[2]))
    message = decode(parts[1]) if parts[1] else Message()
    return Reply(call.client, message, json.loads(parts[0])["error"])


class Encoded(Generic[T]):
    """Bytes of the messages of calls that were asked for together; equal ones in a row are encoded once."""

    def __init__(self, keep: Callable[[bytes], T]) -> None:
        self._keep, self._last = keep, dict[object, T]()

    def of(self, message: Message) -> T:
        """A message's bytes, or what is kept of them."""
        key = (tuple((n, id(t)) for n, t in message.tensors.items()), json.dumps(dict(message.scalars)))
        if key not in self._last:
            self._last = {key: self._keep(encode(message))}  # only one: messages of many clients may all differ
        return self._last[key]


def join(parts: Sequence[bytes]) -> bytes:
    """Byte strings in one, each after its length."""
    pairs = ((len(field).to_bytes(8, "little"), field) for field in parts)
    return b"".join(chain.from_iterable(pairs))


def split(data: bytes) -> list[bytes]:
    """The byte strings that :func:`join` put together."""
    parts, at = list[bytes](), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        parts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return parts


# Processes of one owner ---------------------------------------------------------------------------------------


@dataclass
class Homes:
    """Processes that hold the live objects of clients' sessions, for as long as a round lasts."""

    round: int = -1  # the round in which they do
    of: dict[str, int] = field(default_factory=dict[str, int])  # client -> number of the process

    def begin(self, round: int) -> None:
        """Forgets the clients of another round: sessions do not outlast theirs."""
        if round != self.round:
            self.of, self.round = {}, round

    def leave(self, number: int) -> None:
        """Forgets the clients of a process that has ended."""
        self.of = {client: home for client, home in self.of.items() if home != number}

    def takes(self, client: str, number: int, numbers: Collection[int]) -> bool:
        """Whether a client's home is a process; a new client's is one with the fewest others."""
        if client not in self.of:
            guests = Counter(self.of.values())
            if guests[number] > min(guests[n] for n in numbers):
                return False
            self.of[client] = number
        return self.of[client] == number


@dataclass
class ProcessBatch(Batch, Generic[T]):
    """Calls that processes answer; who answers is the number of a process."""

    store: Store = field(kw_only=True)
    messages: Encoded[T] = field(kw_only=True)
    tries: Counter[int] = field(default_factory=Counter[int], kw_only=True)  # call -> processes lost over it


class ProcessExecutor(Dispatcher, Generic[T]):
    """Answers calls in processes."""

    def __init__(self) -> None:
        self.timeline, self._homes, self._closed = Timeline(0), Homes(), False

    @contextmanager
    def _opened(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[ProcessBatch[T]]:
        self._homes.begin(round)
        batch = ProcessBatch(calls, round, store=store, messages=Encoded(self._sendable))
        try:
            yield batch
        finally:
            # A flow that stops listening leaves replies behind; the next calls must not take them for theirs.
            while batch.running and not self._closed:
                self._collect(batch)
            self._drop(batch)

    def _begin(self, batch: ProcessBatch[T], number: int, numbers: Collection[int]) -> int | None:
        """The next call for a process, which answers it from now on; None if there is none for it."""
        for position in batch.ready():
            call = batch.calls[position]
            # A session's live objects are in one process, so all its calls go there.
            if not call.session or self._homes.takes(call.client.id, number, numbers):
                batch.begin(position, number)
                return position
        return None

    def _await(self, batch: ProcessBatch[T], position: int) -> None:
        while position not in batch.done:
            self._feed(batch)
            self._collect(batch)
        self._feed(batch)

    def _reply(self, batch: ProcessBatch[T], position: int) -> Reply | None:
        outcome = batch.done.pop(position)
        if isinstance(outcome, str):
            return Reply(batch.calls[position].client, Message(), outcome)
        return self._read(batch, position, outcome)

    @abstractmethod
    def _sendable(self, message: bytes) -> T:
        """What goes to a process of an encoded message."""

    @abstractmethod
    def _collect(self, batch: ProcessBatch[T]) -> None:
        """Waits for an outcome: what the process sent, or an error text in its place."""

    @abstractmethod
    def _read(self, batch: ProcessBatch[T], position: int, outcome: Any) -> Reply | None:
        """A reply, with the client's state saved; None if it was lost, and the call waits again."""

    def _drop(self, batch: ProcessBatch[T]) -> None:
        """Removes replies that nobody takes."""
