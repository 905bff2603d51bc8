"""The gateway's doors: served by one process or by several, and where the other parts find them.

Only what is asked for is loaded: who starts several processes, or looks for the doors, serves nothing.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from forebay import installation
from gateway import settings as gateway_settings

Told = Callable[[Mapping[str, str]], None]
FILE = "gateway.json"


async def gateway(here: installation.Installation, told: Told) -> None:
    """Run a gateway until SIGTERM: one process, or as many workers as the site has set."""
    if here.config.table(gateway_settings.GatewaySettings).workers > 1:
        from forebay import crowd

        await crowd.gateway(here, told)
    else:
        from forebay import gateway_service

        await gateway_service.whole(here, told)


def publish(path: Path, news: Mapping[str, str]) -> None:
    """Leave a gateway's addresses for the other parts of the installation."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(dict(news)))
    fresh.replace(path)


def address(state: Path) -> dict[str, str]:
    """Return what the gateway on this state folder said of its addresses.

    Raises:
        OSError: it never ran.
    """
    found: dict[str, str] = json.loads((state / FILE).read_text())
    return found
