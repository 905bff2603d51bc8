"""Accounts and users in the development cluster's slurmdbd, by sacctmgr."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from slurm_plugins.devcluster import site


def create(
    result: site.Site, accounts: Mapping[str, Sequence[str]], service: Sequence[str]
) -> None:
    """Register the cluster, and each account with its users and the service users.

    What is there already stays as it is.

    Raises:
        site.DevClusterError: sacctmgr refused.
    """
    _sacctmgr(result, ["add", "cluster", result.cluster])
    for account, users in accounts.items():
        _sacctmgr(result, ["add", "account", account, f"cluster={result.cluster}"])
        everybody = sorted({*users, *service})
        if everybody:
            _sacctmgr(
                result,
                [
                    "add",
                    "user",
                    ",".join(everybody),
                    f"account={account}",
                    f"cluster={result.cluster}",
                ],
            )


def _sacctmgr(result: site.Site, words: Sequence[str]) -> None:
    run = subprocess.run(
        ["sacctmgr", "-i", "-Q", *words],
        env={**os.environ, **result.env()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = " ".join((run.stdout + run.stderr).split())
    # Exit status 1 is also the answer to "it is there already".
    if run.returncode and "Nothing new added" not in said and "already exists" not in said:
        raise site.DevClusterError(f"sacctmgr {' '.join(words)}: {said}")
