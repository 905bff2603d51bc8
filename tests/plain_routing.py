"""Routing as one would write it down, looking at every member each time: what `routing.choose` must equal."""

from collections.abc import Sequence

from scheduler.contracts import fleet, ids, requests
from scheduler.core import contenders, routing
from scheduler.core.contenders import Member


def choose(
    ask: routing.Ask, at: routing.Situation, policy: routing.Policy = routing.DEFAULT
) -> routing.Choice | None:
    """Return what `routing.choose` must return."""
    batch = ask.tier is requests.Tier.BATCH
    group = at.fleet.group(ask.model, ask.version, ask.adapter, batch=batch)
    if group is None:
        return None
    everybody, longs = list(group.members), set(group.longs)
    could = [m for m in everybody if fits(ask, m, longs)]
    up = [
        m
        for m in could
        if m.replica_id not in at.full and m.replica.incarnation > at.dead.get(m.replica_id, -1)
    ]
    able = [m for m in up if has_room(ask, m, at.now, ask.kv_tokens)]
    if left := int(ask.left * len(could)):
        free = [m for m in able if not m.load.prefill]
        if len(free) <= left:
            able, up = ([m for m in some if m.load.prefill] for some in (able, up))
    if all(m.stale(at.now) for m in everybody):
        able.sort(key=lambda m: (m.replica_id <= at.after, m.replica_id))
        return routing.Choice(able[0].replica, routing.STALE) if able else None
    held = {name: share for name, share in at.held.shares().items() if share >= policy.least_share}
    total = sum(m.load.tokens for m in everybody) + ask.prompt_tokens + ask.output_tokens
    bound = max(policy.slack_tokens, policy.factor * total / len(everybody))

    def unsaturated(m: Member) -> bool:
        own = ask.prompt_tokens * (1 - held.get(m.replica_id, 0.0)) + ask.output_tokens
        return m.load.tokens == 0 or m.load.tokens + own <= bound

    def answer(m: Member, reason: str) -> routing.Choice:
        return routing.Choice(m.replica, reason, at.held.share(m.replica_id))

    fit = [m for m in able if unsaturated(m)]
    if holding := [
        m
        for m in up
        if m.replica_id in held
        and has_room(ask, m, at.now, ask.kv_beside(held[m.replica_id]))
        and unsaturated(m)
    ]:
        most = max(held[m.replica_id] for m in holding)
        wanted = [
            m
            for m in everybody
            if held.get(m.replica_id) == most and (not ask.long or m.replica_id in longs)
        ]
        return answer(_least(ask, at, wanted, holding), "prefix is there")
    if ask.hint is not None and fit:
        key = contenders.hash_of(ask.hint)
        return answer(max(fit, key=lambda m: contenders.claim(m.seed, key)), "cache hint")
    if ask.adapter is not None:
        width = max(1, round(at.adapter_share * policy.factor * len(everybody)))
        key = contenders.hash_of(ask.adapter)
        ranked = sorted(everybody, key=lambda m: -contenders.claim(m.seed, key))[:width]
        if width < len(everybody) and any(m in fit for m in ranked):
            return answer(_least(ask, at, ranked, fit), "adapter is there")
    if not able:
        return None
    wanted = [m for m in everybody if not ask.long or m.replica_id in longs]
    return answer(_least(ask, at, wanted, able), "least work in flight")


def _least(
    ask: routing.Ask, at: routing.Situation, wanted: Sequence[Member], fit: Sequence[Member]
) -> Member:
    """Return the member with the least work; among equals with any room at all, by claim or by the draw."""
    least = min(m.load.tokens for m in fit if m in wanted)
    opened = [m for m in wanted if m.load.tokens == least and any_room(ask, m)]
    opened.sort(key=lambda m: m.replica_id)
    for ties in (opened, [m for m in opened if m in fit]):
        if at.key is None:
            drawn = ties[int(at.draw * len(ties))]
        else:
            key = at.key
            drawn = max(ties, key=lambda m: contenders.claim(m.seed, key))
        if drawn in fit:
            break
    return drawn


def fits(ask: routing.Ask, m: Member, longs: set[ids.ReplicaId]) -> bool:
    """Whether a member could take the request if it were idle."""
    return ask.context_tokens <= m.replica.spec.max_context and (
        not ask.long or m.replica_id in longs
    )


def any_room(ask: routing.Ask, m: Member) -> bool:
    """Whether a member has a seat for this band, and its engine a step to come."""
    spec, held = m.replica.spec, m.load
    if held.prefill >= m.prefill_limit:
        return False
    if ask.tier is not requests.Tier.BATCH:
        return held.urgent < spec.seats
    reserved = 0 if m.replica.role is fleet.Role.BATCH else spec.reserved_seats
    return held.urgent + held.batch < min(spec.seats - reserved, m.batch_bound)


def has_room(ask: routing.Ask, m: Member, now: float, kv_tokens: int) -> bool:
    """Whether the request finds its seats, and ``kv_tokens`` of KV cache."""
    spec, held = m.replica.spec, m.load
    if not any_room(ask, m):
        return False
    kv, idle = held.urgent_kv, not held.urgent
    if ask.tier is requests.Tier.BATCH:
        if m.stale(now) and m.replica.stats is None:
            return False
        reserved = 0 if m.replica.role is fleet.Role.BATCH else spec.reserved_seats
        others = m.others if m.stale(now) else 0
        if held.urgent + held.batch + others + ask.seats > min(
            spec.seats - reserved, m.batch_bound
        ):
            return False
        kv, idle = kv + held.batch_kv, idle and not held.batch
    elif held.urgent + ask.seats > spec.seats:
        return False
    return idle or kv + kv_tokens <= m.kv_limit
