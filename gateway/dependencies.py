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
        job_fate: why the runner of a batch job leaves its lines, by the job's id: `CANCELLED` or `EXPIRED`
            where its team has ended it, `PREEMPTED` where it waits again, else `CLIENT_GONE`; blocks, may
            raise. None: nobody can tell, and the platform pays for what runners leave.
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
    job_fate: Callable[[int], usage.Outcome] | None = None
