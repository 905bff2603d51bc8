"""`python -P -m forebay` is the same as the `forebay` command."""

import sys

from forebay import cli

sys.exit(cli.main())
