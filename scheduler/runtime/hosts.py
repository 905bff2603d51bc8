"""Which gateways live, for the hosts that split the models' queues among them."""

from scheduler.contracts import fleet

# A link that breaks comes back within two seconds (`client.RETRY_MOST_S`): a blip must not move models.
GRACE_S = 3.0


class Hosts:
    """The gateways that offer admission, and since when one is gone."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float | None]] = {}
        self._told: tuple[fleet.Gateway, ...] = ()

    def heard(self, gateway_id: str, admission: str, now: float) -> None:
        """Note that a gateway speaks; one that offers no admission shares nothing."""
        if admission:
            self._known[gateway_id] = (admission, None)
        else:
            self._known.pop(gateway_id, None)

    def left(self, gateway_id: str, now: float) -> None:
        """Note that a gateway's link has ended: it has a moment to come back."""
        known = self._known.get(gateway_id)
        if known is not None:
            self._known[gateway_id] = (known[0], now)

    def live(self, now: float) -> tuple[fleet.Gateway, ...]:
        """Return those that speak, or did a moment ago, sorted by id."""
        for gateway_id, (_, gone) in list(self._known.items()):
            if gone is not None and now - gone > GRACE_S:
                del self._known[gateway_id]
        return tuple(
            fleet.Gateway(gateway_id, admission)
            for gateway_id, (admission, _) in sorted(self._known.items())
        )

    def changed(self, now: float) -> bool:
        """Whether the gateways are others than when this was asked last."""
        before, self._told = self._told, self.live(now)
        return before != self._told
