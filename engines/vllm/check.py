"""Asks vLLM's own parser whether it takes a spec: ``<engine's python> -P -m engines.vllm.check``.

Specs as JSON lines on stdin, a JSON line ``{"fault": …}`` for each on stdout, "" where there is none. Runs at
registration, so that a slip in an option is told then and not by a replica that does not start.
"""

import json
import os
import sys
from typing import Any, TextIO

from engines.vllm import arguments, process
from scheduler.contracts import spec_json


def fault(text: str, parse: Any) -> str:
    """Return what is wrong with the spec in ``text``, or ""."""
    spec = spec_json.read(json.loads(text))
    try:
        parse(spec)
    except arguments.ArgumentError as error:
        return " ".join(str(error).split())
    return ""


def main(asked: TextIO, told: TextIO) -> int:
    """Judge each spec."""
    process.prepare()
    from engines.vllm import configure

    for line in asked:
        print(json.dumps({"fault": fault(line, configure.parse)}), file=told, flush=True)
    return 0


if __name__ == "__main__":
    # Whatever an import prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, answers))
