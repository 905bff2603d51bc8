"""Whether anything about models has changed since the last look: LISTEN on PostgreSQL, else a counter."""

import logging
import threading
import time
from collections.abc import Callable

import psycopg

from scheduler.runtime.registry import database, declared

log = logging.getLogger(__name__)
LISTEN_S = 1.0  # how long one wait for a notice takes; a stop is heard within so long
RETRY_S = 1.0


class Watcher:
    """Told of changes; `moved` blocks for a query on SQLite, and not at all on PostgreSQL.

    Args:
        base: the registry's database.
        serial: reads the counter that every change moves.
    """

    def __init__(self, base: database.Database, serial: Callable[[], int]) -> None:
        self._url = base.url
        self._serial = serial
        self._seen = -1
        self._news = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if base.url.get_backend_name() == "postgresql":
            self._thread = threading.Thread(target=self._listen, name="catalog-watch", daemon=True)
            self._thread.start()

    def moved(self) -> bool:
        """Return whether there was a change since the last call; raises `SQLAlchemyError`."""
        if self._thread is None:
            before, self._seen = self._seen, self._serial()
            return before != self._seen
        found = self._news.is_set()
        self._news.clear()
        return found

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()

    def _listen(self) -> None:
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        while not self._ending.is_set():
            try:
                with psycopg.connect(url, autocommit=True, **database.POSTGRES) as connection:
                    connection.execute(f"LISTEN {declared.CHANNEL}")
                    self._news.set()  # whatever came while nobody listened
                    while not self._ending.is_set():
                        for _ in connection.notifies(timeout=LISTEN_S, stop_after=1):
                            self._news.set()
            except psycopg.Error as error:
                log.info("registry does not answer, the last catalog counts: %s", error)
                time.sleep(RETRY_S)  # a thread of its own; `close` leaves it behind
