"""Connection to a Ray cluster: joined at its address, or started on this machine for one run."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ray
import ray.exceptions

_PATIENCE = 5.0
"""Seconds in which the address must take a connection."""


@contextlib.contextmanager
def connected(address: str, cores: int, gpus: int | None = None) -> Iterator[None]:
    """Connection to a cluster for as long as the ``with`` block lasts; one that this process has already is kept."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if address:
        _check_address(address)
        options |= {"address": address}
    else:
        # No figures about this machine are sent to Ray's makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # "local" also where this machine belongs to a cluster.
        options |= {"address": "local", "num_cpus": cores, "num_gpus": gpus, "include_dashboard": False}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where = f"no Ray cluster could be joined at run.address = {address!r}" if address else "Ray could not start here"
    with _signals_kept():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise ValueError(f"{where}: {' '.join(str(error).split())[:400]}") from None
    try:
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def _check_address(address: str) -> None:
    """Check that something listens at an address, as Ray itself tries for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ValueError(
            f"run.address must be HOST:PORT of a cluster's head (`ray start --head` prints it), 'auto' or '', got "
            f"{address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster at run.address = {address!r}: {error}; `ray start --head` starts one, and `ray status` "
            "shows its nodes"
        ) from None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Within it Ray may install handlers of signals; afterwards those of before are there again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
