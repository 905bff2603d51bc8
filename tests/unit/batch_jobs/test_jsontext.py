"""JSON in batch files: strict where the standard library is not, and each value comes back as it went in."""

import json
from typing import Any

import pytest

from batch_jobs import jsontext


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        "[1.0,1e22,0.1,-0.0,5e-324,123456789012345678901234567890]",
        '"caf\\u00e9 \\u2028 \\u2029 \\u0085 \\n \\\\u2028"',
        '"half \\ud800 of a pair"',
        '"\\ud83d\\ude00"',
        "null",
    ],
)
def test_values_come_back_as_they_went_in_on_one_line(text: str) -> None:
    value: Any = json.loads(text)
    written = jsontext.write(jsontext.read(text.encode()))
    assert json.loads(written) == value
    assert len(written.decode().splitlines()) == 1


@pytest.mark.parametrize(
    "data",
    [b"NaN", b"-Infinity", b"1e400", b"[1e999]", b'{"a":1} x', b"", b'"\x01"', b"\xff", b'"\xff"'],
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        jsontext.read(data)


def test_what_is_nested_too_deeply_is_told_apart() -> None:
    with pytest.raises(RecursionError):
        jsontext.read(b"[" * 100_000 + b"]" * 100_000)
