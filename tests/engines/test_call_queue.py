"""Which process takes which call: order, one call of a client at a time, sessions that stay where they are."""

import torch

from confed.engines.call_bytes import CallQueue, Encoded, Homes, join, split
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.wire import encode


def calls(names: str, session: bool = False) -> list[Call]:
    return [Call(ClientInfo(name, 1), "fit", Message(), session=session) for name in names]


def test_calls_are_taken_in_order_and_a_client_has_one_at_a_time() -> None:
    queue = CallQueue(calls("aab"), Homes())
    assert queue.take(0, (0, 1)) == 0
    assert queue.take(1, (0, 1)) is None  # the second needs the state that the first leaves
    assert queue.finish(0) == 0
    assert queue.take(1, (0, 1)) is None  # which is kept when its reply is handed on
    queue.done.remove(0)
    assert queue.take(1, (0, 1)) == 1
    assert queue.take(0, (0, 1)) == 2
    assert not queue


def test_a_call_whose_process_is_lost_comes_before_the_others() -> None:
    queue = CallQueue(calls("abc"), Homes())
    assert [queue.take(0, (0, 1)), queue.take(1, (0, 1))] == [0, 1]
    assert queue.put_back(0) == 0
    assert [one.client.id for one in queue.waiting()] == ["a", "c"]
    assert queue.take(2, (1, 2)) == 0
    queue.finish(2)
    queue.done.remove(0)
    queue.wait_again(0)  # the reply was lost with its node
    assert queue.first.client.id == "a"


def test_sessions_stay_with_their_process_until_it_ends() -> None:
    homes = Homes()
    homes.begin(3)
    queue = CallQueue(calls("ab", session=True), homes)
    assert [queue.take(0, (0, 1)), queue.take(1, (0, 1))] == [0, 1]
    later = CallQueue(calls("ba", session=True), homes)
    assert later.take(0, (0, 1)) == 1
    homes.leave(1)
    assert homes.of == {"a": 0}
    homes.begin(4)
    assert homes.of == {}


def test_parts_are_joined_and_split() -> None:
    parts = [b"", b"x" * 70000, b"\0\1"]
    assert split(join(parts)) == parts
    assert split(b"") == []


def test_a_message_to_many_clients_is_encoded_once() -> None:
    made: list[bytes] = []

    def keep(data: bytes) -> int:
        made.append(data)
        return len(made)

    tensor, other = torch.ones(3), torch.zeros(3)
    encoded = Encoded(keep)
    assert [encoded.of(Message({"a": tensor}, {"n": 1})) for _ in range(3)] == [1, 1, 1]
    assert encoded.of(Message({"a": tensor}, {"n": 2})) == 2
    assert encoded.of(Message({"b": tensor}, {"n": 2})) == 3
    assert encoded.of(Message({"b": other}, {"n": 2})) == 4
    assert made[3] == encode(Message({"b": other}, {"n": 2}))
