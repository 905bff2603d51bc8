"""A slot's supervisor: starts, watches and stops the replicas of one job step."""

from pathlib import Path


def main(spec_path: Path) -> int:
    """Run a slot: the body of ``forebay slot --spec FILE``; returns the exit code."""
    import asyncio
    import logging
    import sys

    from engines import told as tellings
    from engines.slot import scratch, spec, supervisor
    from scheduler.contracts import clock

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        told = spec.SlotSpec.read(Path(spec_path))
    except tellings.SpecError as error:
        print(f"forebay slot: error: {error}", file=sys.stderr)
        return 1
    try:
        with scratch.folder(told.slot_id):
            return asyncio.run(supervisor.serve(told, clock.SystemClock()))
    except PermissionError as error:
        print(f"forebay slot: error: {error}", file=sys.stderr)
        return 1
