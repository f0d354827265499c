"""Secret of a site that its noise is a function of (:mod:`confed.federation.keyed_noise`), in the site's folder.

It is made once for a recipe, is never sent, and stays when the run is over. Without it what has left the site would
leave it once more with other noise, if a server asks for it again; a site that has answered does not go on with a new
one.
"""

import os
from pathlib import Path

from confed.federation.atomic import write_atomically
from confed.federation.keyed_noise import KeyedNoise

__all__ = ["NoiseSecret"]

BYTES = 32


class NoiseSecret:
    """Source of a site's noise; see :class:`confed.federation.client.NoiseSource`.

    Args:
        path: the file of the secret; made, for its owner alone, where nothing was released yet.
        released: whether anything of the recipe was.

    Attributes:
        heard: digest of the messages of the round up to the one in hand.

    Raises:
        ValueError: the file is missing or damaged, and something was released.
    """

    def __init__(self, path: Path, released: bool) -> None:
        self.heard = ""
        found = path.read_bytes() if path.is_file() else None
        if found is not None and len(found) == BYTES:
            self._secret = found
            return
        if released:
            got = "no file" if found is None else f"{len(found)} bytes"
            raise ValueError(
                f"{path} must hold the {BYTES} bytes that this site's noise in this run is made from, got {got}: put "
                "it back, as with new ones what was sent before could leave again with other noise; or begin in "
                "another private folder"
            )
        self._secret = os.urandom(BYTES)
        write_atomically(path, self._secret, sync=True, mode=0o600)

    def noise(self, round: int, client: str, purpose: str) -> KeyedNoise:
        """See :class:`confed.federation.client.NoiseSource`."""
        return KeyedNoise(self._secret, self.heard, round, client, purpose)
