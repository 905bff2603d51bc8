"""Which gateway owns a model's queue. Pure."""

import hashlib
from collections.abc import Iterable

from scheduler.contracts import fleet


def owner(model: str, gateways: Iterable[fleet.Gateway]) -> fleet.Gateway | None:
    """Return the gateway that admits for ``model``, None without any.

    Rendezvous hashing (Thaler and Ravishankar, 1998): every host finds the same without asking, and a host
    that comes or goes moves only the models that it gets or had.
    """
    return max(gateways, key=lambda one: _claim(model, one.gateway_id), default=None)


def _claim(model: str, gateway_id: str) -> bytes:
    text = f"{model}\0{gateway_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()
