"""Calls and replies as bytes, for processes of one owner: a JSON head, the message and the client's state."""

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import torch

from confed.engines.perform import Setup, Workspace, answer
from confed.engines.usage import Timeline
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import ClientState, Store
from confed.federation.wire import decode, decode_state, encode, encode_state


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


class CallQueue:
    """Calls that a flow asked for together, by their positions, and which process may take which."""

    def __init__(self, calls: Sequence[Call], homes: Homes) -> None:
        self.calls, self._homes = calls, homes
        self.running: dict[int, int] = {}  # number of a process -> the position of its call
        self.done: set[int] = set()  # positions whose replies have come and were not handed on yet
        self._waiting = list(range(len(calls)))[::-1]

    def __bool__(self) -> bool:
        """Whether calls wait for a process."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """How many calls wait for a process."""
        return len(self._waiting)

    @property
    def first(self) -> Call:
        """The first call that waits."""
        return self.calls[self._waiting[-1]]

    def waiting(self) -> list[Call]:
        """The calls that wait for a process, in order."""
        return [self.calls[position] for position in reversed(self._waiting)]

    def take(self, number: int, numbers: Collection[int]) -> int | None:
        """The position of the next call for a process, which is running then; None if there is none for it now."""
        place = self._next(number, numbers)
        if place is None:
            return None
        self.running[number] = self._waiting.pop(place)
        return self.running[number]

    def finish(self, number: int) -> int:
        """The position of the call whose reply has come from a process."""
        position = self.running.pop(number)
        self.done.add(position)
        return position

    def put_back(self, number: int) -> int:
        """The position of the call of a process that has ended; it waits again, as the first."""
        position = self.running.pop(number)
        self.wait_again(position)
        return position

    def wait_again(self, position: int) -> None:
        """Puts a call whose reply was lost before the others that wait."""
        self._waiting.append(position)

    def _next(self, number: int, numbers: Collection[int]) -> int | None:
        """Where in ``_waiting``, which ends with the first, the first call stands that a process may take."""
        # Calls to one client follow each other: the later one needs the state the earlier one leaves, and that is
        # kept when the earlier reply is handed on.
        busy = {self.calls[position].client.id for position in (*self.running.values(), *self.done)}
        homes = self._homes.of
        for place in range(len(self._waiting) - 1, -1, -1):
            call = self.calls[self._waiting[place]]
            if call.client.id in busy:
                if not call.session:  # the order of calls is the order of work, but for clients with a home
                    return None
                continue
            if not call.session:
                return place
            # A session's live objects are in one process, so all its calls go there; new ones to where few are.
            if call.client.id not in homes:
                guests = Counter(homes.values())
                if guests[number] > min(guests[n] for n in numbers):
                    continue
                homes[call.client.id] = number
            if homes[call.client.id] == number:
                return place
        return None


T = TypeVar("T")


def call_head(call: Call, round: int) -> bytes:
    """Everything of a call but its message, as JSON."""
    expects = call.expects
    head = {
        "session": call.session,
        "id": call.client.id,
        "num_examples": call.client.num_examples,
        "modalities": call.client.modalities,
        "head": call.client.head,
        "action": call.action,
        "round": round,
        "expects": None
        if expects is None
        else {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in expects.items()},
    }
    return json.dumps(head).encode()


def answer_bytes(
    setup: Setup, workspace: Workspace, head: bytes, message: bytes, state: bytes
) -> tuple[bytes, bytes, bytes]:
    told: dict[str, Any] = json.loads(head)
    info = ClientInfo(told["id"], told["num_examples"], tuple(told["modalities"]), told["head"])
    expects = None
    if told["expects"] is not None:
        # Only names, shapes and dtypes are compared, so tensors without memory do.
        expects = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in told["expects"].items()
        }
    store, began = _OneState(decode_state(state)), time.perf_counter()
    call = Call(info, told["action"], decode(message), expects, told["session"])
    reply = answer(setup, workspace, call, store, told["round"])
    span = (began, time.perf_counter())
    back = json.dumps({"error": reply.error, "saved": store.saved, "span": span}).encode()
    return back, encode(reply.message), encode_state(store.load(info.id)) if store.saved else b""


@dataclass(frozen=True)
class Answer:
    reply: Reply
    span: tuple[float, float]  # start and end of the work, in readings of the clock of the process that did it


def read_answer(call: Call, parts: Sequence[bytes], store: Store) -> Answer:
    """A reply from its bytes; the client's new state, if it has one, is saved."""
    head = json.loads(parts[0])
    if head["saved"]:
        store.save(call.client.id, decode_state(parts[2]))
    message = decode(parts[1]) if parts[1] else Message()
    return Answer(Reply(call.client, message, head["error"]), (head["span"][0], head["span"][1]))


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


@dataclass
class Work(Generic[T]):
    """Calls that a flow asked for together, while processes compute them."""

    queue: CallQueue
    store: Store
    round: int
    messages: Encoded[T]
    early: dict[int, Any] = field(default_factory=dict[int, Any])  # position -> a reply that waits for its turn
    tries: dict[int, int] = field(default_factory=dict[int, int])  # position -> processes that were lost over it


class ProcessExecutor(ABC, Generic[T]):
    """Answers calls in processes; see :class:`confed.engines.executor.Executor`."""

    def __init__(self) -> None:
        self.timeline, self._homes, self._closed = Timeline(0), Homes(), False

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the first are being computed when this returns."""
        replies = self._replies(calls, store, round)
        next(replies)
        return replies  # pyright: ignore[reportReturnType]  # after the first None there are replies only

    def _replies(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply | None]:
        self._homes.begin(round)
        work = Work(CallQueue(calls, self._homes), store, round, Encoded(self._sendable))
        try:
            self._feed(work)
            yield None
            for position, call in enumerate(calls):
                reply = None
                while reply is None:
                    while position not in work.early:
                        self._feed(work)
                        self._collect(work)
                    self._feed(work)
                    work.queue.done.remove(position)
                    early = work.early.pop(position)
                    is_error = isinstance(early, str)
                    reply = Reply(call.client, Message(), early) if is_error else self._read(work, position, early)
                yield reply
        finally:
            # A flow that stops listening leaves replies behind; the next calls must not take them for theirs.
            while work.queue.running and not self._closed:
                self._collect(work)
            self._drop(work)

    @abstractmethod
    def _sendable(self, message: bytes) -> T:
        """What goes to a process of an encoded message."""

    @abstractmethod
    def _feed(self, work: Work[T]) -> None:
        """Gives calls to the processes that are free."""

    @abstractmethod
    def _collect(self, work: Work[T]) -> None:
        """Waits for a reply, which is ``early`` then, or an error text in its place."""

    @abstractmethod
    def _read(self, work: Work[T], position: int, early: Any) -> Reply | None:
        """A reply, with the client's state saved; None if it was lost, and the call waits again."""

    def _drop(self, work: Work[T]) -> None:
        """Removes replies that nobody takes."""


class _OneState:
    """The state of the one client at hand, and whether it was saved; see :class:`Store`."""

    def __init__(self, state: ClientState) -> None:
        self._state, self.saved = state, False

    def begin(self, version: int) -> None:
        """The asking process's store counts versions."""

    def load(self, client_id: str) -> ClientState:
        return self._state.copy()

    def save(self, client_id: str, state: ClientState) -> None:
        self._state, self.saved = state, True
