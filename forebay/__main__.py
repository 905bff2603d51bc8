"""`python -P -m forebay` is the same as the `forebay` command."""

import os
import sys

from forebay import cli

code = cli.main()
if sys.argv[1:2] and sys.argv[1] in cli.IN_LEASES:
    # What it had to keep is on disk. Taking the interpreter apart is a tenth of a second and more on a busy
    # node, for which the next lease would wait: Slurm gives the GPUs away when the last process has ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
