"""The development cluster's pure parts: shape, layout, configuration text, ports, its command."""

import io
import json
import os
import typing
from pathlib import Path

import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import cluster, commands, daemons, processes, render, site

PORTS = site.Ports(slurmctld=11001, slurmdbd=11002, slurmrestd=11003, slurmd=(11004, 11005))
HOST = render.Host("box", "127.0.0.1", loopback_only=True)
WHERE = site.Layout(Path("/srv/dc"), Path("/srv/dc"))
OLD, NEW = (22, 5), (24, 11)


def conf(shape: site.Shape, *, host: render.Host = HOST) -> list[str]:
    """Render slurm.conf as lines."""
    return render.slurm_conf(shape, PORTS, WHERE, host=host, version=OLD).splitlines()


class TestShape:
    """What may be asked for."""

    def test_the_options_are_the_shapes_fields(self) -> None:
        fields = typing.get_type_hints(site.Shape)
        assert typing.get_type_hints(site.Options) == fields

    @pytest.mark.parametrize("options", [{"nodes": 0}, {"gpus_per_node": -1}, {"cpus_per_node": 0}])
    def test_an_impossible_shape_is_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(site.DevClusterError, match="at least one node"):
            site.Shape(**options)  # type: ignore[arg-type] # a table of bad values

    @pytest.mark.parametrize("name", ["", "a-b", "Alpha", "a b"])
    def test_a_name_that_slurm_would_mangle_is_refused(self, name: str) -> None:
        with pytest.raises(site.DevClusterError, match="lower-case"):
            site.Shape(name=name)

    def test_equal_shapes_have_equal_texts(self) -> None:
        first = site.Shape(accounts={"a": ("x",), "b": ()}, service_users=["root"])
        second = site.Shape(accounts={"b": [], "a": ["x"]}, service_users=("root",))
        assert first.to_json() == second.to_json()
        assert first.to_json() != site.Shape().to_json()


class TestLayout:
    """Where the files lie."""

    def test_an_open_short_folder_holds_its_own_files(self) -> None:
        where = site.layout(Path("/srv/no-such-folder/dc"))
        assert where.base == where.folder

    def test_a_path_too_long_for_sockets_moves_below_tmp(self) -> None:
        where = site.layout(Path("/srv") / ("x" * 80))
        assert where.base.parent == Path("/tmp")
        assert len(str(where.spool / "n1234" / "n1234_1234567890.4294967295.4294967295")) < 107
        assert site.layout(Path("/srv") / ("x" * 80)) == where
        assert site.layout(Path("/srv") / ("y" * 80)) != where

    def test_a_folder_closed_to_others_moves_below_tmp(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        assert site.layout(tmp_path / "dc").base != tmp_path / "dc"

    def test_what_was_recorded_is_read_back(self, tmp_path: Path) -> None:
        where = site.Layout(tmp_path, tmp_path)
        shape = site.Shape(nodes=2)
        result = devcluster.Site(
            folder=tmp_path,
            cluster="forebay",
            slurm_conf=where.slurm_conf,
            munge_socket=where.munge_socket,
            rest_url="http://127.0.0.1:11003",
            rest_user="root",
            jwt_key=where.jwt_key,
            logs=where.log,
            version="22.05.8",
            ports=PORTS,
            nodes=("n1", "n2"),
        )
        assert site.load(where) is None
        site.save(where, result, shape)
        assert site.load(where) == (result, shape.to_json())
        assert result.env() == {"SLURM_CONF": str(where.slurm_conf)}


class TestConfiguration:
    """The rendered files."""

    def test_each_node_has_its_own_port_and_gpus(self) -> None:
        lines = conf(site.Shape(nodes=2, gpus_per_node=8, gres_type="H100", cpus_per_node=16))
        assert [line for line in lines if line.startswith("NodeName=")] == [
            "NodeName=n1 NodeHostname=box NodeAddr=127.0.0.1 Port=11004 CPUs=16 RealMemory=32768 "
            "Gres=gpu:H100:8 State=UNKNOWN",
            "NodeName=n2 NodeHostname=box NodeAddr=127.0.0.1 Port=11005 CPUs=16 RealMemory=32768 "
            "Gres=gpu:H100:8 State=UNKNOWN",
        ]

    def test_only_backfill_may_be_preempted(self) -> None:
        lines = [line for line in conf(site.Shape(nodes=2)) if line.startswith("PartitionName=")]
        assert [line.split()[0].partition("=")[2] for line in lines] == [
            "serve",
            "user",
            "backfill",
        ]
        assert ["PreemptMode=OFF" in line for line in lines] == [True, True, False]
        assert "GraceTime=0" in lines[2].split()
        assert "Default=YES" in lines[1].split()

    def test_settings_can_be_replaced_and_taken_away(self) -> None:
        shape = site.Shape(
            nodes=2,
            extra_conf={"KillWait": "30", "Epilog": "", "MinJobAge": "5"},
            partition_conf={"backfill": {"GraceTime": "60"}},
        )
        lines = conf(shape)
        assert [line for line in lines if line.startswith("KillWait=")] == ["KillWait=30"]
        assert "MinJobAge=5" in lines
        assert not any(line.startswith("Epilog=") for line in lines)
        assert any(
            "GraceTime=60" in line for line in lines if line.startswith("PartitionName=backfill")
        )

    def test_without_accounting_no_gpu_is_tracked(self) -> None:
        """Slurmctld refuses to start with AccountingStorageTRES and no slurmdbd."""
        lines = conf(site.Shape(nodes=2, accounting=False))
        assert not any(line.startswith("AccountingStorage") for line in lines)
        assert "AccountingStorageTRES=gres/gpu" in conf(site.Shape(nodes=2))

    def test_a_host_off_loopback_is_not_told_where_to_listen(self) -> None:
        outside = render.Host("box", "127.0.0.1", loopback_only=False)
        shape = site.Shape(nodes=2)
        assert not any("NoInAddrAny" in line for line in conf(shape, host=outside))
        assert any("NoInAddrAny" in line for line in conf(shape))
        assert "NoInAddrAny" not in render.slurmdbd_conf(PORTS, WHERE, host=outside)
        assert "NoInAddrAny" in render.slurmdbd_conf(PORTS, WHERE, host=HOST)

    def test_slow_leaves_slurms_own_intervals(self) -> None:
        assert not any(
            line.startswith("KillWait=") for line in conf(site.Shape(nodes=2, fast=False))
        )

    def test_an_old_slurm_is_refused(self) -> None:
        with pytest.raises(site.DevClusterError, match=r"21\.08 is too old"):
            render.slurm_conf(site.Shape(nodes=2), PORTS, WHERE, host=HOST, version=(21, 8))

    def test_gpus_are_device_files(self) -> None:
        text = render.gres_conf(site.Shape(nodes=2, gpus_per_node=1), WHERE)
        assert text.splitlines() == [
            "AutoDetect=off",
            "NodeName=n1 Name=gpu File=/srv/dc/dev/n1/gpu0",
            "NodeName=n2 Name=gpu File=/srv/dc/dev/n2/gpu0",
        ]

    def test_later_slurms_are_told_to_leave_cgroups_alone(self) -> None:
        assert render.cgroup_conf(OLD) == ""
        assert render.cgroup_conf(NEW) == "CgroupPlugin=disabled\n"

    def test_the_hooks_know_the_service_users(self) -> None:
        shape = site.Shape(nodes=2, name="alpha", service_users=("root", "svc"))
        text = render.hooks_conf(shape, WHERE, {"root": 0, "svc": 1001})
        assert "cluster = alpha\n" in text
        assert "service_uids = 0 1001\n" in text


def seen(where: site.Layout) -> None:
    """Wait until a process shows its mark: the kernel tells the environment a moment after the start."""
    while not processes.members(where):
        os.sched_yield()


class TestProcesses:
    """Finding the cluster's processes among others."""

    def test_marked_processes_are_found_and_ended_and_no_others(self, tmp_path: Path) -> None:
        where = site.Layout(tmp_path, tmp_path)
        for folder in (where.run, where.log):
            folder.mkdir()
        pid = processes.spawn(where, "sleeper", ["/bin/sleep", "600"], {"EXTRA": "1"})
        other = os.posix_spawn("/bin/sleep", ["/bin/sleep", "600"], {"PATH": "/bin"})
        try:
            assert processes.living(where, "sleeper") == pid
            seen(where)
            assert [process.pid for process in processes.members(where)] == [pid]
            assert processes.members(site.Layout(tmp_path / "x", tmp_path / "x")) == []
            processes.stop(where, ["sleeper"])
            assert processes.living(where, "sleeper") is None
            processes.spawn(where, "again", ["/bin/sh", "-c", "trap '' TERM; sleep 600"], {})
            seen(where)
            processes.sweep(where)
            assert processes.members(where) == []
            assert os.waitpid(other, os.WNOHANG) == (0, 0)
        finally:
            os.kill(other, 9)
            os.waitpid(other, 0)

    def test_a_daemon_whose_starter_died_before_it_wrote_the_pid_is_found(
        self, tmp_path: Path
    ) -> None:
        where = site.Layout(tmp_path, tmp_path)
        for folder in (where.run, where.log):
            folder.mkdir()
        argv = ["/bin/sh", "-c", "sleep 600 & echo up; wait"]
        pid = processes.spawn(where, "munged", argv, {})
        try:
            while len(processes.members(where)) < 2:  # its child carries the same marks
                os.sched_yield()
            (where.run / "munged.pid").unlink()
            assert processes.living(where, "munged") == pid
            assert processes.living(where, "slurmd-n1") is None
        finally:
            processes.sweep(where)

    def test_another_process_under_a_recorded_pid_is_not_ours(self, tmp_path: Path) -> None:
        where = site.Layout(tmp_path, tmp_path)
        where.run.mkdir()
        (where.run / "slurmd-n1.pid").write_text(f"{os.getpid()} 1\n")
        assert processes.living(where, "slurmd-n1") is None
        processes.stop(where, ["slurmd-n1"])  # had it been taken for ours, this test would end here
        (where.run / "slurmd-n1.pid").write_text("")
        assert processes.living(where, "slurmd-n1") is None


class TestTrouble:
    """Errors before anything is started."""

    def test_without_root_it_says_what_to_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(site.DevClusterError, match="SLURM=embedded"):
            devcluster.up(tmp_path / "dc")
        assert list(tmp_path.iterdir()) == []

    def test_missing_programs_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(daemons, "_SEARCH", str(tmp_path))
        with pytest.raises(
            site.DevClusterError, match=r"not installed: munged, slurmctld, .*apt|debian"
        ):
            devcluster.up(tmp_path / "dc")
        assert daemons.missing(site.Shape(rest=False, accounting=False)) == (
            "munged", "slurmctld", "slurmd", "sinfo", "scontrol",
        )  # fmt: skip

    def test_a_folder_below_tmp_that_belongs_to_another_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        trap = tmp_path / "trap"
        trap.symlink_to(elsewhere)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid())
        monkeypatch.setattr(daemons, "missing", lambda shape=None: ())
        monkeypatch.setattr(site, "layout", lambda folder: site.Layout(tmp_path / "dc", trap))
        if os.getuid() == 0:
            with pytest.raises(site.DevClusterError, match="somebody else"):
                devcluster.up(tmp_path / "dc")
        else:
            with pytest.raises(site.DevClusterError, match="root"):
                devcluster.up(tmp_path / "dc")
        assert list(elsewhere.iterdir()) == []


class TestCommand:
    """`forebay devcluster`."""

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Run the command and return status, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        return commands.main(argv, out=out, err=err), out.getvalue(), err.getvalue()

    def test_status_of_nothing(self, tmp_path: Path) -> None:
        code, out, err = self.run("status", "--folder", str(tmp_path / "dc"))
        assert (code, out) == (1, "")
        assert err.startswith("forebay devcluster: error: no cluster in this folder")

    def test_down_of_nothing_is_no_error(self, tmp_path: Path) -> None:
        assert self.run("down", "--folder", str(tmp_path / "dc")) == (0, "", "")

    def test_bad_input_is_one_line(self, tmp_path: Path) -> None:
        for argv in (
            ("up", "--nodes", "0"),
            ("up", "--nodes", "x"),
            ("up", "--account", "=alice"),
            ("sideways",),
        ):
            code, out, err = self.run(*argv, "--folder", str(tmp_path / "dc"))
            assert (code, out, err.count("\n")) == (1, "", 1)

    def test_the_command_asks_for_what_was_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, object] = {}
        known = devcluster.Site(
            folder=tmp_path, cluster="alpha", slurm_conf=tmp_path / "slurm.conf",
            munge_socket=tmp_path / "m", rest_url="", rest_user="root", jwt_key=tmp_path / "k",
            logs=tmp_path / "log", version="22.05.8", ports=PORTS, nodes=("n1",),
        )  # fmt: skip
        status = cluster.Status(
            known,
            (cluster.Daemon("munged", 7, tmp_path / "log" / "munged.log"),
             cluster.Daemon("slurmd-n1", 8, tmp_path / "log" / "slurmd-n1.log")),
            {"n1": "idle"},
        )  # fmt: skip
        monkeypatch.setattr(cluster, "up", lambda folder, **options: asked.update(options))
        monkeypatch.setattr(cluster, "status", lambda folder: status)
        code, out, _ = self.run("up", "--nodes", "2", "--name", "alpha", "--no-rest",
                                "--account", "physics=alice,bob", "--account", "bio")  # fmt: skip
        assert code == 0
        assert out.splitlines()[-1].split() == ["slurmd-n1", "8", "idle", "slurmd-n1.log"]
        assert asked["accounts"] == {"physics": ("alice", "bob"), "bio": ()}
        assert (asked["nodes"], asked["name"], asked["rest"]) == (2, "alpha", False)

        assert self.run("status", "--env")[1] == f"export SLURM_CONF={tmp_path}/slurm.conf\n"
        document = json.loads(self.run("status", "--json")[1])
        assert document["daemons"] == {"munged": 7, "slurmd-n1": 8}
