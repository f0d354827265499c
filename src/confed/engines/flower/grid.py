"""Flower's grid over a state in this process: messages to sites, and their replies."""

import logging
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from confed.engines.flower.inbox import Inbox, RejectionLog
from confed.engines.flower.objects import PieceStore, check_expansion
from confed.engines.flower.private_api import (
    FLWR_IN_MEMORY_DB_NAME,
    NOOP_ACCOUNT_NAME,
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    ErrorCode,
    LinkState,
    LinkStateFactory,
    NodeInfo,
    NoOpFederationManager,
    ObjectStoreFactory,
    Run,
    TaskIdentity,
    TaskType,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    make_message,
    no_object_id_recompute,
    remove_content_from_message,
)
from confed.federation.checkpoint import private_folder


def piece_store(waiting: Path | None) -> PieceStore:
    """Store of pieces of messages in an empty folder of the server's, or in memory."""
    if waiting is not None:  # leftovers of a process that was killed
        shutil.rmtree(waiting, ignore_errors=True)
        private_folder(waiting)
    return PieceStore(waiting)


def link_state(keys: Iterable[bytes], store: PieceStore) -> LinkStateFactory:
    """Flower's state with a node for each of these public keys."""
    objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    objects.store_instance = store
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
    state = factory.state()
    for public in keys:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0)
    return factory


class SuperLinkGrid(Grid):
    """Flower's grid over a state in this process.

    Attributes:
        inbox: the replies that are waited for.
        notices: what was turned away.
    """

    def __init__(self, state: LinkState, store: PieceStore, largest: int = 2**31) -> None:
        self._state, self._store = state, store
        self.notices = RejectionLog(logging.getLogger(__name__))
        self.inbox = Inbox(state, store, largest, self.notices)
        self._run_id = state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        runs = state.get_run_info(run_ids=[self._run_id])
        self._run = runs[0]
        task = self._run.primary_task_id
        if task is None or state.claim_task(task) is None or not state.activate_task(task):
            raise RuntimeError("Flower did not start the run")
        self._task = task
        self._partial: dict[str, list[Message]] = {}
        # Flower writes these into every message that this process makes.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run_id, SUPERLINK_NODE_ID, task

    @property
    def pieces(self) -> int:
        """The most pieces that a reply may consist of."""
        return self.inbox.pieces

    def set_max_reply_bytes(self, largest: int) -> None:
        """See :class:`confed.engines.remote.sites.Bounded`."""
        self.inbox.largest = min(self.inbox.largest, largest)

    def wait(self, seconds: float) -> bool:
        """See :class:`confed.engines.remote.sites.Waiting`."""
        if self.inbox.arrived.wait(seconds):
            self.inbox.arrived.clear()
        return True

    def beat(self) -> None:
        """Heartbeat of the run; also drops requests whose time is over."""
        self._state.acknowledge_task_heartbeat(self._task)
        self.inbox.sweep(self._run_id)

    def set_run(self, run: Run) -> None:
        """Not supported: this grid has one run, its own."""
        raise NotImplementedError("a SuperLinkGrid has one run, its own")

    @property
    def run(self) -> Run:
        """See Flower's ``Grid``."""
        return self._run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Deprecated in Flower, and not offered here."""
        raise NotImplementedError("make messages with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """See Flower's ``Grid``."""
        return self._state.get_nodes(self._run_id)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Flower's ``Grid``: the nodes that are online."""
        return self._state.get_node_info(node_ids=list(self.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Flower's ``Grid``; "" for a message that was not taken."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        number = message.object_id
        message.metadata.__dict__["_message_id"] = number
        node = message.metadata.dst_node_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
        try:  # before the message can be seen: a site that missed a piece would wait a second for it
            for piece in self._store.preregister(self._run_id, tree):
                self._store.put(piece, objects[piece].deflate())
        except OSError:
            self.notices.add("this server", "a request could not be stored, and was not sent")
            self._store.delete(number)
            return ""
        self.inbox.expect(number, node)
        if self._state.store_message_ins(remove_content_from_message(message)) is None:
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
            self._run_id, "", self.inbox.node(number), SUPERLINK_NODE_ID, number, "", time.time(), 0.0, "train"
        )
        return [make_message(about, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, "this reply is not waited for"))]

    def forget(self, number: str) -> None:
        """Removal of a message that is no longer waited for, with all its pieces and those of its reply."""
        self._partial.pop(number, None)
        self.inbox.forget(number)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Flower's ``Grid``; waits for all."""
        waiting, began, replies = set(self.push_messages(messages)) - {""}, time.monotonic(), list[Message]()
        while waiting and (timeout is None or time.monotonic() - began < timeout):
            for number in list(waiting):
                if got := self._pull(number):
                    replies += got
                    waiting.discard(number)
            if waiting:
                self.wait(0.05)
        return replies


def _whole(reply: Message, contents: dict[str, bytes], largest: int) -> Message:
    """A reply with its content; without any where that is not what it says it is."""
    if reply.has_error():
        return reply
    try:
        check_expansion(contents, largest)
        whole = inflate_object_from_contents(reply.metadata.message_id, contents)
    except Exception:  # whatever a site may have sent in place of its content
        whole = None
    return whole if isinstance(whole, Message) else make_message(reply.metadata, content=RecordDict())
