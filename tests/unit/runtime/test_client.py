"""A gateway's way to the broker: what it makes of views that it can't read."""

from pathlib import Path

import pytest

from scheduler.contracts import clock, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.runtime import client


def test_a_view_that_can_not_be_read_is_told_once_and_the_last_one_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway whose views all went unread said nothing, and went by one of yesterday."""
    told = client.FleetClient(tmp_path, "g", clock.FakeClock())
    told._take(pb.FleetView(epoch=1, revision=1))
    before = told.view()

    def newer(message: pb.FleetView, received: float) -> None:
        raise ValueError("'x' is no word of this release")

    with monkeypatch.context() as patch:
        patch.setattr(wire, "view_from_pb", newer)
        for revision in (2, 3):
            told._take(pb.FleetView(epoch=1, revision=revision))
    assert told.view() is before
    assert caplog.text.count("can't be read, the last one holds") == 1
    told._take(pb.FleetView(epoch=1, revision=4))
    after = told.view()
    assert after is not None
    assert after.revision == 4
