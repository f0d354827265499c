"""Where actors go: room by cores, GPUs and memory, and an even share of what is limited."""

from collections import Counter

import pytest

from confed.engines.ray.placement import Node, Wanted, nodes_of, places, too_small
from confed.engines.ray.speed import Pace, better_left
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message

GIB = 2**30
NODES = {
    "a": Node("a", "10.0.0.1 (a)", 4, 0, 8 * GIB),
    "b": Node("b", "10.0.0.2 (b)", 8, 2, 64 * GIB),
    "c": Node("c", "10.0.0.3 (c)", 0, 0, 8 * GIB),
}


def test_one_actor_per_core_fills_what_is_free() -> None:
    assert Counter(places(NODES, Wanted(0), {})) == {"a": 4, "b": 8}
    assert Counter(places(NODES, Wanted(0, threads=3), {})) == {"a": 1, "b": 2}
    assert Counter(places(NODES, Wanted(0), {"a": 3, "b": 8})) == {"a": 1}
    assert places(NODES, Wanted(0), {"a": 4, "b": 8}) == []


def test_a_limited_number_is_spread_by_room() -> None:
    assert Counter(places(NODES, Wanted(6), {})) == {"a": 2, "b": 4}
    assert Counter(places(NODES, Wanted(6), {"a": 2})) == {"b": 4}
    assert Counter(places(NODES, Wanted(100), {})) == {"a": 4, "b": 8}


def test_actors_with_gpus_and_of_a_size_go_where_these_are() -> None:
    assert Counter(places(NODES, Wanted(0, gpu=True), {})) == {"b": 2}
    assert Counter(places(NODES, Wanted(0, memory=3 * GIB), {})) == {"a": 2, "b": 8}
    assert Counter(places(NODES, Wanted(0, memory=10 * GIB), {})) == {"b": 6}
    (sentence,) = too_small(NODES, Wanted(0, memory=10 * GIB))
    assert sentence.startswith("node 10.0.0.1 (a) offers 8.00 GiB of memory, an actor needs about 10.00 GiB")
    assert too_small(NODES, Wanted(0, memory=1 * GIB)) == []


def test_nodes_that_are_gone_are_left_out() -> None:
    entry = {"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "a", "Resources": {"CPU": 4.0, "memory": 5.0}}
    found = nodes_of([{**entry, "NodeID": "x", "Alive": True}, {**entry, "NodeID": "y", "Alive": False}])
    assert found == {"x": Node("x", "10.0.0.1 (a)", 4.0, 0.0, 5.0)}


# Measured speed ---------------------------------------------------------------------------------------------------


def call(examples: int = 10, action: str = "fit") -> Call:
    return Call(ClientInfo("c", examples), action, Message())


def pace(per_example: float) -> Pace:
    return Pace({"fit": per_example})


def test_a_pace_is_a_running_mean_per_example_and_action() -> None:
    found = Pace()
    assert found.of(call()) is None
    found.note(call(10), 20.0)
    assert found.of(call(5)) == 10.0
    found.note(call(10), 30.0)
    assert found.of(call(10)) == pytest.approx(0.7 * 20 + 0.3 * 30)
    assert found.of(call(action="evaluate")) is None
    found.note(call(0), 4.0)  # no division by zero examples
    assert found.of(call(0)) == pytest.approx(0.7 * 2.3 + 0.3 * 4)


def test_the_last_call_is_left_to_a_faster_actor_soon_free() -> None:
    slow, fast = pace(1.0), {1: pace(0.1)}
    assert better_left(slow, [call()], fast, {1: 5.0})  # 5 + 1 seconds against 10
    assert not better_left(slow, [call()], fast, {1: 9.5})  # 9.5 + 1 against 10
    assert not better_left(slow, [call()], {1: pace(1.0)}, {1: 0.5})  # no faster


def test_nobody_idles_while_there_is_enough_to_do() -> None:
    slow, fast = pace(1.0), {1: pace(0.1)}
    assert not better_left(slow, [call(), call()], fast, {1: 0.0})  # more calls than others
    assert not better_left(slow, [call()], fast, {})  # no other is at work: it would never be done
    assert not better_left(Pace(), [call()], fast, {1: 0.0})
    assert not better_left(slow, [call()], {1: Pace()}, {1: 0.0})
    two = {1: pace(0.1), 2: pace(0.1)}
    assert better_left(slow, [call(), call()], two, {1: 1.0, 2: 1.0})
