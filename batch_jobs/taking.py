"""Taking a job over: its journal is the lock, and whoever had it before may have ended the job."""

from pathlib import Path

from batch_jobs import journal_writer, model, runner
from batch_jobs import store as stores


def journal_of(
    store: stores.Store, job: model.BatchJob, folder: Path
) -> journal_writer.Writer | None:
    """Open a job's journal; None: the job is in another state than ``job`` by now. Blocks.

    Raises:
        journal_writer.JournalBusy: another runner works on the job.
        journal.JournalError: it is damaged beyond a torn end.
        OSError: the job's files can't be read.
        sqlalchemy.exc.SQLAlchemyError: the registry does not answer; the journal is let go of.
    """
    writer = runner.open_journal(job, folder)
    current = False
    try:
        newest = store.get(job.job_id)
        current = newest is not None and newest.state is job.state
    finally:
        if not current:
            writer.close()
    return writer if current else None
