"""Compressed updates and models: sizes, rounding, error feedback and the model that clients have, by other means."""

import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from confed.engines.local import Simulation, simulate
from confed.engines.perform import Setup
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client_info import ClientInfo
from confed.federation.compression import (
    HELD,
    PACKED_CHANGE,
    PACKED_UPDATE,
    RESIDUAL,
    Compression,
    Downlink,
    Uplink,
    check_compression,
    received,
)
from confed.federation.messages import Call, Message, Reply
from confed.federation.randomness import generator
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.federation.update_privacy import UpdatePrivacy
from confed.federation.wire import encode
from confed.recipes.run_section import RunSection
from confed.registry import algorithms
from matrix_cases import SGD, Plain, apart, outcome, setup_of


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, generator=rng(seed)) * torch.logspace(-3, 1, count)


def read_by_hand(packed: bytes, count: int, bits: int, top: float) -> list[float]:
    """The format of the module's text, read byte by byte."""
    kept = math.ceil(count * top - 1e-9)
    width = max(1, math.ceil(math.log2(count) / 8)) if count > 1 else 1
    positions, at = list(range(count)), 0
    if kept < count and math.ceil(count / 8) <= kept * width:
        at = math.ceil(count / 8)
        positions = [i for i in range(count) if packed[i // 8] >> i % 8 & 1]
    elif kept < count:
        at = kept * width
        positions = [int.from_bytes(packed[i : i + width], "little") for i in range(0, at, width)]
    result = [0.0] * count
    if bits == 32:
        numbers = struct.unpack(f"<{kept}f", packed[at:])
    else:
        blocks = math.ceil(kept / 128)
        scales = struct.unpack(f"<{blocks}f", packed[at : at + 4 * blocks])
        data = packed[at + 4 * blocks :]
        codes = list(data) if bits == 8 else [data[i // 2] >> 4 * (i % 2) & 15 for i in range(kept)]
        levels = 127 if bits == 8 else 7
        numbers = [(codes[i] - levels) / levels * scales[i // 128] for i in range(kept)]
    for position, number in zip(positions, numbers, strict=True):
        result[position] = number
    return result


FORMATS = [(bits, top, count) for bits in (32, 8, 4) for top in (1.0, 0.3, 0.01) for count in (1, 7, 128, 129, 1000)]


@pytest.mark.parametrize(("bits", "top", "count"), [case for case in FORMATS if case[:2] != (32, 1.0)])
def test_bytes_are_those_of_the_format(bits: int, top: float, count: int):
    compression, tensor = Compression(bits, top), values(count)  # type: ignore[arg-type]
    packed = compression.pack(tensor, rng())
    assert packed.dtype == torch.uint8
    assert len(packed) == compression.packed_size(count)
    read = compression.unpack(packed, count)
    assert read.tolist() == pytest.approx(read_by_hand(bytes(packed.tolist()), count, bits, top), rel=1e-6)
    kept = max(1, math.ceil(count * top - 1e-9))
    assert int((read != 0).sum()) <= kept
    assert read.abs().max() == tensor.abs().max()  # the largest value is a scale, and is exact


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_rounding_is_unbiased_and_within_a_level(bits: int, levels: int):
    tensor, generator = values(300), rng(5)
    draws = torch.stack([Compression(bits).unpack(Compression(bits).pack(tensor, generator), 300) for _ in range(4000)])
    for start in (0, 128, 256):
        block, read = tensor[start : start + 128].double(), draws[:, start : start + 128].double()
        step = float(block.abs().max()) / levels
        assert float((read - block).abs().max()) <= step * (1 + 1e-5)
        # A value a share p above its lower level is rounded up with probability p.
        share = block / step - (block / step).floor()
        spread = step * (share * (1 - share)).sqrt()
        assert bool(((read.mean(0) - block).abs() <= 5 * spread / math.sqrt(4000) + 1e-7).all())
        assert read.std(0) == pytest.approx(spread, abs=0.06 * step)
        # The bound of the module's text, and the mean error itself.
        error = float((read - block).square().sum(1).mean())
        assert error == pytest.approx(float(spread.square().sum()), rel=0.1)
        assert error <= 128 / (4 * levels**2) * float(block.square().sum())


def test_the_largest_values_are_kept():
    tensor = values(1000)
    read = Compression(32, 0.1).unpack(Compression(32, 0.1).pack(tensor, rng()), 1000)
    largest = sorted(range(1000), key=lambda i: -abs(float(tensor[i])))[:100]
    assert [i for i in range(1000) if read[i] != 0] == sorted(largest)
    assert read[largest].tolist() == tensor[largest].tolist()
    assert float((read - tensor).square().sum()) <= 0.9 * float(tensor.square().sum())


SEVEN = {"w": torch.zeros(7)}
BAD_BYTES = {
    "a_nan": (Compression(8), struct.pack("<f", math.nan) + bytes(7), "finite values"),
    "an_infinity": (Compression(32, 0.3), bytes([7]) + struct.pack("<3f", 1, math.inf, 2), "finite values"),
    "a_negative_scale": (Compression(8), struct.pack("<f", -1) + bytes(7), "scales that are not negative"),
    "a_code_too_large": (Compression(8), struct.pack("<f", 1) + bytes([255] * 7), "codes of 8 bits"),
    "a_code_of_four_bits_too_large": (Compression(4), struct.pack("<f", 1) + bytes([255] * 4), "codes of 4 bits"),
    "too_many_positions": (Compression(32, 0.3), bytes([15]) + bytes(12), "3 ascending positions of 7"),
    "a_position_beyond": (Compression(32, 0.3), bytes([1 | 2 | 128]) + bytes(12), "3 ascending positions of 7"),
    "too_few": (Compression(8), bytes(10), "must have 11 bytes of 1 tensors, got (10,) of torch.uint8"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bytes_that_nobody_packs_are_refused_in_one_line(name: str):
    compression, packed, why = BAD_BYTES[name]
    message = Message({PACKED_UPDATE: torch.tensor(list(packed), dtype=torch.uint8)})
    call = Call(ClientInfo("a", 1), "fit", Message(SEVEN), expects=SEVEN)
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        Uplink(compression).opened(call, message)
    assert "\n" not in str(refused.value)


# Uplink -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [Compression(8), Compression(4), Compression(32, 0.1), Compression(4, 0.1)])
def test_error_feedback_loses_nothing_over_rounds(compression: Compression):
    # Karimireddy et al., EF-SGD: what was sent and the error add up to all updates.
    uplink, state, start = Uplink(compression), ClientState(), {"w": torch.zeros(40, 10)}
    call = Call(ClientInfo("a", 1), "fit", Message(start), expects=start)
    told, meant = torch.zeros(40, 10, dtype=torch.float64), torch.zeros(40, 10, dtype=torch.float64)
    for round in range(30):
        update = torch.randn(40, 10, generator=rng(round)) + 0.5
        sent = uplink.send(Message({"w": update}), start, state, rng(100 + round))
        told += uplink.opened(call, sent).tensors["w"].double()
        meant += update.double()
        assert torch.allclose(told + state.tensors[RESIDUAL]["w"].double(), meant, atol=1e-4)
    assert float((told - meant).norm() / meant.norm()) < 0.35  # without feedback, 0.9 of each update would be lost
    if compression.top < 1:
        single = compression.unpack(compression.pack(meant.float(), rng()), 400)
        assert float((told - meant).norm()) < 0.5 * float((single.double().reshape(40, 10) - meant).norm())


def test_values_changes_counters_and_statistics_arrive():
    start = {"a.weight": torch.full((300,), 5.0), "a.running_var": torch.ones(3), "count": torch.tensor(4)}
    update = {
        "a.weight": start["a.weight"] + values(300), "a.running_var": torch.tensor([1e-6, 2.0, 3.0]),
        "count": torch.tensor(7), "variate/a.weight": values(300, seed=9), "rows.examples": torch.tensor([3.0, 1e6]),
    }  # fmt: skip
    uplink = Uplink(Compression(8), changes=("variate/*",), sums=("*.examples",))
    sent = uplink.send(Message(update, {"loss": 2.0}), start, ClientState(), rng())
    assert set(sent.tensors) == {"a.running_var", "count", "rows.examples", PACKED_UPDATE}
    read = uplink.opened(Call(ClientInfo("a", 1), "fit", Message(start), expects=update), sent)
    assert read.scalars == {"loss": 2.0}
    for name in ("a.running_var", "count", "rows.examples"):
        assert torch.equal(read.tensors[name], update[name])
    for name in ("a.weight", "variate/a.weight"):
        gap = (read.tensors[name] - update[name]).abs()
        assert 0 < float(gap.max()) <= float(values(300, seed=9 if "/" in name else 1).abs().max()) / 127 + 1e-5


def test_what_is_no_update_is_refused():
    with pytest.raises(ValueError, match=r"'w' has shape \(4,\), and nothing of that name was received"):
        Uplink(Compression(8)).send(Message({"w": torch.ones(4)}), {}, ClientState(), rng())


# Downlink -----------------------------------------------------------------------------------------------------


def downlink_rounds(compression: Compression, rounds: int, cohorts: dict[int, list[str]]) -> list[tuple[float, float]]:
    """A server whose model moves every round: per round its distance from what clients train from, and its step."""
    server = ServerState(0, {"w": values(500)})
    states = {name: ClientState() for name in "abc"}
    distances: list[tuple[float, float]] = []
    for round in range(rounds):
        told = Downlink(compression, server, 0, round)
        step = 0.01 * torch.randn(500, generator=rng(round))
        seen: list[Tensor] = []

        def answer(calls, seen=seen, server=server):
            for call in calls:
                assert torch.equal(call.message.tensors["w"], server.params["w"])
                message = received(call.sent, states[call.client.id], compression)
                seen.append(message.tensors["w"])
                yield Reply(call.client, Message(message.tensors))

        calls = [
            Call(ClientInfo(name, 1), "fit", Message(told.server.params)) for name in cohorts.get(round, ["a", "b"])
        ]
        list(told.exchange(answer)(calls))
        assert all(torch.equal(seen[0], other) for other in seen)
        assert set(told.server.slots) == set()
        distances.append((float((seen[0] - server.params["w"]).norm()), float(step.norm())))
        server = told.after(replace(told.server, params={"w": server.params["w"] + step}))
        assert torch.equal(server.slots[HELD]["w"], seen[0])
    return distances


@pytest.mark.parametrize("compression", [Compression(8), Compression(4), Compression(4, 0.3)])
def test_clients_train_from_one_model_that_stays_near(compression: Compression):
    distances = downlink_rounds(compression, 40, {})
    assert distances[0][0] == 0.0
    assert max(apart for apart, _ in distances) < 4 * max(step for _, step in distances)  # and not its sum over rounds
    late = [apart for apart, _ in distances[20:]]
    assert sum(late) / len(late) < 1.5 * sum(apart for apart, _ in distances[10:20]) / 10


def test_who_missed_a_round_is_sent_the_whole_model():
    sizes: dict[str, int] = {}
    server, compression = ServerState(0, {"w": values(500)}), Compression(8)
    states = {name: ClientState() for name in "abc"}
    for round, cohort in enumerate(("ab", "bc", "abc")):
        told = Downlink(compression, server, 0, round)

        def answer(calls, round=round):
            for call in calls:
                sizes[f"{call.client.id}{round}"] = len(encode(call.sent))
                failed = call.client.id == "c" and round == 1
                message = received(call.sent, states[call.client.id], compression)
                yield Reply(call.client, message, "lost" if failed else None)

        list(told.exchange(answer)([Call(ClientInfo(n, 1), "fit", Message(told.server.params)) for n in cohort]))
        server = told.after(told.server)
    packed = {name for name, size in sizes.items() if size < 1000}
    assert packed == {"b1", "b2"}  # a was away, and of c the server does not know whether it has the model


def test_a_change_of_another_model_is_refused():
    compression, server = Compression(8), ServerState(0, {"w": values(500)})
    told = Downlink(compression, server, 0, 0)
    calls = [Call(ClientInfo("a", 1), "fit", Message(server.params))]
    list(told.exchange(lambda asked: (Reply(call.client, Message()) for call in asked))(calls))
    told = Downlink(compression, told.after(told.server), 0, 1)
    (call,) = told._sent(calls)
    assert PACKED_CHANGE in call.sent.tensors
    with pytest.raises(ValueError, match="changes a model of an earlier round that this client does not have"):
        received(call.sent, ClientState(), compression)


# Runs ---------------------------------------------------------------------------------------------------------

BOTH = {"uplink": Compression(4, 0.5), "downlink": Compression(8)}


def bytes_of(setup: Setup) -> list[tuple[int, int]]:
    with Simulation(setup, MemoryStore()) as simulation:
        servers = simulation.start(simulation.executor.workspace)  # type: ignore[union-attr]
        records = list(simulate(simulation, servers))
    return [(sum(record.bytes_up.values()), sum(record.bytes_down.values())) for record in records]


def test_bytes_of_a_run_are_counted_as_they_travel():
    plain, packed = bytes_of(setup_of(Plain(), SGD)), bytes_of(setup_of(Plain(), SGD, **BOTH))
    shapes = [(48,), (48,), (8, 48), (8,), (4, 8), (4,)]
    values_up = 4 * sum(BOTH["uplink"].packed_size(math.prod(shape)) for shape in shapes)
    assert values_up < packed[0][0] < values_up + 4 * 200 < plain[0][0] / 4
    assert packed[0][1] > plain[0][1]  # the first models are whole, and say which tensors they are
    values_down = 4 * sum(BOTH["downlink"].packed_size(math.prod(shape)) for shape in shapes)
    assert values_down < packed[1][1] < values_down + 4 * 300 < plain[1][1] / 2


def test_a_run_that_was_stopped_goes_on_with_equal_bits(tmp_path: Path):
    given = setup_of(Plain(), SGD, **BOTH)
    assert apart(outcome(given), outcome(given, folder=tmp_path)) == 0.0
    # The errors and the clients' model are part of it: without them other bits come.
    checkpoints = Checkpoints(tmp_path / "cut")
    with Simulation(given, checkpoints.store) as simulation:
        servers = simulation.start(simulation.executor.workspace)  # type: ignore[union-attr]
        record = next(simulate(simulation, servers))
        checkpoints.save(Checkpoint(1, record.servers, 0))
        state = checkpoints.store.load("c0")
        assert bool(state.tensors[RESIDUAL]["body.weight"].any())
        lost = ClientState({n: t for n, t in state.tensors.items() if n != RESIDUAL}, state.scalars)
        checkpoints.store.save("c0", lost)
        other = list(simulate(simulation, record.servers, 1))[-1].servers["main"].params
    whole = outcome(given).tensors
    assert any(not torch.equal(other[name], whole[f"main/params/{name}"]) for name in other)


def test_each_client_and_round_has_a_stream_of_its_own():
    update = Message({"w": values(300)})

    def sent(name: str, seed: int, round: int) -> bytes:
        start = {"w": torch.zeros(300)}
        message = Uplink(Compression(4)).send(update, start, ClientState(), generator(seed, round, name, "uplink"))
        return encode(message)

    streams = [sent("a", 0, 0), sent("b", 0, 0), sent("a", 0, 1), sent("a", 1, 0)]
    assert len(set(streams)) == 4
    assert sent("a", 0, 0) == streams[0]


@pytest.mark.parametrize(
    "method",
    [
        Plain(robust=RobustMean("median")),
        Plain(update_privacy=UpdatePrivacy(0.1, noise=0.0)),
        Plain(update_privacy=UpdatePrivacy(0.1, noise=0.0, at="server")),
    ],
    ids=["robust", "clipped_at_the_client", "clipped_at_the_server"],
)
def test_protections_work_beside_compression(method: Plain):
    plain, packed = outcome(setup_of(method, SGD)), outcome(setup_of(method, SGD, uplink=Compression(8)))
    assert packed.errors == {}
    servers = [name for name in plain.tensors if name.startswith("main/params")]
    gaps = [float((plain.tensors[name] - packed.tensors[name]).abs().max()) for name in servers]
    unprotected = outcome(setup_of(Plain(), SGD, uplink=Compression(8)))
    moved = [float((unprotected.tensors[name] - packed.tensors[name]).abs().max()) for name in servers]
    assert 0 < max(gaps) < 0.1 * max(moved)


def test_a_server_clips_what_it_has_read():
    # The error of earlier rounds makes an update longer; what counts of it is clipped all the same.
    method = Plain(update_privacy=UpdatePrivacy(0.01, noise=0.0, at="server"))
    given = setup_of(method, SGD, uplink=Compression(4, 0.3))
    with Simulation(given, MemoryStore()) as simulation:
        servers = simulation.start(simulation.executor.workspace)  # type: ignore[union-attr]
        for record in simulate(simulation, dict(servers)):
            before, after = servers["main"].params, record.servers["main"].params
            norm = math.sqrt(sum(float((after[n] - t).double().square().sum()) for n, t in before.items()))
            assert 0 < norm <= 0.01 * (1 + 1e-5)
            servers = record.servers


REFUSED = {
    "secure_sum": (lambda: setup_of(Plain(secure_sum=SecureSum()), SGD, **BOTH), "run.uplink must be left out for"),
    "secure_sum_downlink": (
        lambda: setup_of(Plain(secure_sum=SecureSum()), SGD, downlink=Compression(8)), "would not stay exact",
    ),
    "method": (lambda: setup_of(algorithms["fedmd"](), SGD, uplink=Compression(8)), "no update of what they received"),
    "split": (lambda: check_compression(algorithms["split_learning"](), **BOTH), "no update of what they received"),
    "bits": (lambda: RunSection(uplink=Compression(5)), "run.uplink.bits must be one of 32, 8, 4, got 5"),
    "top": (lambda: RunSection(downlink=Compression(8, 0.001)), r"run.downlink.top must lie in \[0.01, 1\], got 0.001"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compressed_is_refused_before_round_1(name: str):
    make, why = REFUSED[name]
    with pytest.raises(ValueError, match=why) as refused:
        make()
    assert "\n" not in str(refused.value)
