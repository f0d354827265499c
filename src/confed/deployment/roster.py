"""Members of a federation while its server runs: added, revoked, and put in quarantine, without a restart.

A revoked site's requests are refused and it counts as away from the next look on. A site in quarantine stays connected
and is asked nothing. Both take effect when the file is written, in the middle of a round too: the round goes on without
the site as it does without one that lost its connection.

Beside the list of sites lies that of leads and auditors, signed by the authority. What somebody may do follows from
the lists alone (:mod:`confed.deployment.roles`): the authority's key and the server's are a lead's.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from confed.deployment.authority import issue_server, make_authority, make_key, public_text, settle_key, trusted
from confed.deployment.manifest import MANIFEST, read_signed, same_key, verified, write_signed
from confed.deployment.provision import (
    SITES,
    Federation,
    check_name,
    key_of_authority,
    read_sites,
    sign_again,
    write_from_template,
    write_sites,
)
from confed.deployment.roles import Action, NotAllowed, Role, check_role
from confed.federation.checkpoint import write_atomically
from confed.federation.reading import FAULTS, faults_of, read_bounded
from confed.system.private_keys import load_private

QUARANTINE = "quarantine.json"  # names of sites that are asked nothing, beside the list of sites
OFFICERS = "officers.json"  # leads and auditors, beside the list of sites
_HEADING = b"confed federation officers 1\n"
INTERVAL = 0.5  # seconds between looks at the files


class Roster(Mapping[bytes, str]):
    """Public key -> name of the sites on a server's list, as its file says now.

    Attributes:
        added: called with each key that came to the list after the start.
        changed: called when the server's certificate is another one.
    """

    def __init__(self, listed: Path, read_public: Callable[[str], bytes], told: Callable[[str], None]) -> None:
        self._listed, self._read_public, self._told = listed, read_public, told
        self._files = [listed.with_name(name) for name in (listed.name, QUARANTINE, "server.crt", OFFICERS)]
        self._looked, self._seen = time.monotonic(), [_changed_at(path) for path in self._files]
        self.added: Callable[[bytes], object] = lambda key: None
        self.changed: Callable[[], object] = lambda: None
        self._names = self._read()
        self._quarantined, self._officers = read_quarantine(listed), self._read_officers()

    def __getitem__(self, key: bytes) -> str:
        self._refresh()
        return self._names[key]

    def __iter__(self) -> Iterator[bytes]:
        self._refresh()
        return iter(dict(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def active(self, key: bytes) -> str | None:
        """The name of a site that may be asked; None for one that is not on the list, or in quarantine."""
        name = self.get(key)
        return None if name in self._quarantined else name

    def refusal(self, key: bytes) -> str:
        """Why the owner of a key that is no site's may not take part."""
        officer = self._officers.get(key)
        if officer is None:
            return "this key is not on the server's list"
        return str(NotAllowed(*officer, Action.take_part))

    def _read_officers(self) -> dict[bytes, tuple[str, Role]]:
        officers = read_officers(self._listed.parent)
        return {self._read_public(public): (name, role) for name, (role, public) in officers.items()}

    def _read(self) -> dict[bytes, str]:
        public = read_sites(self._listed)
        names = {self._read_public(key): name for name, key in public.items()}
        if len(names) < len(public):
            raise ValueError(f"every site needs its own key; in {self._listed} some have the same")
        return names

    def _refresh(self) -> None:
        """Reads what has changed; a list that cannot be read leaves the one of before."""
        if time.monotonic() - self._looked < INTERVAL:
            return
        self._looked = time.monotonic()
        seen = [_changed_at(path) for path in self._files]
        if seen == self._seen:
            return
        certificate_changed = seen[2] != self._seen[2]
        try:
            names, quarantined, officers = self._read(), read_quarantine(self._listed), self._read_officers()
            if certificate_changed:
                settle_key(self._listed.parent)
                self.changed()
        except (OSError, *FAULTS) as error:
            self._told(f"the list of sites stays as it was: {error}")
            return
        finally:
            self._seen = seen
        before, self._names, self._quarantined, self._officers = self._names, names, quarantined, officers
        for key in names.keys() - before.keys():
            self.added(key)
            self._told(f"site {names[key]} was added")
        for key in before.keys() - names.keys():
            self._told(f"site {before[key]} was revoked")


def _changed_at(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def read_quarantine(listed: Path) -> frozenset[str]:
    """Names of the sites in quarantine, beside a list of sites; a fault is a ValueError."""
    path = listed.with_name(QUARANTINE)
    if not path.is_file():
        return frozenset()
    names = json.loads(read_bounded(path, 2**20))
    if not isinstance(names, list):
        raise ValueError(f"{path} must hold a list of sites' names")
    return frozenset(map(str, names))


# Who holds a key --------------------------------------------------------------------------------------------------


def read_officers(server: Path) -> dict[str, tuple[Role, str]]:
    """Role and public key of each lead and auditor, as the authority signed them; a fault is a ValueError."""
    path = server / OFFICERS
    if not path.is_file():
        return {}
    data = read_signed(path, _HEADING, (server / "ca.crt").read_bytes())
    with faults_of(path, "a list of leads and auditors"):
        return {str(name): (Role(entry["role"]), str(entry["key"])) for name, entry in json.loads(data).items()}


def holder_of(server: Path, public: str) -> tuple[str, Role] | None:
    """Name and role of a public key's owner; None where it is of nobody in the federation."""
    for name, file in (("the authority", "ca.crt"), ("the server", "server.crt")):
        certificates = trusted((server / file).read_bytes()) if (server / file).is_file() else []
        if any(same_key(public, public_text(certificate)) for certificate in certificates):
            return name, Role.lead
    listed = {name: (Role.site, key) for name, key in read_sites(server / SITES).items()} | read_officers(server)
    return next(((name, role) for name, (role, key) in listed.items() if same_key(public, key)), None)


def check_key(server: Path, key: Path | None, action: Action) -> None:
    """Check that a key's owner may do something, where roles are; without a key it is the server's."""
    if not (server / "server.crt").is_file():
        return
    if key is None:
        settle_key(server)
    path = key or server / "server.key"
    try:
        private = load_private(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path} must hold a private key of this federation: {error.strerror}") from error
    holder = holder_of(server, public_text(private))
    if holder is None:
        raise ValueError(f"{path} is the key of nobody in this federation, which may not {action}")
    check_role(*holder, action)


# What a coordinator does ------------------------------------------------------------------------------------------


# Each step leaves what the server and the sites can read. Of a command that was killed the same one does the rest.


def add_site(
    server: Path, name: str, public: str, private: Path | None, address: tuple[str, int], again: bool = False
) -> list[Path]:
    """A site more, or with ``again`` one that lost its key; its key is made where it brings none. Signed again."""
    signed, keys = _signed(server), read_sites(server / SITES)
    check_key(server, private or key_of_authority(server), Action.add)
    if name in signed and name in keys and not again:
        raise ValueError(f"site {name!r} is on the list already: --again gives it another key, `revoke` removes it")
    _check_newcomer(server, name, Role.site, public)
    federation = Federation((name,), *address, (server / "recipe.toml").read_text(encoding="utf-8"))
    folder = server.parent / "sites" / name
    if not public:
        public = _key_in(folder, name, again, listed=name in keys)
        write_atomically(folder / "ca.crt", (server / "ca.crt").read_bytes())
        for file, template in (("README.md", "site.md"), ("policy.toml", "policy.toml")):
            if not (folder / file).is_file():
                write_from_template(folder / file, template, federation, name)
    write_sites(server / SITES, {**keys, name: public})
    return sign_again(server, private or key_of_authority(server))


def add_officer(server: Path, name: str, role: Role, public: str, private: Path | None, again: bool = False) -> None:
    """A lead or an auditor, with a key of their own where they bring no public key; no site needs to know."""
    _check_flower(server)
    authority = private or key_of_authority(server)
    check_key(server, authority, Action.add)
    officers = read_officers(server)
    if name in officers and not again:
        raise ValueError(f"{name!r} is on the list already: --again gives them another key, `revoke` removes them")
    check_name(name)
    _check_newcomer(server, name, role, public)
    public = public or _key_in(server.parent / "officers" / name, name, again, listed=False)
    _write_officers(server, {**officers, name: (role, public)}, authority)


def _write_officers(server: Path, officers: Mapping[str, tuple[Role, str]], authority: Path) -> None:
    content = {name: {"role": role.value, "key": key} for name, (role, key) in officers.items()}
    write_signed([server / OFFICERS], _HEADING, json.dumps(content, indent=1).encode(), authority.read_bytes())


def _check_newcomer(server: Path, name: str, role: Role, public: str) -> None:
    """Check that a name has one role, and that a key that was sent is one, and nobody else's."""
    from confed.engines.flower.supernode import read_public

    others = read_officers(server) if role is Role.site else read_sites(server / SITES)
    if name in others:
        raise ValueError(f"{name!r} is on the other list already, and has one role: choose another name")
    if not public:
        return
    read_public(public)
    holder = holder_of(server, public)
    if holder is not None and holder[0] != name:
        raise ValueError(
            f"this key is already that of {holder[0]!r}, whose role is {holder[1]}: everybody has their own"
        )


def _key_in(folder: Path, name: str, again: bool, *, listed: bool) -> str:
    """The public half of a new key in a site's folder, or of the one that an ``add`` made before it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "key"
    if again:
        key.unlink(missing_ok=True)
    elif not listed and key.is_file() and (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} has the key of an earlier site {name!r}: --again makes another one")
    return public_text(load_private(key.read_bytes(), str(key))) if key.is_file() else make_key(key)


def revoke_site(server: Path, name: str, private: Path | None) -> list[Path]:
    """A site, lead or auditor less: a running server refuses it at once; signed again, for the other sites."""
    signed, keys, officers = _signed(server), read_sites(server / SITES), read_officers(server)
    authority = private or key_of_authority(server)
    check_key(server, authority, Action.revoke)
    if name in officers:
        (server.parent / "officers" / name / "key").unlink(missing_ok=True)  # first: it must not come back unasked
        del officers[name]
        _write_officers(server, officers, authority)
        return [server]
    if name not in {**keys, **signed}:
        raise ValueError(f"there is no site {name!r} on the list; there are {', '.join(keys)}")
    write_sites(server / SITES, {site: key for site, key in keys.items() if site != name})
    return sign_again(server, authority)


def _signed(server: Path) -> Mapping[str, str]:
    """The sites that the newest manifest has."""
    _check_flower(server)
    return verified(server, (server / "ca.crt").read_bytes()).sites


def _check_flower(server: Path) -> None:
    """Refusal of a kit of FLARE, whose list and certificates are made with it."""
    if (server / "startup").is_dir():
        raise ValueError(
            f"{server} is a kit of FLARE, whose sites and certificates are those that it was made with: make a new "
            "federation; over Flower they change while the server runs"
        )


def quarantine_site(server: Path, name: str, release: bool, key: Path | None = None) -> None:
    """A site in quarantine, or out of it."""
    _check_flower(server)
    check_key(server, key, Action.quarantine)
    if name not in read_sites(server / SITES):
        raise ValueError(f"there is no site {name!r} on the list; there are {', '.join(read_sites(server / SITES))}")
    names = read_quarantine(server / SITES) - {name} if release else read_quarantine(server / SITES) | {name}
    write_atomically(server / QUARANTINE, json.dumps(sorted(names)).encode(), sync=True)


def renew_server(server: Path, authority: Path | None, host: str, days: int) -> None:
    """A new certificate of the server, which a running one takes for new connections."""
    _check_flower(server)
    authority = authority or key_of_authority(server).parent
    check_key(server, authority / "ca.key", Action.renew)
    issue_server(server, authority, host, days)


def rotate_authority(server: Path, folder: Path, days: int, encrypted: bool, key: Path | None = None) -> None:
    """A second authority, which sites that have the new ``ca.crt`` trust beside the first."""
    _check_flower(server)
    check_key(server, key, Action.rotate)
    after = folder / "ca.crt"
    following = after.read_bytes() if after.is_file() else make_authority(folder, days, encrypted)
    both = (server / "ca.crt").read_bytes()
    both = both if following in both else following + both
    write_atomically(server / "ca.crt", both, sync=True)
    for name in read_sites(server / SITES):
        site = server.parent / "sites" / name / "ca.crt"
        if site.is_file():
            write_atomically(site, both)
