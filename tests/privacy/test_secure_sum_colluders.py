"""A server and members of secure aggregation that work together against one other member."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites, write_sites
from confed.deployment.site import signer_by_kit, signer_by_list
from confed.engines.local import InProcess
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits
from confed.engines.remote.sites import Timeouts
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message
from confed.federation.params import Rules, Scope
from confed.federation.secure_sum import SecureSum
from confed.privacy.secure_sum.masks import SHARE, add_mask, join_shares, new_key, opened, pair_secret, public_key
from confed.privacy.secure_sum.member import Keys, Member, as_tensor, mask_purpose, seal_purpose
from confed.privacy.secure_sum.plan import Block, Plan
from confed.privacy.secure_sum.signatures import ListedKeys, VouchedKeys, statement
from confed.recipes.recipe import load_recipe
from confed.testing.toy import toy_clients, toy_setup
from hostile_reply import changing
from memory_transport import CLIENTS, Letters, remote_of, rounds, same
from refusals import refuses

SURE = Timeouts(deadline=60, away=60, interval=1e-4)


def colluders_shares(colluder: Member, parcel: bytes, target: str) -> tuple[bytes, bytes]:
    """What a member that keeps to nothing holds of a target's mask key and of its seed."""
    purpose = seal_purpose(colluder.plan, target, colluder.name)
    text = opened(pair_secret(colluder.seal_key, colluder.keys[target].seal, purpose), parcel)
    return text[:SHARE], text[SHARE:]


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
    mask_key, seed = (join_shares(dict(list(shares.items())[: plan.threshold])) for shares in seen.shares)
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
def test_a_colluder_and_a_lying_server_rebuild_no_update(count: int) -> None:
    names = [f"site-{number}" for number in range(count)]
    update = np.arange(20, dtype=np.uint64)
    # More than half of the members is enough without a colluder, and not with one.
    half = plan_of(names, SecureSum(colluders=0))
    found = rebuilt(half, "site-0", differing_survivors(half, "site-0", "site-1", update))
    assert found is not None
    assert np.array_equal(found, update)
    plan = plan_of(names, SecureSum())
    seen = differing_survivors(plan, "site-0", "site-1", update)
    assert rebuilt(plan, "site-0", seen) is None
    # However the halves are chosen: all honest answers and the colluder's two are not enough for two thresholds.
    assert (count - 1) + 2 < 2 * plan.threshold


# Signed keys ----------------------------------------------------------------------------------------------------


def key_pairs(names: Sequence[str]) -> tuple[dict[str, ec.EllipticCurvePrivateKey], dict[str, str]]:
    """Private keys as a federation's sites have them, and the coordinator's list of the public ones."""
    private = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    encodings = Encoding.OpenSSH, PublicFormat.OpenSSH
    return private, {name: key.public_key().public_bytes(*encodings).decode() for name, key in private.items()}


class Signing(Letters):
    """Sites that know each other's keys, but for those that are named."""

    def __init__(self, setup: Setup, root: Path, unsigned: Sequence[str] = ()) -> None:
        private, public = key_pairs(CLIENTS)
        self.signers = {name: ListedKeys(key, public) for name, key in private.items() if name not in unsigned}
        super().__init__(setup, root)

    def site(self, name: str) -> Site:
        client = client_named(self.setup, name)
        return Site(self.setup, client, self.root / name, signer=self.signers.get(name))


def own_keys(message: Message) -> Message:
    """A server that puts keys of its own in the place of a member's."""
    own = {name: as_tensor(public_key(new_key())) for name in ("seal", "mask")}
    return Message({**message.tensors, **own}, message.scalars)


@pytest.mark.parametrize(
    ("unsigned", "says"),
    [
        (CLIENTS, "'client-1' were changed on their way"),  # the others would have sealed their shares for the server
        ((), "the keys of 'client-1' are not signed by the key in the list of members"),
    ],
)
def test_a_server_that_hands_out_keys_of_its_own_gets_no_shares(
    tmp_path: Path, unsigned: Sequence[str], says: str
) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    letters = Signing(setup, tmp_path, unsigned)
    letters.tamper[1] = changing(own_keys, "secure_keys")
    with pytest.raises(RuntimeError):
        rounds(setup, remote_of(letters, SURE))
    errors = {CLIENTS[to]: errors_of(letters, number) for number, (to, kind, _, _) in enumerate(letters.sent)
              if kind == "secure_shares"}  # fmt: skip
    assert says in str(errors["client-1" if unsigned else "client-0"])
    assert (errors["client-0"] is None) == bool(unsigned)


def errors_of(letters: Letters, number: int) -> str | None:
    return Answer.from_bytes(letters.answered[str(number)][0], Limits()).error


def test_a_signed_round_is_that_of_the_simulator(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum()), rounds=1)
    records = rounds(setup, remote_of(Signing(setup, tmp_path), SURE))
    assert not records[0].errors
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


def test_who_does_not_sign_is_left_out_where_others_do(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(secure_sum=SecureSum(colluders=0)), rounds=1)
    letters = Signing(setup, tmp_path, ("client-2",))
    # Of three, two are no sum: the round ends with the reason, and a site that signs never goes on without signatures.
    with (
        pytest.warns(UserWarning, match="'client-2' is left out .* its keys are not signed"),
        pytest.warns(UserWarning, match="only 2 stayed, too few"),
    ):
        rounds(setup, remote_of(letters, SURE))
    letters = Signing(setup, tmp_path / "few", ("client-1", "client-2"))
    with pytest.warns(UserWarning, match="only 2 stayed, too few"):
        rounds(setup, remote_of(letters, SURE))
    number = next(n for n, (to, kind, _, _) in enumerate(letters.sent) if (to, kind) == (0, "secure_shares"))
    assert "are not signed, and this site knows theirs" in str(errors_of(letters, number))


def test_a_signature_is_for_one_member_sum_and_pair_of_keys() -> None:
    names = ["a", "b", "c"]
    private, public = key_pairs(names)
    plan, keys = plan_of(names, SecureSum()), Keys(bytes(32), bytes(31) + b"\x01")
    a, b = ListedKeys(private["a"], public), ListedKeys(private["b"], public)
    signature = a.sign(statement(plan, "a", keys))
    b.check("a", statement(plan, "a", keys), signature)
    for said in (
        statement(replace(plan, label="round 2"), "a", keys),
        statement(plan, "b", keys),
        statement(plan, "a", Keys(keys.mask, keys.seal)),
    ):
        refuses("'a' are not signed by the key in the list of members", b.check, "a", said, signature)
    refuses("'a' are not signed", b.check, "a", statement(plan, "a", keys), b"")
    refuses("'x' is not in the list of members", b.check, "x", statement(plan, "x", keys), signature)
    assert a.names("a")
    assert not a.names("b")
    refuses("no public key in OpenSSH's format for 'c'", ListedKeys, private["a"], {"c": "ssh-none"})


def test_a_site_of_a_secure_sum_needs_its_founding_list(tmp_path: Path) -> None:
    provision(tmp_path / "f", Federation(("a", "b", "c"), "localhost", 8443, ""))
    folder, server = tmp_path / "f" / "sites" / "a", tmp_path / "f" / "server"
    recipe = load_recipe("fedvqa_scenes", ["study.methods=[]", "study.table=[]"])
    assert signer_by_list(recipe, "a", folder / "key", None) is None
    summed = load_recipe("fedvqa_scenes", ["algorithm.secure_sum={}", "study.methods=[]", "study.table=[]"])
    signer = signer_by_list(summed, "a", folder / "key", None)
    other = signer_by_list(summed, "b", tmp_path / "f" / "sites" / "b" / "key", server / "sites.json")
    assert signer is not None
    assert other is not None
    other.check("a", b"x", signer.sign(b"x"))
    # What the coordinator signed counts before a file that lies beside the key.
    keys = read_sites(server / "sites.json")
    by_signature = signer_by_list(summed, "a", folder / "key", None, keys)
    assert by_signature is not None
    other.check("a", b"y", by_signature.sign(b"y"))
    with pytest.raises(ValueError, match="the coordinator's signed list must have this site's own public key"):
        signer_by_list(summed, "a", folder / "key", None, keys | {"a": keys["b"]})
    with pytest.raises(ValueError, match=r"sites\.json must have this site's own public key for 'a'"):
        signer_by_list(summed, "a", tmp_path / "f" / "sites" / "b" / "key", folder / "sites.json")
    (folder / "sites.json").unlink()
    with pytest.raises(ValueError, match=r"has secure aggregation, .* --members must name the coordinator's list"):
        signer_by_list(summed, "a", folder / "key", None)


def vouched(root: Path, names: Mapping[str, str]) -> dict[str, Path]:
    """Kits as FLARE makes them: client -> a folder with a key, a certificate by one authority, and that authority."""
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)

    def certificate(subject: str, key: rsa.RSAPublicKey, by: rsa.RSAPrivateKey, days: float) -> bytes:
        named = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (subject, "authority")]
        made = x509.CertificateBuilder().subject_name(named[0]).issuer_name(named[1]).public_key(key).serial_number(7)
        made = made.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=days))
        return made.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)

    authority, kits = rsa.generate_private_key(65537, 2048), dict[str, Path]()
    for client, name in names.items():
        kits[client] = folder = root / client
        folder.mkdir(parents=True)
        key = rsa.generate_private_key(65537, 2048)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / "client.key").write_bytes(private)
        days = 0.01 if client == "late" else 1
        (folder / "client.crt").write_bytes(certificate(name, key.public_key(), authority, days))
        (folder / "rootCA.pem").write_bytes(certificate("authority", authority.public_key(), authority, 1))
    return kits


def test_certificates_of_the_authority_say_who_signed(tmp_path: Path) -> None:
    names = {"a": "hospital-a", "b": "b", "late": "late"}
    kits = vouched(tmp_path / "ours", names)
    signers = {name: VouchedKeys(kit, {"a": "hospital-a"}) for name, kit in kits.items()}
    signature = signers["a"].sign(b"x")
    assert len(signature) < 2000
    signers["b"].check("a", b"x", signature)
    refuses("keys of 'b' are signed by 'hospital-a'", signers["b"].check, "b", b"x", signature)
    for said, given in ((b"y", signature), (b"x", signature[:-1]), (b"x", b""), (b"x", signature[:40])):
        refuses("keys of 'a' are not signed by a site of this federation", signers["b"].check, "a", said, given)
    strangers = VouchedKeys(vouched(tmp_path / "theirs", {"a": "hospital-a"})["a"], {})
    refuses("not signed by a site of this federation", signers["b"].check, "a", b"x", strangers.sign(b"x"))
    refuses("the certificate of 'late' is not valid now", signers["b"].check, "late", b"x", signers["late"].sign(b"x"))
    refuses(r"must hold client\.key, client\.crt and rootCA\.pem", VouchedKeys, tmp_path, {})


def test_kits_of_flares_sign_for_each_other(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from confed.deployment.flare.provision import provision_flare

    provision_flare(tmp_path / "f", Federation(("a", "b", "c"), "server.example.org", 8443, ""))
    recipe = load_recipe("fedvqa_scenes", ["algorithm.secure_sum={}", "study.methods=[]", "study.table=[]"])
    a, b = (signer_by_kit(recipe, tmp_path / "f" / "sites" / name) for name in "ab")
    assert a is not None
    assert b is not None
    b.check("a", b"x", a.sign(b"x"))
    refuses("the keys of 'b' are signed by 'a'", b.check, "b", b"x", a.sign(b"x"))
    kit = tmp_path / "f" / "sites" / "a"  # whom FLARE's names stand for is what was signed, not what a file says
    for names in ({"a": "a", "b": "c", "c": "b"}, {"a": "a", "x": "evil"}, {"x": "b", "y": "b"}):
        write_sites(kit / SITES, names)
        refuses(r"sites\.json must name a different site for every client.*\(a, b, c\)", signer_by_kit, recipe, kit)
    write_sites(kit / SITES, {"x": "b", "a": "a"})
    assert signer_by_kit(recipe, kit) is not None


# Blocks of few senders ------------------------------------------------------------------------------------------


FEW = tuple(f"site-{number:02}" for number in range(11))
STORIES = {0: (1,), 1: (2,), 2: (3,), 3: (1,), 4: (2,), 5: (3,), 6: (1, 2, 3), 7: (1, 2, 3), 8: (1, 2, 3), 9: (1, 2, 3)}
"""Member -> who of a block's four senders has dropped out, as the server tells it; the last one colludes."""


def different_stories(plan: Plan, update: np.ndarray, *, confirming: bool) -> np.ndarray | None:
    """A sender's update in a block of four, where the server and one member get shares enough of its four secrets."""
    members = {name: Member.begin(plan, name) for name in FEW}
    keys = {name: member.public for name, member in members.items()}
    boxes = {name: member.share(keys) for name, member in members.items()}
    parcels = {name: {sender: box[name] for sender, box in boxes.items()} for name in FEW}
    masked = {n: m.mask(parcels[n], {b: update.copy() for b in plan.of(n)}) for n, m in members.items()}
    stories = {FEW[n]: [name for i, name in enumerate(FEW) if i not in gone] for n, gone in STORIES.items()}
    words = {name: members[name].confirm(told) for name, told in stories.items()} if confirming else {}
    target, others, colluder = FEW[0], FEW[1:4], members[FEW[-1]]
    # The colluder holds shares of all, and says to everyone what that one was told.
    whole: dict[str, bytes] = {}
    for owner, box in parcels[colluder.name].items():
        secret = pair_secret(colluder.seal_key, keys[owner].seal, seal_purpose(plan, owner, colluder.name))
        whole[owner] = opened(secret, box)
    seeds = {11: whole[target][2 * SHARE :]}
    lost = {other: {11: whole[other][:SHARE]} for other in others}
    for number, (name, told) in enumerate(stories.items(), start=1):
        heard = {other: tags[name] for other, tags in words.items() if name in tags}
        if confirming:
            heard[colluder.name] = colluder.confirm(told)[name]
        if confirming:
            with pytest.raises(ValueError, match="were told the same survivors of the aggregation 'round 1', 7 must"):
                members[name].unmask(told, heard)
            continue
        given = members[name].unmask(told)
        seeds |= {number: given[target][1]} if 1 in given[target] else {}
        for other in others:
            lost[other] |= {number: given[other][-1]} if -1 in given[other] else {}
    if any(len(shares) < plan.threshold for shares in (seeds, *lost.values())):
        return None
    vector = masked[target][1]
    add_mask(vector, join_shares(seeds), -1)
    for other in others:
        secret = pair_secret(join_shares(lost[other]), keys[target].mask, mask_purpose(plan, 1, target, other))
        add_mask(vector, secret, -1 if other > target else 1)
    return vector


def test_a_block_of_few_senders_gives_none_of_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (Block(("w",), FEW), Block(("v",), FEW[:4]))
    plan = Plan("round 1", FEW, SecureSum().needed(11), 64, 40, 64.0, blocks)
    update = np.arange(9, dtype=np.uint64)
    assert different_stories(plan, update, confirming=True) is None
    monkeypatch.setattr(Plan, "partial", False)
    found = different_stories(plan, update, confirming=False)
    assert found is not None
    assert np.array_equal(found, update)


def test_members_with_different_tensors_confirm_survivors(tmp_path: Path) -> None:
    class Owned(FedAvg):
        def rules(self, client: ClientInfo) -> Rules:
            return {"head.*": Scope.FROZEN if client.id == "client-3" else Scope.SHARED, "*": Scope.SHARED}

    for method, asked in ((Owned(secure_sum=SecureSum()), True), (FedAvg(secure_sum=SecureSum()), False)):
        setup = toy_setup(method, clients=toy_clients(sizes=(12, 20, 16, 8)), rounds=1)
        letters = Letters(setup, tmp_path / f"{asked}", (*CLIENTS, "client-3"))
        remote = remote_of(letters, SURE)
        remote.sites.gather((*CLIENTS, "client-3"), wait=5)
        (record,) = rounds(setup, remote)
        assert not record.errors
        assert same(record.servers, rounds(setup, InProcess(setup))[0].servers)
        assert any(kind == "secure_confirm" for _, kind, _, _ in letters.sent) is asked
