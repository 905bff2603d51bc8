"""Continuous batching counted in steps: the smallest engine that still shows why it beats static batches.

Time is a number of decode steps; prefill takes none. Admission is first in, first out and comes before the
step, the worst case of a sequence's KV (prompt plus all of its output) is reserved when it is admitted, and a
head that does not fit blocks those behind it. A static batch admits only while nothing runs. The mode is the
reference that the timed engine is held against; it knows no milliseconds.
"""

import collections
import dataclasses
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request: `arrival` in steps, `prompt` and `output` in tokens."""

    arrival: int
    prompt: int
    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        steps: steps from the first arrival's clock (step 0) to the last finish.
        mean_latency: steps from arrival to finish, mean over all requests.
        occupancy: busy slots ÷ (steps x slots), in [0, 1].
    """

    steps: int
    mean_latency: float
    occupancy: float


def reference_requests(count: int = 300, seed: int = 7) -> list[Request]:
    """Return the reference workload: Python's generator, gap, prompt and output drawn in this order."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    arrival = 0
    made: list[Request] = []
    for _ in range(count):
        arrival += draw.randint(0, 2)
        prompt = draw.randint(200, 2000)
        made.append(Request(arrival, prompt, draw.choice([20, 40, 80, 300, 600])))
    return made


def run(
    requests: Sequence[Request], *, slots: int, kv_tokens: int, continuous: bool = True
) -> Outcome:
    """Run all requests to their end.

    Args:
        requests: by arrival.
        slots: sequences that run at once.
        kv_tokens: tokens of KV cache.
        continuous: admit whenever there is room; false: only while nothing runs.

    Raises:
        ValueError: a request that can never fit.
    """
    for request in requests:
        if request.prompt + request.output > kv_tokens:
            raise ValueError(
                f"a request of {request.prompt + request.output} tokens never fits in {kv_tokens}"
            )
    waiting = collections.deque(requests)
    running: list[tuple[int, Request]] = []  # the step after which it has finished
    step = busy = latency = reserved = 0
    while waiting or running:
        if continuous or not running:
            while waiting and waiting[0].arrival <= step and len(running) < slots:
                need = waiting[0].prompt + waiting[0].output
                if reserved + need > kv_tokens:
                    break
                request = waiting.popleft()
                reserved += need
                running.append((step + request.output, request))
        busy += len(running)
        step += 1
        staying: list[tuple[int, Request]] = []
        for end, request in running:
            if end > step:
                staying.append((end, request))
            else:
                latency += step - request.arrival
                reserved -= request.prompt + request.output
        running = staying
    return Outcome(step, latency / max(1, len(requests)), busy / max(1, step * slots))
