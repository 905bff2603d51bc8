-- slurmctld gives the script `slurm` and calls these two functions by name; its Lua may be 5.1 to 5.4.
std = "min"
read_globals = { "slurm" }
globals = { "slurm_job_submit", "slurm_job_modify" }
max_line_length = 110
