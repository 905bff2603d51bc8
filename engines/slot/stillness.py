"""Whether an engine that has work stands still."""

STEPS = 50  # an engine that stands still for so many of its own steps hangs
KILL_AFTER = 2.0  # times as long as it takes to leave the routes
FIRST = 4.0  # times as long for the first step of all: kernels may be compiled in it


class Stillness:
    """Looks at one engine's count of steps.

    Args:
        least_s: standing still for less is no fault.
        counts: whether it counts its steps; where it does not, none is only what it says.
    """

    def __init__(self, least_s: float, *, counts: bool = True) -> None:
        self._least_s = least_s
        self._counts = counts
        self.reset()

    def reset(self) -> None:
        """Begin anew: it is another process, or it slept."""
        self._steps, self._since = -1, 0.0

    def look(self, steps: int, running: int, step_ms: float, now: float) -> tuple[str, bool]:
        """Return what is wrong, or "", and whether it is to be killed for it."""
        silent = steps == 0 and not self._counts
        if steps != self._steps or running == 0 or silent:
            self._steps, self._since = steps, now
        still = now - self._since
        patience = max(self._least_s, STEPS * step_ms / 1_000) * (1.0 if steps else FIRST)
        wrong = f"engine has work and made no step for {still:.0f} s"
        return (wrong if still >= patience else ""), still >= KILL_AFTER * patience
