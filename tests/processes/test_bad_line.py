"""A federation over a bad line, whose processes are killed: the simulator's model, with hardly more bytes."""

from importlib import import_module
from pathlib import Path

import pytest

from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_bad_line_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("soak")
    bad = benchmark.Weather(rate=1e6, delay=0.02, life=10.0, hangs=0.02, kills=25.0, most=2)
    found = benchmark.soak("flower", tmp_path, sites=3, rounds=3, train=24, width=128, weather=bad, seed=0)
    assert found["rounds"] == 3
    assert found["left_out"] == 0
    assert found["equal_bits"]
    assert found["connections_ended"] > 5
    assert found["kills"] == 2
    assert found["ratio"] <= 1.2
