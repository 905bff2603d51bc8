"""A request for inference as the parts hand it on, and who asks."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import ids


class Tier(enum.StrEnum):
    """An SLO, a priority band and a price. Lower `band` goes first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def band(self) -> int:
        """Return 0 for interactive, 1 for standard, 2 for batch (vLLM's priority is the same way round)."""
        return list(Tier).index(self)


class Endpoint(enum.StrEnum):
    """The engine's route; the value is the URL path on the replica and on the gateway."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"
    RERANK = "/v1/rerank"
    CLASSIFY = "/v1/classify"

    @property
    def pooled(self) -> bool:
        """Whether it reads its inputs and samples nothing: one shot, nothing to resume."""
        return self in _POOLED


_POOLED = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.CLASSIFY})


class Runner(enum.StrEnum):
    """What a model does with a request."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of such a model."""
        return _ENDPOINTS[self]


_ENDPOINTS: Mapping[Runner, tuple[Endpoint, ...]] = {
    Runner.GENERATE: (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES),
    # By the likeness of two embeddings, or by a classifier of one class that reads both texts.
    Runner.EMBED: (Endpoint.EMBEDDINGS, Endpoint.RERANK),
    Runner.CLASSIFY: (Endpoint.CLASSIFY, Endpoint.RERANK),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the credential says; nothing in here comes from the request's own words.

    Attributes:
        team: who pays; one Slurm account.
        user: the Unix user behind MUNGE, or the API key's owner.
        key_id: public part of the API key, or ``munge``.
        tiers: the tiers that this caller may name; the first is the default.
        models: models that this caller may use; empty means all.
        admin: may see and change everything.
        coordinator: may see the whole team's usage and jobs.
        service: Forebay's own batch runner: may act for the team and user that it names.
    """

    team: str
    user: str
    key_id: str
    tiers: tuple[Tier, ...] = (Tier.INTERACTIVE,)
    models: tuple[str, ...] = ()
    admin: bool = False
    coordinator: bool = False
    service: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRef:
    """The batch line behind a request of tier batch.

    Attributes:
        job_id: its job.
        custom_id: its own name.
        preempted: how often it gave its seat back before, as the batch runner's journal says.
        lost: how many replicas were lost with it before, and perhaps by it, as the journal says.
    """

    job_id: ids.BatchJobId
    custom_id: str
    preempted: int = 0
    lost: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request after authentication and checks, before admission.

    Attributes:
        request_id: made by the gateway.
        endpoint: which engine route answers it.
        body: the OpenAI body as parsed; ``body["model"]`` is what the caller wrote.
        model: served model's name, resolved.
        tier: resolved from the caller, the header or the gRPC field.
        caller: who asks.
        stream: whether the caller wants a stream.
        arrived_us: UTC µs when the gateway had read the request.
        deadline_us: UTC µs after which the answer is of no use and is ended, wherever it is; None: waiting
            alone is bounded, by the tier's default.
        version: exact version wanted, or None for the route's choice.
        adapter: LoRA adapter's name, or None.
        caller_request_id: the caller's own id, kept beside ours, never used as a key.
        cache_hint: the caller's key for requests that share a prefix; affects routing only.
        batch: the batch line that this request is, if it is one.
        traceparent: the caller's W3C trace, or None.
        raw: the bytes that ``body`` was parsed from, b"" where it was made here.
        size: bytes of the message that it came in, where that was another than ``raw``.
    """

    request_id: ids.RequestId
    endpoint: Endpoint
    body: Mapping[str, Any]
    model: str
    tier: Tier
    caller: Caller
    stream: bool
    arrived_us: int
    deadline_us: int | None = None
    version: str | None = None
    adapter: str | None = None
    caller_request_id: str | None = None
    cache_hint: str | None = None
    batch: BatchRef | None = None
    traceparent: str | None = None
    raw: bytes = b""
    size: int = 0
