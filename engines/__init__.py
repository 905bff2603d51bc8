"""Engines: what runs inside a lease, from the agent down to the replica."""
