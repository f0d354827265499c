"""Timeline of a round: which party computed when, for the first calls."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

SPANS = 240
"""How many spans a run writes down."""


@dataclass(frozen=True)
class Span:
    """One party at work.

    Attributes:
        party: a server's name or a client's id.
        what: the action that was computed, or whose reply was.
        start: seconds since the round began.
        end: seconds since the round began.
    """

    party: str
    what: str
    start: float
    end: float


@dataclass
class Timeline:
    """Spans until there are enough of them; all processes of a machine read the same clock.

    Attributes:
        most: spans that are kept.
        began: reading of the clock at the beginning of the round.
        spans: those kept so far.
    """

    most: int
    began: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list[Span])

    @contextmanager
    def span(self, party: str, what: str) -> Generator[None]:
        """Writes down how long the block takes."""
        start = time.perf_counter()
        yield
        self.add(party, what, start, time.perf_counter())

    def add(self, party: str, what: str, start: float, end: float) -> None:
        """Writes down a span in readings of the clock."""
        if len(self.spans) < self.most:
            self.spans.append(Span(party, what, start - self.began, end - self.began))
