"""How jobs of the Slurm cluster stand, for batch jobs that wait for them (``afterok:slurm:4711``)."""

from collections.abc import Mapping, Sequence

from batch_jobs import dependencies
from forebay import installation
from scheduler.contracts import ids, slurm

_GOOD = frozenset({slurm.JobState.COMPLETED})
_WAITS = frozenset({slurm.JobState.PENDING})


class Fates:
    """Asks Slurm when somebody waits for a job of its own; connects then, and not before.

    Slurm's controller forgets a job some minutes after its end (MinJobAge): accounting is asked for those.
    """

    def __init__(self, here: installation.Installation) -> None:
        self._here = here
        self._port: slurm.SlurmPort | None = None

    def __call__(self, wanted: Sequence[int]) -> Mapping[int, dependencies.Fate]:
        """Return how each stands; raises OSError where Slurm does not answer."""
        try:
            if self._port is None:
                self._port = self._here.connect_slurm()
            found = self._port.states([ids.SlurmJobId(str(each)) for each in wanted])
            return {int(each): self._fate(each, state) for each, state in found.items()}
        except slurm.SlurmError as error:
            raise OSError(str(error)) from error

    def _fate(self, job_id: ids.SlurmJobId, state: slurm.JobState) -> dependencies.Fate:
        if state is slurm.JobState.UNKNOWN and self._port is not None:
            try:
                runs = self._port.accounting(job_id)
            except slurm.AccountingOff:
                runs = ()
            state = runs[-1].state if runs else state
        return fate(state)


def fate(state: slurm.JobState) -> dependencies.Fate:
    """Return what a state of Slurm's means for who waits; an unknown one is waited for."""
    if state is slurm.JobState.UNKNOWN:
        return dependencies.Fate.UNKNOWN
    if state.final:
        return dependencies.Fate.OK if state in _GOOD else dependencies.Fate.NOT_OK
    return dependencies.Fate.WAITING if state in _WAITS else dependencies.Fate.RUNNING
