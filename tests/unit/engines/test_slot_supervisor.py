"""A slot's supervisor and a broker of a newer release."""

import asyncio
import dataclasses
from pathlib import Path

from engines import private
from engines.slot import supervisor
from scheduler.contracts import clock, fleet
from scheduler.contracts.v1 import control_pb2 as pb
from tests.unit.engines import keeping


async def test_what_only_a_newer_broker_knows_keeps_a_slot_from_nothing_else(
    tmp_path: Path,
) -> None:
    """One such word left all undone: no other replica was started or stopped, and the slot stayed open."""
    parked = dataclasses.replace(keeping.WISH, asleep=True)
    async with keeping.play(tmp_path, wish=parked) as other:
        given = other.one._means
        token = tmp_path / "token"
        private.write(token, "secret")
        told = dataclasses.replace(given.slot, token_file=str(token))
        slot = supervisor.Supervisor(told, clock.SystemClock())
        slot._means, slot._state = given, "ready"
        desired = pb.SlotDesired(epoch=1, slot_id=told.slot_id)
        odd = desired.replicas.add(replica_id="r-odd", run=True, role="shared")
        odd.spec.engine = "abacus"
        good = desired.replicas.add(replica_id="r-good", run=True, asleep=True, role="referee")
        good.spec.engine = "simulated"
        slot.take(desired)
        assert slot._keepers.keys() == {"r-good"}
        assert slot._keepers["r-good"]._wish.role is fleet.Role.INTERACTIVE
        desired.close = True
        slot.take(desired)
        assert slot.report().state == "closing"
        await asyncio.gather(*slot._tasks.values())
        assert slot._keepers["r-good"].final
