"""The bounds of a gateway's doors, a part of the [gateway] table: what connections and bodies may cost."""

import dataclasses

from scheduler.contracts.settings import setting

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class DoorSettings:
    """What a client may hold of one process before its request is known."""

    body_limit: int = setting(
        20 * MIB,
        "Largest JSON body, refused before it is read; 20 MiB holds a few pictures.",
        unit="bytes",
        least=1024,
    )
    bodies_limit: int = setting(
        512 * MIB,
        "Bytes of JSON bodies that one process reads at once; one more is told to come back. It holds two "
        "dozen of the largest, or thousands of usual ones.",
        unit="bytes",
        least=1024 * 1024,
    )
    upload_limit: int = setting(
        32 * 1024 * MIB,
        "Largest file body (batch input). It is streamed to disk line by line, so its size costs no memory; "
        "ten million lines with long prompts are some 20 GB.",
        unit="bytes",
        least=1024,
    )
    connections: int = setting(
        8192,
        "HTTP connections that one process keeps; one more is answered 503 and closed. A stalled one costs "
        "up to 100 KB until its time is over.",
        least=1,
    )
    connections_per_peer: int = setting(
        0,
        "HTTP connections that one process keeps from one address; 0: no such limit, since behind a proxy "
        "or a login node all have the same.",
        least=0,
    )
    head_timeout_s: float = setting(
        30.0,
        "Time for a request's head, from its first byte or the connection.",
        unit="s",
        least=0.05,
    )
    body_timeout_s: float = setting(
        30.0,
        "Time for a request's body, beside a second for each `body_bytes_per_s`; then 408.",
        unit="s",
        least=0.05,
    )
    body_bytes_per_s: int = setting(
        16 * 1024,
        "The slowest that a body may come: a modem's pace. A client that sends a byte now and then would "
        "keep its place for ever.",
        unit="bytes",
        least=1,
    )
    idle_timeout_s: float = setting(
        75.0,
        "A connection without a request is closed after so long; longer than usual clients and proxies keep "
        "theirs, so that these close first.",
        unit="s",
        least=0.05,
    )
    grpc_calls: int = setting(
        4096,
        "gRPC calls that one process has under way; one more is told RESOURCE_EXHAUSTED.",
        least=1,
    )
    grpc_streams: int = setting(
        256, "gRPC calls that one connection may have under way; more wait at the client.", least=1
    )
    munge_parallel: int = setting(
        4,
        "MUNGE credentials that are being checked at once: each is a process for a moment.",
        least=1,
    )
    munge_waiting: int = setting(
        256,
        "MUNGE credentials that may wait to be checked; one more is told to come back.",
        least=0,
    )
    keepalive_min_ping_s: float = setting(
        5.0,
        "gRPC clients may ping as often as this; gRPC's own default of 5 min ends calls that wait.",
        unit="s",
        least=0.01,
    )
    keepalive_time_s: float = setting(
        30.0, "The server pings a silent gRPC client so often.", unit="s", least=1
    )
    keepalive_timeout_s: float = setting(
        20.0, "A gRPC client that leaves a ping unanswered for so long is gone.", unit="s", least=1
    )
