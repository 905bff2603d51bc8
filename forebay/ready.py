"""How a part tells its parent that it is ready: one JSON line on an inherited pipe."""

import json
import os
from collections.abc import Mapping


def tell(descriptor: int, news: Mapping[str, str]) -> None:
    """Write ``news`` and close the pipe; nobody listens on a negative descriptor."""
    if descriptor < 0:
        return
    os.write(descriptor, json.dumps(dict(news)).encode() + b"\n")
    os.close(descriptor)
