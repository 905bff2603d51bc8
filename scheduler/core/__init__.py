"""Decisions as pure functions: a snapshot goes in, a plan comes out. No clock, no randomness, no I/O."""
