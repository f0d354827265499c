"""Compression of updates: fewer bits per value, the largest values only, and error feedback in both directions.

Sources: Alistarh et al., "QSGD: Communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017
(Eq. 4 and Lemma 3.1; in blocks that are scaled by their largest value, section 4); Karimireddy et al., "Error feedback
fixes SignSGD and other gradient compression schemes", ICML 2019 (EF-SGD and Assumption A); Tang et al., "DoubleSqueeze:
parallel stochastic gradient descent with double-pass error-compensated compression", ICML 2019, read as its abstract;
Reisizadeh et al., "FedPAQ", AISTATS 2020, read as its abstract (clients round their updates, not their models); Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (the largest k of d values).

**Rounding.** In a block v of up to 128 values, with M = max_i |v_i| and s = 2^(bits - 1) - 1 levels on either side,

    Q(v_i) = M sgn(v_i) l / s,   l = floor(s |v_i| / M) or the next integer, so that E Q(v_i) = v_i.

No value is off by more than M / s, and E ||Q(v) - v||^2 <= 128 / (4 s^2) ||v||^2, as a rounded value has a variance of
at most (M / s)^2 / 4: a contraction, by 0.002 with 8 bits and by 0.66 with 4. The largest k = ceil(top d) of a tensor's
d values are taken before, which loses at most (1 - k/d) ||v||^2.

**Uplink.** Of the update d_k = x_k - w of client k, with the error e_k that it keeps in its state,

    p = d_k + e_k,   sent C(p),   e_k <- p - C(p);   the server reads w + C(p).

**Downlink.** All clients of a round train from the same model r, which the server keeps beside its own one, w:

    sent C(w - r) to those that have r from the round before, and r itself to all others;   r <- r + C(w - r).

What C loses is in the next w - r, so that r follows w at a bounded distance, and w never loses what r lacks: updates
d_k = x_k - r are added to w. Evaluations see w. Both are DoubleSqueeze's two passes.

**Beside protections.** Clip, then noise, then rounding: what is rounded, with the error of earlier rounds, is a
function of updates that are private already, and of a seed, so that a guarantee stays (post-processing; Dwork and Roth
2014, Proposition 2.1). The same holds for noise on gradients of records. A server clips what it has read.

**On the wire** all that is compressed is one tensor of bytes: for each tensor, in the order of names, where the values
are (a bit each, or whole bytes per position, whichever is less), the blocks' M in float32, and the codes, two in a byte
with 4 bits. Whole numbers and running statistics travel as they are: a rounded variance could be negative.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Literal

import torch
from torch import Tensor

from confed.federation.algorithm import Algorithm
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Params, matches_any
from confed.federation.randomness import generator
from confed.federation.ranges import Range
from confed.federation.state import ClientState, ServerState
from confed.federation.update_privacy import STATISTICS, origin

ACTION = "fit"  # the action whose messages are compressed
BLOCK = 128  # values that share a scale
UPLINK, DOWNLINK = "uplink", "downlink"
PACKED_UPDATE, PACKED_CHANGE = f"{UPLINK}/packed", f"{DOWNLINK}/packed"  # tensors of bytes in messages
RESIDUAL = "uplink error"  # group of a client's state: what its updates have not told yet
HELD = "downlink model"  # group of a client's state, and of a server's slots: the model that clients train from


@dataclass(frozen=True)
class Compression:
    """What is left out of the values that travel in one direction.

    Attributes:
        bits: of each value that is sent; 32 for the value itself.
        top: share of each tensor's values that are sent, the largest changes; 1 for all.
    """

    bits: Literal[32, 8, 4] = 32
    top: Annotated[float, Range(0.01, 1)] = 1.0

    @property
    def plain(self) -> bool:
        """Whether everything is sent as it is."""
        return self.bits == 32 and self.top == 1

    def packed_size(self, count: int) -> int:
        """Bytes that a tensor of so many values takes."""
        sent = self._kept(count)
        values = 4 * sent if self.bits == 32 else 4 * -(-sent // BLOCK) + -(-sent * self.bits // 8)
        return self._positions_size(count) + values

    def pack(self, values: Tensor, rng: torch.Generator) -> Tensor:
        """The bytes of a tensor of float32."""
        values, parts = values.reshape(-1), list[Tensor]()
        kept = self._kept(values.numel())
        if kept < values.numel():
            positions = values.abs().topk(kept, sorted=False).indices.sort().values
            parts.append(self._packed_positions(positions, values.numel()))
            values = values[positions]
        if self.bits == 32:
            parts.append(values.contiguous().view(torch.uint8))
            return torch.cat(parts)
        levels = 2 ** (self.bits - 1) - 1
        blocks = torch.nn.functional.pad(values, (0, -kept % BLOCK)).reshape(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        exact = torch.where(scales > 0, blocks / scales, 0.0) * levels
        lower = exact.floor()
        rounded = lower + (torch.rand(exact.shape, generator=rng) < exact - lower)
        codes = (rounded + levels).to(torch.uint8).reshape(-1)[:kept]
        if self.bits == 4:
            pairs = torch.nn.functional.pad(codes, (0, kept % 2)).reshape(-1, 2)
            codes = pairs[:, 0] | pairs[:, 1] << 4
        return torch.cat([*parts, scales.reshape(-1).view(torch.uint8), codes])

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """What the receiver of a tensor's bytes makes of them; bytes that nobody packs are a ValueError."""
        kept, start = self._kept(count), self._positions_size(count)
        values = self._values(packed[start:], kept)
        if not bool(values.isfinite().all()):
            raise ValueError("a compressed tensor must hold finite values, got a NaN or an infinity")
        if kept == count:
            return values
        positions = self._positions(packed[:start], count)
        in_order = positions.numel() == kept and bool((positions.diff() > 0).all())
        if not in_order or int(positions[-1]) >= count:
            raise ValueError(f"a compressed tensor must have {kept} ascending positions of {count}")
        return torch.zeros(count).index_copy_(0, positions, values)

    def _kept(self, count: int) -> int:
        return count if self.top == 1 else min(count, math.ceil(self.top * count))

    def _values(self, packed: Tensor, kept: int) -> Tensor:
        if self.bits == 32:
            return packed.clone().view(torch.float32)
        split, levels = 4 * -(-kept // BLOCK), 2 ** (self.bits - 1) - 1
        scales, codes = packed[:split].clone().view(torch.float32), packed[split:]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).reshape(-1)[:kept]
        whole = codes.float() - levels
        if bool((whole > levels).any()) or bool((scales < 0).any()):
            raise ValueError(
                f"a compressed tensor must have codes of {self.bits} bits and scales that are not negative"
            )
        return whole / levels * scales.repeat_interleave(BLOCK)[:kept]

    def _positions_size(self, count: int) -> int:
        kept = self._kept(count)
        return 0 if kept == count else min(-(-count // 8), kept * _width(count))

    def _packed_positions(self, positions: Tensor, count: int) -> Tensor:
        if self._positions_size(count) == -(-count // 8):
            mask = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8).index_fill_(0, positions, 1)
            return (mask.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        octets = [positions >> 8 * octet & 255 for octet in range(_width(count))]
        return torch.stack(octets, 1).reshape(-1).to(torch.uint8)

    def _positions(self, packed: Tensor, count: int) -> Tensor:
        if self._positions_size(count) == -(-count // 8):
            bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
            return bits.reshape(-1).nonzero().reshape(-1)
        octets = packed.reshape(-1, _width(count)).long()
        return (octets << 8 * torch.arange(_width(count))).sum(1)


def _width(count: int) -> int:
    """Bytes of a position below a count."""
    return max(1, -(-(count - 1).bit_length() // 8))


def compressed_names(tensors: Params, whole: Sequence[str] = ()) -> list[str]:
    """Names of the tensors that are compressed, in the order of their bytes; ``whole`` are globs of others."""
    values = [n for n, t in tensors.items() if t.is_floating_point() and t.numel() and not n.endswith(STATISTICS)]
    return sorted(name for name in values if not matches_any(name, whole))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.promote_types(tensor.dtype, torch.float32))


def _added(start: Tensor, change: Tensor) -> Tensor:
    return (_wide(start) + change.reshape(start.shape)).to(start.dtype)


def _packed(compression: Compression, changes: Params, rng: torch.Generator) -> tuple[dict[str, Tensor], Params]:
    """Each tensor's bytes, and what their receiver makes of them."""
    pieces = {name: compression.pack(changes[name], rng) for name in sorted(changes)}
    read = {n: compression.unpack(piece, changes[n].numel()).reshape(changes[n].shape) for n, piece in pieces.items()}
    return pieces, read


def _unpacked(compression: Compression, packed: Tensor | None, like: Params) -> dict[str, Tensor]:
    """The changes that a message's bytes hold, of tensors like those given."""
    sizes = [compression.packed_size(like[name].numel()) for name in sorted(like)]
    if packed is None or packed.dtype != torch.uint8 or tuple(packed.shape) != (sum(sizes),):
        came = "none" if packed is None else f"{tuple(packed.shape)} of {packed.dtype}"
        raise ValueError(f"a compressed message must have {sum(sizes)} bytes of {len(sizes)} tensors, got {came}")
    pieces = zip(sorted(like), torch.split(packed, sizes), strict=True)
    return {name: compression.unpack(piece, like[name].numel()) for name, piece in pieces}


# Whether a method can have it ---------------------------------------------------------------------------------


def uncompressible_reason(algorithm: Algorithm) -> str:
    """Why updates of a method cannot be compressed, as the end of a sentence; "" where they can, or where none are."""
    if algorithm.traits.in_sessions or not algorithm.updates_compressible:
        return "what its clients send is no update of what they received"
    if algorithm.secure_sum is not None:
        return "the sums of algorithm.secure_sum are of whole numbers of one scale, and would not stay exact"
    return ""


def check_compression(algorithm: Algorithm, uplink: Compression, downlink: Compression) -> None:
    """Check that a method can have what is compressed in either direction."""
    for direction, compression in ((UPLINK, uplink), (DOWNLINK, downlink)):
        reason = "" if compression.plain else uncompressible_reason(algorithm)
        if direction == DOWNLINK and not compression.plain and len(algorithm.phases()) > 1:
            reason = reason or "several servers send a part of the model each"
        if reason:
            raise ValueError(f"run.{direction} must be left out for {algorithm.title}: {reason}")


# Uplink: updates of clients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uplink:
    """Compression of clients' updates, at both ends."""

    compression: Compression  # of each tensor's update
    changes: Sequence[str] = ()  # globs of tensors that are sent as changes (`Traits.changes`)
    sums: Sequence[str] = ()  # globs of tensors that are sums over examples, which travel as they are

    def send(self, sent: Message, received: Params, state: ClientState, rng: torch.Generator) -> Message:
        """A client's reply as it travels; what it leaves out stays in the client's state for the next."""
        residual, updates = state.tensors.get(RESIDUAL, {}), dict[str, Tensor]()
        for name in compressed_names(sent.tensors, self.sums):
            value = sent.tensors[name]
            update = (_wide(value) - _wide(origin(name, value, received, self.changes))).float()
            unsent = residual.get(name)  # of a rank that shrinks, say, it is of no use
            updates[name] = update if unsent is None or unsent.shape != update.shape else update + unsent
        if not updates:
            return sent
        pieces, read = _packed(self.compression, updates, rng)
        state.tensors[RESIDUAL] = {name: update - read[name] for name, update in updates.items()}
        whole = {name: tensor for name, tensor in sent.tensors.items() if name not in updates}
        return Message({**whole, PACKED_UPDATE: torch.cat(list(pieces.values()))}, sent.scalars)

    def layout(self, expects: Params) -> Params:
        """Names, shapes and dtypes of what travels in place of expected tensors."""
        names = compressed_names(expects, self.sums)
        if not names:
            return expects
        size = sum(self.compression.packed_size(expects[name].numel()) for name in names)
        whole = {name: tensor for name, tensor in expects.items() if name not in names}
        return {**whole, PACKED_UPDATE: torch.empty(size, dtype=torch.uint8, device="meta")}

    def opened(self, call: Call, sent: Message) -> Message:
        """What travelled as the method expects it; a ValueError where it is nothing that clients send."""
        if call.expects is None:
            raise ValueError(f"run.uplink needs to know what {call.action!r} sends, and the method does not say")
        like = {name: call.expects[name] for name in compressed_names(call.expects, self.sums)}
        if not like:
            return sent
        tensors = dict(sent.tensors)
        for name, change in _unpacked(self.compression, tensors.pop(PACKED_UPDATE, None), like).items():
            tensors[name] = _added(origin(name, like[name], call.message.tensors, self.changes), change)
        return Message(tensors, sent.scalars)


# Downlink: the model that clients train from -------------------------------------------------------------------

VERSION, BASE, NAMES = f"{DOWNLINK}/version", f"{DOWNLINK}/base", f"{DOWNLINK}/names"  # scalars of a message


def _digest(names: Sequence[str]) -> str:
    return blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()


class Downlink:
    """One server's messages of a round as changes of the model that clients have from the round before.

    Attributes:
        server: its state as the method knows it.
    """

    def __init__(self, compression: Compression, server: ServerState, seed: int, round: int) -> None:
        slots = dict(server.slots)
        self._compression, self._seed, self._round = compression, seed, round
        self._begun: dict[str, Tensor] = dict(slots.pop(HELD, {}))
        book = dict(slots.pop(DOWNLINK, {}))
        self._version = int(book.pop(VERSION, torch.zeros(())))
        self._holders = {client: bytes(digest.numpy()).hex() for client, digest in book.items()}
        self._now, self._now_version, self._now_holders = self._begun, self._version, self._holders
        self.server = replace(server, slots=slots)

    def exchange(self, plain: Exchange) -> Exchange:
        """An engine's exchange, in which clients are sent less; each attempt at a round begins with the same model."""
        self._now, self._now_version, self._now_holders = self._begun, self._version, self._holders

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            if not any(call.action == ACTION for call in calls):
                return plain(calls)
            sent = self._sent(calls)
            holders = self._now_holders = dict[str, str]()
            return _noting(sent, plain(sent), holders)

        return ask

    def after(self, server: ServerState) -> ServerState:
        """The server's state after the round, with the model that clients have and who they are."""
        holders = self._now_holders.items()
        book = {client: torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8) for client, digest in holders}
        book[VERSION] = torch.tensor(self._now_version)
        return replace(server, slots={**server.slots, HELD: self._now, DOWNLINK: book})

    def _sent(self, calls: Sequence[Call]) -> list[Call]:
        common = _common([call.message.tensors for call in calls if call.action == ACTION])
        before, holders, base = self._now, self._now_holders, self._now_version
        known = {n: t for n, t in common.items() if n in before and before[n].shape == t.shape}
        changes = {name: (_wide(tensor) - _wide(before[name])).float() for name, tensor in known.items()}
        pieces, read = _packed(self._compression, changes, generator(self._seed, self._round, f"{base}", DOWNLINK))
        self._now = {n: _added(before[n], read[n]) if n in known else t for n, t in common.items()}
        self._now_version = base + 1
        sent: list[Call] = []
        for call in calls:
            names = [name for name in compressed_names(call.message.tensors) if name in common]
            if call.action != ACTION or not names:
                sent.append(call)
                continue
            tensors, scalars = dict(call.message.tensors), {**call.message.scalars, VERSION: self._now_version}
            if holders.get(call.client.id) == _digest(names) and all(name in known for name in names):
                tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
                tensors[PACKED_CHANGE] = torch.cat([pieces[name] for name in names])
                scalars |= {BASE: base, NAMES: _digest(names)}
            else:
                tensors |= {name: self._now[name] for name in names}
                scalars[NAMES] = json.dumps(names)
            sent.append(replace(call, wire=Message(tensors, scalars)))
        return sent


def _common(messages: Sequence[Params]) -> dict[str, Tensor]:
    """The tensors that all clients who are sent them are sent alike."""
    common, differing = dict[str, Tensor](), set[str]()
    for tensors in messages:
        for name in compressed_names(tensors):
            first = common.setdefault(name, tensors[name])
            if first is not tensors[name] and not torch.equal(first, tensors[name]):
                differing.add(name)
    return {name: common[name] for name in sorted(common) if name not in differing}


def _noting(calls: Sequence[Call], replies: Iterator[Reply], holders: dict[str, str]) -> Iterator[Reply]:
    """The same replies; who gave one has the model of this round."""
    for call, reply in zip(calls, replies, strict=True):
        if reply.error is None and call.wire is not None:
            names = str(call.wire.scalars[NAMES])
            holders[call.client.id] = names if BASE in call.wire.scalars else _digest(json.loads(names))
        yield reply


def received(message: Message, state: ClientState, compression: Compression) -> Message:
    """A server's message as the method means it; the model in it stays in the client's state for the next."""
    if VERSION not in message.scalars:
        return message
    scalars = {name: value for name, value in message.scalars.items() if name not in (VERSION, BASE, NAMES)}
    tensors, held = dict(message.tensors), state.tensors.get(HELD, {})
    if PACKED_CHANGE in tensors:
        has = state.scalars.get(VERSION), _digest(sorted(held))
        if has != (message.scalars.get(BASE), message.scalars.get(NAMES)):
            raise ValueError("the message changes a model of an earlier round that this client does not have")
        changes = _unpacked(compression, tensors.pop(PACKED_CHANGE), held)
        model = {name: _added(held[name], change) for name, change in changes.items()}
    else:
        model = {name: tensors[name] for name in json.loads(str(message.scalars.get(NAMES)))}
    state.tensors[HELD], state.scalars[VERSION] = model, message.scalars[VERSION]
    return Message({**tensors, **model}, scalars)
