"""What Prometheus may ask of a gateway, in the names that inference servers use for the same things."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Protocol

import prometheus_client
from prometheus_client import multiprocess

from scheduler.contracts import observed

OK = "ok"
DISPATCHED = "dispatched"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 1)


class Tally:
    """Tokens of one model and tier: added up in plain numbers, and told to Prometheus now and then.

    Each word to a counter of its own costs more than all of these sums.

    Args:
        counters: of prompt tokens, of those among them that a prefix cache held, of sampled tokens, and of
            what the platform computed again or for nobody.
    """

    __slots__ = ("_counters", "_sums")

    def __init__(self, *counters: prometheus_client.Counter) -> None:
        self._counters = counters
        self._sums = [0, 0, 0, 0]

    def add(self, prompt: int, hits: int, output: int, waste: int) -> None:
        """Add what an attempt has computed."""
        sums = self._sums
        sums[0] += prompt
        sums[1] += hits
        sums[2] += output
        sums[3] += waste

    def tell(self) -> None:
        """Tell what was added since the last time."""
        sums, self._sums = self._sums, [0, 0, 0, 0]
        for counter, amount in zip(self._counters, sums, strict=True):
            if amount:
                counter.inc(amount)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The numbers of one model and tier; looked up once a request, since `labels` is what costs.

    Attributes:
        ttft: seconds from a request's arrival to its first token.
        inter_token: seconds from one token to the next, as frames arrive: several tokens in a frame
            share its interval.
        tokens: of answers that ended.
        resumed: answers that went on at another replica after theirs was lost.
        no_seat: dispatches that found no seat at their replica; the requests wait on.
        dispatched: `Metrics.queue_wait` of the waits that ended so.
        whole: `Metrics.ended` of the requests that ended ok.
    """

    ttft: prometheus_client.Histogram
    inter_token: prometheus_client.Histogram
    tokens: Tally
    resumed: prometheus_client.Counter
    no_seat: prometheus_client.Counter
    dispatched: prometheus_client.Histogram
    whole: prometheus_client.Counter


class Numbers(Protocol):
    """Where an attempt's numbers are found."""

    def served(self, model: str, tier: str) -> Served:
        """Return the numbers of a model and tier."""
        ...


class Renamed:
    """Numbers that are told under one name, whatever tier the requests have."""

    def __init__(self, inner: Numbers, tier: str) -> None:
        self._inner = inner
        self._tier = tier

    def served(self, model: str, tier: str) -> Served:
        """Return the numbers of a model."""
        return self._inner.served(model, self._tier)


class Metrics:
    """One worker's numbers, in a registry of their own so that two apps may live in one process."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        labels = ("model", "tier")
        histogram = functools.partial(prometheus_client.Histogram, registry=self.registry)
        counter = functools.partial(prometheus_client.Counter, registry=self.registry)
        gauge = functools.partial(prometheus_client.Gauge, registry=self.registry)
        self._ttft = histogram(
            "forebay_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            labels,
            buckets=_SECONDS,
        )
        self._inter_token = histogram(
            "forebay_inter_token_latency_seconds",
            "Seconds from one token of a stream to the next.",
            labels,
            buckets=_TOKEN_SECONDS,
        )
        self.queue_wait = histogram(
            "forebay_queue_wait_seconds",
            "Seconds from a request's arrival to its dispatch or the end of its wait, by how it ended: "
            "dispatched, or the error's code.",
            (*labels, "reason"),
            buckets=_SECONDS,
        )
        self.ended = counter(
            "forebay_requests",
            "Requests that ended, by how: ok, or the error's code.",
            (*labels, "result"),
        )
        self.refused = counter(
            "forebay_refusals",
            "Requests refused before any work, by the error's code.",
            (*labels, "reason"),
        )
        # Of several processes of one gateway, those that live add up (`multiprocess_mode`).
        gauge = functools.partial(gauge, multiprocess_mode="livesum")
        self.in_flight = gauge("forebay_requests_open", "Requests that wait or run now.")
        self.stale = gauge(
            "forebay_stale_replicas",
            "Serving replicas of which nothing was heard for a second: routed to in turn, under caps.",
            ("model",),
        )
        self.seats = gauge(
            "forebay_seats",
            "Seats of the model's serving replicas, by state: used, free.",
            ("model", "state"),
        )
        self.waiting = gauge("forebay_queue_depth", "Requests that wait for a replica.", labels)
        prompt = counter("forebay_prompt_tokens", "Prompt tokens of ended answers.", labels)
        hits = counter(
            "forebay_prefix_cache_hit_tokens", "Of the prompt tokens, those found cached.", labels
        )
        output = counter("forebay_output_tokens", "Tokens of ended answers.", labels)
        waste = counter(
            "forebay_waste_tokens",
            "Tokens computed again, or for nobody, at the platform's cost.",
            labels,
        )
        self._tokens = (prompt, hits, output, waste)
        self._resumed = counter(
            "forebay_streams_resumed", "Answers that went on at another replica.", labels
        )
        self._no_seat = counter(
            "forebay_seat_refusals",
            "Dispatches that found no seat at their replica; the requests wait on.",
            labels,
        )
        shadow = ("model", "version")
        self.copies = counter(
            "forebay_shadow_copies",
            "Copies for a shadow version, by what came of them: same, differs, answered (not compared word "
            "by word), failed, or dropped and why.",
            (*shadow, "result"),
        )
        self._copy_seconds = histogram(
            "forebay_shadow_seconds",
            "Of copied requests, seconds to the first token and to the end, the caller's and the copy's.",
            (*shadow, "of", "what"),
            buckets=_SECONDS,
        )
        self._copy_tokens = counter(
            "forebay_shadow_output_tokens",
            "Of copied requests, output tokens, the caller's and the copy's.",
            (*shadow, "of"),
        )
        self._served: dict[tuple[str, str], Served] = {}

    def served(self, model: str, tier: str) -> Served:
        """Return the numbers of a model and tier."""
        found = self._served.get((model, tier))
        if found is None:
            found = self._served[model, tier] = Served(
                ttft=self._ttft.labels(model, tier),
                inter_token=self._inter_token.labels(model, tier),
                tokens=Tally(*(each.labels(model, tier) for each in self._tokens)),
                resumed=self._resumed.labels(model, tier),
                no_seat=self._no_seat.labels(model, tier),
                dispatched=self.queue_wait.labels(model, tier, DISPATCHED),
                whole=self.ended.labels(model, tier, OK),
            )
        return found

    def tell(self) -> None:
        """Tell Prometheus the tokens that have come since the last time."""
        for served in self._served.values():
            served.tokens.tell()

    def copied(
        self,
        model: str,
        version: str,
        caller: observed.Fared,
        copy: observed.Fared,
        match: observed.Match,
    ) -> None:
        """Count a copy that a shadow version got."""
        result = "failed" if copy.failed else match.value or "answered"
        self.copies.labels(model, version, result).inc()
        for side, fared in (("caller", caller), ("copy", copy)):
            if fared.failed:
                continue
            times = {"ttft": fared.ttft_ms, "total": fared.total_ms}
            for what, ms in times.items():
                if not ms:
                    continue  # not known
                self._copy_seconds.labels(model, version, side, what).observe(ms / 1000)
            self._copy_tokens.labels(model, version, side).inc(fared.tokens)

    def queues(
        self,
        demand: Iterable[observed.Demand],
        seats: Mapping[str, tuple[int, int]],
        stale: Mapping[str, int],
    ) -> None:
        """Show the queues of the process that owns them.

        Args:
            demand: what waits and runs.
            seats: by model, seats in use and seats free.
            stale: by model, replicas whose statistics are too old to go by.
        """
        for one in demand:
            for tier, count in one.waiting.items():
                self.waiting.labels(one.model, tier).set(count)
        for model, (used, free) in seats.items():
            self.seats.labels(model, "used").set(used)
            self.seats.labels(model, "free").set(free)
            self.stale.labels(model).set(stale.get(model, 0))

    def text(self) -> bytes:
        """Return the exposition text: of all processes of this gateway, whichever of them is asked.

        Where there are several, each keeps its numbers in files of one folder (prometheus_client's
        multiprocess mode, on if the environment names the folder), so no process is asked for another's
        and what a dead one counted stays counted.
        """
        self.tell()
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if not folder:
            return prometheus_client.generate_latest(self.registry)
        every = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(every, folder)  # type: ignore[no-untyped-call]  # its own
        return prometheus_client.generate_latest(every)
