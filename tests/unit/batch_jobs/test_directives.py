"""CLI.md's vectors for `#FBATCH` lines."""

import pytest

from batch_jobs import directives


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" --model=chat", ["--model=chat"]),
        (" -J name --hold", ["-J", "name", "--hold"]),
        (' --comment="two words"', ["--comment=two words"]),
        (" --comment='it''s'", ["--comment=its"]),
        (' --comment="a\'b"', ["--comment=a'b"]),
        (" --comment='a\"b'", ['--comment=a"b']),
        (r" --comment=two\ words", ["--comment=two", "words"]),
        (r' --comment="say \"hi\""', ['--comment=say "hi"']),
        (' --comment=""', ["--comment="]),
        (' ""', [""]),
        (" --model=chat # the small one", ["--model=chat"]),
        (" --model=chat#small", ["--model=chat"]),
        (r" --model=chat\#small", ["--model=chat#small"]),
        (' --comment="a # b" --hold', ["--comment=a # b", "--hold"]),
        (" --output=$HOME/%j.jsonl", ["--output=$HOME/%j.jsonl"]),
        (" --output=~/`id`.jsonl", ["--output=~/`id`.jsonl"]),
        ("\t--hold\t", ["--hold"]),
        ("", []),
    ],
)
def test_quotes_group_a_hash_ends_and_nothing_is_expanded(text: str, words: list[str]) -> None:
    assert directives.split(text) == words


@pytest.mark.parametrize("text", [' --comment="open', " --comment='open", " 'a\"b"])
def test_a_quote_that_never_ends_is_refused(text: str) -> None:
    with pytest.raises(directives.ScriptError, match="never closed"):
        directives.split(text)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (b"#!/bin/sh\n#FBATCH --hold\n", [(2, ("--hold",))]),
        (b"#!/bin/sh\n #FBATCH --hold\n", []),
        (b"#!/bin/sh\n##FBATCH --hold\n", []),
        (b"#!/bin/sh\n#fbatch --hold\n", []),
        (b"#!/bin/sh\n# FBATCH --hold\n", []),
        (b"#!/bin/sh\n#FBATCHES --hold\n", []),
        (b"#!/bin/sh\n#SBATCH --hold\n#FBATCH -H\n", [(3, ("-H",))]),
        (b"#!/bin/sh\n\n   \n# note\n#FBATCH -H\n", [(5, ("-H",))]),
        (b"#!/bin/sh\n  # indented note\n#FBATCH -H\n", [(3, ("-H",))]),
        (b'#!/bin/sh\n#FBATCH -J a\n{"x":1}\n#FBATCH -J b\n', [(2, ("-J", "a"))]),
        (b"#!/bin/sh\necho\n#FBATCH -J b\n", []),
        (b"#!/bin/sh\n#FBATCH -J a\n#FBATCH -J b", [(2, ("-J", "a")), (3, ("-J", "b"))]),
    ],
)
def test_the_marker_stands_at_column_0_until_the_first_command(
    script: bytes, found: list[tuple[int, tuple[str, ...]]]
) -> None:
    read = directives.read(script)
    assert [(each.line, each.words) for each in read.directives] == found


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"echo hello\n", "must start with #!"),
        (b" #!/bin/sh\n", "must start with #!"),
        (b"#!/bin/sh\r\n#FBATCH -H\r\n", "CRLF"),
        (b"#!/bin/sh\n#FBATCH -H\r\n", "CRLF"),
        (b"#!/bin/sh\n\0", "NUL"),
        (b"#!/bin/sh\n#FBATCH --comment=\xff\n", "line 2: a directive must be UTF-8"),
        (b'#!/bin/sh\n#FBATCH --comment="x\n', 'line 2: a " is never closed'),
    ],
)
def test_what_is_no_script_is_refused_with_the_reason(script: bytes, why: str) -> None:
    with pytest.raises(directives.ScriptError, match=why):
        directives.read(script)


@pytest.mark.parametrize(
    ("head", "is_requests"),
    [
        (b'{"custom_id": "1"}', True),
        (b'\xef\xbb\xbf\n {"custom_id"', True),
        (b"[1]", True),
        (b"#!/bin/sh\n{}", False),
        (b"", False),
        (b"hello", False),
    ],
)
def test_a_jsonl_file_is_told_from_a_script(head: bytes, is_requests: bool) -> None:
    assert directives.is_requests(head) is is_requests


def test_header_lines_are_those_before_the_first_command() -> None:
    assert directives.read(b"#!/bin/sh\n#FBATCH -H\n\n{}\n").header_lines == 3
