"""Sites of a federation while its server runs: added, revoked, and put in quarantine, without a restart.

A revoked site's requests are refused and it counts as away from the next look on. A site in quarantine stays connected
and is asked nothing. Both take effect when the file is written, in the middle of a round too: the round goes on without
the site as it does without one that lost its connection.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from confed.deployment.authority import issue_server, make_authority, make_key, public_text, settle_key
from confed.deployment.manifest import MANIFEST, verified
from confed.deployment.provision import (
    SITES,
    Federation,
    key_of_authority,
    read_sites,
    sign_again,
    write_from_template,
    write_sites,
)
from confed.federation.checkpoint import write_atomically
from confed.federation.reading import FAULTS, read_bounded
from confed.system.private_keys import load_private

QUARANTINE = "quarantine.json"  # names of sites that are asked nothing, beside the list of sites
INTERVAL = 0.5  # seconds between looks at the files


class Roster(Mapping[bytes, str]):
    """Public key -> name of the sites on a server's list, as its file says now.

    Attributes:
        added: called with each key that came to the list after the start.
        changed: called when the server's certificate is another one.
    """

    def __init__(self, listed: Path, read_public: Callable[[str], bytes], told: Callable[[str], None]) -> None:
        self._listed, self._read_public, self._told = listed, read_public, told
        self._files = [listed, listed.with_name(QUARANTINE), listed.with_name("server.crt")]
        self._looked, self._seen = time.monotonic(), [_changed_at(path) for path in self._files]
        self.added: Callable[[bytes], object] = lambda key: None
        self.changed: Callable[[], object] = lambda: None
        self._names = self._read()
        self._quarantined = read_quarantine(listed)

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
            names, quarantined = self._read(), read_quarantine(self._listed)
            if certificate_changed:
                settle_key(self._listed.parent)
                self.changed()
        except (OSError, *FAULTS) as error:
            self._told(f"the list of sites stays as it was: {error}")
            return
        finally:
            self._seen = seen
        before, self._names, self._quarantined = self._names, names, quarantined
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


# What a coordinator does ------------------------------------------------------------------------------------------


# Each step leaves what the server and the sites can read. Of a command that was killed the same one does the rest.


def add_site(
    server: Path, name: str, public: str, private: Path | None, address: tuple[str, int], again: bool = False
) -> list[Path]:
    """A site more, with a folder and a key of its own where it brings no public key; signed again.

    With ``again`` a site that lost its key gets another one, and the lost one is refused from then on.
    """
    keys = read_sites(server / SITES)
    if name in _signed(server) and name in keys and not again:
        raise ValueError(f"site {name!r} is on the list already: --again gives it another key, `revoke` removes it")
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
    """A site less: a running server refuses it at once; signed again, for the other sites."""
    keys = read_sites(server / SITES)
    if name not in {**keys, **_signed(server)}:
        raise ValueError(f"there is no site {name!r} on the list; there are {', '.join(keys)}")
    write_sites(server / SITES, {site: key for site, key in keys.items() if site != name})
    return sign_again(server, private or key_of_authority(server))


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


def quarantine_site(server: Path, name: str, release: bool) -> None:
    """A site in quarantine, or out of it."""
    _check_flower(server)
    if name not in read_sites(server / SITES):
        raise ValueError(f"there is no site {name!r} on the list; there are {', '.join(read_sites(server / SITES))}")
    names = read_quarantine(server / SITES) - {name} if release else read_quarantine(server / SITES) | {name}
    write_atomically(server / QUARANTINE, json.dumps(sorted(names)).encode(), sync=True)


def renew_server(server: Path, authority: Path | None, host: str, days: int) -> None:
    """A new certificate of the server, which a running one takes for new connections."""
    _check_flower(server)
    issue_server(server, authority or key_of_authority(server).parent, host, days)


def rotate_authority(server: Path, folder: Path, days: int, encrypted: bool) -> None:
    """A second authority, which sites that have the new ``ca.crt`` trust beside the first."""
    _check_flower(server)
    after = folder / "ca.crt"
    following = after.read_bytes() if after.is_file() else make_authority(folder, days, encrypted)
    both = (server / "ca.crt").read_bytes()
    both = both if following in both else following + both
    write_atomically(server / "ca.crt", both, sync=True)
    for name in read_sites(server / SITES):
        site = server.parent / "sites" / name / "ca.crt"
        if site.is_file():
            write_atomically(site, both)
