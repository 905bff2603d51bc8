"""Stamps, host lists, TRES and states: what Slurm writes, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.contracts import ids, slurm
from slurm_plugins import hostlist, parse_sacct, parse_submit, stamp, states, tres

STAMP = slurm.Stamp("alpha", ids.LeaseId("l-0123456789ab"), "serve", "physics")


def test_a_stamp_reads_as_written() -> None:
    text = stamp.render(STAMP)
    assert text == "forebay/1 cluster=alpha lease=l-0123456789ab kind=serve team=physics"
    assert stamp.parse(text) == STAMP
    assert stamp.parse(text + " later=1 word") == STAMP


@given(cluster=st.text(min_size=1), team=st.text(min_size=1))
def test_any_name_survives_a_stamp(cluster: str, team: str) -> None:
    odd = slurm.Stamp(
        cluster.encode(errors="replace").decode(),
        ids.LeaseId("l-1"),
        "backfill",
        team.encode(errors="replace").decode(),
    )
    text = stamp.render(odd)
    assert text.isascii()
    assert len(text.split()) == 5
    assert stamp.parse(text) == odd


@pytest.mark.parametrize(
    "junk",
    [
        "", "hello", "forebay/2 cluster=a lease=b kind=serve team=c", "forebay/1",
        "forebay/1 cluster=a lease=b kind=serve", "forebay/1 cluster=a lease=b kind=other team=c",
        "forebay/1 cluster=a lease=b kind=serve team=c team=d", "x forebay/1 cluster=a lease=b",
        "forebay/1 cluster= lease=b kind=serve team=c",
    ],
)  # fmt: skip
def test_junk_is_no_stamp(junk: str) -> None:
    assert stamp.parse(junk) is None


def test_a_stamp_without_its_parts_is_not_written() -> None:
    with pytest.raises(ValueError, match="kind"):
        stamp.render(slurm.Stamp("a", ids.LeaseId("b"), "other", "c"))
    with pytest.raises(ValueError, match="empty"):
        stamp.render(slurm.Stamp("a", ids.LeaseId("b"), "serve", ""))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[1-2]-ib[0-1]", ["n1-ib0", "n1-ib1", "n2-ib0", "n2-ib1"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
        ("", []),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("login", ["login"]),
    ],
)
def test_host_lists_expand(text: str, hosts: list[str]) -> None:
    assert hostlist.expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2]x",
        "n[1-0]",
        "n[1-2",
        "n1]",
        "n[[1]]",
        "n[]",
        "n[a-b]",
        "n1,,n2",
        "n[1-99999999]",
        "a b",
    ],
)
def test_bad_host_lists_are_refused(text: str) -> None:
    with pytest.raises(hostlist.HostlistError):
        hostlist.expand(text)


def test_host_lists_compress_in_their_order() -> None:
    assert hostlist.compress(["n3", "n1", "n2"]) == "n[3,1-2]"
    assert hostlist.compress(sorted(["n3", "n1", "n2"])) == "n[1-3]"
    assert hostlist.compress(["n09", "n10", "n11", "login"]) == "n[09-11],login"
    assert hostlist.compress([]) == ""


@given(st.lists(st.from_regex(r"[a-z]{1,3}-?[0-9]{1,3}(-ib[0-9])?", fullmatch=True), max_size=20))
def test_compressed_lists_expand_to_the_same(hosts: list[str]) -> None:
    assert hostlist.expand(hostlist.compress(hosts)) == hosts


def test_l2_compact_lists_and_the_spelling_of_types() -> None:
    hosts = hostlist.expand("gpu-[001-002,004],c[1-2]-ib0")
    assert hosts == ["gpu-001", "gpu-002", "gpu-004", "c1-ib0", "c2-ib0"]
    node = tres.gres("gpu:H100:8")
    assert node == tres.Gres(8, "H100")
    assert tres.request(2, tres.spelling("h100", [node.gres_type])) == "gpu:H100:2"
    assert tres.request(4, tres.spelling("a100", ["H100"])) == "gpu:a100:4"
    assert tres.request(4) == "gpu:4"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu:a100:2(S:0,1),shard:a100:8(S:0,1)", {"shard": 8}),
        ("shard:a100:8,shard:h100:4,mps:200", {"shard": 12, "mps": 200}),
        ("cpu=1,gres/shard=3", {"shard": 3}),
        ("gres/shard=3,gres/shard:a100=3", {"shard": 3}),
        ("gres/shard:a100=2,gres/shard:h100=1", {"shard": 3}),
        ("cpu=1,gres/gpu=2", {}),
        (None, {}),
    ],
)
def test_parts_of_gpus(text: str | None, parts: dict[str, int]) -> None:
    """A job's typed shards were added to their sum: its books were twice ours."""
    assert tres.shared(text) == parts


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gres/gpu=1,gres/gpu:a100=1", 1),
        ("gres/gpu:a100=2,gres/gpu:h100=1", 3),
        ("cpu=2,mem=512M,node=", None),
        ("N/A", None),
        ("", None),
        (None, None),
        ("cpu=1,gres/gpu=0", 0),
        ("billing=8,cpu=8,gres/gpu=4,mem=16G,node=1", 4),
    ],
)
def test_l3_gpus_of_a_job(text: str | None, count: int | None) -> None:
    assert tres.gpus(text) == count


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:h100:5(IDX:0-4)", tres.Gres(5, "h100")),
        ("gpu:4", tres.Gres(4)),
        ("gpu", tres.Gres(1)),
        ("gpu:a100:2(S:0,1),shard:8", tres.Gres(2, "a100")),
        ("gpu:a100:2,gpu:h100:1", tres.Gres(3)),
        ("gres/gpu:2", tres.Gres(2)),
        ("(null)", None),
        ("shard:4,license:gpux:3", None),
    ],
)
def test_gres_texts(text: str, found: tres.Gres | None) -> None:
    assert tres.gres(text) == found


def test_l4_free_gpus_where_accounting_does_not_track_them() -> None:
    has = tres.node_gpus(gres_text="gpu:h100:8", cfg_tres="cpu=64,mem=1T")
    assert has == tres.Gres(8, "h100")
    used = {"gres_used": "gpu:h100:5(IDX:0-4)", "cfg_tres": "cpu=64,mem=1T", "alloc_tres": "cpu=5"}
    assert tres.free_gpus(8, **used) == 3
    assert tres.free_gpus(8, gres_used="", cfg_tres="cpu=64", alloc_tres="cpu=5") is None
    assert tres.free_gpus(8, gres_used="", cfg_tres="gres/gpu=8", alloc_tres="") == 8
    assert tres.node_gpus(gres_text="(null)", cfg_tres="cpu=64") is None


@pytest.mark.parametrize(
    ("text", "base", "flags", "unknown", "usable"),
    [
        ("IDLE+DRAIN", "idle", {"drain"}, set(), False),
        ("MIXED+PLANNED", "mixed", {"planned"}, set(), True),
        ("idle*", "idle", {"not_responding"}, set(), False),
        ("mixed-", "mixed", {"planned"}, set(), True),
        ("idle~", "idle", {"powered_down"}, set(), False),
        ("IDLE+SPARKLING", "idle", {"sparkling"}, {"sparkling"}, False),
        ("ALLOCATED+COMPLETING", "allocated", {"completing"}, set(), True),
        ("IDLE+DYNAMIC_NORM+CLOUD", "idle", {"dynamic_norm", "cloud"}, set(), True),
        ("DOWN*+DRAIN", "down", {"not_responding", "drain"}, set(), False),
        ("drained", "idle", {"drain"}, set(), False),
        ("IDLE+MAINT+RESERVED", "idle", {"maintenance", "reserved"}, set(), False),
        ("", "unknown", set(), set(), False),
    ],
)
def test_l5_only_usable_nodes_count(
    text: str, base: str, flags: set[str], unknown: set[str], usable: bool
) -> None:
    reading = states.node(text)
    assert (reading.state, reading.usable) == (base, usable)
    assert (set(reading.flags), set(reading.unknown)) == (flags, unknown)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("PD", "PENDING"), ("CANCELLED by 1000", "CANCELLED"), ("CANCELLED+", "CANCELLED"),
        (["PENDING", "REQUEUED"], "PENDING"), (["CANCELLED", "COMPLETING"], "COMPLETING"),
        ("CONFIGURING", "RUNNING"), ("REQUEUE_HOLD", "PENDING"), ("OOM", "OUT_OF_MEMORY"),
        ("", "UNKNOWN"), ("NOVEL", "UNKNOWN"), (["PREEMPTED"], "PREEMPTED"), ("NODE_FAIL", "NODE_FAIL"),
    ],
)  # fmt: skip
def test_job_states(text: str | list[str], state: str) -> None:
    assert states.job(text).state == state
    assert (states.job(text).unknown == {"NOVEL"}) == (text == "NOVEL")


@pytest.mark.parametrize(
    ("text", "job_id", "cluster"),
    [
        ("4711\n", "4711", "home"),
        ("4711;alpha\n", "4711", "alpha"),
        ("Dear users, maintenance on 2026-12-01;\n99 problems\n4711\n", "4711", "home"),
        ("Submitted batch job 4711 on cluster alpha\n", "4711", "alpha"),
        ("sbatch: Submitted batch job 4711", "4711", "home"),
    ],
)
def test_l1_job_ids_are_found(text: str, job_id: str, cluster: str) -> None:
    assert parse_submit.parse(text, cluster="home") == slurm.Submitted(
        ids.SlurmJobId(job_id), cluster
    )


@pytest.mark.parametrize("text", ["", "\n", "job 4711 refused", "4711 alpha"])
def test_l1_no_answer_is_no_job(text: str) -> None:
    assert parse_submit.parse(text, cluster="home") is None


def test_l9_pending_array_tasks_are_open() -> None:
    rows = "56_0|COMPLETED\n56_[1-3,7%2]|PENDING\n"
    assert parse_sacct.open_tasks(rows) == {"56_1", "56_2", "56_3", "56_7"}
    assert parse_sacct.array_tasks("56_[1%1]") == ("56_1",)
    assert parse_sacct.array_tasks("56_[0-6:3]") == ("56_0", "56_3", "56_6")
    assert parse_sacct.array_tasks("56_[odd]") == ("56_[odd]",)
    assert parse_sacct.open_tasks("56_[odd]|PENDING\n") == {"56_[odd]"}
