"""The [gateway] table of forebay.toml."""

import dataclasses

from scheduler.contracts import requests
from scheduler.contracts.settings import setting

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class GatewaySettings:
    """What one gateway process needs to know. Port 0 takes any free port."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; loopback, so that nothing is offered by accident."
    )
    http_port: int = setting(
        8000, "Port of the OpenAI interface; 0 takes a free one.", least=0, most=65535
    )
    grpc_port: int = setting(
        8001, "Port of the gRPC interface; 0 takes a free one.", least=0, most=65535
    )
    workers: int = setting(
        1,
        "`forebay gateway` services that you start on this host; above 1 they share the ports. Each has "
        "its own queues, so one, as `forebay up` starts it, is right until a core is full.",
        least=1,
    )
    body_limit: int = setting(
        20 * MIB,
        "Largest JSON body, refused before it is read; 20 MiB holds a few pictures.",
        unit="bytes",
        least=1024,
    )
    upload_limit: int = setting(
        1024 * MIB, "Largest file body (batch input), which is streamed.", unit="bytes", least=1024
    )
    queue_interactive: int = setting(
        1024, "Interactive requests that may wait, per model; more are refused at once.", least=1
    )
    queue_standard: int = setting(2048, "Standard requests that may wait, per model.", least=1)
    queue_batch: int = setting(
        256, "Batch lines that may wait, per model; the rest waits in the runner.", least=1
    )
    queue_total: int = setting(
        3072,
        "Requests that may wait per model in all; past it the youngest batch is shed.",
        least=1,
    )
    deadline_interactive_s: float = setting(
        60.0, "Longest wait for a replica, if the request names no deadline.", unit="s", least=0.1
    )
    deadline_standard_s: float = setting(300.0, "The same for tier standard.", unit="s", least=0.1)
    deadline_batch_s: float = setting(
        3600.0, "The same for tier batch; the runner sends the line again.", unit="s", least=0.1
    )
    no_replica_grace_s: float = setting(
        5.0,
        "How long a model may be without any replica before its requests are refused: a restart "
        "is no reason to fail.",
        unit="s",
        least=0,
    )
    connect_timeout_s: float = setting(
        2.0, "Time to connect to a replica in the same cluster.", unit="s", least=0.1
    )
    stream_idle_s: float = setting(
        60.0,
        "A stream that is silent for so long counts as lost; longer than the longest prefill.",
        unit="s",
        least=0.1,
    )
    client_stall_s: float = setting(
        60.0,
        "A streaming client that reads nothing for so long is given up, so that it keeps no seat.",
        unit="s",
        least=0.1,
    )
    answer_timeout_s: float = setting(
        900.0, "Longest silence before a whole (not streamed) answer.", unit="s", least=0.1
    )
    replica_attempts: int = setting(
        3, "Dispatches of one request that may end in a lost replica.", least=1
    )
    full_backoff_s: float = setting(
        0.05, "A replica that said full is not asked again for so long.", unit="s", least=0
    )
    drain_s: float = setting(
        30.0, "After SIGTERM, how long running answers may take to end.", unit="s", least=0
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
    extra_fields: tuple[str, ...] = setting(
        (),
        "Body fields that your engines understand beside OpenAI's and vLLM's sampling options; others are "
        "refused, so that a typing error in max_tokens costs an error and not a full-length answer.",
    )
    key_cache_s: float = setting(
        10.0,
        "How long a looked-up API key is believed; a revoked one works so long.",
        unit="s",
        least=0,
    )
    munge_socket: str = setting("", "munged's socket; empty takes munge's own default.")
    munge_timeout_s: float = setting(2.0, "Time for unmunge to decode.", unit="s", least=0.1)
    report_s: float = setting(
        0.2,
        "How often demand is told to the broker; its plan looks at two in a row.",
        unit="s",
        least=0.01,
    )

    def queue_bounds(self) -> dict[requests.Tier, int]:
        """Return how many may wait in each band."""
        return {
            requests.Tier.INTERACTIVE: self.queue_interactive,
            requests.Tier.STANDARD: self.queue_standard,
            requests.Tier.BATCH: self.queue_batch,
        }

    def deadline_s(self, tier: requests.Tier) -> float:
        """Return the longest wait of a tier in seconds."""
        return {
            requests.Tier.INTERACTIVE: self.deadline_interactive_s,
            requests.Tier.STANDARD: self.deadline_standard_s,
            requests.Tier.BATCH: self.deadline_batch_s,
        }[tier]
