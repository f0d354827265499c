"""The version, which stands here alone, and the name of the installed distribution."""

from importlib.metadata import PackageNotFoundError, distribution

VERSION = "0.2.0"


def _installed() -> str:
    # "confed" on the package index is another project, hence another name; an environment that was made before
    # the package had it still has the old one.
    try:
        distribution("confed-vl")
    except PackageNotFoundError:
        return "confed"
    return "confed-vl"


DISTRIBUTION = _installed()

PROTOCOL = 1
"""Version of what server and sites say to each other, raised by one with every change of it.

A party goes with its own version and with those one below and one above, whatever versions of confed they are of.
"""
