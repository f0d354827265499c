"""Secure aggregation: exact sums, recovery from drop-outs, and what the server sees."""

import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from confed.federation.secure_sum import SecureSum
from confed.privacy.secure_sum.exchange import Tally
from confed.privacy.secure_sum.masks import (
    PRIME,
    SHARE,
    Integers,
    add_mask,
    decode,
    encode,
    from_wire,
    join_shares,
    new_key,
    opened,
    pair_secret,
    public_key,
    sealed,
    split_secret,
    to_wire,
)
from confed.privacy.secure_sum.member import Member
from confed.privacy.secure_sum.plan import Block, Plan
from refusals import refuses

NAMES = ("ann", "ben", "cat", "dan", "eve")


def plan_of(
    members: Sequence[str] = NAMES, threshold: int = 3, bits: int = 64, blocks: Sequence[Sequence[str]] | None = None
) -> Plan:
    made = tuple(Block((f"w{i}",), tuple(senders)) for i, senders in enumerate(blocks or [members]))
    return Plan("round 1", tuple(members), threshold, bits, 20, 4.0, made)


def vectors(plan: Plan, length: int = 50, seed: int = 0) -> dict[str, dict[int, Integers]]:
    rng = np.random.default_rng(seed)
    kind = np.uint32 if plan.bits == 32 else np.uint64
    top = 2**plan.bits
    return {n: {b: rng.integers(0, top, length, dtype=kind) for b in plan.of(n)} for n in plan.members}


def summed(
    plan: Plan,
    values: Mapping[str, Mapping[int, Integers]],
    no_shares: Sequence[str] = (),
    no_vector: Sequence[str] = (),
    no_answer: Sequence[str] = (),
    view: list[Integers] | None = None,
) -> dict[int, Integers]:
    """The whole protocol, with clients that go away before one of its steps."""
    members = {name: Member.begin(plan, name) for name in plan.members}
    keys = {name: member.public for name, member in members.items()}
    parcels = {name: members[name].share(keys) for name in plan.members if name not in no_shares}
    tally = Tally(plan, keys, parcels)
    for name in parcels:
        if name not in no_vector:
            mine = {sender: box[name] for sender, box in parcels.items()}
            masked = members[name].mask(mine, {b: v.copy() for b, v in values[name].items()})
            if view is not None:
                view.extend(masked.values())
            tally.add(name, masked)
    words = {name: members[name].confirm(tally.survivors) for name in tally.survivors}
    told = {name: {by: tags[name] for by, tags in words.items() if by != name} for name in tally.survivors}
    given = {n: members[n].unmask(tally.survivors, told[n]) for n in tally.survivors if n not in no_answer}
    return tally.sums(given)


def by_hand(values: Mapping[str, Mapping[int, Integers]], block: int, names: Sequence[str]) -> list[int]:
    """The sum in Python's integers."""
    columns = zip(*(values[name][block].tolist() for name in names), strict=True)
    return [sum(column) % 2 ** (8 * values[names[0]][block].dtype.itemsize) for column in columns]


# Sums -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact(bits: int) -> None:
    plan = plan_of(bits=bits)
    values = vectors(plan)
    assert summed(plan, values)[0].tolist() == by_hand(values, 0, NAMES)


@pytest.mark.parametrize(
    ("away", "left"),
    [
        ({"no_shares": ("ben",)}, ("ann", "cat", "dan", "eve")),
        ({"no_vector": ("ann", "eve")}, ("ben", "cat", "dan")),
        ({"no_answer": ("cat", "dan")}, NAMES),
        ({"no_shares": ("eve",), "no_vector": ("ann",)}, ("ben", "cat", "dan")),
        ({"no_vector": ("dan",), "no_answer": ("eve",)}, ("ann", "ben", "cat", "eve")),
    ],
)
def test_who_drops_out_is_left_out_and_its_masks_come_off(away: dict[str, Sequence[str]], left: Sequence[str]) -> None:
    plan = plan_of()
    values = vectors(plan)
    assert summed(plan, values, **away)[0].tolist() == by_hand(values, 0, left)


def test_tensors_with_other_senders_are_summed_by_themselves() -> None:
    plan = plan_of(blocks=[NAMES, ("ann", "cat", "eve"), ("ben", "cat", "dan", "eve")])
    values = vectors(plan)
    found = summed(plan, values)
    for block, senders in enumerate(plan.blocks):
        assert found[block].tolist() == by_hand(values, block, senders.senders)
    # Of the second block two are left: its sum stays behind its masks, and the others are known.
    found = summed(plan, values, no_vector=("ann",))
    assert sorted(found) == [0, 2]
    assert found[2].tolist() == by_hand(values, 2, plan.blocks[2].senders)


def test_too_few_that_stay_are_no_sum() -> None:
    plan = plan_of()
    values = vectors(plan)
    with pytest.raises(ValueError, match="only 2 clients sent a masked vector for the aggregation 'round 1', 3 must"):
        summed(plan, values, no_vector=("ann", "ben", "cat"))
    refuses("only 2 clients took the masks off", summed, plan, values, no_answer=("ann", "ben", "cat"))


# What the server sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 64])
def test_what_the_server_sees_is_uniformly_random(bits: int) -> None:
    plan = plan_of(bits=bits)
    kind = np.uint32 if bits == 32 else np.uint64
    values = {name: {0: np.full(20_000, 7, dtype=kind)} for name in NAMES}  # as far from random as can be
    view: list[Integers] = []
    summed(plan, values, view=view)
    for seen in view:
        assert stats.chisquare(np.bincount(seen.view(np.uint8), minlength=256)).pvalue > 1e-4
    # Nor do two of them together tell anything: their differences are as random.
    for one, other in pairwise(view):
        assert stats.chisquare(np.bincount((one - other).view(np.uint8), minlength=256)).pvalue > 1e-4
    assert sum(int(seen[0]) for seen in view) % 2**bits != 35  # even the sum of all has masks on


def test_masks_are_new_in_every_sum() -> None:
    plan = plan_of()
    values = vectors(plan)
    views: list[list[Integers]] = [[], []]
    for view in views:
        summed(plan, values, view=view)
    assert all((one != other).any() for one, other in zip(*views, strict=True))


def drawn(power: int) -> int:
    return secrets.randbelow(2**256)


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    """Any secret goes with t - 1 shares: for every value there is one more share that makes it the secret."""
    shares = split_secret(bytes(31) + b"\x05", 3, 5, drawn)
    for secret in (bytes(32), b"\xff" * 32):
        wanted = int.from_bytes(secret, "big")
        # Lagrange at 0 from holders 1, 2 and 3: 3 y1 - 3 y2 + y3.
        y1, y2 = (int.from_bytes(shares[i], "big") for i in (0, 1))
        y3 = (wanted - 3 * y1 + 3 * y2) % PRIME
        assert join_shares({1: shares[0], 2: shares[1], 3: y3.to_bytes(SHARE, "big")}) == secret


def test_a_client_gives_its_shares_once() -> None:
    plan = plan_of()
    members = {name: Member.begin(plan, name) for name in NAMES}
    keys = {name: member.public for name, member in members.items()}
    parcels = {name: member.share(keys) for name, member in members.items()}
    ann = members["ann"]
    ann.mask({n: box["ann"] for n, box in parcels.items()}, {0: np.zeros(3, np.uint64)})
    refuses("only 2 clients sent a masked vector", ann.unmask, ["ann", "ben"])
    refuses("names wrong clients", ann.unmask, ["ben", "cat", "dan"])
    given = ann.unmask(["ann", "ben", "cat"])
    assert {name: sorted(shares) for name, shares in given.items()} == {
        "ann": [0], "ben": [0], "cat": [0], "dan": [-1], "eve": [-1],
    }  # fmt: skip
    refuses("has given its shares", ann.unmask, ["ann", "dan", "eve"])


# Its parts --------------------------------------------------------------------------------------------------


def test_any_shares_up_to_the_threshold_put_the_secret_together() -> None:
    secret = new_key()
    shares = dict(enumerate(split_secret(secret, 3, 5, drawn), start=1))
    for holders in ((1, 2, 3), (5, 1, 4), (2, 3, 4, 5)):
        assert join_shares({h: shares[h] for h in holders}) == secret
    refuses(r"the threshold must lie in \[1, 5\], got 6", split_secret, secret, 6, 5, drawn)
    refuses("must have 32 bytes, got 3", split_secret, b"abc", 1, 1, drawn)
    refuses("got none", join_shares, {})


def test_the_mask_is_the_keystream_of_chacha20() -> None:
    """RFC 8439, appendix A.1, first test vector: the block of the zero key, nonce and counter."""
    words = np.zeros(16, np.uint32)
    add_mask(words, bytes(32), 1)
    assert words[:4].tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert words[12:].tobytes().hex() == "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"[32:]
    add_mask(words, bytes(32), -1)
    assert not words.any()


def test_secrets_of_two_agree_and_differ_by_purpose() -> None:
    one, other = new_key(), new_key()
    assert pair_secret(one, public_key(other), "a") == pair_secret(other, public_key(one), "a")
    assert pair_secret(one, public_key(other), "a") != pair_secret(one, public_key(other), "b")
    box = sealed(one, b"text")
    assert opened(one, box) == b"text"
    for key, text in ((other, box), (one, box[:-1] + bytes([box[-1] ^ 1]))):
        refuses("changed on its way", opened, key, text)


@pytest.mark.parametrize("bits", [32, 64])
def test_numbers_are_rounded_once_and_their_sum_is_exact(bits: int) -> None:
    rng = torch.Generator().manual_seed(0)
    updates = [[torch.randn(3, 2, generator=rng), torch.randn(4, generator=rng)] for _ in range(3)]
    weights = [3, 10, 1]
    options = SecureSum(bits=bits, reach=8.0)  # type: ignore[arg-type]
    fraction = options.fraction(14)
    assert fraction == bits - 1 - 7  # 9 * 14 = 126 takes 7 bits
    coded = [encode(u, w, fraction, 8.0, bits) for u, w in zip(updates, weights, strict=True)]
    total = coded[0] + coded[1] + coded[2]
    found = decode(total, 14, fraction, [torch.Size([3, 2]), torch.Size([4])])
    for i in range(2):
        exact = sum(w * np.rint(u[i].double().numpy() * 2.0**fraction) for u, w in zip(updates, weights, strict=True))
        np.testing.assert_array_equal(found[i].numpy(), exact / 2.0**fraction / 14)
        mean = sum(w * u[i].double() for u, w in zip(updates, weights, strict=True)) / 14
        assert float((found[i] - mean).abs().max()) <= 2.0 ** -(fraction + 1) * 1.01
    assert (from_wire(to_wire(total)) == total).all()


def test_the_largest_numbers_do_not_overflow() -> None:
    options = SecureSum(bits=32, reach=1.0)
    fraction = options.fraction(100)
    coded = [encode([torch.full((2,), value)], 50, fraction, 1.0, 32) for value in (-1.0, -1.0)]
    assert decode(coded[0] + coded[1], 100, fraction, [torch.Size([2])])[0].tolist() == [-1, -1]


def test_what_cannot_be_encoded_is_refused() -> None:
    for value in (1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"algorithm\.secure_sum\.reach is 1\.0, and a value in the update moved"):
            encode([torch.tensor([0.0, value])], 1, 20, 1.0, 64)
    refuses("leaves 2 bits behind the point, and needs at least 8", SecureSum(bits=32).fraction, 8_000_000)


@pytest.mark.parametrize(
    ("members", "threshold", "blocks", "message"),
    [
        (("a", "b", "c", "d"), 2, None, "must be more than half of them, got 2"),
        (("a", "b", "c", "c"), 3, None, "every client may be in secure aggregation once"),
        (
            ("a", "b", "c"),
            2,
            [("a", "b", "c"), ("a", "c")],
            "at least 3 clients that send a tensor, got 2 for 'w1': a, c",
        ),
        (("a", "b", "c"), 2, [("a", "b", "x")], "clients that are not in secure aggregation"),
    ],
)
def test_faulty_plans_are_refused_by_everyone(
    members: Sequence[str], threshold: int, blocks: Sequence[Sequence[str]] | None, message: str
) -> None:
    refuses(message, plan_of, members, threshold, blocks=blocks)


def test_a_plan_survives_its_text() -> None:
    plan = plan_of(blocks=[NAMES, NAMES[:3]])
    assert Plan.from_json(plan.to_json()) == plan
    for text in ("{}", "[]", "no", plan.to_json().replace("4.0", '"4"'), plan.to_json().replace("bits", "bots")):
        refuses("not the plan of secure aggregation", Plan.from_json, text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 16}, "must be 32 or 64, got 16"),
        ({"reach": 0.0}, "reach must be positive and finite, got 0.0"),
        ({"threshold": 1}, "threshold must be at least 2, got 1"),
        ({"colluders": -1}, "colluders must not be negative, got -1"),
    ],
)
def test_faulty_options_are_refused(options: dict[str, object], message: str) -> None:
    refuses(message, SecureSum, **options)
    with pytest.raises(ValueError, match=r"3 to 4 for a cohort of 4 with 1 that may collude \(2 t > n \+ c\), got 2"):
        SecureSum(threshold=2).needed(4)


def test_the_threshold_exceeds_half_and_the_colluders() -> None:
    found = {n: SecureSum().needed(n) for n in range(3, 9)}
    assert found == {3: 3, 4: 3, 5: 4, 6: 4, 7: 5, 8: 5}
    assert [SecureSum(colluders=0).needed(n) for n in (3, 4, 5)] == [2, 3, 3]
    assert SecureSum(colluders=3).needed(9) == 7
    refuses("colluders = 2 needs at least 4 clients in a cohort, got 3", SecureSum(colluders=2).needed, 3)
