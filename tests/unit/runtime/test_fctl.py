"""fctl and finfo: tables, JSON, errors of one line, and wishes that are kept."""

import io
import json
from typing import Any

import pytest

from scheduler.runtime import (
    commands,
    show_commands,
)
from tests.unit.runtime import adminsite

site = adminsite.site  # the fixture


def test_fctl_key_create_shows_a_working_token_once(site: adminsite.Site) -> None:
    code, out, err = adminsite.fctl(
        site, "key", "create", "--team", "physics", "--user", "ada", "--expires", "now+30days"
    )
    assert (code, err) == (0, "")
    token = out.splitlines()[0]
    key = site.registry.keys.find(token)
    assert key.expires_us > 0
    assert "shown once" in out
    code, out, err = adminsite.fctl(site, "key", "list")
    assert key.key_id in out
    assert token not in out
    code, out, err = adminsite.fctl(site, "key", "revoke", key.key_id)
    assert (code, out) == (0, f"{key.key_id}: revoked\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["key", "create", "--team", "p", "--user", "u", "--tiers", "gold"], "no such tier"),
        (["key", "create", "--team", "p", "--user", "u", "--expires", "9pm"], "--expires"),
        (["key", "create", "--team", "p"], "--user"),
        (["show", "cows"], "invalid choice"),
        (["update", "replicas=3"], "write model=NAME"),
        (["update", "model=chat", "replicas=many"], "a number of replicas, or auto"),
        (["update", "model=chat", "replicas=٣"], "a number of replicas, or auto"),
        (["scale", "", "1"], "must not be empty"),
        (["key", "revoke", ""], "must not be empty"),
        (["key", "create", "--team", "t", "--user", "u", "--models", ",,"], "names no model"),
        (["close-month", "2026-13"], "invalid month '2026-13'"),
        (["update", "model=chat", "color=red"], "unknown key color"),
        (["update", "model=chat", "batch=maybe"], "hold or release"),
        (["scale", "nope", "1"], "not deployed here"),
        (["doctor"], "run it on a host that reaches Slurm"),
        (["drain", "r-1,r-2"], "Nobody to ask here"),
    ],
)
def test_fctl_errors_are_one_line(site: adminsite.Site, argv: list[str], message: str) -> None:
    code, out, err = adminsite.fctl(site, *argv)
    assert code == 1
    assert out == ""
    assert err.startswith("fctl: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_fctl_changes_become_wishes(site: adminsite.Site) -> None:
    assert adminsite.fctl(site, "scale", "chat", "3") == (0, "chat: 3 replicas wanted\n", "")
    assert adminsite.fctl(site, "hold", "chat")[0] == 0
    chat = site.registry.catalog.deployments()[0]
    assert (chat.replicas, chat.hold_batch) == (3, True)
    code, _, _ = adminsite.fctl(site, "update", "model=chat", "replicas=1", "batch=release")
    chat = site.registry.catalog.deployments()[0]
    assert (code, chat.replicas, chat.hold_batch) == (0, 1, False)


def test_fctl_show_prints_tables_lines_and_json(site: adminsite.Site) -> None:
    code, out, _ = adminsite.fctl(site, "show", "replicas")
    assert code == 0
    assert out.splitlines()[0].split() == [
        *(
            "REPLICA",
            "MODEL",
            "VERSION",
            "STATE",
            "ROLE",
            "SEATS",
            "GPUS",
            "LEASE",
            "NODE",
            "REASON",
        )
    ]
    assert "1+2/4" in out
    code, out, _ = adminsite.fctl(site, "show", "models", "-o")
    assert out.splitlines()[0].startswith("model=chat version=v1 wanted=1 lent=0 serving=2")
    code, out, _ = adminsite.fctl(site, "show", "models", "--json")
    assert json.loads(out)["models"][0]["model"] == "chat"
    code, out, _ = adminsite.fctl(site, "show", "replicas", "r-000000000002")
    assert len(out.splitlines()) == 2
    code, out, err = adminsite.fctl(site, "show", "replicas", "nope")
    assert (code, "no such thing" in err) == (1, True)
    for kind in show_commands.KINDS:
        assert adminsite.fctl(site, "show", kind)[0] == 0


def test_fctl_explain_tells_the_last_plan_and_why(site: adminsite.Site) -> None:
    epoch = site.registry.lead.take("me", 0, 10)
    assert epoch is not None
    plan = {"actions": [{"act": "SetRole", "what": "r-1: rung 1", "outcome": "done"}], "notes": []}
    site.registry.journal.add_plan(epoch, 5, plan, keep=3)
    told: dict[str, Any] = {"epoch": 1, "address": "h:1", "slurm": "answers"}
    told["notes"] = ["chat: waiting"]
    told["targets"] = [
        {"model": "chat", "version": "v1", "need": 3, "lent": 1, "reason": "14.0 requests/s"},
        {"model": "code", "version": "v1", "need": 2, "lent": 0, "reason": "floor 2"},
    ]
    rolled = {"leases": 3, "overlap_gpu_s": 5400.0, "since_us": 0}
    site.registry.journal.set_facts(epoch, 6, {"broker": told, "rollover": rolled})
    code, out, _ = adminsite.fctl(site, "explain", "chat")
    assert code == 0
    assert "rollover: 3 leases replaced since" in out
    assert "1.50 GPU-hours of overlap" in out
    assert "  3 needed, 1 lent to batch: 14.0 requests/s" in out
    assert "code v1" not in out
    wants = adminsite.fctl(site, "show", "plan")[1].splitlines()[1]
    assert "wants" in wants
    assert "chat v1: 3 needed, 1 lent to batch" in wants
    assert "14.0 requests/s" in wants
    assert "broker: epoch 1 at h:1, Slurm answers" in out
    assert "chat v1: 1 wanted, 2 serving, 1 starting" in out
    assert "note: chat: waiting" in out
    assert "SetRole r-1: rung 1 [done]" in out


def test_fctl_doctor_is_the_one_that_was_given(site: adminsite.Site) -> None:
    out, err = io.StringIO(), io.StringIO()

    def doctor(stream: Any, as_json: bool) -> int:
        assert not as_json
        print("KillWait=30: fine", file=stream)
        return 3

    code = commands.fctl(
        ["doctor"], api=adminsite.SiteApi(site), out=out, err=err, here=commands.Here(doctor=doctor)
    )
    assert (code, out.getvalue()) == (3, "KillWait=30: fine\n")


def test_finfo_has_sinfos_shape_with_tiers(site: adminsite.Site) -> None:
    code, lines, _ = adminsite.info(site)
    assert code == 0
    assert lines[0].split() == [
        "TIER",
        "MODEL",
        "AVAIL",
        "REPLICAS",
        "SEATS",
        "GPUS",
        "STATE",
        "NODELIST",
    ]
    rows = [line.split() for line in lines[1:]]
    assert ["interactive", "chat", "up", "2", "8", "8", "serving", "n[1-2]"] in rows
    assert ["batch", "chat", "up", "1", "4", "4", "serving", "n1"] in rows  # n2 is interactive now
    assert ["standard", "code", "down", "0", "0", "0", "absent"] in rows


def test_finfo_options(site: adminsite.Site) -> None:
    _, lines, _ = adminsite.info(site, "-s", "-p", "interactive", "-h")
    assert lines[0].split() == ["interactive", "chat", "up", "2/1/0/3", "12", "n[1-3]"]
    _, lines, _ = adminsite.info(site, "-N", "-t", "starting", "-p", "batch", "-h")
    assert [line.split()[0] for line in lines] == ["n3"]
    _, lines, _ = adminsite.info(site, "-o", "%P|%5m|%.4D", "-t", "starting", "-p", "batch")
    assert lines == ["TIER|MODEL|REPL", "batch|chat |   1"]
    _, lines, _ = adminsite.info(site, "-N", "-h", "-n", "n[2-3],n9", "-o", "%N")
    assert set(lines) == {"n2", "n3"}
    code, _, err = adminsite.info(site, "-o", "%Q")
    assert (code, "no such column" in err) == (1, True)
    code, lines, err = adminsite.info(site, "-t", "bogus")
    assert (code, lines) == (1, [])
    assert "-t bogus: no such thing; known are starting, warm" in err
    assert adminsite.info(site, "-p", "interactive,gold")[0] == 1
    _, lines, _ = adminsite.info(site, "--json")
    assert len(json.loads("\n".join(lines))["replicas"]) == 3 + 3 + 2 + 3
