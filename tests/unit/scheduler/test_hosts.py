"""Which gateways share the models: a blip moves nothing, a loss does."""

from scheduler.contracts import fleet
from scheduler.runtime import hosts

A, B = fleet.Gateway("a", "h1:1"), fleet.Gateway("b", "h2:1")


def test_a_gateway_that_comes_back_was_never_gone() -> None:
    known = hosts.Hosts()
    known.heard("b", "h2:1", 0.0)
    known.heard("a", "h1:1", 0.0)
    known.heard("alone", "", 0.0)
    assert known.live(0.0) == (A, B)
    assert known.changed(0.0)
    assert not known.changed(0.0)
    known.left("a", 10.0)
    assert known.live(12.0) == (A, B)
    known.heard("a", "h1:1", 12.0)
    assert known.live(99.0) == (A, B)
    assert not known.changed(99.0)


def test_a_gateway_that_stays_away_is_dropped() -> None:
    known = hosts.Hosts()
    known.heard("a", "h1:1", 0.0)
    known.heard("b", "h2:1", 0.0)
    assert known.changed(0.0)
    known.left("a", 10.0)
    known.left("nobody", 10.0)
    assert known.changed(13.5)
    assert known.live(13.5) == (B,)
    known.heard("b", "", 14.0)  # it was started anew without
    assert known.live(14.0) == ()
