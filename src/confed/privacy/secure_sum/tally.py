"""The server's side of secure aggregation: sums of masked vectors, and removal of the masks."""

from collections.abc import Iterable, Mapping

from confed.privacy.secure_sum import shamir
from confed.privacy.secure_sum.masks import Integers, add_mask, pair_secret, public_key
from confed.privacy.secure_sum.member import Keys, mask_purpose
from confed.privacy.secure_sum.plan import Plan

__all__ = ["Tally"]


class Tally:
    """Sums of masked vectors, one client in memory at a time.

    Args:
        plan: the sum.
        keys: U_1 and their public keys.
        sharers: U_2.

    Attributes:
        sharers: U_2.
        survivors: U_3 so far.
    """

    def __init__(self, plan: Plan, keys: Mapping[str, Keys], sharers: Iterable[str]) -> None:
        self.plan, self._keys, self.sharers = plan, dict(keys), tuple(sharers)
        self._totals: dict[int, Integers] = {}
        self.survivors: list[str] = []

    def add(self, sender: str, vectors: Mapping[int, Integers]) -> None:
        """One client's masked vectors, all of its blocks.

        Raises:
            ValueError: it sent no shares, or was added before, or its blocks are others.
        """
        if sender not in self.sharers or sender in self.survivors:
            raise ValueError(f"{sender!r} cannot be added to secure aggregation {self.plan.label!r}")
        if sorted(vectors) != self.plan.of(sender):
            raise ValueError(f"{sender!r} must send the blocks {self.plan.of(sender)}, got {sorted(vectors)}")
        for block, vector in vectors.items():
            if block in self._totals:
                self._totals[block] += vector
            else:
                self._totals[block] = vector.copy()
        self.survivors.append(sender)

    def senders(self, block: int) -> list[str]:
        """The survivors that sent a block."""
        return [name for name in self.plan.blocks[block].senders if name in self.survivors]

    def sums(self, given: Mapping[str, Mapping[str, Mapping[int, bytes]]]) -> dict[int, Integers]:
        """Block -> the sum of the survivors' vectors, modulo 2^k; without blocks that fewer than three sent.

        Args:
            given: who answered -> what :meth:`confed.privacy.secure_sum.member.Member.unmask` returned there.

        Raises:
            ValueError: fewer than the threshold answered, or the shares of a mask key do not belong together.
        """
        if len(given) < self.plan.threshold:
            raise ValueError(
                f"only {len(given)} clients took the masks off secure aggregation {self.plan.label!r}, "
                f"{self.plan.threshold} must"
            )
        holders = {name: i for i, name in enumerate((n for n in self.plan.members if n in self._keys), start=1)}
        first = sorted(given, key=holders.__getitem__)[: self.plan.threshold]
        dropped = {name: self._lost_key(name, {holders[h]: given[h][name][-1] for h in first}) for name in self._gone()}
        found: dict[int, Integers] = {}
        for block, total in self._totals.items():
            senders = self.senders(block)
            if len(senders) < self.plan.least:
                continue
            for name in senders:
                seed = shamir.join({holders[h]: given[h][name][block] for h in first})
                add_mask(total, seed, -1)
                for other, key in dropped.items():
                    if other in self.plan.blocks[block].senders:
                        purpose = mask_purpose(self.plan, block, name, other)
                        add_mask(total, pair_secret(key, self._keys[name].mask, purpose), -1 if other > name else 1)
            found[block] = total
        return found

    def _gone(self) -> list[str]:
        """Clients that sent shares and then no vector."""
        return sorted(set(self.sharers) - set(self.survivors))

    def _lost_key(self, name: str, shares: Mapping[int, bytes]) -> bytes:
        key = shamir.join(shares)
        if public_key(key) != self._keys[name].mask:
            raise ValueError(f"the shares of the mask key of {name!r} do not belong together")
        return key
