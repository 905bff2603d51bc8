"""Ports to Slurm. Little besides the standard library, so that it runs on a bare Slurm host."""
