"""fctl drain, resume, preempt, hold batch and show: wishes in the registry, one-line errors, JSON."""

import dataclasses
import json
from typing import Any

import pytest

from scheduler.contracts import fleet, ids
from scheduler.core import startup
from scheduler.runtime.registry import cordons
from tests.unit.runtime import adminsite
from tests.unit.runtime.adminsite import Site, fctl

site = adminsite.site  # the fixture
VICTIM = "r-000000000001"
LEASE = fleet.Lease(
    ids.LeaseId("l-000000000001"), "alpha", fleet.LeaseKind.SERVE, "forebay",
    fleet.LeaseState.RUNNING, 8, slurm_job_id="7", nodes=("n1",), walltime_s=3600,
    started_us=1_700_000_000_000_000,
)  # fmt: skip


@pytest.fixture
def led(site: Site) -> Site:
    """Return a site whose broker has said something of everything."""
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    site.registry.holdings.save_lease(epoch, LEASE, 1)
    node = {"name": "n1", "state": "idle", "flags": [], "gpus": 4, "gpus_free": 0}
    node |= {"gres_type": "", "partitions": ["serve"], "reason": ""}
    kept = {"name": "patch", "starts_us": 1_700_000_900_000_000, "ends_us": 1_700_009_900_000_000}
    kept |= {"nodes": ["n1", "n2"], "flags": ["MAINT"], "users": ["root"], "accounts": []}
    signal: dict[str, Any] = {
        "serving": 1,
        "coming": 0,
        "waiting": 2,
        "in_flight": 3,
        "oldest_wait_s": 0.5,
    }
    signal |= {"ttft_ms": 120.0, "itl_ms": 9.5, "kv": 0.25, "rate": 1.5, "outlook": 14.0}
    signal |= {"floor": 1, "floor_name": "day", "held_s": 2.0, "seats": 4}
    target = {"model": "chat", "version": "v1", "need": 3, "lent": 0, "reason": "the forecast"}
    hours = [
        {"at_us": 1_700_000_000_000_000 + n * 3_600_000_000, "mean": 9.0 + n, "upper": 14.0 + n,
         "sure": 0.65, "counts": True}
        for n in range(25)
    ]  # fmt: skip
    broker = {"epoch": 1, "address": "h:1", "slurm": "answers", "notes": []}
    site.registry.journal.set_facts(
        epoch,
        2,
        {
            "nodes": {"nodes": [node], "reservations": [kept], "error": ""},
            "broker": broker | {"targets": [{**target, "signal": signal}]},
            "forecast": {"models": [{"model": "chat", "days": 14, "held_s": 2.0, "hours": hours}]},
            "starts": {
                "chat v1": {
                    "start_s": 4.0, "cold": [{}, {}],
                    "phases_s": dict.fromkeys(startup.PHASES, 0.5) | {"load": 1.5},
                }
            },
        },
    )  # fmt: skip
    return site


def test_drain_and_resume_of_leases_and_nodes_are_wishes(led: Site) -> None:
    assert fctl(led, "drain", LEASE.lease_id, "fan", "noise") == (
        0,
        f"{LEASE.lease_id}: draining\n",
        "",
    )
    standing = led.registry.wishes.read()
    assert standing.drains[LEASE.lease_id].told() == "root: fan noise"
    assert "drained by root: fan noise" in fctl(led, "show", "leases")[1]
    assert f"{LEASE.lease_id} drains, by root: fan noise" in fctl(led, "explain")[1]
    assert fctl(led, "resume", LEASE.lease_id)[0] == 0
    assert fctl(led, "drain", "n1")[0] == 0
    assert "n1" in led.registry.cordons.all()
    assert fctl(led, "resume", "n1") == (0, "n1: used again\n", "")
    assert led.registry.wishes.read().drains == {}
    assert led.registry.cordons.all() == {}


def test_several_are_taken_as_scontrol_takes_them(led: Site) -> None:
    """What `fctl drain n1,n2` had drained, `fctl resume n1,n2` called no such thing."""
    assert fctl(led, "drain", "-y", f"{LEASE.lease_id},n1", "paint") == (
        0,
        f"{LEASE.lease_id}: draining\nn1: draining\n",
        "",
    )
    code, out, err = fctl(led, "resume", f"{LEASE.lease_id},n9,n1", "--json")
    told = json.loads(out)  # one document
    assert (code, sorted(told["done"])) == (1, sorted([LEASE.lease_id, "n1"]))
    (fault,) = told["errors"]
    assert fault.startswith("n9: neither drained nor cordoned")
    assert err == f"fctl: error: {fault}\n"
    assert led.registry.wishes.read().drains == {}
    code, out, _ = fctl(led, "hold", "chat,nope")
    assert (code, out) == (1, "chat: batch held\n")
    assert fctl(led, "cordon", "n[1-1]", "paint", "--json")[0] == 0
    code, out, _ = fctl(led, "show", "nodes", "n1", "--json")
    assert [node["node"] for node in json.loads(out)] == ["n1"]
    assert "n8: no such thing" in fctl(led, "show", "nodes", "n1,n8")[2]


def test_hold_batch_everywhere(led: Site) -> None:
    assert fctl(led, "hold", "batch") == (0, "batch: held everywhere\n", "")
    assert "batch is held everywhere by root" in fctl(led, "explain")[1]
    code, out, _ = fctl(led, "release", "batch", "--json")
    assert (code, json.loads(out)) == (0, {"batch": "released"})
    assert led.registry.wishes.read().batch is None


def test_preempt_says_what_it_would_do_and_does_nothing_in_a_dry_run(led: Site) -> None:
    code, out, _ = fctl(led, "preempt", VICTIM, "--dry-run")
    assert code == 0
    assert "would give 4 GPUs of lease l-000000000001 on n1" in out
    assert "streams: 1 go on at 1 other replicas with 1 free seats" in out
    assert "batch lines: 2 go back to their jobs" in out
    assert "another one is started" in out
    assert out.endswith("nothing done (--dry-run)\n")
    assert led.registry.wishes.read().preempts == {}
    code, _, err = fctl(led, "preempt", VICTIM)
    assert (code, "Nobody to ask here" in err) == (1, True)
    code, out, _ = fctl(led, "preempt", "-y", "--json", VICTIM, "disk", "errors")
    told = json.loads(out)
    assert (code, told["done"], told["streams"], told["batch_lines"]) == (0, True, 1, 2)
    assert led.registry.wishes.read().preempts[VICTIM].reason == "disk errors"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["drain", "n9"], "n9: no such node; see `fctl show nodes`"),
        (["drain", "l-99"], "l-99: no such lease"),
        (["drain", "r-99"], "r-99: no such replica"),
        (["drain", "n[1-0]"], "n[1-0]"),
        (["resume", "l-99"], "l-99: does not drain"),
        (["resume", "n1"], "n1: neither drained nor cordoned"),
        (["resume", VICTIM], "a replica that drains does not come back"),
        (["preempt", "r-99", "--dry-run"], "r-99: no such replica"),
        (["release", "batch"], "batch: not held"),
        (["show", "replica", "r-99"], "r-99: no such replica"),
        (["show", "forecast", "nope"], "nope: no such thing"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(led: Site, argv: list[str], message: str) -> None:
    code, out, err = fctl(led, *argv)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("fctl: error: ")
    assert message in err


def test_show_replica_tells_its_start_beside_the_usual_one(led: Site) -> None:
    view = led.source.view()
    assert view is not None
    took = dict.fromkeys(startup.PHASES, 0.25) | {"stage": 3.0}
    first = dataclasses.replace(view.replicas[0], phases_s=took, reason="died\nlast words")
    first = dataclasses.replace(first, nodes=("n1", "n2"))
    led.source.set(dataclasses.replace(view, replicas=(first, *view.replicas[1:])))
    code, out, _ = fctl(led, "show", "replica", VICTIM)
    assert code == 0
    assert "start: queue 0.2 s, allocate 0.2 s, stage 3.0 s" in out
    assert "usually: queue 0.5 s" in out
    assert "4.0 s in all, by 2 starts" in out
    assert "   reason=last words\n" in out
    assert " node=n1,n2 " in out
    told = json.loads(fctl(led, "show", "replica", VICTIM, "--json")[1])
    assert told["phases_s"]["stage"] == 3.0
    assert "secret_file" not in told["replica"]


def test_what_is_expected_is_shown(led: Site) -> None:
    assert "15.00/s (65% sure)" in fctl(led, "show", "models")[1]
    lines = fctl(led, "show", "forecast")[1].splitlines()
    assert len(lines) == 2
    assert len(fctl(led, "show", "forecast", "chat")[1].splitlines()) == 26
    assert "wants" in fctl(led, "show", "plan")[1]
    explained = fctl(led, "explain", "chat")[1]
    assert "14.00 requests/s possible by the forecast, floor 1 by schedule day" in explained
    assert "2 waiting (0.5 s), 3 in flight" in explained


def test_maintenance_is_shown_with_schedules_and_nodes(led: Site) -> None:
    out = fctl(led, "show", "schedules")[1]
    assert "patch  maintenance  n[1-2]" in out
    assert "patch from" in fctl(led, "show", "node", "n1")[1]
    told = json.loads(fctl(led, "show", "schedules", "--json")[1])
    assert told["reservations"][0]["name"] == "patch"


async def test_changes_need_an_admin(led: Site) -> None:
    led.caller = adminsite.USER
    paths = ("batch/hold", "leases/l-1/drain", "nodes/n1/drain", "replicas/r-1/preempt")
    for path in paths:
        assert (await led.call("POST", f"/admin/{path}")).status_code == 403


def test_a_drained_node_stays_cordoned_until_it_is_resumed(led: Site) -> None:
    """Without its cordon leases would be asked for there, drained, given back and asked for again."""
    assert fctl(led, "drain", "n1", "fan")[0] == 0
    code, _, err = fctl(led, "uncordon", "n1")
    assert (code, "fctl resume n1" in err) == (1, True)
    # The leader has seen its agent go silent before it heard of the drain.
    lost = cordons.Cordon("n1", "agent silent", "forebay", 5, 10_000_000)
    led.registry.cordons.add(lost, epoch=led.registry.lead.epoch())
    assert led.registry.cordons.all()["n1"].until_us == 0
    assert fctl(led, "resume", "n1")[0] == 0
    assert led.registry.cordons.all() == {}
    led.registry.cordons.add(lost, epoch=led.registry.lead.epoch())
    assert led.registry.cordons.all()["n1"] == lost
