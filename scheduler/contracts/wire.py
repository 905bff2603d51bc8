"""The control links' wire form: records to messages and back, and the options of both ends.

Apart from the records, so that those load where gRPC is not installed.
"""

import json

from scheduler.contracts import fleet, ids
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
        dedicated=spec.dedicated,
        itl_slo_ms=spec.itl_slo_ms,
        weights_digest=spec.weights_digest,
        tuning_json=json.dumps(dict(spec.tuning), sort_keys=True) if spec.tuning else "",
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
        dedicated=message.dedicated,
        itl_slo_ms=message.itl_slo_ms if message.HasField("itl_slo_ms") else 25.0,
        weights_digest=message.weights_digest,
        tuning=json.loads(message.tuning_json or "{}"),
    )


def stats_to_pb(stats: fleet.ReplicaStats) -> pb.ReplicaStats:
    """Return stats' message."""
    return pb.ReplicaStats(
        at_us=stats.at_us,
        seats=stats.seats,
        interactive=stats.interactive,
        batch=stats.batch,
        kv_blocks=stats.kv_blocks,
        kv_free=stats.kv_free,
        output_tokens_total=stats.output_tokens_total,
        preempted_total=stats.preempted_total,
        reclaim_ms=stats.reclaim_ms,
        step_ms=stats.step_ms,
        kv_block_tokens=stats.kv_block_tokens,
        queued=stats.queued,
        ttft_ms=stats.ttft_ms,
        tokens_per_s=stats.tokens_per_s,
        batch_room=stats.batch_room,
    )


def stats_from_pb(message: pb.ReplicaStats) -> fleet.ReplicaStats:
    """Return a message's stats."""
    return fleet.ReplicaStats(
        at_us=message.at_us,
        seats=message.seats,
        interactive=message.interactive,
        batch=message.batch,
        kv_blocks=message.kv_blocks,
        kv_free=message.kv_free,
        output_tokens_total=message.output_tokens_total,
        preempted_total=message.preempted_total,
        reclaim_ms=tuple(message.reclaim_ms),
        step_ms=message.step_ms,
        kv_block_tokens=message.kv_block_tokens,
        queued=message.queued,
        ttft_ms=message.ttft_ms,
        tokens_per_s=message.tokens_per_s,
        batch_room=message.batch_room if message.HasField("batch_room") else -1,
    )


def replica_to_pb(replica: fleet.Replica) -> pb.Replica:
    """Return a replica's message."""
    return pb.Replica(
        report=pb.ReplicaReport(
            replica_id=replica.replica_id,
            state=replica.state.value,
            role=replica.role.value,
            address=replica.address,
            incarnation=replica.incarnation,
            secret_file=replica.secret_file,
            stats=stats_to_pb(replica.stats) if replica.stats is not None else None,
            reason=replica.reason,
            phases_s=dict(replica.phases_s),
            staging=replica.staging,
            spec=spec_to_pb(replica.spec),
        ),
        cluster=replica.cluster,
        lease_id=replica.lease_id,
        slot_id=replica.slot_id,
        slurm_job_id=replica.slurm_job_id,
        node=replica.node,
    )


def replica_from_pb(message: pb.Replica) -> fleet.Replica:
    """Return a message's replica."""
    report = message.report
    return fleet.Replica(
        replica_id=ids.ReplicaId(report.replica_id),
        cluster=message.cluster,
        lease_id=ids.LeaseId(message.lease_id),
        slot_id=ids.SlotId(message.slot_id),
        slurm_job_id=message.slurm_job_id,
        node=message.node,
        spec=spec_from_pb(report.spec),
        state=fleet.ReplicaState(report.state),
        role=fleet.Role(report.role),
        address=report.address,
        incarnation=report.incarnation,
        secret_file=report.secret_file,
        stats=stats_from_pb(report.stats) if report.HasField("stats") else None,
        reason=report.reason,
        phases_s=dict(report.phases_s),
        staging=report.staging,
    )


def view_to_pb(view: fleet.FleetView) -> pb.FleetView:
    """Return a view's message."""
    return pb.FleetView(
        epoch=view.epoch,
        revision=view.revision,
        routes=[
            pb.Route(
                model=route.model,
                weights=dict(route.weights),
                max_context=route.max_context,
                adapters=route.adapters,
                cluster=route.cluster,
                callers=route.callers,
                tiers=route.tiers,
                adapter_teams=dict(route.adapter_teams),
                shadow=route.shadow,
                shadow_percent=route.shadow_percent,
            )
            for route in view.routes.values()
        ],
        replicas=[replica_to_pb(replica) for replica in view.replicas],
        gateways=[
            pb.Gateway(gateway_id=one.gateway_id, admission=one.admission) for one in view.gateways
        ],
    )


def view_from_pb(message: pb.FleetView, received: float) -> fleet.FleetView:
    """Return a message's view, received at monotonic second ``received``."""
    return fleet.FleetView(
        epoch=message.epoch,
        revision=message.revision,
        routes={
            route.model: fleet.Route(
                model=route.model,
                weights=dict(route.weights),
                max_context=route.max_context,
                adapters=tuple(route.adapters),
                cluster=route.cluster,
                callers=tuple(route.callers),
                tiers=tuple(route.tiers),
                adapter_teams=dict(route.adapter_teams),
                shadow=route.shadow,
                shadow_percent=route.shadow_percent,
            )
            for route in message.routes
        },
        replicas=tuple(replica_from_pb(replica) for replica in message.replicas),
        received=received,
        gateways=tuple(fleet.Gateway(one.gateway_id, one.admission) for one in message.gateways),
    )


def demand_to_pb(demand: fleet.Demand) -> pb.Demand:
    """Return demand's message."""
    return pb.Demand(
        model=demand.model,
        waiting=dict(demand.waiting),
        in_flight=dict(demand.in_flight),
        oldest_wait_s=demand.oldest_wait_s,
        ttft_ms=demand.ttft_ms,
        arrived=demand.arrived,
    )


def demand_from_pb(message: pb.Demand) -> fleet.Demand:
    """Return a message's demand."""
    return fleet.Demand(
        model=message.model,
        waiting=dict(message.waiting),
        in_flight=dict(message.in_flight),
        oldest_wait_s=message.oldest_wait_s,
        ttft_ms=tuple(message.ttft_ms),
        arrived=message.arrived,
    )


def trial_to_pb(trial: fleet.Trial) -> pb.Trial:
    """Return a trial's message."""
    return pb.Trial(
        model=trial.model,
        version=trial.version,
        failed=trial.failed,
        ttft_ms=trial.ttft_ms,
        itl_ms=trial.itl_ms,
    )


def trial_from_pb(message: pb.Trial) -> fleet.Trial:
    """Return a message's trial."""
    return fleet.Trial(
        message.model, message.version, message.failed, message.ttft_ms, message.itl_ms
    )
