"""What a gateway is given by the composition root."""

import dataclasses
from collections.abc import Callable

from prometheus_client import registry

from gateway import settings
from gateway.admission import place as places
from scheduler.contracts import clock, ports, quota, tracing, usage


@dataclasses.dataclass(frozen=True, slots=True)
class Dependencies:
    """The ports behind a gateway.

    Attributes:
        settings: the [gateway] table.
        authenticator: who a credential is; `gateway.auth.Credentials` is the real one.
        fleet: the newest view of replicas and routes, and where demand is told.
        sink: where usage rows go.
        clock: this process's time.
        cluster: the cluster's name, as usage rows carry it.
        tracer: where spans go.
        quotas: what teams, users and keys may use; asked by the process that owns the queues.
        place: where admission happens; None: in this process, for itself alone.
        collectors: what else Prometheus may ask of this process.
        job_ended: whether a batch job's team has ended it (cancelled, or past its limits), by its id; blocks,
            may raise. None: nobody can tell, and the platform pays for what runners leave.
    """

    settings: settings.GatewaySettings
    authenticator: ports.Authenticator
    fleet: ports.FleetSource
    sink: usage.UsageSink
    clock: clock.Clock
    cluster: str
    tracer: tracing.Tracer = tracing.NoTracer()  # noqa: RUF009 - has no state
    quotas: quota.Quotas = quota.Unlimited()  # noqa: RUF009 - has no state
    place: places.Place | None = None
    collectors: tuple[registry.Collector, ...] = ()
    job_ended: Callable[[int], bool] | None = None
