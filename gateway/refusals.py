"""What a caller is told who can't wait, or waited in vain."""

import math

from scheduler.contracts import errors, requests
from scheduler.core import admission

NO_REPLICA_RETRY_S = 5.0
FAULT_RETRY_S = 60.0  # somebody has to mend it first


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


def no_spare(model: str) -> errors.Shed:
    """Return the error of a request that wants a seat which nobody waits for, where there is none."""
    return errors.Shed(f"model {model}: no seat is to spare", retry_after_s=NO_REPLICA_RETRY_S)


def expired(model: str, start_s: float = 0.0) -> errors.Expired:
    """Return the error of a request that waited until its deadline.

    Args:
        model: the model.
        start_s: that a start of it took lately, where it waited for one; else 0.
    """
    if not start_s:
        return errors.Expired(f"model {model}: no replica was free before the deadline passed")
    return errors.Expired(
        f"model {model}: no replica was up before the deadline passed, one took {start_s:.0f} s to start "
        "lately; ask again, or give it more time",
        retry_after_s=start_s,
    )


def no_replica(model: str, start_s: float = 0.0) -> errors.NoReplica:
    """Return the error of a request for which no replica is there and none is coming.

    Args:
        model: the model.
        start_s: that a start of it took lately; 0 if none is known. The demand that its requests leave has
            one started, where the model may have any.
    """
    took = f", one took {start_s:.0f} s to start lately" if start_s else ""
    return errors.NoReplica(
        f"model {model}: no replica is up and none is starting{took}; try again later",
        retry_after_s=max(NO_REPLICA_RETRY_S, start_s),
    )


def cold(model: str, adapter: str, load_s: float) -> errors.Expired:
    """Return the error of a request whose adapter was not loaded before its deadline.

    Args:
        model: the model.
        adapter: its adapter, which a replica is loading now, or will when it has room.
        load_s: that loads of the model took, at most; 0 if none is known.
    """
    return errors.Expired(
        f"model {model}: adapter {adapter} was not loaded before the deadline passed; ask again, or "
        "give it more time",
        retry_after_s=max(1.0, math.ceil(load_s)),
    )


def adapter_fault(model: str, adapter: str, reason: str) -> errors.NoReplica:
    """Return the error of a request for an adapter that no replica can serve."""
    return errors.NoReplica(
        f"model {model}: adapter {adapter} can't be served now: {reason}",
        retry_after_s=FAULT_RETRY_S,
    )


def blamed(tier: requests.Tier, suspected: int, blame: errors.Blame) -> errors.ReplicaLost | None:
    """Return what a request hears whose replica was lost; None: it waits again.

    A batch line does not: its runner sends it again, and is told what part it had.
    """
    if blame is errors.Blame.ALONE:
        told = errors.ReplicaLost(
            f"{suspected + 1} replicas were lost as they worked on this request, the last with no "
            "other suspect there: it is set aside, do not send it again as it is"
        )
    elif tier is requests.Tier.BATCH:
        words = "the replica was lost during the answer: send the request again"
        told = errors.ReplicaLost(words, retry_after_s=1.0)
    else:
        return None
    if tier is requests.Tier.BATCH:
        told.blame = blame
    return told


def no_view() -> errors.NoReplica:
    """Return the error before the first word of the broker."""
    return errors.NoReplica(
        "the gateway has not heard of the fleet yet: ask again", retry_after_s=1.0
    )
