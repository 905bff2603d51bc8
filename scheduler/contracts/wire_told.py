"""What gateways tell the broker, on the wire: demand, how versions fare, and copies for shadow versions.

Records and messages have the same names for the same things, so most need no mapping of their own.
"""

import dataclasses
from typing import Any

from scheduler.contracts import observed
from scheduler.contracts.v1 import control_pb2 as pb

_MATCHES = frozenset(observed.Match)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _said(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.DESCRIPTOR.fields_by_name}


def demand_to_pb(demand: observed.Demand) -> pb.Demand:
    """Return demand's message."""
    adapters = {name: pb.AdapterDemand(**_fields(one)) for name, one in demand.adapters.items()}
    versions = {name: pb.VersionDemand(**_fields(one)) for name, one in demand.versions.items()}
    return pb.Demand(**{**_fields(demand), "adapters": adapters, "versions": versions})


def demand_from_pb(message: pb.Demand) -> observed.Demand:
    """Return a message's demand."""
    return observed.Demand(
        model=message.model,
        waiting=dict(message.waiting),
        in_flight=dict(message.in_flight),
        oldest_wait_s=message.oldest_wait_s,
        ttft_ms=tuple(message.ttft_ms),
        arrived=message.arrived,
        arrived_standard=message.arrived_standard,
        adapters={
            name: observed.AdapterDemand(**_said(one)) for name, one in message.adapters.items()
        },
        versions={
            name: observed.VersionDemand(**_said(one)) for name, one in message.versions.items()
        },
    )


def trial_to_pb(trial: observed.Trial) -> pb.Trial:
    """Return a trial's message."""
    return pb.Trial(**_fields(trial))


def trial_from_pb(message: pb.Trial) -> observed.Trial:
    """Return a message's trial."""
    return observed.Trial(**_said(message))


def copied_to_pb(copied: observed.Copied) -> pb.Copied:
    """Return a copied request's message."""
    sides = {
        "caller": pb.Fared(**_fields(copied.caller)),
        "copy": pb.Fared(**_fields(copied.copy)),
    }
    return pb.Copied(**{**_fields(copied), **sides, "match": copied.match.value})


def copied_from_pb(message: pb.Copied) -> observed.Copied:
    """Return a message's copied request; what only a newer release says of its texts is unknown here."""
    match = observed.Match(message.match) if message.match in _MATCHES else observed.Match.UNKNOWN
    caller, copy = observed.Fared(**_said(message.caller)), observed.Fared(**_said(message.copy))
    return observed.Copied(message.model, message.version, message.shadow, caller, copy, match)


def dropped_to_pb(dropped: observed.CopiesDropped) -> pb.CopiesDropped:
    """Return the message of copies that were not made."""
    return pb.CopiesDropped(**_fields(dropped))


def dropped_from_pb(message: pb.CopiesDropped) -> observed.CopiesDropped:
    """Return a message's copies that were not made."""
    return observed.CopiesDropped(**_said(message))
