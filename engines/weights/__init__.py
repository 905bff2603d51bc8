"""Weights on a node's own disk: fetched once, checked, published whole, shared, evicted by use.

`sources` reads a place; `examine` judges what is there before a gigabyte moves; `store` is the disk's
folder with its locks; `staging` fills it; `budget` says what must go; `process` does all that in a process
of its own, which may be killed at any point; `stager` is a slot's way to it.
"""
