"""What a request asks of admission, worked out beside the loop where its body is large (`apart`).

Thirty thousand tools are written out to be counted, and a million token ids to be told from others: that
is a tenth of a second and more, in which no stream would go on.
"""

from gateway import apart, asks
from scheduler.contracts import fleet, requests


class Measuring:
    """Makes askings.

    Args:
        large: where large bodies are worked on.
        chunk_bytes: of prompts' fingerprints.
    """

    def __init__(self, large: apart.Apart, chunk_bytes: int) -> None:
        self._large = large
        self._chunk_bytes = chunk_bytes

    async def asking(
        self, request: requests.InferenceRequest, route: fleet.Route | None
    ) -> asks.Asking:
        """Return what ``request``, whose model has ``route``, asks of admission."""
        several = route is not None and len(route.weights) > 1
        return await self._large.do(
            request.size or len(request.raw),
            lambda: asks.of(request, self._chunk_bytes, several=several),
        )
