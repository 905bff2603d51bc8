"""finfo and fctl print names that somebody else chose: none of them steers the terminal."""

import pytest

from scheduler.runtime import finfo

EVIL = "\x1b]0;owned\x07m\n"


@pytest.mark.parametrize("layout", ["%m %N", "%.30m|%5N", "%30m"])
def test_a_line_of_finfo_is_one_harmless_line(layout: str) -> None:
    line = finfo._line(layout, {"m": EVIL, "N": "n1"})
    assert line.isprintable()
    assert line.count("owned") == 1
