"""Looks for a job by its stamp after a submission whose answer did not come back."""

from scheduler.contracts import slurm


def submitted(port: slurm.SlurmPort, spec: slurm.JobSpec, why: str) -> slurm.Submitted:
    """Return the job that carries ``spec``'s stamp; never submits anything.

    Args:
        port: where to look.
        spec: what was submitted.
        why: what came back instead of an answer, for the message.

    Raises:
        slurm.SubmitUncertain: it is not there (yet), or there is no stamp to know it by.
    """
    uncertain = slurm.SubmitUncertain(
        f"submitting {spec.name!r}: {why}; it may have been accepted: look for its stamp before trying again"
    )
    if spec.stamp is None:
        raise uncertain
    try:
        jobs = port.jobs()
    except slurm.SlurmError as error:
        raise uncertain from error
    for job in jobs:
        if job.stamp == spec.stamp and job.user in port.users:  # anybody may copy a stamp
            return slurm.Submitted(job.job_id, job.cluster)
    raise uncertain
