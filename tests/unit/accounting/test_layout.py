"""Cells that would shift a field are escaped; numbers are rounded by integers."""

import datetime
import io

import pytest

from accounting import layout

NAMES = [
    layout.Column("Name", -8, lambda row, _: str(row["name"])),
    layout.Column("N", 3, lambda row, _: "1"),
]


def shown(name: str, style: layout.Style) -> str:
    out = io.StringIO()
    layout.print_rows(NAMES, [{"name": name}], datetime.UTC, style, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a|b", r"a\|b|1"),
        ("x\ny", r"x\ny|1"),
        ("a\\|b", r"a\\\|b|1"),
        ("caf\udce9", r"caf\udce9|1"),
    ],
)
def test_parsable_fields_stay_apart(name: str, line: str) -> None:
    assert shown(name, layout.Style("|", header=False)) == f"{line}\n"


def test_a_table_keeps_one_line_for_each_row() -> None:
    assert shown("a\nb|c", layout.Style(header=False)) == "a\\nb|c     1\n"


@pytest.mark.parametrize(
    ("value", "scale", "places", "text"),
    [
        (1_499_999, 1_000_000, 0, "1"),
        (1_500_000, 1_000_000, 0, "2"),
        (-1_500_000, 1_000_000, 0, "-2"),
        (-400_000, 1_000_000, 0, "0"),
        (1_005, 1_000, 2, "1.01"),
        (0, 7, 2, "0.00"),
        (10**30, 1, 1, f"{10**30}.0"),
    ],
)
def test_decimal_rounds_half_up(value: int, scale: int, places: int, text: str) -> None:
    assert layout.decimal(value, scale, places) == text
