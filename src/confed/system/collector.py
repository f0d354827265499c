"""Garbage collector at rest while libraries are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collection of cycles within the ``with`` block, as in imports: they make many objects and hardly any cycle.

    With PyTorch and transformers Python looks through all objects about a thousand times, a second of processor time.
    """
    awake = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if awake:
            gc.enable()
