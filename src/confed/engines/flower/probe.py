"""Checks of a server by a site that has not joined: whether it answers, who vouches for it, its clock."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from confed.engines.flower.fleet_api import ABOUT
from confed.engines.flower.supernode import CallRefused, proxy_of, signed_headers

TOLERANCE = 300.0  # seconds by which clocks may differ: older signatures are refused


@dataclass(frozen=True)
class About:
    """Versions and clock of a server."""

    confed: str  # its version of confed
    flwr: str
    protocol: int | None  # its version of what sites are told; None before there was one
    ahead: float  # seconds by which its clock is ahead of this one's; good to half the time of the way there and back


def reach(host: str, port: int, wait: float = 10.0) -> None:
    """Connection attempt to a server; the connection is closed at once."""
    socket.create_connection((host, port), timeout=wait).close()


def certificate_ends(host: str, port: int, ca: Path, wait: float = 10.0) -> float:
    """End of the validity of a server's certificate, in seconds since 1970."""
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((host, port), timeout=wait) as plain,
        context.wrap_socket(plain, server_hostname=host) as line,
    ):
        ends = (line.getpeercert() or {}).get("notAfter")
        return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else 0.0


def about(host: str, port: int, key: ec.EllipticCurvePrivateKey, ca: Path | None, wait: float = 10.0) -> About:
    """A server's answer about itself: its versions of confed and Flower, and its clock."""
    scheme = "http" if ca is None else "https"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{ABOUT}"
    began = time.time()
    with (
        _errors(host, scheme),
        httpx.Client(verify=True if ca is None else ssl.create_default_context(cafile=str(ca))) as client,
    ):
        reply = client.post(address, content=b"", headers=signed_headers(key), timeout=wait)
    middle = (began + time.time()) / 2
    if reply.status_code == httpx.codes.FORBIDDEN:
        raise PermissionError(str(CallRefused(reply.status_code, reply.text)))
    try:
        told = reply.json()
        return About(str(told["confed"]), str(told["flwr"]), told.get("protocol"), float(told["time"]) - middle)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"what answers there is no server of confed's: status {reply.status_code}") from error


@contextmanager
def _errors(host: str, scheme: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        proxy = proxy_of(host, scheme)
        text = f"{type(error).__name__} {error}".strip()
        raise OSError(f"{text}; {proxy}" if proxy else text) from error
