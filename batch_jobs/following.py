"""The jobs that have not ended, as a runner follows them: a look reads those alone that have changed.

Ten thousand may wait for days while one is looked for four times a second. Calls block.
"""

from collections.abc import Sequence

from batch_jobs import model
from batch_jobs import store as stores

WHOLE_US = 5_000_000  # after so long all is read: a gateway of an older release counts no changes
_MANY = 500  # more changes than this, and all is read as well


class Following:
    """What was last read of the jobs that have not ended.

    Attributes:
        jobs: by id.
    """

    def __init__(self, store: stores.Store) -> None:
        self.jobs: Sequence[model.BatchJob] = ()
        self._store = store
        self._mark: stores.Mark | None = None
        self._revisions: dict[int, int] = {}
        self._whole_us = 0

    def look(self, now_us: int) -> bool:
        """Read what has changed; returns False if nothing has.

        What was read first is the older: a change between two readings is read again at the next look.
        """
        mark = self._store.mark()
        whole = self._mark is None or not 0 <= now_us - self._whole_us < WHOLE_US
        if mark == self._mark and not whole:
            return False
        revisions = self._store.revisions()
        new = [each for each, at in revisions.items() if self._revisions.get(each) != at]
        if whole or len(new) > _MANY:
            self.jobs = self._store.active()
            self._whole_us = now_us
        else:
            kept = {job.job_id: job for job in self.jobs if job.job_id in revisions}
            kept |= {job.job_id: job for job in self._store.these(new)}
            self.jobs = [kept[each] for each in sorted(kept)]
        self._mark, self._revisions = mark, revisions
        return True
