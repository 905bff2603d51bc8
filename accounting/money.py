"""Money as whole micro-units of the site's currency: read, rounded once, printed exactly. Pure.

Floats are never used: 0.1 + 0.2 must be 0.3 on a bill.
"""

import re

MICRO = 1_000_000  # micro-units in one unit of the currency
MOST = 10**15  # a thousand million units: what is larger is a slip of the finger
MOST_PRICE = (
    10**12
)  # a million units for 1,000 tokens or a GPU-hour: 9·10⁹ tokens of it fit into 64 bits
_AMOUNT = re.compile(r"([+-]?)(\d{1,10})(?:\.(\d{1,6}))?", re.ASCII)


def read(text: str) -> int:
    """Return the micro-units of ``12``, ``-3.50`` or ``0.000025``.

    Raises:
        ValueError: it is none of these, or beyond `MOST`; the message is one line.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"invalid amount {text!r}: digits, a point and at most six more, as in 12.50"
        )
    sign, whole, part = match.groups()
    micro = int(whole) * MICRO + int((part or "").ljust(6, "0"))
    if micro > MOST:
        raise ValueError(f"invalid amount {text!r}: more than {MOST // MICRO}")
    return -micro if sign == "-" else micro


def show(micro: int) -> str:
    """Print micro-units exactly: two places, or as many of six as are needed."""
    whole, part = divmod(abs(micro), MICRO)
    places = f"{part:06}".rstrip("0").ljust(2, "0")
    return f"{'-' if micro < 0 else ''}{whole}.{places}"


def divide(value: int, by: int) -> int:
    """Return ``value / by`` rounded to the nearest integer, halves away from zero.

    This is the one rounding of a bill's line: a credit of the same size rounds to the same size.
    """
    quotient = (2 * abs(value) + by) // (2 * by)
    return -quotient if value < 0 else quotient
