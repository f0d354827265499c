"""Routes of Flower's Fleet API that confed answers in another way than Flower, under the same names.

A site of confed's may ask in a way that Flower's SuperNode does not: its request for a message waits
(:mod:`confed.engines.flower.long_polls`), and small messages travel in one request each way
(:mod:`confed.engines.flower.pieces_inline`).
"""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from confed.engines.flower.inbox import Inbox
from confed.engines.flower.long_polls import LONGEST, WAIT
from confed.engines.flower.private_api import (
    PROTOBUF_REQUEST_DEPENDENCY,
    ActivateNodeRequest,
    ActivateNodeResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ProtobufRoute,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    activate_node,
    pull_messages,
)

router = APIRouter(prefix="/v1/fleet", route_class=ProtobufRoute)
"""Takes the place of Flower's routes of the same names."""


def _whose(http: Request) -> tuple[Inbox, str]:
    return http.app.state.grid.inbox, http.state.who


def _seconds(http: Request) -> float:
    """How long a request may wait; 0 for what is no such number."""
    try:
        seconds = float(http.headers.get(WAIT, "0"))
    except ValueError:
        return 0.0
    return min(seconds, LONGEST) if seconds > 0 else 0.0


Whose = Annotated[tuple[Inbox, str], Depends(_whose)]


@router.post("/activate-node")
def _activate(
    request: Annotated[ActivateNodeRequest, PROTOBUF_REQUEST_DEPENDENCY], whose: Whose
) -> ActivateNodeResponse:
    inbox = whose[0]
    node = inbox.state.get_node_id_by_public_key(request.public_key)
    if node is not None:
        inbox.polls.end(node)
    return activate_node(request=request, state=inbox.state)


@router.post("/pull-messages")
async def _pull(
    request: Annotated[PullMessagesRequest, PROTOBUF_REQUEST_DEPENDENCY],
    whose: Whose,
    seconds: Annotated[float, Depends(_seconds)],
) -> PullMessagesResponse:
    inbox, polls = whose[0], whose[0].polls
    if not seconds:
        return await run_in_threadpool(pull_messages, request, inbox.state, inbox.store)
    end, waiting = time.monotonic() + seconds, polls.begin(request.node.node_id)
    try:
        while True:
            came = await run_in_threadpool(polls.take, waiting, lambda: inbox.hand_out(request))
            left = end - time.monotonic()
            if came is None or came.messages_list or left <= 0:
                return came or PullMessagesResponse()
            await waiting.pause(left)
    finally:
        polls.leave(waiting)


@router.post("/push-messages")
def _announce(
    request: Annotated[PushMessagesRequest, PROTOBUF_REQUEST_DEPENDENCY], whose: Whose
) -> PushMessagesResponse:
    return whose[0].announce(request, whose[1])


@router.post("/push-object")
def _take(request: Annotated[PushObjectRequest, PROTOBUF_REQUEST_DEPENDENCY], whose: Whose) -> PushObjectResponse:
    return whose[0].take(request, whose[1])


@router.post("/confirm-message-received")
def _confirm(
    request: Annotated[ConfirmMessageReceivedRequest, PROTOBUF_REQUEST_DEPENDENCY], whose: Whose
) -> ConfirmMessageReceivedResponse:
    return whose[0].confirm(request)
