"""Uploaded files: their rows in the registry and their bytes in the state folder, and a team's storage.

A file's bytes are in place, synced, before its row is there; a row is gone before its bytes are. So whatever
dies in between leaves bytes without a row, which `sweep` removes, and never a row without bytes.
"""

import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import BinaryIO

import sqlalchemy as sa

from batch_jobs import checkpoint, intake, model, openai_shape, parquet, results
from batch_jobs import store as stores
from batch_jobs.tables import FILES, JOBS
from scheduler.contracts import errors

FOLDER = "files"
_CHUNK = 1 << 20
_STALE_S = 3_600
StoredFile = openai_shape.StoredFile


class Files:
    """The uploads of all teams. Calls block: an event loop runs them in a thread.

    Args:
        store: the registry's batch jobs.
        state_dir: where the bytes are.
        team_bytes: what a team's uploads and jobs may take together; 0: no limit.
    """

    def __init__(self, store: stores.Store, state_dir: Path, team_bytes: int = 0) -> None:
        self._store = store
        self._folder = state_dir / intake.FOLDER / FOLDER
        self._team_bytes = team_bytes

    def path(self, file_id: str) -> Path:
        """Return where an upload's bytes are."""
        return self._folder / file_id

    def left(self, team: str) -> int | None:
        """Return how many bytes a team may still store; None: as many as it likes."""
        if not self._team_bytes:
            return None
        with self._store.reading() as connection:
            uploads = connection.scalar(
                sa.select(sa.func.coalesce(sa.func.sum(FILES.c.bytes), 0)).where(
                    FILES.c.team == team
                )
            )
            jobs = connection.scalar(
                sa.select(sa.func.coalesce(sa.func.sum(JOBS.c.stored_bytes), 0)).where(
                    JOBS.c.team == team
                )
            )
        return max(0, self._team_bytes - int(uploads or 0) - int(jobs or 0))

    def check(self, team: str, size: int) -> None:
        """Refuse what does not fit into a team's storage.

        Raises:
            errors.QuotaExceeded: it does not.
        """
        left = self.left(team)
        if left is not None and size > left:
            raise errors.QuotaExceeded(
                f"team {team} has {left} bytes of storage left, this takes {size}: delete files or jobs that "
                "are no longer needed, or ask for more ([batch_jobs] team_storage_bytes)"
            )

    def add(self, source: BinaryIO, draft: StoredFile) -> StoredFile:
        """Keep a file.

        Args:
            source: its bytes, from the start.
            draft: what is known of it; `file_id` and `bytes` are set here.

        Raises:
            errors.QuotaExceeded: the team's storage is full.
            OSError: the disk is.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file_id = f"file-{uuid.uuid4().hex}"
        path = self.path(file_id)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                shutil.copyfileobj(source, out, _CHUNK)
                out.flush()
                os.fsync(out.fileno())
                size = out.tell()
            self.check(draft.team, size)
            results.sync_folder(self._folder)
            kept = StoredFile(
                file_id,
                draft.team,
                draft.user,
                draft.purpose,
                draft.name,
                size,
                draft.created_us,
                draft.expires_us,
            )
            with self._store.writing() as connection:
                connection.execute(sa.insert(FILES).values(_row(kept)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return kept

    def get(self, file_id: str) -> StoredFile | None:
        """Return an upload, or None."""
        with self._store.reading() as connection:
            query = sa.select(FILES).where(FILES.c.file_id == file_id)
            row = connection.execute(query).mappings().first()
        return None if row is None else StoredFile(**row)

    def list(self, team: str | None, user: str | None) -> list[StoredFile]:
        """Return uploads by age, oldest first; None: of all."""
        query = sa.select(FILES).order_by(FILES.c.created_us, FILES.c.file_id)
        if team is not None:
            query = query.where(FILES.c.team == team)
        if user is not None:
            query = query.where(FILES.c.user == user)
        with self._store.reading() as connection:
            return [StoredFile(**row) for row in connection.execute(query).mappings()]

    def delete(self, file_id: str) -> None:
        """Remove an upload; jobs that were made of it have their own copy."""
        with self._store.writing() as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.file_id == file_id))
        self.path(file_id).unlink(missing_ok=True)

    def delete_result(self, job_id: int, part: str, state_dir: Path) -> None:
        """Remove the results of an ended job, and its journal, which holds every answer too."""
        folder = intake.job_folder(state_dir, job_id)
        gone = [openai_shape.PARTS[part], results.JOURNAL, checkpoint.NAME]
        if part == "output":
            gone.append(parquet.OUTPUT)
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # all of it has just expired
            self._store.stored(job_id, intake.stored_bytes(folder))

    def of_job(self, job: model.BatchJob, part: str, state_dir: Path) -> StoredFile | None:
        """Return one of a job's files, or None if it is not there."""
        path = intake.job_folder(state_dir, job.job_id) / openai_shape.PARTS[part]
        if part != "input" and not job.state.final:
            return None
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        created = job.submitted_us if part == "input" else job.ended_us
        keep_us = job.output_keep_s * 1_000_000
        return StoredFile(
            openai_shape.file_id(job.job_id, part),
            job.team,
            job.user,
            "batch" if part == "input" else "batch_output",
            f"{openai_shape.batch_id(job.job_id)}_{part}.jsonl",
            size,
            created,
            created + keep_us if keep_us and part != "input" else 0,
        )


def sweep(
    files: Files, store: stores.Store, state_dir: Path, now_us: int, *, keep_s: int
) -> list[str]:
    """Remove what has expired: uploads, jobs' results and whole jobs' files. Blocks.

    Args:
        files: the uploads.
        store: the registry's batch jobs.
        state_dir: where the files are.
        now_us: UTC µs.
        keep_s: seconds after its end for which a job's files are kept; 0: for ever.

    Returns:
        One line for each thing removed.
    """
    done = []
    for each in files.list(None, None):
        if each.expires_us and each.expires_us <= now_us:
            files.delete(each.file_id)
            done.append(f"file {each.file_id} of team {each.team} has expired")
    folders = list(
        (state_dir / intake.FOLDER).glob("[0-9]*")
    )  # before the rows: none is new to them
    jobs = store.kept()
    for job in jobs:
        kept_s = min(filter(None, (keep_s, job.output_keep_s)), default=0)
        if job.ended_us and kept_s and job.ended_us + kept_s * 1_000_000 <= now_us:
            folder = intake.job_folder(state_dir, job.job_id)
            shutil.rmtree(folder, ignore_errors=True)  # its journal, too, holds every answer
            store.purged(job.job_id, now_us)
            done.append(f"files of job {job.job_id} were kept for {kept_s} s")
    known = {str(job.job_id) for job in jobs}
    for path in folders:
        # Of an insert that was undone, or what could not be removed when its time had come.
        if keep_s and path.name not in known and _older(path, keep_s):
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"{path}: of no job, and older than {keep_s} s")
    _orphans(files, state_dir)
    intake.sweep(state_dir)
    return done


def _orphans(files: Files, state_dir: Path) -> None:
    """Remove bytes whose row was never written, or is gone."""
    known = {each.file_id for each in files.list(None, None)}
    for path in (state_dir / intake.FOLDER / FOLDER).glob("file-*"):
        if path.name not in known and _older(path, _STALE_S):
            path.unlink(missing_ok=True)


def _older(path: Path, seconds: float) -> bool:
    """Whether nothing has come to a path for so long; it may be gone by now."""
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:
        return False


def _row(kept: StoredFile) -> dict[str, object]:
    return {column.name: getattr(kept, column.name) for column in FILES.columns}
