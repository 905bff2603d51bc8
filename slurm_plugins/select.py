"""Chooses the client that reaches Slurm."""

from pathlib import Path

from scheduler.contracts import slurm
from slurm_plugins import cli, embedded, settings


def connect(table: settings.SlurmSettings, folder: Path | None = None) -> slurm.SlurmPort:
    """Return the client that the settings name."""
    if table.client == "embedded":
        shape = embedded.Shape(table.embedded_nodes, table.embedded_gpus, table.embedded_cpus)
        return embedded.EmbeddedClient(
            folder or Path("build/embedded"), shape=shape, kill_wait_s=table.embedded_kill_wait_s
        )
    return cli.CliClient(
        Path(table.conf) if table.conf else None,
        cluster=table.cluster,
        timeout_s=table.call_timeout_s,
    )
