"""Flows, the wire, and bytes counted without serialising."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message, Reply, drive
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import decode, decode_state, encode, encode_state, size
from confed.privacy.protections import check_reply
from refusals import refuses

ANN = ClientInfo("ann", 3)


def test_drive_runs_a_flow_to_its_end_and_closes_it() -> None:
    closed: list[bool] = []

    def flow() -> Flow:
        try:
            total = 0.0
            for _ in range(2):
                replies = yield [Call(ANN, "double", Message({"x": torch.tensor(4.0)}))]
                total += sum(float(r.message.tensors["x"]) for r in replies)
            return ServerState(1, {"x": torch.tensor(total)})
        finally:
            closed.append(True)

    def exchange(calls: Sequence[Call]) -> Iterator[Reply]:
        for call in calls:
            yield Reply(call.client, Message({"x": call.message.tensors["x"] * 2}))

    assert float(drive(flow(), exchange).params["x"]) == 16.0
    assert closed == [True]


def test_drive_closes_the_flow_when_the_exchange_fails() -> None:
    closed: list[bool] = []

    def flow() -> Flow:
        try:
            yield [Call(ANN, "fit", Message())]
            return ServerState(0, {})
        finally:
            closed.append(True)

    def exchange(calls: Sequence[Call]) -> Iterator[Reply]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        drive(flow(), exchange)
    assert closed == [True]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
SCALARS = st.dictionaries(NAMES, st.one_of(st.booleans(), st.integers(-9, 10**12), st.floats(-1, 1), NAMES), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
       SCALARS)  # fmt: skip
def test_size_is_the_length_of_the_serialised_message(shapes: dict, scalars: dict) -> None:
    message = Message({n: torch.ones(shape).to(dtype) for n, (dtype, shape) in shapes.items()}, scalars)
    data = encode(message)
    assert size(message) == len(data)
    back = decode(data)
    assert back.scalars == scalars
    assert back.tensors.keys() == shapes.keys()
    for name, tensor in message.tensors.items():
        assert torch.equal(back.tensors[name], tensor)
        assert back.tensors[name].dtype == tensor.dtype


def test_state_travels_whole_even_with_views_and_shared_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = ClientState({"private": {"a": base[1:], "b": base[1:]}, "empty": {}}, {"n": 3, "s": "ä"})
    back = decode_state(encode_state(state))
    assert back.scalars == state.scalars
    assert back.tensors.keys() == {"private", "empty"}
    assert torch.equal(back.tensors["private"]["b"], base[1:])


def test_broken_bytes_are_named() -> None:
    refuses("not a safetensors file of 7 bytes", decode, b"garbage")
    refuses("no index", decode_state, encode(Message({"x": torch.zeros(1)})))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"w": torch.tensor([1.0, float("nan")])}, "'w' holds a NaN or an infinity"),
        ({"w": torch.tensor([1.0, float("inf")])}, "'w' holds a NaN or an infinity"),
        ({"w": torch.zeros(3)}, r"must be torch.float32 of shape \(2,\), got torch.float32 of shape \(3,\)"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "got torch.float64"),
        ({}, r"missing \['w'\]"),
        ({"w": torch.zeros(2), "v": torch.zeros(1)}, r"unexpected \['v'\]"),
    ],
)
def test_unwanted_updates_become_errors(tensors: dict, problem: str) -> None:
    call = Call(ANN, "fit", Message(), expects={"w": torch.zeros(2)})
    reply = check_reply(call, Reply(ANN, Message(tensors)))
    assert reply.error is not None
    assert not reply.message.tensors
    with pytest.raises(ValueError, match=problem):
        raise ValueError(reply.error)


def test_a_sound_update_passes_untouched() -> None:
    reply = Reply(ANN, Message({"w": torch.tensor([1.0, -1.0])}))
    assert check_reply(Call(ANN, "fit", Message(), expects={"w": torch.zeros(2)}), reply) is reply


def test_the_order_of_tensors_does_not_depend_on_who_read_them() -> None:
    names = [f"layer.{i}.{part}" for i in range(20) for part in ("weight", "bias")]
    message = Message({n: torch.tensor(float(i)) for i, n in enumerate(names)})
    assert list(message.tensors) == sorted(names)
    assert list(decode(encode(message)).tensors) == sorted(names)
