"""A client's actions in secure aggregation; the calls are listed in :mod:`confed.privacy.secure_sum.exchange`."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import chain

import torch

from confed.federation.client import Client, Signer
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message
from confed.federation.params import Params, Scalar
from confed.federation.secure_sum import SecureSum
from confed.federation.update_privacy import origin
from confed.privacy.secure_sum.masks import KEY, SHARE, Integers, encode, to_wire
from confed.privacy.secure_sum.member import Keys, Member, as_tensor, forget, recall, remember, rows, stacked
from confed.privacy.secure_sum.plan import Block, Plan
from confed.privacy.secure_sum.signatures import statement

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
    """A step is taken once with the same keys, whatever state a server has the client go back to.

    Two vectors behind one mask tell their difference, and shares for two sets of survivors both secrets of a client.
    """
    if client.journal is not None:
        client.journal.use(step.encode() + member.mask_key, what)


def _encoded(plan: Plan, block: Block, sent: Params, received: Params, changes: Sequence[str], weight: int) -> Integers:
    """One block's update as a vector of integers."""
    moved = [sent[n].double() - origin(n, sent[n], received, changes).double() for n in block.names]
    return encode(moved, weight, plan.fraction, plan.reach, plan.bits, names=block.names)


def _names(text: Scalar) -> list[str]:
    return [str(name) for name in json.loads(str(text))]
