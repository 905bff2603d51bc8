"""What Slurm itself runs: the submit plugin, prolog and epilog."""
