"""`#FBATCH` lines in a script, read by sbatch's rules: pure, bytes in, words out.

The marker stands at column 0, case-sensitive. Scanning stops at the first line that is neither blank
nor a comment. Quotes group, a backslash escapes, an unescaped # ends the line, nothing is expanded.
"""

import dataclasses

MARKER = "#FBATCH"


class ScriptError(ValueError):
    """The script is refused; the message says why and where."""


@dataclasses.dataclass(frozen=True, slots=True)
class Directive:
    """One `#FBATCH` line: its number from 1, and its words."""

    line: int
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A script's directives, and how many lines stand before the first that is not a comment."""

    directives: tuple[Directive, ...]
    header_lines: int


def is_requests(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is JSONL rather than a script."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def read(script: bytes) -> Script:
    """Read a script's directives.

    Raises:
        ScriptError: empty, no ``#!``, CRLF, NUL, not UTF-8 in its head, or a quote that never ends.
    """
    if not script.strip():
        raise ScriptError("the script is empty")
    if not script.startswith(b"#!"):
        raise ScriptError(
            "this is no batch script: its first line must start with #!, as in #!/bin/sh"
        )
    if b"\r\n" in script:
        raise ScriptError(
            "the script has DOS line breaks (CRLF): convert it, for example with dos2unix"
        )
    if b"\0" in script:
        raise ScriptError("the script contains a NUL byte")
    found = []
    header = 0
    for raw in script.split(b"\n"):
        stripped = raw.strip()
        if stripped and not stripped.startswith(b"#"):
            break
        header += 1
        words = _directive(raw, header)
        if words:
            found.append(Directive(header, words))
    return Script(tuple(found), header)


def _directive(raw: bytes, number: int) -> tuple[str, ...]:
    if not raw.startswith(MARKER.encode()):
        return ()
    try:
        line = raw.decode()
    except UnicodeDecodeError:
        raise ScriptError(f"line {number}: a directive must be UTF-8") from None
    rest = line[len(MARKER) :]
    if rest and not (rest[0].isspace() or rest[0] == "-"):  # sbatch needs no blank between
        return ()
    try:
        return tuple(split(rest))
    except ScriptError as error:
        raise ScriptError(f"line {number}: {error}") from None


def split(text: str) -> list[str]:
    """Split a directive's text into words by sbatch's rules.

    Raises:
        ScriptError: a quote that never ends.
    """
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    characters = iter(text)
    for character in characters:
        if not quote and character == "#":
            break
        if not quote and character.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if character == "\\":
            following = next(characters, "")
            if not quote and following.isspace():  # as sbatch: quotes group, a backslash does not
                words.append("".join(word))
                word = None
            else:
                word.append(following)
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        else:
            word.append(character)
    if quote:
        raise ScriptError(f"a {quote} is never closed")
    if word is not None:
        words.append("".join(word))
    return words
