"""The frames of one answer: client bytes, and beside them the ids that the engine has handed out."""

from collections.abc import Mapping

from engines.replica import engine
from scheduler.contracts import frames


class Framing:
    """Makes them.

    Args:
        tap: the request's tap.

    Attributes:
        begun: the PROMPT frame was made; it stands before all others, once.
    """

    def __init__(self, tap: engine.Tap) -> None:
        self._tap = tap
        self.begun = False

    def prompt(self) -> bytes:
        """Return the PROMPT frame, or nothing where the engine knows no ids."""
        tap = self._tap
        if not tap.prompt_token_ids:
            return b""
        self.begun = True
        # One that goes on tells its reader what had to be computed again, not the ids again.
        ids = tap.prompt_token_ids if tap.begun is None else ()
        why_not, cached = tap.why_not.encode(), tap.cached_tokens
        return frames.Frame.of(frames.Kind.PROMPT, why_not, ids, chars=cached).encode()

    def data(self, payload: bytes) -> list[bytes]:
        """Return the frames of client bytes, with the ids that the engine has handed out by now."""
        tap = self._tap
        parts = [] if self.begun else [self.prompt()]
        taken = sorted(tap.take().items())
        for choice, ids in taken[:-1]:
            parts.append(frames.Frame.of(frames.Kind.DATA, b"", ids, choice).encode())
        choice, ids = taken[-1] if taken else (0, ())
        chars = tap.take_chars()
        if payload or ids:
            ahead = () if choice else tap.ahead
            frame = frames.Frame.of(frames.Kind.DATA, payload, ids, choice, chars, ahead)
            parts.append(frame.encode())
        return parts

    def rest(self) -> bytes:
        """Return what goes before an ERROR: ids whose text will not go out from here, ahead of it.

        An answer that had already ended in the engine is not told: going on behind its end would be wrong.
        """
        tap = self._tap
        taken = tap.take()
        tap.take_chars()
        mine = [*taken.pop(0, ()), *tap.ahead]
        parts = [
            frames.Frame.of(frames.Kind.DATA, b"", ids, n).encode() for n, ids in taken.items()
        ]
        ended = any(reason != "abort" for reason in tap.finish_reasons.values())
        if not tap.single:
            parts.append(frames.Frame.of(frames.Kind.DATA, b"", mine).encode())
        elif mine and not ended:
            parts.append(frames.Frame.of(frames.Kind.DATA, ahead=mine).encode())
        prompt = b"" if self.begun else self.prompt()
        return prompt + b"".join(parts)

    def end(self, finished: Mapping[int, str]) -> frames.End:
        """Return the end of a whole answer.

        Args:
            finished: why each choice ended, in the formatter's words, which go before the engine's.
        """
        reasons = {**self._tap.finish_reasons, **finished}
        ordered = tuple(reasons[choice] for choice in sorted(reasons))
        tap, begun = self._tap, self._tap.begun
        if begun is None:
            counts = tap.prompt_tokens, tap.cached_tokens, tap.output_tokens
            return frames.End(ordered, *counts, tap.estimated)
        output = len(begun.token_ids) + tap.output_tokens
        return frames.End(ordered, len(begun.prompt_token_ids), begun.cached_tokens, output)
