"""forebay.toml's `[[models]]` as entries of the catalog. Pure.

The file is the simple way to declare models; the registry keeps what it last said of each. A model whose
lines have changed since is declared anew, all of it; one whose lines are the same keeps what admins have
made of it meanwhile; one that the file has dropped is removed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.contracts import fleet
from scheduler.runtime import config
from scheduler.runtime.models import document

AUTHOR = "forebay.toml"


def of_file(models: Sequence[config.ModelSettings]) -> dict[document.Key, dict[str, Any]]:
    """Return the file's entries."""
    made: dict[str, Any] = {}
    for name in dict.fromkeys(item.name for item in models):
        mine = [item for item in models if item.name == name]
        made[name] = _model(mine)
    return document.entries(document.Document.model_validate({"models": made}))


def merged(
    now: document.Entries, before: Mapping[str, Any], file: document.Entries
) -> tuple[dict[document.Key, Any], dict[str, Any]]:
    """Return the entries after a look at the file, and what to remember of the file.

    Args:
        now: the entries in force.
        before: what the last call returned to be remembered.
        file: the file's entries.
    """
    said = remembered(file)
    changed = {name for name, lines in said.items() if before.get(name) != lines}
    dropped = before.keys() - said.keys()
    kept = {key: body for key, body in now.items() if key[1] not in changed | dropped}
    return {**kept, **{key: body for key, body in file.items() if key[1] in changed}}, said


def remembered(file: document.Entries) -> dict[str, Any]:
    """Return the file's entries as JSON, by model."""
    found: dict[str, Any] = {}
    for (kind, model, name), body in sorted(file.items()):
        found.setdefault(model, []).append([kind, name, dict(body)])
    return found


def _model(mine: Sequence[config.ModelSettings]) -> dict[str, Any]:
    last = mine[-1]
    shares = percent({item.version: item.weight for item in mine})
    return {
        "tiers": list(last.tiers),
        "replicas": last.replicas,
        "scaling": dict(last.scaling),
        "role": last.role,
        "dedicated": last.dedicated,
        "itl_slo_ms": last.itl_slo_ms,
        "ttft_slo_ms": last.ttft_slo_ms,
        "versions": {item.version: _version(item, last, shares) for item in mine},
        "route": {"versions": shares},
        "adapters": _adapters(mine),
    }


def _adapters(mine: Sequence[config.ModelSettings]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, path in [pair for item in mine for pair in item.adapters.items()]:
        fitting = [item.version for item in mine if name in item.adapters]
        found[name] = {"path": path, "versions": fitting if len(fitting) < len(mine) else []}
    return found


def _version(
    item: config.ModelSettings, last: config.ModelSettings, shares: Mapping[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "engine": item.engine,
        "runner": item.runner,
        "weights": item.weights,
        "max_context": item.max_context,
        "weights_digest": item.weights_digest,
        "tuning": dict(item.tuning),
        "engine_args": dict(item.engine_args),
        "seats": item.seats,
        "reserved_seats": item.reserved_seats,
        "gpus": None if item.engine is fleet.EngineKind.HTTP and item.gpus == 1 else item.gpus,
        "adapter_slots": None if item.adapter_slots < 0 else item.adapter_slots,
        "adapter_host": item.adapter_host,
    }
    # What a version says as its model does follows the route; without a share it is kept as the file says.
    alone = shares[item.version] == 0
    if alone or item.replicas != last.replicas:
        found["replicas"] = item.replicas
    if alone or dict(item.scaling) != dict(last.scaling):
        found["scaling"] = dict(item.scaling)
    for name in ("role", "dedicated", "itl_slo_ms", "ttft_slo_ms"):
        if getattr(item, name) != getattr(last, name):
            found[name] = getattr(item, name)
    return found


def percent(weights: Mapping[str, int]) -> dict[str, int]:
    """Return weights that add up to 100; the first version takes what rounding leaves."""
    total = sum(weights.values())
    if total == 0:
        weights, total = dict.fromkeys(weights, 1), len(weights)
    shares = {name: weight * 100 // total for name, weight in weights.items()}
    first = next(iter(shares))
    shares[first] += 100 - sum(shares.values())
    return shares
