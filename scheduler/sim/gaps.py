"""How much of the GPU time that callers left over was lent to batch.

Of a replica callers need the part of the promised step that their own sequences take: prompts, decoding, and
the step's base while any of them runs. What is left of it is lent as far as batch runs in it. Starts are
neither, and counted apart. So is what was left while no model had batch work: nobody could have used it.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class Gaps:
    """GPU-seconds.

    Attributes:
        left_s: that callers did not need while batch had work; `lent_s` is part of it.
        lent_s: of these, in which batch ran.
        start_s: in which a replica started.
        no_work_s: that callers did not need while no batch job had work.
        unlent_s: what `left_s` has beside `lent_s`, by cause.
    """

    left_s: float = 0.0
    lent_s: float = 0.0
    start_s: float = 0.0
    no_work_s: float = 0.0
    unlent_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def starting(self, gpu_s: float) -> None:
        """Count a start."""
        self.start_s += gpu_s

    def left(self, gpu_s: float, *, lent: bool, work: bool, cause: str) -> None:
        """Count time that callers left over.

        Args:
            gpu_s: how much.
            lent: whether batch ran in it.
            work: whether any batch job had work.
            cause: why it was not lent, if it was not.
        """
        if lent:
            self.lent_s += gpu_s
        elif not work:
            self.no_work_s += gpu_s
            return
        else:
            self.unlent_s[cause] = self.unlent_s.get(cause, 0.0) + gpu_s
        self.left_s += gpu_s

    def result(self) -> dict[str, Any]:
        """Return the figures as the report has them; `share` is None where nothing was left."""
        return {
            "left_gpu_s": round(self.left_s),
            "lent_gpu_s": round(self.lent_s),
            "share": round(self.lent_s / self.left_s, 4) if self.left_s else None,
            "start_gpu_s": round(self.start_s),
            "no_work_gpu_s": round(self.no_work_s),
            "unlent_gpu_s": {cause: round(each) for cause, each in sorted(self.unlent_s.items())},
        }
