"""What a caller is told who can't wait, or waited in vain."""

from scheduler.contracts import errors, requests
from scheduler.core import admission

NO_REPLICA_RETRY_S = 5.0


class Moved(errors.NoReplica):
    """The request waits with another owner now; never told to a caller."""

    code = "moved"


def refusal(model: str, tier: requests.Tier, refused: admission.Refused) -> errors.ForebayError:
    """Return the error of a request that the queue has refused."""
    match refused.reason:
        case admission.Reason.QUEUE_FULL:
            return shed(tier, refused.retry_after_s)
        case admission.Reason.EXPIRED:
            return expired(model)
        case admission.Reason.UNMEETABLE:
            return errors.Expired(
                f"model {model}: the queue is longer than the deadline allows; give it more time or "
                "try later",
                retry_after_s=refused.retry_after_s,
            )


def shed(tier: requests.Tier, retry_after_s: float) -> errors.Shed:
    """Return the error of a request for which there is no place in the queue."""
    return errors.Shed(
        f"too many {tier.value} requests wait: try again after {retry_after_s:.0f} s",
        retry_after_s=retry_after_s,
    )


def expired(model: str) -> errors.Expired:
    """Return the error of a request that waited until its deadline."""
    return errors.Expired(f"model {model}: no replica was free before the deadline passed")


def no_replica(model: str) -> errors.NoReplica:
    """Return the error of a request for which no replica is there and none is coming."""
    return errors.NoReplica(
        f"model {model}: no replica is up and none is starting; try again later",
        retry_after_s=NO_REPLICA_RETRY_S,
    )


def no_view() -> errors.NoReplica:
    """Return the error before the first word of the broker."""
    return errors.NoReplica(
        "the gateway has not heard of the fleet yet: ask again", retry_after_s=1.0
    )
