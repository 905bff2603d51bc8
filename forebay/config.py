"""Which table of forebay.toml is declared where, and how the file is found."""

import os
from collections.abc import Mapping
from pathlib import Path

from accounting import settings as accounting_settings
from batch_jobs import settings as batch_settings
from engines import settings as engine_settings
from forebay import settings as forebay_settings
from gateway import settings as gateway_settings
from scheduler.runtime import config
from scheduler.runtime import settings as scheduler_settings
from slurm_plugins import settings as slurm_settings

TABLES: Mapping[str, type] = {
    "forebay": forebay_settings.ForebaySettings,
    "scheduler": scheduler_settings.Settings,
    "slurm": slurm_settings.SlurmSettings,
    "gateway": gateway_settings.GatewaySettings,
    "engines": engine_settings.EnginesSettings,
    "batch_jobs": batch_settings.BatchJobsSettings,
    "accounting": accounting_settings.Accounting,
}
_PLACES = (Path("forebay.toml"), Path("/etc/forebay/forebay.toml"))


def find(given: str) -> Path | None:
    """Return the file named by ``--config``, by ``FOREBAY_CONFIG``, or the first that is there."""
    named = given or os.environ.get("FOREBAY_CONFIG", "")
    if named:
        return Path(named)
    return next((place for place in _PLACES if place.exists()), None)


def load(path: Path | None) -> config.Config:
    """Read and check the configuration; raises `config.ConfigError` with the lines at fault."""
    return config.load(path, TABLES)
