"""fctl lease --render: for which hardware, and how much of it, a lease's job is shown."""

import io
import shlex
from pathlib import Path

import pytest

from scheduler.contracts import fleet
from scheduler.runtime import commands, lease_commands, settings
from tests.unit.runtime import adminsite

site = adminsite.site  # the fixture
FILE = """\
profiles:
  small: {gres: "shard:1", parts: 4, memory_gb: 3, cpus: 2, constraint: "a100&nvlink"}
  big: {gres_type: H100, gpus: 4, memory_gb: 200}
  bare: {gpus: 0, cpus: 8, memory_gb: 16}
  odd: {gres: "shard:9", parts: 4}
"""


def rendered(
    site: adminsite.Site, line: str, options: settings.Settings | None = None
) -> fleet.Lease:
    """Return the lease that a command has rendered."""
    told: list[fleet.Lease] = []

    def render(asked: fleet.Lease, units: int) -> str:
        told.append(lease_commands.planned(asked, units, options or settings.Settings()))
        return "#!/bin/sh\n"

    out, err = io.StringIO(), io.StringIO()
    here = commands.Here(render=render)
    code = commands.fctl(
        shlex.split(f"lease --render {line}"),
        api=adminsite.SiteApi(site),
        out=out,
        err=err,
        here=here,
    )
    assert code == 0, err.getvalue()
    assert out.getvalue() == "#!/bin/sh\n"
    (lease,) = told
    return lease


def refused(site: adminsite.Site, line: str) -> str:
    """Return what a command says that renders nothing."""
    out, err = io.StringIO(), io.StringIO()
    here = commands.Here(render=lambda asked, units: "never")
    code = commands.fctl(
        shlex.split(f"lease --render {line}"),
        api=adminsite.SiteApi(site),
        out=out,
        err=err,
        here=here,
    )
    assert (code, out.getvalue()) == (1, "")
    return err.getvalue().strip()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of profiles."""
    found = tmp_path / "models.yaml"
    found.write_text(FILE)
    return found


def test_without_a_profile_a_lease_is_of_whole_gpus(site: adminsite.Site) -> None:
    one = rendered(site, "")
    assert (one.gpus, one.whole_nodes, one.hardware) == (1, 0, fleet.ANY_NODE)
    many = rendered(site, "--kind backfill --gpus 16 --nodes 2 --partition lent")
    assert (many.kind, many.gpus, many.whole_nodes) == (fleet.LeaseKind.BACKFILL, 16, 2)
    assert many.partition == "lent"


def test_the_brokers_settings_are_the_jobs_too(site: adminsite.Site) -> None:
    options = settings.Settings(
        lease_gres_type="A100", lease_partition="serve", lease_walltime_s=900
    )
    lease = rendered(site, "--gpus 2", options)
    assert (lease.gres_type, lease.partition, lease.walltime_s) == ("A100", "serve", 900)


@pytest.mark.parametrize(
    ("lease_gpus", "line", "shards", "cpus", "memory_gb"),
    [(0, "", 1, 2, 3), (8, "", 4, 8, 12), (8, "--gpus 2", 2, 4, 6)],
)
def test_a_lease_on_shards_is_as_large_as_the_planner_asks_for(
    site: adminsite.Site,
    file: Path,
    lease_gpus: int,
    line: str,
    shards: int,
    cpus: int,
    memory_gb: float,
) -> None:
    options = settings.Settings(lease_gpus=lease_gpus, lease_gres_type="A100")
    lease = rendered(site, f"--profile small --file {file} {line}", options)
    assert (lease.gpus, lease.whole_nodes, lease.gres_type) == (shards, 0, "A100")
    hardware = lease.hardware
    assert (hardware.gres, hardware.parts, hardware.constraint) == ("shard", 4, "a100&nvlink")
    assert (hardware.cpus, hardware.memory_gb) == (cpus, memory_gb)


def test_whole_gpus_and_cpus_by_profile(site: adminsite.Site, file: Path) -> None:
    big = rendered(site, f"--profile big --file {file}", settings.Settings(lease_gpus=8))
    assert (big.gpus, big.gres_type, big.hardware.memory_gb) == (8, "H100", 400)
    wide = rendered(site, f"--profile big --file {file} --gpus 16 --nodes 2")
    assert (wide.gpus, wide.whole_nodes, wide.hardware.memory_gb) == (16, 2, 800)
    bare = rendered(site, f"--profile bare --file {file}", settings.Settings(lease_gpus=8))
    assert (bare.gpus, bare.hardware.gres, bare.hardware.cpus) == (0, "none", 8)


def test_a_declared_profile_needs_no_file(site: adminsite.Site) -> None:
    out, err = io.StringIO(), io.StringIO()
    words = shlex.split("profile add tiny gres=shard:2 parts=8 memory_gb=4")
    assert commands.fctl(words, api=adminsite.SiteApi(site), out=out, err=err) == 0, err.getvalue()
    lease = rendered(site, "--profile tiny")
    assert (lease.gpus, lease.hardware.gres, lease.hardware.parts) == (2, "shard", 8)
    assert (
        refused(site, "--profile huge")
        == "fctl: error: lease: --profile huge: the registry has tiny"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--profile none", "--profile none: {file} has bare, big, odd, small"),
        ("--profile odd", "{file}:5: profiles.odd: gres shard:9: a GPU has 4 of them"),
        ("", "--file: say which of its profiles: --profile NAME"),
        (
            "--profile small --gpus 5",
            "--gpus 5: a GPU has 4 shard, and a job gets parts of one GPU",
        ),
        ("--profile small --nodes 1", "profile small takes parts of one GPU: leave out --nodes"),
        ("--profile bare --gpus 1", "profile bare runs on CPUs: leave out --gpus"),
        ("--profile bare --nodes 1", "profile bare runs on CPUs: leave out --nodes"),
        (
            "--profile big --gpus 2",
            "--gpus 2: a replica on profile big takes 4: give as many or more",
        ),
        ("--profile big --nodes 2", "--nodes: say how many GPUs they have: --gpus N"),
        ("--profile big --gpus 9 --nodes 2", "9 GPUs do not spread evenly over 2 nodes"),
    ],
)
def test_what_the_planner_would_never_ask_for_is_refused(
    site: adminsite.Site, file: Path, line: str, said: str
) -> None:
    told = refused(site, f"{line} --file {file}")
    assert said.format(file=file) in told
    assert "\n" not in told


def test_a_file_that_is_none(site: adminsite.Site, tmp_path: Path) -> None:
    missing = tmp_path / "nothing.yaml"
    said = refused(site, f"--profile a --file {missing}")
    assert said == f"fctl: error: {missing}: No such file or directory"
    (tmp_path / "list.yaml").write_text("profiles: [a]\n")
    said = refused(site, f"--profile a --file {tmp_path / 'list.yaml'}")
    assert said.endswith("list.yaml: profiles: must be a mapping of names")
