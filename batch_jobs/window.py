"""How many lines may be in flight: additive increase, multiplicative decrease, as TCP does. Pure."""


class Window:
    """The window of one model.

    It doubles with each round of answers up to a threshold, then grows by one a round; a refusal
    halves it, at most once for the lines of one round, and sets the threshold to half of what last
    worked. So a spike that drives it down to one line is followed by a quick way back.
    """

    def __init__(self, first: int, most: int) -> None:
        self._size = float(min(first, most))
        self._most = most
        self._threshold = float(most)
        self._worked = True  # a line was answered since the last refusal
        self._round = (
            0  # counts halvings: a refusal of a line sent before the last one says nothing new
        )

    @property
    def size(self) -> int:
        """Lines that may be in flight, at least one."""
        return max(1, int(self._size))

    @property
    def round(self) -> int:
        """To be kept with a line when it is sent, and given back to `refused`."""
        return self._round

    def answered(self) -> None:
        """Grow: a line was answered."""
        self._worked = True
        step = 1.0 if self._size < self._threshold else 1.0 / self._size
        self._size = min(self._most, self._size + step)

    def refused(self, sent_in: int) -> None:
        """Shrink: the fleet was too full for a line that was sent in round ``sent_in``."""
        if sent_in != self._round:
            return
        self._round += 1
        self._size = max(1.0, self._size / 2)
        if self._worked:
            self._threshold = self._size
            self._worked = False
