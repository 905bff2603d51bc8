"""What the parts of Forebay say to each other: words, records, errors and ports. No decisions.

The lowest layer: it imports nothing of Forebay, and little besides the standard library, so that it
loads on a bare Slurm node and inside an engine's own environment.
"""
