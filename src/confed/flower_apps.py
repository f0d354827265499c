"""Import path of Flower apps of confed 0.1; use :mod:`confed.deployment.flower_app`. Goes with the next release."""

import warnings

from confed.deployment.flower_app import apps

__all__ = ["apps"]

warnings.warn(
    "confed.flower_apps is the name of confed 0.1 and goes with the next release: import apps from "
    "confed.deployment.flower_app",
    FutureWarning,
    stacklevel=2,
)
