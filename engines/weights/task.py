"""What a staging is told. Apart from those who do it: whoever orders one needs no S3 client loaded."""

import dataclasses
import json
from typing import Any

from scheduler.contracts import stored, weights

# Bytes of a range: S3 and parallel file systems are near their best from 8 MiB on.
CHUNK = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How places are reached.

    Attributes:
        s3_endpoint: URL of an S3 service that is not Amazon's, "" for Amazon's.
        s3_region: region, "" for what the environment says.
        s3_credentials: an AWS credentials file that only we may read; "": the environment, or the
            machine's role.
    """

    s3_endpoint: str = ""
    s3_region: str = ""
    s3_credentials: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What to stage.

    Attributes:
        uri: its place.
        digest: the manifest's digest that it must have, or "".
        parallel: ranges that are fetched at once.
        chunk: bytes of a range.
        budget: most bytes of all weights on the disk, 0: no bound but the disk.
        reserve: bytes of the disk that stay free.
        unsafe: whether the site lets pickled weights in.
        ahead: nobody waits for it: evict nothing for it.
        adapter: it is a LoRA adapter, not a model.
    """

    uri: str
    digest: str = ""
    parallel: int = 8
    chunk: int = CHUNK
    budget: int = 0
    reserve: int = 0
    unsafe: bool = False
    ahead: bool = False
    adapter: bool = False

    @property
    def key(self) -> str:
        """Its name on the disk."""
        return weights.key(self.uri, self.digest)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the process is told.

    Attributes:
        root: the folder of the node's weights.
        order: what to stage.
        options: how places are reached.
        verify: do not stage, but compare what is on the disk with its manifest.
        patience: how many times a place that does not answer is asked again; -1: for ever.
    """

    root: str
    order: Order
    options: Options = dataclasses.field(default_factory=Options)
    patience: int = -1
    verify: bool = False

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Read what `to_json` wrote."""
        value: dict[str, Any] = json.loads(text)
        order = stored.read(Order, value["order"])
        return stored.read(cls, value, order=order, options=stored.read(Options, value["options"]))
