"""/admin/schedules: floors that come again and again. Anybody may read them, admins change them."""

import dataclasses
from typing import Annotated, Any

import fastapi
import pydantic

from scheduler.contracts import clock, errors
from scheduler.runtime import admin, schedules
from scheduler.runtime.registry import store, timetable

NEXT = 5  # beginnings shown unless asked for more


class NewSchedule(pydantic.BaseModel):
    """A schedule to keep; see `schedules.Schedule`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: admin.Name = pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    model: admin.Name
    floor: int = pydantic.Field(ge=1, le=admin.MAX_REPLICAS)
    cron: admin.Name
    until: admin.Name
    zone: admin.Name = "UTC"
    reason: admin.Name = ""


def router(registry: store.Registry, time: clock.Clock) -> fastapi.APIRouter:
    """Return the routes under /admin/schedules."""
    routes = fastapi.APIRouter(prefix="/admin/schedules", tags=["admin"], route_class=admin.Guarded)

    @routes.get("")
    def show(who: admin.Reader) -> dict[str, Any]:
        now_us, last = time.wall_us(), registry.timetable.last()
        return {
            "schedules": [
                {**_told(one, now_us), "last": _fired(last.get(one.name))}
                for one in registry.timetable.all()
            ]
        }

    @routes.post("")
    def add(who: admin.Admin, wish: NewSchedule) -> dict[str, Any]:
        made = schedules.Schedule(
            wish.name, wish.model, wish.floor, wish.cron, wish.until, wish.zone
        )
        try:
            made.check()
        except ValueError as error:
            raise errors.BadRequest(str(error), param="cron") from error
        registry.timetable.add(made, who.user, wish.reason, time.wall_us())
        return _told(made, time.wall_us())

    @routes.get("/{name}/next")
    def following(
        who: admin.Reader,
        name: str,
        count: Annotated[int, fastapi.Query(ge=1, le=100)] = NEXT,
    ) -> dict[str, Any]:
        found = registry.timetable.get(name)
        now = schedules.utc(time.wall_us())
        return {"name": name, "next": [at.isoformat() for at in found.next(now, count)]}

    @routes.get("/{name}/history")
    def history(
        who: admin.Reader,
        name: str,
        count: Annotated[int, fastapi.Query(ge=1, le=timetable.KEPT)] = NEXT,
    ) -> dict[str, Any]:
        began = registry.timetable.began(name, count)
        return {"name": name, "began": [_fired(each) for each in began]}

    @routes.post("/{name}/pause")
    def pause(who: admin.Admin, name: str) -> dict[str, Any]:
        registry.timetable.pause(name, True, time.wall_us())
        return {"name": name, "paused": True}

    @routes.post("/{name}/resume")
    def resume(who: admin.Admin, name: str) -> dict[str, Any]:
        registry.timetable.pause(name, False, time.wall_us())
        return {"name": name, "paused": False}

    @routes.delete("/{name}")
    def remove(who: admin.Admin, name: str) -> dict[str, Any]:
        registry.timetable.remove(name)
        return {"name": name, "removed": True}

    return routes


def _told(schedule: schedules.Schedule, now_us: int) -> dict[str, Any]:
    now = schedules.utc(now_us)
    try:
        floors = schedules.in_force([schedule], now_us)
        coming = [] if schedule.paused else schedule.next(now, 1)
    except ValueError as error:  # a time zone that this host does not know
        return {**_kept(schedule), "in_force": False, "next": f"never: {error}"}
    return {
        **_kept(schedule),
        "in_force": any(floor.starts_s <= 0 < floor.ends_s for floor in floors),
        "next": coming[0].isoformat() if coming else None,
    }


def _kept(schedule: schedules.Schedule) -> dict[str, Any]:
    told = dataclasses.asdict(schedule)
    del told["since_us"]  # a mark of ours
    return told


def _fired(firing: schedules.Firing | None) -> dict[str, Any] | None:
    """Return a beginning as JSON; None: it has not begun yet."""
    if firing is None:
        return None
    return {
        "begins": schedules.utc(firing.begins_us).isoformat(),
        "ends": schedules.utc(firing.ends_us).isoformat(),
        "noted": schedules.utc(firing.noted_us).isoformat(),
        "timing": firing.timing.value,
        "floor": firing.floor,
        "serving": firing.serving,
        "warm": firing.warm,
    }
