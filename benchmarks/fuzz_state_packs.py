"""The reader of files of several client states that fuzz_inputs.py tries: no state may change unnoticed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint
from confed.federation.state import ClientState, ServerState
from fuzz_reader import Reader

COHORTS = (("a", "b", "a longer name"), ("b", "a longer name", "d"))
"""Clients that saved a state in round 1, of which one did not again, and in round 2."""


def state_pack_readers(root: Path) -> list[Reader]:
    """Two rounds with a checkpoint each; the file of either round is changed.

    Args:
        root: an empty folder for their files.
    """
    kept, place = root / "packs", root / "packs_changed"
    checkpoints = Checkpoints(kept, keep=2)
    for round, cohort in enumerate(COHORTS, 1):
        checkpoints.store.begin(round)
        for client in cohort:
            values = torch.full((3,), float(round))
            checkpoints.store.save(client, ClientState({"private": {"w": values}}, {"round": round}))
        checkpoints.save(Checkpoint(round, {"main": ServerState(round, {"w": torch.ones(1)})}, 0))

    def changed(name: str) -> Callable[[bytes], str | None]:
        def read(data: bytes) -> str | None:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(kept, place)
            (place / "clients" / name).write_bytes(data)
            again = Checkpoints(place, keep=2)
            found, _ = again.latest(0)
            again.store.begin(found.round)
            for client in {*again.store.clients(), *COHORTS[0], *COHORTS[1]}:
                part = [round for round, cohort in enumerate(COHORTS[: found.round], 1) if client in cohort]
                state = again.store.load(client)
                if state.scalars != ({"round": part[-1]} if part else {}):
                    return f"another state of {client[:20]!r} was taken: {str(state.scalars)[:50]}"
                if part and state.tensors["private"]["w"].tolist() != [float(part[-1])] * 3:
                    return "another tensor was taken"
            return None

        return read

    first, second = ((kept / "clients" / f"{round:06d}.states").read_bytes() for round in (1, 2))
    # Round 1 is sound where the file of round 2 is damaged; without that of round 1 there may be nothing to go on from.
    return [
        Reader("states_of_round_2", "bytes", (second,), changed("000002.states"), ()),
        Reader("states_of_round_1", "bytes", (first,), changed("000001.states"), (CorruptCheckpoint,)),
    ]
