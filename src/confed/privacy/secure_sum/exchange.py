"""Secure aggregation between an engine and a method: four or five calls in place of one ``fit``, and the same mean.

The method asks its clients to ``fit`` and takes the mean of what they send. Here the clients' replies become one sum,
and the method is told that every client sent the mean: of equal values every weighted mean is that value. It need not
know of masks, and neither need an engine.

    call             message to a client                      reply
    secure_keys      the plan                                 two public keys, signed where sites have keys to sign with
    secure_shares    all members' public keys                 sealed shares, a parcel for each member
    fit              the method's own message, the parcels    the blocks behind their masks
    secure_confirm   whose blocks came                        a word for each of them that this is what was said here
    secure_unmask    whose blocks came, the others' words     the shares that take the masks off

``secure_confirm`` is asked for where some clients do not send every tensor only (see the package's text).

Integers (counters of batches) do not travel; the server's stay. Floating-point tensors come out as the mean of the
clients' values, up to 2^-f and the rounding of the server's own arithmetic.
"""

import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client, SignatureCheck, Signer
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Mean, Params, Scalar
from confed.federation.secure_sum import SecureSum
from confed.federation.update_privacy import origin
from confed.privacy.secure_sum.masks import (
    KEY,
    SHARE,
    Integers,
    add_mask,
    decode,
    encode,
    from_wire,
    join_shares,
    pair_secret,
    public_key,
    to_wire,
    usable,
)
from confed.privacy.secure_sum.member import (
    Keys,
    Member,
    as_bytes,
    as_tensor,
    forget,
    mask_purpose,
    needed,
    parcel_size,
    recall,
    remember,
    rows,
    stacked,
)
from confed.privacy.secure_sum.plan import Block, Plan
from confed.privacy.secure_sum.signatures import LARGEST, statement

UPDATE = "fit"  # the action whose reply is summed
PREFIX = "secure sum/"  # what begins the names of tensors and scalars that go with the method's own in a message
Action = Callable[[Client, Message], Message]


def actions(
    fit: Action, changes: Sequence[str], weigh: Callable[[ClientInfo], float], options: SecureSum
) -> dict[str, Action]:
    """Actions of a client for secure aggregation; its update is sent in no other way."""

    def keys(client: Client, message: Message) -> Message:
        """Begins secure aggregation; the public keys."""
        plan = Plan.from_json(str(message.scalars["plan"]))
        plan.check(options, int(weigh(client.info)))
        member = Member.begin(plan, client.info.id)
        remember(client.state, member)
        sent = {"seal": as_tensor(member.public.seal), "mask": as_tensor(member.public.mask)}
        if client.signer is not None:
            sent["signature"] = as_tensor(client.signer.sign(statement(plan, member.name, member.public)))
        return Message(sent)

    def masked(client: Client, message: Message) -> Message:
        """``fit``, its update behind masks; the scalars of its reply are not sent."""
        update = Message(
            {n: t for n, t in message.tensors.items() if not n.startswith(PREFIX)},
            {n: s for n, s in message.scalars.items() if not n.startswith(PREFIX)},
        )
        if f"{PREFIX}parcels" not in message.tensors:
            raise ValueError(
                f"client {client.info.id!r} gives its update to secure aggregation only, and is asked for it bare"
            )
        member, weight = recall(client.state), message.scalars[f"{PREFIX}weight"]
        if type(weight) is not int or weight != weigh(client.info):
            raise ValueError(
                f"client {client.info.id!r} has the weight {weigh(client.info)}, and is asked for {weight}"
            )
        _once(client, member, "masked")
        reply = fit(client, update)
        blocks = {number: member.plan.blocks[number] for number in member.seeds}
        vectors = {
            number: _encoded(member.plan, block, reply.tensors, update.tensors, changes, weight)
            for number, block in blocks.items()
        }
        parcels = rows(message.tensors[f"{PREFIX}parcels"])
        sent = member.mask(dict(zip(_names(message.scalars[f"{PREFIX}sharers"]), parcels, strict=True)), vectors)
        # Training again does not always give the same: noise is new, and so may be the sums of a graphics card.
        _once(client, member, "vectors", b"".join(sha256(vector.tobytes()).digest() for vector in sent.values()))
        remember(client.state, member)
        return Message({f"{PREFIX}{number}": to_wire(vector) for number, vector in sent.items()})

    return {
        UPDATE: masked, "secure_keys": keys, "secure_shares": _shares, "secure_confirm": _confirm,
        "secure_unmask": _unmask,
    }  # fmt: skip


def _shares(client: Client, message: Message) -> Message:
    """Sealed shares for all members that sent keys, a row each."""
    member, names = recall(client.state), _names(message.scalars["members"])
    _once(client, member, "shares")
    pairs = zip(rows(message.tensors["seal"]), rows(message.tensors["mask"]), strict=True)
    keys = {name: Keys(*pair) for name, pair in zip(names, pairs, strict=True)}
    if client.signer is not None:
        _check_signed(client.signer, member, keys, message)
    parcels = member.share(keys)
    remember(client.state, member)
    return Message({"parcels": stacked([parcels[name] for name in names])})


def _check_signed(signer: Signer, member: Member, keys: Mapping[str, Keys], message: Message) -> None:
    """Check of every other member's signature of its keys for this plan."""
    padded = message.tensors.get("signatures")
    if padded is None:
        raise ValueError("the keys of the members of this aggregation are not signed, and this site knows theirs")
    for (name, pair), row in zip(keys.items(), rows(padded), strict=True):
        if name != member.name:
            length = int.from_bytes(row[:4], "big")
            signer.check(name, statement(member.plan, name, pair), row[4 : 4 + length])


def _confirm(client: Client, message: Message) -> Message:
    """Which survivors this client was told, a row for each of them (zeros for itself)."""
    member, survivors = recall(client.state), _names(message.scalars["survivors"])
    _once(client, member, "confirm")
    tags = member.confirm(survivors)
    remember(client.state, member)
    return Message({"tags": stacked([tags.get(name, bytes(KEY)) for name in survivors])})


def _unmask(client: Client, message: Message) -> Message:
    """Shares of what takes the masks off the sum, as the plan orders them; then all is forgotten."""
    member = recall(client.state)
    _once(client, member, "unmask")
    tags = rows(message.tensors["tags"]) if "tags" in message.tensors else []
    by = _names(message.scalars["confirmed"]) if tags else []
    given = member.unmask(_names(message.scalars["survivors"]), dict(zip(by, tags, strict=True)))
    forget(client.state)
    flat = list(chain.from_iterable(shares.values() for shares in given.values()))
    return Message({"shares": stacked(flat) if flat else torch.zeros(0, SHARE, dtype=torch.uint8)})


def _once(client: Client, member: Member, step: str, what: bytes = b"") -> None:
    """A step is taken once with the same keys: two vectors behind one mask tell their difference."""
    if client.journal is not None:
        client.journal.use(step.encode() + member.mask_key, what)


def _encoded(plan: Plan, block: Block, sent: Params, received: Params, changes: Sequence[str], weight: int) -> Integers:
    moved = [sent[n].double() - origin(n, sent[n], received, changes).double() for n in block.names]
    return encode(moved, weight, plan.fraction, plan.reach, plan.bits, names=block.names)


def _names(text: Scalar) -> list[str]:
    return [str(name) for name in json.loads(str(text))]


# The server's side of secure aggregation: sums of masked vectors ----------------------------------------------


class Tally:
    """Sums of masked vectors, one client in memory at a time."""

    def __init__(self, plan: Plan, keys: Mapping[str, Keys], sharers: Iterable[str]) -> None:
        self.plan, self._keys, self.sharers = plan, dict(keys), tuple(sharers)
        self._totals: dict[int, Integers] = {}
        self.survivors: list[str] = []

    def add(self, sender: str, vectors: Mapping[int, Integers]) -> None:
        """One client's masked vectors, all of its blocks."""
        if sender not in self.sharers or sender in self.survivors:
            raise ValueError(f"{sender!r} cannot be added to secure aggregation {self.plan.label!r}")
        if sorted(vectors) != self.plan.of(sender):
            raise ValueError(f"{sender!r} must send the blocks {self.plan.of(sender)}, got {sorted(vectors)}")
        for block, vector in vectors.items():
            if block in self._totals:
                self._totals[block] += vector
            else:
                self._totals[block] = vector.copy()
        self.survivors.append(sender)

    def senders(self, block: int) -> list[str]:
        """The survivors that sent a block."""
        return [name for name in self.plan.blocks[block].senders if name in self.survivors]

    def sums(self, given: Mapping[str, Mapping[str, Mapping[int, bytes]]]) -> dict[int, Integers]:
        """Block -> the sum of the survivors' vectors, modulo 2^k; without blocks that fewer than three sent."""
        if len(given) < self.plan.threshold:
            raise ValueError(
                f"only {len(given)} clients took the masks off secure aggregation {self.plan.label!r}, "
                f"{self.plan.threshold} must"
            )
        with_keys = (member for member in self.plan.members if member in self._keys)
        holders = {name: number for number, name in enumerate(with_keys, start=1)}
        first = sorted(given, key=holders.__getitem__)[: self.plan.threshold]
        dropped: dict[str, Any] = {}
        for name in sorted(set(self.sharers) - set(self.survivors)):  # they sent shares and then no vector
            dropped[name] = join_shares({holders[holder]: given[holder][name][-1] for holder in first})
            if public_key(dropped[name]) != self._keys[name].mask:
                raise ValueError(f"the shares of the mask key of {name!r} do not belong together")
        block_sums: dict[int, Integers] = {}
        for block, total in self._totals.items():
            senders = self.senders(block)
            if len(senders) < self.plan.least:
                continue
            for name in senders:
                seed = join_shares({holders[h]: given[h][name][block] for h in first})
                add_mask(total, seed, -1)
                for other, key in dropped.items():
                    if other in self.plan.blocks[block].senders:
                        purpose = mask_purpose(self.plan, block, name, other)
                        add_mask(total, pair_secret(key, self._keys[name].mask, purpose), -1 if other > name else 1)
            block_sums[block] = total
        return block_sums


# Secure aggregation between an engine and a method ------------------------------------------------------------

Expected = Callable[[str], Params | None]  # what a client's reply must carry


class SummedRound:
    """Secure aggregation over the calls of one round, every ``fit`` of which is answered with the mean of all answers.

    It raises ValueError where a tensor has fewer than three senders, weights are no whole numbers or the integers too
    short for them, and RuntimeError where too few clients stay to the end of the four calls, or the sum is none of
    updates. A client whose weight is too large for the integers beside those of the others fails.
    """

    def __init__(
        self, algorithm: Algorithm, options: SecureSum, exchange: Exchange, calls: Sequence[Call], title: str,
        refused: dict[str, str], signatures: SignatureCheck | None,
    ) -> None:  # fmt: skip
        self._signatures = signatures
        self.exchange, self.changes, self.title = exchange, algorithm.traits.changes, title
        self.calls = {call.client.id: call for call in calls}
        self.sent = {name: _floating(call) for name, call in self.calls.items()}
        self.weights = {name: _whole(algorithm, call) for name, call in self.calls.items()}
        self.errors, self._refused = dict[str, str](), refused
        heavy = _heavy(self.weights, options.most)
        fraction = options.fraction(sum(weight for name, weight in self.weights.items() if name not in heavy))
        for name in heavy:
            claimed = f"its weight of {self.weights[name]}, by the number of examples that it claims,"
            self._leave_out(name, f"{claimed} leaves too few of {options.bits} bits for the others")
        # Who is left out stays in the plan, as one that drops out before its keys came: t is that of the whole cohort.
        self.plan = Plan(
            self.title, tuple(self.calls), options.needed(len(self.calls)), options.bits,
            fraction, float(options.reach), _blocks(self.sent), options.least,
        )  # fmt: skip

    def replies(self) -> Iterator[Reply]:
        """A reply to every call of the method, in their order."""
        tally = self._collect()
        means = self._means(tally, self._shares(tally))
        for name, call in self.calls.items():
            if name in tally.survivors:
                starts = {n: call.message.tensors.get(n, t) for n, t in (call.expects or {}).items()}
                yield Reply(call.client, Message({n: means.get(n, start) for n, start in starts.items()}))
            else:
                yield Reply(call.client, Message(), self.errors[name])

    def _leave_out(self, name: str, reason: str) -> None:
        """Removal of a client from the round, as if it had failed."""
        self.errors[name] = f"ValueError: update refused: {reason}"
        self._refused.setdefault(name, self.errors[name])
        warnings.warn(f"{self.title}: {name!r} is left out of secure aggregation: {reason}", stacklevel=2)

    # The calls ------------------------------------------------------------------------------------------------

    def _collect(self) -> Tally:
        """Keys, shares, and the sum of the masked blocks."""
        begin = Message({}, {"plan": self.plan.to_json()})
        requests = dict.fromkeys([name for name in self.calls if name not in self.errors], begin)
        key_messages = dict(self._ask("secure_keys", requests, lambda _: None))
        # Sites of one federation sign, all of them, or none does; one that is different cannot speak for the others.
        signed = 2 * sum("signature" in message.tensors for message in key_messages.values()) > len(key_messages)
        for name, message in list(key_messages.items()):
            if problem := self._problem_of_keys(name, message.tensors, signed):
                self._leave_out(name, problem)
                del key_messages[name]
        if len(key_messages) < self.plan.threshold:
            raise RuntimeError(
                f"secure aggregation of {self.title} needs {self.plan.threshold} clients, and {len(key_messages)} sent "
                f"keys; {'; '.join(f'{name}: {error}' for name, error in list(self.errors.items())[-1:])}"
            )
        keyed = list(key_messages)
        public: dict[str, Tensor] = {}
        for key_name in ("seal", "mask"):
            public[key_name] = torch.stack([message.tensors[key_name] for message in key_messages.values()])
        if signed:
            public["signatures"] = _padded([m.tensors["signature"] for m in key_messages.values()])
        announced = Message(public, {"members": json.dumps(keyed)})
        parcel = torch.zeros(len(keyed), parcel_size(self.plan), dtype=torch.uint8)
        boxes = dict(self._ask("secure_shares", dict.fromkeys(keyed, announced), lambda _: {"parcels": parcel}))
        keys = {n: Keys(as_bytes(m.tensors["seal"]), as_bytes(m.tensors["mask"])) for n, m in key_messages.items()}
        tally, messages = Tally(self.plan, keys, boxes), dict[str, Message]()
        for name in boxes:
            request, column = self.calls[name].message, keyed.index(name)
            parcels = torch.stack([box.tensors["parcels"][column] for box in boxes.values()])
            extra = {f"{PREFIX}weight": self.weights[name], f"{PREFIX}sharers": json.dumps(list(boxes))}
            messages[name] = Message({**request.tensors, f"{PREFIX}parcels": parcels}, {**request.scalars, **extra})
        for name, reply in self._ask(UPDATE, messages, self._masked):
            tally.add(name, {int(n.removeprefix(PREFIX)): from_wire(t) for n, t in reply.tensors.items()})
        return tally

    def _problem_of_keys(self, name: str, sent: Params, signed: bool) -> str:
        """What is wrong with a member's keys, or with their signature where it can be checked here; "" for nothing."""
        if not _are_keys(sent):
            return "its keys are none"
        if signed and "signature" not in sent:
            return "its keys are not signed, and those of others are"
        if not signed or self._signatures is None:
            return ""
        keys = Keys(as_bytes(sent["seal"]), as_bytes(sent["mask"]))
        try:
            self._signatures.check(name, statement(self.plan, name, keys), as_bytes(sent["signature"]))
        except ValueError as error:
            return str(error)
        return ""

    def _shares(self, tally: Tally) -> dict[int, Integers]:
        """Block -> its sum, without masks."""
        request = Message({}, {"survivors": json.dumps(tally.survivors)})
        index = list(needed(self.plan, tally.sharers, tally.survivors))
        shares = torch.zeros(len(index), SHARE, dtype=torch.uint8)
        given: dict[str, dict[str, dict[int, bytes]]] = {}
        messages = self._confirmed(tally, request) if self.plan.partial else dict.fromkeys(tally.survivors, request)
        for name, reply in self._ask("secure_unmask", messages, lambda _: {"shares": shares}):
            given[name] = {}
            for (owner, block), share in zip(index, rows(reply.tensors["shares"]), strict=True):
                given[name].setdefault(owner, {})[block] = share
        return tally.sums(given)

    def _confirmed(self, tally: Tally, request: Message) -> dict[str, Message]:
        """What to ask for the shares, with what the others say that they were told of the survivors."""
        tags = torch.zeros(len(tally.survivors), KEY, dtype=torch.uint8)
        replies = dict(self._ask("secure_confirm", dict.fromkeys(tally.survivors, request), lambda _: {"tags": tags}))
        told: dict[str, Message] = {}
        for name in replies:
            column, others = tally.survivors.index(name), [other for other in replies if other != name]
            told_tags = torch.stack([replies[other].tensors["tags"][column] for other in others])
            told[name] = Message({"tags": told_tags}, {**request.scalars, "confirmed": json.dumps(others)})
        return told

    def _ask(self, action: str, messages: Mapping[str, Message], expects: Expected) -> Iterator[tuple[str, Message]]:
        """The replies to one of the four calls as they come, without clients that failed."""
        stayed = 0
        for reply in self.exchange([Call(self.calls[n].client, action, m, expects(n)) for n, m in messages.items()]):
            if reply.error is not None:
                self.errors[reply.client.id] = reply.error
                continue
            stayed += 1
            yield reply.client.id, reply.message
        if stayed < self.plan.threshold:
            last = "".join(f"; {name}: {error}" for name, error in list(self.errors.items())[-1:])
            raise RuntimeError(
                f"secure aggregation of {self.title} needs {self.plan.threshold} clients, and {stayed} are left "
                f"after {action!r}{last}"
            )

    def _masked(self, name: str) -> Params:
        """A client's blocks as they will come."""
        kind, sent = torch.int32 if self.plan.bits == 32 else torch.int64, self.sent[name]
        masked: Params = {}
        for block in self.plan.of(name):
            length = sum(sent[member].numel() for member in self.plan.blocks[block].names)
            masked[f"{PREFIX}{block}"] = torch.zeros((), dtype=kind).expand(length)
        return masked

    # The mean -------------------------------------------------------------------------------------------------

    def _means(self, tally: Tally, sums: Mapping[int, Integers]) -> dict[str, Tensor]:
        """Name -> mean over the clients that stayed; without tensors of which too few did."""
        means: dict[str, Tensor] = {}
        for number, block in enumerate(self.plan.blocks):
            senders = tally.senders(number)
            if number not in sums:
                warnings.warn(
                    f"{self.title}: of the clients that send {block.names[0]!r} only {len(senders)} stayed, too few "
                    "for secure aggregation: what they share keeps its values",
                    stacklevel=2,
                )
                continue
            starts = self._starts(block, senders)
            weights = sum(self.weights[name] for name in senders)
            moved = decode(sums[number], weights, self.plan.fraction, [starts[n].shape for n in block.names])
            largest = max((float(d.abs().max()) for d in moved if d.numel()), default=0.0)
            # Every coordinate of a client's is within reach; a sum with a mask still on it is anywhere.
            if largest > self.plan.reach + 2.0**-self.plan.fraction:
                raise RuntimeError(
                    f"secure aggregation of {self.title} is spoiled: a client sent a wrong share or vector. Repeat "
                    "the round by starting again; if it happens again, leave sites out one by one to find which"
                )
            like = self.sent[senders[0]]
            means |= {n: (starts[n] + d).to(like[n].dtype) for n, d in zip(block.names, moved, strict=True)}
        return means

    def _starts(self, block: Block, senders: Sequence[str]) -> dict[str, Tensor]:
        """The mean of what the clients received, float64: where the mean of their updates begins."""
        mean, like = Mean(torch.float64), {n: self.sent[senders[0]][n].double() for n in block.names}
        for name in senders:
            received = self.calls[name].message.tensors
            mean.add({n: origin(n, t, received, self.changes) for n, t in like.items()}, self.weights[name])
        return mean.result(like)


def _are_keys(tensors: Params) -> bool:
    """Whether a reply holds two public keys that give secrets, and a signature at most."""
    if tensors.keys() - {"signature"} != {"seal", "mask"} or any(t.dtype != torch.uint8 for t in tensors.values()):
        return False
    signature = tensors.get("signature", torch.zeros(0, dtype=torch.uint8))
    if signature.ndim != 1 or len(signature) > LARGEST:
        return False
    return all(tensors[n].shape == (KEY,) and usable(as_bytes(tensors[n])) for n in ("seal", "mask"))


def _padded(signatures: Sequence[Tensor]) -> Tensor:
    """Signatures as rows of equal length, each behind its own in four bytes."""
    texts = [len(signature).to_bytes(4, "big") + as_bytes(signature) for signature in signatures]
    longest = max((len(text) for text in texts), default=0)
    return stacked([text.ljust(longest, bytes(1)) for text in texts])


def _floating(call: Call) -> dict[str, Tensor]:
    if call.expects is None:
        raise ValueError(f"algorithm.secure_sum needs to know what {call.action!r} sends, and the method does not say")
    return {name: tensor for name, tensor in call.expects.items() if tensor.is_floating_point()}


def _whole(algorithm: Algorithm, call: Call) -> int:
    """A client's weight, which is a factor of integers."""
    weight = algorithm.weight(Reply(call.client, Message()))
    if weight != int(weight) or weight < 1:
        raise ValueError(
            f"algorithm.secure_sum needs whole numbers of at least 1 as weights, got {weight} of {call.client.id!r}"
        )
    return int(weight)


def _heavy(weights: Mapping[str, int], most: int) -> list[str]:
    """Clients that are left out so that the others' weights fit into the integers, the largest first.

    Weights follow from numbers of examples that sites claim. No client is to blame where not even weights up to the
    median fit: the options are such that no sum of so many is possible, and a minority of sites cannot move the median
    beyond the others' weights.
    """
    total, heavy = sum(weights.values()), list[str]()
    if len(weights) * statistics.median_low(weights.values()) > most:
        return heavy
    for name in sorted(weights, key=weights.__getitem__, reverse=True):
        if total <= most:
            break
        heavy.append(name)
        total -= weights[name]
    return heavy


def _blocks(sent: Mapping[str, Params]) -> tuple[Block, ...]:
    senders: dict[tuple[str, torch.Size], list[str]] = {}
    for client, tensors in sent.items():
        for name, tensor in tensors.items():
            senders.setdefault((name, tensor.shape), []).append(client)
    names: dict[tuple[str, ...], list[str]] = {}
    for (name, _), clients in senders.items():
        names.setdefault(tuple(clients), []).append(name)
    return tuple(Block(tuple(members), clients) for clients, members in names.items())
