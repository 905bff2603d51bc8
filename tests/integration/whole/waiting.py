"""Waits for an event of the real world, with a deadline that says what did not happen."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG_S = (
    180.0  # far above what two cores need with forty others at work; who waits so long has failed
)
_EVERY_S = 0.05


def eventually(look: Callable[[], T], what: str, within_s: float = LONG_S) -> T:
    """Return what ``look`` returns once it is true.

    Args:
        look: asks the running system; an answer that is false, or an `AssertionError`, means not yet.
        what: what is waited for, for the message.
        within_s: seconds until it counts as not happening.

    Raises:
        AssertionError: it did not happen in time; the message has the last answer.
    """
    deadline = time.monotonic() + within_s
    while True:
        last: object
        try:
            found = look()
        except AssertionError as error:
            last = error
        else:
            if found:
                return found
            last = repr(found)
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last: {last}")
        time.sleep(_EVERY_S)
