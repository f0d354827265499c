"""Order in which several processes take the calls of a round."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from confed.federation.messages import Call


@dataclass
class Homes:
    """Processes that hold the live objects of clients' sessions, for as long as a round lasts.

    Attributes:
        round: the round in which they do.
        of: client -> number of the process.
    """

    round: int = -1
    of: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self, round: int) -> None:
        """Forgets the clients of another round: sessions do not outlast theirs."""
        if round != self.round:
            self.of, self.round = {}, round

    def leave(self, number: int) -> None:
        """Forgets the clients of a process that has ended."""
        self.of = {client: home for client, home in self.of.items() if home != number}


class CallQueue:
    """Calls that a flow asked for together, by their positions, and which process may take which.

    Attributes:
        running: number of a process -> the position of its call.
        done: positions whose replies have come and were not handed on yet.
    """

    def __init__(self, calls: Sequence[Call], homes: Homes) -> None:
        self.calls, self._homes = calls, homes
        self.running: dict[int, int] = {}
        self.done: set[int] = set()
        self._waiting = list(range(len(calls)))[::-1]

    def __bool__(self) -> bool:
        """Whether calls wait for a process."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """How many calls wait for a process."""
        return len(self._waiting)

    @property
    def first(self) -> Call:
        """The first call that waits."""
        return self.calls[self._waiting[-1]]

    def waiting(self) -> list[Call]:
        """The calls that wait for a process, in order."""
        return [self.calls[position] for position in reversed(self._waiting)]

    def take(self, number: int, numbers: Collection[int]) -> int | None:
        """The position of the next call for a process, which is running then; None if there is none for it now."""
        place = self._next(number, numbers)
        if place is None:
            return None
        self.running[number] = self._waiting.pop(place)
        return self.running[number]

    def finish(self, number: int) -> int:
        """The position of the call whose reply has come from a process."""
        position = self.running.pop(number)
        self.done.add(position)
        return position

    def put_back(self, number: int) -> int:
        """The position of the call of a process that has ended; it waits again, as the first."""
        position = self.running.pop(number)
        self.wait_again(position)
        return position

    def wait_again(self, position: int) -> None:
        """Puts a call whose reply was lost before the others that wait."""
        self._waiting.append(position)

    def _next(self, number: int, numbers: Collection[int]) -> int | None:
        """Where in ``_waiting``, which ends with the first, the first call stands that a process may take."""
        # Calls to one client follow each other: the later one needs the state the earlier one leaves, and that is
        # kept when the earlier reply is handed on.
        busy = {self.calls[position].client.id for position in (*self.running.values(), *self.done)}
        homes = self._homes.of
        for place in range(len(self._waiting) - 1, -1, -1):
            call = self.calls[self._waiting[place]]
            if call.client.id in busy:
                if not call.session:  # the order of calls is the order of work, but for clients with a home
                    return None
                continue
            if not call.session:
                return place
            # A session's live objects are in one process, so all its calls go there; new ones to where few are.
            if call.client.id not in homes:
                guests = Counter(homes.values())
                if guests[number] > min(guests[n] for n in numbers):
                    continue
                homes[call.client.id] = number
            if homes[call.client.id] == number:
                return place
        return None
