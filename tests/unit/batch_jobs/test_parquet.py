"""Answers as Parquet: the usual columns, and no answer so odd that it stops the file."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batch_jobs import parquet, results


def line(body: dict[str, Any]) -> bytes:
    response = {"status_code": 200, "request_id": "r1", "body": body}
    fields = {"id": "batch_req_1_1", "custom_id": "a", "response": response, "error": None}
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("body", "text", "tokens"),
    [
        (
            {
                "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 3},
            },
            "hi",
            (2, 3),
        ),
        ({"choices": [{"text": "ho"}], "usage": {"input_tokens": 4}}, "ho", (4, None)),
        ({"choices": [{"message": {"content": "\ud800"}}]}, "?", (None, None)),
        ({"choices": ["x"], "usage": 7, "model": 5}, None, (None, None)),
        ({"choices": [{"message": None}], "usage": {"prompt_tokens": 1 << 70}}, None, (None, None)),
        ({"data": [[0.5]]}, None, (None, None)),
    ],
)
def test_every_answer_is_a_row(
    tmp_path: Path, body: dict[str, Any], text: str | None, tokens: tuple[int | None, int | None]
) -> None:
    (tmp_path / results.OUTPUT).write_bytes(line(body))
    parquet.build(tmp_path)
    (row,) = pq.read_table(tmp_path / parquet.OUTPUT).to_pylist()
    assert (row["custom_id"], row["status_code"], row["text"]) == ("a", 200, text)
    assert (row["prompt_tokens"], row["output_tokens"]) == tokens


def test_no_answers_no_file(tmp_path: Path) -> None:
    (tmp_path / parquet.OUTPUT).write_bytes(b"of a try before")
    parquet.build(tmp_path)
    assert not (tmp_path / parquet.OUTPUT).exists()


def test_long_answers_are_in_few_rows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand answers with embeddings are gigabytes, in the memory of every job's runner."""
    monkeypatch.setattr(parquet, "_BYTES", 1_000)
    (tmp_path / results.OUTPUT).write_bytes(line({"data": ["x" * 400]}) * 7)
    parquet.build(tmp_path)
    made = pq.ParquetFile(tmp_path / parquet.OUTPUT)
    assert [made.metadata.row_group(n).num_rows for n in range(made.num_row_groups)] == [2, 2, 2, 1]
