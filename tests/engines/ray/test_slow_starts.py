"""Actors that take long to start, with a clock and a Ray that the test moves on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from confed.engines.ray import crew
from confed.engines.ray.actor import NodeProcess
from confed.engines.ray.placement import Wanted


class SlowRay:
    """One node with two cores, whose actors are there after so many seconds each."""

    exceptions = crew.ray.exceptions

    def __init__(self, *arrivals: float) -> None:
        self.now, self._arrivals, self._count = 0.0, arrivals, 0

    def nodes(self) -> list[dict[str, Any]]:
        entry = {"NodeID": "0" * 56, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "a", "Alive": True}
        return [{**entry, "Resources": {"CPU": 2.0, "memory": 1e12}}]

    def remote(self, kind: object) -> Any:
        def actor(starting: str) -> Any:
            number, self._count = self._count, self._count + 1
            asks = {name: SimpleNamespace(remote=lambda n=name: (n, number)) for name in ("fingerprint", "prepare")}
            return SimpleNamespace(**asks)

        return SimpleNamespace(options=lambda **named: SimpleNamespace(remote=actor))

    def wait(self, refs: list[tuple[str, int]], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        if refs[0][0] == "prepare":
            return refs[:1], refs[1:]
        first = min(refs, key=lambda ref: self._arrivals[ref[1]])
        arrives = max(self._arrivals[first[1]], self.now)
        assert timeout is not None
        self.now, there = min(arrives, self.now + timeout), arrives <= self.now + timeout
        return ([first] if there else []), [ref for ref in refs if not there or ref != first]

    def get(self, ref: tuple[str, int]) -> bytes:
        return b"" if ref[0] == "prepare" else json.dumps({"fingerprint": crew.fingerprint(1)}).encode()

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}


@pytest.mark.parametrize(
    ("arrivals", "there", "after", "said"),
    [
        ((2.0, 5.0), 2, 5.0, False),
        ((2.0, 500.0), 1, 60.0, False),  # the other one joins later
        ((100.0, 120.0), 1, 100.0, True),  # nobody within a minute: the first one is enough
    ],
)
def test_all_actors_have_a_minute_and_the_first_one_three(
    monkeypatch: pytest.MonkeyPatch, arrivals: tuple[float, float], there: int, after: float, said: bool
) -> None:
    slow, told = SlowRay(*arrivals), list[str]()
    monkeypatch.setattr(crew, "ray", slow)
    monkeypatch.setattr(crew, "time", SimpleNamespace(monotonic=lambda: slow.now))
    found = crew.Crew(NodeProcess, "{}", Wanted(2), lambda event: told.append(event.text))
    assert len(found.ready) == there
    assert slow.now == after
    assert any("no actor has started in 60 s; waiting for up to 180 s" in text for text in told) is said


def test_a_cluster_where_nothing_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(500.0, 500.0)
    monkeypatch.setattr(crew, "ray", slow)
    monkeypatch.setattr(crew, "time", SimpleNamespace(monotonic=lambda: slow.now))
    with pytest.raises(ValueError, match="no actor could start within 180 s: of the Ray cluster's cores 0 are free"):
        crew.Crew(NodeProcess, "{}", Wanted(2), lambda event: None)
    assert slow.now == 180.0
