"""The composition root: wires ports to clients and starts processes. Nothing else."""
