"""The page of the ways of execution, made from the tables that the code itself reads.

``python docs/make_equivalence.py`` writes ``docs/equivalence.md`` from ``confed/federation/equivalence.py``; with
``--check`` it writes nothing and fails if the page is out of date.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from confed.federation.compression import Compression
from confed.federation.equivalence import HOOKS, LOCAL, OPTIONS, RUN, WAYS, Row

PAGE = Path(__file__).parent / "equivalence.md"
SIGNS = {"equal bits": "=", "within 1e-5": "≈", "one by one": "1", "refused": "refused", "not asked": "–"}

START = """# Ways of execution

A run may train its clients in several ways. The reference is one client after the other in one process. Every other
way gives the same numbers, or it steps aside, or it refuses the run before the first round and says why. What follows
is a promise for every setting of local training, for every option of a method and for every hook that a method may
override. The code reads the same tables: what is not in them is not followed, and a new setting or hook without a row
fails a test. Tests that are generated from the dataclasses prove every cell, each with a value or an override that
changes the reference, so that the cell can fail.

This page is made by `python docs/make_equivalence.py`.

| sign | meaning |
|:---:|---|
| = | equal bits |
| ≈ | within 1e-5 of the reference, in every tensor, loss and sum: kernels for stacked matrices sum in another order |
| 1 | this way steps aside: clients are trained one by one, with equal bits, and a note of the run says why |
| refused | an error before the first round says why |
| – | nothing in a round depends on it |

"""

STACKED = """
## What stacked training follows

With `run.batch_clients` the k-th steps of several clients are computed in one pass; "auto", the default, chooses a
number above 1 only where these tables have ≈ or =, and a step of one client is too little work
([speed](speed.md#several-clients-in-one-step)), and writes it into the run. A method with the plain `fit` can be
stacked; with a `local_training` or an objective of its own it says so (`Traits(unbatchable_reason="")`).
`check_algorithm` compares both ways. These promises are checked while it trains; where one is broken the clients of
that call are trained one by one, and the run's notes name it:

- The objective yields one loss per batch, and runs the model once, on that batch, through the function it is given. It
  is made once per client and round, so that it may count batches. It reads values that clients train from
  `client.tensors`, at any time. The terms of a `TaskLoss` alone are computed client by client, the task's loss at once.
- What `local_training` does before and after `yield Train(...)` is done client by client. `client.model(batch)` passes
  a batch through a client's own values; whatever else is asked of `client.model` has none and cannot be read.
- All clients of a call train equally often in a round, and the same tensors.
- Nothing draws from torch's global generators: neither the model (dropout) nor the loss. `client.rng` is free.
- All clients of a call have one task and one set of scopes, and each has training examples.
- The model does not normalise over the examples of a batch, and the loss does not compare them.

Own models are evaluated at once by the same rules; of the settings only `local.eval_batch_size` and
`local.precision` matter there.

## What the others rely on

- Workers and actors on Ray are sent the bytes of call, message and state, and everything random follows from (seed,
  round, client, purpose). On other hardware last digits may differ; `summary.json` then says `exact = false`.
- Asynchronous rounds with late updates are another method (FedBuff), so that only rounds with nothing late can equal
  the reference. A method whose server uses more than the mean of the updates is refused.
- Features of frozen layers are kept under the bytes that the layers read, in files named by a digest of weights,
  settings, source files, library versions, processor, threads and the settings by which pictures are prepared. A batch
  is taken from there after one like it was computed both ways with equal bits.
"""


def made() -> str:
    """The page."""
    return START + "\n".join(tables()) + "\n" + STACKED


def tables() -> Iterator[str]:
    """The matrix: settings, options and hooks."""
    yield "The ways of execution, by the settings that choose them:\n\n| way | settings |\n|---|---|"
    yield from (f"| {way} | {settings} |" for way, settings in WAYS.items())
    for title, first, rows in (
        ("Settings of local training", "`local.…`", LOCAL),
        ("Options of every method", "`algorithm.…`", OPTIONS),
        ("What travels", "`run.…`", RUN),
        ("Hooks of a method", "hook", HOOKS),
    ):
        yield f"\n## {title}\n"
        yield from table(first, rows)
        if rows is RUN:
            yield f"\nBeside an option of a method both are computed, with equal bits, or refused:\n\n{packed()}"


def packed() -> str:
    """The options of every method beside compression, as a table."""
    cells = " | ".join(SIGNS[row.packed] for row in OPTIONS.values())
    names = " | ".join(f"`{name}`" for name in OPTIONS)
    return f"| | {names} |\n|---|{':---:|' * len(OPTIONS)}\n| `uplink`, `downlink` | {cells} |"


def table(first: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """One table; a cell of stacked training names the values that it follows."""
    yield f"| {first} | {' | '.join(WAYS)} | why |"
    yield f"|---|{':---:|' * len(WAYS)}---|"
    for name, row in rows.items():
        cells = [SIGNS[row.result(way, row.stacks[0] if row.stacks else None)] for way in WAYS]
        if row.stacks is not None:
            followed = ", ".join(f"`{_written(value)}`" for value in row.stacks)
            cells[0] = f"{cells[0]} for {followed}, else 1"
        yield f"| `{name}` | {' | '.join(cells)} | {row.reason} |"


def _written(value: object) -> str:
    """A value as a recipe has it."""
    if value is None or value == Compression():
        return "none"
    return f'"{value}"' if isinstance(value, str) else f"{list(value) if isinstance(value, tuple) else value}"


def check() -> bool:
    """Whether the page is current."""
    return PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made()


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if check() else "docs/equivalence.md is out of date: run python docs/make_equivalence.py")
    PAGE.write_text(made(), encoding="utf-8")
