"""`forebay sql`: finds the state folder and asks the recorded tables; loaded for this command alone."""

import datetime
import os
import sys

from accounting import settings as accounting_settings
from accounting import sql_command
from forebay import config as configs
from forebay import settings
from scheduler.contracts import command_line, times
from scheduler.runtime import config


def main(argv: list[str]) -> int:
    """Run one query or export; returns the exit code."""
    return command_line.run("forebay sql", lambda: _run(argv))


def _run(argv: list[str]) -> int:
    parser = command_line.Parser(
        prog="forebay sql",
        description="Query the recorded tables (docs/sql.md), or export them as Parquet.",
        epilog="examples:\n  forebay sql 'SELECT team, sum(cost) / 1e6 FROM bill GROUP BY team'\n"
        "  forebay sql -S 2026-11-01 -E 2026-12-01 --export /tmp/november",
    )
    parser.add_argument("--config", default="", metavar="FILE", help="forebay.toml")
    sql_command.declare(parser)
    asked = parser.parse_args(argv)
    try:
        loaded = configs.load(configs.find(asked.config))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error
    return sql_command.run(
        asked,
        state_dir=loaded.table(settings.ForebaySettings).state_dir,
        table=loaded.table(accounting_settings.Accounting),
        streams=(sys.stdout, sys.stderr),
        now=datetime.datetime.now(datetime.UTC),
        tz=times.local_zone(os.environ),
    )
