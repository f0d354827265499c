"""What confed relies on of Flower's internal interfaces: a failure names what a new Flower release changed."""

import ast
import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

SOURCE = ROOT / "src" / "confed"
PRIVATE = SOURCE / "engines" / "flower" / "private_api.py"
PUBLIC = (
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.common",
    "flwr.client",
    "flwr.server",
    "flwr.simulation",
)


@dataclass(frozen=True)
class Needs:
    """What confed's code uses of one name.

    `calls` are written as in our code: `method(self, positional, keyword=)`, or `(positional)` for the object itself.
    `fields` are those of a protobuf message, dotted where they are of a field. `attributes` are looked up on what
    `of` makes of the object. `responses` are fields of the protobuf message that a method returns. `abstract` are the
    abstract methods that a subclass of ours has.
    """

    calls: Sequence[str] = ()
    fields: Sequence[str] = ()
    attributes: Sequence[str] = ()
    of: Callable[[Any], object] = lambda thing: thing
    responses: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    abstract: frozenset[str] | None = None


NEEDS = {
    "make_message": Needs(["(metadata, content=)", "(metadata, error=)"]),
    "remove_content_from_message": Needs(["(message)"]),
    "ErrorCode": Needs(attributes=["CLIENT_APP_RAISED_EXCEPTION", "MESSAGE_UNAVAILABLE"]),
    "message_from_proto": Needs(["(message_proto)"]),
    "message_to_proto": Needs(["(message)"]),
    "ActivateNodeRequest": Needs(fields=["public_key", "heartbeat_interval"]),
    "ActivateNodeResponse": Needs(fields=["node_id"]),
    "InflatableObject": Needs(["deflate(self)"]),
    "activate_node": Needs(["(request=, state=)"]),
    "pull_messages": Needs(["(request, state, store)"]),
    "DeactivateNodeRequest": Needs(fields=["node_id"]),
    "PullMessagesRequest": Needs(fields=["node"]),
    "PullMessagesResponse": Needs(fields=["messages_list", "message_object_trees.object_id"]),
    "PushMessagesRequest": Needs(
        fields=[
            "node.node_id", "messages_list.metadata.run_id", "messages_list.metadata.message_id",
            "messages_list.metadata.src_node_id", "messages_list.metadata.reply_to_message_id",
            "message_object_trees.object_id", "clientapp_runtime_list",
        ]
    ),
    "PushMessagesResponse": Needs(fields=["results", "objects_to_push", "session_id"]),
    "SendNodeHeartbeatRequest": Needs(fields=["node", "heartbeat_interval"]),
    "ConfirmMessageReceivedRequest": Needs(fields=["node.node_id", "message_object_id"]),
    "ConfirmMessageReceivedResponse": Needs(fields=[]),
    "ObjectTree": Needs(fields=["object_id", "children.object_id"]),
    "PushObjectRequest": Needs(fields=["node.node_id", "session_id", "object_id", "object_content"]),
    "PushObjectResponse": Needs(fields=["stored"]),
    "ProtoMessage": Needs(
        fields=["metadata", "content.items.key", "content.items.array_record.items.key",
                "content.items.array_record.items.value.data"],
        attributes=["FromString", "SerializeToString"],
    ),
    "Node": Needs(fields=["node_id"]),
    "NodeInfo": Needs(fields=["node_id", "public_key", "status", "last_activated_at"]),
    "LinkState": Needs(
        [
            "create_node(self, owner_aid, owner_name, public_key, heartbeat_interval)",
            "create_run(self, fab_id, fab_version, fab_hash, override_config, federation_id, federation_config, "
            "flwr_aid, primary_task_type)",
            "get_run_info(self, run_ids=)",
            "claim_task(self, task_id)",
            "activate_task(self, task_id)",
            "acknowledge_task_heartbeat(self, task_id)",
            "get_nodes(self, run_id)",
            "get_node_info(self, node_ids=)",
            "get_node_id_by_public_key(self, public_key)",
            "store_message_ins(self, message)",
            "store_message_res(self, message)",
            "get_message_ids_from_run_id(self, run_id)",
            "get_message_res(self, message_ids, run_id)",
            "delete_messages(self, message_ins_ids=)",
        ]
    ),
    "LinkStateFactory": Needs(["(database, federation_manager, objectstore_factory)", "state(self)"]),
    "TaskType": Needs(attributes=["SERVER_APP"]),
    "FlowerError": Needs(["from_json(value)"], attributes=["message"], of=lambda error: error(1, "text")),
    "http_error_translator": Needs(["(request, call_next)"]),
    "get_all_nested_objects": Needs(["(obj)"]),
    "get_object_body": Needs(["(object_content, cls)"]),
    "get_object_head_values_from_object_content": Needs(["(object_content)"]),
    "get_object_id": Needs(["(object_content)"]),
    "get_object_tree": Needs(["(obj)"]),
    "is_valid_sha256_hash": Needs(["(object_id)"]),
    "no_object_id_recompute": Needs(["()"]),
    "make_confirm_message_received_fn_protobuf": Needs(["(confirm_message_received_protobuf, node, run_id)"]),
    "make_pull_object_fn_protobuf": Needs(["(pull_object_protobuf, node, run_id)"]),
    "make_push_object_fn_protobuf": Needs(["(push_object_protobuf, node, run_id, session_id)"]),
    "inflate_object_from_contents": Needs(["(object_id, object_contents)"]),
    "pull_objects": Needs(["(object_ids, pull_object_fn)"]),
    "push_objects": Needs(["(objects, push_object_fn, object_ids_to_push=)"]),
    "validate_object_content": Needs(["(content)"]),
    "RuntimeVersionHttpInterceptor": Needs(["(component_name=)"]),
    "NoObjectInStoreError": Needs(["(message)"]),
    "ObjectStore": Needs(
        [
            "preregister(self, run_id, object_tree)", "get_object_tree(self, object_id)",
            "put(self, object_id, object_content)", "get(self, object_id)", "delete(self, object_id)",
            "delete_objects_in_run(self, run_id)", "clear(self)", "__contains__(self, object_id)", "__len__(self)",
        ],
        abstract=frozenset(
            ["preregister", "get_object_tree", "put", "get", "delete", "delete_objects_in_run", "clear",
             "__contains__", "__len__"]
        ),
    ),
    "ObjectStoreFactory": Needs(["(database)"], attributes=["store_instance"], of=lambda factory: factory(":memory:")),
    "bytes_to_public_key": Needs(["(public_key_bytes)"]),
    "public_key_to_bytes": Needs(["(public_key)"]),
    "sign_message": Needs(["(private_key, message)"]),
    "verify_signature": Needs(["(public_key, message, signature)"]),
    "ProtobufRoute": Needs(["(path, endpoint)"]),
    "ProtobufTranslationMiddleware": Needs(["(app)"]),
    "Run": Needs(attributes=["primary_task_id"], of=lambda run: run.create_empty(1)),
    "TaskIdentity": Needs(attributes=["run_id", "node_id", "task_id"], of=type),
    "NoOpFederationManager": Needs(["()"]),
    "NodeAuthMiddleware": Needs(["(app)"]),
    "fleet_router": Needs(attributes=["routes"]),
    "FleetHttpClient": Needs(
        [
            "from_server_address(server_address, insecure, root_certificates, interceptors=)",
            "ActivateNode(self, request)", "DeactivateNode(self, request)", "SendNodeHeartbeat(self, request)",
            "PullMessages(self, request)", "PushMessages(self, request)", "PullObject(self, request)",
            "PushObject(self, request)", "ConfirmMessageReceived(self, request)",
        ],
        attributes=["_client.follow_redirects", "_client.headers", "_client.event_hooks"],
        of=lambda client: client("http://localhost"),
        responses={
            "ActivateNode": ["node_id"], "SendNodeHeartbeat": ["success"],
            "PullMessages": ["messages_list", "message_object_trees"],
            "PushMessages": ["objects_to_push", "session_id"],
        },
    ),
    "NodeAuthHttpInterceptor": Needs(["(private_key, public_key)"]),
}  # fmt: skip

FLEET_CALLS = {
    "activate-node", "confirm-message-received", "deactivate-node", "get-fab", "get-run", "pull-messages",
    "pull-object", "push-messages", "push-object", "register-node", "send-node-heartbeat", "unregister-node",
}  # fmt: skip
"""Calls of Flower's Fleet API that were reviewed before our server offered them to the sites on its list."""


def imported(path: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and local name of everything that a file imports, with what `import_module` is given as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", "") for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from ((str(arg.value), "", "") for arg in node.args if isinstance(arg, ast.Constant))


def internal(names: Iterable[tuple[str, str, str]]) -> list[str]:
    """What is imported of Flower's modules and not listed in a public module's `__all__`."""
    public = {(module, name) for module in PUBLIC for name in importlib.import_module(module).__all__}
    return [
        f"{module}.{name}"
        for module, name, _ in names
        if module.split(".")[0] == "flwr" and (module, name) not in public
    ]


IMPORTS = {path.relative_to(SOURCE).as_posix(): set(imported(path)) for path in SOURCE.rglob("*.py")}
OURS = PRIVATE.relative_to(SOURCE).as_posix()
SOURCES = {local: (module, name) for module, name, local in sorted(IMPORTS[OURS]) if module.startswith("flwr.")}
USERS = {
    local: sorted(
        path for path, names in IMPORTS.items() if ("confed.engines.flower.private_api", local, local) in names
    )
    for local in SOURCES
}


def changed(local: str, what: str) -> str:
    module, name = SOURCES[local]
    return f"Flower {version('flwr')} changed {module}.{name}: {what}; used by {', '.join(USERS[local])}"


def call_problem(thing: Any, call: str) -> str:
    method, _, listed = call.removesuffix(")").partition("(")
    function = getattr(thing, method, None) if method else thing
    if function is None:
        return f"no method {method!r}"
    names = [name for name in listed.split(", ") if name]
    positional = [name for name in names if not name.endswith("=")]
    keywords = [name.removesuffix("=") for name in names if name.endswith("=")]
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{call} does not fit {method}{signature}: {error}"
    there = [name for name, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if there[: len(positional)] != positional:
        return f"{call} does not fit {method}{signature}"
    return ""


def field_problem(message: Any, path: str) -> str:
    descriptor = message.DESCRIPTOR
    for part in path.split("."):
        if descriptor is None or part not in descriptor.fields_by_name:
            return f"no field {path!r}"
        descriptor = descriptor.fields_by_name[part].message_type
    return ""


def attribute_problem(thing: Any, path: str) -> str:
    for part in path.split("."):
        if not hasattr(thing, part):
            return f"no attribute {path!r}"
        thing = getattr(thing, part)
    return ""


def check(local: str, needs: Needs) -> None:
    """Fails with the module and name of Flower's, what is missing, and the files of ours that use it."""
    module, name = SOURCES[local]
    try:
        thing: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        pytest.fail(changed(local, f"the name is gone ({error})"))
    problems = [call_problem(thing, call) for call in needs.calls]
    problems += [field_problem(thing, path) for path in needs.fields]
    for method, fields in needs.responses.items():
        problems += [field_problem(typing.get_type_hints(getattr(thing, method))["return"], path) for path in fields]
    if needs.attributes:
        made = needs.of(thing)
        problems += [attribute_problem(made, path) for path in needs.attributes]
    if needs.abstract is not None and thing.__abstractmethods__ != needs.abstract:
        problems.append(f"abstract methods are {sorted(thing.__abstractmethods__)}")
    if any(problems):
        pytest.fail(changed(local, ", ".join(filter(None, problems))))


def test_only_one_file_imports_flowers_internal_modules() -> None:
    found = [f"{path} imports {name}" for path, names in IMPORTS.items() if path != OURS for name in internal(names)]
    assert not found, "import these from confed.engines.flower.private_api"


@pytest.mark.parametrize(
    "line",
    ["from flwr.supercore.date import now", "import flwr.proto", "from flwr import supercore",
     "from flwr.common import serde", "import_module('flwr.supercore')"],
)  # fmt: skip
def test_an_import_of_an_internal_module_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "file.py").write_text(f"from flwr.app import Message\n\ndef f():\n    {line}\n")
    assert len(internal(imported(tmp_path / "file.py"))) == 1


def test_the_file_holds_no_public_name() -> None:
    assert not [f"{module}.{name}" for module, name in SOURCES.values() if module in PUBLIC]


def test_every_name_is_used() -> None:
    assert not [name for name, users in USERS.items() if not users]
    assert NEEDS.keys() == {name for name in SOURCES if not name.isupper()}


@pytest.mark.parametrize("local", SOURCES)
def test_the_comment_beside_a_name_says_which_modules_use_it(local: str) -> None:
    found = re.search(rf"^    (?:\w+ as )?{local},  # ([\w, ]+): \S", PRIVATE.read_text(), re.MULTILINE)
    assert found, f"{local} needs a comment: module, module: what is relied on"
    assert sorted(f"engines/flower/{name}.py" for name in found[1].split(", ")) == USERS[local]


@pytest.mark.parametrize("local", SOURCES)
def test_flower_has_what_is_relied_on(local: str) -> None:
    check(local, NEEDS.get(local, Needs()))


def test_fleet_router_offers_the_calls_that_were_reviewed() -> None:
    from confed.engines.flower.private_api import fleet_router

    calls = {getattr(route, "path", "").removeprefix("/v1/fleet/") for route in fleet_router.routes}
    assert calls == FLEET_CALLS, changed("fleet_router", f"its calls are {sorted(calls)}; sites may make new ones")


def test_messages_have_the_internal_parts_that_are_relied_on() -> None:
    from flwr.app import Array, Message, Metadata, RecordDict

    from confed.engines.flower.private_api import get_object_body, get_object_head_values_from_object_content

    about = Metadata(1, "first", 1, 2, "", "", 0.0, 1.0, "train")
    about.__dict__["_message_id"] = "second"
    assert about.message_id == "second", "Flower changed flwr.app.Metadata: its number is not in '_message_id'"
    assert not attribute_problem(Message, "object_id"), "Flower changed flwr.app.Message"
    assert not attribute_problem(RecordDict, "deflate"), "Flower changed flwr.app.RecordDict"
    content = Array(dtype="uint8", shape=(3,), stype="confed", data=b"abc").deflate()
    assert get_object_head_values_from_object_content(content)[0] == Array.__qualname__
    assert json.loads(get_object_body(content, Array))["arraychunk_ids"] == [0], changed(
        "get_object_body", "an array's description has no 'arraychunk_ids'"
    )


@pytest.mark.parametrize(
    ("local", "gone", "says"),
    [
        ("FleetHttpClient", "FleetHttpClient", "flwr.supernode.fleet_http_client.FleetHttpClient: the name is gone"),
        ("LinkState", "LinkState.claim_task", "flwr.server.superlink.linkstate.LinkState: no method 'claim_task'"),
    ],
)
def test_what_flower_drops_is_named_with_the_file_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, local: str, gone: str, says: str
) -> None:
    module = importlib.import_module(SOURCES[local][0])
    owner, _, name = gone.rpartition(".")
    holder = getattr(module, owner) if owner else module
    while name not in vars(holder):  # the class of the bases that defines it
        holder = next(base for base in holder.__mro__ if name in vars(base))
    monkeypatch.delattr(holder, name)
    with pytest.raises(pytest.fail.Exception, match=re.escape(says)) as failed:
        check(local, NEEDS[local])
    assert f"Flower {version('flwr')} changed" in str(failed.value)
    assert all(user in str(failed.value) for user in USERS[local])


@pytest.mark.parametrize(
    ("local", "needs", "says"),
    [
        ("ObjectTree", Needs(fields=["children.colour"]), "no field 'children.colour'"),
        ("sign_message", Needs(["(private_key, text)"]), "does not fit"),
        ("verify_signature", Needs(["(public_key, message)"]), "missing a required argument: 'signature'"),
        ("TaskType", Needs(attributes=["NURSE"]), "no attribute 'NURSE'"),
        ("ObjectStore", Needs(abstract=frozenset(["put"])), "abstract methods are"),
    ],
)
def test_a_changed_part_is_named(local: str, needs: Needs, says: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=re.escape(says)):
        check(local, needs)
