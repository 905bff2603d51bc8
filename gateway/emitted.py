"""What a request's client has got so far, over all attempts, and what follows when a replica is lost.

Nothing is decoded while all goes well: a frame costs the bytes of its ids and two sums. Pure.
"""

import enum
import re

from gateway import replica
from scheduler.contracts import errors, frames, quota, resume, usage

_CREATED = re.compile(rb'"created"\s*:\s*(\d+)')
_MISSES = 8  # tries at replicas that were gone before; the view forgets such within a second
_MOST_LOST = 8  # replicas of one request: who is at fault would be known long before
_FURTHER = 16  # tokens: steps are ahead of what was told of them, and frames may be of several
_FURTHER_BATCH = 96  # a line's ids come by 64, and up to 16 of them wait in the engine's process
_ENDED = re.compile(rb'"finish_reason"\s*:\s*"')


class Emitted:
    """The token ids and the text that went out, counted; one for a request.

    Attributes:
        tokens: tokens of all choices that are known, those ahead of their text included.
        spent: what the attempts that have ended cost the team.
        owed: rows of attempts that the team pays for if the answer is completed.
        left: the row of a try at a batch line that its runner left, or None.
        furthest: the most tokens that were known when a replica was lost.
    """

    __slots__ = (
        "_ahead", "_cached", "_chars", "_first", "_last", "_others", "_packed", "_prompt", "_why_not",
        "furthest", "left", "owed", "spent",
    )  # fmt: skip

    def __init__(self, begun: resume.Resume | None = None) -> None:
        self.spent = quota.NOTHING
        self.owed: tuple[usage.UsageRow, ...] = ()
        self.left: usage.UsageRow | None = None
        self.clear(begun)
        self.furthest = self.tokens

    def clear(self, begun: resume.Resume | None = None) -> None:
        """Forget an answer that begins anew; what it has cost stays.

        Args:
            begun: the beginning that the batch runner's journal holds of it.
        """
        self._prompt = b""
        self._cached = 0
        self._why_not = "its replica does not tell the tokens' ids"
        self._packed = bytearray()
        self._ahead = b""
        self._others = 0
        self._chars = 0
        self._first = b""
        self._last = b""
        if begun is not None:
            self._prompt = frames.pack(begun.prompt_token_ids)
            self._cached = begun.cached_tokens
            self._why_not = ""
            self._packed += frames.pack(begun.token_ids[: begun.shown])
            self._ahead = frames.pack(begun.token_ids[begun.shown :])

    @property
    def tokens(self) -> int:
        """How many tokens are known."""
        return (len(self._packed) + len(self._ahead)) // 4 + self._others

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length, 0 before it was told."""
        return len(self._prompt) // 4

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt the first attempt had from the prefix cache."""
        return self._cached

    @property
    def why_not(self) -> str:
        """Why the answer can't be resumed, or ""."""
        if not self._why_not and _ENDED.search(self._last):
            return "its end was lost"
        if not self._why_not and self._first and not _CREATED.search(self._first):
            return "its first chunk is of an unknown kind"
        return self._why_not

    def begin(self, prompt: frames.Frame) -> None:
        """Take the PROMPT frame; that of a resumed attempt tells nothing new."""
        if not self._prompt:
            self._prompt = prompt.packed
            self._cached = prompt.chars
            self._why_not = prompt.payload.decode(errors="replace")

    def add(self, frame: frames.Frame) -> None:
        """Take a DATA frame that was given to the client."""
        _, payload, packed, choice, chars, ahead = frame
        if choice:
            self._others += len(packed) >> 2
        elif packed or ahead:
            self._packed += packed
            self._ahead = ahead
        if payload:
            self._chars += chars
            self._last = payload
            if not self._first:
                self._first = payload

    def further(self, *, batch: bool) -> bool:
        """Whether the answer has come beyond where its replicas were lost, by more than a step or two.

        Args:
            batch: it is a batch line's, which are told less often.
        """
        return self.tokens >= self.furthest + (_FURTHER_BATCH if batch else _FURTHER)

    def resume(self, *, begun: bool) -> resume.Resume:
        """Return what another replica needs to go on.

        Args:
            begun: whether the client has got anything; a whole answer is sent at its end only.
        """
        created = _CREATED.search(self._first) if begun else None
        return resume.Resume(
            prompt_token_ids=frames.unpack(self._prompt),
            token_ids=frames.unpack(bytes(self._packed) + self._ahead),
            shown=len(self._packed) // 4,
            chars=self._chars if begun else 0,
            created=int(created.group(1)) if created else 0,
            cached_tokens=self._cached,
        )

    def spend(self, spent: quota.Spent, sign: int = 1) -> None:
        """Add what an attempt has cost the team (with -1: take it back)."""
        before = self.spent
        self.spent = quota.Spent(
            before.uncached_prompt_tokens + sign * spent.uncached_prompt_tokens,
            before.cached_prompt_tokens + sign * spent.cached_prompt_tokens,
            before.output_tokens + sign * spent.output_tokens,
        )


class Next(enum.Enum):
    """What follows the loss of a replica."""

    RESUME = "resume"  # elsewhere, from what the client has
    RESTART = "restart"  # elsewhere, from nothing: the client has nothing
    FAIL = "fail"


class Losses:
    """Decides what follows when a request's replica is lost, and in which words it ends.

    Whether the request itself is at fault is known where the company is known that it had there, see
    `scheduler.core.suspects`; only what failed on it while others went on counts here.

    Args:
        limit: so many engines may fail on one request; one that breaks them must not break them all.
        batch: of tier batch: its runner sends it again itself, from its journal.

    Attributes:
        next: what follows the last loss.
        died: the last replica was lost, and the request ran on it.
    """

    def __init__(self, limit: int, *, batch: bool) -> None:
        self._limit = limit
        self._batch = batch
        self._count = 0
        self._missed = 0
        self._engines = 0  # losses among them that were an engine's failure on this very request
        self.next = Next.FAIL
        self.died = False
        self._aside = False
        self._why = ""

    def after(self, lost: replica.Lost, emitted: Emitted, *, begun: bool) -> Next:
        """Count a loss; returns what follows, and keeps it in `next`."""
        worked = lost.computed or lost.kind is errors.EngineFailed
        counts = worked and lost.kind is not errors.Draining
        self._count += counts
        self._missed += not worked
        self._engines += lost.kind is errors.EngineFailed
        self.died = lost.computed and lost.kind is errors.ReplicaLost
        self._aside = counts and self._engines >= self._limit
        emitted.furthest = max(emitted.furthest, emitted.tokens)
        why_not = emitted.why_not
        if self._missed >= _MISSES:
            self.next = Next.FAIL
            self._why = f"no replica can be reached, {self._missed} were tried: try again later"
        elif self._aside:
            self.next = Next.FAIL
            self._why = (
                f"engines failed on this request {self._engines} times, and go on with others: it is set "
                "aside, do not send it again as it is"
            )
        elif counts and (self._limit == 1 or self._count >= _MOST_LOST):
            self.next = Next.FAIL
            self._why = (
                f"replica number {self._count} that worked on this request was lost: send it again"
            )
        elif self._batch and lost.computed:
            self.next = Next.FAIL
            self._why = "the replica was lost during the answer: send the request again"
        elif (begun or emitted.tokens) and not why_not:
            self.next = Next.RESUME
        elif not begun:
            self.next = Next.RESTART
        else:
            self.next = Next.FAIL
            self._why = (
                "the replica was lost during the answer, which can't be resumed since "
                f"{why_not}: send the request again"
            )
        return self.next

    def error(self) -> errors.ForebayError:
        """Return the error that a request ends in after `Next.FAIL`."""
        # No replica was lost over it: a batch line must not count it as one.
        if self._missed >= _MISSES:
            return errors.NoReplica(self._why, retry_after_s=1.0)
        if self._aside:
            return errors.EngineFailed(self._why)
        return errors.ReplicaLost(self._why, retry_after_s=1.0)
