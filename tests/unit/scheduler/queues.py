"""Admission queues and tickets as tests write them."""

from collections.abc import Callable
from typing import Any

from scheduler.contracts import requests
from scheduler.core import admission

I, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH  # noqa: E741 - tiers
MIB = 1024 * 1024


def rules(per_band: int = 99, total: int = 999, size: int = MIB, **more: Any) -> admission.Rules:
    bounds = {tier: admission.Bound(per_band, size) for tier in requests.Tier}
    return admission.Rules(bounds, admission.Bound(total, more.pop("total_size", 9 * size)), **more)


def queue(made: admission.Rules | None = None) -> admission.Queue:
    return admission.Queue(made or rules())


def ticket(name: str, tier: requests.Tier = I, **fields: Any) -> admission.Ticket:
    return admission.Ticket(
        name, tier, fields.pop("team", "team"), fields.pop("arrived", 0.0), **fields
    )


def offer(
    waiting: admission.Queue,
    *tickets: admission.Ticket,
    now: float = 0.0,
    rate: float | None = None,
) -> list[admission.Admitted | admission.Refused]:
    return [waiting.offer(one, now=now, drain_per_s=rate) for one in tickets]


def drained(
    waiting: admission.Queue,
    now: float = 0.0,
    place: Callable[[admission.Ticket], object | None] = lambda one: one,
) -> list[str]:
    taken = iter(lambda: waiting.take(place, now), None)
    return [one.request_id for one, _ in taken]


def names(tickets: tuple[admission.Ticket, ...]) -> list[str]:
    return [one.request_id for one in tickets]
