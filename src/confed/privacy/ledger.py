"""Privacy ledger of a run: epsilon of its updates, by client and round.

Where every client adds its noise itself (``at = "client"``), the receiver knows who sent what: a client pays for
every round in which it was asked, whether or not its update arrived, and nothing is gained by sampling. Where the
server adds the noise, what is released are the server's models. There, amplification by sampling is claimed if, and
only if, cohorts are drawn uniformly without replacement and neighbours differ by the replacement of a client; every
client then pays for every round in which it could have been drawn. It holds towards those who do not know who was
drawn. Who knows the run's seed does: nothing is claimed where the seed is no secret (``repeatable`` is false), as
across machines, where all sites have it. In all other cases clients pay for the rounds in which they were asked.

A ledger holds no state: it is what a run's history says, so that it survives every interruption.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import epsilon, sampled_epsilon

Rounds = tuple[tuple[tuple[int, int], int], ...]


class PrivacyLedger:
    """The ledger of one run."""

    def __init__(self, privacy: UpdatePrivacy, uniform: bool, present: Callable[[str, int], bool]) -> None:
        self.privacy, self._present = privacy, present
        proved = privacy.at == "server" and privacy.adjacency == "replace"
        self._uniform = uniform and proved and privacy.repeatable
        self._rounds: list[tuple[int, frozenset[str], int]] = []

    @property
    def amplified(self) -> bool:
        """Whether epsilon counts that some cohort was drawn from more clients than it has."""
        return self._uniform and any(len(cohort) < present_count for _, cohort, present_count in self._rounds)

    def add(self, round: int, cohort: Sequence[str], present: int) -> None:
        """Entry of a finished round; the same round, and later ones, are replaced."""
        self._rounds = [entry for entry in self._rounds if entry[0] < round]
        self._rounds.append((round, frozenset(cohort), present))

    def epsilon(self, client: str, rounds: int | None = None) -> float:
        """A client's epsilon after so many rounds, or after all; infinity where there is no noise."""
        entries = [entry for entry in self._rounds if rounds is None or entry[0] <= rounds]
        if self._uniform:
            could_be_drawn = [entry for entry in entries if entry[1] and self._present(client, entry[0])]
            drawn = Counter((len(cohort), present_count) for _, cohort, present_count in could_be_drawn)
            return _sampled(self.privacy.noise, tuple(sorted(drawn.items())), self.privacy.delta)
        times = sum(client in cohort for _, cohort, _ in entries)
        return _released(self.privacy.noise, times, self.privacy.delta, self.privacy.adjacency == "replace")

    def taken_part(self, client: str) -> int:
        """Number of rounds in which a client was asked."""
        return sum(client in cohort for _, cohort, _ in self._rounds)


@lru_cache(maxsize=4096)
def _released(noise: float, times: int, delta: float, replaced: bool) -> float:
    return epsilon(noise, times, delta, "replace" if replaced else "zero-out")


@lru_cache(maxsize=4096)
def _sampled(noise: float, rounds: Rounds, delta: float) -> float:
    return sampled_epsilon(noise, dict(rounds), delta)
