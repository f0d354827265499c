"""Evaluation policy of a site: how many it answers, of how many examples, exactly, with noise, or not at all.

A server chooses the model that it has evaluated and how often. Exact sums over a site's examples tell it what it wants
to know of them: a model that always gives one answer counts that answer. What updates may cost (``--epsilon``) says
nothing of that, so that a site has its own rules, which no server and no recipe sets.

**Noise.** Of N examples, the sums S_1 to S_k of k metrics are released, each of values in [0, 1] per example; all else
is left out (losses, parts by question type, counts of labels):

    S_i + N(0, k z^2), cut to [0, N].

Where one example is another one, each sum moves by at most 1 and their vector by at most sqrt(k): this is the Gaussian
mechanism with multiplier z (Dwork and Roth, "The algorithmic foundations of differential privacy", 2014, appendix A),
which composes with the site's noised updates (:mod:`confed.privacy.accountant`). It protects *one example* of the
site; a client's update with noise protects all of them, and so each. N itself is told, as it is in training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal

from confed.federation.messages import Message
from confed.federation.params import Scalar
from confed.federation.randomness import normal
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, check_fields, check_value
from confed.metrics.scores import PARTS, SCORES

SHARES = tuple(name for name, score in SCORES.items() if score.per_example)
"""Metrics that are sums of values in [0, 1] over examples, with a weight of 1 each; noise is defined for these."""

Mode = Literal["default", "exact", "noise", "off"]


@dataclass(frozen=True)
class EvaluationPolicy:
    """Limits on a site's answers to evaluations."""

    # "exact" sums; sums with "noise"; none ("off"); or, by default, exact ones until the limit of epsilon that the
    # site has set is spent
    mode: Mode = "default"
    noise: float = 0.0  # noise multiplier z, positive with "noise": the standard deviation in examples, for one metric
    # models that are evaluated in a round at most. A run asks for one in each round that it evaluates; when a round
    # is done again, the same model is evaluated again, but no other one. With noise every answer counts, as its noise
    # is new.
    per_round: Annotated[int, NOT_NEGATIVE] = 1
    # evaluations at most, of all recipes together; None for any number
    in_all: Annotated[int, NOT_NEGATIVE] | None = None
    # examples of which sums are told at least; parts (by question type) over fewer are left out, and an evaluation of
    # fewer is refused. Above 1 counts of labels are left out, too, as some are of few examples.
    least: Annotated[int, AT_LEAST_ONE] = 1

    def __post_init__(self) -> None:
        check_value(self.mode, Mode, "evaluations")
        if not (0 < self.noise < math.inf if self.mode == "noise" else self.noise == 0):
            wanted = "a positive finite multiplier" if self.mode == "noise" else "left out without noise"
            raise ValueError(f"evaluations: noise must be {wanted}, got {self.noise}")
        check_fields(self, "evaluations")

    @classmethod
    def parse(cls, text: str) -> "EvaluationPolicy":
        """The policy from its text, such as "noise=8,per_round=1,in_all=40,least=50" or "off"."""
        values: dict[str, str | int | float] = {}
        for setting in (setting.strip() for setting in text.split(",")):
            key, given, value = setting.partition("=")
            try:
                if not given:
                    if setting not in ("default", "exact", "off"):
                        raise ValueError
                    fields = {"mode": setting}
                elif key == "noise":
                    fields = {"mode": "noise", "noise": float(value)}
                elif key in ("per_round", "in_all", "least"):
                    fields = {key: int(value)}
                else:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    "evaluations must be default, exact, off or noise=NUMBER, with any of per_round=, in_all= and "
                    f"least= and a whole number, separated by commas; got {setting[:80]!r} in {text[:200]!r}"
                ) from None
            if values.keys() & fields.keys():
                raise ValueError(f"evaluations: {setting[:80]!r} says again what {text[:200]!r} has said before")
            values |= fields
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text of :meth:`parse`."""
        parts = [f"noise={self.noise!r}" if self.mode == "noise" else self.mode]
        given = {"per_round": self.per_round, "in_all": self.in_all, "least": self.least}
        usual = {"per_round": 1, "in_all": None, "least": 1}
        return ",".join([*parts, *(f"{key}={value}" for key, value in given.items() if value != usual[key])])

    def release(self, message: Message) -> Message:
        """The part of an evaluation's reply that may leave the site."""
        if self.mode != "noise" and self.least == 1:
            return message
        told = message.scalars
        names = [name.removesuffix(":sum") for name in told if name.endswith(":sum")]
        sums = {name: (float(told[f"{name}:sum"]), float(told[f"{name}:weight"])) for name in names}
        large = {name: pair for name, pair in sums.items() if pair[1] >= self.least}
        views = {name.partition(":")[0] for name in sums}
        for view, begin in product(views, PARTS):
            if any(name.startswith(f"{view}:{begin}") for name in sums.keys() - large.keys()):
                large = {name: pair for name, pair in large.items() if not name.startswith(f"{view}:{begin}")}
        if not large:
            most = max((weight for _, weight in sums.values()), default=0.0)
            raise ValueError(f"this site tells no sums over fewer than {self.least} examples, got {most:g}")
        if self.mode == "noise":
            large = self._noised(large)
        scalars: dict[str, Scalar] = {}
        for name, (total, weight) in large.items():
            scalars |= {f"{name}:sum": total, f"{name}:weight": weight}
        return Message({}, scalars)

    def _noised(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        shares = {name: pair for name, pair in sums.items() if name.partition(":")[2] in SHARES}
        if not shares:
            raise ValueError(f"this site's evaluations have noise, which is defined for {', '.join(SHARES)} only")
        spread = self.noise * math.sqrt(len(shares))
        noise = normal((len(shares),), None).double().tolist()
        return {
            name: (min(max(total + spread * drawn, 0.0), weight), weight)
            for (name, (total, weight)), drawn in zip(shares.items(), noise, strict=True)
        }
