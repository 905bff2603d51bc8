"""Each way in which a line can be wrong, and that it costs no other line."""

import json
import random

import pytest

from batch_jobs import lines
from tests.unit.batch_jobs import world

RULES = lines.Rules()
GOOD = world.line("a").strip()


def one(data: bytes, rules: lines.Rules = RULES) -> lines.Line | lines.BadLine | None:
    return lines.parse(lines.RawLine(1, data), rules)


def variant(**fields: object) -> bytes:
    whole = json.loads(GOOD)
    whole.update(fields)
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("data", "code", "custom_id", "words"),
    [
        (b'{"custom_id": "\xff"}', "invalid_utf8", None, "byte 0xFF at column 16"),
        (b"\xff\xfe{\x00}\x00", "invalid_utf8", None, "byte 0xFF at column 1"),
        (b"{", "invalid_json", None, "not JSON"),
        (b'{"custom_id": NaN}', "invalid_json", None, "NaN is not JSON"),
        (b"[" * 100_000, "invalid_json", None, "not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "invalid_json", None, "not JSON"),
        (b"[1]", "invalid_line", None, "must be a JSON object, not an array"),
        (b'"x"', "invalid_line", None, "not a text"),
        (b"null", "invalid_line", None, "not null"),
        (variant(custom_id=...), "missing_custom_id", None, "missing"),
        (variant(custom_id=7), "invalid_custom_id", None, "must be a text"),
        (variant(custom_id=""), "invalid_custom_id", None, "1 to 512"),
        (variant(custom_id="x" * 513), "invalid_custom_id", None, "1 to 512"),
        (b'{"custom_id": "\\ud800"}', "invalid_custom_id", None, "surrogate"),
        (variant(method="GET"), "invalid_method", "a", "must be POST"),
        (variant(method="post"), "invalid_method", "a", "must be POST"),
        (variant(url=...), "invalid_url", "a", "/v1/chat/completions"),
        (variant(url="/v1/images"), "invalid_url", "a", "/v1/chat/completions"),
        (variant(url=["/v1/chat/completions"]), "invalid_url", "a", "/v1/chat/completions"),
        (variant(body=...), "missing_body", "a", "missing"),
        (variant(body=None), "missing_body", "a", "missing"),
        (variant(body=[1]), "invalid_body", "a", "not an array"),
        (variant(body={}), "missing_model", "a", "--model"),
        (variant(body={"model": 3}), "missing_model", "a", "--model"),
        (variant(body={"model": "m", "stream": True}), "invalid_body", "a", "stream"),
        (
            variant(body={"model": "m", "forebay_priority": "interactive"}),
            "invalid_body",
            "a",
            "priority",
        ),
        (
            variant(body={"model": "m", "forebay_adapter": "poet"}),
            "invalid_body",
            "a",
            "as model:adapter",
        ),
    ],
)
def test_a_bad_line_says_what_is_wrong(
    data: bytes, code: str, custom_id: str | None, words: str
) -> None:
    bad = one(data)
    assert isinstance(bad, lines.BadLine)
    assert (bad.code, bad.custom_id) == (code, custom_id)
    assert words in bad.message
    assert len(bad.message) < 400
    assert "\n" not in bad.message


@pytest.mark.parametrize("data", [b"", b"  ", b"\r", b"\t\r"])
def test_a_blank_line_is_none(data: bytes) -> None:
    assert one(data) is None


def test_defaults_fill_what_a_line_leaves_out() -> None:
    rules = lines.Rules(model="chat", endpoint="/v1/embeddings")
    line = one(variant(url=..., method=..., body={"input": "x"}), rules)
    assert isinstance(line, lines.Line)
    assert (line.endpoint, line.model, line.body["input"]) == ("/v1/embeddings", "chat", "x")
    answer = one(variant(url="/v1/responses", body={"model": "chat", "input": "x"}))
    assert isinstance(answer, lines.Line)
    own = one(variant(body={"model": "other"}), rules)
    assert isinstance(own, lines.Line)
    assert own.model == "other"


def test_a_model_that_the_caller_may_not_use_is_refused() -> None:
    bad = one(GOOD, lines.Rules(models=("small",)))
    assert isinstance(bad, lines.BadLine)
    assert bad.code == "forbidden"


def everything(data: bytes, step: int, most: int = 1000) -> list[lines.RawLine]:
    splitter = lines.Splitter(most)
    found: list[lines.RawLine] = []
    for at in range(0, len(data), step):
        found.extend(splitter.feed(data[at : at + step]))
    return [*found, *splitter.close()]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_however_the_chunks_fall(step: int) -> None:
    data = b"\xef\xbb\xbfone\r\n\ntwo\n" + b"x" * 1001 + b"\nlast"
    found = everything(data, step)
    assert [(line.number, line.data, line.too_long) for line in found] == [
        (1, b"one\r", False),
        (2, b"", False),
        (3, b"two", False),
        (4, b"", True),
        (5, b"last", False),
    ]


def test_crlf_and_a_byte_order_mark_are_tolerated() -> None:
    data = lines.BOM + GOOD + b"\r\n" + world.line("b")
    found = [lines.parse(raw, RULES) for raw in everything(data, 64)]
    assert [line.custom_id for line in found if isinstance(line, lines.Line)] == ["a", "b"]


def test_a_huge_line_fails_alone_and_is_never_held() -> None:
    splitter = lines.Splitter(100)
    held = 0
    found: list[lines.RawLine] = []
    for chunk in [b'{"custom_id": "', *[b"x" * 10_000] * 100, b'"}\n', GOOD[:90], b"\n"]:
        found.extend(splitter.feed(chunk))
        held = max(held, len(splitter._rest))
    assert held <= 100
    assert [line.too_long for line in found] == [True, False]
    bad = lines.parse(found[0], RULES)
    assert isinstance(bad, lines.BadLine)
    assert (bad.code, bad.number) == ("line_too_long", 1)


def test_the_second_line_of_an_id_loses_it() -> None:
    seen = lines.Seen()
    first = lines.check(lines.RawLine(1, GOOD), RULES, seen)
    second = lines.check(lines.RawLine(2, GOOD), RULES, seen)
    assert isinstance(first, lines.Line)
    assert isinstance(second, lines.BadLine)
    assert (second.code, second.custom_id) == ("duplicate_custom_id", None)
    assert '"a"' in second.message


def test_a_bad_line_keeps_its_id_from_a_later_one() -> None:
    seen = lines.Seen()
    bad = lines.check(lines.RawLine(1, variant(body=...)), RULES, seen)
    later = lines.check(lines.RawLine(2, GOOD), RULES, seen)
    assert isinstance(bad, lines.BadLine)
    assert bad.custom_id == "a"
    assert isinstance(later, lines.BadLine)
    assert later.code == "duplicate_custom_id"


def test_seen_agrees_with_a_set() -> None:
    chance = random.Random(1)
    seen = lines.Seen()
    known: set[str] = set()
    for _ in range(20_000):
        custom_id = str(chance.randrange(15_000))
        assert seen.add(custom_id) is (custom_id not in known)
        known.add(custom_id)
    assert len(seen) == len(known)


def test_seen_takes_little_memory() -> None:
    seen = lines.Seen()
    for number in range(100_000):
        seen.add(f"request-{number}")
    assert sum(map(len, seen._tables)) <= 100_000 * 9 * 2.7


def test_a_line_of_100_mb_costs_itself_alone_and_no_memory() -> None:
    splitter = lines.Splitter(1 << 20)
    found = [*splitter.feed(world.line("a"))]
    most = 0
    for _ in range(100):
        found += splitter.feed(b"x" * (1 << 20))
        most = max(most, len(splitter._rest))
    found += splitter.feed(b"\n" + world.line("b"))
    assert most <= 1 << 20
    assert [(raw.number, raw.too_long) for raw in found] == [(1, False), (2, True), (3, False)]
    bad = lines.parse(found[1], lines.Rules())
    assert isinstance(bad, lines.BadLine)
    assert bad.code == "line_too_long"
