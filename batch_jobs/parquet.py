"""A job's answers as Parquet, made of its output file: for those who read them with pandas or DuckDB."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batch_jobs import results

FORMAT = "parquet"
OUTPUT = "output.parquet"
_ROWS = 2_000  # in a row group: what is in memory at once
_BYTES = 32 * 1024 * 1024  # of their lines: an answer with embeddings may have megabytes
_COLUMNS = {
    "custom_id": "string",
    "id": "string",
    "status_code": "int16",
    "request_id": "string",
    "model": "string",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "body": "string",
}


def row(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the output file as a row; ``body`` is all of the answer, as JSON."""
    response = line["response"]
    body = response["body"]
    choices = body.get("choices")
    choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
    text = (
        _object(choice.get("message")).get("content") if "message" in choice else choice.get("text")
    )
    usage = _object(body.get("usage"))
    return {
        "custom_id": line["custom_id"],
        "id": line["id"],
        "status_code": response["status_code"],
        "request_id": response["request_id"],
        "model": _text(body.get("model")),
        "text": _text(text),
        "finish_reason": _text(choice.get("finish_reason")),
        "prompt_tokens": _whole(usage.get("prompt_tokens", usage.get("input_tokens"))),
        "output_tokens": _whole(usage.get("completion_tokens", usage.get("output_tokens"))),
        "body": _text(json.dumps(body, separators=(",", ":"), ensure_ascii=False)),
    }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    """Return a text as a column takes it: half a surrogate pair becomes a question mark."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 63 else None


def build(folder: Path) -> None:
    """Write the Parquet file beside the output file, by atomic rename; none where there are no answers.

    Raises:
        OSError: the disk refused.
    """
    # A seventh of a runner's memory, for the few jobs that ask for it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()])
    source, part = folder / results.OUTPUT, folder / f".{OUTPUT}.part"
    if not source.is_file():
        (folder / OUTPUT).unlink(missing_ok=True)
        return
    with part.open("wb") as out:
        with pq.ParquetWriter(out, schema, compression="zstd") as writer:
            for rows in _groups(source):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        out.flush()
        os.fsync(out.fileno())
    part.replace(folder / OUTPUT)
    results.sync_folder(folder)


def _groups(source: Path) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    with source.open("rb") as file:
        for text in file:
            rows.append(row(json.loads(text)))
            size += len(text)
            if len(rows) >= _ROWS or size >= _BYTES:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows
