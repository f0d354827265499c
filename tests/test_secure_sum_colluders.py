"""A server and members of a secure sum that work together against one other member."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from confed.federation.secure_sum import SecureSum
from confed.privacy.secure_sum import shamir
from confed.privacy.secure_sum.masks import add_mask, opened, pair_secret
from confed.privacy.secure_sum.member import Keys, Member, mask_purpose, seal_purpose
from confed.privacy.secure_sum.plan import Block, Plan


def colluders_shares(colluder: Member, parcel: bytes, target: str) -> tuple[bytes, bytes]:
    """What a member that keeps to nothing holds of a target's mask key and of its seed."""
    purpose = seal_purpose(colluder.plan, target, colluder.name)
    text = opened(pair_secret(colluder.seal_key, colluder.keys[target].seal, purpose), parcel)
    return text[: shamir.SHARE], text[shamir.SHARE :]


class Seen(NamedTuple):
    """What a server and one colluder have in the end: a target's masked vector, and shares of both of its secrets."""

    vector: np.ndarray
    shares: list[dict[int, bytes]]
    keys: Mapping[str, Keys]


def differing_survivors(plan: Plan, target: str, colluder: str, update: np.ndarray) -> Seen:
    """One half of the honest members is told that the target dropped out, the other half that it did not."""
    names = plan.members
    members = {name: Member.begin(plan, name) for name in names}
    keys = {name: member.public for name, member in members.items()}
    boxes = {name: member.share(keys) for name, member in members.items()}
    parcels = {name: {sender: box[name] for sender, box in boxes.items()} for name in names}
    masked = members[target].mask(parcels[target], {0: update.copy()})[0]
    for name in names:
        if name != target:
            members[name].mask(parcels[name], {0: update.copy()})
    own = colluders_shares(members[colluder], parcels[colluder][target], target)
    found: list[dict[int, bytes]] = [{names.index(colluder) + 1: share} for share in own]
    honest = [name for name in names if name != colluder]
    # The target itself can only be told that it survived.
    half = len(honest) // 2
    for number, name in enumerate(sorted(honest, key=lambda n: n == target)):
        told = [n for n in names if n != target] if number < half else list(names)
        try:
            given = members[name].unmask(told)[target]
        except ValueError:  # too few survivors for the threshold
            continue
        for which, block in enumerate((-1, 0)):
            if block in given:
                found[which][names.index(name) + 1] = given[block]
    return Seen(masked, found, keys)


def rebuilt(plan: Plan, target: str, seen: Seen) -> np.ndarray | None:
    """The target's update, where there are shares enough of both secrets."""
    if any(len(shares) < plan.threshold for shares in seen.shares):
        return None
    mask_key, seed = (shamir.join(dict(list(shares.items())[: plan.threshold])) for shares in seen.shares)
    vector = seen.vector.copy()
    add_mask(vector, seed, -1)
    for other in plan.members:
        if other != target:
            secret = pair_secret(mask_key, seen.keys[other].mask, mask_purpose(plan, 0, target, other))
            add_mask(vector, secret, -1 if other > target else 1)
    return vector


def plan_of(names: Sequence[str], options: SecureSum) -> Plan:
    return Plan("round 1", tuple(names), options.needed(len(names)), 64, 40, 64.0, (Block(("w",), tuple(names)),))


@pytest.mark.parametrize("count", [3, 5, 7])
def test_one_colluder_and_a_server_that_tells_two_stories_rebuild_no_update(count: int) -> None:
    names = [f"site-{number}" for number in range(count)]
    update = np.arange(20, dtype=np.uint64)
    # More than half of the members is enough without a colluder, and not with one.
    half = plan_of(names, SecureSum(colluders=0))
    assert np.array_equal(rebuilt(half, "site-0", differing_survivors(half, "site-0", "site-1", update)), update)
    plan = plan_of(names, SecureSum())
    seen = differing_survivors(plan, "site-0", "site-1", update)
    assert rebuilt(plan, "site-0", seen) is None
    # However the halves are chosen: all honest answers and the colluder's two are not enough for two thresholds.
    assert (count - 1) + 2 < 2 * plan.threshold
