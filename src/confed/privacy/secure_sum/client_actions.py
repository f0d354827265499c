"""What a client offers for the secure sum; the calls are listed in :mod:`confed.privacy.secure_sum.exchange`."""

import json
from collections.abc import Callable, Sequence

from confed.federation.client import Client
from confed.federation.messages import Message, Scalar
from confed.federation.params import Params
from confed.federation.update_privacy import origin
from confed.privacy.secure_sum.fixed_point import encode, to_wire
from confed.privacy.secure_sum.masks import Integers
from confed.privacy.secure_sum.member import Keys, Member
from confed.privacy.secure_sum.memory import as_tensor, forget, recall, remember, rows, stacked
from confed.privacy.secure_sum.plan import Block, Plan

__all__ = ["PREFIX", "UPDATE", "actions"]

UPDATE = "fit"
"""The action whose reply is summed."""
PREFIX = "secure sum/"
"""What begins the names of tensors and scalars that go with the method's own in a message."""

Action = Callable[[Client, Message], Message]


def actions(fit: Action, changes: Sequence[str]) -> dict[str, Action]:
    """What a client offers; its update is sent in no other way.

    Args:
        fit: the method's action, with noise where there is some.
        changes: globs of tensors that the update holds as changes.
    """

    def masked(client: Client, message: Message) -> Message:
        """``fit``, its update behind masks; the scalars of its reply are not sent."""
        own = Message(
            {n: t for n, t in message.tensors.items() if not n.startswith(PREFIX)},
            {n: s for n, s in message.scalars.items() if not n.startswith(PREFIX)},
        )
        if f"{PREFIX}parcels" not in message.tensors:
            raise ValueError(
                f"client {client.info.id!r} gives its update to a secure sum only, and is asked for it bare"
            )
        member, reply = recall(client.state), fit(client, own)
        weight = int(message.scalars[f"{PREFIX}weight"])
        blocks = {number: member.plan.blocks[number] for number in member.seeds}
        vectors = {
            number: _encoded(member.plan, block, reply.tensors, own.tensors, changes, weight)
            for number, block in blocks.items()
        }
        parcels = rows(message.tensors[f"{PREFIX}parcels"])
        sent = member.mask(dict(zip(_names(message.scalars[f"{PREFIX}sharers"]), parcels, strict=True)), vectors)
        remember(client.state, member)
        return Message({f"{PREFIX}{number}": to_wire(vector) for number, vector in sent.items()})

    return {UPDATE: masked, "secure_keys": _keys, "secure_shares": _shares, "secure_unmask": _unmask}


def _keys(client: Client, message: Message) -> Message:
    """Begins a secure sum; the public keys."""
    member = Member.begin(Plan.from_json(str(message.scalars["plan"])), client.info.id)
    remember(client.state, member)
    return Message({"seal": as_tensor(member.public.seal), "mask": as_tensor(member.public.mask)})


def _shares(client: Client, message: Message) -> Message:
    """Sealed shares for everybody who sent keys, a row each."""
    member, names = recall(client.state), _names(message.scalars["members"])
    pairs = zip(rows(message.tensors["seal"]), rows(message.tensors["mask"]), strict=True)
    parcels = member.share({name: Keys(*pair) for name, pair in zip(names, pairs, strict=True)})
    remember(client.state, member)
    return Message({"parcels": stacked([parcels[name] for name in names])})


def _unmask(client: Client, message: Message) -> Message:
    """Shares of what takes the masks off the sum, by whose they are and of which block; then all is forgotten."""
    given = recall(client.state).unmask(_names(message.scalars["survivors"]))
    forget(client.state)
    flat = [(owner, block, share) for owner, shares in given.items() for block, share in shares.items()]
    index = json.dumps([(owner, block) for owner, block, _ in flat])
    return Message({"shares": stacked([share for _, _, share in flat])}, {"index": index})


def _encoded(plan: Plan, block: Block, sent: Params, received: Params, changes: Sequence[str], weight: int) -> Integers:
    """One block's update as a vector of integers."""
    moved = [sent[n].double() - origin(n, sent[n], received, changes).double() for n in block.names]
    return encode(moved, weight, plan.fraction, plan.reach, plan.bits)


def _names(text: Scalar) -> list[str]:
    return [str(name) for name in json.loads(str(text))]
