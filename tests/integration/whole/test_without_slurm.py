"""The same installation on the embedded Slurm: no cluster, no root, the same promises."""

import functools
import json
import signal

import pytest

from tests.integration.whole import batches, clients, running, waiting

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def said_before(laptop_house: running.Running) -> int:
    """Return how much of the log is of other modules' tests, which kill its parts."""
    return len(laptop_house.log())


def test_answers_and_a_batch_job(laptop: running.Running) -> None:
    key = laptop.key
    job = batches.Job.submit(laptop, key, 30, 20)
    stream = clients.Stream(laptop, key, 10).begun().ended()
    assert stream.whole
    leaver = clients.Stream(laptop, key, 600, leave_after=5).begun().ended()
    job.finished()
    laptop.settled()
    outcomes = [laptop.attempts_of(each.request_id) for each in (stream, leaver)]
    assert [[row["outcome"] for row in rows] for rows in outcomes] == [["ok"], ["client_gone"]]
    queue = laptop.command("fqueue", "-t", "all", "-h", "-o", "%i %t", key=key)
    assert queue.out.split() == [str(job.job_id), "CD"]
    books = laptop.command("facct", "-P", "-n", "-j", str(job.job_id), key=key)
    assert books.code == 0, books.err


def test_what_it_costs(laptop: running.Running) -> None:
    """A rate and a bill over real services; looking again changes no tokens. GPU time goes on, and rows
    that come meanwhile change who has which part of it."""
    stream = clients.Stream(laptop, laptop.key, 10).begun().ended()
    assert stream.whole
    laptop.settled()
    words = ("fctl", "rate", "add", "output=1000", "from=2020-01-01", "reason=test")
    refused = laptop.command(*words, key=laptop.key)
    assert (refused.code, "is no admin" in refused.err) == (1, True), refused
    added = laptop.command(*words, key=laptop.admin_key)
    assert added.code == 0, added.err
    bills = [laptop.command("freport", "bill", "--json", key=laptop.admin_key) for _ in range(2)]
    assert bills[0].code == 0, bills[0].err
    bill, again = (json.loads(each.out) for each in bills)
    assert bill["total"] == again["total"]
    tokens, tokens_again = (
        [line for line in each["rows"] if line["unit"] == "tokens"] for each in (bill, again)
    )
    assert tokens == tokens_again != []
    assert sum(line["amount"] for line in bill["rows"] if line["unit"] == "gpu_us") > 0
    output = sum(line["amount"] for line in tokens if line["what"] == "output")
    assert bill["total"] == output * 1_000_000 > 0  # one a token
    (row,) = laptop.attempts_of(stream.request_id)
    cost = laptop.command(
        "facct", "-P", "-n", "-o", "cost", "-j", row["request_id"], key=laptop.key
    )
    assert (cost.code, cost.out) == (0, "10.00\n"), cost


def test_quotas_and_budgets(laptop: running.Running) -> None:
    """Set, in force within seconds, counted, told."""
    words = ("fctl", "quota", "set", "team=physics")
    refused = laptop.command(*words, "tokens_per_day=0", key=laptop.key)
    assert (refused.code, "may not set this" in refused.err) == (1, True), refused
    slip = laptop.command(
        "fctl", "quota", "set", "team=phisics", "concurrent=1", key=laptop.admin_key
    )
    assert (slip.code, "no such account" in slip.err) == (1, True), slip

    def answers(code: int) -> bool:
        return clients.post(laptop, laptop.key, clients.chat(3)).status_code == code

    for amount, code in (("0", 429), ("1M", 200)):
        made = laptop.command(*words, f"tokens_per_day={amount}", key=laptop.admin_key)
        assert made.code == 0, made.err
        waiting.eventually(functools.partial(answers, code), f"a quota of {amount}", 20)
    # The first price may begin in the past; there may be one already.
    rate = ("fctl", "rate", "add", "output=1000", "from=2020-01-01", "reason=test")
    laptop.command(*rate, key=laptop.admin_key)
    budget = ("fctl", "budget", "set", "team=physics", "cost_per_month=0.01", "--soft")
    assert laptop.command(*budget, key=laptop.admin_key).code == 0

    def told() -> bool:
        assert answers(200)
        return (
            "soft limit passed"
            in laptop.command("fctl", "show", "events", key=laptop.admin_key).out
        )

    waiting.eventually(told, "the budget's notice", 30)
    shown = laptop.command("fctl", "show", "quotas", "--json", key=laptop.key)
    used = {row["kind"]: row["used"] for row in json.loads(shown.out)["quotas"]}
    assert used["tokens_per_day"] > 0
    assert used["cost_per_month"] > 10_000


def test_nothing_is_left(laptop: running.Running, said_before: int) -> None:
    assert len(laptop.slurm_jobs()) == running.REPLICAS
    assert laptop.down() == 128 + signal.SIGINT
    waiting.eventually(lambda: laptop.processes() == [], "the last process to end", 10)
    assert "Traceback" not in laptop.log()[said_before:]
