"""Which methods release noised values in calls that a server may repeat, and that no journal counts."""

from confed.privacy.cut import cut_privacy
from confed.privacy.examples import ProtectsExamples


def noise_is_fixed(algorithm: object) -> bool:
    """Whether a method's noise at a site is a function of a secret (``Client.fixed_noise``).

    That is noise at the cut of split learning and noise on the gradients of single examples. Noise on updates is drawn
    anew for each, as each is an entry in the site's journal.
    """
    cut = cut_privacy(algorithm)
    examples = isinstance(algorithm, ProtectsExamples) and algorithm.example_privacy.noise > 0
    return cut.noise > 0 or cut.gradient_noise > 0 or examples
