"""What sites may send in at the server's door, and what is kept of it: the handlers, without sockets."""

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from fastapi import HTTPException
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from confed.engines.flower import objects
from confed.engines.flower.grid import Inbox, RejectionLog, RequestRejected, SuperLinkGrid, link_state
from confed.engines.flower.objects import DEPTH, PieceStore, attach, pieces_of
from confed.engines.flower.transport import FlowerTransport

LIMIT = 2**20
KEYS = (b"one", b"two")
Change = Callable[[PushMessagesRequest], None]


def number(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Door:
    """A server with two sites, of which the first is the one that sends."""

    def __init__(self, root: Path | None = None, largest: int = LIMIT) -> None:
        self.root, self.store = root, PieceStore(root)
        self.state = link_state(KEYS, self.store).state()
        self.grid = SuperLinkGrid(self.state, self.store, largest)
        self.inbox: Inbox = self.grid.inbox
        self.post = FlowerTransport(self.grid)
        self.nodes = [self.state.get_node_id_by_public_key(key) or 0 for key in KEYS]
        for node in self.nodes:
            self.state.activate_node(node, 1e6)

    def ask(self, to: int = 0, lasts: float = 60.0) -> tuple[str, Message]:
        sent = self.post.send(self.nodes[to], "fit", b"{}", b"x", lasts)
        assert sent is not None
        (asked,) = self.state.get_message_ins(self.nodes[to], 1)
        return sent, asked

    def reply(self, asked: Message, body: bytes = b"answer") -> tuple[PushMessagesRequest, dict[str, bytes]]:
        """An honest reply, and its pieces."""
        content = RecordDict({"head": ConfigRecord({"head": b"{}"}), "body": ArrayRecord({"body": array(body)})})
        message = Message(content, reply_to=asked)
        message.metadata.__dict__["_src_node_id"] = asked.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=Node(node_id=asked.metadata.dst_node_id),
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return request, {name: part.deflate() for name, part in get_all_nested_objects(message).items()}

    def send(self, out: PushMessagesResponse, name: str, content: bytes, node: int = 0) -> bool:
        request = PushObjectRequest(
            node=Node(node_id=self.nodes[node]), run_id=1, session_id=out.session_id, object_id=name
        )
        request.object_content = content
        return self.inbox.take(request, "one").stored

    def bytes(self) -> int:
        assert self.root is not None
        return sum(path.stat().st_size for path in self.root.iterdir())

    def is_empty(self) -> bool:
        """Nothing is left of any message, in any table or on disk."""
        tables = [self.inbox._open, self.inbox._sessions, self.store._wholes, self.store._uses, self.store._sizes]
        tables += [self.store._memory, self.grid._partial, self.state.message_ins_store, self.state.message_res_store]
        tables += [self.state.message_ins_id_to_message_res_id, self.state._object_push_sessions]
        return not any(tables) and (self.root is None or not list(self.root.iterdir()))


def array(body: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(body),), stype="confed", data=body)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def test_an_honest_reply_is_received_and_leaves_nothing(door: Door) -> None:
    sent, asked = door.ask()
    assert door.post.receive(sent) is None
    request, parts = door.reply(asked)
    out = door.inbox.announce(request, "one")
    assert set(out.objects_to_push) == set(parts)
    for name in list(parts):
        assert door.post.receive(sent) is None
        assert door.send(out, name, parts[name])
        assert door.send(out, name, parts[name])  # again: no harm
    assert door.post.receive(sent) == (b"{}", b"answer")
    assert door.is_empty()


def test_a_reply_with_its_pieces_inside_is_complete_at_once(door: Door) -> None:
    sent, asked = door.ask()
    request, parts = door.reply(asked)
    attach(request.messages_list[0], parts)
    began = time.monotonic()
    door.grid.wait(0.05)
    assert time.monotonic() - began >= 0.05  # nothing has arrived
    assert not door.inbox.announce(request, "one").objects_to_push
    assert door.grid.wait(60)
    assert time.monotonic() - began < 30
    assert door.post.receive(sent) == (b"{}", b"answer")
    assert door.is_empty()


@pytest.mark.parametrize("faulty", ["another content", "too much"])
def test_pieces_inside_of_a_reply_are_checked_as_others_are(tmp_path: Path, faulty: str) -> None:
    door = Door(tmp_path, LIMIT if faulty == "another content" else 1000)
    sent, asked = door.ask()
    request, parts = door.reply(asked, bytes(2000))
    name = next(reversed(parts)) if faulty == "another content" else ""
    attach(request.messages_list[0], {number: b"x" * 9 if number == name else part for number, part in parts.items()})
    with pytest.raises(RequestRejected, match="not what it says" if name else "more bytes"):
        door.inbox.announce(request, "one")
    assert door.post.receive(sent) is None
    door.post.forget(sent)
    assert door.is_empty()


def test_a_tree_whose_paths_multiply_is_turned_away(door: Door) -> None:
    def levels(many: int) -> ObjectTree:
        tree = ObjectTree(object_id=number("root"))
        tree.children.add(object_id=number("0"))
        for level in range(1, many):
            node = tree.children.add(object_id=number(str(level)))
            for _ in range(2):
                node.children.add(object_id=number(str(level - 1)))
        return tree

    sent, asked = door.ask()
    request, _ = door.reply(asked)
    request.message_object_trees[0].CopyFrom(levels(20))
    request.messages_list[0].metadata.message_id = number("root")
    with pytest.raises(RequestRejected, match="the same parts wherever"):
        door.inbox.announce(request, "one")
    began = time.perf_counter()
    assert door.post.receive(sent) is None
    assert time.perf_counter() - began < 1
    door.post.forget(sent)
    assert door.is_empty()


def test_trees_have_few_nodes_in_few_levels() -> None:
    chain = ObjectTree(object_id=number("0"))
    for level in range(1, DEPTH):
        chain = ObjectTree(object_id=number(str(level)), children=[chain])
    assert len(pieces_of(chain, DEPTH)) == DEPTH
    with pytest.raises(ValueError, match="at most"):
        pieces_of(chain, DEPTH - 1)
    with pytest.raises(ValueError, match="levels"):
        pieces_of(ObjectTree(object_id=number("top"), children=[chain]))
    broad = ObjectTree(object_id=number("r"), children=[ObjectTree(object_id=number("c"))] * 50)
    assert len(pieces_of(broad, 51)) == 2
    with pytest.raises(ValueError, match="at most"):
        pieces_of(broad, 50)
    with pytest.raises(ValueError, match="SHA-256"):
        pieces_of(ObjectTree(object_id="../../etc/passwd"))


def test_a_chain_over_several_replies_is_none_in_the_store(tmp_path: Path) -> None:
    """Each tree hangs the one before under a new root; Flower's store would follow all of them when it deletes."""
    store, before = PieceStore(tmp_path), number("first")
    store.preregister(1, ObjectTree(object_id=before))
    for level in range(3000):
        after = number(f"level {level}")
        store.preregister(1, ObjectTree(object_id=after, children=[ObjectTree(object_id=before)]))
        before = after
    assert len(pieces_of(store.get_object_tree(before))) == 2
    store.delete(before)
    assert len(store) == 3000
    store.delete_objects_in_run(1)
    assert not len(store)


def name_of_another(request: PushMessagesRequest) -> None:
    request.messages_list[0].metadata.message_id = number("another")


def source_of_another(request: PushMessagesRequest) -> None:
    request.messages_list[0].metadata.src_node_id += 1


def two_replies(request: PushMessagesRequest) -> None:
    request.messages_list.add()


def no_tree(request: PushMessagesRequest) -> None:
    del request.message_object_trees[:]


def no_content(request: PushMessagesRequest) -> None:
    request.messages_list[0].ClearField("content")


def much_beside(request: PushMessagesRequest) -> None:
    request.messages_list[0].ClearField("content")
    request.messages_list[0].error.reason = "x" * 2**20


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (name_of_another, 400),
        (source_of_another, 403),
        (two_replies, 413),
        (no_tree, 413),
        (no_content, 400),
        (much_beside, 413),
    ],
)
def test_what_is_no_reply_is_turned_away(door: Door, change: Change, status: int) -> None:
    sent, asked = door.ask()
    honest, parts = door.reply(asked)
    faulty = PushMessagesRequest()
    faulty.CopyFrom(honest)
    change(faulty)
    with pytest.raises(RequestRejected) as turned:
        door.inbox.announce(faulty, "one")
    assert turned.value.status_code == status
    out = door.inbox.announce(honest, "one")
    for name, content in parts.items():
        door.send(out, name, content)
    assert door.post.receive(sent) == (b"{}", b"answer")
    assert door.is_empty()


def test_one_site_cannot_fill_the_disk(door: Door) -> None:
    """A request has one reply, and all that is open of a site together has no more bytes than a reply may have."""
    sent, asked = door.ask()
    request, parts = door.reply(asked, bytes(LIMIT // 2))
    out = door.inbox.announce(request, "one")
    for name, content in parts.items():
        assert door.send(out, name, content)
    other = ObjectTree(object_id=request.messages_list[0].metadata.message_id)
    other.children.add(object_id=number("more"))
    again = PushMessagesRequest(
        node=request.node, messages_list=request.messages_list, message_object_trees=[other]
    )  # fmt: skip
    for repeated in (again, request):
        with pytest.raises(RequestRejected, match="one reply"):
            door.inbox.announce(repeated, "one")
    kept = door.bytes()
    second, asked = door.ask()
    request, parts = door.reply(asked, bytes([1]) * (LIMIT // 2))
    out = door.inbox.announce(request, "one")
    with pytest.raises(RequestRejected, match="more bytes"):
        [door.send(out, name, content) for name, content in parts.items()]
    assert door.bytes() < LIMIT
    assert door.bytes() >= kept
    with pytest.raises(RequestRejected, match="not announced"):
        door.send(out, number("more"), b"x")
    with pytest.raises(RequestRejected, match="not what it says"):
        door.send(out, next(reversed(parts)), b"x")
    for one in (sent, second):
        door.post.forget(one)
    assert door.is_empty()


def test_what_two_sites_announced_counts_for_each(door: Door) -> None:
    (sent, asked), (other, asked_too) = door.ask(0), door.ask(1)
    (request, parts), (second, others) = door.reply(asked, b"same" * 1000), door.reply(asked_too, b"same" * 1000)
    out = door.inbox.announce(request, "one")
    for name, content in parts.items():
        door.send(out, name, content)
    late = door.inbox.announce(second, "two")
    shared = set(others).difference(late.objects_to_push)
    assert shared < set(parts)
    assert max(len(parts[name]) for name in shared) > 4000
    assert door.inbox.held(door.nodes[1]) == sum(len(parts[name]) for name in shared)
    assert door.post.receive(sent) == (b"{}", b"same" * 1000)
    assert all(name in door.store for name in shared)
    door.post.forget(other)
    assert door.is_empty()


@pytest.mark.parametrize("came", [0, 2, 100])
def test_a_reply_that_nobody_reads_is_gone_with_its_request(door: Door, came: int) -> None:
    """Whole, in part or only announced at the deadline; and what comes after is dropped without the site's notice."""
    sent, asked = door.ask()
    request, parts = door.reply(asked, bytes(200_000))
    out = door.inbox.announce(request, "one")
    for name in list(parts)[:came]:
        door.send(out, name, parts[name])
    door.post.receive(sent) if 0 < came < 100 else None
    door.post.forget(sent)
    assert door.is_empty()
    assert all(door.send(out, name, content) for name, content in parts.items())
    late = door.inbox.announce(request, "one")
    assert (list(late.objects_to_push), late.session_id) == ([], "")
    assert door.is_empty()
    assert door.grid.notices.counts["one", "a reply was dropped that is no longer waited for"] == 1


def test_what_flower_drops_by_itself_is_dropped_here(door: Door) -> None:
    """Such as a greeting to a site that is connected and never answers."""
    sent, asked = door.ask()
    request, parts = door.reply(asked)
    out = door.inbox.announce(request, "one")
    door.send(out, *next(iter(parts.items())))
    door.state.message_ins_store[sent].metadata.__dict__["_ttl"] = -1.0
    reply = door.post.receive(sent)
    assert isinstance(reply, str)
    assert reply.startswith("ConnectionError")
    assert door.is_empty()
    assert isinstance(door.post.receive(sent), str)
    sent, _ = door.ask()
    door.state.delete_messages({sent})
    door.grid.beat()
    assert door.is_empty()


def test_a_site_answers_and_deletes_for_itself_only(door: Door) -> None:
    sent, asked = door.ask(1)
    request, parts = door.reply(asked)
    request.node.node_id = request.messages_list[0].metadata.src_node_id = door.nodes[0]
    with pytest.raises(RequestRejected, match="by whom it was for"):
        door.inbox.announce(request, "one")
    request, parts = door.reply(asked)
    out = door.inbox.announce(request, "two")
    name, content = next(iter(parts.items()))
    with pytest.raises(RequestRejected, match="by whom the reply is from"):
        door.send(out, name, content, node=0)
    for one in (sent, request.messages_list[0].metadata.message_id):
        door.inbox.confirm(ConfirmMessageReceivedRequest(node=Node(node_id=door.nodes[0]), message_object_id=one))
    assert sent in door.store._wholes
    door.inbox.confirm(ConfirmMessageReceivedRequest(node=Node(node_id=door.nodes[1]), message_object_id=sent))
    assert sent not in door.store._wholes
    assert all(door.send(out, name, content, node=1) for name, content in parts.items())
    assert door.post.receive(sent) == (b"{}", b"answer")


def test_a_site_is_given_what_is_for_it_only(door: Door) -> None:
    """Neither another's request nor the reply to it; what has been sent in has the digest of its content as a name."""
    _, asked = door.ask(0)
    request, parts = door.reply(asked, update := bytes(range(256)) * 40)
    out = door.inbox.announce(request, "one")
    for name, content in list(parts.items())[:-1]:
        assert door.send(out, name, content)
        assert name == hashlib.sha256(content).hexdigest()
    assert any(update in content for content in parts.values())
    assert door.state.get_message_ins(door.nodes[1], None) == []
    door.post.send(door.nodes[1], "fit", b"{}", b"y", 60.0)
    assert door.state.get_message_ins(door.nodes[0], None) == []
    (found,) = door.state.get_message_ins(door.nodes[1], None)
    assert found.metadata.dst_node_id == door.nodes[1]


def test_notices_are_few(caplog: pytest.LogCaptureFixture) -> None:
    notices = RejectionLog(logging.getLogger("door"))
    for _ in range(1000):
        notices.add("a", "too much")
    notices.add("b", "too much")
    assert [record.message for record in caplog.records][:3] == [
        "a: too much",
        "a: too much (2 times so far)",
        "a: too much (4 times so far)",
    ]
    assert len(caplog.records) == 10 + 1


# Anything at all ---------------------------------------------------------------------------------------------

NAMES = st.one_of(st.sampled_from([number(str(n)) for n in range(4)]), st.text(max_size=5))
TREES: st.SearchStrategy[ObjectTree] = st.recursive(
    st.builds(ObjectTree, object_id=NAMES),
    lambda inner: st.builds(ObjectTree, object_id=NAMES, children=st.lists(inner, max_size=4)),
    max_leaves=12,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tree"), TREES, st.booleans()),
        st.tuples(st.just("bytes"), st.integers(0, 2000), st.integers(0, 255)),
        st.tuples(st.just("piece"), st.binary(max_size=300), st.booleans()),
        st.tuples(st.just("large"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("inline"), st.dictionaries(NAMES, st.binary(max_size=300), max_size=3), st.booleans()),
        st.tuples(st.just("look"), st.none(), st.none()),
    ),
    max_size=8,
)


class Vandal:
    """Sends what it is told to in answer to one request."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.sent, self.asked = door.ask()
        self.honest = door.reply(self.asked)
        self.out = PushMessagesResponse()

    def step(self, kind: str, one: object, two: object) -> None:
        request, parts = PushMessagesRequest(), self.honest[1]
        request.CopyFrom(self.honest[0])
        if kind == "tree":
            assert isinstance(one, ObjectTree)
            request.message_object_trees[0].CopyFrom(one)
            if two:
                request.messages_list[0].metadata.message_id = one.object_id
        elif kind == "bytes":
            data = bytearray(request.SerializeToString())
            assert isinstance(one, int)
            assert isinstance(two, int)
            data[one % len(data)] = two
            request = PushMessagesRequest.FromString(bytes(data))
        elif kind == "large":
            assert isinstance(one, int)
            request, parts = self.door.reply(self.asked, bytes([one]) * (LIMIT * one // 3))
        elif kind == "inline":
            assert isinstance(one, dict)
            attach(request.messages_list[0], {**(parts if two else {}), **one})
        if kind in ("tree", "bytes", "large", "inline"):
            self.out = self.door.inbox.announce(request, "one")
            for name, content in parts.items():
                self.door.send(self.out, name, content)
        elif kind == "piece":
            assert isinstance(one, bytes)
            wanted = list(self.out.objects_to_push) or [number("0")]
            name = hashlib.sha256(one).hexdigest() if two else wanted[0]
            self.door.send(self.out, name, one)
        else:
            self.door.post.receive(self.sent)


@cache
def shared_door() -> Door:
    """One for all cases, as making one takes longer than a case; every case leaves it empty."""
    return Door()


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_an_honest_reply_comes_after_whatever_was_sent(steps: list[tuple[str, object, object]]) -> None:
    door = shared_door()
    vandal = Vandal(door)
    try:
        for step in steps:
            with suppress(HTTPException, DecodeError):  # the latter Flower turns away before
                vandal.step(*step)
            assert sum(map(len, door.store._memory.values())) <= LIMIT + 2000  # and the request itself
    finally:
        door.post.forget(vandal.sent)
    assert door.is_empty()
    sent, asked = door.ask()
    request, parts = door.reply(asked)
    out = door.inbox.announce(request, "one")
    for name, content in parts.items():
        door.send(out, name, content)
    assert door.post.receive(sent) == (b"{}", b"answer")
    assert door.is_empty()


def test_a_reply_passes_through_bytes(door: Door) -> None:
    """What the tests send is what a site would: Flower reads it back the same."""
    _, asked = door.ask()
    request, _ = door.reply(asked)
    bare = message_from_proto(PushMessagesRequest.FromString(request.SerializeToString()).messages_list[0])
    assert bare.metadata.message_id == request.message_object_trees[0].object_id


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE], ids=["disk full", "too many files"])
def test_a_request_that_cannot_be_stored_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    door, write, failed = Door(tmp_path), Path.write_bytes, list[Path]()

    def scarce(path: Path, content: bytes) -> int:
        if len(failed) < 1:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", scarce)
    monkeypatch.setattr(objects, "IN_MEMORY", 0)
    sent = door.post.send(door.nodes[0], "fit", b"{}", b"x", 60.0)
    waits = number == errno.EMFILE
    assert failed
    assert (sent is not None) == waits
    assert len(door.state.get_message_ins(door.nodes[0], 1)) == waits
    assert bool(list(tmp_path.iterdir())) == waits
    assert any("could not be stored" in why for _, why in door.grid.notices.counts) != waits
