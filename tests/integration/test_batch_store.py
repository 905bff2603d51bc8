"""The store under several processes at once: too slow for a unit test, eight interpreters start."""

from pathlib import Path

from batch_jobs import model
from scheduler.runtime.registry import database
from tests.unit.batch_jobs import world


def test_s9_eight_processes_write_without_a_locked_database(tmp_path: Path) -> None:
    url = database.sqlite_url(tmp_path)
    processes = [world.PROCESSES.Process(target=world.hammer, args=(url, 10)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(110)
    assert [process.exitcode for process in processes] == [0] * 8
    store = world.open_store(tmp_path)
    assert sorted(job.job_id for job in store.list()) == list(range(1, 81))
    assert {job.state for job in store.list()} == {model.State.RUNNING}
    store.close()
