"""One-line errors of readers: damaged or foreign content becomes a ValueError that names the file."""

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["FAULTS", "faults_of"]

FAULTS = (ValueError, TypeError, AttributeError, LookupError, RecursionError, ArithmeticError, NotImplementedError)
"""What readers of JSON, TOML, CSV and safetensors raise of content in another form than they expect."""


@contextmanager
def faults_of(what: object, expected: str = "") -> Generator[None]:
    """Errors of a reader about malformed content as a ValueError that names the file, within the ``with`` block.

    Args:
        what: the file, or what else it is called.
        expected: what it must be, after "must be"; empty for "readable".

    Raises:
        ValueError: in place of any of :data:`FAULTS`; one that is raised within passes as it is.
    """
    try:
        yield
    except FAULTS as error:
        if type(error) is ValueError:  # a sentence of our own
            raise
        why = str(error) or type(error).__name__
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif isinstance(error, KeyError):
            why = f"it has no {error}"
        raise ValueError(f"{what} must be {expected or 'readable'}: {' '.join(why.split())[:300]}") from error
