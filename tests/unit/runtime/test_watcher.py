"""A change of the catalog is told, on both databases."""

import time

from scheduler.runtime.registry import store, watcher
from tests.unit.runtime.test_registry import CHAT

WITHIN_S = 10.0  # on a machine that is full; a second else


def told(seen: watcher.Watcher) -> bool:
    until = time.monotonic() + WITHIN_S
    while not seen.moved():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_every_change_and_wish_is_told_once(registry: store.Registry) -> None:
    registry.catalog.declare([CHAT], 1)
    seen = watcher.Watcher(registry.database, registry.declared.serial)
    try:
        assert told(seen)
        assert not seen.moved()
        registry.catalog.scale("chat", 3)
        assert told(seen)
        registry.catalog.hold_batch("chat", True)
        assert told(seen)
        registry.catalog.declare([CHAT], 2)
        assert not seen.moved()
        registry.catalog.declare([], 3)
        assert told(seen)
    finally:
        seen.close()
