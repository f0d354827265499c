"""Loop of a worker process: take a call with its client's state, answer it, send back reply and state.

A forked process has its parent's setup. A spawned one makes its own, from a :class:`SetupSource`.
"""

import contextlib
import json
import os
import signal
from dataclasses import asdict
from multiprocessing.connection import Connection

import torch

from confed.engines.call_bytes import answer_bytes
from confed.engines.device_data import counts_of, keep_data
from confed.engines.features import WRITTEN_AFTER, keep_features
from confed.engines.perform import Setup, Workspace
from confed.engines.setup_source import SetupSource
from confed.engines.usage import keep_freed_memory
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures

__all__ = ["serve", "serve_spawned"]


def serve(setup: Setup, number: int, threads: int, pipe: Connection, parent: Connection, count: int) -> None:
    """Loop of a forked process.

    Args:
        setup: the run.
        number: which process this is, for the choice of a GPU.
        threads: its threads.
        pipe: where calls come from.
        parent: the other end, of which the process holds a copy.
        count: how many processes there are.
    """
    parent.close()
    _ignore_signals()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _answer_calls(setup, number, threads, pipe, count)


def serve_spawned(source: str, number: int, threads: int, pipe: Connection, count: int) -> None:
    """Loop of a spawned process; a setup that it cannot make is its only answer.

    Args:
        source: a :class:`SetupSource` as JSON.
        number: which process this is, for the choice of a GPU.
        threads: its threads.
        pipe: where calls come from.
        count: how many processes there are.
    """
    _ignore_signals()
    torch.set_num_threads(1)  # as in the parent, while data are read
    keep_freed_memory()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        try:
            setup = SetupSource.from_json(source).setup()
        except Exception as error:
            for part in (json.dumps({"broken": f"{type(error).__name__}: {error}"}).encode(), b"", b""):
                pipe.send_bytes(part)
            return
        _answer_calls(setup, number, threads, pipe, count)


def _ignore_signals() -> None:
    # Ctrl-C and the end that a batch system asks for are the parent's to handle; closing the pipe ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _answer_calls(setup: Setup, number: int, threads: int, pipe: Connection, count: int) -> None:
    torch.set_num_threads(threads)
    device = setup.device
    if device == "cuda":
        device = f"cuda:{number % torch.cuda.device_count()}"
    workspace: Workspace | None = None
    features: FrozenFeatures | FeatureCounts = FeatureCounts()
    while True:
        head, message, state = (pipe.recv_bytes() for _ in range(3))
        if workspace is None:
            workspace = Workspace(setup.model(), device)
            features = keep_features(setup, workspace, count)
            keep_data(setup, workspace, count)
        told, *others = answer_bytes(setup, workspace, head, message, state)
        if isinstance(features, FrozenFeatures):
            features.save(WRITTEN_AFTER)
        counts = features.counts if isinstance(features, FrozenFeatures) else features
        kept = {"features": asdict(counts), "device_data": asdict(counts_of(setup, workspace))}
        pipe.send_bytes(json.dumps({**json.loads(told), "process": os.getpid(), **kept}).encode())
        for part in others:
            pipe.send_bytes(part)
