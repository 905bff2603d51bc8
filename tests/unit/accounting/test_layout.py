"""Cells that would shift a field are escaped; numbers are rounded by integers."""

import csv
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


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (("a|", "b"), r"a\|||b"),
        (("a", "|b"), r"a||\|b"),
        (("a||b", "c"), r"a\|\|b||c"),
    ],
)
def test_a_long_delimiter_stands_apart_from_cells_that_hold_a_part_of_it(
    cells: tuple[str, str], line: str
) -> None:
    columns = [
        layout.Column(str(at), 8, lambda row, _, at=at: str(row["cells"][at]))  # type: ignore[misc]
        for at in (0, 1)
    ]
    out = io.StringIO()
    style = layout.Style("||", header=False)
    layout.print_rows(columns, [{"cells": cells}], datetime.UTC, style, out)
    assert out.getvalue() == f"{line}\n"


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_no_cell_of_csv_is_a_formula(begin: str) -> None:
    out = io.StringIO()
    name = f'{begin}HYPERLINK("http://x";A1)'
    layout.write_csv(NAMES, [{"name": name}], datetime.UTC, out)
    (_, cells) = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert cells == [f"'{name}", "1"]


@pytest.mark.parametrize("text", ["-12.50", "+3", "0", "-1,234.50", "-1e3", "a=b", "", "x-1"])
def test_numbers_and_other_words_stay_as_they_are(text: str) -> None:
    assert layout.harmless(text) == text


@pytest.mark.parametrize("text", ["-1+2", "-", "+a", "-1.", "=1", "-٣"])
def test_what_only_looks_like_a_number_is_none(text: str) -> None:
    assert layout.harmless(text) == f"'{text}"


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
