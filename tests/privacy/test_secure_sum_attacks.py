"""What a server with bad intentions asks of the members of secure aggregation, and does not get."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.engines.local import InProcess
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.remote.protocol import Answer, Limits, Request, open_body, seal
from confed.engines.remote.sites import Timeouts
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.secure_sum import SecureSum
from confed.federation.state import ClientState, MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.secure_sum.masks import NONCE, SHARE, add_mask, join_shares, opened, pair_secret
from confed.privacy.secure_sum.member import Keys, Member, recall, remember, seal_purpose
from confed.privacy.secure_sum.plan import Block, Plan
from confed.testing.toy import toy_setup
from memory_transport import Letters, remote_of, rounds, same
from refusals import refuses

NAMES = ("ann", "ben", "cat", "dan")
SURE = Timeouts(deadline=60, away=60, interval=1e-4)
PLAN = Plan("round 1", NAMES, 3, 64, 40, 64.0, (Block(("v",), NAMES), Block(("w",), NAMES)))
OTHERS = [
    {"label": "round 2"}, {"threshold": 4}, {"fraction": 0}, {"reach": 1.0}, {"members": NAMES[::-1]},
    {"blocks": PLAN.blocks[::-1]}, {"blocks": (PLAN.blocks[0], Block(("w", "x"), NAMES))},
]  # fmt: skip


def begun(plans: Mapping[str, Plan]) -> tuple[dict[str, Member], dict[str, Keys], dict[str, dict[str, bytes]]]:
    """Members under these plans, their public keys, and what each sealed for whom."""
    members = {name: Member.begin(plan, name) for name, plan in plans.items()}
    keys = {name: member.public for name, member in members.items()}
    return members, keys, {name: member.share(keys) for name, member in members.items()}


def texts(member: Member, parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """What is inside the seals that a member made."""
    purposes = {holder: seal_purpose(member.plan, member.name, holder) for holder in parcels}
    return {
        holder: opened(pair_secret(member.seal_key, member.keys[holder].seal, purposes[holder]), parcel)
        for holder, parcel in parcels.items()
    }


# Plans ----------------------------------------------------------------------------------------------------------


def test_a_tensor_in_two_blocks_would_give_members_away() -> None:
    for blocks in ((Block(("w",), NAMES), Block(("v", "w"), NAMES[1:])), (Block(("w", "w"), NAMES),)):
        refuses("must name every tensor once, got 'w' 2 times", replace, PLAN, blocks=blocks)
    refuses("must have tensors, got none", Block, (), NAMES)


@pytest.mark.parametrize("changes", OTHERS, ids=lambda c: f"{next(iter(c))}")
def test_masks_of_different_plans_do_not_cancel(changes: dict[str, object]) -> None:
    other = replace(PLAN, **changes)  # type: ignore[arg-type]
    for told in (PLAN, other):
        members, _, boxes = begun({name: told if name == "ann" else PLAN for name in NAMES})
        total = np.zeros(1000, np.uint64)
        for name, member in members.items():
            zeros = {block: np.zeros(1000, np.uint64) for block in (0, 1)}
            total += member.mask({sender: box[name] for sender, box in boxes.items()}, zeros)[0]
            add_mask(total, member.seeds[0], -1)
        if told is PLAN:
            assert not total.any()
            assert members["ben"].unmask(NAMES).keys() == set(NAMES)
        else:
            assert len(np.unique(total)) == 1000
            refuses("a sealed share was changed on its way", members["ben"].unmask, NAMES)
            refuses("a sealed share was changed on its way", members["ann"].unmask, NAMES)


def test_a_digest_is_that_of_the_plan_however_it_was_written() -> None:
    text = json.dumps(dict(reversed(json.loads(PLAN.to_json()).items())), indent=1)
    assert Plan.from_json(text).digest == PLAN.digest
    assert len({PLAN.digest, *(replace(PLAN, **changes).digest for changes in OTHERS)}) == 1 + len(OTHERS)  # type: ignore[arg-type]
    for key, value in (("threshold", True), ("reach", float("nan")), ("reach", float("inf")), ("bits", 64.0)):
        with pytest.raises(ValueError, match=r"secure aggregation must be positive|not the plan of secure aggregation"):
            Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), key: value}))


RECIPE = "in this client's recipe, and the server's plan has"
ROOM = "leaves from 8 to 56 bits behind the point by this client's recipe and weight, and the server's plan has"
"""9 * 12 = 108 takes 7 bits, and one is the sign's."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"fraction": 8}, None),
        ({"bits": 32, "fraction": 16}, f"algorithm.secure_sum.bits is 64 {RECIPE} 32"),
        ({"reach": 1e-9}, f"algorithm.secure_sum.reach is 8.0 {RECIPE} 1e-09"),
        ({"threshold": 3}, f"algorithm.secure_sum.threshold is 4 for 4 clients {RECIPE} 3"),
        ({"fraction": 57}, f"{ROOM} 57"),
        ({"fraction": 0}, f"{ROOM} 0"),
    ],
)
def test_a_client_takes_part_in_what_its_own_recipe_says(changes: dict[str, object], says: str | None) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum(threshold=4, reach=8.0)))
    names = tuple(f"client-{number}" for number in range(4))
    plan = replace(Plan("round 1", names, 4, 64, 50, 8.0, (Block(("head.bias",), names),)), **changes)  # type: ignore[arg-type]
    call = Call(ClientInfo("client-0", 12), "secure_keys", Message({}, {"plan": plan.to_json()}))
    reply = answer(setup, Workspace(setup.model()), call, MemoryStore(), 0)
    assert (reply.error is None) == (says is None)
    assert says is None or str(reply.error).endswith(says)


# The same step again --------------------------------------------------------------------------------------------


def test_who_asks_again_gets_the_same_shares_under_other_nonces() -> None:
    members, keys, boxes = begun(dict.fromkeys(NAMES, PLAN))
    ann, state = members["ann"], ClientState()
    first = texts(ann, boxes["ann"])
    remember(state, ann)
    again = recall(state)  # what a site that was sent back to this step knows
    parcels = again.share(keys)
    assert texts(again, parcels) == first
    nonces = {parcel[:NONCE] for box in (*boxes.values(), parcels) for parcel in box.values()}
    assert len(nonces) == len(NAMES) * (len(NAMES) + 1)
    # Of another question nothing follows for the first one's polynomials.
    other = texts(recall(state), recall_and_share(state, {name: keys[name] for name in NAMES[:3]}))
    pieces = [text[i : i + SHARE] for text in (*first.values(), *other.values()) for i in (0, 33, 66)]
    assert len(set(pieces)) == len(pieces)


def recall_and_share(state: ClientState, keys: Mapping[str, Keys]) -> dict[str, bytes]:
    member = recall(state)
    parcels = member.share(keys)
    remember(state, member)
    return parcels


def test_every_secret_has_a_polynomial_of_its_own() -> None:
    """Equal secrets, shares without anything in common; any t of them put the secret together."""
    members = {name: Member.begin(PLAN, name) for name in NAMES}
    ann = members["ann"]
    ann.mask_key, ann.seeds = bytes(31) + b"\x01", dict.fromkeys(ann.seeds, bytes(31) + b"\x01")
    found = texts(ann, ann.share({name: member.public for name, member in members.items()}))
    columns: list[Sequence[bytes]] = [[text[i : i + 33] for text in found.values()] for i in (0, 33, 66)]
    assert len({share for column in columns for share in column}) == 12
    for column in columns:
        assert join_shares({1: column[0], 2: column[1], 4: column[3]}) == ann.mask_key
        assert join_shares({1: column[0], 2: column[1]}) != ann.mask_key


class Stop(Exception):
    """The server is killed."""


def until(step: str, setup: Setup, root: Path) -> Letters:
    """A federation whose server was killed when the first site's reply to a step came."""
    letters = Letters(setup, root)

    def stop(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == step:
            raise Stop
        return head, body

    letters.tamper[0] = stop
    with pytest.raises(Stop):
        rounds(setup, remote_of(letters, SURE))
    del letters.tamper[0]
    return letters


def newest(letters: Letters) -> Message:
    """The last reply that a site sent."""
    return open_body(list(letters.answered.values())[-1][1], Limits(), {}, frozenset())


def asked_again(letters: Letters, setup: Setup, step: str) -> tuple[str | None, Message, Request]:
    """The same step once more, after a question in between that the site keeps the reply to in place of the first."""
    site = letters.sites[0]
    head, body = next((h, b) for to, kind, h, b in letters.sent if (to, kind) == (0, step))
    request = Request.from_bytes(head, Limits())
    kept = (*request.kept, request.base)
    between = replace(request, action="evaluate", id="y", base=request.version, version=request.version + 1, kept=kept)
    shared = Message(dict(Workspace(setup.model()).initial), {"split": "test", "limit": 0})
    assert Answer.from_bytes(site.handle(between.to_bytes(), seal(shared))[0], Limits()).error is None
    reply = site.handle(replace(request, kept=kept).to_bytes(), body)
    return Answer.from_bytes(reply[0], Limits()).error, open_body(reply[1], Limits(), {}, frozenset()), request


def test_a_site_seals_no_two_texts_under_one_key_and_nonce(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = until("secure_shares", setup, tmp_path)
    first = newest(letters)
    error, message, request = asked_again(letters, setup, "secure_shares")
    assert error is None
    site = letters.sites[0]
    site.store.version = request.version
    member = recall(site.store.load("client-0"))
    boxes = [
        dict(zip(member.plan.members, (row.numpy().tobytes() for row in m.tensors["parcels"]), strict=True))
        for m in (first, message)
    ]
    assert texts(member, boxes[0]) == texts(member, boxes[1])
    assert all(boxes[0][name][:NONCE] != boxes[1][name][:NONCE] for name in member.plan.members)


def test_new_noise_does_not_leave_behind_earlier_masks(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = UpdatePrivacy(clip=0.5, noise=1.0)
    noised = toy_setup(FedAvg(secure_sum=SecureSum(), update_privacy=privacy), rounds=1, noisy=False)
    letters = until("fit", noised, tmp_path / "noised")
    error, message, _ = asked_again(letters, noised, "fit")
    assert "the same secret is not used twice" in str(error)
    assert not message.tensors
    # Without noise the same comes out, to the last bit.
    bare = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = until("fit", bare, tmp_path / "bare")
    first = newest(letters)
    error, message, _ = asked_again(letters, bare, "fit")
    assert error is None
    assert all(torch.equal(t, message.tensors[n]) for n, t in first.tensors.items())


@pytest.mark.parametrize("step", ["secure_keys", "secure_shares", "fit", "secure_unmask"])
def test_a_server_that_was_killed_does_the_round_again(tmp_path: Path, step: str) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = until(step, setup, tmp_path)
    (record,) = rounds(setup, remote_of(letters, SURE))
    assert not record.errors
    assert same(record.servers, rounds(setup, InProcess(setup))[0].servers)
