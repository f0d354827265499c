"""Private keys that may be encrypted, and where their passphrases come from.

A passphrase comes from the environment (``CONFED_PASSPHRASE``), from systemd
(``LoadCredential=confed.passphrase:FILE``) or from the terminal, and never from an option, which others could read.
"""

import getpass
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_typed: list[bytes] = []  # at the terminal, where a command asks once


def passphrase(what: str, new: bool = False) -> bytes:
    """The passphrase of a private key; a ValueError where nothing says one."""
    if (given := os.environ.get("CONFED_PASSPHRASE")) is not None:
        return given.encode()
    credential = Path(os.environ.get("CREDENTIALS_DIRECTORY", ""), "confed.passphrase")
    if "CREDENTIALS_DIRECTORY" in os.environ and credential.is_file():
        return credential.read_bytes().strip()
    if not sys.stdin.isatty():
        raise ValueError(
            f"{what} is encrypted: give its passphrase in CONFED_PASSPHRASE or as systemd's credential "
            "confed.passphrase, or use a terminal"
        )
    text = getpass.getpass(f"Passphrase of {what}: ")
    if new and getpass.getpass("The same again: ") != text:
        raise ValueError("the two passphrases differ; nothing was written")
    _typed.append(text.encode())
    return _typed[-1]


def load_private(data: bytes, what: str) -> Any:
    """A private key in PEM or OpenSSH's format, decrypted where it is encrypted; a fault is a ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    load = load_ssh_private_key if b"OPENSSH PRIVATE KEY" in data else load_pem_private_key
    try:
        try:
            return load(data, password=None)
        except (TypeError, ValueError) as error:
            if "assword" not in str(error):
                raise
        for given in _typed:
            with suppress(ValueError):
                return load(data, password=given)
        return load(data, password=passphrase(what))
    except (ValueError, TypeError, LookupError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{what} is no private key: {error}") from error
