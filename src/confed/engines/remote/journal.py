"""Journal of a site: secrets that it has used, and what its updates have cost in privacy.

A server may have a site go back to an earlier state; it must, when it was killed itself and does a round again. What
has left the site cannot go back. Of that this journal is kept: it only grows, it is on disk before the reply is sent,
and nothing that a server asks for removes an entry.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import epsilon

EVALUATION = "evaluate"
USED, COSTS = "used.jsonl", "privacy.jsonl"

_SECRET = {"secret": str, "asked": str}
_COST = {"run": str, "round": int, "action": str, "noise": float}
_SENSIBLE = (1e-100, 1e100)
"""Noise multipliers whose squares are numbers."""


class Journal:
    """Journal of a site on disk; see :class:`confed.federation.client.Journal`.

    Attributes:
        asked: the digest of the request in hand.
        released: whether anything of the recipe left this site before this object was made.
    """

    def __init__(self, root: Path, run: str, limit: float | None = None) -> None:
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"the limit of epsilon must be positive and finite, got {limit}")
        root.mkdir(parents=True, exist_ok=True)
        self.asked = ""
        self._run, self._limit = run, limit
        self._secrets, self._costs = root / USED, root / COSTS
        self._used: dict[str, str] = {line["secret"]: line["asked"] for line in read_lines(self._secrets, _SECRET)}
        costs = read_lines(self._costs, _COST)
        self.released = any(line["run"] == run for line in costs)
        self._multipliers: list[float] = [line["noise"] for line in costs if line.get("action") != EVALUATION]
        self._evaluations: list[float] = [line["noise"] for line in costs if line.get("action") == EVALUATION]
        self._bare: set[tuple[int, str]] = {
            (line["round"], line["action"]) for line in costs if line["run"] == run and not line["noise"]
        }
        if limit is not None and not all(self._multipliers):
            first = next(line for line in costs if not line["noise"])
            raise ValueError(
                f"a limit of epsilon cannot hold: round {first['round']} of the recipe {first['run']} told a server of "
                f"this site's examples without noise of its own ({self._costs}); for other examples use another folder"
            )

    def use(self, secret: bytes, what: bytes = b"") -> None:
        """See :class:`confed.federation.client.Journal`; the same request may come again, as its reply may be lost."""
        name = blake2b(secret, digest_size=16).hexdigest()
        asked = self.asked + (blake2b(what, digest_size=16).hexdigest() if what else "")
        if self._used.setdefault(name, asked) != asked:
            raise ValueError("this was done before, for another request; the same secret is not used twice")
        append(self._secrets, {"secret": name, "asked": asked})

    def epsilon(self, privacy: UpdatePrivacy, more: int = 0, evaluation: float | None = None) -> float:
        """Epsilon of all updates and noised evaluations, of any recipe and run: they tell of the same examples.

        Gaussian mechanisms of multipliers z_i are together one of (sum of z_i^-2)^(-1/2) (Dong, Roth and Su, "Gaussian
        differential privacy", 2022). Updates alone: for a client with all its data; with evaluations: for each of its
        examples. An evaluation's sums move by 1 where an example is another one, an update by twice its clip.

        Without dp-accounting this is a ValueError.
        """
        twice = 2.0 if privacy.adjacency == "replace" else 1.0
        told = [*self._evaluations, *([] if evaluation is None else [evaluation])]
        multipliers = [*self._multipliers, *[privacy.noise] * more, *(twice * z for z in told)]
        total = sum(1 / z**2 if z else math.inf for z in multipliers)
        return epsilon(1 / math.sqrt(total), 1, privacy.delta, privacy.adjacency) if total else 0.0

    def check(self, privacy: UpdatePrivacy) -> None:
        """Check that one more update is within the limit; a ValueError where it is not."""
        self._within(privacy, "update", self.epsilon(privacy, 1) if self._limit is not None else 0.0)

    def check_evaluation(self, privacy: UpdatePrivacy, noise: float) -> None:
        """Check that one more evaluation with noise is within the limit; a ValueError where it is not."""
        cost = self.epsilon(privacy, evaluation=noise) if self._limit is not None else 0.0
        self._within(privacy, "evaluation", cost)

    def check_exact(self, privacy: UpdatePrivacy) -> None:
        """Check that the limit allows an update, without which nothing exact is told either."""
        if self._limit is not None and self.epsilon(privacy, 1) > self._limit:
            raise ValueError(
                f"this site's limit of privacy is spent: epsilon {self._limit:g}; nothing exact is told of its examples"
            )

    def _within(self, privacy: UpdatePrivacy, what: str, cost: float) -> None:
        if self._limit is not None and cost > self._limit:
            raise ValueError(
                f"this site's limit of privacy is reached: epsilon {self._limit:g} at delta {privacy.delta:g}, and "
                f"with one more {what} {cost:.4g}"
            )

    def evaluated(self, privacy: UpdatePrivacy, noise: float, round: int) -> None:
        """Record of an evaluation with noise that leaves the site."""
        self._evaluations.append(noise)
        line = {"time": time.time(), "run": self._run, "round": round, "action": EVALUATION, "unit": "example"}
        cost = self.epsilon(privacy)
        line |= {"noise": noise, "delta": privacy.delta, "adjacency": privacy.adjacency}
        append(self._costs, {**line, "epsilon": cost if math.isfinite(cost) else None})

    def release(self, privacy: UpdatePrivacy, round: int) -> None:
        """Record of an update that leaves the site."""
        self._multipliers.append(privacy.noise)
        line: dict[str, Any] = {"time": time.time(), "run": self._run, "round": round + 1, "action": "fit"}
        line["clip"] = privacy.clip
        line |= {"noise": privacy.noise, "delta": privacy.delta, "adjacency": privacy.adjacency}
        cost = self.epsilon(privacy)
        append(self._costs, {**line, "epsilon": cost if math.isfinite(cost) else None})

    def bare(self, round: int, action: str) -> None:
        """Record, once a round, of a reply about the examples to which this site added no noise."""
        if (round + 1, action) in self._bare:
            return
        self._bare.add((round + 1, action))
        self._multipliers.append(0.0)
        line = {"time": time.time(), "run": self._run, "round": round + 1, "action": action, "noise": 0.0}
        append(self._costs, {**line, "epsilon": None})


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a journal; on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """The lines of a journal; one that was not written to its end is dropped, as nothing was sent then."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return [_checked(json.loads(line), kinds) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; a site does not go on without its journal") from error


def _checked(line: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A line whose entries have the right types: one that has not could make the cost look lower."""
    if not isinstance(line, dict):
        raise ValueError(f"a line must be an object, got {repr(line)[:80]}")
    entries = cast(dict[str, Any], line)
    for name, kind in kinds.items():
        value: Any = entries.get(name)
        if kind is float:
            sound = type(value) in (int, float) and (value == 0 or _SENSIBLE[0] <= value <= _SENSIBLE[1])
        else:
            sound = type(value) is kind
        if not sound:
            wanted = "a noise multiplier" if kind is float else f"of type {kind.__name__}"
            raise ValueError(f"{name} must be {wanted}, got {repr(value)[:80]}")
    return entries
