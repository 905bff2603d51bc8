"""Which lines a profile's samples are counted with."""

from tests.bench import gateway_lines

RAW = [
    "<module> (tests/bench/gateway_inside.py:200);measure (tests/bench/gateway_inside.py:150);"
    "_run (gateway/exchange.py:45);parse (gateway/checks.py:40) 7",
    "measure (tests/bench/gateway_inside.py:150);_run (gateway/exchange.py:45);"
    "parse (gateway/checks.py:41) 2",
    "measure (tests/bench/gateway_inside.py:190);data_received (gateway/trunk.py:120);"
    "take (gateway/dispatch.py:110) 3",
    "measure (tests/bench/gateway_inside.py:190) 11",
    "<module> (tests/bench/gateway_inside.py:200);exec (sqlalchemy/sql/schema.py:9) 5",
    "a frame without a place 5",
    "",
]


def test_looks_count_with_the_line_that_ran_and_the_bench_not_at_all() -> None:
    requests, tokens = gateway_lines.looks(RAW)
    assert requests == {
        gateway_lines.Line("gateway/checks.py", 40, "parse"): 7,
        gateway_lines.Line("gateway/checks.py", 41, "parse"): 2,
    }
    assert tokens == {gateway_lines.Line("gateway/dispatch.py", 110, "take"): 3}


def test_the_dearest_line_stands_first_with_its_share() -> None:
    requests, _ = gateway_lines.looks(RAW)
    head, _, _, _, first, *_ = gateway_lines.table("A request", requests).splitlines()
    assert head == "A request: 9 looks found 2 lines at work; these are 100% of it."
    assert first.startswith("| 77.8% | gateway/checks.py:40 | parse |")
