"""A statement of a team with names that would like to be markup, and its figures."""

import datetime
import re
from typing import Any

from accounting import charts, statement

NOV, DEC = 1_793_491_200_000_000, 1_796_083_200_000_000
EVIL = '--><script>alert("1")</script> $x^{2}$ 漢字'
NOW = datetime.datetime(2026, 12, 3, 9, 30, tzinfo=datetime.UTC)


def line(what: str, amount: int, cost: int, **more: Any) -> dict[str, Any]:
    return {
        "month": "2026-11", "used_month": "2026-11", "team": EVIL, "user": "ann", "model": EVIL,
        "tier": "batch", "what": what, "amount": amount, "unit": "tokens", "price": 1, "cost": cost,
        "late": False, "posting": 0, "author": "", "reason": "", **more,
    }  # fmt: skip


def page(
    *lines: dict[str, Any], closed_us: int = 0, prices: tuple[dict[str, Any], ...] = ()
) -> str:
    bill = {
        "month": "2026-11", "window": {"start_us": NOV, "end_us": DEC}, "zone": "UTC",
        "currency": "EUR", "closed_us": closed_us, "scope_user": "", "rows": list(lines),
    }  # fmt: skip

    def ask(team: str, by: str, unit: str) -> list[dict[str, Any]]:
        row = {
            "start_us": NOV, "model": EVIL, "uncached_prompt_tokens": 1_000, "cached_prompt_tokens": 0,
            "output_tokens": 234, "gpu_us": 7_200_000_000, "requests": 17, "attempts": 18,
            "platform_tokens": 3,
        }  # fmt: skip
        return [row] if lines else []

    return statement.render(bill, [EVIL], ask, prices, NOW)


def test_no_name_becomes_markup_or_mathematics() -> None:
    text = page(
        line("output", 234, 5), line("adjustment", 0, -2, user="", reason=EVIL, author=EVIL)
    )
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg") == 2
    assert not re.search(r"""(?:href|src)=["'](?!\#)""", text)


def test_nothing_copied_into_a_spreadsheet_is_a_formula() -> None:
    text = page(line("adjustment", 0, -2_500_000, user="", reason="=1+1", author="@ops"))
    assert ">=1+1<" not in text
    assert "&#39;=1+1" in text
    assert "&#39;@ops" in text
    assert ">-2.50<" in text


def test_a_month_that_was_closed_in_another_zone_lies_in_two_of_todays() -> None:
    def ask(team: str, by: str, unit: str) -> list[dict[str, Any]]:
        tokens = dict.fromkeys(
            ("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens", "gpu_us"), 1
        )
        counts = {"requests": 3, "attempts": 4, "platform_tokens": 0}
        return [
            {"start_us": start, "model": "m", **tokens, **counts}
            for start in (NOV, DEC - 3_600_000_000)
        ]

    bill = {
        "month": "2026-11", "window": {"start_us": NOV, "end_us": DEC}, "zone": "Asia/Kathmandu",
        "currency": "EUR", "closed_us": DEC, "scope_user": "", "rows": [line("output", 2, 5)],
    }  # fmt: skip
    text = statement.render(bill, [EVIL], ask, (), NOW)
    assert "<dt>Requests</dt><dd>6</dd>" in text


def test_its_figures_are_the_bills() -> None:
    text = page(
        line("output", 1_234_567, 1_234_567_890_123),
        line("gpu", 7_200_000_000, 5_000_000, unit="gpu_us"),
        line("adjustment", 0, -2_500_000, reason="outage", author="ops"),
        line("output", 10, 7, late=True, used_month="2026-10"),
        closed_us=DEC,
    )
    for words in (
        "1,234,570.39",
        "1,234,567",
        "2.00",
        "-2.50",
        "2026-10 (late)",
        "0.000007",
        "outage",
    ):
        assert words in text
    assert "closed</span> on 1 December 2026" in text
    assert "17" in text


def test_a_team_without_use_has_a_page_too() -> None:
    text = page()
    assert "Nothing was recorded from 1 November 2026, 00:00 to 1 December 2026, 00:00." in text
    assert "No rates are set" in text


def test_the_rates_that_held_in_the_month_are_shown() -> None:
    def price(micro: int, from_us: int, posting: int) -> dict[str, Any]:
        return {
            "model": "*", "tier": "*", "use": "output", "micro": micro, "from_us": from_us,
            "posting": posting, "added_us": 0, "author": "ops", "reason": "",
        }  # fmt: skip

    old, held, new, later = (
        price(1_110_000, 1, 1), price(2_220_000, NOV - 5, 2), price(3_330_000, NOV + 5, 3),
        price(4_440_000, DEC, 4),
    )  # fmt: skip
    text = page(line("output", 1, 1), prices=(later, new, held, old))
    assert [amount in text for amount in ("1.11", "2.22", "3.33", "4.44")] == [
        False,
        True,
        True,
        False,
    ]


def test_many_groups_become_seven_and_the_others() -> None:
    rows = [{"start_us": NOV, "name": str(number), "value": number} for number in range(1, 13)]
    made = charts.stacked(
        rows, lambda row: row["name"], lambda row: row["value"], ("day", datetime.UTC)
    )
    assert [name for name, _ in made.series] == ["12", "11", "10", "9", "8", "7", "6", "5 others"]
    assert made.series[-1][1] == [15.0]
    assert charts.svg(made, "x") == charts.svg(made, "x")
