"""Control messages to records and back, as agents and slots need them."""

import json
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet
from scheduler.contracts.v1 import control_pb2 as pb

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the site's proxy must not swallow internal calls
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # Peers ping every 10 s in a silent call; the default would answer with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def spec_from_pb(message: pb.ReplicaSpec) -> fleet.ReplicaSpec:
    """Return a message's spec.

    Raises:
        ValueError: an engine that is not known, or arguments that are no JSON.
    """
    return fleet.ReplicaSpec(
        model=message.model,
        version=message.version,
        engine=fleet.EngineKind(message.engine),
        weights=message.weights,
        engine_args=json.loads(message.engine_args_json or "{}"),
        seats=message.seats,
        reserved_seats=message.reserved_seats,
        max_context=message.max_context,
        gpus=message.gpus,
        adapters=dict(message.adapters),
    )


def spec_to_pb(spec: fleet.ReplicaSpec) -> pb.ReplicaSpec:
    """Return a spec's message."""
    return pb.ReplicaSpec(
        model=spec.model,
        version=spec.version,
        engine=spec.engine.value,
        weights=spec.weights,
        engine_args_json=json.dumps(dict(spec.engine_args), sort_keys=True),
        seats=spec.seats,
        reserved_seats=spec.reserved_seats,
        max_context=spec.max_context,
        gpus=spec.gpus,
        adapters=dict(spec.adapters),
    )


def stats_to_pb(stats: Mapping[str, Any]) -> pb.ReplicaStats:
    """Return the message for the ``stats`` of a replica's ``/forebay/state``."""
    return pb.ReplicaStats(**stats)
