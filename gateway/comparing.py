"""How requests fare on versions that are compared: told to the broker, which judges a rollout by it."""

from collections.abc import Iterable

from scheduler.contracts import fleet, observed, requests, usage

MOST = 500  # between two looks; a comparison needs no more of them, and failures always go first
DEATH_US = (
    10_000_000  # requests that one death costs are noticed within so long; one that cuts on lives
)
_FAILED = frozenset({usage.Outcome.ERROR, usage.Outcome.REPLICA_LOST})
_ASKED = frozenset({requests.Tier.INTERACTIVE.value, requests.Tier.STANDARD.value})


class Comparing:
    """Collects the trials of one gateway worker."""

    def __init__(self) -> None:
        self._models: frozenset[str] = frozenset()
        self._kept: list[observed.Trial] = []

    def follow(self, routes: Iterable[fleet.Route]) -> None:
        """Take the routes: models of one version compare nothing."""
        self._models = frozenset(
            route.model for route in routes if len(route.weights) > 1 or route.shadow
        )

    def note(self, row: usage.UsageRow, death: str = "") -> None:
        """Take a CLOSE row; what the caller or a full queue ended says nothing of a version.

        Args:
            row: the row.
            death: the replica's life that ended under it, "" if it lives on.
        """
        identity = row.identity
        if identity.model not in self._models or identity.tier not in _ASKED:
            return
        failed = row.outcome in _FAILED
        if not (failed or row.outcome is usage.Outcome.OK) or not identity.replica_id:
            return
        if len(self._kept) >= MOST and not failed:
            return
        if death:
            death = f"{death}@{row.ended_us // DEATH_US}"
        ttft_us = max(0, row.first_token_us - identity.started_us) if row.first_token_us else 0
        gaps = row.output_tokens - 1
        itl_us = max(0, row.ended_us - row.first_token_us) / gaps if ttft_us and gaps > 0 else 0.0
        self._kept.append(
            observed.Trial(
                identity.model, identity.version, failed, ttft_us / 1000, itl_us / 1000, death
            )
        )

    def take(self) -> list[observed.Trial]:
        """Return what has come since the last call."""
        taken, self._kept = self._kept, []
        return taken
