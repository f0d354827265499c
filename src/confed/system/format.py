"""Numbers as people read them: percentages, bytes, durations, counts, p-values."""

import math
from collections.abc import Sequence

MISSING = "–"
"""What stands where there is no value."""

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", " k", " M", " G", " T")


def percent(value: float | None, sd: float | None = None) -> str:
    """A fraction as a percentage with one decimal and without the sign: ``71.2``, ``71.2 ± 0.4``."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{100 * value:.1f}"
    return text if sd is None or not math.isfinite(sd) else f"{text} ± {100 * sd:.1f}"


def points(difference: float | None) -> str:
    """A difference of two fractions in percentage points, with its sign: ``+1.3``, ``−0.4``, ``0.0``."""
    if difference is None or not math.isfinite(difference):
        return MISSING
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def size(number: float | None) -> str:
    """A number of bytes in decimal units (1 kB is 1000 bytes) with three digits: ``512 B``, ``1.25 MB``."""
    return MISSING if number is None else _scaled(number, _BYTES, " ")


def count(number: float | None) -> str:
    """A count with three digits: ``812``, ``1.49 M``."""
    return MISSING if number is None else _scaled(number, _COUNTS, "")


def counted(number: int, what: str) -> str:
    """A number of things with a plain plural: "1 client", "2 clients"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float | None) -> str:
    """A time span: ``0.42 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def p_value(p: float | None) -> str:
    """A p-value with three decimals, or ``<0.001``."""
    if p is None or not math.isfinite(p):
        return MISSING
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def names(labels: Sequence[str]) -> str:
    """Names side by side: with commas between them, or with semicolons where a name has a comma itself."""
    return ("; " if any("," in label for label in labels) else ", ").join(labels)


def _scaled(number: float, units: tuple[str, ...], gap: str) -> str:
    if not math.isfinite(number):
        return MISSING
    step = 0
    # 999.5 would be rounded to 1000 of a unit, so the next unit starts there.
    while abs(number) >= 999.5 and step < len(units) - 1:
        number, step = number / 1000, step + 1
    digits = 1 if abs(number) >= 9.995 else 2
    if step == 0 or abs(number) >= 99.95:
        digits = 0
    return f"{number:.{digits}f}{gap}{units[step]}"
