"""Lines that share the beginning of their prompts run one after the other, wherever they stand."""

import collections
import itertools
import json
import os
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from batch_jobs import checkpoint, client, grouping, intake, journal, lines, reading, results
from tests.unit.batch_jobs import world


def chat(*said: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in said]
    return grouping.prefix({"messages": messages, **more})


def test_the_key_is_the_prompts_beginning_whatever_stands_before_it() -> None:
    assert chat("a" * 99, "b", max_tokens=3) == chat("a" * 99, "b", temperature=1)
    assert len(chat("x" * 200_000, "y")) == 128 * 1024
    assert grouping.prefix({"prompt": "once upon"}) == b"once upon"
    assert grouping.prefix({"prompt": [1, 2, 3]}) == b"123"
    assert grouping.prefix({"input": ["a", "b"]}) == b'"a""b"'
    assert grouping.prefix({}) == grouping.prefix({"messages": None}) == b""
    keys = {len(grouping.key({"prompt": "x" * size})) for size in (0, 1, 128, 129, 5_000, 300_000)}
    assert keys == {44}
    assert grouping.key({"prompt": "x", "model": "a"}) != grouping.key(
        {"prompt": "x", "model": "b"}
    )


@pytest.mark.parametrize("system", [1, 40])
def test_lines_are_sorted_so_that_each_finds_what_the_one_before_it_left(system: int) -> None:
    """Two depths: documents behind a system prompt, which is every line's or one of forty."""
    chance = random.Random(7)
    systems = [f"system {n} " + "rule " * 200 for n in range(system)]
    documents = [f"{chance.choice(systems)} document {n} " + "fact " * 2_000 for n in range(40)]
    prompts = [f"{text} question {n}" for text in documents for n in range(10)]
    chance.shuffle(prompts)
    found = sorted(prompts, key=lambda prompt: grouping.key({"prompt": prompt}))
    best = grouping.saved([text.encode() for text in sorted(prompts)])
    assert grouping.saved([text.encode() for text in found]) > 0.97 * best
    assert best > 3 * grouping.saved([text.encode() for text in prompts])


def numbers(found: list[client.Work | lines.BadLine]) -> list[int]:
    return [each.line.number if isinstance(each, client.Work) else each.number for each in found]


def reader(
    folder: Path, data: bytes, done: tuple[int, ...] = (), most: int = 1 << 20
) -> reading.Reader:
    (folder / results.INPUT).write_bytes(data)
    states = bytearray(data.count(b"\n") + 2)
    for number in done:
        states[number] = 1
    known = journal.Recovered(states=states, marks=array("Q", [0]))
    source = results.Source(folder, 1, len(states) - 1, lines.Rules(), most)
    return reading.Reader(source, known)


def everything(found: reading.Reader) -> list[client.Work | lines.BadLine]:
    return list(itertools.chain.from_iterable(iter(found.read, [])))


def test_long_documents_are_grouped_across_the_file_and_come_whole(tmp_path: Path) -> None:
    """A thousand lines of 20 KB: what was read of them at once would hold twenty-five."""
    chance = random.Random(3)
    rows = [
        world.line(f"c{n}", messages=[{"role": "user", "content": f"doc {n % 40} " + "x" * 20_000}])
        for n in range(1_000)
    ]
    chance.shuffle(rows)
    found = everything(reader(tmp_path, b"".join(rows)))
    works = [each for each in found if isinstance(each, client.Work)]
    assert sorted(numbers(found)) == list(range(1, 1_001))
    for work in works[:50]:
        assert json.loads(work.payload) == json.loads(rows[work.line.number - 1])["body"]
        assert work.line.body == {"model": "chat"}
    said = [json.loads(work.payload)["messages"][0]["content"] for work in works]
    runs = [text for text, _ in itertools.groupby(said)]
    assert len(runs) == len(set(said)) == 40


def test_what_is_done_blank_or_bad_is_told_apart(tmp_path: Path) -> None:
    rows = [b"\xef\xbb\xbf" + world.line("first"), b"\r\n", world.line("c3"), b"[]\n"]
    rows += [world.line("c5").replace(b"\n", b"\r\n"), world.line("c6"), b"x" * 2_000 + b"\n"]
    data = b"".join([*rows, world.line("last").rstrip(b"\n")])
    found = everything(reader(tmp_path, data, done=(3,), most=1_000))
    bad = [each.number for each in found if isinstance(each, lines.BadLine)]
    ids = {each.line.custom_id for each in found if isinstance(each, client.Work)}
    assert bad == [4, 7]
    assert ids == {"first", "c5", "c6", "last"}
    assert everything(reader(tmp_path, world.many(3), done=(1, 2, 3))) == []
    assert everything(reader(tmp_path, b"\n\n")) == []


def test_windows_follow_each_other_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FIRST", 3)
    monkeypatch.setattr(reading, "_MOST", 8)
    monkeypatch.setattr(grouping, "LINES", 2)
    found = everything(reader(tmp_path, world.many(100)))
    assert collections.Counter(numbers(found)) == collections.Counter(range(1, 101))
    assert set(numbers(found)[:3]) == {1, 2, 3}


def test_all_models_lines_come_at_once(tmp_path: Path) -> None:
    """Else the fleet of one would stand idle while lines of the other, that begin alike, are read."""
    begin = "you are a translator, " * 20
    rows = [
        world.line(
            f"c{n}", model="ab"[n % 2], messages=[{"role": "user", "content": f"{begin}{n}"}]
        )
        for n in range(4 * grouping.LINES)
    ]
    found = reader(tmp_path, b"".join(rows))
    some = found.read()
    models = collections.Counter(each.line.model for each in some if isinstance(each, client.Work))
    assert models == {"a": grouping.LINES // 2, "b": grouping.LINES // 2}
    assert collections.Counter(numbers([*some, *everything(found)])) == collections.Counter(
        range(1, len(rows) + 1)
    )


def test_many_models_with_long_lines_take_turns(tmp_path: Path) -> None:
    """No more is read at once than of one model, and none waits until another's lines are over."""
    long = "x" * (grouping.BYTES // 4)
    rows = [
        world.line(
            f"c{n}", model=f"m{n % 10}", messages=[{"role": "user", "content": f"{n}{long}"}]
        )
        for n in range(40)
    ]
    found = reader(tmp_path, b"".join(rows))
    turns = list(iter(found.read, []))
    assert {len(turn) for turn in turns} == {4}
    early = [
        work.line.model for turn in turns[:5] for work in turn if isinstance(work, client.Work)
    ]
    assert set(collections.Counter(early).values()) == {2}
    assert sorted(numbers([*itertools.chain.from_iterable(turns)])) == list(range(1, 41))


def noted(folder: Path, rows: Sequence[bytes]) -> None:
    """Note the models of lines, as intake does."""
    names = collections.Counter(json.loads(row)["body"]["model"] for row in rows)
    (folder / intake.MODELS).write_text(json.dumps(names))


def models_of(found: Sequence[client.Work | lines.BadLine]) -> set[str]:
    return {each.line.model for each in found if isinstance(each, client.Work)}


def test_no_fleet_waits_for_the_lines_of_a_full_one_wherever_its_own_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PASSED", 4)
    monkeypatch.setattr(reading, "_FIRST", 8)
    names = "a" * 50 + "bbb" + "a" * 30 + "bb"
    rows = [world.line(f"c{n}", model=name) for n, name in enumerate(names)]
    noted(tmp_path, rows)
    found = reader(tmp_path, b"".join(rows))
    some = [each for _ in range(50) if found.more({"a"}) for each in found.read({"a"})]
    assert not found.more({"a"})
    assert models_of(some) == {"b"}
    assert sorted(numbers(some)) == [51, 52, 53, 84, 85]
    assert len(found._plan["a"]) == 4
    assert not found.exhausted
    rest = [each for _ in range(50) if not found.exhausted for each in found.read({"b"})]
    assert found.exhausted
    assert sorted(numbers([*some, *rest])) == list(range(1, 86))


def test_a_job_of_one_model_is_read_no_further_than_it_runs(tmp_path: Path) -> None:
    rows = [world.line(f"c{n}") for n in range(3_000)]
    noted(tmp_path, rows)
    found = reader(tmp_path, b"".join(rows))
    assert not found.more({"chat"}), "none of it is wanted, and there is no other"
    assert found.read({"chat"}) == []
    assert found.more(())
    assert len(found.read()) == grouping.LINES
    assert not found.more({"chat"})
    assert not found.exhausted


def test_a_job_that_is_taken_up_again_looks_for_no_lines_that_have_their_answers(
    tmp_path: Path,
) -> None:
    """Else its whole file, of 20 GB perhaps, would be read in search of them while the other is full."""
    rows = [world.line(f"c{n}", model="ba"[n >= 3]) for n in range(3_000)]
    noted(tmp_path, rows)
    before = reader(tmp_path, b"".join(rows))
    known = journal.Recovered(states=bytearray(len(rows) + 1))
    for number in (1, 2, 3):
        entry = journal.Entry(journal.Kind.SUCCEEDED, number, before.number("b"), b"{}\n")
        assert known.add(entry)
    data = msgspec.msgpack.encode(known.kept(1))
    kept = journal.Recovered.of(msgspec.msgpack.decode(data, type=checkpoint.Checkpoint))
    for done in (known, kept):
        found = reading.Reader(before._source, done)
        assert not found.more({"a"}), "of b none is left"
        assert len(found.read()) == grouping.LINES
        assert not found.more({"a"})


def test_lines_in_order_of_many_full_models_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_PASSED", 16), ("_FIRST", 4), ("_MOST", 64)):
        monkeypatch.setattr(reading, name, value)
    monkeypatch.setattr(grouping, "LINES", 2)
    rows = [world.line(f"c{n}", model=f"m{n // 64}") for n in range(20 * 64)]
    noted(tmp_path, rows)
    found = reader(tmp_path, b"".join(rows))
    enough: set[str] = set()
    read: list[client.Work | lines.BadLine] = []
    while found.more(enough):
        some = found.read(enough)
        read += some
        enough |= models_of(some)
        assert sum(map(len, found._plan.values())) <= 64 + 20 * 4
    assert len(enough) == 20, "each of them has begun"
    while not found.exhausted:
        read += found.read()
    assert sorted(numbers(read)) == list(range(1, 20 * 64 + 1))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_wanted_each_line_comes_once_and_none_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    for module, name, most in (
        (reading, "_PASSED", 5), (reading, "_FIRST", 4), (reading, "_MOST", 9), (grouping, "LINES", 4),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, chance.randint(1, most))
    names = "abc"[: chance.randint(1, 3)]
    rows = [world.line(f"c{n}", model=chance.choice(names)) for n in range(chance.randint(1, 60))]
    if chance.random() < 0.5:
        rows.sort(key=lambda row: str(json.loads(row)["body"]["model"]))
    if chance.random() < 0.7:
        noted(tmp_path, rows)
    done = tuple(chance.sample(range(1, len(rows) + 1), len(rows) // 4))
    found = reader(tmp_path, b"".join([*rows, b"\n", b"not json\n"]), done)
    read: list[client.Work | lines.BadLine] = []
    for _ in range(2_000):
        if found.exhausted:
            break
        assert found.more(())
        enough = {name for name in names if chance.random() < 0.6}
        some = found.read(enough) if found.more(enough) else []
        assert not models_of(some) & enough
        read += some
    assert found.exhausted
    open_lines = {*range(1, len(rows) + 1), len(rows) + 2} - {*done}
    assert collections.Counter(numbers(read)) == collections.Counter(open_lines)


@pytest.mark.parametrize("where", ["open", "pread"])
def test_what_can_not_be_read_now_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    chance, failed = random.Random(1), 0

    def refusing(real: object) -> object:
        def call(*arguments: object) -> object:
            if chance.random() < 0.3:
                raise OSError(5, "Input/output error")
            return real(*arguments)  # type: ignore[operator]

        return call

    found = reader(tmp_path, world.many(50) + b"not json\n")
    monkeypatch.setattr(grouping, "LINES", 7)
    owner = Path if where == "open" else os
    monkeypatch.setattr(owner, where, refusing(getattr(owner, where)))
    read: list[client.Work | lines.BadLine] = []
    while True:
        try:
            some = found.read()
        except OSError:
            failed += 1
            continue
        read += some
        if not some:
            break
    assert failed
    assert collections.Counter(numbers(read)) == collections.Counter(range(1, 52))


@pytest.mark.parametrize("model", ["chat", "chat:poet"])
def test_a_line_that_waits_keeps_its_models_name_and_its_body_once(model: str) -> None:
    line = lines.parse(lines.RawLine(1, world.line("a", model=model)), lines.Rules())
    assert isinstance(line, lines.Line)
    found = client.Work.of(line)
    assert found.line.body == {"model": model}
    assert b"messages" in found.payload
