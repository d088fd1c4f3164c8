"""What all wings use: errors, run directory, configuration, Slurm, curves, output."""
