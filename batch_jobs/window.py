"""How many lines may be in flight: additive increase, multiplicative decrease, as TCP does. Pure."""


class Window:
    """The window of one model.

    It doubles with each round of answers until the fleet first says that it is full, then grows by
    one a round and halves when the fleet says full, at most once for the lines of one round.
    """

    def __init__(self, first: int, most: int) -> None:
        self._size = float(min(first, most))
        self._most = most
        self._steep = True
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
        self._size = min(self._most, self._size + (1.0 if self._steep else 1.0 / self._size))

    def refused(self, sent_in: int) -> None:
        """Shrink: the fleet was too full for a line that was sent in round ``sent_in``."""
        if sent_in == self._round:
            self._round += 1
            self._steep = False
            self._size = max(1.0, self._size / 2)
