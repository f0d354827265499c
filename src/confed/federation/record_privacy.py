r"""Differential privacy of single records in local training (DP-SGD): clipping of each example's gradient, and noise.

Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1. A recipe chooses it for any method that
trains by one loss per batch (``algorithm.record_privacy``); :func:`confed.federation.train.train` follows it.

Notation: N a client's number of examples; B = ``local.batch_size`` times ``local.accumulate``; q = min(1, B / N); g_i
the gradient of example i, all trained tensors together; C the ``clip``; z the ``noise`` multiplier. A step takes every
example with probability q, independently of the others (Poisson sampling), and follows

    (1 / (q N)) (sum over the sample of g_i min(1, C / ||g_i||_2) + N(0, (z C)^2 I)).

A round has as many steps as without privacy. A sample without examples is a step of noise alone.

**Who is protected.** One record: two neighbouring data sets differ by one that is added or removed, which moves the
sum by at most C. It holds towards the server, other clients and whoever is given a model, as long as they do not know
who was sampled.

**What it does not cover**: the number of examples, evaluations, and what private parts of a model say of their own
client. Losses are not sent.

**How.** Where all that learns lies in linear layers and layer normalisations and the task gives each example's loss,
one pass for the sample is enough: an example's gradient of a weight is sum_t delta_t a_t^T, of the layer's inputs a and
the loss's gradient delta of its outputs, so its norm follows from both, and the clipped sum is one product (Goodfellow,
"Efficient per-example gradient computations", 2015; Bu et al., "Differentially private optimization on large model at
small cost", ICML 2023). It is compared with a pass for every example on a client's first sample. All other models and
losses have that.
"""

from dataclasses import dataclass
from typing import Annotated

from confed.federation.ranges import NOT_NEGATIVE, POSITIVE, Range, check_fields


@dataclass(frozen=True)
class RecordPrivacy:
    """Clipping and noise on the gradient of every record, with Poisson sampling.

    Attributes:
        clip: largest L2 norm C of an example's gradient, over all trained tensors together.
        noise: noise multiplier z; the standard deviation is ``noise * clip`` in every coordinate of a sample's sum. 0
            clips only, which guarantees nothing.
        delta: of the (epsilon, delta) that reports give; well below one over a client's number of examples.
        repeatable: samples and noise are functions of the run's seed, so that a run can be repeated; a party that
            knows the seed can subtract the noise. False: the operating system draws them. Across machines a site
            makes them from a secret of its own in either case (:mod:`confed.federation.keyed_noise`).
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    clip: Annotated[float, POSITIVE]
    noise: Annotated[float, NOT_NEGATIVE] = 0.0
    delta: Annotated[float, Range(0, 1, above=True, below=True)] = 1e-5
    repeatable: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "algorithm.record_privacy")
