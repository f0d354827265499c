"""Cost of the checks of a round across machines: milliseconds per update of 20 MB, at the site and at the server.

Every figure is the median processor time of one site's part of a round. ``values`` is the absolute bound, which a site
applies to what it receives, and the server to each reply and to the new model; ``norm`` the norm of an update;
``history`` the comparison of two sites with what they sent so far; ``journals`` what a site computes and writes for
its own, with files of 10,000 lines, and ``sign`` what the server does, on its disk. The yardstick is five readings of
the update, from bytes to tensors that are all finite, of which there were two before these checks.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from confed.engines.remote.journal_chains import Countersignatures, JournalChains
from confed.engines.remote.protocol import Limits, open_body, seal
from confed.engines.remote.update_bounds import NormHistory, norm_of
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.privacy.protections import ValueBound
from measure import finish

MEGABYTES, TENSORS, LINES = 20, 40, 10_000


def milliseconds(what: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Median of 21 calls, after one that does not count."""
    what()
    times: list[float] = []
    for _ in range(21):
        began = clock()
        what()
        times.append(1000 * (clock() - began))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(1)
    size = MEGABYTES * 2**20 // 4 // TENSORS
    model = {f"layer.{number}": torch.randn(size, generator=rng) for number in range(TENSORS)}
    update = Message({name: tensor + 0.01 for name, tensor in model.items()})
    calls = [Call(ClientInfo(name, 10), "fit", Message(model)) for name in ("a", "b")]
    body, bound, history = seal(update), ValueBound.of(model.values(), ()), NormHistory()
    history.meet(calls)
    for round in range(50):
        for name in ("a", "b"):
            history.note("fit", name, round, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        root, names = Path(folder), ["privacy.jsonl", "used.jsonl", "evaluations.jsonl", "audit.jsonl"]
        for name in names:
            (root / name).write_text(f'{{"time": 1.0, "digest": "{"0" * 100}"}}\n' * LINES)
        journals, server = JournalChains("a", root, names, [], "manifests.json"), Countersignatures(root / "server")

        def entries() -> None:
            with (root / "audit.jsonl").open("a") as file:
                file.write('{"time": 1.0}\n')
            journals.confirm(server.signed("a"))
            journals.statement()

        def signed() -> None:
            with (root / "audit.jsonl").open("a") as file:
                file.write('{"time": 1.0}\n')
            server.note("a", journals.statement())
            server.sign()

        read = milliseconds(lambda: open_body(body, Limits(), {}, frozenset()))
        values = milliseconds(lambda: bound.problem(update.tensors))
        norm = milliseconds(lambda: norm_of(calls[0], update, ()))
        finish(
            "boundary_checks", 5.0, ratio=(read + 2 * values + norm) / read,
            read_ms=read, values_ms=values, norm_ms=norm,
            history_ms=milliseconds(lambda: history.most(calls[0], {"a": 1.0, "b": 1.1}, 10.0)),
            journals_ms=milliseconds(entries), journals_seconds_ms=milliseconds(entries, time.perf_counter),
            sign_ms=milliseconds(signed), sign_seconds_ms=milliseconds(signed, time.perf_counter),
            opened_ms=milliseconds(lambda: JournalChains("a", root, names, [], "manifests.json")),
        )  # fmt: skip


if __name__ == "__main__":
    main()
