"""Studies on this machine and through Slurm: starting their runs, and how they stand."""
