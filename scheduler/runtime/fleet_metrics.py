"""What Prometheus may ask of the fleet as a whole: leases, GPUs, replicas, and what rollovers held twice.

It is read from the registry: the same whichever gateway is asked, and it goes on over changes of leader.
"""

import collections

import prometheus_client
from prometheus_client import core
from prometheus_client import registry as collecting

from scheduler.contracts import fleet
from scheduler.runtime import overlap
from scheduler.runtime.registry import store

PATH_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(registry: store.Registry) -> str:
    """Return the figures in Prometheus's text format; blocks."""
    found = prometheus_client.CollectorRegistry(auto_describe=False)
    found.register(_Fleet(registry))
    return prometheus_client.generate_latest(found).decode()


class _Fleet(collecting.Collector):
    def __init__(self, registry: store.Registry) -> None:
        self._registry = registry

    def collect(self) -> list[core.Metric]:
        held = self._registry.holdings.load()
        leases: collections.Counter[tuple[str, str]] = collections.Counter()
        gpus: collections.Counter[tuple[str, str]] = collections.Counter()
        for lease in held.leases:
            leases[lease.kind, lease.state] += 1
            if lease.state in {fleet.LeaseState.RUNNING, fleet.LeaseState.CLOSING}:
                gpus[lease.kind, lease.state] += lease.hardware.whole(lease.gpus)
        replicas: collections.Counter[tuple[str, str]] = collections.Counter(
            (row.replica.spec.model, row.replica.state) for row in held.replicas
        )
        fact = self._registry.journal.fact(overlap.FACT)
        rolled = fact.body if fact else {}
        twice = core.CounterMetricFamily(
            "forebay_rollover_overlap_gpu_seconds",
            "GPU-seconds that leases and their successors held at once.",
            value=float(rolled.get("overlap_gpu_s", 0.0)),
        )
        replaced = core.CounterMetricFamily(
            "forebay_rollover_leases",
            "Leases that a successor has replaced before their walltime.",
            value=float(rolled.get("leases", 0)),
        )
        broker = self._registry.journal.fact("broker")
        refused = core.CounterMetricFamily(
            "forebay_gateway_reports_refused",
            "Reports of gateways that the leading broker could not take; its log says why.",
            value=float(broker.body.get("reports_refused", 0) if broker else 0),
        )
        return [
            _gauge("forebay_leases", "Leases that are open.", ("kind", "state"), leases),
            _gauge("forebay_lease_gpus", "GPUs that leases hold.", ("kind", "state"), gpus),
            _gauge("forebay_replicas", "Replicas that live.", ("model", "state"), replicas),
            twice,
            replaced,
            refused,
        ]


def _gauge(
    name: str, what: str, labels: tuple[str, str], counts: "collections.Counter[tuple[str, str]]"
) -> core.Metric:
    family = core.GaugeMetricFamily(name, what, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric([str(each) for each in key], count)
    return family
