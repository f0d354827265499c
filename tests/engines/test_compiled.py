"""Compiled models compute the same numbers but for rounding, and a compiler that does not work is said before a run."""

from functools import partial
from typing import Any

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import check_compiler
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.recipes.run_section import RunSection
from confed.tasks.vqa import VQA
from refusals import refuses


def test_a_compiler_that_fails_is_said_with_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def compiled(function: Any) -> Any:
        def call(_: Any) -> None:
            raise RuntimeError("no C++ compiler\nfound")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    refuses("set it to false: RuntimeError: no C\\+\\+ compiler found", check_compiler, "cpu")
    refuses(r"run\.batch_clients must be 1 then, got 4", RunSection, batch_clients=4, compile=True, workers=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_compiled_run_has_the_numbers_of_one_that_is_not():
    check_compiler("cpu")
    rng = torch.Generator().manual_seed(0)
    pictures, columns = torch.randint(0, 256, (8, 3, 64, 64), generator=rng).to(torch.uint8), {
        "text": torch.randint(5, 30, (8, 6), generator=rng),
        "text_mask": torch.ones(8, 6, dtype=torch.int64),
        "label": torch.randint(0, 4, (8,), generator=rng),
    }  # fmt: skip
    table = Table(pictures, torch.arange(8), columns)
    data = Members({name: TableData(table, table.take(4), table.take(0)) for name in ("a", "b")})
    local = Local(batch_size=4, lr=0.05, optimizer="sgd", eval_batch_size=4)
    build = partial(create_model, "vilt_tiny", answers=4, vocab_size=64)

    def run(compile: bool) -> tuple[Any, str]:
        setup = Setup(FedAvg(), data, VQA(4), local, build, 2, features=FeatureSettings(10**6), compile=compile)
        assert (setup.model()._compiled_call_impl is not None) == compile
        simulation = Simulation(setup, MemoryStore())
        executor: Any = simulation.executor
        servers = simulation.start(executor.workspace)
        for record in simulate(simulation, servers):
            assert not record.errors
            servers = record.servers
        return servers["main"].params, executor.features.reason

    (expected, _), (found, why) = run(False), run(True)
    assert why == "run.compile is true: a compiled pass has no stages"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
