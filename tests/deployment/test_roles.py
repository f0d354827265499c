"""Roles of a federation: every action by the key of every role, and who else may do what is refused."""

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import confed
from confed.cli.federation import federation_app
from confed.deployment import monitor
from confed.deployment.authority import make_authority, make_key
from confed.deployment.flower import TRANSPORT, superlink
from confed.deployment.manifest import verified
from confed.deployment.monitor import DOSSIER, RunStatus, make_pass, page_served
from confed.deployment.provision import SITES, Federation, provision, read_sites, sign_again
from confed.deployment.roles import MAY, Action, Role, described
from confed.deployment.roster import OFFICERS, Roster, add_officer, add_site, quarantine_site, revoke_site
from confed.deployment.transports import Leading
from confed.engines.flower.probe import about
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import public_of, read_key, read_public
from confed.engines.remote.journal_chains import KNOWN
from confed.results.folder import MEMBERS
from led_recipe import recipe_of
from refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = {Role.lead: "anna", Role.site: "north", Role.auditor: "bob"}
AT = ("localhost", 8443)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation with a lead, a site and an auditor, and a run folder of a finished run."""
    root = tmp_path_factory.mktemp("roles") / "federation"
    provision(root, Federation(("north", "south"), *AT, "name = 'toy'\n"))
    for role in (Role.lead, Role.auditor):
        add_officer(root / "server", NAMES[role], role, "", None)
    state = root / "server" / "state"
    (state / DOSSIER).parent.mkdir(parents=True)
    (state / DOSSIER).write_text("what the model gives away")
    for name, content in ((KNOWN, "{}"), (MEMBERS, '[{"id": "south"}]'), ("summary.json", "{}")):
        (state / name).write_text(content)
    (state / "metrics.jsonl").touch()
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "federation"))


def key_of(root: Path, role: Role) -> Path:
    folder = root / ("sites" if role is Role.site else "officers")
    return folder / NAMES[role] / "key"


def authority_of(root: Path, role: Role) -> Path:
    """What somebody gives where the authority's key is asked for; a lead has it."""
    return root / "authority" / "ca.key" if role is Role.lead else key_of(root, role)


class Started(Exception):
    """A server opens its port."""


# What each action says and does with the key of a role; an answer that is empty is no refusal. -----------------------


def by_command(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = confed("federation", *words)
    said = " ".join(capsys.readouterr().err.split())
    return said if code else ""


def leading(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
    kit = root / "server"
    if role is not Role.lead:
        (kit / "server.key").write_bytes(key_of(root, role).read_bytes())

    def started(*_: object, **__: object) -> None:
        raise Started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(superlink, "open_superlink", started)
        try:
            TRANSPORT.lead(recipe_of("fedavg"), Leading(root / "state", kit), lambda event: None)
        except ValueError as error:
            return str(error)
        except Started:
            return ""
    raise AssertionError


def taking_part(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
    kit = root / "server"
    roster = Roster(kit / SITES, read_public, lambda text: None)
    certificate, key = kit / "server.crt", kit / "server.key"
    with open_superlink(roster, refusal=roster.refusal, certificate=certificate, key=key) as (_, port):
        try:
            about("localhost", port, read_key(key_of(root, role)), kit / "ca.crt")
        except PermissionError as error:
            return str(error)
    return ""


def got(address: str, token: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def reading(path: str) -> Callable[[Path, Role, pytest.CaptureFixture[str]], str]:
    def read(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
        with page_served(RunStatus("x"), root / "server" / "state", 0, kit=root / "server") as address:
            code, text = got(address.partition("/?")[0] + path, make_pass(key_of(root, role), 1.0))
        assert code in (200, 403), text
        return text if code == 403 else ""

    return read


def auditing(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
    said = by_command(root, capsys, "audit", str(root / "server" / "state"), "--key", str(key_of(root, role)))
    assert bool(said) == bool(reading("/audit.json")(root, role, capsys))
    return said


def command(*words: str, authority: bool = False) -> Callable[[Path, Role, pytest.CaptureFixture[str]], str]:
    """A command with the key of a role; S stands for the server's folder, and R for the run folder."""

    def call(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
        places = {"S": str(root / "server"), "R": str(root / "server" / "state"), "NEXT": str(root / "next")}
        key = authority_of(root, role) if authority else key_of(root, role)
        return by_command(root, capsys, *(places.get(word, word) for word in words), "--key", str(key))

    return call


def renewing(root: Path, role: Role, capsys: pytest.CaptureFixture[str]) -> str:
    folder = root / "authority"
    if role is not Role.lead:
        folder = root / "own"
        make_authority(folder, 10)
        (folder / "ca.key").write_bytes(key_of(root, role).read_bytes())
    return by_command(root, capsys, "renew", str(root / "server"), "--host", "localhost", "--authority", str(folder))


DO: dict[Action, Callable[[Path, Role, pytest.CaptureFixture[str]], str]] = {
    Action.run: leading,
    Action.sign: command("sign", "S", authority=True),
    Action.add: command("add", "S", "east", authority=True),
    Action.revoke: command("revoke", "S", "south", authority=True),
    Action.quarantine: command("quarantine", "S", "south"),
    Action.renew: renewing,
    Action.rotate: command("ca", "NEXT", "--beside", "S"),
    Action.erase: command("erase", "R", "south"),
    Action.retain: command("retain", "R", "--days", "1"),
    Action.take_part: taking_part,
    Action.page: reading("/status.json"),
    Action.audit: auditing,
    Action.dossier: reading("/dossier"),
}
WHO = {
    Action.run: {Role.lead}, Action.sign: {Role.lead}, Action.add: {Role.lead}, Action.revoke: {Role.lead},
    Action.quarantine: {Role.lead}, Action.renew: {Role.lead}, Action.rotate: {Role.lead}, Action.erase: {Role.lead},
    Action.retain: {Role.lead}, Action.take_part: {Role.site}, Action.page: {Role.lead, Role.auditor},
    Action.audit: {Role.lead, Role.auditor}, Action.dossier: {Role.lead, Role.auditor},
}  # fmt: skip
COMMANDS: dict[str, Action | None] = {
    "sign": Action.sign, "add": Action.add, "revoke": Action.revoke, "quarantine": Action.quarantine,
    "renew": Action.renew, "ca": Action.rotate, "audit": Action.audit, "erase": Action.erase, "retain": Action.retain,
    "new": None, "key": None, "card": None, "consent": None, "demo": None, "pass": None,
}  # fmt: skip


def test_every_action_and_every_command_has_a_row() -> None:
    assert set(DO) == set(WHO) == set(Action)
    assert {entry.name for entry in federation_app.registered_commands} == set(COMMANDS)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in ("server.key", "page.token"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files if "own" not in path.parts}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action, ids=lambda action: action.name)
def test_a_role_may_do_what_its_row_says_and_nothing_else(
    action: Action, role: Role, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(root)
    refused = DO[action](root, role, capsys)
    if role in WHO[action]:
        assert refused == ""
        return
    who = "a lead or an auditor may" if Role.auditor in WHO[action] else f"a {next(iter(WHO[action]))} may"
    article = "an" if role is Role.auditor else "a"
    assert f"{NAMES[role]!r} is {article} {role}, which may not {action}: {who}" in refused
    assert contents(root) == before


def test_an_auditor_has_no_part_in_what_sites_rely_on(root: Path) -> None:
    server = root / "server"
    assert set(read_sites(server / SITES)) == set(verified(server, (server / "ca.crt").read_bytes()).sites)
    assert NAMES[Role.auditor] not in read_sites(server / SITES)
    assert not list((root / "sites").rglob(OFFICERS))
    assert verified(server, (server / "ca.crt").read_bytes()).serial == 1  # no site needs a new manifest


def test_a_lead_without_the_authoritys_key_signs_nothing(root: Path) -> None:
    server, key = root / "server", key_of(root, Role.lead)
    before = contents(root)
    refuses(r"is not the key of an authority in .*: nothing was signed", sign_again, server, key)
    assert contents(root) == before
    quarantine_site(server, "south", release=False, key=key)


def test_a_strangers_key_may_do_nothing(root: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    with pytest.raises(ValueError, match="is the key of nobody in this federation, which may not quarantine a site"):
        quarantine_site(root / "server", "south", release=False, key=tmp_path / "stranger")
    with pytest.raises(ValueError, match="must hold a private key of this federation: No such file"):
        quarantine_site(root / "server", "south", release=False, key=tmp_path / "none")


def test_nobody_has_two_roles_and_no_key_two_owners(root: Path) -> None:
    server = root / "server"
    public = public_of(read_key(root / "sites" / "south" / "key"))
    with pytest.raises(ValueError, match=r"this key is already that of 'south', whose role is site"):
        add_officer(server, "carl", Role.auditor, public, None)
    with pytest.raises(ValueError, match="'south' is on the other list already, and has one role"):
        add_officer(server, "south", Role.auditor, "", None)
    refuses("'bob' is on the other list already", add_site, server, "bob", "", None, AT)
    with pytest.raises(ValueError, match="this key is already that of 'bob', whose role is auditor"):
        add_site(server, "east", public_of(read_key(key_of(root, Role.auditor))), None, AT)
    with pytest.raises(ValueError, match="'nonsense' is no public key in OpenSSH's format"):
        add_officer(server, "carl", Role.auditor, "nonsense", None)
    with pytest.raises(ValueError, match="'bob' is on the list already: --again gives them another key"):
        add_officer(server, "bob", Role.auditor, "", None)


def test_who_is_revoked_reads_nothing_from_then_on(root: Path) -> None:
    server, token = root / "server", make_pass(key_of(root, Role.auditor), 1.0)
    with page_served(RunStatus("x"), server / "state", 0, kit=server) as address:
        base = address.partition("/?")[0]
        assert got(f"{base}/audit.json", token) == (200, "[]")
        assert got(f"{base}/", token)[0] == 200
        with urllib.request.urlopen(f"{base}/?token={token}", timeout=10) as answer:
            assert answer.headers["Set-Cookie"].startswith(f"confed={token};")  # and not the page's own token
        revoke_site(server, "bob", None)
        assert not key_of(root, Role.auditor).exists()
        code, text = got(f"{base}/", token)
        assert (code, text) == (403, "this pass is of nobody in this federation, who may not read the server's page\n")
        add_officer(server, "bob", Role.auditor, "", None, again=True)
        assert got(f"{base}/", token)[0] == 403
        assert got(f"{base}/", make_pass(key_of(root, Role.auditor), 1.0))[0] == 200


def test_a_pass_has_an_end_and_cannot_be_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, token = root / "server", make_pass(key_of(root, Role.auditor), 1.0)
    monitor.check_pass(server, token, Action.page)
    text, signature = token.split(".")
    public, until = json.loads(bytes.fromhex(text))
    longer = json.dumps([public, until + 9]).encode().hex()
    for changed in (f"{longer}.{signature}", f"{text}.{signature[:-2]}00"):
        with pytest.raises(ValueError, match="the time of this pass is over, or its owner did not sign it"):
            monitor.check_pass(server, changed, Action.page)
    for damaged in ("x.y", f"{b'[1]'.hex()}.00", "."):
        refuses("the token is no pass of `confed federation pass`", monitor.check_pass, server, damaged, Action.page)
    monkeypatch.setattr(time, "time", lambda: until + 1)
    refuses("the time of this pass is over", monitor.check_pass, server, token, Action.page)


@pytest.fixture
def at_a_site(root: Path) -> Iterator[str]:
    with page_served(RunStatus("x", "north"), root / "private", 0) as address:
        yield address.partition("/?")[0]


@pytest.mark.parametrize("role", Role)
def test_a_sites_page_opens_with_its_own_token_alone(role: Role, at_a_site: str, root: Path) -> None:
    assert got(f"{at_a_site}/", make_pass(key_of(root, role), 1.0))[0] == 403
    assert got(f"{at_a_site}/", (root / "private" / "page.token").read_text())[0] == 200


def test_a_list_that_the_authority_did_not_sign_is_refused(root: Path) -> None:
    path = root / "server" / OFFICERS
    path.write_text(path.read_text().replace("auditor", "lead"))
    with pytest.raises(ValueError, match=r"officers\.json is not signed by the authority"):
        quarantine_site(root / "server", "south", release=False, key=key_of(root, Role.auditor))


def test_the_help_says_who_may_do_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert confed("federation", "--help") == 0
    assert " ".join(described().split()) in " ".join(capsys.readouterr().out.split())
    assert all(role in described() for role in MAY)
