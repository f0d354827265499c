"""Manifest of the files of client states that a checkpoint needs: clients in each, and a checksum of their names."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["NeededStates", "missing"]


class NeededStates:
    """Clients whose newest state lies in each file, kept up to date at a constant cost per saved state.

    Args:
        states: of each client, its id and the name of the file with its newest state; files of their own that clients
            have of one version count together, under a pattern.
    """

    def __init__(self, states: Iterable[tuple[str, str]] = ()) -> None:
        self._files: dict[str, tuple[int, int]] = {}
        for client, name in states:
            self.add(client, name)

    def add(self, client: str, name: str) -> None:
        """The client's newest state lies in this file."""
        self._count(client, name, 1)

    def remove(self, client: str, name: str) -> None:
        """It lies there no more."""
        self._count(client, name, -1)

    def record(self) -> dict[str, str]:
        """Name of a file -> number of clients, and a checksum of their names that no order changes."""
        return {name: f"{count} {names:016x}" for name, (count, names) in self._files.items()}

    def _count(self, client: str, name: str, more: int) -> None:
        count, names = self._files.get(name, (0, 0))
        digest = hashlib.blake2b(client.encode(errors="surrogatepass"), digest_size=8).digest()
        if count + more:
            self._files[name] = count + more, names ^ int.from_bytes(digest, "big")
        else:
            del self._files[name]


def missing(needed: Mapping[str, str], found: Mapping[str, str]) -> tuple[str, str] | None:
    """A file that has not the states that a checkpoint needs, and what is wrong with it; None if all have them.

    Args:
        needed: as :meth:`NeededStates.record` was when the checkpoint was written.
        found: the same of what there is now.
    """
    want, there = _clients(needed), _clients(found)
    # Older states of clients whose newest are missing count in their files: those with too few are the culprits.
    for name in sorted({*needed, *found}, key=lambda name: (there[name] - want[name], name)):
        if not there[name]:
            return name, f"missing, with the states of {want[name]} {'client' if want[name] == 1 else 'clients'}"
        if needed.get(name) != found[name]:
            others = "" if there[name] != want[name] else "others "
            return name, f"holds the newest states of {there[name]} clients, the checkpoint needs {others}{want[name]}"
    return None


def _clients(record: Mapping[str, str]) -> Counter[str]:
    return Counter({name: int(text.split()[0]) for name, text in record.items()})
