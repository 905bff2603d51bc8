"""What schedules began, and whether their replicas were warm by then: one record of each beginning.

Floors follow from the clock (`schedules`), so nothing depends on a firing. What a firing leaves is the answer
to "were we warm at eight?": it is noted once over all brokers, in one fenced write with the mark up to which
the schedule has been looked at. A leader that comes late notes what began without one, as late or missed.
"""

import asyncio
import logging

from scheduler.contracts import clock, fleet
from scheduler.runtime import live, schedules
from scheduler.runtime.registry import store

log = logging.getLogger(__name__)
LOOK_S = 1.0


async def note(
    registry: store.Registry, picture: live.Live, time: clock.Clock
) -> tuple[schedules.Firing, ...]:
    """Note what began; return what was noted here.

    Raises:
        database.Fenced: another broker leads.
    """
    found = _firings(picture, time.wall_us())
    if not found:
        return ()
    noted = await asyncio.to_thread(registry.timetable.note, picture.epoch, found)
    for each in noted:
        began = schedules.utc(each.begins_us).isoformat()
        text = f"schedule {each.schedule}: began {began}, {each.timing}, warm: {each.warm} of {each.model}"
        cold = each.timing is schedules.Timing.MISSED or each.serving < each.floor
        log.log(logging.WARNING if cold else logging.INFO, "%s", text)
    return noted


def _firings(picture: live.Live, now_us: int) -> list[schedules.Firing]:
    found: list[schedules.Firing] = []
    for each in picture.timetable:
        try:
            spans = schedules.due(each, now_us)
        except ValueError:
            continue  # said where floors are read
        if spans:
            serving = sum(
                entry.replica.spec.model == each.model
                and entry.replica.state is fleet.ReplicaState.SERVING
                for entry in picture.replicas.values()
            )
            found += [
                schedules.Firing(each.name, each.model, each.floor, begin, end, now_us, serving)
                for begin, end in spans
            ]
    return found
