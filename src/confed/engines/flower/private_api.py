"""Flower's internal interfaces that confed relies on, each with the module that needs it.

The names in ``__all__`` of ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.common`` are Flower's public
interface. Everything else that confed uses of Flower is imported here and nowhere else, for the versions that
``pyproject.toml`` allows; ``tests/engines/flower/test_private_api.py`` says what a new Flower release changed. The
comment beside a name lists the modules of this package that import it, and what they rely on. The reasons for using
internal interfaces at all are in ``docs/federation_details.md``.
"""

from flwr.app.message import (
    make_message,  # grid: a message from Metadata and an error or content
    remove_content_from_message,  # grid, supernode: the message that travels beside its objects
)
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,  # superlink: seconds after which Flower ends a run without heartbeat
    HEARTBEAT_MIN_INTERVAL,  # supernode: seconds between a node's heartbeats
    NOOP_ACCOUNT_NAME,  # grid: owner of the nodes, without accounts
    NOOP_FLWR_AID,  # grid: owner of nodes and run, without accounts
    SUPERLINK_NODE_ID,  # grid: source of the server's messages
    SYSTEM_TIME_TOLERANCE,  # fleet_api: seconds by which a site's clock may be ahead
    TIMESTAMP_HEADER,  # fleet_api, supernode: header with the time that is signed
    TIMESTAMP_TOLERANCE,  # fleet_api: seconds for which a signature counts
    ErrorCode,  # grid, supernode: codes of error replies
)
from flwr.common.serde import (
    message_from_proto,  # grid, loopback, supernode: Message from protobuf, without content
    message_to_proto,  # loopback, supernode: the way back
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,  # fleet_api, supernode: public key and heartbeat interval
    ActivateNodeResponse,  # fleet_api, supernode: number of the node
    DeactivateNodeRequest,  # fleet_api, supernode: number of the node
    DeactivateNodeResponse,  # supernode: empty
    PullMessagesRequest,  # fleet_api, grid, supernode: the node
    PullMessagesResponse,  # fleet_api, grid, supernode: messages and their trees of objects
    PushMessagesRequest,  # fleet_api, grid, supernode: node, messages, trees of objects, run time
    PushMessagesResponse,  # grid, supernode: results, objects that are missing, session
)
from flwr.proto.heartbeat_pb2 import (
    SendNodeHeartbeatRequest,  # fleet_api, supernode: node and interval
    SendNodeHeartbeatResponse,  # supernode: whether the server knows the node
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,  # fleet_api, grid, supernode: node and number of the message
    ConfirmMessageReceivedResponse,  # grid, supernode: empty
    ObjectTree,  # objects: number of an object and its children
    PullObjectRequest,  # fleet_api, supernode: node and number of an object
    PullObjectResponse,  # supernode: whether there is one, and its content
    PushObjectRequest,  # fleet_api, grid, supernode: node, session, number and content of an object
    PushObjectResponse,  # grid, supernode: whether the object was stored
)
from flwr.proto.message_pb2 import (
    Message as ProtoMessage,  # loopback, objects: bytes of a message, and its content
)
from flwr.proto.node_pb2 import (
    Node,  # supernode: number of the node
    NodeInfo,  # grid, loopback: number, key, status and time of the last activation
)
from flwr.server.superlink.linkstate import (
    LinkState,  # fleet_api, grid: nodes, messages, objects and the task of the run
    LinkStateFactory,  # grid: a state in memory with an object store of ours
)
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,  # fleet_api, supernode: header with a node's public key
    FLEET_HTTP_SIGNATURE_HEADER,  # fleet_api, supernode: header with the signature of the time
    FLWR_IN_MEMORY_DB_NAME,  # grid: state and store without a database
    NOOP_FEDERATION_ID,  # grid: federation of the run
    TaskType,  # grid: kind of the run's task
)
from flwr.supercore.error import (
    http_error_translator,  # fleet_api: turns Flower's errors into responses
)
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,  # supernode: an object of a message, deflated to bytes
    get_all_nested_objects,  # grid, supernode: objects of a message by number
    get_object_body,  # objects: an array's description in JSON, with arraychunk_ids
    get_object_head_values_from_object_content,  # objects: class name, children and length of an object
    get_object_id,  # objects: SHA-256 of an object's bytes
    get_object_tree,  # grid, supernode: which objects a message consists of
    is_valid_sha256_hash,  # objects: whether a number is one of an object
    no_object_id_recompute,  # grid, supernode: hashes every object of a message once
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,  # grid, supernode: a message from the bytes of its objects
    validate_object_content,  # objects: an object has a head and its length
)
from flwr.supercore.object_store import (
    NoObjectInStoreError,  # objects: an object that was not announced
    ObjectStore,  # objects: base class of the store on disk, with its abstract methods
    ObjectStoreFactory,  # grid: takes a store of ours as store_instance
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,  # fleet_api: a node's public key from PEM
    public_key_to_bytes,  # supernode: a public key as PEM
    sign_message,  # supernode: signature of the time
    verify_signature,  # fleet_api: whether the key of the header signed the time
)
from flwr.supercore.task_identity import (
    TaskIdentity,  # grid, loopback: numbers that Flower writes into every message of this process
)
from flwr.superlink.federation import (
    NoOpFederationManager,  # grid: a state without federations and accounts
)
from flwr.superlink.servicer.fleet.fleet_handlers import (
    activate_node,  # fleet_api: answer of Flower's to a node that connects
    deactivate_node,  # fleet_api: answer to a node that leaves
    pull_messages,  # fleet_api, grid: a node's next message without its content, marked as delivered
    pull_object,  # fleet_api: a piece of a message
    send_node_heartbeat,  # fleet_api: whether the server knows the node
)
