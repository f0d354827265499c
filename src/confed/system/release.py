"""The name and the version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["DISTRIBUTION", "VERSION"]


def _installed() -> tuple[str, str]:
    # "confed" on the package index is another project, hence another name; an environment that was made before
    # the package had it still has the old one.
    try:
        return "confed-vl", version("confed-vl")
    except PackageNotFoundError:
        return "confed", version("confed")


DISTRIBUTION, VERSION = _installed()
