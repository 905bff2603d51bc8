"""A real Slurm cluster in a folder, for development, tests and the demo.

`up` starts munged, MariaDB, slurmdbd, slurmctld, several slurmd with pretend GPUs and slurmrestd, all from
Debian's packages, on free loopback ports, with every file in one folder; `down` ends them.
"""

from slurm_plugins.devcluster.cluster import down, status, up
from slurm_plugins.devcluster.site import DevClusterError, Shape, Site

__all__ = ["DevClusterError", "Shape", "Site", "down", "status", "up"]
