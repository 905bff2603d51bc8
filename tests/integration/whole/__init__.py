"""The whole installation on the real thing: real Slurm, real processes, the simulated engine."""
