"""A step's marks are its task's alone: srun must outlive the sweep for what the step left behind."""

import pytest

from scheduler.contracts import slurm
from slurm_plugins import sbatch, steps

MARKS = {"FOREBAY_LEASE": "l-1", "FOREBAY_SLOT": "l-1.s0"}


def test_the_task_gets_the_marks_by_an_option() -> None:
    """srun bore them too and was killed with them: the GPUs of each lease given back came 2 s later."""
    options = sbatch.srun_arguments("7", gpus=4, cpus=1)
    told = steps.exporting(options, MARKS)
    assert "--export=ALL,FOREBAY_LEASE=l-1,FOREBAY_SLOT=l-1.s0" in told
    assert len(told) == len(options)
    assert steps.exporting(options, {}) == options


def test_a_value_that_the_option_cannot_tell_is_refused() -> None:
    with pytest.raises(slurm.SlurmRefused, match="FOREBAY_SLOT"):
        steps.exporting(["--export=ALL"], {"FOREBAY_SLOT": "a,b"})
