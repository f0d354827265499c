"""Flower's grid over a state in this process: messages to sites, and their replies.

Flower's own handlers take whatever is announced under the number of a message that they know. Here a reply is announced
once, names its pieces once, and what belongs to no open request is dropped.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from uuid import uuid4

from fastapi import HTTPException
from flwr.app import Error, Message, Metadata, RecordDict

from confed.engines.flower import private_api as internal
from confed.engines.flower.long_polls import LongPolls
from confed.engines.flower.objects import INLINE, PieceStore, attach, check_expansion, detach, most_pieces, pieces_of
from confed.federation.checkpoint import private_folder

BARE = 64 * 2**10  # bytes of a reply without its content, at most: who answers what, or an error


class RequestRejected(HTTPException):
    """Rejection of a site's request, with its HTTP status."""

    def __init__(self, status: int, why: str, closing: bool = False) -> None:
        super().__init__(status, why, {"connection": "close"} if closing else None)
        self.why = why


class RejectionLog:
    """Log of rejected and late messages: the first of a kind, the second, the fourth, the eighth and so on."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._lock = log, threading.Lock()
        self.counts: dict[tuple[str, str], int] = {}

    def add(self, who: str, why: str) -> None:
        with self._lock:
            count = self.counts[who, why] = self.counts.get((who, why), 0) + 1
        if count & (count - 1) == 0:
            self._log.warning("%s: %s%s", who, why, f" ({count} times so far)" * (count > 1))


@dataclass
class _Open:
    """A request whose reply is waited for."""

    node: int
    reply: str = ""
    session: str = ""
    pieces: tuple[str, ...] = ()
    sent: set[str] = field(default_factory=set[str])
    held: int = 0


class Inbox:
    """The open requests of a server, and the pieces of their replies."""

    def __init__(self, state: internal.LinkState, store: PieceStore, largest: int, notices: RejectionLog) -> None:
        self.state, self.store, self._notices = state, store, notices
        self.largest = largest
        self.arrived = threading.Event()  # set when a reply is complete; who waits for one clears it
        self.polls = LongPolls()  # requests of nodes that wait for a message
        self.lock = threading.RLock()
        self._open: dict[str, _Open] = {}
        self._sessions: dict[str, str] = {}

    @property
    def pieces(self) -> int:
        """The most pieces that a reply may consist of."""
        return most_pieces(self.largest)

    def __len__(self) -> int:
        return len(self._open)

    def expect(self, number: str, node: int) -> None:
        """Opens a node's reply to a request."""
        with self.lock:
            self._open[number] = _Open(node)

    def node(self, number: str) -> int:
        """The node whose reply to a request is waited for; 0 where there is no such request."""
        with self.lock:
            return self._open[number].node if number in self._open else 0

    def held(self, node: int) -> int:
        with self.lock:
            return sum(entry.held for entry in self._open.values() if entry.node == node)

    def hand_out(self, request: internal.PullMessagesRequest) -> internal.PullMessagesResponse:
        """A node's next message, with its pieces where they are small; an empty response where there is none."""
        came = internal.pull_messages(request, self.state, self.store)
        for message in came.messages_list:
            if (pieces := self.store.small(message.metadata.message_id, INLINE)) is not None:
                attach(message, pieces)
                self.store.delete(message.metadata.message_id)  # as if the node had confirmed it
        return came

    def announce(self, request: internal.PushMessagesRequest, who: str) -> internal.PushMessagesResponse:
        """Announcement of a reply and its pieces by a site; the pieces of a small reply come along with it."""
        if len(request.message_object_trees) != 1 or len(request.messages_list) != 1:
            raise RequestRejected(413, "a request carries one reply")
        bare, tree, node = request.messages_list[0], request.message_object_trees[0], request.node.node_id
        inline = detach(bare)
        if bare.ByteSize() > BARE:
            raise RequestRejected(413, f"without its content a reply has at most {BARE} bytes")
        if bare.metadata.src_node_id != node:
            raise RequestRejected(403, "a reply is sent by whom it is from")
        if bare.metadata.message_id != tree.object_id:
            raise RequestRejected(400, "a reply has the number of its content")
        try:
            pieces = pieces_of(tree, self.pieces)
        except ValueError as error:
            raise RequestRejected(413, str(error)) from error
        with self.lock:
            entry = self._open.get(bare.metadata.reply_to_message_id)
            if entry is not None and entry.node != node:
                raise RequestRejected(403, "a request is answered by whom it was for")
            if entry is not None and (entry.reply or tree.object_id in self.store):
                raise RequestRejected(409, "a request has one reply")
            already = self.store.size(pieces)
            if self.held(node) + already > self.largest:
                raise RequestRejected(413, "a reply has more bytes than it may have")
            try:
                taken = (
                    entry is not None and self.state.store_message_res(internal.message_from_proto(bare)) is not None
                )
            except Exception as error:  # whatever a site may have written into it
                raise RequestRejected(400, "what was sent is no message") from error
            if entry is None or not taken:
                self._notices.add(who, "a reply was dropped that is no longer waited for")
                return internal.PushMessagesResponse(results={bare.metadata.message_id: 0})
            missing = self.store.preregister(bare.metadata.run_id, tree)
            entry.reply, entry.session, entry.pieces, entry.held = tree.object_id, uuid4().hex, pieces, already
            entry.sent = set(pieces).difference(missing)
            self._sessions[entry.session] = bare.metadata.reply_to_message_id
            for piece in [piece for piece in missing if piece in inline]:
                self._keep(entry, piece, inline[piece])
            self._note(entry)
        wanted = [piece for piece in missing if piece not in inline]
        return internal.PushMessagesResponse(results={entry.reply: 0}, objects_to_push=wanted, session_id=entry.session)

    def take(self, request: internal.PushObjectRequest, who: str) -> internal.PushObjectResponse:
        """A piece of an announced reply, sent by a site."""
        piece, content = request.object_id, request.object_content
        with self.lock:
            entry = self._open.get(self._sessions.get(request.session_id, ""))
            if entry is None:
                self._notices.add(who, "a piece was dropped that is no longer waited for")
                return internal.PushObjectResponse(stored=True)
            if entry.node != request.node.node_id:
                raise RequestRejected(403, "a piece is sent by whom the reply is from")
            if piece not in entry.sent:
                if piece not in entry.pieces:
                    raise RequestRejected(400, "a piece was not announced")
                self._keep(entry, piece, content)
                self._note(entry)
        return internal.PushObjectResponse(stored=True)

    def _keep(self, entry: _Open, piece: str, content: bytes) -> None:
        """Puts an announced piece into the store."""
        if self.held(entry.node) + len(content) > self.largest:
            raise RequestRejected(413, "a reply has more bytes than it may have")
        try:
            self.store.put(piece, content)
        except OSError as error:  # the disk is full: the server's fault
            raise HTTPException(507, "the server cannot keep it") from error
        except Exception as error:  # whatever is wrong with it
            raise RequestRejected(400, "a piece is not what it says it is") from error
        entry.sent.add(piece)
        entry.held += len(content)

    def _note(self, entry: _Open) -> None:
        """Wakes who waits for a reply, where it is complete."""
        if len(entry.sent) == len(entry.pieces):
            self.arrived.set()

    def confirm(self, request: internal.ConfirmMessageReceivedRequest) -> internal.ConfirmMessageReceivedResponse:
        """A site has a request whole, and its pieces can go; nothing else can be deleted from outside."""
        with self.lock:
            if self.node(request.message_object_id) == request.node.node_id:
                self.store.delete(request.message_object_id)
        return internal.ConfirmMessageReceivedResponse()

    def contents(self, number: str) -> dict[str, bytes] | None:
        """The pieces of the reply to a request; None while some have not come, and none where they are too large."""
        with self.lock:
            entry = self._open.get(number)
            if entry is None or not entry.reply or not self.store.complete(entry.pieces):
                return None
            # Another site may have sent what both announced; then it is not in this one's count.
            if self.store.size(entry.pieces) > self.largest:
                return {}
            return {piece: self.store.get(piece) or b"" for piece in entry.pieces}

    def forget(self, number: str) -> None:
        """Drops a request, with all that has come of its reply."""
        with self.lock:
            entry = self._open.pop(number, None)
            self.state.delete_messages(message_ins_ids={number})
            self.store.delete(number)
            if entry is not None:
                self._sessions.pop(entry.session, None)
                self.store.delete(entry.reply)

    def sweep(self, run: int) -> None:
        """Drops what Flower has dropped because its time was over."""
        with self.lock:
            for number in set(self._open).difference(self.state.get_message_ids_from_run_id(run)):
                self.forget(number)


def piece_store(waiting: Path | None) -> PieceStore:
    """Store of pieces of messages in an empty folder of the server's, or in memory."""
    if waiting is not None:  # leftovers of a process that was killed
        shutil.rmtree(waiting, ignore_errors=True)
        private_folder(waiting)
    return PieceStore(waiting)


def link_state(keys: Iterable[bytes], store: PieceStore) -> internal.LinkStateFactory:
    """Flower's state with a node for each of these public keys."""
    objects = internal.ObjectStoreFactory(internal.FLWR_IN_MEMORY_DB_NAME)
    objects.store_instance = store
    factory = internal.LinkStateFactory(internal.FLWR_IN_MEMORY_DB_NAME, internal.NoOpFederationManager(), objects)
    state = factory.state()
    for public in keys:
        state.create_node(internal.NOOP_FLWR_AID, internal.NOOP_ACCOUNT_NAME, public, 0)
    return factory


class SuperLinkGrid:
    """Flower's grid over a state in this process: of its ``Grid`` what a transport needs."""

    def __init__(self, state: internal.LinkState, store: PieceStore, largest: int = 2**31) -> None:
        self._state, self._store = state, store
        self.notices = RejectionLog(logging.getLogger(__name__))  # what was turned away
        self.inbox = Inbox(state, store, largest, self.notices)  # the replies that are waited for
        self.renew_certificate: Callable[[], None] = lambda: None  # which :func:`open_superlink` sets
        self._run_id = state.create_run(
            None,
            None,
            None,
            {},
            internal.NOOP_FEDERATION_ID,
            None,
            internal.NOOP_FLWR_AID,
            internal.TaskType.SERVER_APP,
        )
        runs = state.get_run_info(run_ids=[self._run_id])
        task = runs[0].primary_task_id
        if task is None or state.claim_task(task) is None or not state.activate_task(task):
            raise RuntimeError("Flower did not start the run")
        self._task = task
        self._partial: dict[str, list[Message]] = {}
        # Flower writes these into every message that this process makes.
        internal.TaskIdentity.run_id, internal.TaskIdentity.node_id, internal.TaskIdentity.task_id = (
            self._run_id,
            internal.SUPERLINK_NODE_ID,
            task,
        )

    def admit(self, public: bytes) -> None:
        self._state.create_node(internal.NOOP_FLWR_AID, internal.NOOP_ACCOUNT_NAME, public, 0)

    def set_max_reply_bytes(self, largest: int) -> None:
        self.inbox.largest = min(self.inbox.largest, largest)

    def wait(self, seconds: float) -> bool:
        if self.inbox.arrived.wait(seconds):
            self.inbox.arrived.clear()
        return True

    def beat(self) -> None:
        """Heartbeat of the run; also drops requests whose time is over."""
        self._state.acknowledge_task_heartbeat(self._task)
        self.inbox.sweep(self._run_id)

    def get_nodes(self) -> Iterable[internal.NodeInfo]:
        """See Flower's ``Grid``: the nodes that are online."""
        return self._state.get_node_info(node_ids=list(self._state.get_nodes(self._run_id)))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Flower's ``Grid``; "" for a message that was not taken."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        with internal.no_object_id_recompute():
            number = message.object_id
            message.metadata.__dict__["_message_id"] = number
            tree, objects = internal.get_object_tree(message), internal.get_all_nested_objects(message)
            try:  # before the message can be seen: a site that missed a piece would wait a second for it
                for piece in self._store.preregister(self._run_id, tree):
                    self._store.keep(piece, objects[piece].deflate())
            except OSError:
                self.notices.add("this server", "a request could not be stored, and was not sent")
                self._store.delete(number)
                return ""
        self.inbox.expect(number, node)
        if self._state.store_message_ins(internal.remove_content_from_message(message)) is None:
            self.forget(number)
            return ""
        self.inbox.polls.ring(node)
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Flower's ``Grid``: the replies that have arrived whole."""
        return list(chain.from_iterable(map(self._pull, message_ids)))

    def _pull(self, number: str) -> list[Message]:
        messages: list[Message] = []
        # Flower hands a reply out once, whether or not its pieces have come in yet.
        for reply in self._partial.pop(number, None) or self._replies(number):
            contents = {} if reply.has_error() else self.inbox.contents(number)
            if contents is None:
                self._partial[number] = [reply]
            else:
                messages.append(_whole(reply, contents, self.inbox.largest))
                self._store.delete(reply.metadata.message_id)  # of Flower's own making, where a node is away
        if messages:
            self.forget(number)
        return messages

    def _replies(self, number: str) -> list[Message]:
        if number in self._state.get_message_ids_from_run_id(self._run_id):
            with suppress(KeyError):  # its time was over at this moment
                return self._state.get_message_res({number}, self._run_id)
        about = Metadata(
            self._run_id, "", self.inbox.node(number), internal.SUPERLINK_NODE_ID, number, "", time.time(), 0.0, "train"
        )
        return [
            internal.make_message(
                about, error=Error(internal.ErrorCode.MESSAGE_UNAVAILABLE, "this reply is not waited for")
            )
        ]

    def forget(self, number: str) -> None:
        """Removal of a message that is no longer waited for, with all its pieces and those of its reply."""
        self._partial.pop(number, None)
        self.inbox.forget(number)


def _whole(reply: Message, contents: dict[str, bytes], largest: int) -> Message:
    """A reply with its content; without any where that is not what it says it is."""
    if reply.has_error():
        return reply
    try:
        check_expansion(contents, largest)
        whole = internal.inflate_object_from_contents(reply.metadata.message_id, contents)
    except Exception:  # whatever a site may have sent in place of its content
        whole = None
    return whole if isinstance(whole, Message) else internal.make_message(reply.metadata, content=RecordDict())
