"""Messages of a newer peer: a word that is not known must not end the link they come on."""

from scheduler.contracts import fleet, loras, observed, wire, wire_told
from scheduler.contracts.v1 import control_pb2 as pb


def test_an_adapter_in_an_unknown_state_is_left_out() -> None:
    message = pb.ReplicaReport(
        takes_adapters=True,
        adapters=[
            pb.HeldAdapter(name="law", path="/law", state="loaded"),
            pb.HeldAdapter(name="tax", path="/tax", state="hovering"),
        ],
    )
    assert wire.adapters_from_pb(message) == (
        loras.HeldAdapter("law", "/law", loras.AdapterState.LOADED),
    )


def test_an_unknown_match_of_a_copy_is_unknown() -> None:
    fared = observed.Fared(failed=False, ttft_ms=1.0, itl_ms=2.0, total_ms=3.0, tokens=4)
    same = observed.Copied("chat", "v1", "v2", fared, fared, observed.Match.SAME)
    message = wire_told.copied_to_pb(same)
    assert wire_told.copied_from_pb(message) == same
    message.match = "rhymes"
    assert wire_told.copied_from_pb(message).match is observed.Match.UNKNOWN


def test_versions_that_wake_are_told_to_older_peers_and_understood_from_them() -> None:
    route = fleet.Route("chat", {"v1": 50, "v2": 50, "v3": 0}, wakes=("v1",))
    message = wire.view_to_pb(fleet.FleetView(1, 1, {"chat": route}, ()))
    assert message.routes[0].wakes
    assert wire.view_from_pb(message, 0.0).routes["chat"] == route
    del message.routes[0].waking[:]  # as an older broker writes it
    assert wire.view_from_pb(message, 0.0).routes["chat"].wakes == ("v1", "v2")


def test_demand_of_versions_and_adapters_comes_as_it_was_sent() -> None:
    demand = observed.Demand(
        "chat",
        {"interactive": 3},
        {"batch": 2},
        1.5,
        (20.0,),
        arrived=7,
        arrived_standard=2,
        adapters={"law": observed.AdapterDemand(1, 0.5, 4, 2)},
        versions={"long": observed.VersionDemand(2, 1, 0.25, 5)},
    )
    assert wire_told.demand_from_pb(wire_told.demand_to_pb(demand)) == demand
