"""Shadow traffic in a whole installation: callers, copies, the books and what fctl shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
REQUESTS = 8


def test_copies_are_made_compared_booked_and_shown(tmp_path: Path) -> None:
    house = running.Running(
        tmp_path, {"client": "embedded"}, models=running.simulated(1), replicas=1
    )
    try:
        house.up()
        spec = {"engine": "simulated", "seats": running.SEATS, "gpus": 1, "max_context": 2048}
        body = {"model": running.MODEL, "name": "v2", "spec": spec}
        house.call("POST", "/admin/catalog/version", body)
        done = house.command(
            *("fctl", "route", "update", running.MODEL, "shadow=v2:100"), key=house.admin_key
        )
        assert done.code == 0, done.err

        def up() -> bool:
            return any(each["spec"]["version"] == "v2" for each in house.replicas())

        waiting.eventually(up, "the shadow's replica")
        for _ in range(REQUESTS):
            answer = clients.post(house, house.key, clients.chat(4, temperature=0))
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4

        def shown() -> dict[str, Any]:
            told = house.command(
                *("fctl", "route", "show", running.MODEL, "--json"), key=house.admin_key
            )
            found: dict[str, Any] = json.loads(told.out)["copies"]
            assert found.get("copies", 0) + sum(found.get("dropped", {}).values()) == REQUESTS
            return found

        found = waiting.eventually(shown, "all copies in fctl route show")
        assert found["copies"] > 0
        assert found["same"] == found["copies"]
        assert found["caller"]["tokens"] == found["copy"]["tokens"] == 4

        def booked() -> list[dict[str, Any]]:
            rows = house.attempts()
            assert sum(row["version"] == "v2" for row in rows) == found["copies"]
            assert not any(row["outcome"] == "open" for row in rows)
            return rows

        rows = waiting.eventually(booked, "the rows of all copies")
        theirs = {row["request_id"] for row in rows if row["version"] == "v1"}
        for row in rows:
            if row["version"] == "v2":
                assert (row["team"], row["user"], row["payer"]) == ("forebay", "shadow", "platform")
                assert row["caller_request_id"] in theirs
            else:
                assert (row["team"], row["payer"]) == ("physics", "team")
    except BaseException:
        print(house.log()[-4000:])
        raise
    finally:
        house.close()
