"""One installation's shared things: configuration, state folder, secrets, Slurm, registry."""

import dataclasses
import logging
import os
from pathlib import Path

from accounting import settings as accounting_settings
from forebay import settings as forebay_settings
from forebay import sinks
from scheduler.contracts import clock, requests, slurm
from scheduler.runtime import config as configs
from scheduler.runtime import guard
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.registry import database, keys, store
from slurm_plugins import settings as slurm_settings

log = logging.getLogger(__name__)
SERVICE_KEY = "service.key"
ADMIN_KEY = "admin.key"
_PLATFORM = "forebay"  # team of Forebay's own keys


@dataclasses.dataclass(frozen=True)
class Installation:
    """What every process of one installation shares.

    Attributes:
        config: the checked configuration.
        state: the state folder, absolute.
    """

    config: configs.Config
    state: Path

    @classmethod
    def open(cls, loaded: configs.Config) -> "Installation":
        """Make the state folder's parts, secrets included, and return the installation.

        Raises:
            OSError: the folder can't be made or written.
        """
        state = loaded.table(forebay_settings.ForebaySettings).state_dir.absolute()
        for name in ("spool", "parquet", "batch", "logs", "leases", "run"):
            (state / name).mkdir(parents=True, exist_ok=True)
        here = cls(loaded, state)
        guard.token(state)
        for name in (SERVICE_KEY, ADMIN_KEY):
            here.secret(name)
        os.environ[sinks.SPOOL] = here.spool()
        return here

    @property
    def stable_s(self) -> float:
        """How many seconds a part has to live to be started again as if for the first time."""
        return self.config.table(forebay_settings.ForebaySettings).stable_s

    def spool(self) -> str:
        """Return how this installation's spools are kept, for the environment of its processes."""
        table = self.config.table(accounting_settings.Accounting)
        return sinks.describe(
            self.state / "spool",
            segment_bytes=table.segment_bytes,
            max_age_s=table.segment_age_s,
        )

    def secret_file(self, name: str) -> Path:
        """Return the path of a secret."""
        return self.state / "secrets" / name

    def secret(self, name: str) -> str:
        """Return one of Forebay's own API keys; made (0600, never replaced) if it is not there yet."""
        return guard.kept(self.secret_file(name), keys.new_token)

    def registry_url(self) -> str:
        """Return the registry's SQLAlchemy URL."""
        named = self.config.table(scheduler_settings.Settings).registry_url
        return named or database.sqlite_url(self.state)

    def open_registry(self) -> store.Registry:
        """Open the registry, bring its schema up to date, and keep Forebay's own keys in it."""
        opened = store.Registry.open(self.registry_url())
        now_us = clock.SystemClock().wall_us()
        every = tuple(requests.Tier)
        service = keys.Key("", _PLATFORM, "batchd", (requests.Tier.BATCH,), service=True)
        admin = keys.Key("", _PLATFORM, "root", every, admin=True)
        for name, wish in ((SERVICE_KEY, service), (ADMIN_KEY, admin)):
            opened.keys.put(wish, self.secret(name), now_us)
        return opened

    def connect_slurm(self) -> slurm.SlurmPort:
        """Connect to Slurm as the configuration says; raises `slurm.SlurmError`."""
        from slurm_plugins import select  # with every way to Slurm: not every process has one

        choice = select.connect(self.config.table(slurm_settings.SlurmSettings), self.state)
        log.info("Slurm by %s", choice.reason)
        return choice.port
