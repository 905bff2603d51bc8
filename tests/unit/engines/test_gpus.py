"""GPUs by index, UUID and MIG id; who holds which."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import gpus, processes
from engines.slot import occupancy


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2, 3", ("2", "3")),
        ("GPU-aaaa1111-bb,GPU-bbbb", ("GPU-aaaa1111-bb", "GPU-bbbb")),
        ("MIG-cccc", ("MIG-cccc",)),
        ("MIG-GPU-aaaa/1/0,MIG-dd-ee", ("MIG-GPU-aaaa/1/0", "MIG-dd-ee")),
    ],
)
def test_every_form_is_mapped(value: str, names: tuple[str, ...]) -> None:
    assert gpus.parse(value) == names
    assert gpus.of_step({"CUDA_VISIBLE_DEVICES": value}, len(names)) == names


@pytest.mark.parametrize("value", ["tpu0", "0,GPU-", "0;1", "0,0", "GPU-a b"])
def test_what_is_none_of_them_is_one_clear_line(value: str) -> None:
    with pytest.raises(gpus.GpuError) as caught:
        gpus.parse(value)
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_gets_what_it_was_promised_or_says_so() -> None:
    assert gpus.of_step({}, 0) == ()
    assert gpus.of_step({"SLURM_STEP_GPUS": "1,2", "SLURM_JOB_GPUS": "0,1,2"}, 2) == ("1", "2")
    with pytest.raises(gpus.GpuError, match=r"has 1 GPUs [(]7[)] and was promised 2"):
        gpus.of_step({"CUDA_VISIBLE_DEVICES": "7"}, 2)


def test_where_steps_count_from_zero_the_nodes_own_names_are_used() -> None:
    assert gpus.on_node({"SLURM_STEP_GPUS": "2,3"}, ("0", "1")) == {"0": "2", "1": "3"}
    assert gpus.on_node({"SLURM_JOB_GPUS": "2,3"}, ("0",)) == {"0": "0"}
    assert gpus.on_node({"SLURM_STEP_GPUS": "2"}, ("MIG-a",)) == {"MIG-a": "MIG-a"}
    assert gpus.on_node({}, ()) == {}


def test_choosing_names_the_holders() -> None:
    assert gpus.choose(("0", "1", "2"), {"1": "r-1"}, 2, "r-2") == ("0", "2")
    with pytest.raises(gpus.GpuError, match="r-2 needs 3 GPUs, 2 of 3 are free; held by r-1"):
        gpus.choose(("0", "1", "2"), {"1": "r-1", "9": "r-9"}, 3, "r-2")


def holder(pid: int, replica_id: str = "r-1") -> occupancy.Holder:
    return occupancy.Holder(pid, processes.start_time(pid), "l-1", "l-1.s0", replica_id)


def test_a_living_holder_is_named_and_a_dead_one_forgotten(tmp_path: Path) -> None:
    notes = occupancy.Occupancy(tmp_path, "n1")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        notes.take(["0", "MIG-GPU-a/1/0"], holder(sleeper.pid))
        with pytest.raises(occupancy.Occupied, match=f"held by replica r-1 .*pid {sleeper.pid}"):
            notes.take(["1", "MIG-GPU-a/1/0"], holder(os.getpid(), "r-2"))
        assert notes.holder("1") is None, "nothing is noted when one is refused"
        occupancy.Occupancy(tmp_path, "n2").take(["0"], holder(os.getpid(), "r-2"))
        notes.take(["0"], holder(os.getpid(), "r-1"))
    finally:
        sleeper.communicate(b"\n")
    notes.take(["MIG-GPU-a/1/0"], holder(os.getpid(), "r-2"))
    notes.give_back(["0", "MIG-GPU-a/1/0", "5"], "r-2")
    assert notes.holder("MIG-GPU-a/1/0") is None
    assert notes.holder("0") is not None, "another's note stays"


def test_a_recycled_pid_is_not_the_holder(tmp_path: Path) -> None:
    notes = occupancy.Occupancy(tmp_path, "n1")
    stale = occupancy.Holder(os.getpid(), 1, "l-0", "l-0.s0", "r-0")
    notes.take(["0"], stale)
    assert notes.holder("0") is None


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    taken = tmp_path / "gpus"
    taken.write_text("")
    notes = occupancy.Occupancy(taken, "n1")
    with pytest.raises(occupancy.Occupied, match="gpu_lock_dir"):
        notes.take(["0"], holder(os.getpid()))
    notes.give_back(["0"], "r-1")
    assert taken.read_text() == "", "giving back what was never taken changes nothing"
