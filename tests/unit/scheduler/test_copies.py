"""What copies tell of a shadow version."""

from scheduler.contracts import fleet, observed
from scheduler.core import copies

ROUTE = fleet.Route("chat", {"v1": 100}, shadow="v2", shadow_percent=10)
ROUTES = {"chat": ROUTE}
GOOD = observed.Fared(failed=False, ttft_ms=50.0, itl_ms=5.0, total_ms=100.0, tokens=11)
SLOW = observed.Fared(failed=False, ttft_ms=500.0, itl_ms=5.0, total_ms=550.0, tokens=21)
BAD = observed.Fared(failed=True, total_ms=3.0)


def copied(copy: observed.Fared, match: observed.Match = observed.Match.UNKNOWN) -> observed.Copied:
    return observed.Copied("chat", "v1", "v2", GOOD, copy, match)


def test_both_sides_are_told_and_failures_are_in_no_mean_of_whole_answers() -> None:
    found = copies.Shadows()
    found.note(
        ROUTES,
        [copied(GOOD, observed.Match.SAME), copied(SLOW, observed.Match.DIFFERS), copied(BAD)],
        [
            observed.CopiesDropped("chat", "v2", "busy", 3),
            observed.CopiesDropped("chat", "v2", "busy", 2),
        ],
    )
    (told,) = found.told(ROUTES)
    assert told == {
        "model": "chat",
        "version": "v2",
        "percent": 10,
        "copies": 3,
        "dropped": {"busy": 5},
        "same": 1,
        "differs": 1,
        "caller": {"failed": 0, "ttft_ms": 50.0, "total_ms": 100.0, "tokens": 11.0},
        "copy": {"failed": 1, "ttft_ms": 275.0, "total_ms": 325.0, "tokens": 16.0},
        "worse": "",
    }


def test_each_copy_is_a_pair_of_the_test_that_rollouts_stand_on() -> None:
    found = copies.Shadows()
    found.note(ROUTES, [copied(GOOD)] * 5)
    assert found.told(ROUTES)[0]["worse"] == ""
    found.note(ROUTES, [copied(SLOW)] * 60)
    assert found.told(ROUTES)[0]["worse"].startswith("TTFT is worse in ")


def test_another_shadow_begins_anew_and_one_that_is_gone_is_forgotten() -> None:
    found = copies.Shadows()
    found.note(ROUTES, [copied(GOOD)])
    found.keep({"chat": fleet.Route("chat", {"v1": 100})})
    assert found.told({"chat": fleet.Route("chat", {"v1": 100})}) == []
    assert found.told(ROUTES)[0]["copies"] == 0


def test_what_comes_after_a_route_has_dropped_its_shadow_never_counts() -> None:
    """Copies that were under way end later; the shadow may be named again."""
    found = copies.Shadows()
    without = {"chat": fleet.Route("chat", {"v1": 100})}
    found.keep(without)
    found.note(without, [copied(GOOD)], [observed.CopiesDropped("chat", "v2", "busy", 3)])
    found.keep(ROUTES)
    (told,) = found.told(ROUTES)
    assert (told["copies"], told["dropped"]) == (0, {})
