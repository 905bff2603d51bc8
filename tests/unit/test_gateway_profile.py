"""The shares of a profile by module."""

from typing import Any

from tests.bench import gateway_profile

_US = ("gateway/hop.py", 1, "f")
_STATS = {
    _US: (2, 20, 3.0, 4.0, {}),
    ("/x/site-packages/uvicorn/a.py", 5, "g"): (1, 10, 0.5, 0.5, {}),
    ("~", 0, "<built-in>"): (1, 40, 0.5, 0.5, {_US: (40, 40, 0.5, 0.5)}),
    ("tests/bench/gateway_inside.py", 1, "h"): (1, 10, 9.0, 9.0, {}),
}


def test_builtins_count_with_their_callers_and_the_harness_not_at_all() -> None:
    found = gateway_profile.parts(_STATS, 10)
    assert [(part.name, part.share, part.calls) for part in found] == [
        ("Python's hop.py", 0.875, 2.0),
        ("uvicorn/a.py", 0.125, 1.0),
    ]


def test_small_shares_are_added_up() -> None:
    many: dict[Any, Any] = {
        (f"/x/site-packages/m{n}.py", 1, "f"): (1, 1, 1.0, 1.0, {}) for n in range(200)
    }
    (rest,) = gateway_profile.parts(many, 1)
    assert rest.name == "200 others"
    assert round(rest.share, 6) == 1.0
