"""What a slot gives each of its keepers to work with."""

import dataclasses
from collections.abc import Callable, Mapping

import aiohttp

from engines.slot import occupancy, spec, starters
from engines.weights import stager
from scheduler.contracts import clock


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """What a keeper works with.

    Attributes:
        slot: the slot's spec.
        node: this node's name.
        gpus: the slot's GPUs as CUDA names them here, and their names on the whole node.
        held: holder by GPU among the slot's replicas, as of now.
        starter: starts processes.
        session: HTTP client for control paths.
        notes: who holds which GPU of the node.
        stager: has weights on this node's disk.
        time: the clock.
        changed: called when the report is another one; true: tell it at once.
    """

    slot: spec.SlotSpec
    node: str
    host: str
    gpus: Mapping[str, str]
    held: Callable[[], Mapping[str, str]]
    starter: starters.Starter
    session: aiohttp.ClientSession
    notes: occupancy.Occupancy
    stager: stager.Provider
    time: clock.Clock
    changed: Callable[[bool], None]
