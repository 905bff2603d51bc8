"""A job's answers as Parquet, made of its output file: for those who read them with pandas or DuckDB."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batch_jobs import results

FORMAT = "parquet"
OUTPUT = "output.parquet"
_ROWS = 2_000  # in a row group: what is in memory at once
_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("id", pa.string()),
        ("status_code", pa.int16()),
        ("request_id", pa.string()),
        ("model", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("body", pa.string()),
    ]
)


def row(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the output file as a row; ``body`` is all of the answer, as JSON."""
    response = line["response"]
    body = response["body"]
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    message = choice.get("message") or {}
    text = message.get("content") if message else choice.get("text")
    usage = body.get("usage") or {}
    return {
        "custom_id": line["custom_id"],
        "id": line["id"],
        "status_code": response["status_code"],
        "request_id": response["request_id"],
        "model": body.get("model"),
        "text": text if isinstance(text, str) else None,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "body": json.dumps(body, separators=(",", ":"), ensure_ascii=False),
    }


def build(folder: Path) -> None:
    """Write the Parquet file beside the output file, by atomic rename; none where there are no answers.

    Raises:
        OSError: the disk refused.
    """
    source, part = folder / results.OUTPUT, folder / f".{OUTPUT}.part"
    if not source.is_file():
        (folder / OUTPUT).unlink(missing_ok=True)
        return
    with part.open("wb") as out:
        with pq.ParquetWriter(out, _SCHEMA, compression="zstd") as writer:
            for rows in _groups(source):
                writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
        out.flush()
        os.fsync(out.fileno())
    part.replace(folder / OUTPUT)
    results.sync_folder(folder)


def _groups(source: Path) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    with source.open("rb") as file:
        for text in file:
            rows.append(row(json.loads(text)))
            if len(rows) >= _ROWS:
                yield rows
                rows = []
    if rows:
        yield rows
