"""A real Slurm cluster in one folder, for tests and demos."""
