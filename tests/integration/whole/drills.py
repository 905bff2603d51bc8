"""What runs while a part is killed, and the proof that it cost nobody anything.

The simulated engine answers the same prompt with the same text, so that a text that lost, doubled or
changed a token is found; real vLLM has its own drills.
"""

import collections
import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.runtime import address
from slurm_plugins import devcluster
from slurm_plugins.devcluster import processes as daemons
from slurm_plugins.devcluster import site as layout
from tests import endings
from tests.integration.whole import batches, clients, running, waiting

CONTINUED = frozenset({"replica_lost", "draining", "refused", "preempted"})


class Load:
    """Streams of people and a batch job, all of them begun.

    Args:
        house: where.
        key: whose.
        streams: how many.
        tokens: of each stream, at 20 ms each.
        lines: of the batch job, 60 tokens each.
    """

    def __init__(
        self,
        house: running.Running,
        key: str,
        *,
        streams: int = 4,
        tokens: int = 400,
        lines: int = 60,
    ) -> None:
        self._house = house
        self._tokens = tokens
        self.text = undisturbed(house, key, tokens)
        self.job = batches.Job.submit(house, key, lines, 60)
        self.streams = [clients.Stream(house, key, tokens) for _ in range(streams)]
        for stream in self.streams:
            stream.begun()

    @property
    def streaming(self) -> bool:
        """Whether a stream still runs."""
        return any(stream.running for stream in self.streams)

    def rows(self) -> list[dict[str, Any]]:
        """Return the newest row of each stream: where it runs, or how it ended."""
        return [rows[-1] for rows in self._tries()]

    def _tries(self) -> list[list[dict[str, Any]]]:
        """Return the rows of each stream; asked for once, since the books hold those of many tests."""
        found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for row in self._house.attempts():
            found[row["caller_request_id"]].append(row)
        return [found[each.request_id] for each in self.streams]

    def whole(self, *, at_once: bool = False) -> None:
        """No client noticed anything: every text is whole and byte for byte what it always is.

        Args:
            at_once: no stream needed a second attempt either.
        """
        for stream in self.streams:
            assert stream.ended().whole, vars(stream)
            assert "".join(stream.pieces) == self.text
        for rows in self._tries():
            tries = [row["attempt"] for row in rows]
            assert tries == list(range(1, len(rows) + 1)), rows
            outcomes = [row["outcome"] for row in rows]
            assert outcomes[-1] == "ok", outcomes
            assert set(outcomes[:-1]) <= CONTINUED, outcomes
            assert not at_once or len(rows) == 1, outcomes
            assert sum(row["output_tokens"] for row in rows) == self._tokens, rows

    def over(self, *, at_once: bool = False) -> None:
        """Everything has ended well, the batch job's lines exactly once, and the house is at rest."""
        self.whole(at_once=at_once)
        self.job.finished()
        self._house.settled()


def undisturbed(house: running.Running, key: str, tokens: int) -> str:
    """Return the text of an answer that nothing disturbs."""
    if (house.http, tokens) not in _texts:
        answer = clients.post(house, key, clients.chat(tokens))
        assert answer.status_code == 200, answer.text
        _texts[house.http, tokens] = answer.json()["choices"][0]["message"]["content"]
    return _texts[house.http, tokens]


_texts: dict[tuple[str, int], str] = {}


class Standby:
    """One more broker of an installation, started by the test and by nobody again."""

    def __init__(self, house: running.Running, number: int) -> None:
        self.log = house.folder / f"standby-{number}.log"
        argv = [sys.executable, "-P", "-m", "forebay", "broker", "--config", str(house.config_file)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                endings.tied("TERM", argv), stdout=log, stderr=log, env=house.env
            )
        waiting.eventually(lambda: "standing by" in self.said(), "a broker that stands by")

    def said(self) -> str:
        """Return its log."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End it, stopped or not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(30)


def leader(house: running.Running) -> tuple[int, int]:
    """Return the leading broker's epoch and pid, by the registry's word."""
    with contextlib.closing(sqlite3.connect(house.state / "registry.sqlite")) as registry:
        epoch, holder = registry.execute("SELECT epoch, holder FROM leadership").fetchone()
    return int(epoch), int(holder.split(":")[1])


def next_leader(house: running.Running, after: int) -> float:
    """Wait until a broker leads with an epoch above ``after``; return the seconds that it took."""
    began = time.monotonic()

    def leads() -> bool:
        found = address.read(house.state)
        return found is not None and found.epoch > after

    waiting.eventually(leads, f"a leader after epoch {after}", 60)
    return time.monotonic() - began


def daemon(site: devcluster.Site, name: str) -> int:
    """Return the pid of one of the cluster's daemons."""
    pid = daemons.living(layout.layout(site.folder), name)
    assert pid is not None, f"{name} does not live"
    return pid


def step_daemons(site: devcluster.Site, job_id: str) -> dict[str, int]:
    """Return the pids of a job's step daemons by step: `batch`, `0` …"""
    found = {}
    for process in daemons.members(layout.layout(site.folder)):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
        if words.startswith("slurmstepd: ["):
            job, _, step = words.split("[", 1)[1].split("]", 1)[0].partition(".")
            if job == job_id:
                found[step] = process.pid
    return found


def books_agree(house: running.Running, lease_id: str) -> None:
    """Wait until Forebay's and Slurm's GPU-seconds of an ended lease agree.

    Within max(1 %, 1 s × GPUs), which is what `accounting.reconcile` allows.
    """

    def agree() -> bool:
        rows = house.call("GET", "/forebay/v1/usage/reconcile")["rows"]
        (mine,) = (row for row in rows if row["lease_id"] == lease_id)
        assert mine["agrees"], mine
        return True

    waiting.eventually(agree, f"both books to agree on lease {lease_id}")


def job_state(house: running.Running, lease_id: str) -> dict[str, Any]:
    """Return a lease as the registry has it, ended ones too."""
    (found,) = (each for each in house.leases(ended=True) if each["lease_id"] == lease_id)
    return found


def outcomes(rows: list[dict[str, Any]]) -> collections.Counter[str]:
    """Count rows by outcome."""
    return collections.Counter(row["outcome"] for row in rows)


def until(look: Callable[[], bool], what: str) -> float:
    """Wait for something and return the seconds that it took."""
    began = time.monotonic()
    waiting.eventually(look, what)
    return time.monotonic() - began
