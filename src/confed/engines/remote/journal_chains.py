"""Journals of a site that its disk cannot shorten, and their heads, which the server countersigns in every round.

A site writes down what it cannot take back: secrets that it used, what its updates and evaluations cost, every message,
the secret of its noise, the serial numbers of manifests. Each journal is a hash chain: the head after n entries follows
from all of them. With its replies the site says how long its journals are, and their heads. The server keeps that,
signs it after every round, and shows it with every request; the site goes on only where its journals begin with what
the server has seen. So a journal that was removed, cut or put back from an old copy is noticed before the next update,
at both ends. A site that was killed has written more than the server knows, never less; a server that goes back to an
older checkpoint knows less.
"""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from confed.engines.remote.protocol import Refused
from confed.federation.atomic import write_atomically
from confed.federation.reading import FAULTS, read_bounded

Statement = Mapping[str, tuple[int, str]]  # journal -> its number of entries, and its head
SEEN = "countersigned.json"  # file in a site's folder: what the server signed last
KNOWN, KEY = "journals.json", "journals.key"
"""Files in the server's run folder: heads of the sites' journals, and the key that signs them."""

MOST = 32  # journals of a site, at most
_LENGTH, _HEAD = 2**53, 32


class _Chain:
    """A file that only grows, by lines; what is behind the last end of a line does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heads: list[bytes] = []
        self._end, self._synced, self._file, self._last = 0, 0, 0, b""

    def read(self) -> None:
        """Entries that came since the last look; all of them where the file is another or shorter."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._heads, self._end, self._last = [], 0, b""
            return
        if status.st_ino == self._file and status.st_size == self._end:
            return
        with self.path.open("rb") as file:
            file.seek(self._end - len(self._last))
            data = file.read()
            if status.st_ino != self._file or not data.startswith(self._last):
                self._heads, self._end, self._file, self._last = [], 0, status.st_ino, b""
                file.seek(0)
                data = file.read()
        lines = data[len(self._last) : data.rfind(b"\n") + 1].splitlines(keepends=True)
        head = self._heads[-1] if self._heads else b""
        for line in lines:
            head = blake2b(line, digest_size=_HEAD // 2, key=head).digest()
            self._heads.append(head)
            self._end, self._last = self._end + len(line), line

    def at(self, length: int) -> tuple[int, str]:
        """The number of entries, and the head after so many."""
        return len(self._heads), self._heads[length - 1].hex() if 0 < length <= len(self._heads) else ""

    def sync(self) -> None:
        """Entries on disk, where there are more than the last time."""
        self.read()
        if self._end != self._synced:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
            self._synced = self._end

    def trim(self) -> None:
        """Removes an entry that was not written to its end, as its process was killed: nothing was sent then."""
        self.read()
        if self.path.is_file() and self.path.stat().st_size > self._end:
            os.truncate(self.path, self._end)


class JournalChains:
    """A site's journals; what the server signed last is compared with them at once."""

    def __init__(
        self,
        site: str,
        root: Path,
        lines: Sequence[str],
        secrets: Sequence[str],
        serials: str,
        confirmed: bool = True,
    ) -> None:
        # Names of files in the folder: those that only grow, those that never change, that of manifests' numbers.
        self._site, self._root, self._serials = site, root, root / serials
        self._secrets = {Path(name).stem: root / name for name in secrets}
        self._chains = {Path(name).stem: _Chain(root / name) for name in lines}
        self._seen, self._signed = "", cast(Statement, {})
        if not confirmed:  # who only looks changes nothing
            return
        for chain in self._chains.values():
            chain.trim()
        if (root / SEEN).is_file():
            self._seen = (root / SEEN).read_text(encoding="utf-8", errors="replace")
            self._signed = signed_statement(self._seen, site)
            self._compare(self._signed)

    @property
    def kept(self) -> str:
        """What the server signed last, as this site keeps it."""
        return self._seen

    def confirm(self, signed: str) -> None:
        """Check that the journals begin with what the server has signed, as it shows now and as is kept here."""
        shown = self._signed if signed in ("", self._seen) else signed_statement(signed, self._site)
        self._compare(self._signed)
        self._compare(shown)
        if shown is not self._signed and not any(
            shown.get(name, (0, ""))[0] < n for name, (n, _) in self._signed.items()
        ):
            write_atomically(self._root / SEEN, signed.encode(), sync=True)
            self._seen, self._signed = signed, shown

    def statement(self) -> str:
        """Lengths and heads of all journals, on disk, as they are sent."""
        for chain in self._chains.values():
            chain.sync()  # what was told must not be lost with the power
        heads = {name: self._at(name, _LENGTH) for name in (*self._chains, *self._secrets, *self._counters())}
        told = {name: (length, self._at(name, length)[1]) for name, (length, _) in heads.items() if length}
        return json.dumps(told)

    def _at(self, name: str, length: int) -> tuple[int, str]:
        """Entries of a journal, and its head after so many; no head where a journal does not say."""
        if name in self._chains:
            self._chains[name].read()
            return self._chains[name].at(length)
        if name in self._secrets:
            path = self._secrets[name]
            return (1, blake2b(path.read_bytes(), digest_size=_HEAD // 2).hexdigest()) if path.is_file() else (0, "")
        serial, head = self._counters().get(name, (0, ""))
        return serial, head if length == serial else ""

    def _counters(self) -> dict[str, tuple[int, str]]:
        """Authority -> serial number of its newest manifest, and the digest of that."""
        if not self._serials.is_file():
            return {}
        entries = json.loads(self._serials.read_text(encoding="utf-8")).items()
        return {f"serial of {name[:16]}": (entry["serial"], entry["digest"][:_HEAD]) for name, entry in entries}

    def holds(self, name: str, wanted: int, head: str) -> tuple[int, bool]:
        """The entries of a journal, and whether they begin with so many that have that head."""
        length, head_here = self._at(name, wanted)
        counted = name not in self._chains and name not in self._secrets and length > wanted
        return length, length >= wanted and (head_here == head or counted)

    def _compare(self, statement: Statement) -> None:
        for name, (wanted, head) in statement.items():
            length, begins_so = self.holds(name, wanted, head)
            if not begins_so:
                head_here = self._at(name, wanted)[1]
                raise Refused(  # files last: what is sent to the server ends before the first one
                    f"the journal {name!r} was removed, cut or put back from an old copy: the server has signed "
                    f"{wanted} entries with the head {head}, and here are {length} with {head_here or 'no head'}. Put "
                    "the "
                    "newest copy of the private folder back; if it is lost, have the coordinator take the site out of "
                    f"the journals in the server's run folder ({KNOWN}), and remove {self._root / SEEN}"
                )


def countersigned_at(root: Path, site: str) -> Statement:
    """What a server's run folder has signed of a site's journals, or what a site's folder keeps of that."""
    if (root / KNOWN).is_file():
        signed = json.loads(read_bounded(root / KNOWN)).get(site, "")
    else:
        signed = (root / SEEN).read_text(encoding="utf-8") if (root / SEEN).is_file() else ""
    if signed and (root / KEY).is_file() and _public_half(root / KEY) != json.loads(signed).get("key"):
        raise Refused(f"the journals of {site!r} are signed by another key than this server's ({KEY})")
    return signed_statement(signed, site) if signed else {}


def _public_half(path: Path) -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(path.read_bytes()).public_key().public_bytes_raw().hex()


def lengths_against(private: Path, statement: Statement) -> dict[str, tuple[int, bool]]:
    """Journal of a statement -> the entries that a site's folder has of it, and whether they begin as was signed."""
    lines = [f"{name}.jsonl" for name in statement if (private / f"{name}.jsonl").is_file()]
    secrets = [f"{name}.key" for name in statement if (private / f"{name}.key").is_file()]
    chains = JournalChains("", private, lines, secrets, "manifests.json", confirmed=False)
    return {name: chains.holds(name, length, head) for name, (length, head) in statement.items()}


class Countersignatures:
    """Heads of all sites' journals, in the server's run folder where there is one, and its signatures under them."""

    def __init__(self, root: Path | None) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._root = root
        self._statements: dict[str, Statement] = {}
        self._signed: dict[str, str] = {}
        self._changed: set[str] = set()
        path = None if root is None else root / KEY
        seed = path.read_bytes() if path is not None and path.is_file() else os.urandom(32)
        if len(seed) != 32:
            raise ValueError(
                f"{path} must hold the 32 bytes of this server's key, got {len(seed)}; remove it for a new one"
            )
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        if root is None or path is None:
            return
        if not path.is_file():
            root.mkdir(parents=True, exist_ok=True)
            write_atomically(path, seed, sync=True, mode=0o600)
        if (root / KNOWN).is_file():
            try:
                self._signed = json.loads((root / KNOWN).read_text(encoding="utf-8"))
                self._statements = {site: signed_statement(signed, site) for site, signed in self._signed.items()}
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{root / KNOWN} must hold signed heads of sites' journals: {error}; put it back"
                ) from error

    def signed(self, site: str) -> str:
        """What was signed last of a site's journals; "" before the first time."""
        return self._signed.get(site, "")

    def known(self, site: str) -> Statement:
        """What a site has said of its journals so far."""
        return self._statements.get(site, {})

    def was_put_back(self, site: str, kept: str) -> bool:
        """Whether a site keeps heads that this server signed later than it knows: its run folder is an older copy.

        From then on those count, so that no site goes back with the server.
        """
        try:
            statement = signed_statement(kept, site) if kept else {}
        except Refused:
            return False
        public, known = self._key.public_key().public_bytes_raw().hex(), self.known(site)
        later = {name: entry for name, entry in statement.items() if entry[0] > known.get(name, (0, ""))[0]}
        if not later or json.loads(kept)["key"] != public:
            return False
        self._statements[site] = {**known, **later}
        self._changed.add(site)
        return True

    def note(self, site: str, told: str, before: Statement | None = None) -> None:
        """Record of what a site says of its journals; a late reply goes by what was known when it was asked for."""
        statement, newest = _statement(told), self.known(site)
        must = newest if before is None else before
        for name, (length, head) in newest.items():
            signed = statement.get(name, (0, ""))
            if signed[0] < must.get(name, (0, ""))[0] or (signed[0] == length and signed[1] != head):
                raise Refused(
                    f"the journal {name!r} of {site!r} had {length} entries with the head {head}, and now has "
                    f"{signed[0]} with {signed[1] or 'no head'}: it was removed, cut or put back from an old copy; the "
                    "site must put the newest copy of its private folder back"
                )
        later = all(statement.get(name, (0, ""))[0] >= length for name, (length, _) in newest.items())
        if later and statement != newest:
            self._statements[site] = statement
            self._changed.add(site)

    def sign(self) -> None:
        """Signature under what has changed; on disk when this returns."""
        for site in self._changed:
            text = _text(site, self._statements[site])
            public = self._key.public_key().public_bytes_raw().hex()
            signature = self._key.sign(text.encode()).hex()
            self._signed[site] = json.dumps({"journals": self._statements[site], "key": public, "signature": signature})
        if self._changed and self._root is not None:
            write_atomically(self._root / KNOWN, json.dumps(self._signed, indent=1).encode(), sync=True)
        self._changed.clear()


def _text(site: str, statement: Statement) -> str:
    return json.dumps(
        ["confed journals", site, {name: list(entry) for name, entry in statement.items()}], sort_keys=True
    )


def _statement(told: str) -> Statement:
    """A statement from its text; whatever else it is, is a Refused. Who says nothing has no journals."""
    try:
        return _entries(json.loads(told or "{}"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"lengths and heads of journals must be JSON: {error}") from error


def _entries(told: Any) -> dict[str, tuple[int, str]]:
    if not isinstance(told, dict) or len(cast(dict[str, Any], told)) > MOST:
        raise Refused(f"a site must name at most {MOST} journals")
    entries: dict[str, tuple[int, str]] = {}
    for name, entry in cast(dict[str, Any], told).items():
        sound = len(name) <= 100 and name.isprintable() and isinstance(entry, list) and len(cast(list[Any], entry)) == 2
        length, head = cast(list[Any], entry) if sound else (None, None)
        if type(length) is not int or not 0 < length < _LENGTH or not isinstance(head, str) or len(head) != _HEAD:
            raise Refused(f"the journal {name[:80]!r} must have a length and a head of {_HEAD} characters")
        entries[name] = (length, head)
    return entries


def signed_statement(signed: str, site: str) -> Statement:
    """The statement under a server's signature; a Refused where there is none under it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        told = json.loads(signed)
        statement = _entries(told["journals"])
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(told["key"]))
        key.verify(bytes.fromhex(told["signature"]), _text(site, statement).encode())
    except (InvalidSignature, *FAULTS) as error:
        raise Refused(
            f"the server's signature under the journals of {site!r} is none: {type(error).__name__}"
        ) from error
    return statement
