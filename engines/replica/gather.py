"""How many of a stream's tokens share a frame: with few streams none, with many a few. Pure.

What a streamed token costs a gateway is the frame, not the token: four to a frame are nearly four times
as cheap. The first token of an answer and its last never wait.
"""

FEW = 32  # so many streams get each token in a frame of its own
MOST = 4  # tokens in a frame; past it a reader sees the text jump
TOLD_S = 1.0  # how often the ids of a whole answer are told to whoever keeps them
LATEST_S = 0.05  # a token waits no longer for the next ones


def tokens(streams: int) -> int:
    """Return how many tokens of a stream to gather in a frame while ``streams`` run in this replica."""
    return min(MOST, 1 + max(0, streams - 1) // FEW)
