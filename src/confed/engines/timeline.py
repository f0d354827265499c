"""Timeline of a round: which party computed when, for the first calls."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

SPANS = 240  # how many spans a run writes down


@dataclass(frozen=True)
class Span:
    party: str  # a server's name or a client's id
    what: str  # the action that was computed, or whose reply was
    start: float  # seconds since the round began
    end: float  # seconds since the round began


@dataclass
class Timeline:
    """Spans until there are enough of them; all processes of a machine read the same clock."""

    most: int  # spans that are kept
    began: float = field(default_factory=time.perf_counter)  # reading of the clock at the beginning of the round
    spans: list[Span] = field(default_factory=list[Span])  # those kept so far

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
