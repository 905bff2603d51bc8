"""Answers recorded from real Slurm releases: what our readers make of them must not drift."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import parse_sacct, parse_scontrol, parse_squeue, rest, rest_versions

DATA = Path(__file__).parents[1] / "data" / "slurm"
CLUSTERS = {"22.05.8": "forebay", "26.05.5": "forky"}
REST = [("22.05.8", "0.0.38"), *(("26.05.5", f"0.0.{n}") for n in (42, 43, 44, 45))]


def _read(version: str, name: str) -> str:
    return (DATA / version / name).read_text(encoding="utf-8")


def _check_jobs(jobs: tuple[slurm.Job, ...], cluster: str) -> None:
    lease = next(job for job in jobs if job.name == "a|b")
    assert lease.stamp == slurm.Stamp(cluster, ids.LeaseId("l-0123456789ab"), "serve", "physics")
    assert (lease.state, len(lease.nodes), lease.gpus) == (slurm.JobState.RUNNING, 2, 4)
    assert (lease.partition, lease.user, lease.cluster) == ("serve", "root", cluster)
    assert lease.started_us >= lease.submitted_us > 1_700_000_000_000_000
    assert lease.ended_us == 0
    failed = next(job for job in jobs if job.name == "x\ny")
    assert (failed.state, failed.ended_us > 0) == (slurm.JobState.FAILED, True)
    held = [job for job in jobs if job.name == "held"]
    assert sorted(job.job_id.partition("_")[2] for job in held) == ["1", "2", "3", "7"]
    assert {job.reason for job in held} == {"JobHeldUser"}
    assert {job.started_us for job in held} == {0}


@pytest.mark.parametrize(("version", "cluster"), CLUSTERS.items())
def test_squeue_json(version: str, cluster: str) -> None:
    value = parse_squeue.load(_read(version, "squeue.json"), "squeue")
    jobs = parse_squeue.jobs(value, cluster="?")
    _check_jobs(jobs, cluster)
    assert next(job for job in jobs if job.name == "x\ny").exit_code == "3:0"


@pytest.mark.parametrize(("version", "cluster"), CLUSTERS.items())
def test_squeue_text(version: str, cluster: str) -> None:
    _check_jobs(parse_squeue.text(_read(version, "squeue.txt"), "<mark>", cluster=cluster), cluster)


@pytest.mark.parametrize("version", CLUSTERS)
def test_scontrol(version: str) -> None:
    nodes = parse_scontrol.nodes(_read(version, "nodes.txt"))
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert [node.gpus for node in nodes] == [4, 4, 4, 4]
    assert sum(node.gpus_free or 0 for node in nodes) == 12
    assert all(node.usable and not node.unknown_flags for node in nodes)
    partitions = {p.name: p for p in parse_scontrol.partitions(_read(version, "partitions.txt"))}
    assert partitions["serve"].priority_tier > partitions["backfill"].priority_tier
    assert partitions["serve"].nodes == ("n1", "n2", "n3", "n4")
    config = parse_scontrol.config(_read(version, "config.txt"))
    assert config["ClusterName"] == CLUSTERS[version]
    assert config["SLURM_VERSION"] == version
    assert config["KillWait"].endswith("sec")


def test_sacct() -> None:
    text = _read("22.05.8", "sacct.txt")
    job_id = ids.SlurmJobId(text.split("|")[0])
    (run,) = parse_sacct.runs(text, job_id)
    assert (run.state, run.gpus, run.node_count) == (slurm.JobState.CANCELLED, 4, 2)
    assert run.ended_us - run.started_us == run.elapsed_s * 1_000_000
    error = parse_squeue.fault("sacct", _read("26.05.5", "sacct.txt"))
    assert isinstance(error, slurm.AccountingOff)


def _recorded(version: str, parser: str) -> rest.RestClient:
    """Return a client whose server plays the recorded answers back."""

    def answer(request: httpx.Request) -> httpx.Response:
        _, root, _, *rest_of_path = request.url.path.rstrip("/").split("/")
        name = "-".join(rest_of_path)
        if name.startswith("job-"):
            name = "job" if root == "slurmdb" else "job-missing"
        file = f"rest-{parser}-{'db-' if root == 'slurmdb' else ''}{name}.json"
        headers = {"content-type": "application/json"}
        return httpx.Response(200, text=_read(version, file), headers=headers)

    return rest.RestClient(
        "http://slurm.invalid", user="root", token=lambda: "t", version=parser,
        transport=httpx.MockTransport(answer),
    )  # fmt: skip


@pytest.mark.parametrize(("version", "parser"), REST)
def test_rest(version: str, parser: str) -> None:
    port = _recorded(version, parser)
    assert port.cluster == CLUSTERS[version]
    assert port.versions() == slurm.Versions(client=f"v{parser}", controller=version)
    _check_jobs(port.jobs(), CLUSTERS[version])
    nodes = port.nodes()
    assert [(node.gpus, node.usable) for node in nodes] == [(4, True)] * 4
    assert sum(node.gpus_free or 0 for node in nodes) == 12
    partitions = {partition.name: partition for partition in port.partitions()}
    assert partitions["serve"].priority_tier == 100
    assert all(p.up and len(p.nodes) == 4 and p.max_time_s is None for p in partitions.values())


def test_rest_accounting() -> None:
    port = _recorded("22.05.8", "0.0.38")
    raw: dict[str, Any] = json.loads(_read("22.05.8", "rest-0.0.38-db-job.json"))
    (run,) = port.accounting(ids.SlurmJobId(str(raw["jobs"][0]["job_id"])))
    assert (run.state, run.gpus, run.node_count) == (slurm.JobState.CANCELLED, 4, 2)
    found = {(one.user, one.account): one for one in port.associations()}
    assert found["alice", "physics"].default
    assert found["root", "root"].admin


@pytest.mark.parametrize("parser", rest_versions.ADAPTERS)
@pytest.mark.parametrize(
    ("name", "typed", "shared"),
    [
        ("shard", "shard:a100", {"shard": 3}),
        ("mps", "mps:a100", {"mps": 3}),
        ("gpu", "gpu:a100", {}),
    ],
)
def test_parts_of_gpus_in_rest_accounting(
    parser: str, name: str, typed: str, shared: dict[str, int]
) -> None:
    """They were read from sacct alone: over REST leases on shards stayed without Slurm's figure."""
    value = json.loads(_read("22.05.8", "rest-0.0.38-db-job.json"))
    (raw,) = value["jobs"]
    others = [entry for entry in raw["tres"]["allocated"] if entry["type"] != "gres"]
    asked = [{"type": "gres", "name": each, "id": 1002, "count": 3} for each in (name, typed)]
    raw["tres"]["allocated"] = others + asked
    (run,) = rest_versions.ADAPTERS[parser].runs(value, ids.SlurmJobId(str(raw["job_id"])))
    assert (dict(run.shared), run.gpus) == (shared, None if shared else 3)


def test_every_recorded_parser_has_an_adapter() -> None:
    assert {parser for _, parser in REST} == set(rest_versions.ADAPTERS)
