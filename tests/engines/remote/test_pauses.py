import pytest

from confed.engines.remote import server
from confed.engines.remote.server import Pauses


@pytest.mark.parametrize(("answered", "late"), [(0.02, 0.006), (0.3, 0.04), (60.0, 0.25), (0.0, 0.0)])
def test_short_answers_are_met_soon_and_long_ones_seldom_looked_for(
    answered: float, late: float, monkeypatch: pytest.MonkeyPatch
):
    clock, looks = [100.0], 1
    monkeypatch.setattr(server.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(server.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    waiting = Pauses(0.25)
    while clock[0] < 100 + answered:
        waiting.sleep()
        looks += 1
    assert clock[0] - 100 - answered <= late
    assert looks <= 60 + answered / 0.25


def test_nothing_sleeps_where_the_transport_tells_what_arrives(monkeypatch: pytest.MonkeyPatch):
    slept, waited, able = list[float](), list[float](), [True]
    monkeypatch.setattr(server.time, "sleep", slept.append)
    waiting = Pauses(0.25, lambda seconds: waited.append(seconds) or able[0])
    waiting.sleep()
    assert (waited, slept) == ([0.25], [])
    able[0] = False  # a grid of Flower's own
    waiting.sleep()
    assert len(slept) == 1
