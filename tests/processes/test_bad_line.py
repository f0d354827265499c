"""A federation over a bad line, whose processes are killed: the simulator's model, with hardly more bytes."""

from importlib import import_module
from pathlib import Path

import pytest

from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("engine", "calm"), [("flower", 1.0), ("flare", 2.0)])
def test_a_bad_line_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, calm: float) -> None:
    """FLARE's processes take longer to start than such connections live."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("soak")
    bad = benchmark.Weather(rate=1e6, delay=0.02, life=10.0 * calm, hangs=0.02, kills=25.0 * calm, most=2)
    found = benchmark.soak(engine, tmp_path, sites=3, rounds=3, train=24, width=128, weather=bad, seed=0)
    assert found["rounds"] == 3
    assert found["left_out"] == 0
    assert found["equal_bits"]
    assert found["connections_ended"] > 5
    assert 1 <= found["kills"] <= 2  # a fast machine is done before the second
    assert found["ratio"] <= 1.2
