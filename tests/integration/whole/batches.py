"""Batch jobs in tests: lines with names, and the proof that each ended exactly once."""

import collections
import json
from typing import Any

import httpx

from tests.integration.whole import clients, running, waiting

JOBS = "/forebay/v1/jobs"


def text(lines: int, tokens: int) -> str:
    """Return a batch file of ``lines`` lines, each of exactly ``tokens`` tokens."""
    return "".join(
        json.dumps(
            {
                "custom_id": f"line-{number:03}",
                "method": "POST",
                "url": clients.CHAT,
                "body": clients.chat(tokens),
            }
        )
        + "\n"
        for number in range(lines)
    )


class Job:
    """A submitted job."""

    def __init__(self, house: running.Running, job_id: int, lines: int) -> None:
        self._house = house
        self.job_id = job_id
        self.lines = lines

    @classmethod
    def submit(cls, house: running.Running, key: str, lines: int, tokens: int) -> "Job":
        """Submit over HTTP and wait until batch holds some seats."""
        job = cls.accepted(house, key, lines, tokens)
        waiting.eventually(
            lambda: house.batch_seats() >= 4, f"lines of job {job.job_id} in replicas"
        )
        return job

    @classmethod
    def accepted(cls, house: running.Running, key: str, lines: int, tokens: int) -> "Job":
        """Submit over HTTP."""
        answer = house.client.post(
            house.http + JOBS,
            params={"options": "{}"},
            content=text(lines, tokens).encode(),
            headers={"Authorization": f"Bearer {key}"},
        )
        assert answer.is_success, answer.text
        return cls(house, answer.json()["job_id"], lines)

    def state(self) -> dict[str, Any]:
        """Return what the gateway says of it."""
        found: dict[str, Any] = self._house.call("GET", f"{JOBS}/{self.job_id}")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return its usage rows, one for each attempt."""
        return self._house.attempts(job=str(self.job_id))

    def finished(self) -> None:
        """Wait for its end; every line has to be answered once, and paid for by the team once."""

        def ended() -> bool:
            try:
                return bool(self.state()["ended_us"])
            except httpx.TransportError:  # a gateway that was killed comes back
                return False

        waiting.eventually(ended, f"the end of job {self.job_id}")
        state = self.state()
        wanted = {f"line-{number:03}": 1 for number in range(self.lines)}
        assert state["state"] == "COMPLETED", state
        answers = self._house.client.get(
            f"{self._house.http}{JOBS}/{self.job_id}/output",
            headers={"Authorization": f"Bearer {self._house.admin_key}"},
        ).text
        published = [json.loads(line) for line in answers.splitlines()]
        assert collections.Counter(row["custom_id"] for row in published) == wanted
        assert all(row["response"]["status_code"] == 200 for row in published)
        waiting.eventually(self._rows_closed, f"rows of job {self.job_id}, all of them ended")
        rows = self.rows()
        paid = collections.Counter(row["custom_id"] for row in rows if row["outcome"] == "ok")
        # A line whose answer was lost with the gateway is computed again, and that try is ok as well.
        assert set(paid) == set(wanted)
        tries = [(row["request_id"], row["attempt"]) for row in rows]
        assert len(tries) == len(set(tries))

    def _rows_closed(self) -> bool:
        return all(row["outcome"] != "open" for row in self.rows())
