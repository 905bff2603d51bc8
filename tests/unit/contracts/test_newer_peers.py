"""Views of a newer broker: a word that is not known hides no more of the fleet than what it is said of."""

import pytest

from scheduler.contracts import fleet, ids, wire


def replica() -> fleet.Replica:
    spec = fleet.ReplicaSpec("chat", "1", fleet.EngineKind.SIMULATED)
    return fleet.Replica(
        replica_id=ids.ReplicaId("r-1"),
        cluster="c1",
        lease_id=ids.LeaseId("l-1"),
        slot_id=ids.SlotId("l-1.s0"),
        slurm_job_id="4711",
        node="n1",
        spec=spec,
        state=fleet.ReplicaState.SERVING,
        role=fleet.Role.SHARED,
        address="127.0.0.1:1",
        incarnation=2,
    )


@pytest.mark.parametrize("field", ["state", "role"])
def test_a_replica_in_an_unknown_state_takes_nothing_new_and_hides_no_other(field: str) -> None:
    """The view was dropped whole, and with it every later one: a gateway went by its last for ever."""
    known, strange = wire.replica_to_pb(replica()), wire.replica_to_pb(replica())
    strange.report.replica_id = "r-2"
    setattr(strange.report, field, "hovering")
    route = fleet.Route("chat", {"1": 100})
    message = wire.view_to_pb(fleet.FleetView(1, 1, {"chat": route}, ()))
    message.replicas.extend([known, strange])
    one, other = wire.view_from_pb(message, 0.0).replicas
    assert one == replica()
    assert (other.replica_id, other.state) == ("r-2", fleet.ReplicaState.UNKNOWN)


def test_a_replica_with_an_unknown_engine_can_be_asked_and_not_started() -> None:
    message = wire.replica_to_pb(replica())
    message.report.spec.engine = "abacus"
    found = wire.replica_from_pb(message)
    assert (found.state, found.spec.engine) == (fleet.ReplicaState.SERVING, fleet.EngineKind.HTTP)
    assert message.report.spec.engine == "abacus"
    with pytest.raises(ValueError, match="abacus"):
        wire.spec_from_pb(message.report.spec)
