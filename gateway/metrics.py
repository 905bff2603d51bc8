"""What Prometheus may ask of a gateway."""

import prometheus_client

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One worker's numbers, in a registry of their own so that two apps may live in one process."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        labels = ("model", "tier")
        self.ttft = prometheus_client.Histogram(
            "forebay_ttft_seconds",
            "Seconds from a request's arrival to its first token.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_wait = prometheus_client.Histogram(
            "forebay_queue_wait_seconds",
            "Seconds from a request's arrival to its dispatch.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ended = prometheus_client.Counter(
            "forebay_requests",
            "Requests that ended, by how: ok, or the error's code.",
            (*labels, "result"),
            registry=self.registry,
        )
        self.in_flight = prometheus_client.Gauge(
            "forebay_requests_open",
            "Requests that wait or run now.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return the exposition text."""
        return prometheus_client.generate_latest(self.registry)
