"""Who asks for what: names in a checked body become a model, a version, an adapter and a tier. Pure.

Forebay's own wishes come as headers or, for clients that can't set any, as fields of the body; the field
wins. Both are stripped before the engine sees the request:

| header | field | meaning |
| --- | --- | --- |
| X-Forebay-Priority | forebay_priority | the tier: interactive, standard, batch |
| X-Forebay-Deadline-Ms | forebay_deadline_ms | milliseconds from arrival after which the answer is ended |
| X-Forebay-Cache-Hint | forebay_cache_hint | key of requests that share a prefix: routing affinity only |
| X-Forebay-Version | forebay_version | an exact version of the model |
| X-Forebay-Adapter | forebay_adapter | a LoRA adapter of the model, as `model:adapter` in `model` says too |

OpenAI's own `prompt_cache_key` is taken as the cache hint where there is no other.

X-Request-Id is kept beside Forebay's own id, which every answer carries as x-forebay-request-id and as
x-request-id.
X-Forebay-Batch-Job, -Custom-Id, -Preempted, -Lost, -Team and -User are believed from Forebay's own batch
runner alone.
"""

import dataclasses
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scheduler.contracts import errors, fleet, ids, requests, tracing

MAX_ID_CHARS = 256
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller wants beside the OpenAI body; None means not said."""

    priority: str | None = None
    deadline_ms: int | None = None
    cache_hint: str | None = None
    version: str | None = None
    adapter: str | None = None
    caller_request_id: str | None = None
    traceparent: str | None = None


_PLAIN = Wishes()  # what by far the most want
_READ = frozenset(
    {
        "forebay_priority", "forebay_deadline_ms", "forebay_cache_hint", "forebay_version",
        "forebay_adapter", "prompt_cache_key",
    }
)  # fmt: skip
_ENDPOINTS = {kind.value: kind.endpoints for kind in requests.Runner}


def has_ours(body: Mapping[str, Any]) -> bool:
    """Return whether a body holds fields that are Forebay's own and no engine's."""
    return any(map(_is_ours, body))


def _is_ours(name: str) -> bool:
    return name.startswith("forebay_")


def wishes(headers: Mapping[str, str], body: Mapping[str, Any]) -> Wishes:
    """Read the wishes of an HTTP request.

    Args:
        headers: with lower-case names.
        body: the parsed body.

    Raises:
        errors.BadRequest: one of them is of the wrong kind.
    """
    if not headers and _READ.isdisjoint(body):
        return _PLAIN

    def text(name: str) -> str | None:
        field = f"forebay_{name}"
        value = body.get(field)
        if value is None:
            value = headers.get(f"x-forebay-{name.replace('_', '-')}")
        if value is None or value == "":
            return None
        if not isinstance(value, str) or len(value) > MAX_ID_CHARS:
            raise _fault(field, f"must be a string of at most {MAX_ID_CHARS} characters")
        return value

    raw = body.get("forebay_deadline_ms", headers.get("x-forebay-deadline-ms"))
    return Wishes(
        priority=text("priority"),
        deadline_ms=deadline("forebay_deadline_ms", raw),
        cache_hint=text("cache_hint") or _hint(body.get("prompt_cache_key")),
        version=text("version"),
        adapter=text("adapter"),
        caller_request_id=headers.get("x-request-id", "")[:MAX_ID_CHARS] or None,
        traceparent=tracing.parent(headers.get("traceparent")),
    )


def _hint(key: Any) -> str | None:
    return key[:MAX_ID_CHARS] if isinstance(key, str) and key else None


def acting_for(caller: requests.Caller, headers: Mapping[str, str]) -> requests.Caller:
    """Return for whom the batch runner acts; anybody else's word on that is not heard."""
    if not caller.service:
        return caller
    team = urllib.parse.unquote(headers.get("x-forebay-team", ""))
    user = urllib.parse.unquote(headers.get("x-forebay-user", ""))
    return dataclasses.replace(caller, team=team or caller.team, user=user or caller.user)


def batch_ref(caller: requests.Caller, headers: Mapping[str, str]) -> requests.BatchRef | None:
    """Return the batch line behind a request of the batch runner.

    Raises:
        errors.BadRequest: the job's number is none, or a count.
    """
    job = headers.get("x-forebay-batch-job")
    if not caller.service or job is None:
        return None
    if not job.isascii() or not job.isdigit() or len(job) > 18:
        raise _fault("X-Forebay-Batch-Job", "must be the job's number")
    custom_id = urllib.parse.unquote(headers.get("x-forebay-custom-id", ""))
    return requests.BatchRef(
        ids.BatchJobId(int(job)),
        custom_id,
        _count(headers, "X-Forebay-Preempted", "must be how often the line was preempted"),
        _count(headers, "X-Forebay-Lost", "must be how many replicas were lost with the line"),
    )


def _count(headers: Mapping[str, str], name: str, rule: str) -> int:
    said = headers.get(name.lower(), "0")
    if not said.isascii() or not said.isdigit() or len(said) > 9:
        raise _fault(name, rule)
    return int(said)


class Source(msgspec.Struct, frozen=True):
    """A checked body and who sent it."""

    endpoint: requests.Endpoint
    body: Mapping[str, Any]
    caller: requests.Caller
    wishes: Wishes
    arrived_us: int
    batch: requests.BatchRef | None = None
    raw: bytes = b""


def request(
    source: Source, view: fleet.FleetView, request_id: ids.RequestId
) -> requests.InferenceRequest:
    """Resolve the names in a request.

    Raises:
        errors.ModelNotFound: no such model, version or adapter for this caller.
        errors.BadRequest: no such tier, or the model does something else.
        errors.Forbidden: the tier is not one of the caller's.
    """
    wanted, caller = source.wishes, source.caller
    model, adapter = _model(str(source.body["model"]), wanted.adapter, view, caller)
    if wanted.version is not None:
        _version(model, wanted.version, view)
    _endpoint(source.endpoint, model, view.routes[model].runner)
    # A batch line stays batch, whatever its body says: its submitter may hold no other tier.
    offered = view.routes[model].tiers
    tier = _tier(requests.Tier.BATCH.value if source.batch else wanted.priority, caller, offered)
    if offered and tier.value not in offered:
        raise errors.Forbidden(
            f"model {short(model)} is not offered in tier {tier.value}: use {', '.join(offered)}",
            param="forebay_priority",
        )
    deadline_us = None
    if wanted.deadline_ms is not None:
        deadline_us = source.arrived_us + wanted.deadline_ms * 1_000
    return requests.InferenceRequest(
        request_id=request_id,
        endpoint=source.endpoint,
        body=source.body,
        model=model,
        tier=tier,
        caller=caller,
        stream=bool(source.body.get("stream")),
        arrived_us=source.arrived_us,
        deadline_us=deadline_us,
        version=wanted.version,
        adapter=adapter,
        caller_request_id=wanted.caller_request_id,
        cache_hint=wanted.cache_hint,
        batch=source.batch,
        traceparent=wanted.traceparent,
        raw=source.raw,
    )


def may_use(caller: requests.Caller, model: str, route: fleet.Route | None = None) -> bool:
    """Return whether a caller may know of a model: the key names it, and the model its team."""
    if caller.models and model not in caller.models:
        return False
    return route is None or not route.callers or caller.team in route.callers


def adapters_of(caller: requests.Caller, route: fleet.Route) -> tuple[str, ...]:
    """Return the adapters that a caller may know of: everybody's, and those of its own team."""
    if not route.adapter_teams:
        return route.adapters
    return tuple(
        name for name in route.adapters if route.adapter_teams.get(name, caller.team) == caller.team
    )


def _model(
    name: str, adapter: str | None, view: fleet.FleetView, caller: requests.Caller
) -> tuple[str, str | None]:
    """Split ``model:adapter``; a model whose own name holds a colon goes first."""
    model = name
    if name not in view.routes and adapter is None and ":" in name:
        model, _, adapter = name.rpartition(":")
    route = view.routes.get(model)
    if route is None or not may_use(caller, model, route):
        raise errors.ModelNotFound(
            f"model {short(model)} is not known here: see /v1/models", param="model"
        )
    if adapter is not None and adapter not in adapters_of(caller, route):
        raise errors.ModelNotFound(
            f"model {short(model)} has no adapter {short(adapter)}: see /v1/models", param="model"
        )
    return model, adapter


def _version(model: str, version: str, view: fleet.FleetView) -> None:
    known = {r.spec.version for r in view.replicas if r.spec.model == model}
    if version not in known | set(view.routes[model].weights):
        raise errors.ModelNotFound(
            f"model {short(model)} has no version {short(version)}: see /v1/models",
            param="forebay_version",
        )


def _endpoint(endpoint: requests.Endpoint, model: str, runner: str) -> None:
    """Refuse what the model's engine could only refuse in its own words, after a wait."""
    has = _ENDPOINTS.get(runner)
    if has is None or endpoint in has:
        return
    raise errors.BadRequest(
        f"model {short(model)} has no {endpoint.value}: it is there to {runner}; use "
        f"{' or '.join(has)}",
        param="model",
    )


def _tier(name: str | None, caller: requests.Caller, offered: Sequence[str]) -> requests.Tier:
    if name is None and not offered:
        return caller.tiers[0]
    if name is None:
        return next((tier for tier in caller.tiers if tier.value in offered), caller.tiers[0])
    if name not in list(requests.Tier):
        raise _fault("forebay_priority", f"must be one of {', '.join(requests.Tier)}")
    tier = requests.Tier(name)
    if tier not in caller.tiers:
        raise errors.Forbidden(
            f"tier {tier.value} is not open to this credential, which has "
            f"{', '.join(caller.tiers)}: ask for a key with it",
            param="forebay_priority",
        )
    return tier


def bounded(name: str, value: str) -> str | None:
    """Return a caller's word, None for an empty one.

    Raises:
        errors.BadRequest: it is longer than anybody needs.
    """
    if len(value) > MAX_ID_CHARS:
        raise _fault(name, f"must be a string of at most {MAX_ID_CHARS} characters")
    return value or None


def deadline(name: str, raw: Any) -> int | None:
    """Return a deadline in milliseconds, None for none.

    Raises:
        errors.BadRequest: it is no whole number, or out of range.
    """
    if raw is None:
        return None
    if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 16:
        raw = int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 < raw <= MAX_DEADLINE_MS:
        raise _fault(name, f"must be whole milliseconds between 1 and {MAX_DEADLINE_MS}")
    return raw


def short(name: str) -> str:
    """Return a caller's word for use in a message: quoted, cut, free of control characters."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _fault(name: str, what: str) -> errors.BadRequest:
    return errors.BadRequest(f"{name}: {what}", param=name)
