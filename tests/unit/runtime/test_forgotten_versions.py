"""Versions that nobody declares any more leave the registry, and with it each plan."""

from scheduler.contracts import fleet, ids
from scheduler.core import snapshot
from scheduler.runtime.registry import holdings
from tests.unit.runtime import adminsite
from tests.unit.runtime.declaring import done

site = adminsite.site  # the fixture
LEASE = fleet.Lease(
    ids.LeaseId("l-1"), "alpha", fleet.LeaseKind.SERVE, "t", fleet.LeaseState.RUNNING, 4
)
SLOT = snapshot.Slot(ids.SlotId("l-1.s0"), LEASE.lease_id, 4)


def test_a_version_that_was_taken_away_is_forgotten_once_no_replica_is_of_it(
    site: adminsite.Site,
) -> None:
    """Each version that ever was stayed in every plan, every target and every second's reading."""
    registry = site.registry
    epoch = registry.lead.take("me", 0, 1 << 50)
    assert epoch is not None

    def known() -> set[str]:
        return {
            one.spec.version for one in registry.catalog.deployments() if one.spec.model == "talk"
        }

    text = "models: {talk: {replicas: 1, versions: {v1: {engine: simulated}}, route: {versions: {v1: 100}}}}"
    done(site, "apply -f -", text)
    done(site, "version add talk old engine=simulated replicas=0")
    (old,) = (one for one in registry.catalog.deployments() if one.spec.version == "old")
    done(site, "version rm talk old")
    assert known() == {"v1", "old"}
    registry.holdings.save_lease(epoch, LEASE, 1)

    def row(state: fleet.ReplicaState) -> holdings.ReplicaRow:
        replica = fleet.Replica(
            ids.ReplicaId("r-1"), "alpha", LEASE.lease_id, SLOT.slot_id, "7", "n1", old.spec, state,
            fleet.Role.SHARED,
        )  # fmt: skip
        return holdings.ReplicaRow(replica, True, fleet.Role.SHARED, 1.0, False, 1)

    for state, gone in ((fleet.ReplicaState.SERVING, 0), (fleet.ReplicaState.STOPPED, 1)):
        registry.holdings.save_wishes(epoch, LEASE.lease_id, 1, slots=[SLOT], wishes=[row(state)])
        before = registry.declared.serial()
        assert registry.declared.forget(epoch) == gone
        assert registry.declared.serial() == before + gone, "who watches the catalog hears of it"
    assert known() == {"v1"}
    done(site, "version add talk old engine=simulated replicas=0")
    assert known() == {"v1", "old"}
    assert registry.declared.forget(epoch) == 0
