"""The trunk of a gateway worker to a replica: one connection for the frames of all its streams there.

An engine gives every stream that runs a token at the same step. On connections of their own these are as
many reads for the gateway; on the trunk they are one. It is one long `POST` to `PATH`, with an id of the
gateway's choice in `HEADER`, whose response goes on for as long as both live. A stream that is to be heard
there says so in the same header of its own request, as ``id.number``; a replica that knows no such trunk
answers on the stream's own connection, as always. That connection stays for the status, for the end of the
answer's body, and to be closed by who no longer listens.

Response body, network byte order: `RECORD` (stream u32, bytes u32), then so many octets of whole frames
(`scheduler.contracts.frames`) of that stream. Request body: `WORD`s, by which the gateway stops and starts
a stream whose client is behind: it must not fill the gateway's memory, nor hold up the others.
"""

import struct

PATH = "/forebay/trunk"
HEADER = "x-forebay-trunk"
MEDIA_TYPE = "application/vnd.forebay.trunk"
RECORD = struct.Struct("!II")
WORD = struct.Struct("!BI")  # PAUSE or RESUME, and the stream
PAUSE = 1
RESUME = 2
MOST_NUMBER = 2**32 - 1


def named(trunk: str, number: int) -> str:
    """Return what a stream's request says in `HEADER`."""
    return f"{trunk}.{number}"


def parse(value: str) -> tuple[str, int] | None:
    """Read what `named` has written; None for anything else."""
    trunk, _, number = value.rpartition(".")
    if not trunk or not number.isascii() or not number.isdigit() or len(number) > 10:
        return None
    parsed = int(number)
    return (trunk, parsed) if parsed <= MOST_NUMBER else None
