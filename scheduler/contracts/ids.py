"""Identifiers: one type each, so that mypy catches a lease id passed for a replica id."""

import os
import time
from typing import NewType

RequestId = NewType("RequestId", str)  # UUIDv7 text, made by the gateway, never by a caller
LeaseId = NewType("LeaseId", str)  # "l-" + 12 hex digits, stamped into the Slurm job's comment
SlotId = NewType("SlotId", str)  # "<lease id>.s<k>"
ReplicaId = NewType("ReplicaId", str)  # "r-" + 12 hex digits; a restarted engine is a new replica
SlurmJobId = NewType("SlurmJobId", str)  # decimal text as Slurm prints it, without the cluster
BatchJobId = NewType("BatchJobId", int)  # counts up from 1, as sbatch's do


def uuid7(unix_ms: int | None = None, random_bytes: bytes | None = None) -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): sorts by time, so that Parquet packs it well.

    Args:
        unix_ms: milliseconds since the epoch; now if not given.
        random_bytes: 10 bytes of randomness; the kernel's if not given.
    """
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    noise = os.urandom(10) if random_bytes is None else random_bytes
    low = int.from_bytes(noise, "big")
    digits = (
        f"{stamp & (1 << 48) - 1:012x}7{low >> 64 & 0xFFF:03x}{low & (1 << 62) - 1 | 1 << 63:016x}"
    )
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def short_id(prefix: str, random_bytes: bytes | None = None) -> str:
    """Return ``<prefix>-`` and 12 hex digits, for leases (`l`) and replicas (`r`)."""
    return f"{prefix}-{(os.urandom(6) if random_bytes is None else random_bytes).hex()}"
