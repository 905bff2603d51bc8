"""Every word of fctl and finfo on a whole installation: what it shows, and what it does under streams."""

import datetime
import io
import json
import subprocess
import time

import pytest

from forebay import api
from scheduler.core import startup
from scheduler.runtime import commands, finfo, show_commands
from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
TOKENS = 150  # three seconds of a stream


def fctl(house: running.Running, *words: str, code: int = 0) -> str:
    """Run fctl in this process against the installation; return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    env = house.env | {"FOREBAY_API_KEY": house.admin_key}
    ended = commands.fctl(list(words), api=api.connect(env), out=out, err=err)
    assert ended == code, f"fctl {' '.join(words)}: {ended}: {err.getvalue()}"
    assert err.getvalue().count("\n") == (1 if code else 0)
    return out.getvalue() + err.getvalue()


def serving(house: running.Running) -> list[str]:
    return [each["replica_id"] for each in house.replicas()]


def test_everything_is_shown_as_a_table_lines_and_json(house: running.Running) -> None:
    for kind in show_commands.KINDS:
        fctl(house, "show", kind)
        fctl(house, "show", kind, "-o")
        json.loads(fctl(house, "show", kind, "--json"))
    replica = serving(house)[0]
    told = json.loads(fctl(house, "show", "replica", replica, "--json"))
    assert {"queue", "allocate", "warm-up"} <= told["phases_s"].keys() <= set(startup.PHASES)
    assert sum(told["phases_s"].values()) > 0
    assert "start: queue" in fctl(house, "show", "replica", replica)
    explained = fctl(house, "explain", running.MODEL)
    assert f"{running.MODEL} v1: {running.REPLICAS} wanted, {running.REPLICAS} serving" in explained
    assert "broker: epoch" in explained
    json.loads(fctl(house, "explain", "--json"))
    done = house.command("finfo", "-s")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert ["interactive", running.MODEL, "up", "2/0/0/2"] in [row[:4] for row in rows]
    out = io.StringIO()
    env = house.env | {"FOREBAY_API_KEY": house.admin_key}
    assert finfo.finfo(["-N", "--json"], api=api.connect(env), out=out, err=out) == 0
    assert {each["state"] for each in json.loads(out.getvalue())["replicas"]} == {"serving"}


def test_bad_input_is_refused_in_one_line(house: running.Running) -> None:
    for words, said in (
        (("show", "cows"), "invalid choice"),
        (("show", "replica", "r-nope"), "no such replica"),
        (("drain", "nowhere"), "no such node"),
        (("resume", "l-nope"), "does not drain"),
        (("preempt", "r-nope", "--dry-run"), "no such replica"),
        (("update", f"model={running.MODEL}", "replicas=many"), "a number of replicas, or auto"),
        (("release", "batch"), "not held"),
    ):
        assert said in fctl(house, *words, code=1)


def test_a_lease_and_a_replica_are_taken_away_under_streams_that_go_on(
    house: running.Running, key: str
) -> None:
    """Drain moves streams when others serve; preempt moves them at once; neither cuts one."""
    streams = [clients.Stream(house, key, TOKENS).begun() for _ in range(4)]
    old = house.leases()[0]["lease_id"]
    fctl(house, "drain", old, "fan", "noise")
    assert "fan noise" in fctl(house, "show", "leases", "-o")
    waiting.eventually(
        lambda: old not in {lease["lease_id"] for lease in house.leases()}, "the lease given back"
    )
    assert [stream.ended().whole for stream in streams] == [True] * 4
    house.settled()
    streams = [clients.Stream(house, key, TOKENS).begun() for _ in range(4)]
    victim = next(each for each in house.replicas() if each["stats"]["interactive"])
    victim_id = victim["replica_id"]
    told = json.loads(fctl(house, "preempt", victim_id, "--dry-run", "--json"))
    assert (told["done"], told["streams"] > 0, told["others_serving"]) == (False, True, 1)
    assert victim_id in serving(house)
    fctl(house, "preempt", "-y", victim_id, "disk", "errors")
    waiting.eventually(lambda: victim_id not in serving(house), "the replica gone")
    assert [stream.ended().whole for stream in streams] == [True] * 4
    house.settled()


def test_nodes_batch_and_numbers_are_held_and_let_go(house: running.Running) -> None:
    fctl(house, "cordon", "n4", "to", "be", "mended")
    assert "to be mended" in fctl(house, "show", "node", "n4")
    fctl(house, "uncordon", "n4")
    fctl(house, "drain", "n4", "again")
    assert "n4 drains" in fctl(house, "explain")
    fctl(house, "resume", "n4")
    fctl(house, "hold", "batch")
    waiting.eventually(
        lambda: {each["role"] for each in house.replicas()} == {"interactive"}, "batch held"
    )
    fctl(house, "release", "batch")
    fctl(house, "update", f"model={running.MODEL}", f"replicas={running.REPLICAS}")
    fctl(house, "resume", running.MODEL)


def test_an_admins_reservation_is_shown_with_nodes_and_schedules(house: running.Running) -> None:
    begins = datetime.datetime.fromtimestamp(time.time() + 7 * 86_400, datetime.UTC)
    _scontrol(
        house, "create", "reservation", "ReservationName=fctl-test", "Nodes=n4", "Users=root",
        f"StartTime={begins:%Y-%m-%dT%H:%M:%S}", "Duration=60", "Flags=MAINT",
    )  # fmt: skip
    try:
        waiting.eventually(
            lambda: "fctl-test" in fctl(house, "show", "schedules"), "the reservation in schedules"
        )
        assert "fctl-test from" in fctl(house, "show", "node", "n4")
    finally:
        _scontrol(house, "delete", "ReservationName=fctl-test")


def _scontrol(house: running.Running, *words: str) -> None:
    env = {**house.env, "TZ": "UTC"}
    subprocess.run(["scontrol", *words], check=True, capture_output=True, env=env)
