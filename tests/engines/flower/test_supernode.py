"""A site's line to a server that sends what it should not: the site stays, and takes in no more than it allows."""

import gzip
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from confed.deployment.authority import make_key
from confed.engines.flower.objects import PIECE
from confed.engines.flower.supernode import SuperNode, read_key
from confed.engines.flower.transport import pack

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LIMIT = 2**20
PROTOBUF = "application/x-protobuf"


class Server:
    """Answers every question for messages with what it is given, and remembers what sites say."""

    def __init__(self) -> None:
        self.message: bytes = b""
        self.pieces: dict[str, bytes] = {}
        self.always: Response | None = None
        self.pulled = self.asked = 0
        self.replies: list[PushMessagesRequest] = []
        self.app = FastAPI()
        self.app.post("/{path:path}")(self.answer)

    async def answer(self, path: str, request: Request) -> Response:
        name = path.rpartition("/")[2]
        if name == "activate-node":
            return Response(ActivateNodeResponse(node_id=7).SerializeToString(), media_type=PROTOBUF)
        if name == "pull-messages":
            self.asked += 1
            return self.always or Response(self.message, media_type=PROTOBUF)
        if name == "pull-object":
            self.pulled += 1
            body = await request.body()
            content = next((c for n, c in self.pieces.items() if n.encode() in body), b"x" * (LIMIT // 3))
            found = PullObjectResponse(object_found=True, object_available=True, object_content=content)
            return Response(found.SerializeToString(), media_type=PROTOBUF)
        if name == "push-messages":
            self.replies.append(PushMessagesRequest.FromString(await request.body()))
            self.message = b""
            return Response(PushMessagesResponse().SerializeToString(), media_type=PROTOBUF)
        return Response(b"", media_type=PROTOBUF)

    def send(self, message: Message) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        parts = get_all_nested_objects(message)
        self.pieces = {name: part.deflate() for name, part in parts.items()}
        self.message = PullMessagesResponse(
            messages_list=[message_to_proto(message)], message_object_trees=[get_object_tree(message)]
        ).SerializeToString()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, int]]:
    made = Server()
    server = uvicorn.Server(uvicorn.Config(made.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield made, int(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture
def server(served: tuple[Server, int]) -> Server:
    served[0].__init__()  # type: ignore[misc]
    return served[0]


class Sitting:
    """A site on its line, in a thread."""

    def __init__(self, port: int, root: Path, app: ClientApp) -> None:
        make_key(root / "key")
        self.said: list[str] = []
        self.stop = threading.Event()
        line = SuperNode(
            f"127.0.0.1:{port}", read_key(root / "key"), None, interval=0.05, largest=LIMIT,
            progress=lambda event: self.said.append(event.text),
        )  # fmt: skip
        self.thread = threading.Thread(target=line.serve, args=(app, self.stop), daemon=True)
        self.thread.start()

    def hears(self, text: str) -> bool:
        began = time.monotonic()
        while time.monotonic() - began < 30:
            if any(text in said for said in self.said):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        assert self.thread.is_alive()  # whatever came
        self.stop.set()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


def app(fault: Exception | None = None) -> ClientApp:
    made = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        if fault is not None:
            raise fault
        return Message(pack(b"{}", b"done"), reply_to=message)

    made.train("call")(answer)
    return made


def number(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def bare() -> ProtoMessage:
    about = ProtoMetadata(run_id=1, message_id=number("m"), src_node_id=1, dst_node_id=7, message_type="train.call")
    about.ttl, about.created_at = 60.0, time.time()
    message = ProtoMessage(metadata=about)
    message.content.SetInParent()
    return message


def request() -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(pack(b"{}", b"x"), 7, "train.call", ttl=60)
    message.metadata.__dict__["_src_node_id"] = 1
    return message


def no_tree() -> bytes:
    return PullMessagesResponse(messages_list=[bare()]).SerializeToString()


def no_content() -> bytes:
    message = bare()
    message.ClearField("content")
    trees = [ObjectTree(object_id=number("m"))]
    return PullMessagesResponse(messages_list=[message], message_object_trees=trees).SerializeToString()


def many_pieces() -> bytes:
    tree = ObjectTree(object_id=number("m"), children=[ObjectTree(object_id=number(str(n))) for n in range(1000)])
    return PullMessagesResponse(messages_list=[bare()], message_object_trees=[tree]).SerializeToString()


def large_together() -> bytes:
    tree = ObjectTree(object_id=number("m"), children=[ObjectTree(object_id=number(str(n))) for n in range(60)])
    return PullMessagesResponse(messages_list=[bare()], message_object_trees=[tree]).SerializeToString()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (no_tree(), "what is no message"),
        (no_content(), "what is no message"),
        (many_pieces(), "at most 64 pieces"),
        (large_together(), "more bytes than this run's have"),
        (b"\xff\xff\xff", "what is no protobuf message"),
        (b"\x00" * (PIECE + 1), f"a response of more than {PIECE} bytes"),
    ],
    ids=["no tree", "no content", "many pieces", "large", "garbage", "long"],
)
def test_a_faulty_message_ends_nothing(
    served: tuple[Server, int], server: Server, tmp_path: Path, sent: bytes, says: str
) -> None:
    server.message = sent
    site = Sitting(served[1], tmp_path, app())
    assert site.hears(says), site.said
    assert server.pulled < 3 + 16  # and what was on its way at that moment, not all sixty
    server.send(request())
    began = time.monotonic()
    while not server.replies and time.monotonic() - began < 30:
        time.sleep(0.02)
    site.end()
    assert len(server.replies) >= 1, site.said


def test_responses_are_neither_packed_nor_from_elsewhere(
    served: tuple[Server, int], server: Server, tmp_path: Path
) -> None:
    bomb = gzip.compress(bytes(50 * 2**20))
    server.always = Response(bomb, media_type=PROTOBUF, headers={"content-encoding": "gzip"})
    site = Sitting(served[1], tmp_path, app())
    assert site.hears("a packed response"), site.said
    server.always = Response(status_code=307, headers={"location": f"http://127.0.0.1:{served[1]}/elsewhere"})
    assert site.hears("the server says 307"), site.said
    site.end()


def test_the_text_of_an_error_stays_at_the_site(served: tuple[Server, int], server: Server, tmp_path: Path) -> None:
    fault = FileNotFoundError(2, "No such file or directory", "/data/Miller_Jane_1950.png")
    server.send(request())
    site = Sitting(served[1], tmp_path, app(fault))
    assert site.hears("Miller_Jane"), site.said
    while not server.replies:
        time.sleep(0.02)
    site.end()
    reason = server.replies[0].messages_list[0].error.reason
    assert reason == "FileNotFoundError: [Errno 2] No such file or directory"


def test_a_proxy_on_the_way_is_named_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers in place of the server, or does not, is the proxy that the environment names."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    said: list[str] = []
    make_key(tmp_path / "key")

    def ended() -> str:
        node = SuperNode(
            "fed.invalid:9093", read_key(tmp_path / "key"), None, progress=lambda note: said.append(note.text)
        )
        return node.serve(None, threading.Event(), patience=0.0)  # type: ignore[arg-type]

    assert "proxy" not in ended()
    monkeypatch.setenv("http_proxy", "http://someone:secret@127.0.0.1:9")
    reason = ended()
    for text in (reason, said[-1]):
        assert "through the proxy 127.0.0.1:9, which the environment variable HTTP_PROXY or ALL_PROXY names" in text
        assert "NO_PROXY=fed.invalid" in text
        assert "secret" not in text
    monkeypatch.setenv("no_proxy", "fed.invalid")
    assert "proxy" not in ended()
